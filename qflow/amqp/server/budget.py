"""What the bodies take that connections hold beside the capacity: not whole yet, or of a transaction."""

from __future__ import annotations

from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.serving.budget import Budget


class Share:
    """What one connection holds of it; see the module."""

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
