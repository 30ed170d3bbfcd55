"""Topics and filters: the rules of MQTT 4.7 as tables, the trie against the pairwise matcher, the cache against races."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Event, Thread
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from qflow.errors import InvalidArgument
from qflow.streams import topic_filter as room
from qflow.streams.topic_filter import FilterTrie, check_filter, check_topic, covers, matches, may_meet
from thorough import examples

LEVELS = ["", "a", "b", "$x"]
TOPICS = [topic for depth in (1, 2, 3) for levels in product(LEVELS, repeat=depth) if (topic := "/".join(levels))]
FILTERS = [
    text
    for depth in (1, 2, 3)
    for levels in product([*LEVELS, "+", "#"], repeat=depth)
    if (text := "/".join(levels)) and "#" not in levels[:-1]
]
DEEP = 30_000


def nodes(trie: FilterTrie[Any]) -> int:
    return sum(1 for _ in trie._nodes())


def expected(pairs: list[tuple[str, Any]], topic: str) -> tuple[Any, ...]:
    """What the plain matcher says of pairs in order of addition."""
    return tuple(dict.fromkeys(value for topic_filter, value in pairs if matches(topic_filter, topic)))


class Trap:
    """A value that lets something happen in the middle of what asks for its hash, the first time or a later one."""

    def __init__(self) -> None:
        self.after = 0
        self.spring: Callable[[], object] | None = None

    def __hash__(self) -> int:
        if self.spring is not None:
            self.after -= 1
            if self.after < 0:
                spring, self.spring = self.spring, None
                spring()
        return 1


# Words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "topic",
    [
        *("a", "/", "//", "/a", "a/", "a//b", " ", "a b/c", "$", "$SYS/x", "a/$x", "A", "é/日本/😀", "\ufeffa", "\x01"),
        *("a" * 65_535, "é" * 32_767, "/" * 65_535),
    ],
    ids=lambda topic: ascii(topic[:12]),
)
def test_a_valid_topic_is_returned_as_it_is(topic: str) -> None:
    """4.7.3: at least one character, empty levels, spaces, a leading `$`, up to 65,535 bytes; it is also a filter."""
    assert check_topic(topic) == topic
    assert check_filter(topic) == topic


@pytest.mark.parametrize(
    "text", ["#", "+", "a/#", "/#", "+/#", "+/+", "/+", "+/", "a/+/b", "+/a//#", "$SYS/#", "$share/g/a", "a/" * 9 + "#"]
)
def test_a_valid_filter_is_returned_as_it_is(text: str) -> None:
    """4.7.1: `+` is a whole level anywhere, `#` a whole level at the end."""
    assert check_filter(text) == text


@pytest.mark.parametrize("check", [check_topic, check_filter])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "takes 1 to 65,535 bytes of UTF-8; '' takes 0"),
        ("a" * 65_536, "takes 65,536"),
        ("é" * 32_768, "takes 65,536"),
        ("a\0b", r"'a\\x00b' contains NUL"),
        ("a/\ud800", r"'a/\\ud800' cannot be encoded as UTF-8"),
        (None, "must be str, not NoneType"),
        (b"a", "must be str, not bytes"),
        (7, "must be str, not int"),
        (["a"], "must be str, not list"),
    ],
    ids=lambda value: ascii(value)[:12],
)
def test_what_is_no_text_of_mqtt_is_refused(check: Callable[[object], str], text: object, says: str) -> None:
    """1.5.4 and 4.7.3: str, 1 to 65,535 bytes, no lone surrogate, no NUL; the message names it and what is wrong."""
    with pytest.raises(InvalidArgument, match=says) as caught:
        check(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("topic", ["+", "#", "a/+", "a/#", "+/a", "a+", "a#b", "a/b+c/d"])
def test_a_filter_is_no_topic(topic: str) -> None:
    """4.7.1: nobody publishes to wildcards."""
    with pytest.raises(InvalidArgument, match=r"contains '[+#]', which makes it a filter: publish to") as caught:
        check_topic(topic)
    assert repr(topic) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a/#/b", "'a/#/b' goes on after '#'"),
        ("#/a", "'#/a' goes on after '#'"),
        ("#/", "'#/' goes on after '#'"),
        ("#/#", "'#/#' goes on after '#'"),
        ("a+", "in level 'a\\+'"),
        ("+a/b", "in level '\\+a'"),
        ("a/b+/c", "in level 'b\\+'"),
        ("++", "in level '\\+\\+'"),
        ("a#", "in level 'a#'"),
        ("a/#b", "in level '#b'"),
        ("##", "in level '##'"),
        ("a/+#", "in level '\\+#'"),
    ],
)
def test_a_misplaced_wildcard_is_named(text: str, says: str) -> None:
    """4.7.1: `#` only as the whole last level, `+` only as a whole level."""
    with pytest.raises(InvalidArgument, match=says) as caught:
        check_filter(text)
    assert repr(text) in str(caught.value)


# Matching ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "matching", "others"),
    [
        ("a/b", ["a/b"], ["a", "a/", "a/b/", "/a/b", "a/b/c", "A/b", "a/c", "ab"]),
        ("a", ["a"], ["/a", "a/", "A", "\ufeffa"]),
        ("/", ["/"], ["//", "a", "a/"]),
        ("a/#", ["a", "a/", "a/b", "a/b/c", "a//c", "a/$x"], ["b", "ab", "/a", "A/b"]),
        ("#", ["a", "a/b", "/", "/a", "a/$x", "/$x"], ["$", "$x", "$x/a"]),
        ("/#", ["/", "/a", "/a/b", "//"], ["a", "$x"]),
        ("a/+", ["a/b", "a/", "a/$x"], ["a", "a/b/c", "a/b/", "b/b"]),
        ("+", ["a", " "], ["/", "/a", "a/", "a/b", "$x"]),
        ("+/+", ["/", "/a", "a/", "a/b", "a/$x"], ["a", "a/b/c", "$x/a"]),
        ("/+", ["/a", "/", "/$x"], ["a", "//"]),
        ("a/+/b", ["a/x/b", "a//b"], ["a/b", "a/x/y/b", "a/x/c"]),
        ("+/#", ["a", "a/", "a/b", "/", "/a"], ["$x", "$x/a"]),
        ("a/+/#", ["a/b", "a/", "a/b/c", "a/b/c/d"], ["a", "b/b"]),
        ("+/b/#", ["a/b", "/b", "a/b/c"], ["b", "a/c", "$x/b", "$x/b/c"]),
        ("$x/#", ["$x", "$x/", "$x/a", "$x/a/b"], ["a", "x", "$y/a", "$xx"]),
        ("$x/+", ["$x/a", "$x/$y"], ["$x", "$x/a/b", "a/a"]),
        ("$x", ["$x"], ["$y", "x", "a/$x"]),
        ("$share/g/a", ["$share/g/a"], ["a", "g/a"]),
    ],
)
def test_a_filter_matches_what_mqtt_says(text: str, matching: list[str], others: list[str]) -> None:
    """4.7.1 and 4.7.2, for the plain matcher and for a trie of that one filter."""
    trie: FilterTrie[str] = FilterTrie()
    trie.add(check_filter(text), "value")
    for topic in matching:
        assert matches(text, check_topic(topic)), topic
        assert trie.match(topic) == ("value",), topic
    for topic in others:
        assert not matches(text, check_topic(topic)), topic
        assert trie.match(topic) == (), topic


def test_the_trie_agrees_with_the_matcher_on_every_filter_and_topic_of_three_levels() -> None:
    """Each pair of a small alphabet, one filter at a time and all at once."""
    together: FilterTrie[str] = FilterTrie()
    pairs = 0
    for text in FILTERS:
        alone: FilterTrie[str] = FilterTrie()
        assert alone.add(text, text)
        assert together.add(text, text)
        for topic in TOPICS:
            assert alone.match(topic) == ((text,) if matches(text, topic) else ()), (text, topic)
            pairs += 1
    assert pairs > 10_000
    for topic in TOPICS:
        assert together.match(topic) == expected([(text, text) for text in FILTERS], topic), topic


steps = st.tuples(st.booleans(), st.sampled_from(FILTERS), st.integers(0, 3))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(steps, min_size=10, max_size=60), st.lists(st.sampled_from(TOPICS), min_size=5, max_size=15))
@example([(True, "#", 1), (True, "a", 2), (True, "a", 1), (False, "#", 1)], ["a"])
def test_any_history_leaves_what_a_plain_list_of_pairs_holds(
    history: list[tuple[bool, str, int]], topics: list[str]
) -> None:
    """After each add and remove: results, order, length, pairs; and nothing is left when all is removed."""
    trie: FilterTrie[int] = FilterTrie()
    pairs: list[tuple[str, int]] = []
    for adds, text, value in history:
        there = (text, value) in pairs
        if adds:
            assert trie.add(text, value) is not there
            pairs += [] if there else [(text, value)]
        else:
            assert trie.remove(text, value) is there
            pairs = [pair for pair in pairs if pair != (text, value)]
        assert (list(trie), len(trie), bool(trie)) == (pairs, len(pairs), bool(pairs))
        for topic in topics:
            assert trie.match(topic) == expected(pairs, topic), topic
    for text, value in pairs:
        assert trie.remove(text, value)
    assert (nodes(trie), len(trie), trie.match(topics[0])) == (1, 0, ())


def test_a_value_comes_once_in_the_order_of_the_first_pair_that_matches() -> None:
    """A pair that was removed and added again is the last one."""
    trie: FilterTrie[str] = FilterTrie()
    for text, value in [("x", "late"), ("a/#", "first"), ("+/b", "second"), ("a/b", "first"), ("#", "late")]:
        trie.add(text, value)
    assert trie.match("a/b") == ("first", "second", "late")
    trie.remove("a/#", "first")
    assert trie.match("a/b") == ("second", "first", "late")
    trie.add("a/#", "first")
    assert list(trie)[-1] == ("a/#", "first")


def test_values_need_an_equal_and_a_hash_only() -> None:
    """Values of one filter are never compared for their order."""
    trie: FilterTrie[Any] = FilterTrie()
    for value in (1, "1", None, (), 1j):
        assert trie.add("a", value)
        assert trie.add("#", value)
    assert not trie.add("a", 1.0)
    assert trie.match("a") == (1, "1", None, (), 1j)
    assert len(list(trie)) == len(trie) == 10


def test_what_is_refused_leaves_nothing_behind() -> None:
    """An invalid filter or topic, or a value without a hash, changes nothing."""
    trie: FilterTrie[Any] = FilterTrie()
    for wrong in ("a/#/b", "", None, 7):
        with pytest.raises(InvalidArgument):
            trie.add(wrong, 1)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            trie.remove(wrong, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        trie.add("a/b/c", [])
    trie.add("+", 1)
    for wrong in ("+", "a/#", "", None, 7):
        with pytest.raises(InvalidArgument):
            trie.match(wrong)  # type: ignore[arg-type]
    assert (nodes(trie), len(trie), len(trie._cache)) == (2, 1, 0)


# Bounds ------------------------------------------------------------------------------------------------------------


def test_an_empty_branch_is_pruned_and_no_other() -> None:
    """What another filter still needs stays: above it, below it, beside it."""
    trie: FilterTrie[int] = FilterTrie()
    for text in ("a/b/c/d", "a/b", "a/b/x"):
        trie.add(text, 1)
    trie.add("a/b", 2)
    assert nodes(trie) == 6
    left = [("a/b/c/d", 1, 4), ("a/b", 1, 4), ("a/b/x", 1, 3), ("a/b", 2, 1)]
    for text, value, count in left:
        assert not trie.remove(text, 3)
        assert trie.remove(text, value)
        assert nodes(trie) == count
        assert not trie.remove(text, value)
    assert not trie


def test_many_different_filters_that_come_and_go_leave_one_node() -> None:
    """No memory is kept for what was removed."""
    trie: FilterTrie[int] = FilterTrie()
    for number in range(20_000):
        trie.add(f"a/{number}/#", number)
        if number >= 5:
            trie.remove(f"a/{number - 5}/#", number - 5)
    assert nodes(trie) == 2 + 5 * 2
    for number in range(20_000 - 5, 20_000):
        trie.remove(f"a/{number}/#", number)
    assert nodes(trie) == 1


def test_thirty_thousand_levels_need_no_stack() -> None:
    """Adding, matching, iterating, removing and dropping are loops."""
    topic = "/".join("a" * DEEP)
    texts = ["#", topic, "/".join("+" * DEEP), "/".join("+" * (DEEP - 1)) + "/#", "/".join("+" * (DEEP + 1)), "+/b"]
    trie: FilterTrie[int] = FilterTrie()
    for value, text in enumerate(texts):
        trie.add(text, value)
        assert matches(text, topic) is (value < 4)
    assert trie.match(topic) == (0, 1, 2, 3)
    assert [text for text, _ in trie] == texts
    for value, text in enumerate(texts[:-2]):
        assert trie.remove(text, value)
    assert trie.match(topic) == ()
    del trie


class Counting(dict[str, Any]):
    """The children of a node, and how often they were looked at."""

    looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.looks += 1
        return super().get(key, default)


def count_looks(trie: FilterTrie[Any], topic: str) -> list[int]:
    """Return how often each node was looked into for a topic that was not seen before."""
    every = list(trie._nodes())
    for node in every:
        node.children = Counting(node.children)
    trie.match(topic)
    return [node.children.looks for node in every if isinstance(node.children, Counting)]


def test_a_node_is_visited_once_whatever_way_filters_overlap() -> None:
    """All mixtures of a level and `+`, and those that end in `#`: three looks into a node, one for each kind of child."""
    trie: FilterTrie[str] = FilterTrie()
    for levels in product("a+", repeat=9):
        trie.add("/".join(levels), "".join(levels))
        trie.add("/".join(levels[:-1]) + "/#", "".join(levels))
    assert max(count_looks(trie, "/".join("a" * 9))) <= 3
    assert len(trie.match("/".join("a" * 9))) == 2**9


def test_filters_that_do_not_match_cost_nothing() -> None:
    """The looks at nodes are as many among 10,000 filters as among three."""
    looks = []
    for others in (0, 10_000):
        trie: FilterTrie[int] = FilterTrie()
        for text in ("plant/+/heat", "plant/7/#", "#"):
            trie.add(text, 0)
        for number in range(others):
            trie.add(f"plant/{number + 10}/heat", number)
            trie.add(f"{number}/+/#", number)
        looks.append(sum(count_looks(trie, "plant/7/heat")))
    assert looks[0] == looks[1] > 0


# The cache ---------------------------------------------------------------------------------------------------------


def test_a_topic_seen_before_is_not_searched_again() -> None:
    """The same tuple comes back until a filter is added or removed; adding what is there changes nothing."""
    trie: FilterTrie[int] = FilterTrie()
    trie.add("a/+", 1)
    first = trie.match("a/b")
    assert trie.match("a/b") is first
    assert trie.match("b") == trie.match("b") == ()
    assert not trie.add("a/+", 1)
    assert not trie.remove("a/+", 2)
    assert trie.match("a/b") is first
    trie.add("#", 2)
    assert (trie.match("a/b"), trie.match("b")) == ((1, 2), (2,))
    trie.remove("a/+", 1)
    assert (trie.match("a/b"), trie.match("b")) == ((2,), (2,))


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts anew when it is full, and keeps neither long topics nor long results."""
    monkeypatch.setattr(room, "CACHED_RESULTS", 10)
    monkeypatch.setattr(room, "CACHED_CHARACTERS", 20)
    monkeypatch.setattr(room, "CACHED_VALUES", 3)
    trie: FilterTrie[int] = FilterTrie()
    trie.add("#", 0)
    for number in range(100):
        assert trie.match(f"a/{number}") == (0,)
        assert 1 <= len(trie._cache) <= 10
    assert trie.match("x" * 20) is trie.match("x" * 20)
    assert trie.match("x" * 21) is not trie.match("x" * 21)
    for number in range(1, 4):
        trie.add("b", number)
    assert trie.match("b") is not trie.match("b")
    trie.remove("b", 3)
    assert trie.match("b") is trie.match("b")


@pytest.mark.parametrize("change", ["add", "remove"])
def test_what_was_found_before_a_change_is_not_cached_after_it(change: str) -> None:
    """A reader stops in the middle of `match`, a writer comes and goes; the reader's result is not found again."""
    trie: FilterTrie[Any] = FilterTrie()
    trap = Trap()
    trie.add("a", trap)

    def write() -> None:
        if change == "add":
            assert trie.add("#", "new")
        else:
            assert trie.remove("a", trap)

    def in_another_thread() -> None:
        writer = Thread(target=write)
        writer.start()
        writer.join()

    trap.spring = in_another_thread
    assert trie.match("a") == (trap,)
    assert trap.spring is None
    after = (trap, "new") if change == "add" else ()
    assert trie.match("a") == trie.match("a") == after


@pytest.mark.parametrize("change", ["add", "remove"])
def test_a_reader_in_the_middle_of_a_change_caches_nothing_that_outlives_it(change: str) -> None:
    """Wherever a writer stops to ask for a hash, a reader comes and goes; after the change it is seen."""
    moments = 0
    while True:
        trie: FilterTrie[Any] = FilterTrie()
        trap = Trap()
        trie.add("#", "other")
        if change == "remove":
            trie.add("a", trap)
        trap.after = moments
        seen: list[tuple[Any, ...]] = []
        trap.spring = lambda trie=trie, seen=seen: seen.append(trie.match("a"))
        assert trie.add("a", trap) if change == "add" else trie.remove("a", trap)
        trap.spring = None
        if not seen:
            break
        assert trie.match("a") == (("other", trap) if change == "add" else ("other",))
        moments += 1
    assert moments >= 2


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_readers_go_without_the_lock_of_the_writer() -> None:
    """Readers see what is always there, in order, and never an error, while a writer adds and removes."""
    trie: FilterTrie[int] = FilterTrie()
    always = list(range(100))
    for value in always:
        trie.add("a/+", value)
    done = Event()

    def read() -> int:
        rounds = 0
        while not done.is_set():
            found = trie.match(f"a/{rounds % 7}")
            assert list(found[:100]) == always
            assert len(set(found)) == len(found)
            assert len(list(trie)) >= 100
            rounds += 1
        return rounds

    def write() -> None:
        try:
            for number in range(2_000):
                value = 1_000 + number
                for text in ("a/+", f"a/{number % 7}", "a/1/#", f"b/{number}"):
                    trie.add(text, value)
                if number % 2:
                    for text in ("a/+", f"a/{number % 7}", "a/1/#", f"b/{number}"):
                        trie.remove(text, value)
                        trie.remove(text, value - 1)
                    trie.remove(f"b/{number - 1}", value - 1)
                    trie.remove(f"a/{(number - 1) % 7}", value - 1)
        finally:
            done.set()

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        pool.submit(write).result()
        assert all(reader.result() for reader in readers)
    assert list(trie) == [("a/+", value) for value in always]
    assert all(trie.match(f"a/{number}") == tuple(always) for number in range(7))


def test_two_filters_meet_where_some_topic_matches_both() -> None:
    """Of all pairs of filters and all topics of three levels; the empty one, which nobody may publish, is one of them."""
    matched = {text: {topic for topic in ["", *TOPICS] if matches(text, topic)} for text in FILTERS}
    for one, other in product(FILTERS, repeat=2):
        assert may_meet(one, other) == bool(matched[one] & matched[other]), (one, other)


def test_a_filter_covers_another_if_it_matches_all_that_the_other_does() -> None:
    """Of all pairs of filters and all topics of three levels."""
    matched = {text: {topic for topic in ["", *TOPICS] if matches(text, topic)} for text in FILTERS}
    for granted, wanted in product(FILTERS, repeat=2):
        assert covers(granted, wanted) == (matched[granted] >= matched[wanted]), (granted, wanted)
    assert all(covers(granted, topic) == (topic in matched[granted]) for granted in FILTERS for topic in TOPICS)
