"""What a connection reads page by page, up to the last one: queries of streams, and what waits in queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

from qflow.aio.broker import AsyncBroker, in_thread
from qflow.errors import InvalidArgument, NotFound

MOST_OPEN = 100
"""Of one kind, at one connection, that have not come to their end."""
MOST_BYTES = 8 * 2**20
"""Of messages in one page; the first is always there."""
T = TypeVar("T")


class Pages(Generic[T]):
    """See the module: those of one kind. In the loop of the connection; pages are read in threads."""

    def __init__(
        self, broker: AsyncBroker, kind: str, most: int, size_of: Callable[[T], int], numbers: count[int]
    ) -> None:
        """Begin.

        Args:
            kind: what errors call one of these.
            most: as many items are in a page.
            size_of: returns the bytes of an item.
            numbers: of what is opened.
        """
        self._broker = broker
        self._kind = kind
        self._most = most
        self._size_of = size_of
        self._numbers = numbers
        self._open: dict[int, Iterator[T] | None] = {}
        """By number: what is left of each; None while a page of it is read."""

    def __len__(self) -> int:
        return len(self._open)

    async def begin(self, make: Callable[[], Iterator[T]]) -> tuple[list[T], int | None]:
        """Return the first page of what `make` returns, and the number under which it goes on; None: that was all.

        Raises:
            InvalidArgument: too many are open.
        """
        if len(self._open) >= MOST_OPEN:
            raise InvalidArgument(
                f"{MOST_OPEN} of operation {self._kind!r} have not come to their end at this connection: end some of "
                "them, or connect once more"
            )
        return await self._page(next(self._numbers), make)

    async def go_on(self, number: int) -> tuple[list[T], int | None]:
        """Return the next page of one. Raises NotFound: it is not open."""
        items = self._open.get(number)
        if items is None:
            raise NotFound(f"there is no {self._kind} {number} of this connection: it has come to its end")
        return await self._page(number, lambda: items)

    async def _page(self, number: int, make: Callable[[], Iterator[T]]) -> tuple[list[T], int | None]:
        self._open[number] = None
        items: Any = None
        try:
            found, items = await in_thread(self._broker, partial(self._read, make))
        finally:
            if items is None:
                self.close(number)
        if number not in self._open:  # it was closed meanwhile
            return found, None
        self._open[number] = items
        return found, number

    def _read(self, make: Callable[[], Iterator[T]]) -> tuple[list[T], Iterator[T] | None]:
        """Return a page, and what is left; None: nothing."""
        items, found, size = make(), [], 0
        for item in items:
            found.append(item)
            size += self._size_of(item)
            if len(found) == self._most or size >= MOST_BYTES:
                return found, items
        return found, None

    def close(self, number: int) -> None:
        """Forget one; twice is fine."""
        self._open.pop(number, None)

    def close_all(self) -> None:
        """Forget all."""
        self._open.clear()
