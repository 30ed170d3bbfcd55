"""The control packets of MQTT 3.1.1 and 5, as values; a client of 3.1.1 sends and gets them without properties.

Whoever receives a packet may keep it; nobody changes one. Times are in seconds, as names in `_s` say.
"""

from __future__ import annotations

from typing import TypedDict

import attrs

from qflow.mqtt.errors import ReasonCode
from qflow.named_tuples import NamedTuple

MQTT_3_1_1, MQTT_5 = 4, 5
"""Protocol levels, which are the versions of this package."""
NEVER_EXPIRES_S = 0xFFFFFFFF
"""A session expiry that is no end: MQTT 5.0, section 3.1.2.11.2."""


class Properties(TypedDict, total=False):
    """Properties of MQTT 5 by name, those that are there; which packet has which is in `properties.py`."""

    payload_format: int
    """0: bytes, 1: UTF-8."""
    message_expiry_s: int
    content_type: str
    response_topic: str
    correlation_data: bytes
    subscription_identifiers: list[int]
    """Of a SUBSCRIBE: one."""
    session_expiry_s: int
    assigned_client_id: str
    server_keep_alive_s: int
    authentication_method: str
    authentication_data: bytes
    request_problem_information: int
    will_delay_s: int
    request_response_information: int
    response_information: str
    server_reference: str
    reason_string: str
    receive_maximum: int
    topic_alias_maximum: int
    topic_alias: int
    maximum_qos: int
    retain_available: int
    user_properties: list[tuple[str, str]]
    maximum_packet_bytes: int
    wildcard_subscription_available: int
    subscription_identifiers_available: int
    shared_subscription_available: int


def _none() -> Properties:
    return {}


@attrs.define
class Will:
    """What is published when the client is gone; `properties` with `will_delay_s`."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    properties: Properties = attrs.field(factory=_none)


@attrs.define
class Connect:
    """`client_id` is empty if the server shall assign one; `keep_alive_s` is 0 for none."""

    version: int
    client_id: str
    clean_start: bool = True
    """In 3.1.1 "clean session"."""
    keep_alive_s: int = 0
    username: str | None = None
    password: bytes | None = attrs.field(default=None, repr=False)
    will: Will | None = None
    properties: Properties = attrs.field(factory=_none)

    @property
    def session_expiry_s(self) -> int:
        """Seconds after the connection has ended; 0 ends the session with it, `NEVER_EXPIRES_S` is no end."""
        if self.version == MQTT_5:
            return self.properties.get("session_expiry_s", 0)
        return 0 if self.clean_start else NEVER_EXPIRES_S


@attrs.define
class Connack:
    """A client of 3.1.1 is told the return code nearest to `code`, or none, and the connection is closed."""

    code: int = ReasonCode.SUCCESS
    session_present: bool = False
    properties: Properties = attrs.field(factory=_none)


@attrs.define
class Publish:
    """A message from a client; an alias is resolved to its topic, so that `topic` is never empty."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    dup: bool = False
    packet_id: int = 0
    """0 with QoS 0."""
    properties: Properties = attrs.field(factory=_none)


@attrs.define
class Acknowledgement:
    """What the packets of the exchanges with QoS 1 and 2 have, all of them the same."""

    packet_id: int
    code: int = ReasonCode.SUCCESS
    properties: Properties = attrs.field(factory=_none)


class Puback(Acknowledgement):
    __slots__ = ()


class Pubrec(Acknowledgement):
    __slots__ = ()


class Pubrel(Acknowledgement):
    __slots__ = ()


class Pubcomp(Acknowledgement):
    __slots__ = ()


class Subscription(NamedTuple):
    """A filter of a SUBSCRIBE with its options; with `$share/group/` before it if it is shared: see `topics.py`.

    A client of 3.1.1 says `filter` and `qos` alone.
    """

    filter: str
    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    """0: send retained messages, 1: if the subscription is new, 2: send none."""


@attrs.define
class Subscribe:
    packet_id: int
    subscriptions: list[Subscription]
    properties: Properties = attrs.field(factory=_none)


@attrs.define
class Suback:
    """One code for each filter: the granted QoS, or from 0x80 on a refusal, which 3.1.1 is told as 0x80."""

    packet_id: int
    codes: list[int]
    properties: Properties = attrs.field(factory=_none)


@attrs.define
class Unsubscribe:
    packet_id: int
    filters: list[str]
    properties: Properties = attrs.field(factory=_none)


@attrs.define
class Unsuback:
    """One code for each filter, of which 3.1.1 is told nothing."""

    packet_id: int
    codes: list[int]
    properties: Properties = attrs.field(factory=_none)


@attrs.define
class Disconnect:
    """From a client: nothing follows. To one of 3.1.1: nothing is sent, the connection is closed."""

    code: int = ReasonCode.SUCCESS
    properties: Properties = attrs.field(factory=_none)


@attrs.define
class Auth:
    """Of a client that named an authentication method in its CONNECT, of MQTT 5 alone."""

    code: int = ReasonCode.SUCCESS
    properties: Properties = attrs.field(factory=_none)


@attrs.define
class Failed:
    """No packet: the machine ended the connection because of what the client sent.

    The client's answer, if its version has one, is among the bytes to send; nothing is read any more.
    """

    code: ReasonCode
    text: str


Event = Connect | Publish | Puback | Pubrec | Pubrel | Pubcomp | Subscribe | Unsubscribe | Disconnect | Auth | Failed
"""What a server's machine tells of the bytes it received."""
Answer = Connack | Puback | Pubrec | Pubrel | Pubcomp | Suback | Unsuback | Disconnect | Auth
"""What a server sends beside publishes."""
