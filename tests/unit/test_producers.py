"""Idempotent producers: whatever order, refusals, crashes, threads and interrupts there are, a number is stored once."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import lmdb
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import qflow
from qflow.storage.log.transaction_log import Unit
from qflow.storage.streams import producers as table
from qflow.storage.streams.producers import PRODUCER_EXPIRY_S, PRODUCERS, WINDOW
from qflow.streams import producers as room
from qflow.streams.producers import Answer, Claim, Producers
from thorough import examples
from unit.clocks import LONG_S, Clock, until

pytestmark = pytest.mark.two_drivers

REMEMBERED = 2
"""Producers in memory, so that most are evicted."""
STORED = 99
"""Beside the table: what is stored, message by message."""
NEW, DUPLICATE, PENDING = Answer.NEW, Answer.DUPLICATE, Answer.PENDING


class Log:
    """A log of batches of claims, each with a message, and the memory of producers over it."""

    def __init__(self, path: str) -> None:
        self.env = lmdb.open(path, map_size=2**28, lib_version=0, sync=False)
        self.clock = Clock()
        self.leading = threading.Lock()
        self.reads = 0
        self.open()

    def open(self) -> None:
        """Begin with an empty memory, as after a crash."""
        self.producers = Producers(self.read, self.clock.wall, REMEMBERED)

    @contextmanager
    def read(self) -> Iterator[Any]:
        self.reads += 1
        with self.env.begin() as txn:
            yield txn

    def claim(self, name: str, number: int) -> tuple[Answer, Claim]:
        claim = self.producers.claim(name, number)
        return claim.try_take(), claim

    def write(self, claims: Iterable[Claim], *, commit: bool = True) -> None:
        """Write claims, and a message for each, in one transaction."""
        with self.env.begin(write=True) as txn:
            for claim in claims:
                claim.write(txn)
                key = bytes((STORED,)) + f"{claim.producer} {claim.number:020}".encode()
                count = int(txn.get(key, b"0")) + 1
                txn.put(key, str(count).encode())
            if not commit:
                txn.abort()

    def commit(self, *claims: Claim) -> None:
        """Do what the writer does."""
        with self.leading:
            self.write(claims)
            for claim in claims:
                claim.committed(None)

    def stored(self) -> Counter[tuple[str, int]]:
        """Return how often each number is stored."""
        found: Counter[tuple[str, int]] = Counter()
        with self.env.begin() as txn, txn.cursor() as cursor:
            for key, value in cursor:
                if key[0] == STORED:
                    name, number = key[1:].decode().split()
                    found[name, int(number)] = int(value)
        return found


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(str(tmp_path))
    yield log
    log.env.close()


class Histories(RuleBasedStateMachine):
    """Claims of four producers, batches that fail or not, crashes: against a plain set of what is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory()
        self.log = Log(self.directory.name)
        self.stored: set[tuple[str, int]] = set()
        self.flying: dict[tuple[str, int], Claim] = {}
        self.waiting: list[tuple[Claim, Claim, list[str]]] = []
        """(who waits, for whom, how often it was woken)."""
        self.duplicates = 0

    def teardown(self) -> None:
        self.log.env.close()
        self.directory.cleanup()

    def highest(self, name: str) -> int | None:
        return max((number for one, number in self.stored if one == name), default=None)

    def expected(self, name: str, number: int) -> Answer | None:
        """Return what a claim is told by the model; None: it is below the window."""
        highest = self.highest(name)
        if (name, number) in self.flying:
            return PENDING
        if highest is not None and number < highest - 1024:
            return None
        return DUPLICATE if (name, number) in self.stored else NEW

    def ask(self, claim: Claim, expected: Answer | None) -> None:
        """Have a claim try, and see that it is told what it must be."""
        woken: list[str] = []
        if expected is None:
            with pytest.raises(qflow.InvalidArgument, match="1,024 below"):
                claim.try_take(lambda: woken.append("woken"))
            return
        blocker = self.flying.get((claim.producer, claim.number))
        assert claim.try_take(lambda: woken.append("woken")) is expected
        if expected is NEW:
            self.flying[claim.producer, claim.number] = claim
        elif expected is PENDING:
            assert blocker is not None
            self.waiting.append((claim, blocker, woken))
        else:
            self.duplicates += 1

    def end(self, outcomes: dict[Claim, bool]) -> None:
        """Tell claims what became of them, and have those ask again who waited for one."""
        for claim, holds in outcomes.items():
            (claim.committed if holds else claim.refused)(None)
            del self.flying[claim.producer, claim.number]
            if holds:
                self.stored.add((claim.producer, claim.number))
        waiting, self.waiting = self.waiting, []
        for claim, blocker, woken in waiting:
            if blocker in outcomes:
                assert woken == ["woken"]
                known = DUPLICATE if outcomes[blocker] else self.expected(claim.producer, claim.number)
                self.ask(claim, known)
            else:
                assert woken == []
                self.waiting.append((claim, blocker, woken))

    @rule(
        name=st.sampled_from("abcd"),
        number=st.one_of(
            st.integers(0, 6).map(lambda number: (False, number)),
            st.sampled_from([(False, 2**63 - 1), (False, 2**40)]),
            st.integers(-4, 4).map(lambda offset: (True, offset)),
            st.integers(-1026, -1022).map(lambda offset: (True, offset)),
            st.integers(1020, 1030).map(lambda offset: (True, offset)),
        ),
    )
    def claim(self, name: str, number: tuple[bool, int]) -> None:
        relative, place = number
        if relative:
            place = min(max((self.highest(name) or 0) + place, 0), 2**63 - 1)
        self.ask(self.log.producers.claim(name, place), self.expected(name, place))

    @rule(data=st.data(), again=st.booleans())
    def batch(self, data: st.DataObject, again: bool) -> None:
        """Commit some claims, in any order; others were refused, perhaps after a first transaction that failed."""
        claims = data.draw(st.permutations(list(self.flying.values())))
        part = claims[: data.draw(st.integers(0, len(claims)))]
        if again:
            self.log.write(part, commit=False)
        outcomes = {claim: data.draw(st.booleans()) for claim in part}
        self.log.write([claim for claim, holds in outcomes.items() if holds])
        self.end(outcomes)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """Somebody is stopped on the way: with a number, or waiting for one."""
        if self.flying and data.draw(st.booleans()):
            claim = data.draw(st.sampled_from(list(self.flying.values())))
            claim.give_up()
            self.end({claim: False})
        elif self.waiting:
            waiter = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
            waiter[0].give_up()
            assert waiter[2] == []

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Lose the memory; what was being committed holds, or does not."""
        claims = list(self.flying.values())
        part = claims[: data.draw(st.integers(0, len(claims)))]
        holds = data.draw(st.booleans())
        self.log.write(part, commit=holds)
        if holds:
            self.stored |= {(claim.producer, claim.number) for claim in part}
        self.flying, self.waiting, self.duplicates = {}, [], 0
        self.log.open()

    @invariant()
    def each_is_stored_once(self) -> None:
        assert self.log.stored() == Counter(self.stored)

    @invariant()
    def duplicates_are_counted(self) -> None:
        assert self.log.producers.duplicates_total == self.duplicates

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.log.producers) <= max(REMEMBERED, len({name for name, _ in self.flying}))


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)


def test_a_number_is_stored_once(log):
    """Sent again it is acknowledged and counted, before and after a crash."""
    answer, claim = log.claim("sensor-7", 41)
    assert answer is NEW
    log.commit(claim)
    assert log.claim("sensor-7", 41)[0] is DUPLICATE
    assert log.producers.duplicates_total == 1
    log.open()
    assert log.claim("sensor-7", 41)[0] is DUPLICATE
    assert log.claim("sensor-8", 41)[0] is NEW
    assert log.stored() == {("sensor-7", 41): 1}


def test_a_record_of_a_duplicate_is_not_written_again(log):
    """What is stored already costs no commit."""
    log.commit(log.claim("p", 1)[1])
    with log.read() as txn:
        before = table.read(txn, "p")
    log.clock.advance(1_000)
    assert log.claim("p", 1)[0] is DUPLICATE
    with log.read() as txn:
        assert table.read(txn, "p") == before


def test_a_number_below_the_window_is_refused_with_a_way_out(log):
    """Nobody knows whether it is stored: neither answer would be right."""
    log.commit(log.claim("p", 5_000)[1])
    with pytest.raises(qflow.InvalidArgument, match=r"number 3975 of producer 'p' .*5000.*above 5000"):
        log.claim("p", 5_000 - WINDOW - 1)
    assert log.claim("p", 5_000 - WINDOW)[0] is NEW


def test_who_waits_for_a_committed_number_has_a_duplicate_also_below_the_window(log):
    """That it is stored is known, however far the window has moved in the same batch."""
    _, low = log.claim("p", 0)
    _, high = log.claim("p", 5_000)
    again = log.producers.claim("p", 0)
    assert again.try_take() is PENDING
    log.commit(high, low)
    low.give_up()  # too late
    assert again.try_take() is DUPLICATE
    assert log.stored() == {("p", 0): 1, ("p", 5_000): 1}


def test_producers_beyond_the_limit_are_read_again(log):
    """Memory holds those that were asked for last, and a record is read once as long as it is there."""
    for name in "abc":
        log.commit(log.claim(name, 1)[1])
    assert (len(log.producers), log.reads) == (2, 3)
    assert log.claim("b", 1)[0] is DUPLICATE
    assert log.reads == 3
    assert log.claim("a", 1)[0] is DUPLICATE
    assert log.claim("b", 1)[0] is DUPLICATE
    assert log.reads == 4
    assert log.claim("c", 1)[0] is DUPLICATE
    assert log.reads == 5


def test_who_has_claims_on_their_way_is_not_evicted(log):
    """A second claim of the number finds the first, whoever came in between."""
    claims = [log.claim(name, 1)[1] for name in "abcde"]
    assert len(log.producers) == 5
    assert [log.claim(name, 1)[0] for name in "abcde"] == [PENDING] * 5
    log.commit(*claims)
    assert len(log.producers) == 2
    assert [log.claim(name, 1)[0] for name in "abcde"] == [DUPLICATE] * 5


def test_a_damaged_record_stops_its_producer_and_no_other(log):
    """What is known of its numbers is gone: it must not be taken for nothing, and the error says how to go on."""
    with log.env.begin(write=True) as txn:
        txn.put(bytes((PRODUCERS,)) + b"hurt", b"damaged")
    for _ in range(2):
        with pytest.raises(qflow.CorruptionError, match=r"'hurt'.*new producer name"):
            log.claim("hurt", 1)
    assert log.claim("well", 1)[0] is NEW


def test_a_record_damaged_while_it_was_in_memory_is_written_anew(log):
    """One producer's bytes must not fail a batch that others share; memory has all that was committed."""
    log.commit(log.claim("p", 1)[1], log.claim("p", 3)[1])
    claims = [log.claim("p", number)[1] for number in (2, 5)]
    with log.env.begin(write=True) as txn:
        txn.put(bytes((PRODUCERS,)) + b"p", b"damaged")
    log.commit(*claims)
    log.open()
    assert [log.claim("p", number)[0] for number in (1, 2, 3, 4, 5)] == [DUPLICATE] * 3 + [NEW, DUPLICATE]


def test_a_producer_that_is_forgotten_on_disk_is_remembered_in_memory_and_written_again(log):
    """As long as it is in memory nothing is lost, and what is written next says all of it."""
    log.commit(log.claim("p", 1)[1])
    log.clock.advance(PRODUCER_EXPIRY_S)
    with log.env.begin(write=True) as txn:
        assert table.forget(txn, int(log.clock.wall() * 1000)).removed == 1
    assert log.claim("p", 1)[0] is DUPLICATE
    log.commit(log.claim("p", 2)[1])
    log.open()
    assert [log.claim("p", number)[0] for number in (1, 2, 3)] == [DUPLICATE, DUPLICATE, NEW]
    with log.env.begin(write=True) as txn:
        assert table.forget(txn, int(log.clock.wall() * 1000)).removed == 0


@pytest.mark.parametrize("name", ["", "x" * 256, "ü" * 128, "a\0b", "\ud800", b"bytes", None, 7])
def test_a_name_that_is_none_is_refused(name, log):
    """1 to 255 bytes of UTF-8 without NUL."""
    with pytest.raises(qflow.InvalidArgument, match="producer"):
        log.producers.claim(name, 1)


@pytest.mark.parametrize("number", [-1, 2**63, 10**5_000, 1.0, "1", True, None], ids=lambda value: type(value).__name__)
def test_a_number_that_is_none_is_refused(number, log):
    """An int from 0 to 2**63 - 1, however long the one that is not."""
    with pytest.raises(qflow.InvalidArgument, match="number"):
        log.producers.claim("p", number)


@pytest.mark.parametrize(("name", "number"), [("x", 0), ("ü" * 127 + "x", 2**63 - 1), ("/+ \n", 1)])
def test_names_and_numbers_at_the_borders_are_taken(name, number, log):
    """All of them fit into the table."""
    log.commit(log.claim(name, number)[1])
    log.open()
    assert log.claim(name, number)[0] is DUPLICATE


def test_one_that_has_joined_a_batch_is_not_given_up(log):
    """Only the writer knows what becomes of it."""
    _, claim = log.claim("p", 1)
    claim.unit = Unit(parties=[claim])
    claim.unit.joined = True
    claim.give_up()
    assert log.claim("p", 1)[0] is PENDING
    log.commit(claim)
    claim.give_up()
    assert log.claim("p", 1)[0] is DUPLICATE


def test_who_gives_up_waiting_is_not_woken(log):
    """An event loop that has gone hears nothing more; the others do."""
    _, claim = log.claim("p", 1)
    woken: list[str] = []
    gone, stays = log.producers.claim("p", 1), log.producers.claim("p", 1)
    assert gone.try_take(lambda: woken.append("gone")) is PENDING
    assert stays.try_take(lambda: woken.append("stays")) is PENDING
    gone.give_up()
    log.commit(claim)
    assert woken == ["stays"]


def test_giving_up_twice_is_once(log):
    """Who was interrupted does it again, when others may have the number."""
    _, claim = log.claim("p", 1)
    claim.give_up()
    _, other = log.claim("p", 1)
    claim.give_up()
    assert log.claim("p", 1)[0] is PENDING
    log.commit(other)
    claim.give_up()
    assert log.claim("p", 1)[0] is DUPLICATE


def test_giving_up_too_late_does_not_bring_back_what_was_evicted(log):
    """An entry that has left memory knows less than the one that was read since, and must not take its place."""
    _, old = log.claim("p", 1)
    log.commit(old)
    for name in "ab":
        log.commit(log.claim(name, 1)[1])
    log.commit(log.claim("p", 2)[1])
    _, third = log.claim("p", 3)
    old.give_up()
    assert [log.claim("p", number)[0] for number in (1, 2, 3)] == [DUPLICATE, DUPLICATE, PENDING]
    log.commit(third)
    old.give_up()
    assert [log.claim("p", number)[0] for number in (1, 2, 3)] == [DUPLICATE] * 3


# Threads -------------------------------------------------------------------------------------------------------------


class Asker(threading.Thread):
    """Takes a number, and keeps what it was told."""

    def __init__(self, log: Log, name: str, number: int, timeout_s: float | None = LONG_S) -> None:
        super().__init__(daemon=True)
        self.claim = log.producers.claim(name, number)
        self.timeout_s = timeout_s
        self.answer: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self.claim.take(self.timeout_s)
        except qflow.QflowError as error:
            self.answer = error

    def told(self) -> Any:
        self.join(LONG_S)
        assert not self.is_alive(), "it hangs"
        return self.answer


def waiting(claim: Claim, count: int) -> None:
    """Return when so many wait for a claim."""
    until(lambda: len(claim._waiting) == count)


@pytest.mark.owner_only
def test_threads_that_wait_for_a_number_are_all_told_that_it_is_stored(log):
    """One message, and a duplicate for each of the others."""
    first = log.producers.claim("p", 1)
    assert first.take()
    askers = [Asker(log, "p", 1) for _ in range(8)]
    waiting(first, 8)
    log.commit(first)
    assert [asker.told() for asker in askers] == [False] * 8
    assert log.producers.duplicates_total == 8


@pytest.mark.owner_only
@pytest.mark.parametrize("end", ["refused", "give_up"])
def test_where_a_number_is_refused_one_of_those_who_wait_has_it(end, log):
    """The others wait for that one."""
    first = log.producers.claim("p", 1)
    assert first.take()
    askers = [Asker(log, "p", 1) for _ in range(4)]
    waiting(first, 4)
    if end == "refused":
        first.refused(None)
    else:
        first.give_up()
    until(lambda: any(asker.answer for asker in askers))
    (winner,) = [asker for asker in askers if asker.answer]
    waiting(winner.claim, 3)
    log.commit(winner.claim)
    assert sorted(asker.told() for asker in askers) == [False, False, False, True]


@pytest.mark.owner_only
def test_who_waits_in_vain_is_told_and_leaves_no_trace(log):
    """The number stays with whom it was; nothing points to who has gone."""
    first = log.producers.claim("p", 1)
    assert first.take(0)
    with pytest.raises(qflow.ProducerBusy, match=r"number 1 of producer 'p'"):
        log.producers.claim("p", 1).take(0)
    assert isinstance(Asker(log, "p", 1, 0.01).told(), TimeoutError)
    assert first._waiting == []
    log.commit(first)
    assert not log.producers.claim("p", 1).take(0)
    assert log.producers.duplicates_total == 1


def test_whatever_threads_send_again_is_stored_once(log):
    """Eight threads send the same 300 numbers in orders of their own, and again where they are refused."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    failures: list[BaseException] = []

    def send(order: random.Random) -> None:
        try:
            numbers = [(name, number) for name in "abc" for number in range(100)]
            order.shuffle(numbers)
            while numbers:
                name, number = numbers.pop()
                claim = log.producers.claim(name, number)
                if not claim.take(LONG_S):
                    continue
                if order.random() < 0.3:
                    claim.refused(None)
                    numbers.insert(order.randrange(len(numbers) + 1), (name, number))
                else:
                    log.commit(claim)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=send, args=(random.Random(seed + at),), daemon=True) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG_S)
        assert not thread.is_alive(), "it hangs"
    assert failures == []
    assert log.stored() == Counter((name, number) for name in "abc" for number in range(100))
    assert log.producers.duplicates_total == 7 * 300
    assert len(log.producers) == REMEMBERED


@pytest.mark.owner_only
def test_two_threads_that_read_a_record_at_once_make_one_entry(log):
    """None begins from what was read before a commit: the second would not see what the first has stored."""
    inside, go = threading.Event(), threading.Event()
    plain = log.read

    @contextmanager
    def slow() -> Iterator[Any]:
        with plain() as txn:
            yield txn
            inside.set()
            assert go.wait(LONG_S)

    log.producers._read = slow
    first = Asker(log, "p", 1)
    assert inside.wait(LONG_S)
    second = Asker(log, "p", 1)
    go.set()
    until(lambda: first.answer or second.answer)
    winner, other = (first, second) if first.answer else (second, first)
    waiting(winner.claim, 1)
    log.commit(winner.claim)
    assert other.told() is False
    assert log.reads == 1


# Interrupts ----------------------------------------------------------------------------------------------------------


class Calls:
    """Raises an interrupt at the `n`-th place in the room's own code where one could strike."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_filename == room.__file__ and event in ("call", "c_return"):
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def run(self, work: Any) -> bool:
        """Do some work; return whether it was interrupted."""
        sys.setprofile(self)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        return self.left < 0


@pytest.mark.owner_only
@pytest.mark.parametrize("known", [False, True])
def test_an_interrupt_while_a_number_is_taken_leaves_it_free(known, log):
    """Whoever gives the claim up, wherever it was struck, leaves no trace."""
    interrupted, count = True, 0
    while interrupted:
        log.open()
        if known:
            log.claim("p", 7)[1].refused(None)
        claim = log.producers.claim("p", 1)
        interrupted = Calls(count).run(claim.take)
        claim.give_up()
        answer, other = log.claim("p", 1)
        assert answer is NEW, count
        other.refused(None)
        assert not log.producers._busy
        count += 1
    assert count > 1


@pytest.mark.owner_only
def test_who_is_interrupted_while_giving_up_gives_up_again(log):
    """At whichever call that is, who waits is woken, and the number can be had."""
    interrupted, count = True, 0
    while interrupted:
        log.open()
        claim = log.producers.claim("p", count)
        assert claim.take()
        woken: list[int] = []
        others = [log.producers.claim("p", count) for _ in range(3)]
        for at, other in enumerate(others):
            assert other.try_take(lambda at=at: woken.append(at)) is PENDING  # noqa: B023
        interrupted = Calls(count).run(lambda: type(claim).give_up.__wrapped__(claim))  # noqa: B023 - not sheltered
        between = log.producers.claim("p", count)
        answer = between.try_take()  # by somebody who came before it was given up again
        claim.give_up()
        assert set(woken) == {0, 1, 2}
        if answer is NEW:
            assert log.claim("p", count)[0] is PENDING
        between.give_up()
        assert others[0].try_take() is NEW
        others[0].give_up()
        assert not log.producers._busy
        count += 1
    assert count > 5
