"""How each kind of exchange finds the bindings that a message matches: its *matcher*."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any, Protocol, TypeAlias

from qflow.amqp.errors import AmqpError
from qflow.amqp.model.bindings import Binding
from qflow.amqp.model.tables import Table, encode_table, type_name

Headers: TypeAlias = Callable[[], Table]
"""Returns the table `headers` of a message; called only where it is needed."""
Bindings: TypeAlias = dict[Binding, None]
"""A set in the order in which its members came."""


class Matcher(Protocol):
    """The bindings of which one exchange is the source."""

    needs_headers: bool
    """What it finds depends on more than the routing key."""

    def add(self, binding: Binding) -> None: ...
    def remove(self, binding: Binding) -> None: ...
    def match(self, routing_key: str, headers: Headers) -> Iterable[Binding]:
        """Return the bindings that a message matches, each once, in any order."""
        ...


class Direct:
    """The routing key is the binding key. Cost: one look-up, whatever is bound."""

    needs_headers = False

    def __init__(self) -> None:
        self._by_key: dict[str, Bindings] = {}

    def add(self, binding: Binding) -> None:
        self._by_key.setdefault(binding.routing_key, {})[binding] = None

    def remove(self, binding: Binding) -> None:
        _discard(self._by_key, binding.routing_key, binding)

    def match(self, routing_key: str, headers: Headers) -> Iterable[Binding]:
        return self._by_key.get(routing_key, ())


class Fanout:
    """Every binding matches."""

    needs_headers = False

    def __init__(self) -> None:
        self._all: Bindings = {}

    def add(self, binding: Binding) -> None:
        self._all[binding] = None

    def remove(self, binding: Binding) -> None:
        del self._all[binding]

    def match(self, routing_key: str, headers: Headers) -> Iterable[Binding]:
        return self._all


# Topics --------------------------------------------------------------------------------------------------------------


def words_of(key: str) -> list[str]:
    """Return the words of a routing key or pattern; an empty one has none."""
    return key.split(".") if key else []


class _Node:
    """Where the first words of some patterns lead to."""

    __slots__ = ("bindings", "hash", "repeats", "star", "words")

    def __init__(self, repeats: bool = False) -> None:
        self.repeats = repeats
        """The last word was `#`: any word leads here again."""
        self.words: dict[str, _Node] = {}
        self.star: _Node | None = None
        self.hash: _Node | None = None
        self.bindings: Bindings = {}

    def child(self, word: str) -> _Node | None:
        return self.hash if word == "#" else self.star if word == "*" else self.words.get(word)

    def make_child(self, word: str) -> _Node:
        found = self.child(word)
        if found is None:
            found = _Node(repeats=word == "#")
            if word == "#":
                self.hash = found
            elif word == "*":
                self.star = found
            else:
                self.words[word] = found
        return found

    def drop_child(self, word: str) -> None:
        if word == "#":
            self.hash = None
        elif word == "*":
            self.star = None
        else:
            del self.words[word]

    @property
    def is_bare(self) -> bool:
        return not (self.bindings or self.words or self.star or self.hash)


class Topic:
    """Words between dots: in a pattern `*` stands for one of them, `#` for any number.

    Patterns without either are found by one look-up, the others in a trie, through which all ways are gone at once, a
    word at a time: each node is visited once for a word at most.
    """

    needs_headers = False

    def __init__(self) -> None:
        self._exact = Direct()
        self._root = _Node()

    def add(self, binding: Binding) -> None:
        words = words_of(binding.routing_key)
        if _is_exact(words):
            self._exact.add(binding)
            return
        node = self._root
        for word in words:
            node = node.make_child(word)
        node.bindings[binding] = None

    def remove(self, binding: Binding) -> None:
        words = words_of(binding.routing_key)
        if _is_exact(words):
            self._exact.remove(binding)
            return
        way = [self._root]
        for word in words:
            node = way[-1].child(word)
            if node is None:
                raise KeyError(binding)
            way.append(node)
        del way[-1].bindings[binding]
        for word in reversed(words):
            if not way.pop().is_bare:
                return
            way[-1].drop_child(word)

    def match(self, routing_key: str, headers: Headers) -> Iterable[Binding]:
        exact = self._exact.match(routing_key, headers)
        if self._root.is_bare:
            return exact
        found = list(exact)
        now: Iterable[_Node] = _with_hashes([self._root])
        for word in words_of(routing_key):
            now = _with_hashes(_after(now, word))
        for node in now:
            found.extend(node.bindings)
        return found


def _is_exact(words: list[str]) -> bool:
    return "*" not in words and "#" not in words


def _after(nodes: Iterable[_Node], word: str) -> Iterator[_Node]:
    """Yield where one more word leads to."""
    for node in nodes:
        if node.repeats:
            yield node
        if node.star is not None:
            yield node.star
        following = node.words.get(word)
        if following is not None:
            yield following


def _with_hashes(nodes: Iterable[_Node]) -> Iterable[_Node]:
    """Return the nodes, and those that `#` leads to from them without a word; each once."""
    found = dict.fromkeys(nodes)
    for node in list(found):
        following = node.hash
        while following is not None and following not in found:
            found[following] = None
            following = following.hash
    return found


# Headers -------------------------------------------------------------------------------------------------------------

X_MATCH = ("all", "any", "all-with-x", "any-with-x")


class HeadersMatch:
    """The arguments of a binding are those headers of a message, all of them or any; without a value, it need only be
    there.

    A binding that needs all is found by one of its arguments, one that needs any by each.
    """

    needs_headers = True

    def __init__(self) -> None:
        self._by_argument: dict[Hashable, Bindings] = {}
        self._always: Bindings = {}

    def add(self, binding: Binding) -> None:
        for place in _places(binding):
            self._by_argument.setdefault(place, {})[binding] = None
        if _mode(binding).startswith("all") and not _wanted(binding):
            self._always[binding] = None

    def remove(self, binding: Binding) -> None:
        for place in _places(binding):
            _discard(self._by_argument, place, binding)
        self._always.pop(binding, None)

    def match(self, routing_key: str, headers: Headers) -> Iterable[Binding]:
        table = {name: _bare(value) for name, value in headers().items()}  # once: thousands of bindings may ask for one
        found = dict(self._always)
        for name, value in table.items():
            for place in ((name, value), name):
                for binding in self._by_argument.get(place, ()):
                    if binding not in found and _matches(binding, table):
                        found[binding] = None
        return found


def check_headers_binding(arguments: Table) -> None:
    """Refuse an argument `x-match` that means nothing. Raises AmqpError: 406."""
    wanted = arguments.get("x-match", "all")
    if not isinstance(wanted, str):
        raise AmqpError(406, f"Invalid x-match field type {type_name(wanted)} (value {wanted!r}); expected longstr")
    if wanted not in X_MATCH:
        raise AmqpError(406, f"Invalid x-match field value {wanted!r}; expected all, any, all-with-x, or any-with-x")


def _mode(binding: Binding) -> str:
    return str(binding.arguments.get("x-match", "all"))


def _wanted(binding: Binding) -> Table:
    """Return the headers that a binding asks for."""
    if _mode(binding).endswith("-with-x"):
        return {name: value for name, value in binding.arguments.items() if name != "x-match"}
    return {name: value for name, value in binding.arguments.items() if not name.startswith("x-")}


def _place(name: str, value: Any) -> Hashable:
    """Return under what an argument stands: with its value, if that can be looked up."""
    return name if value is None else (name, _bare(value))


def _bare(value: Any) -> Hashable:
    """Return what values have the same of that RabbitMQ takes for equal: it compares them without their types.

    So bytes are equal to a text, numbers to each other and to a timestamp; what is inside lists and tables is not.
    """
    match value:
        case str():
            return value.encode()
        case bytes() | bytearray():
            return bytes(value)
        case datetime():
            return int(value.timestamp())
        case list() | dict():
            return "nested", encode_table({"": value})
        case bool() | Decimal():  # which Python takes for equal to other numbers
            return type(value), value
    number: Hashable = value
    return number


def _places(binding: Binding) -> list[Hashable]:
    places = [_place(name, value) for name, value in _wanted(binding).items()]
    return places[:1] if _mode(binding).startswith("all") else places


def _matches(binding: Binding, headers: dict[str, Hashable]) -> bool:
    """Tell whether a binding matches headers whose values are bare."""
    held = (
        name in headers and (value is None or _bare(value) == headers[name]) for name, value in _wanted(binding).items()
    )
    return all(held) if _mode(binding).startswith("all") else any(held)


def _discard(groups: dict[Any, Bindings], key: Hashable, binding: Binding) -> None:
    """Take a binding out of its group, and the group away with the last."""
    group = groups[key]
    del group[binding]
    if not group:
        del groups[key]


def new_matcher(kind: str) -> Matcher:
    """Return the matcher of an exchange without bindings."""
    return MATCHERS[kind]()


MATCHERS: dict[str, Callable[[], Matcher]] = {
    "direct": Direct,
    "fanout": Fanout,
    "topic": Topic,
    "headers": HeadersMatch,
}
"""By kind of exchange."""
