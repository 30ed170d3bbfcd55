"""What passes through connections, counted."""

from __future__ import annotations


class Tally:
    """Figures of connections that share it. One thread at a time."""

    __slots__ = ("bytes_received", "bytes_sent", "other_packets_sent", "packets_received")

    def __init__(self) -> None:
        self.bytes_received = 0
        self.bytes_sent = 0
        self.packets_received = 0
        """Of all kinds."""
        self.other_packets_sent = 0
        """Of all kinds but PUBLISH, which who sends them counts."""
