"""What an MQTT client is answered when something is wrong: a reason code of MQTT 5, and a text.

The codes are those of MQTT 5.0, section 2.4; `RETURN_CODES` maps those that a CONNACK of MQTT 3.1.1 can tell.
"""

from __future__ import annotations

from enum import IntEnum

from qflow.errors import BrokerClosed, DiskFull, InvalidArgument, MessageTooLarge, QflowError


class ReasonCode(IntEnum):
    """Reason codes by name; from 0x80 on they are errors."""

    SUCCESS = 0x00
    """Also: normal disconnection, QoS 0 granted."""
    GRANTED_QOS_1 = 0x01
    GRANTED_QOS_2 = 0x02
    DISCONNECT_WITH_WILL = 0x04
    NO_MATCHING_SUBSCRIBERS = 0x10
    NO_SUBSCRIPTION_EXISTED = 0x11
    CONTINUE_AUTHENTICATION = 0x18
    RE_AUTHENTICATE = 0x19
    UNSPECIFIED = 0x80
    MALFORMED_PACKET = 0x81
    PROTOCOL_ERROR = 0x82
    IMPLEMENTATION_SPECIFIC = 0x83
    UNSUPPORTED_PROTOCOL_VERSION = 0x84
    CLIENT_ID_NOT_VALID = 0x85
    BAD_USERNAME_OR_PASSWORD = 0x86
    NOT_AUTHORIZED = 0x87
    SERVER_UNAVAILABLE = 0x88
    SERVER_BUSY = 0x89
    BANNED = 0x8A
    SERVER_SHUTTING_DOWN = 0x8B
    BAD_AUTHENTICATION_METHOD = 0x8C
    KEEP_ALIVE_TIMEOUT = 0x8D
    SESSION_TAKEN_OVER = 0x8E
    TOPIC_FILTER_INVALID = 0x8F
    TOPIC_NAME_INVALID = 0x90
    PACKET_ID_IN_USE = 0x91
    PACKET_ID_NOT_FOUND = 0x92
    RECEIVE_MAXIMUM_EXCEEDED = 0x93
    TOPIC_ALIAS_INVALID = 0x94
    PACKET_TOO_LARGE = 0x95
    MESSAGE_RATE_TOO_HIGH = 0x96
    QUOTA_EXCEEDED = 0x97
    ADMINISTRATIVE_ACTION = 0x98
    PAYLOAD_FORMAT_INVALID = 0x99
    RETAIN_NOT_SUPPORTED = 0x9A
    QOS_NOT_SUPPORTED = 0x9B
    USE_ANOTHER_SERVER = 0x9C
    SERVER_MOVED = 0x9D
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED = 0x9E
    CONNECTION_RATE_EXCEEDED = 0x9F
    MAXIMUM_CONNECT_TIME = 0xA0
    SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED = 0xA1
    WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED = 0xA2


RETURN_CODES = {
    ReasonCode.SUCCESS: 0,
    ReasonCode.UNSUPPORTED_PROTOCOL_VERSION: 1,
    ReasonCode.CLIENT_ID_NOT_VALID: 2,
    ReasonCode.SERVER_UNAVAILABLE: 3,
    ReasonCode.SERVER_BUSY: 3,
    ReasonCode.SERVER_SHUTTING_DOWN: 3,
    ReasonCode.QUOTA_EXCEEDED: 3,
    ReasonCode.USE_ANOTHER_SERVER: 3,
    ReasonCode.SERVER_MOVED: 3,
    ReasonCode.CONNECTION_RATE_EXCEEDED: 3,
    ReasonCode.BAD_USERNAME_OR_PASSWORD: 4,
    ReasonCode.BAD_AUTHENTICATION_METHOD: 4,
    ReasonCode.NOT_AUTHORIZED: 5,
    ReasonCode.BANNED: 5,
}
"""Of a CONNACK of MQTT 3.1.1, section 3.2.2.3; any other code closes the connection without a CONNACK."""


class MqttError(QflowError):
    """A request that is refused, with the reason code that the client is told."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = ReasonCode(code)
        self.text = text

    def __str__(self) -> str:
        return f"0x{self.code:02X} {self.code.name}: {self.text}"


_CODES: tuple[tuple[type[QflowError], ReasonCode], ...] = (
    (BrokerClosed, ReasonCode.SERVER_SHUTTING_DOWN),
    (DiskFull, ReasonCode.QUOTA_EXCEEDED),
    (MessageTooLarge, ReasonCode.PACKET_TOO_LARGE),
    (InvalidArgument, ReasonCode.IMPLEMENTATION_SPECIFIC),
)


def as_mqtt_error(error: QflowError) -> MqttError:
    """Return what a client is told of an error of the broker."""
    if isinstance(error, MqttError):
        return error
    code = next((code for kind, code in _CODES if isinstance(error, kind)), ReasonCode.UNSPECIFIED)
    return MqttError(code, str(error))
