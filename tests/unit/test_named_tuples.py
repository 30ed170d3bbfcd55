"""Named tuples of the package are what those of the standard library are."""

from __future__ import annotations

import copy
import pickle
import typing

import pytest

from qflow.named_tuples import NamedTuple


class Theirs(typing.NamedTuple):
    """A place."""

    name: str
    size: int = 3
    ends: list[int] | None = None
    """Where it ends."""

    @property
    def shown(self) -> str:
        return f"{self.name} of {self.size}"


class Ours(NamedTuple):
    """A place."""

    name: str
    size: int = 3
    ends: list[int] | None = None
    """Where it ends."""

    @property
    def shown(self) -> str:
        return f"{self.name} of {self.size}"


@pytest.mark.parametrize("name", ["_fields", "_field_defaults", "__doc__", "__module__", "__match_args__", "__slots__"])
def test_a_class_is_like_one_of_the_standard_library(name: str) -> None:
    assert getattr(Ours, name) == getattr(Theirs, name)
    assert Ours.__mro__[1:] == Theirs.__mro__[1:]
    assert typing.get_type_hints(Ours) == typing.get_type_hints(Theirs)


def test_a_value_is_like_one_of_the_standard_library() -> None:
    ours, theirs = Ours("a", ends=[1]), Theirs("a", ends=[1])
    assert ours == theirs == ("a", 3, [1])
    assert ours.shown == theirs.shown == "a of 3"
    assert repr(ours) == repr(theirs).replace("Theirs", "Ours")
    assert ours._replace(size=4)._asdict() == {"name": "a", "size": 4, "ends": [1]}
    for copied in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert type(copied) is Ours
        assert copied == ours


def test_a_value_lacks_no_field() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'name'"):
        Ours()  # type: ignore[call-arg]
