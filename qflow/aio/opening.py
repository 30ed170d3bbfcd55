"""Objects that `await` opens, or `async with`, which closes them, too."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, Protocol, TypeVar


class Closable(Protocol):
    """An object with an async `close`."""

    async def close(self) -> None: ...


T = TypeVar("T", bound=Closable)


class Opening(Generic[T]):
    """An object that is opened by `await`, or by `async with`, which closes it at the end."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._open = begin
        self._opened: T | None = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._open().__await__()

    async def __aenter__(self) -> T:
        self._opened = await self
        return self._opened

    async def __aexit__(self, *_: object) -> None:
        if self._opened is not None:
            await self._opened.close()
