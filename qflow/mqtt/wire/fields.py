"""The data types of MQTT: integers of variable length, strings and binary data, each of which may be cut short.

Readers get a buffer, where to begin and where the packet ends; they return the value and where it ends.
"""

from __future__ import annotations

import reprlib

from qflow.errors import InvalidArgument
from qflow.mqtt.errors import MqttError, ReasonCode

MAX_VARIABLE = 268_435_455
MAX_FIELD_BYTES = 65_535
_ENDS_EARLY = "a packet ends within one of its fields"

quote = reprlib.Repr()
quote.maxstring = quote.maxother = 120  # an error names what came, and not 64 KiB of it


def malformed(text: str) -> MqttError:
    """Return the error for what is no packet."""
    return MqttError(ReasonCode.MALFORMED_PACKET, text)


def protocol_error(text: str) -> MqttError:
    """Return the error for a packet that may not come, or not now."""
    return MqttError(ReasonCode.PROTOCOL_ERROR, text)


def read_byte(buffer: bytes, at: int, end: int) -> tuple[int, int]:
    if at >= end:
        raise malformed(_ENDS_EARLY)
    return buffer[at], at + 1


def read_two(buffer: bytes, at: int, end: int) -> tuple[int, int]:
    if at + 2 > end:
        raise malformed(_ENDS_EARLY)
    return buffer[at] << 8 | buffer[at + 1], at + 2


def read_four(buffer: bytes, at: int, end: int) -> tuple[int, int]:
    if at + 4 > end:
        raise malformed(_ENDS_EARLY)
    return int.from_bytes(buffer[at : at + 4]), at + 4


def read_variable(buffer: bytes, at: int, end: int) -> tuple[int, int]:
    """Read 1 to 4 bytes, of which there may be none too many: MQTT 5.0, section 1.5.5."""
    value = 0
    for shift in (0, 7, 14, 21):
        if at >= end:
            raise malformed(_ENDS_EARLY)
        byte = buffer[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            if shift and not byte:
                raise malformed("an integer of variable length takes more bytes than it needs")
            return value, at
    raise malformed("an integer of variable length takes more than 4 bytes")


def read_binary(buffer: bytes, at: int, end: int) -> tuple[bytes, int]:
    start = at + 2
    if start > end:
        raise malformed(_ENDS_EARLY)
    stop = start + (buffer[at] << 8 | buffer[at + 1])
    if stop > end:
        raise malformed(_ENDS_EARLY)
    return buffer[start:stop], stop


def read_string(buffer: bytes, at: int, end: int) -> tuple[str, int]:
    raw, at = read_binary(buffer, at, end)
    return as_text(raw), at


def as_text(raw: bytes) -> str:
    """Decode UTF-8 as MQTT has it: no surrogates, no NUL."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise malformed(f"{quote.repr(raw)} is no UTF-8: {error.reason}") from error
    if "\0" in text:
        raise malformed(f"a string contains NUL: {quote.repr(text)}")
    return text


def has_place(text: str) -> bool:
    """Tell whether a string of a packet can be this text."""
    try:
        return "\0" not in text and len(text.encode()) <= MAX_FIELD_BYTES
    except UnicodeEncodeError:
        return False


def variable(value: int) -> bytes:
    """Encode an integer of variable length."""
    if value < 128:
        return bytes((value,))
    if value < 16_384:
        return bytes((value & 127 | 128, value >> 7))
    if value > MAX_VARIABLE:
        raise InvalidArgument(f"a packet of MQTT has at most {MAX_VARIABLE:,} bytes behind its header, not {value:,}")
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def binary(value: bytes, what: str) -> bytes:
    """Encode binary data; an error names `what` it is."""
    if len(value) > MAX_FIELD_BYTES:
        raise InvalidArgument(f"{what} of {len(value):,} bytes: MQTT has a place for {MAX_FIELD_BYTES:,}")
    return len(value).to_bytes(2) + value


def string(text: str, what: str) -> bytes:
    """Encode a string; an error names `what` it is."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} {quote.repr(text)} cannot be encoded as UTF-8: {error.reason}") from error
    if b"\0" in encoded:
        raise InvalidArgument(f"{what} {quote.repr(text)} contains NUL, which MQTT has no place for")
    return binary(encoded, what)
