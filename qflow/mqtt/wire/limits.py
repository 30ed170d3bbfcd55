"""How much a client may make this side keep or do."""

from __future__ import annotations

from qflow.named_tuples import NamedTuple

MIB = 1 << 20
KIB = 1 << 10


class Limits(NamedTuple):
    """What is announced to clients, and what is refused.

    A connection holds at most one packet that is not whole, what it may hold after a CONNECT that is not answered yet
    (see `Connection.receive`), and twice `topic_alias_maximum` topics.
    """

    maximum_packet_bytes: int = MIB
    """Of a packet, its header included; above, 0x95 before the rest of it is read."""
    connect_bytes: int = 128 * KIB
    """Of a CONNECT, of whose sender nothing is known yet; above, the connection is closed."""
    topic_bytes: int = 4096
    """Of a topic and of a topic filter, as UTF-8."""
    topic_levels: int = 128
    filters: int = 1000
    """Of one SUBSCRIBE or UNSUBSCRIBE; above, 0x97."""
    user_properties_bytes: int = 64 * KIB
    """Of names and values of the user properties of a packet; above, 0x97."""
    client_id_bytes: int = 256
    """Above, 0x85."""
    topic_alias_maximum: int = 64
    """In each direction: topics that a connection remembers."""
    receive_maximum: int = 1000
    """Publishes of QoS 1 and 2 of a client that are not acknowledged; above, 0x93 (MQTT 5 alone)."""


DEFAULT_LIMITS = Limits()
