"""Settings: named values that do not change, each of which is parsed when it is given.

They are no attrs classes: the import of attrs would take a fifth of the time in which a process imports qflow and opens
a broker.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self, dataclass_transform

from qflow.errors import InvalidArgument, SettingsConflict
from qflow.named_tuples import NamedTuple


class Setting(NamedTuple):
    """What one setting takes, and has if it is not given."""

    parse: Callable[[Any, str], Any] | None
    """Returns the value to keep, of what was given and the name; None is kept as it is."""
    default: Any
    is_performance: bool
    """It changes where bytes lie, and nothing else."""

    def kept(self, value: Any, name: str) -> Any:
        """Return the value to keep. Raises InvalidArgument: it makes no sense."""
        return value if value is None or self.parse is None else self.parse(value, name)


def setting(parse: Callable[[Any, str], Any] | None = None, *, default: Any, performance: bool = False) -> Any:
    """Return what stands in a class of `Settings` for one of them."""
    return Setting(parse, default, performance)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(setting,))
class Settings:
    """Settings of one kind: its class names them with `setting`, in the order in which they are shown."""

    fields: ClassVar[dict[str, Setting]] = {}
    of: ClassVar[str] = ""
    """Whose they are, where an error says that: such as " of a stream"."""
    fixed: ClassVar[frozenset[str]] = frozenset()
    """Those that stay as they were declared."""

    def __init_subclass__(cls) -> None:
        own = {name: one for name, one in vars(cls).items() if isinstance(one, Setting)}
        cls.fields = cls.fields | own
        for name in own:
            delattr(cls, name)

    def __init__(self, **given: Any) -> None:
        """Raises InvalidArgument: one of them makes no sense; TypeError: it is no setting.

        Cost: 0.3 µs for each there is.
        """
        if not given.keys() <= self.fields.keys():
            raise TypeError(f"{type(self).__name__} has no {min(given.keys() - self.fields.keys())!r}")
        for name, one in self.fields.items():
            value = given.get(name, one.default)
            if value is None and one.parse is not None and one.default is not None:
                raise InvalidArgument(f"{name}{self.of} must not be None")
            object.__setattr__(self, name, one.kept(value, name))
        self.check()

    def check(self) -> None:
        """Raise InvalidArgument if values do not go together."""

    def values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.fields}

    def changed(self, **changes: Any) -> Self:
        """Return settings of which some are others. Raises InvalidArgument: see `__init__`."""
        return type(self)(**{**self.values(), **changes})

    def conflicts(self, other: Self) -> list[tuple[str, Any, Any]]:
        """Return (name, mine, other's) of each setting that differs, but for those of performance."""
        return [
            (name, mine, theirs)
            for name, one in self.fields.items()
            if not one.is_performance and (mine := getattr(self, name)) != (theirs := getattr(other, name))
        ]

    def check_same(self, other: Self, kind: str, name: str) -> None:
        """Refuse to declare the queue or stream that has these as one that behaves differently.

        Raises: SettingsConflict.
        """
        for setting, mine, theirs in self.conflicts(other):
            remedy = f"change it with alter_{kind}, or from a shell with `qflow alter`"
            if setting in self.fixed:
                remedy = f"declare another {kind} and move over"
            raise SettingsConflict(
                f"{kind} {name!r} has {setting}={mine!r}, declared now with {setting}={theirs!r}: declare it as it is, "
                f"or {remedy}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as the log keeps them."""
        return {name: _plain(value) for name, value in self.values().items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return settings of plain values; names of a later version are ignored."""
        return cls(**{name: value for name, value in values.items() if name in cls.fields})

    @classmethod
    def from_call(cls, given: Mapping[str, Any], what: str) -> Self:
        """Return settings, of the keyword arguments of a call.

        Args:
            what: that has these settings, for errors.

        Raises:
            InvalidArgument: one of them is no setting, or makes no sense.
        """
        cls.check_names(given, what)
        return cls(**given)

    @classmethod
    def check_names(cls, names: Iterable[str], what: str) -> None:
        """Raise InvalidArgument if one of these is no setting; it names those there are."""
        unknown = set(names) - cls.fields.keys()
        if unknown:
            known = ", ".join(sorted(cls.fields))
            raise InvalidArgument(f"a {what} has no setting {min(unknown)!r}; there are {known}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of {type(self).__name__} cannot be set: settings do not change")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return other is self or all(getattr(self, name) == getattr(other, name) for name in self.fields)

    def __hash__(self) -> int:
        return hash((type(self), *self.values().values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.values().items())})"


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value
