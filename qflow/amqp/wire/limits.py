"""How much a client may make this side keep or do."""

from __future__ import annotations

from qflow.named_tuples import NamedTuple

MIB = 1 << 20


class Limits(NamedTuple):
    """What is proposed to clients, and what is refused.

    A connection holds at most `frame_max` bytes of a frame that is not whole, `max_assembling_bytes` of messages
    that are not whole, and `channel_max` channels.
    """

    frame_max: int = 131_072
    """Bytes of a frame, its header and end included, that is proposed; a client may agree to less, not to more."""
    frame_min: int = 4096
    """Bytes of a frame that every side takes; more is refused before the login and the tuning."""
    channel_max: int = 2047
    heartbeat_s: int = 60
    """Proposed; a client may choose any other, and 0 for none."""
    max_body_bytes: int = 128 * MIB
    """Of one message; above, its channel is closed with 406."""
    max_assembling_bytes: int = 256 * MIB
    """Of the messages in all channels of a connection that are not whole; above, the connection is closed with 506."""
    max_properties_bytes: int = 131_072
    """Of the property list of a message; above, its channel is closed with 406."""
    max_table_depth: int = 32
    """Tables and arrays within each other; above, the connection is closed with 502."""
    max_table_fields: int = 16_384
    """Of one table with all that it holds, since the cost to decode one grows by its square; above, 502."""


DEFAULT_LIMITS = Limits()
