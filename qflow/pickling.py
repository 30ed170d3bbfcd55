"""What belongs to the process that it was made in, and means nothing in another."""

from __future__ import annotations

from typing import NoReturn


class Unpicklable:
    """Cannot be pickled, or copied, and says what to do instead of that."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"cannot pickle or copy {type(self).__qualname__!r} object: it belongs to the process it was made in; give "
            "the other one the path of the spool, and have it use qflow.connect(path) there"
        )
