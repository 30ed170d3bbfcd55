"""LMDB opens the commit before the last one where a bit of a number has flipped; `log/last` tells, and puts it right."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

import qflow
from qflow import doctor, inspect
from qflow.storage import last_commit
from qflow.storage.files import Files
from unit.clocks import until

PAGE, ROOTS, ROOTS_AT, NUMBER_AT = 4096, 136, 16, 16 + 128
BODIES = [b"%d" % number for number in range(5)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spool that was closed, whose last commits put and acked."""
    path = tmp_path_factory.mktemp("source") / "spool"
    with qflow.open(path) as broker:
        queue = broker.declare_queue("q")
        for body in BODIES:
            queue.put(body)
    return path


@pytest.fixture
def spool(source: Path, tmp_path: Path) -> Path:
    shutil.copytree(source, tmp_path / "spool")
    return tmp_path / "spool"


def number_of(spool: Path, place: int) -> int:
    data = (spool / "log" / "data.mdb").read_bytes()
    return int.from_bytes(data[place * PAGE + NUMBER_AT :][:8], "little")


def kept(spool: Path) -> set[int]:
    """The numbers that the copy has."""
    both = (spool / "log" / "last").read_bytes()
    return {int.from_bytes(both[at + NUMBER_AT - ROOTS_AT :][:8], "little") for at in (0, ROOTS)}


def last_place(spool: Path) -> int:
    """Which of the first two pages has the last commit."""
    return int(number_of(spool, 1) > number_of(spool, 0))


def flip(spool: Path, at: int, bit: int) -> None:
    with open(spool / "log" / "data.mdb", "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes((byte ^ 1 << bit,)))


def served(spool: Path) -> tuple[list[bytes], tuple[str, ...]]:
    """Open a spool; return what its queue has, and what the opening found."""
    with qflow.open(spool) as broker:
        return broker.queue("q").get_many(9).bodies, broker.recovery.problems


def bits() -> Iterator[tuple[str, int]]:
    """Bits of both numbers, and some of what else the pages say."""
    for page in ("last", "before"):
        for bit in [0, 1, 2, 3, 8, 31, 63]:
            yield page, 8 * (NUMBER_AT - ROOTS_AT) + bit
        for bit in range(5, 8 * (NUMBER_AT - ROOTS_AT), 131):
            yield page, bit


@pytest.mark.parametrize(("page", "bit"), list(bits()))
def test_a_flipped_bit_is_put_right_and_reported(page: str, bit: int, spool: Path) -> None:
    """Everything that was confirmed is there; what only looks says so, and changes nothing."""
    place = last_place(spool) if page == "last" else 1 - last_place(spool)
    flip(spool, place * PAGE + ROOTS_AT + bit // 8, bit % 8)
    damaged = (spool / "log" / "data.mdb").read_bytes()
    if bit >= 8 * (NUMBER_AT - ROOTS_AT):  # LMDB notices the others itself, or reads what is not there
        problems = inspect.check_spool(spool)
        assert "had flipped" in str(problems)
        assert "opening the spool puts it right" in str(problems)
        assert (spool / "log" / "data.mdb").read_bytes() == damaged
    bodies, found = served(spool)
    assert bodies == BODIES
    assert len(found) == 1
    assert "had flipped, of what was committed last; it was put right" in found[0]
    assert served(spool) == (BODIES, ())


def test_an_older_file_is_reported_and_left_as_it_is(spool: Path) -> None:
    """It may be what somebody wants; what is gone is told once."""
    older = (spool / "log" / "data.mdb").read_bytes()
    with qflow.open(spool) as broker:
        broker.queue("q").put(b"gone")
    (spool / "log" / "data.mdb").write_bytes(older)
    cause = "an older file was put in its place, or this one was copied while its owner wrote"
    assert cause in str(inspect.check_spool(spool))
    bodies, found = served(spool)
    assert bodies == BODIES
    assert "what was confirmed in between is gone" in str(found)
    assert served(spool) == (BODIES, ())


def test_what_is_more_than_a_bit_is_reported(spool: Path) -> None:
    """Nobody knows what is right then; LMDB opens what it believes."""
    for bit in (0, 1):
        flip(spool, last_place(spool) * PAGE + NUMBER_AT + 5, bit)
    assert "not as commit" in str(inspect.check_spool(spool))
    bodies, found = served(spool)
    assert bodies == BODIES
    assert "damaged, or of another log" in str(found)
    assert served(spool) == (BODIES, ())


@pytest.mark.parametrize("commits", [1, 2, 5])
def test_a_copy_of_a_commit_before_says_nothing(commits: int, spool: Path) -> None:
    """After a power cut it may be that old."""
    older = (spool / "log" / "last").read_bytes()
    with qflow.open(spool) as broker:  # that is a commit, and the end another
        for _ in range(commits - 1):
            broker.queue("q").put(b"x")
    (spool / "log" / "last").write_bytes(older)
    bodies, found = served(spool)
    assert len(bodies) == len(BODIES) + commits - 1
    assert found == ()


@pytest.mark.parametrize("content", [b"", b"short", bytes(276), b"\xff" * 276], ids=len)
def test_a_copy_that_is_torn_says_nothing(content: bytes, spool: Path) -> None:
    """The spool serves all it has, and the copy is whole again."""
    (spool / "log" / "last").write_bytes(content)
    assert served(spool) == (BODIES, ())
    assert inspect.check_spool(spool) == []
    flip(spool, last_place(spool) * PAGE + NUMBER_AT, 1)
    assert served(spool)[0] == BODIES


def test_a_spool_without_a_copy_gets_one(spool: Path) -> None:
    """Spools from before have none, nor have copies of `data.mdb` alone."""
    (spool / "log" / "last").unlink()
    assert inspect.check_spool(spool) == []
    assert served(spool) == (BODIES, ())
    assert os.path.getsize(spool / "log" / "last") == 2 * ROOTS + 4


def test_a_link_in_its_place_is_refused(spool: Path, tmp_path: Path) -> None:
    """Nothing is written through it."""
    (tmp_path / "victim").write_bytes(b"victim")
    (spool / "log" / "last").unlink()
    (spool / "log" / "last").symlink_to(tmp_path / "victim")
    with pytest.raises(qflow.StorageError, match="last is not a file of its own"):
        qflow.open(spool)
    assert (tmp_path / "victim").read_bytes() == b"victim"


def test_a_disk_that_takes_no_copy_stops_nothing(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written says less, and nothing wrong."""
    real = Files.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if len(data) == 2 * ROOTS + 4:
            raise OSError(28, "No space left on device")
        return real(fd, data, at)

    monkeypatch.setattr(Files, "pwrite", staticmethod(full))
    with qflow.open(spool) as broker:
        broker.queue("q").put(b"x")
    monkeypatch.undo()
    assert served(spool) == ([*BODIES, b"x"], ())


def test_compaction_begins_a_copy_of_its_own(spool: Path) -> None:
    """The numbers of the new log begin at one."""
    with qflow.open(spool) as broker:
        broker.compact()
        broker.queue("q").put(b"x")
        assert last_commit.look(str(spool / "log"), Files()) == []
    flip(spool, last_place(spool) * PAGE + NUMBER_AT, 1)
    bodies, found = served(spool)
    assert bodies == [*BODIES, b"x"]
    assert len(found) == 1


def test_whoever_looks_beside_the_owner_finds_nothing_wrong(spool: Path) -> None:
    """Commits come between what it reads, and in the middle of it."""
    looked = threading.Event()
    found: list[str] = []

    def look() -> None:
        for _ in range(300):
            found.extend(last_commit.look(str(spool / "log"), Files()))
        looked.set()

    with qflow.open(spool) as broker:
        queue = broker.queue("q")
        thread = threading.Thread(target=look)
        thread.start()
        while not looked.is_set():
            queue.put(b"x")
        thread.join()
    assert found == []


@pytest.mark.parametrize("journal", ["auto", "off"])
@pytest.mark.parametrize("number", [1, 2000])
def test_a_commit_of_an_owner_that_was_killed_is_had_back(
    journal: Literal["auto", "off"], number: int, spool: Path, tmp_path: Path
) -> None:
    """At once after the commit, before there is a journal, or without one: nothing is lost, no sequence comes again."""
    with qflow.open(spool, journal=journal) as broker:
        queue = broker.queue("q")
        queue.put_many([b"x"] * number)
        last = queue.put_many([b"x"] * number)[-1]
        until(lambda: kept(spool) == {number_of(spool, 0), number_of(spool, 1)})  # callers are told before
        shutil.copytree(spool, tmp_path / "killed", ignore=shutil.ignore_patterns("door", "stats.json*"))
    killed = tmp_path / "killed"
    flip(killed, last_place(killed) * PAGE + NUMBER_AT, 1)
    with qflow.open(killed) as broker:
        assert "it was put right" in str(broker.recovery.problems)
        assert len(broker.queue("q")) == len(BODIES) + 2 * number
        assert broker.queue("q").put(b"z") > last
        assert broker.check() == []


@pytest.mark.parametrize("call", ["pwrite", "sync_file"])
def test_a_disk_that_cannot_be_put_right_is_an_error_of_ours(
    call: str, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is opened then, and it is put right the next time."""
    flip(spool, last_place(spool) * PAGE + NUMBER_AT, 1)

    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Files, call, fail)
    with pytest.raises(qflow.StorageError, match="cannot put a bit of the log right"):
        qflow.open(spool)
    monkeypatch.undo()
    assert served(spool)[0] == BODIES


def deny(monkeypatch: pytest.MonkeyPatch, name: str, number: int = errno.EACCES) -> None:
    """Have a file of the log be somebody else's."""
    real = Files.open

    def refused(path: str, flags: int, mode: int) -> int:
        if path.endswith(f"/log/{name}"):
            raise OSError(number, os.strerror(number), path)
        return real(path, flags, mode)

    monkeypatch.setattr(Files, "open", staticmethod(refused))


@pytest.mark.parametrize("copied", [True, False])
def test_who_looks_is_told_which_file_cannot_be_read(
    copied: bool, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of `lock.mdb`, which is as it should be."""
    deny(monkeypatch, "data.mdb")
    if not copied:
        (spool / "log" / "last").unlink()
    for look in (inspect.read_spool, inspect.check_spool):
        with pytest.raises(qflow.PermissionDenied, match=rf"\({spool}/log/data.mdb\)") as raised:
            look(spool)
        assert "lock.mdb" not in str(raised.value)


def test_who_looks_and_may_not_read_the_copy_goes_on(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an owner does. A check and the doctor say so, with the remedy; nothing is damaged."""
    deny(monkeypatch, "last")
    found = inspect.read_spool(spool)
    assert ([queue.messages for queue in found.queues], found.problems) == ([len(BODIES)], [])
    assert inspect.copy_spool(spool, tmp_path / "copy").problems == ()
    (problem,) = inspect.check_spool(spool)
    assert problem == (
        f"cannot read what was committed last ({spool}/log/last): Permission denied; give this user read and write "
        "access to it; until then nobody would notice that the log ends with an earlier one"
    )
    (finding,) = doctor.examine(spool)
    assert (finding.kind, finding.severity) == ("last-commit-unusable", doctor.Severity.PROBLEM)
    assert problem in finding.sentence


def test_an_owner_that_may_not_use_the_copy_says_so_and_goes_on(
    spool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing would be put right: whoever restored it as another user is to know."""
    before = (spool / "log" / "last").read_bytes()
    deny(monkeypatch, "last")
    assert served(spool) == (BODIES, ())  # nothing is damaged
    assert f"({spool}/log/last): Permission denied; give this user read and write access to it" in caplog.text
    assert "nobody would notice that the log ends with an earlier one" in caplog.text
    assert (spool / "log" / "last").read_bytes() == before
    monkeypatch.undo()
    caplog.clear()
    assert served(spool) == (BODIES, ())
    assert caplog.text == ""


def test_a_disk_that_is_full_as_a_copy_is_begun_is_no_problem(
    spool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is none that could be compared; the next opening begins one."""
    (spool / "log" / "last").unlink()
    deny(monkeypatch, "last", errno.ENOSPC)
    assert served(spool) == (BODIES, ())
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["last", "data.mdb"])
def test_a_file_whose_blocks_cannot_be_read_is_named(name: str, spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pread

    def fail(fd: int, size: int, at: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(f"/log/{name}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, size, at)

    monkeypatch.setattr(last_commit.os, "pread", fail)
    for look in (inspect.read_spool, qflow.open):
        with pytest.raises(qflow.StorageError, match=rf"\({spool}/log/{name}\): Input/output error"):
            look(spool)
