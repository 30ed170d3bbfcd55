"""What belongs to the process that it was made in, and means nothing in another."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, Self


class Unpicklable:
    """Cannot be pickled, or copied, and says what to do instead of that."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"cannot pickle or copy {type(self).__qualname__!r} object: it belongs to the process it was made in; give "
            "the other one the path of the spool, and have it use qflow.connect(path) there"
        )


class Made(Unpicklable):
    """Made by a call of something else, and says by which to who calls the class; its maker uses `object.__new__`."""

    __slots__ = ()
    _by: ClassVar[str]

    def __init_subclass__(cls, *, by: str = "", **more: Any) -> None:
        super().__init_subclass__(**more)
        if by:
            cls._by = by

    def __new__(cls, *_arguments: object, **_options: object) -> Self:
        """Raises TypeError: a call of something else makes it."""
        raise TypeError(f"a {cls.__name__} is made by `{cls._by}`, not by calling the class")
