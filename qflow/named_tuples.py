"""`typing.NamedTuple`, whose annotations stay texts: it would compile each of them, 3 ms of what opening a spool takes.

Type checkers see the original, which is also the one for generic classes.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any

__all__ = ["NamedTuple"]

if TYPE_CHECKING:
    from typing import NamedTuple
else:

    class _NamedTuple(type):
        """Makes each class that has the bare base below as its base."""

        def __new__(mcs, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> type:
            if not bases:
                return super().__new__(mcs, name, bases, members)
            annotations = members.get("__annotations__", {})
            defaults = [members.pop(field) for field in annotations if field in members]
            made = namedtuple(name, annotations, defaults=defaults, module=members["__module__"])
            for key, value in members.items():
                setattr(made, key, value)
            return made

    class NamedTuple(metaclass=_NamedTuple):
        """See the module."""
