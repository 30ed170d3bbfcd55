"""Memory that connections hold beside the capacity, of all of them together."""

from __future__ import annotations

MOST_BYTES = 256 * 1024**2
"""Of all connections: above, those that hold more than an equal share of it are ended. So twice of it at most."""


class Budget:
    """See the module. In one event loop."""

    def __init__(self) -> None:
        self.most_bytes = MOST_BYTES
        self._held: dict[object, int] = {}
        """By holders of any."""
        self._total = 0

    def allows(self, holder: object, size: int) -> bool:
        """Note how many bytes a connection holds now; tell whether it may. Cost: O(1)."""
        self._total += size - self._held.pop(holder, 0)
        if size:
            self._held[holder] = size
        return self._total <= self.most_bytes or size * len(self._held) <= self.most_bytes
