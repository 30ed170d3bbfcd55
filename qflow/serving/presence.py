"""Who is connected to the doors of a broker, for those who show it: each door says how to ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import attrs


@attrs.frozen
class Connected:
    """A client of a door."""

    door: str
    """Its protocol."""
    name: str
    """As it calls itself; empty if it does not say."""
    user: str
    peer: str
    """Where it comes from."""
    since_s: float
    """For how long it has been connected."""
    detail: str = ""
    """More of it, in words."""


Asked = Callable[[], Iterable[Connected]]
_ASKED: WeakKeyDictionary[object, dict[object, Asked]] = WeakKeyDictionary()


def enter(broker: object, door: object, asked: Asked) -> None:
    """A door is open from now on, and answers who is connected, in the loop's thread."""
    _ASKED.setdefault(broker, {})[door] = asked


def leave(broker: object, door: object) -> None:
    """A door is closed; twice is fine."""
    _ASKED.get(broker, {}).pop(door, None)


def of(broker: object) -> list[Connected]:
    """Return who is connected to the doors of a broker now. In the thread of their loop."""
    return [one for asked in list(_ASKED.get(broker, {}).values()) for one in asked()]
