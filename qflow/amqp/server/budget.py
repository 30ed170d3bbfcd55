"""What the bodies take that connections hold beside the capacity: not whole yet, or of a transaction."""

from __future__ import annotations

from qflow.amqp.errors import AmqpError, ReplyCode

MOST_BYTES = 256 * 1024**2
"""Of all connections: above, those that hold more than an equal share of it are ended. So twice of it at most."""


class Budget:
    """See the module. In one event loop."""

    def __init__(self) -> None:
        self.most_bytes = MOST_BYTES
        self._held: dict[Share, int] = {}
        """Of those that hold any."""
        self._total = 0

    def allows(self, share: Share, size: int) -> bool:
        """Note how many bytes a connection holds now; tell whether it may. Cost: O(1)."""
        self._total += size - self._held.pop(share, 0)
        if size:
            self._held[share] = size
        return self._total <= self.most_bytes or size * len(self._held) <= self.most_bytes


class Share:
    """What one connection holds of it."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._uncommitted = self._noted = 0

    def hold(self, size: int) -> None:
        """Have a transaction hold so many bytes more, or less."""
        self._uncommitted += size

    def excess(self, assembling: int) -> AmqpError | None:
        """Note what is held, with what is not whole; return why the connection is to end, if it holds too much."""
        held = assembling + self._uncommitted
        if held == self._noted:
            return None
        self._noted = held
        if self._budget.allows(self, held):
            return None
        most = f"{self._budget.most_bytes:,} bytes of messages that are not whole, or not committed"
        return AmqpError(ReplyCode.RESOURCE_ERROR, f"connections hold more than {most}, and this one {held:,} of them")

    def end(self) -> None:
        """The connection holds nothing any more."""
        self._budget.allows(self, 0)
