"""The journal before the log: what is confirmed is there after a power cut at any step, and nothing is there twice."""

from __future__ import annotations

import errno
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import lmdb
import pytest
from click.testing import CliRunner

import inside
import qflow
import qflow.inspect
from crash.seams import run_in_child, was_killed
from faults.seams import Faults, faulty_broker, in_thread
from qflow.broker import Broker, make_broker
from qflow.cli.main import app
from qflow.config import MIN_JOURNAL_BYTES, BrokerSettings
from qflow.doctor import Look, Severity, judge
from qflow.identity import new_uuid, uuid_of
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.log import confirming, direct, journal, journal_reading, placing, recovery, writer
from qflow.storage.log.batch import Order
from qflow.storage.log.confirming import Confirming
from qflow.storage.log.journal import HEADER_BYTES, JOURNAL, Head, Journal, JournalState, read_state
from qflow.storage.log.keys import BLOCKS, key_of
from qflow.storage.log.shared_reading import open_to_read
from qflow.storage.log.table import LAST
from qflow.troubles import LOG_TAKES
from unit.clocks import until

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
SECTOR = 512
OWNER = uuid_of(bytes(range(16)))
FILES = Files()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a journal from the first small batch on, and one that is full after a few."""
    monkeypatch.setattr(confirming, "FIRST_BATCHES", 0)


@pytest.fixture
def never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the log take over what a large journal holds at the end only."""
    monkeypatch.setattr(writer, "SOON_S", 1000)
    monkeypatch.setattr(confirming, "LATE_S", 1000)


def open_small(path: Path, **settings: Any) -> Broker:
    """Open a spool without maintenance: what that reads is committed before."""
    broker = qflow.open(path, **{"journal_bytes": "8KiB", **settings})
    inside.still(broker)
    return broker


# The file ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Journal]:
    one = Journal.create(str(tmp_path / JOURNAL), MIN_JOURNAL_BYTES, OWNER, FILES, 1)
    yield one
    one.close()


def test_a_journal_is_made_in_few_writes(tmp_path: Path) -> None:
    """Whoever waits for it has the interpreter back after each: beside a thread that computes, 5 ms later."""
    writes: list[int] = []

    class Counting(Files):
        def __init__(self) -> None:
            self.pwrite = lambda fd, data, position: writes.append(len(data)) or os.pwrite(fd, data, position)

    size = 4 * 2**20 + 100
    Journal.create(str(tmp_path / JOURNAL), size, OWNER, Counting(), 1).close()
    assert sum(writes) == (tmp_path / JOURNAL).stat().st_size == size
    assert len(writes) <= 6


def append(one: Journal, changes: bytes) -> None:
    one.write(changes)
    one.sync()


def read(made: Journal, applied: int) -> journal_reading.Found:
    state = JournalState(applied, made.mark)
    opened = journal_reading.open_to_write(made.path, FILES, OWNER, state, clean=False)
    assert opened is not None
    os.close(opened.fd)
    looked = journal_reading.look(made.path, FILES, OWNER, state, False, None)
    found = opened.found
    if looked is None:
        assert (found.records, found.problems) == ([], [])
    else:
        assert looked.found == found
    return found


def test_what_was_written_since_the_last_commit_is_read_whatever_lies_behind_it(made: Journal) -> None:
    """Records of any length, in a file that begins anew a hundred times."""
    chance = random.Random(1)
    pending: list[bytes] = []
    applied = anew = 0
    while anew < 100:
        changes = chance.randbytes(chance.randrange(1, 900))
        if not made.fits(len(changes)) or chance.random() < 0.05:
            made.begin_anew()
            applied += len(pending)
            pending.clear()
            anew += 1
        append(made, changes)
        pending.append(changes)
        found = read(made, applied)
        assert (found.records, found.problems, found.last) == (pending, [], applied + len(pending))
        assert made.records(applied) == pending
    made.clear()
    assert read(made, applied + len(pending)).records == []
    state = JournalState(applied + len(pending), made.mark)
    assert journal_reading.look(made.path, FILES, OWNER, state, True, None) is None


def test_a_record_that_was_not_written_as_a_whole_is_none(made: Journal) -> None:
    """Cut at any byte, before what a record of an earlier use has left there."""
    for _ in range(6):
        append(made, b"before" * 100)
    made.begin_anew()
    append(made, b"first" * 10)
    old = Path(made.path).read_bytes()
    append(made, b"second" * 10)
    new = Path(made.path).read_bytes()
    differs = [at for at in range(len(old)) if old[at] != new[at]]
    first, last = differs[0], differs[-1]
    for cut in range(first, last + 1):
        Path(made.path).write_bytes(new[:cut] + old[cut:])
        found = read(made, 6)
        assert (found.records, found.problems) == ([b"first" * 10], [])


def test_zeros_in_place_of_the_first_record_are_reported(made: Journal) -> None:
    """As the end of a log that was closed has them, when this one was not."""
    for number in range(4):
        append(made, b"%d" % number * 20)
    with open(made.path, "r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(bytes(SECTOR // 8))
    found = read(made, 0)
    assert found.records == []
    assert "4 commits are lost" in found.problems[0]


@pytest.mark.parametrize("bit", [1, 4, 128])
def test_a_flipped_bit_ends_what_is_carried_over_and_is_reported(bit: int, made: Journal) -> None:
    """Wherever it is: the records before it are there, the number of those that are lost is said."""
    records = [b"%d" % number * 20 for number in range(4)]
    ends = []
    for record in records:
        append(made, record)
        ends.append(made.position)
    whole = Path(made.path).read_bytes()
    starts = [HEADER_BYTES, *ends[:-1]]
    for index, (start, record) in enumerate(zip(starts, records, strict=True)):
        for at in range(start, start + 24 + len(record)):
            Path(made.path).write_bytes(whole[:at] + bytes((whole[at] ^ bit,)) + whole[at + 1 :])
            found = read(made, 0)
            assert found.records == records[:index]
            if index < 3:
                assert found.last == 4
                assert f"{4 - index} commits from there on are lost" in found.problems[0]
            else:
                assert found.problems == []  # as one that was not written as a whole


def test_what_looks_like_records_is_not_searched_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that are full of their beginnings, each of which is said to reach to the end of the file.

    So whoever may publish had the next opening after a kill take as long as the square of the journal.
    """
    size, checked = 256 * 1024, []
    real = journal._checksum
    head = struct.Struct("<4sIQ")
    with closing(Journal.create(str(tmp_path / JOURNAL), size, OWNER, FILES, 1)) as made:
        while made.fits(16 * 1024):
            ends = range(size - made.position - journal._RECORD.size, 0, -head.size)[: 16 * 1024 // head.size]
            append(made, b"".join(head.pack(b"\xf5jr\n", max(0, end - 64), 2**40) for end in ends))
        applied = made.following - 1
        made.begin_anew()
        append(made, b"the only one")
        monkeypatch.setattr(journal, "_checksum", lambda *one: checked.append(len(one[2])) or real(*one))
        found = read(made, applied)
    assert (found.records, found.last) == ([b"the only one"], applied + 1)
    assert "it is not known whether commits behind record" in found.problems[0]
    assert sum(checked) < 100 * size


def header(owner: str, data: bytes, size: int = MIN_JOURNAL_BYTES) -> bytes:
    return journal._header(owner, Head(size, bytes(range(8)))) + data[HEADER_BYTES:]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda data: data[:10], "damaged.*move this one away"),
        (lambda data: b"x" * len(data), "damaged"),
        (lambda data: bytes(len(data)), "damaged"),
        (lambda data: header(OWNER, data).replace(b"qflowjnl", b"another."), "damaged"),
        (lambda data: header(OWNER, data, size=2**40), "not a journal"),
        (lambda data: header(new_uuid(), data), "belongs to the log .* put the right file back"),
    ],
)
def test_what_is_no_journal_of_this_log_is_refused_and_left(
    made: Journal, spoil: Callable[[bytes], bytes], text: str
) -> None:
    path = Path(made.path)
    path.write_bytes(spoil(path.read_bytes()))
    before = path.read_bytes()
    with pytest.raises(qflow.CorruptionError, match=text):
        read(made, 0)
    assert path.read_bytes() == before


def test_a_header_that_is_read_while_its_owner_writes_it_is_read_again(made: Journal) -> None:
    """Cut at any byte: of one header before it, of the next one from there on."""
    size, heads = journal._HEAD_BYTES, []
    for _ in range(2):
        state = JournalState(0, made.mark)
        made.renew(made.mark)
        heads.append(Path(made.path).read_bytes()[:size])

    class Torn(Files):
        def __init__(self, cut: int) -> None:
            self.torn = [heads[1][:cut] + heads[0][cut:]]
            self.pread = lambda fd, size, at: self.torn.pop() if self.torn and not at else os.pread(fd, size, at)

    for cut in range(size + 1):
        fd = os.open(made.path, os.O_RDONLY)
        try:
            assert journal.read_head(Torn(cut), fd, OWNER, made.path, clean=False).is_of(state)
        finally:
            os.close(fd)


def test_a_journal_that_is_damaged_beside_a_log_that_was_closed_is_not_needed(tmp_path: Path) -> None:
    """So the sentence speaks of no loss, and moving it away is all."""
    with open_small(tmp_path) as broker:
        put_some(broker)
    journal = tmp_path / JOURNAL
    journal.write_bytes(b"x" * 8192)
    with pytest.raises(qflow.CorruptionError, match="was closed, and needs none of what it holds: move it away"):
        open_small(tmp_path)
    journal.rename(tmp_path / "away")
    with open_small(tmp_path) as broker:
        assert broker.recovery.problems == ()
        assert there(broker) == list(range(20))


# Power cuts ----------------------------------------------------------------------------------------------------------


class TornFiles(Files):
    """Knows what of the journal is not synced, and has something called before and after each step at it."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.unsynced: list[tuple[int, bytes]] = []
        self.step = step
        self.pwrite = self._pwrite  # type: ignore[method-assign, assignment]
        self.sync_data = self._sync_data  # type: ignore[method-assign, assignment]

    def _pwrite(self, fd: int, data: bytes, position: int) -> int:
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(JOURNAL):
            return os.pwrite(fd, data, position)
        self.unsynced.append((position, os.pread(fd, len(data), position)))
        self.step()
        written = os.pwrite(fd, data, position)
        self.step()
        return written

    def _sync_data(self, fd: int) -> None:
        self.step()
        os.fdatasync(fd)
        self.unsynced.clear()
        self.step()


class World:
    """A spool whose power is cut at each step: the copies that leaves are opened, and must hold what was confirmed."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        self.path = path
        self._chance = chance
        self.files = TornFiles(self._cut)
        self.confirmed: list[bytes] = []
        self.coming: list[bytes] = []
        """What is there when the call that is under way is done."""
        self.copies = 0
        self.broker = self._open(path)
        self.queue = self.broker.declare_queue("q")

    def _open(self, path: Path) -> Broker:
        def environment(log: str, files: Files) -> Environment:
            env = Environment(log, files)
            commit = env.commit

            def cut_around(txn: Any) -> None:
                self.files.step()
                commit(txn)
                self.files.step()

            env.commit = cut_around  # type: ignore[method-assign]
            return env

        settings = BrokerSettings(journal_bytes=MIN_JOURNAL_BYTES)
        broker = make_broker(path, settings, files=self.files, open_environment=environment)
        inside.still(broker)  # what stands for two of its rounds would be done by the writer, too: a step takes long
        return broker

    def reopen(self) -> None:
        """Have another owner."""
        self.broker.close()
        self.broker = self._open(self.path)
        self.queue = self.broker.queue("q")

    def change(self, after: list[bytes], call: Callable[[], object]) -> None:
        self.coming = after
        call()
        self.confirmed = after

    def _cut(self) -> None:
        """Copy what lies on the disk, with some sectors as they were before the last sync, and open it."""
        if not self.confirmed or self._chance.random() < 0.6:
            return  # nothing is there to be lost
        in_thread(self._look)  # in this one a call is under way: garbage of another one would have it refused

    def _look(self) -> None:
        copy = self._copy(self.path)
        self._check_seen(copy)
        if self._chance.random() < 0.15:  # and once more, while the copy is opened
            self._cut_twice(copy)
        self._check(copy)
        shutil.rmtree(copy)

    def _copy(self, path: Path) -> Path:
        self.copies += 1
        copy = self.path.with_name(f"copy{self.copies}")
        shutil.copytree(path, copy, ignore=shutil.ignore_patterns("lock.mdb", "spill", "wiping", "stats.json*"))
        with open(copy / JOURNAL, "r+b") if (copy / JOURNAL).exists() else open(os.devnull, "r+b") as file:
            for position, old in self.files.unsynced:
                for start in range(0, len(old), SECTOR):
                    if self._chance.random() < 0.5:
                        file.seek(position + start)
                        file.write(old[start : start + SECTOR])
        return copy

    def _check_seen(self, copy: Path) -> None:
        """Whoever only reads it sees as much."""
        env = open_to_read(str(copy), FILES)
        assert env is not None
        try:
            found = recovery.read_log(env)
            assert found.problems == []
            rows = next(record.rows for record in found.queues if record.name == "q")
            assert rows is not None
            assert rows[0].messages in (len(self.confirmed), len(self.coming))
        finally:
            env.close()

    def _cut_twice(self, copy: Path) -> None:
        """Open the copy, and have what lies there at each step of that opened, too."""
        copies: list[Path] = []
        step, self.files.step = self.files.step, lambda: copies.append(self._again(copy))
        unsynced, self.files.unsynced = self.files.unsynced, []
        try:
            self._open(copy).close()
        finally:
            self.files.step, self.files.unsynced = step, unsynced
        for again in copies:
            self._check(again)
            shutil.rmtree(again)

    def _again(self, copy: Path) -> Path:
        step, self.files.step = self.files.step, lambda: None
        try:
            return self._copy(copy)
        finally:
            self.files.step = step

    def _check(self, copy: Path) -> None:
        with open_small(copy) as broker:
            assert broker.recovery.problems == ()
            assert broker.check() == []
            assert [entry.sequence for entry in broker.queue("q").browse()]
            batch = broker.queue("q").get_many(1000, timeout_s=0)
            assert list(batch.bodies) in (self.confirmed, self.coming)


@pytest.mark.parametrize("seed", range(2))
def test_what_is_confirmed_outlasts_a_power_cut_at_each_step(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of writing, of beginning anew, of committing, of closing, and of what the next owner does at first; and a second
    one while what it left is opened."""
    monkeypatch.setattr(direct, "PATIENCE_S", 60.0)  # a step takes its time here, and one thread at a time takes some
    chance = random.Random(seed)
    world = World(tmp_path / "spool", chance)
    world.change([b"first"], lambda: world.queue.put(b"first"))
    for number in range(24):
        body = b"%d " % number * chance.choice([1, 200, 600])
        if chance.random() < 0.6 or len(world.confirmed) < 2:
            world.change([*world.confirmed, body], lambda body=body: world.queue.put(body))
        elif chance.random() < 0.7:
            delivery = world.queue.get(timeout_s=0)
            assert delivery.body == world.confirmed[0]
            world.change(world.confirmed[1:], lambda one=delivery: one.ack(wait=True))
        else:
            more = [body, body + b"!"]
            world.change([*world.confirmed, *more], lambda more=more: world.queue.put_many(more))
        if number == 12:
            world.reopen()
    world.broker.close()
    assert world.copies > 20


# In use --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def faults() -> Faults:
    return Faults()


def killed(path: Path, work: Callable[[Broker], object], soon_s: float = 1000, **settings: Any) -> None:
    """Leave a spool as a process does that is killed after some work, with what it did last in its journal."""

    def task() -> None:
        writer.SOON_S = soon_s
        broker = open_small(path, **settings)
        work(broker)
        os.kill(os.getpid(), 9)

    assert was_killed(run_in_child(task))


def put_some(broker: Broker, bodies: range = range(20)) -> None:
    queue = broker.declare_queue("q")
    for number in bodies:
        queue.put(b"%d" % number)


def there(broker: Broker) -> list[int]:
    return [int(body) for body in broker.queue("q").get_many(1000, timeout_s=0).bodies]


@pytest.mark.usefixtures("never_idle")
def test_small_batches_share_a_commit_and_large_ones_take_them_along(tmp_path: Path) -> None:
    """Counted at the log: a commit for each journal that is full, at the most; a record is no larger than what is new."""
    commits: list[object] = []

    def environment(log: str, files: Files) -> Environment:
        env = Environment(log, files)
        commit = env.commit
        env.commit = lambda txn: commits.append(txn) or commit(txn)  # type: ignore[method-assign, func-returns-value]
        return env

    with make_broker(tmp_path, BrokerSettings(), open_environment=environment) as broker:
        inside.still(broker)  # what maintenance reads is committed before
        put_some(broker)
        commits.clear()
        queue = broker.queue("q")
        for _ in range(100):
            queue.put(b"x" * 100)
        assert commits == []
        queue.put(b"y" * 2**20)
        assert broker.stats().journal_records == 0
        assert broker.check() == []


def test_the_log_has_all_of_it_soon_and_at_the_close(tmp_path: Path) -> None:
    with open_small(tmp_path) as broker:
        put_some(broker)
        until(lambda: broker.stats().journal_records == 0)
    with open_small(tmp_path) as broker:
        assert broker.recovery.journal_records == 0
        assert there(broker) == list(range(20))


def test_who_reads_the_log_in_the_process_of_its_owner_sees_what_is_confirmed(tmp_path: Path) -> None:
    """A stream's history, publish by publish."""
    with open_small(tmp_path) as broker:
        broker.declare_stream("s", topics=["a"])
        for number in range(30):
            broker.publish("a", b"%d" % number)
            assert broker.stream("s").last("a")["a"].body == b"%d" % number


def test_what_the_journal_holds_is_carried_over_and_counted(tmp_path: Path) -> None:
    killed(tmp_path, put_some)
    with open_small(tmp_path, journal="off") as broker:
        assert broker.recovery.journal_records > 0
        assert broker.recovery.problems == ()
        assert there(broker) == list(range(20))
    assert not (tmp_path / JOURNAL).exists()


@pytest.mark.parametrize("is_there", [True, False], ids=["damaged", "gone"])
def test_a_row_that_cannot_be_read_costs_the_queue_whose_notes_the_journal_holds_and_no_other(
    is_there: bool, tmp_path: Path
) -> None:
    """As without a journal: nothing of the other queues could be reached, for the spool was not opened."""

    def work(broker: Broker) -> None:
        bad, good = broker.declare_queue("bad"), broker.declare_queue("q")
        bad.put(b"0")
        for number in range(20):
            good.put(b"%d" % number)
        with broker.engine.log.read():
            pass  # the log has all of it by now
        bad.put(b"1")
        good.put(b"20")
        assert len(broker.engine.log._writer._confirming.notes) == 2

    killed(tmp_path, work)
    with lmdb.open(str(tmp_path / "log"), map_size=2**30, lib_version=0) as env, env.begin(write=True) as txn:
        row = key_of(BLOCKS, 1, 0, LAST)
        value = bytearray(txn.get(row))
        value[3] ^= 1
        assert txn.put(row, bytes(value)) if is_there else txn.delete(row)
    (tmp_path / "log" / "last").unlink()
    seen = qflow.inspect.read_spool(tmp_path)
    assert [problem for problem in seen.problems if "'bad' cannot be served" in problem]
    with open_small(tmp_path) as broker:
        assert there(broker) == list(range(21))
        assert [problem for problem in broker.recovery.problems if "'bad' cannot be served" in problem]
        assert broker.recovery.journal_problems


def test_who_reads_a_stream_of_a_spool_without_an_owner_sees_what_is_confirmed(tmp_path: Path) -> None:
    def work(broker: Broker) -> None:
        broker.declare_stream("s", topics=["a"])
        for number in range(30):
            broker.publish("a", b"%d" % number)

    killed(tmp_path, work)
    with qflow.inspect.read_stream(tmp_path, "s", on_gap=pytest.fail) as reader:
        assert [int(one.body) for batch in reader.new() for one in batch] == list(range(30))
    assert qflow.inspect.check_spool(tmp_path) == []


def test_a_snapshot_of_a_spool_without_an_owner_holds_what_its_journal_does(tmp_path: Path) -> None:
    killed(tmp_path / "spool", put_some)
    assert qflow.inspect.copy_spool(tmp_path / "spool", tmp_path / "copy").messages == 20
    assert qflow.inspect.read_spool(tmp_path / "copy").queues[0].messages == 20
    with open_small(tmp_path / "copy") as broker:
        assert broker.recovery.problems == ()
        assert there(broker) == list(range(20))


def test_a_journal_that_was_removed_after_a_crash_is_missed(tmp_path: Path) -> None:
    def work(broker: Broker) -> None:
        put_some(broker)
        until(lambda: not broker.stats().journal_records)
        writer.SOON_S = 1000  # what is put from here on stays in it
        put_some(broker)

    killed(tmp_path, work, soon_s=0.02)
    (tmp_path / JOURNAL).unlink()
    with open_small(tmp_path) as broker:
        assert "journal is missing" in broker.recovery.problems[0]
        assert there(broker)[:20] == list(range(20))


def test_a_log_that_fell_back_is_noticed(tmp_path: Path) -> None:
    """Another one in its place, from before: what the journal holds is carried over, and no sequence comes again."""
    spool = tmp_path / "spool"
    killed(spool, put_some)
    with open_small(spool):
        pass
    shutil.copytree(spool / "log", tmp_path / "before")
    killed(
        spool, lambda broker: (put_some(broker, range(20, 25)), broker.queue("q").put(b"x" * 2**20), put_some(broker))
    )
    shutil.rmtree(spool / "log")
    shutil.copytree(tmp_path / "before", spool / "log")
    with open_small(spool) as broker:
        (problem,) = [problem for problem in broker.recovery.problems if "fell back" in problem]
        assert "or both were copied while their owner wrote" in problem
        assert broker.queue("q").put(b"new") >= 46


@pytest.mark.usefixtures("never_idle")
@pytest.mark.parametrize("before", [0, 5])
def test_a_log_that_fell_back_behind_a_batch_that_its_journal_never_held_is_noticed(
    before: int, tmp_path: Path
) -> None:
    """To the commit before it, where the journal held something before it, and something behind it."""
    spool, older = tmp_path / "spool", tmp_path / "older"

    def work(broker: Broker) -> None:
        put_some(broker)
        with broker.engine.log.read():  # committed
            shutil.copytree(spool / "log", older)
        put_some(broker, range(20, 20 + before))
        broker.queue("q").put(b"0" * 2**20)
        put_some(broker, range(26, 27))

    killed(spool, work, journal_bytes="64KiB")
    shutil.rmtree(spool / "log")
    shutil.copytree(older, spool / "log")
    text = f"fell back, and {f'{before + 1} commits are' if before else '1 commit is'} lost"
    assert text in qflow.inspect.check_spool(spool)[0]
    assert text in qflow.inspect.read_spool(spool).problems[0]
    with open_small(spool, journal_bytes="64KiB") as broker:
        assert text in broker.recovery.problems[0]
        assert there(broker) == [*range(20), 26]
        assert broker.check() == []
    with open_small(spool, journal_bytes="64KiB") as broker:
        assert broker.recovery.problems == ()


def test_a_journal_that_is_removed_under_its_owner_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_small(tmp_path) as broker:
        put_some(broker)
        (tmp_path / JOURNAL).unlink()
        put_some(broker, range(20, 200))
        broker.engine.spool.tell_noted()
        assert "let no cleaner work inside a spool" in caplog.text
        assert (tmp_path / JOURNAL).exists()
        assert there(broker) == list(range(200))


def test_a_journal_whose_removal_was_seen_by_its_owner_is_not_missed(tmp_path: Path) -> None:
    """The log has all of it, and says that there is none."""

    def work(broker: Broker) -> None:
        put_some(broker)
        (tmp_path / JOURNAL).unlink()
        broker.queue("q").put(b"20")
        until(lambda: broker.stats().journal_records == 0)

    killed(tmp_path, work, soon_s=0.02)
    assert qflow.inspect.check_spool(tmp_path) == []
    with open_small(tmp_path) as broker:
        assert broker.recovery.problems == ()
        assert there(broker) == list(range(21))


def test_a_journal_that_is_cut_short_under_its_owner_is_made_anew(tmp_path: Path) -> None:
    """As by a cleaner of logs that empties files: later records would lie behind a hole where the header was."""

    def work(broker: Broker) -> None:
        put_some(broker)
        with broker.engine.log.read():  # committed
            pass
        os.truncate(tmp_path / JOURNAL, 0)
        put_some(broker, range(20, 200))

    killed(tmp_path, work)
    assert qflow.inspect.check_spool(tmp_path) == []
    with open_small(tmp_path) as broker:
        assert broker.recovery.problems == ()
        assert there(broker) == list(range(200))


class _Denied(Files):
    """The spool was made another user's while it was open."""

    def lstat(self, path: str) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def test_what_cannot_be_looked_at_was_not_removed(tmp_path: Path, made: Journal) -> None:
    """Nor moved: who reads that looks for a cleaner, and not for rights."""
    with closing(Journal.create(str(tmp_path / "other"), MIN_JOURNAL_BYTES, OWNER, _Denied(), 1)) as denied:
        assert denied.lack().startswith("cannot be looked at, and is done without: Permission denied; ")
    assert made.lack() == ""
    (tmp_path / "file").touch()
    env: Any = SimpleNamespace(path=str(tmp_path / "file" / "log"), status=None)  # below a file: ENOTDIR
    with pytest.raises(qflow.StorageError, match="cannot look at the log .*: Not a directory; "):
        placing.check_in_place(env)


def test_a_journal_that_is_longer_than_it_says_is_read_as_far_as_that(tmp_path: Path) -> None:
    killed(tmp_path, put_some)
    with open(tmp_path / JOURNAL, "ab") as file:
        file.write(b"\xff" * 5000)
    assert qflow.inspect.check_spool(tmp_path) == []
    with open_small(tmp_path) as broker:
        assert broker.recovery.problems == ()
        assert there(broker) == list(range(20))


@pytest.mark.parametrize(
    ("instead", "text"),
    [
        (os.mkdir, "Is a directory"),
        (os.mkfifo, "cannot read the journal"),
        (lambda path: os.symlink("aside", path), "is a symbolic link: put the file itself in its place"),
    ],
)
def test_what_is_no_file_in_place_of_a_journal_is_refused_and_left(
    instead: Callable[[Path], object], text: str, tmp_path: Path
) -> None:
    killed(tmp_path / "spool", put_some)
    path, aside = tmp_path / "spool" / JOURNAL, tmp_path / "spool" / "aside"
    path.rename(aside)
    instead(path)
    for look in (open_small, qflow.inspect.read_spool, qflow.inspect.check_spool):
        with pytest.raises(qflow.StorageError, match=text):
            look(tmp_path / "spool")
    path.rmdir() if path.is_dir() else path.unlink()
    aside.rename(path)
    with open_small(tmp_path / "spool") as broker:
        assert there(broker) == list(range(20))


def test_a_journal_of_a_newer_format_is_refused_and_left(tmp_path: Path) -> None:
    killed(tmp_path, put_some)
    before = (tmp_path / JOURNAL).read_bytes()
    newer = journal._header(uuid_of(before[12:28]), Head(MIN_JOURNAL_BYTES, bytes(range(8)), journal.FORMAT + 1))
    (tmp_path / JOURNAL).write_bytes(newer + before[HEADER_BYTES:])
    for look in (open_small, qflow.inspect.read_spool, qflow.inspect.check_spool):
        with pytest.raises(qflow.FormatTooNew, match="reads up to .* with a newer qflow"):
            look(tmp_path)
    (tmp_path / JOURNAL).write_bytes(before)
    with open_small(tmp_path) as broker:
        assert there(broker) == list(range(20))


def test_a_journal_that_the_disk_does_not_take_is_done_without(
    tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no room to make it; or a record of it cannot be written."""
    with faulty_broker(tmp_path / "none", faults, journal="auto") as broker:
        faults.fail("pwrite", OSError(28, "No space left on device"))
        put_some(broker)
        until(lambda: "each batch is committed to the log by itself" in caplog.text)
        assert there(broker) == list(range(20))
    with faulty_broker(tmp_path / "some", faults, journal="auto") as broker:
        put_some(broker)
        caplog.clear()
        faults.fail("pwrite", OSError(28, "No space left on device"))
        put_some(broker, range(20, 40))
        until(lambda: "each batch is committed to the log by itself" in caplog.text)
        assert there(broker) == list(range(40))
        assert broker.stats().journal_records == 0
    with open_small(tmp_path / "some") as broker:
        assert broker.recovery.problems == ()
        assert there(broker) == list(range(40))


@pytest.mark.usefixtures("never_idle")  # what is late is committed, without the journal
@pytest.mark.parametrize("is_inside", [False, True], ids=["", "a thread is at it"])
def test_a_journal_that_cannot_be_closed_when_it_is_given_up_puts_nothing_in_doubt(
    is_inside: bool, tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has all of it by then. Nothing more was taken, and the batch that gave it up was told to be in doubt."""
    with faulty_broker(tmp_path, faults, journal="auto") as broker:
        put_some(broker)
        log = broker.engine.log
        with log.read():
            pass
        given_up = log._writer._confirming.journal
        assert given_up is not None
        given_up.inside = is_inside
        monkeypatch.setattr(given_up._files, "divert", lambda fd: given_up._files.lstat("/nowhere"))
        faults.fail("pwrite", errno.EIO)
        faults.fail("close", errno.EIO, late=True)
        put_some(broker, range(20, 22))
        assert log._writer._confirming.journal is None
        faults.heal()
        assert there(broker) == list(range(22))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(given_up._fd)


def test_a_sync_that_fails_is_in_doubt(tmp_path: Path, faults: Faults) -> None:
    with faulty_broker(tmp_path, faults, journal="auto") as broker:
        inside.still(broker)
        put_some(broker)
        faults.fail("sync_data", OSError(5, "Input/output error"))
        with pytest.raises(qflow.InDoubt):
            broker.queue("q").put(b"20")
        with pytest.raises(qflow.BrokerFailed):
            broker.queue("q").put(b"21")
    with open_small(tmp_path) as broker:
        assert there(broker) in (list(range(20)), list(range(21)))
        assert broker.check() == []


@pytest.mark.usefixtures("never_idle")  # what is late is committed, without the journal
def test_a_log_that_has_failed_is_told_of_though_nobody_puts(
    tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in the log of the process, and in the statistics until the end: who looks would find nothing wrong."""
    with faulty_broker(tmp_path, faults, journal="auto") as broker:
        put_some(broker)
        assert LOG_TAKES not in broker.stats().troubles
        faults.fail("sync_data", OSError(5, "Input/output error"))
        with pytest.raises(qflow.InDoubt):
            put_some(broker)  # more than one: the first rides along in a commit if maintenance reads the log meanwhile
        faults.heal()
        until(lambda: "Input/output error" in broker.stats().troubles.get(LOG_TAKES, ""))
        found = judge(Look(path=broker.path, stats=attrs.asdict(broker.stats())))
        assert (found[0].kind, found[0].severity) == ("log-failed", Severity.URGENT)
        assert "Input/output error" in found[0].sentence
    assert {record.__dict__.get("event") for record in caplog.records} == {"maintenance_failed"}
    assert caplog.text.count(LOG_TAKES) == 1  # other parts of maintenance may have wanted the log, too


def test_a_disk_that_is_full_takes_what_was_confirmed_and_acks(tmp_path: Path, faults: Faults) -> None:
    with faulty_broker(tmp_path, faults, journal="auto", journal_bytes="64KiB") as broker:
        inside.still(broker)
        put_some(broker)
        queue = broker.queue("q")
        held = [queue.get() for _ in range(10)]
        faults.fail("allocate", OSError(28, "No space left on device"))
        with pytest.raises(qflow.DiskFull):
            while True:
                queue.put(b"x" * 10_000, timeout_s=0)
        for one in held:
            one.ack(wait=True)
        assert broker.check() == []
        faults.heal()
        queue.put(b"20")
    with open_small(tmp_path) as broker:
        found = [body for body in broker.queue("q").get_many(1000, timeout_s=0).bodies if len(body) < 100]
        assert [int(body) for body in found] == list(range(10, 21))


@pytest.mark.parametrize(
    ("options", "text"),
    [({"journal": "on"}, '"auto" or "off"'), ({"journal_bytes": "1KiB"}, "8KiB"), ({"journal": None}, "journal")],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(qflow.InvalidArgument, match=text):
        qflow.open(tmp_path, **options)


def test_a_commit_that_fails_later_loses_nothing_that_the_journal_has_confirmed(
    tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing more is promised, and whoever waits is told; the next opening carries all of it over."""
    with faulty_broker(tmp_path, faults, journal="auto", journal_bytes="8KiB") as broker:
        inside.still(broker)
        put_some(broker)
        faults.fail("commit", lmdb.Error("mdb_txn_commit: Input/output error"))
        with pytest.raises((qflow.InDoubt, qflow.BrokerFailed)):
            for number in range(20, 1000):
                broker.queue("q").put(b"%d" % number)
        faults.heal()
    with open_small(tmp_path) as broker:
        found = there(broker)
        assert found == list(range(len(found)))
        assert number <= len(found) <= number + 1
        assert broker.check() == []


def test_an_idle_commit_that_fails_ends_the_log_and_is_carried_over(tmp_path: Path, faults: Faults) -> None:
    with faulty_broker(tmp_path, faults, journal="auto") as broker:
        inside.still(broker)
        put_some(broker)
        faults.fail("commit", lmdb.Error("mdb_txn_commit: Input/output error"))
        broker.queue("q").put(b"20")
        until(lambda: broker.engine.log.failed)
        with pytest.raises(qflow.BrokerFailed):
            broker.queue("q").put(b"21")
        faults.heal()
    with open_small(tmp_path) as broker:
        assert broker.recovery.journal_records > 0
        assert there(broker) == list(range(21))


def test_a_map_that_is_full_is_grown_under_what_the_journal_holds(tmp_path: Path, faults: Faults) -> None:
    """At a commit of its own, and at one of a batch; what was confirmed is brought back from the journal."""
    with faulty_broker(tmp_path, faults, journal="auto") as broker:
        inside.still(broker)
        put_some(broker)
        for number in range(20, 24):
            faults.fail("commit", lmdb.MapFullError("mdb_txn_commit: MDB_MAP_FULL"), times=1)
            broker.queue("q").put(b"%d" % number)
            assert broker.check() == []
            if number % 2:
                until(lambda: broker.stats().journal_records == 0)
        assert there(broker) == list(range(24))


@pytest.mark.usefixtures("never_idle")
def test_a_record_that_is_refused_and_a_map_that_is_full_lose_nothing(tmp_path: Path, faults: Faults) -> None:
    """What the journal has confirmed before is brought back, though nothing more is written to it."""
    with faulty_broker(tmp_path, faults, journal="auto") as broker:
        inside.still(broker)
        put_some(broker)
        broker.queue("q").put(b"20")
        assert broker.stats().journal_records
        faults.fail("pwrite", OSError(28, "No space left on device"), times=1)
        faults.fail("commit", lmdb.MapFullError("mdb_txn_commit: MDB_MAP_FULL"), times=1)
        broker.queue("q").put(b"21")
        assert there(broker) == list(range(22))
    with open_small(tmp_path) as broker:
        assert there(broker) == list(range(22))
        assert broker.check() == []


def test_a_map_that_is_full_as_a_compaction_begins_is_grown(tmp_path: Path, faults: Faults) -> None:
    with faulty_broker(tmp_path, faults, journal="auto") as broker:
        inside.still(broker)
        put_some(broker)
        broker.queue("q").put(b"20")
        faults.fail("commit", lmdb.MapFullError("mdb_txn_commit: MDB_MAP_FULL"), times=1)
        in_thread(broker.compact)
        assert there(broker) == list(range(21))


def test_a_read_whose_batch_fails_for_another_request_sees_all_of_it(tmp_path: Path) -> None:
    """And so does a snapshot: they ask once more."""
    with open_small(tmp_path / "spool") as broker:
        put_some(broker)
        log = broker.engine.log
        order, refused = log._order, []

        def fail(txn: Any) -> None:
            raise qflow.CorruptionError("no")

        def joined(add: Callable[[Any], object]) -> Any:
            """Have a request that fails join the same batch, once."""
            if refused:
                return order(add)
            refused.append(Order(lambda batch: batch.writes.append(fail)))
            both = refused[0], Order(add)
            for one in both:
                log._handing.hand_over(one, soon=False)
            return both[1]

        with log._writer.copying:  # a batch of both
            log._order = joined  # type: ignore[method-assign]
        broker.queue("q").put(b"20")
        with log.read() as txn:
            assert read_state(txn, "").applied > 0
            assert broker.stats().journal_records == 0
        assert isinstance(refused[0].error, qflow.CorruptionError)
        assert broker.snapshot(tmp_path / "copy").messages == 21


@pytest.mark.usefixtures("never_idle")
def test_a_read_beside_acks_that_the_disk_refuses_each_time_sees_what_is_confirmed(tmp_path: Path) -> None:
    """They are tried again in each batch, so each that it asks for fails: it asked without an end."""
    faults = Faults()
    with faulty_broker(tmp_path, faults, journal="auto") as broker:
        inside.still(broker)
        put_some(broker)
        log = broker.engine.log
        deliveries = [broker.queue("q").get(timeout_s=0) for _ in range(2)]
        assert log.held_back
        faults.fail("make_room", qflow.StorageError("the file system is read-only"))
        deliveries[1].ack()
        until(lambda: log._writer._again is not None)

        def read() -> int:
            with log.read() as txn:
                return read_state(txn, "").applied

        assert in_thread(read) > 0
        assert not log.held_back
        faults.heal()
        log.drain()
        assert there(broker) == list(range(2, 20))


@pytest.mark.usefixtures("never_idle")
def test_what_is_damaged_in_a_journal_is_told_by_a_snapshot_and_by_a_check(tmp_path: Path) -> None:
    size = {"journal_bytes": "64KiB"}
    killed(tmp_path / "spool", put_some, **size)
    path = tmp_path / "spool" / JOURNAL
    data = bytearray(path.read_bytes())
    data[data.index(b"\xf5jr\n", HEADER_BYTES + 4) + 40] ^= 1
    path.write_bytes(data)
    copied = qflow.inspect.copy_spool(tmp_path / "spool", tmp_path / "copy")
    assert "commits from there on are lost" in copied.problems[0]
    assert "commits from there on are lost" in qflow.inspect.check_spool(tmp_path / "spool")[0]
    with open_small(tmp_path / "spool", **size) as broker:
        assert "commits from there on are lost" in broker.recovery.problems[0]
        assert len(there(broker)) == copied.messages
    with open_small(tmp_path / "spool", **size) as broker:
        assert broker.recovery.problems == ()


@pytest.mark.usefixtures("never_idle")
def test_a_journal_of_which_the_first_record_is_damaged_is_told_from_outside(tmp_path: Path) -> None:
    """Though nothing of it can be shown."""
    killed(tmp_path, put_some, journal_bytes="64KiB")
    path = tmp_path / JOURNAL
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 30] ^= 1
    path.write_bytes(data)
    assert "commits from there on are lost" in qflow.inspect.check_spool(tmp_path)[0]
    assert "commits from there on are lost" in qflow.inspect.read_spool(tmp_path).problems[0]


@pytest.mark.parametrize("ends", ["closed", "killed"])
def test_a_journal_of_before_that_is_put_back_is_refused(ends: str, tmp_path: Path) -> None:
    """What was confirmed since has the same numbers, and must not be written over."""
    size = {"journal_bytes": "64KiB"}
    spool, path, aside = tmp_path / "spool", tmp_path / "spool" / JOURNAL, tmp_path / "aside"
    killed(spool, lambda broker: put_some(broker, range(40)), **size)
    path.rename(aside)
    with open_small(spool, **size) as broker:
        assert "journal is missing" in broker.recovery.journal_problems[0]
        known = [*there(broker), *range(100, 105)]
        if ends == "closed":
            put_some(broker, range(100, 105))
    if ends == "killed":
        killed(spool, lambda broker: put_some(broker, range(100, 105)), **size)
    now = path.read_bytes()
    aside.rename(path)
    for look in (open_small, qflow.inspect.read_spool, qflow.inspect.check_spool):
        with pytest.raises(qflow.CorruptionError, match="another journal than its log was written with.*move"):
            look(spool)
    path.write_bytes(now)
    with open_small(spool, **size) as broker:
        assert there(broker) == known


@pytest.mark.parametrize("ends", ["closed", "killed"])
def test_the_journal_that_an_earlier_owner_left_is_refused_beside_a_log_that_another_was_killed_at(
    ends: str, tmp_path: Path
) -> None:
    """The log holds all its records, and misses those of the one that it took the place of."""
    spool, path, aside = tmp_path / "spool", tmp_path / "spool" / JOURNAL, tmp_path / "aside"
    if ends == "closed":
        with open_small(spool) as broker:
            put_some(broker)
    else:
        killed(spool, put_some)
    shutil.copy(path, aside)
    with open_small(spool):  # and left idle: what it has, the log has
        pass
    killed(spool, lambda broker: put_some(broker, range(20, 60)), journal_bytes="8KiB")
    now = path.read_bytes()
    shutil.copy(aside, path)
    for look in (open_small, qflow.inspect.read_spool, qflow.inspect.check_spool):
        with pytest.raises(qflow.CorruptionError, match="another journal than its log was written with.*right file"):
            look(spool)
    assert path.read_bytes() == aside.read_bytes()
    path.write_bytes(now)
    with open_small(spool) as broker:
        assert broker.recovery.problems == ()
        assert there(broker) == list(range(60))


def test_a_journal_of_before_beside_a_log_that_was_closed_is_not_needed(tmp_path: Path) -> None:
    """It holds nothing that the log does not, so nobody is bothered, and it is used from then on."""
    path, aside = tmp_path / "spool" / JOURNAL, tmp_path / "aside"
    for first in (0, 20):
        with open_small(tmp_path / "spool") as broker:
            put_some(broker, range(first, first + 20))
        if not first:
            shutil.copy(path, aside)
    shutil.copy(aside, path)
    assert qflow.inspect.check_spool(tmp_path / "spool") == []
    killed(tmp_path / "spool", lambda broker: put_some(broker, range(40, 60)))
    with open_small(tmp_path / "spool") as broker:
        assert broker.recovery.problems == ()
        assert there(broker) == list(range(60))


@pytest.mark.parametrize("again", ["made", "renewed"])
def test_an_owner_killed_between_the_mark_of_the_journal_and_that_of_the_log_leaves_a_good_spool(
    again: str, tmp_path: Path
) -> None:
    """The journal has the one of this owner by then, and names that of the log, too; so it is at the second kill."""
    killed(tmp_path, put_some)
    with open_small(tmp_path):  # all is in the log
        pass
    if again == "made":
        (tmp_path / JOURNAL).unlink()
    marks = set()
    for number in range(3):

        def task(number: int = number) -> None:
            broker = open_small(tmp_path)
            commit = Confirming._commit

            def commit_or_die(self: Confirming, *, more: bool) -> None:
                if self.journal is not None and self.journal.is_renewed:
                    os.kill(os.getpid(), 9)
                commit(self, more=more)

            Confirming._commit = commit_or_die  # type: ignore[method-assign]
            put_some(broker, range(20 + number, 21 + number))

        assert was_killed(run_in_child(task))
        marks.add((tmp_path / JOURNAL).read_bytes()[:HEADER_BYTES])
        assert qflow.inspect.check_spool(tmp_path) == []
        assert qflow.inspect.read_spool(tmp_path).problems == []
    assert len(marks) == 3
    with open_small(tmp_path) as broker:
        assert broker.recovery.problems == ()
        assert there(broker) == list(range(20))


def test_a_journal_that_cannot_be_given_another_mark_is_done_without(
    tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    with open_small(tmp_path) as broker:
        put_some(broker)
    for operation in ("pwrite", "sync_data"):
        faults.heal()
        with faulty_broker(tmp_path, faults, journal="auto", journal_bytes="8KiB") as broker:
            caplog.clear()
            faults.fail(operation, OSError(5, "Input/output error"))
            broker.queue("q").put(b"20")
            until(lambda: "each batch is committed to the log by itself" in caplog.text)
            broker.queue("q").put(b"21")
    with open_small(tmp_path) as broker:
        assert broker.recovery.problems == ()
        assert there(broker) == [*range(20), 20, 21, 20, 21]


@pytest.mark.usefixtures("never_idle")
@pytest.mark.parametrize("again", [False, True], ids=["made", "renewed"])
def test_a_journal_is_not_written_before_the_log_has_its_mark(again: bool, tmp_path: Path, faults: Faults) -> None:
    """The commit with the mark finds a map that is full, and is done again: a record in its place would be refused."""
    spool = tmp_path / "spool"
    with open_small(spool, journal="auto" if again else "off") as broker:
        put_some(broker)
    with faulty_broker(spool, faults, journal="auto", journal_bytes="8KiB") as broker:
        inside.still(broker)
        faults.fail("commit", lmdb.MapFullError("mdb_txn_commit: MDB_MAP_FULL"), times=1)
        broker.queue("q").put(b"20")
        assert broker.stats().journal_records == 0
        broker.queue("q").put(b"21")
        assert broker.stats().journal_records == 1
        copy = inside.copy_as_killed(broker, tmp_path / "copy")
    with open_small(copy) as broker:
        assert broker.recovery.problems == ()
        assert there(broker) == list(range(22))


def test_few_small_batches_leave_the_journal_of_an_earlier_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are committed: that costs less than another mark, and a sync at the close."""
    with open_small(tmp_path) as broker:
        put_some(broker)
    monkeypatch.setattr(confirming, "FIRST_BATCHES", 16)
    before = (tmp_path / JOURNAL).read_bytes()
    with open_small(tmp_path) as broker:
        put_some(broker, range(20, 19 + confirming.BATCHES_AGAIN))
    assert (tmp_path / JOURNAL).read_bytes() == before
    with open_small(tmp_path) as broker:
        put_some(broker, range(22, 32))
    assert (tmp_path / JOURNAL).read_bytes() != before


@pytest.mark.usefixtures("never_idle")
@pytest.mark.parametrize("damage", ["missing", "cut short", "damaged"])
def test_commands_end_with_1_where_the_journal_has_lost_something(damage: str, tmp_path: Path) -> None:
    spool, path = tmp_path / "spool", tmp_path / "spool" / JOURNAL
    killed(spool, put_some, journal_bytes="64KiB")
    data = bytearray(path.read_bytes())
    data[data.index(b"\xf5jr\n", HEADER_BYTES + 4) + 40] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data if damage == "damaged" else data[: HEADER_BYTES + 1000])
    for arguments in (["stats"], ["check"], ["snapshot", "create"], ["get"]):
        more = {"snapshot": [str(tmp_path / "copy")], "get": ["q"]}.get(arguments[0], [])
        result = CliRunner().invoke(app, [*arguments, str(spool), *more])
        assert (result.exit_code, damage in result.output) == (1, True), result.output
        assert f"`qflow check {tmp_path / 'copy'}` tells more" not in result.output, "the copy is whole"


def test_a_crash_without_a_journal_misses_none(tmp_path: Path) -> None:
    """A broker once had one, and is opened without."""
    killed(tmp_path, put_some)
    for _ in range(2):
        killed(tmp_path, lambda broker: broker.queue("q").put(b"x"), journal="off")
        with open_small(tmp_path, journal="off") as broker:
            assert broker.recovery.problems == ()


def test_a_journal_that_was_made_as_its_owner_was_killed_is_known(tmp_path: Path) -> None:
    """Before the log said that there is one: the next owner uses it once the log does, and others see what is in it."""
    with open_small(tmp_path, journal="off") as broker:
        put_some(broker)
        uuid = str(broker.uuid)
    Journal.create(str(tmp_path / JOURNAL), MIN_JOURNAL_BYTES, uuid, FILES, 1).close()
    killed(tmp_path, lambda broker: put_some(broker, range(20, 22)))
    found = qflow.inspect.read_spool(tmp_path)
    assert (found.queues[0].messages, found.journal_records) == (22, 1)
    for command in ("stats", "check"):
        shown = CliRunner().invoke(app, [command, str(tmp_path)]).output
        assert "1 record in the journal that the log does not hold yet" in shown
    with open_small(tmp_path):
        pass
    assert qflow.inspect.read_spool(tmp_path).journal_records == 0


@pytest.mark.usefixtures("never_idle")
def test_others_see_what_is_confirmed_while_an_owner_is_alive(tmp_path: Path) -> None:
    with open_small(tmp_path) as broker:
        put_some(broker)
        broker.queue("q").put(b"20")
        assert broker.stats().journal_records
        look = f"from qflow import inspect; print(inspect.read_spool({os.fspath(tmp_path)!r}).queues[0].messages)"
        assert subprocess.check_output([sys.executable, "-c", look]) == b"21\n"
        assert broker.stats().journal_records


def test_an_opening_that_fails_leaves_no_journal_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_small(tmp_path) as broker:
        put_some(broker)

    def fail(*_: object) -> None:
        raise qflow.StorageError("no")

    monkeypatch.setattr(recovery, "read_log", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(qflow.StorageError, match="no"):
        open_small(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
