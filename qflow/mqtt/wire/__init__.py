"""MQTT 3.1.1 and 5 as bytes: a machine that takes what came and yields what it means, without any I/O.

`Connection` is given the bytes of a client and gives packets; it is told what to answer and gives the bytes to send.
Who reads and writes them, when, and what sessions and subscriptions do, is nothing it knows. Whatever a client sends,
it is a packet or the end of the connection, and what is kept of it is bounded by `Limits`.
"""

from qflow.mqtt.wire.connection import Connection, Tally
from qflow.mqtt.wire.fields import MAX_FIELD_BYTES, has_place
from qflow.mqtt.wire.limits import DEFAULT_LIMITS, Limits
from qflow.mqtt.wire.publishing import Encoded, encode_publish
from qflow.mqtt.wire.states import State, WrongState
from qflow.mqtt.wire.topics import split_shared

__all__ = [
    "DEFAULT_LIMITS", "MAX_FIELD_BYTES", "Connection", "Encoded", "Limits", "State", "Tally", "WrongState",
    "encode_publish", "has_place", "split_shared",
]  # fmt: skip
