"""What a journal holds and its log does not, as every command shows it that looks at a spool nobody owns."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import qflow
from faults.test_journal import killed
from qflow.broker import Broker
from qflow.cli.main import app
from qflow.storage.files import Files
from qflow.storage.log import confirming, journal_reading
from qflow.storage.log.journal import HEADER_BYTES, JOURNAL

BODIES = [b"body-%d" % number for number in range(30)]
LAST = "body-29"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spool whose owner was killed: of thirty messages and two acks, the log holds none."""
    path = tmp_path_factory.mktemp("source") / "spool"

    def work(broker: Broker) -> None:
        queue = broker.declare_queue("q")
        broker.declare_stream("s", topics=["t/#"])
        with broker.engine.log.read():  # committed
            pass
        for body in BODIES:
            queue.put(body)
        for _ in range(2):
            queue.get().ack(wait=True)
        broker.publish("t/a", b"published")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(confirming, "FIRST_BATCHES", 0)
        patch.setattr(confirming, "LATE_S", 1000)
        killed(path, work, journal_bytes="64KiB")
    assert qflow.inspect.read_spool(path).journal_records >= len(BODIES)
    return path


@pytest.fixture
def spool(source: Path, tmp_path: Path) -> Path:
    shutil.copytree(source, tmp_path / "spool", ignore=shutil.ignore_patterns("door", "stats.json*"))
    return tmp_path / "spool"


def run(*words: object) -> Result:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("ls SPOOL", "28"),
        ("stats SPOOL", "28"),
        ("check SPOOL", "no problems found"),
        ("peek SPOOL q -n 50", LAST),
        ("tail SPOOL q", LAST),
        ("grep SPOOL body-29", LAST),
        ("show SPOOL q 29", LAST),
        ("export SPOOL", LAST),
        ("subscribe SPOOL s # --from earliest", "published"),
        ("streams list SPOOL", "1"),
        ("metrics SPOOL", 'qflow_queue_messages{queue="q"} 28'),
    ],
)
def test_a_command_shows_what_is_confirmed(
    words: str, shown: str, spool: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And leaves it as it is."""
    before = (spool / JOURNAL).read_bytes()
    done = run(*[str(spool) if word == "SPOOL" else word for word in words.split()])
    output = done.output + capfd.readouterr().out
    assert shown in output, output
    assert "body-1\n" not in output, "it is acked"
    assert done.exit_code == 0
    assert (spool / JOURNAL).read_bytes() == before


@pytest.mark.parametrize(
    ("number", "code", "shown"), [(errno.EROFS, 0, LAST), (errno.EIO, 4, "Input/output error")], ids=["EROFS", "EIO"]
)
def test_what_cannot_be_synced_is_shown_where_the_file_system_was_made_read_only(
    number: int, code: int, shown: str, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ext4 does after an error: nothing is written there any more. Any other error is one."""

    def fail(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Files, "sync_data", staticmethod(fail))
    done = run("peek", spool, "q", "-n", "50")
    assert done.exit_code == code
    assert shown in done.output


def test_a_spool_and_itself_once_it_was_opened_are_the_same(spool: Path, tmp_path: Path) -> None:
    """The one has it in its journal, and the other in its log."""
    opened = tmp_path / "opened"
    shutil.copytree(spool, opened)
    with qflow.open(opened):
        pass
    done = run("diff", spool, opened)
    assert (done.exit_code, LAST in done.output) == (0, False), done.output


def test_a_copy_has_it_and_so_has_what_was_compacted(spool: Path, tmp_path: Path) -> None:
    """Neither has a journal that something is in."""
    assert run("snapshot", "create", spool, tmp_path / "copy").exit_code == 0
    assert run("compact", spool).exit_code == 0
    for path in (tmp_path / "copy", spool):
        assert qflow.inspect.read_spool(path).journal_records == 0
        with qflow.open(path) as broker:
            assert broker.queue("q").get_many(100).bodies == BODIES[2:]
            assert broker.check() == []


def test_a_journal_that_one_may_not_write_is_told_and_left(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever only looks needs no more than to read."""
    real = Files.open

    def refused(path: str, flags: int, mode: int) -> int:
        if path.endswith(JOURNAL) and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, mode)

    monkeypatch.setattr(Files, "open", staticmethod(refused))
    with pytest.raises(qflow.PermissionDenied, match="cannot open the journal .*Permission denied"):
        qflow.open(spool)
    assert run("check", spool).exit_code == 0
    monkeypatch.undo()
    with qflow.open(spool) as broker:
        assert len(broker.queue("q")) == 28


def start_of(data: bytes, number: int) -> int:
    """Return where a record begins, counted from 0."""
    at = HEADER_BYTES
    for _ in range(number):
        at = data.index(b"\xf5jr\n", at + 4)
    return at


def copied(spool: Path) -> list[str]:
    return list(qflow.inspect.copy_spool(spool, spool.parent / "copy").problems)


@pytest.mark.parametrize("missed", [[0], [3], [3, 9, 20]], ids=repr)
@pytest.mark.parametrize(
    "problems",
    [lambda spool: qflow.inspect.read_spool(spool).problems, qflow.inspect.check_spool, copied],
    ids=["read", "check", "copy"],
)
def test_a_record_that_is_written_while_the_journal_is_read_is_not_lost(
    problems: Callable[[Path], list[str]], missed: list[int], spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page is read before, and that of a later one after that is written, too."""
    real, moments = journal_reading.read_from, itertools.cycle([*missed, None])

    def read(*arguments: Any) -> bytes:
        data, number = real(*arguments), next(moments)
        at = len(data) if number is None else start_of(data, number)
        return data[:at] + b"\1" * len(data[at : at + 8]) + data[at + 8 :]

    monkeypatch.setattr(journal_reading, "read_from", read)
    assert problems(spool) == []
    assert qflow.inspect.read_spool(spool).queues[0].messages == 28


def test_a_record_that_is_damaged_is_told_though_the_owner_goes_on(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that the journal is read, there is one more behind it."""
    data = (spool / JOURNAL).read_bytes()
    at = start_of(data, 5) + 30
    (spool / JOURNAL).write_bytes(data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :])
    ends = itertools.count(12)
    monkeypatch.setattr(journal_reading, "read_from", lambda *_: _grown((spool / JOURNAL).read_bytes(), next(ends)))
    (problem,) = qflow.inspect.read_spool(spool).problems
    assert "of the journal is damaged: 8 commits from there on are lost" in problem


def _grown(data: bytes, records: int) -> bytes:
    end = start_of(data, records)
    return data[:end] + bytes(len(data) - end)


def test_a_killed_owner_whose_journal_is_gone_is_not_said_to_have_lost_nothing(spool: Path) -> None:
    """The journal that was left by a kill loses nothing; without it, damage is told, and that alone."""
    assert [one["kind"] for one in findings(spool)] == ["not-closed"]
    (spool / JOURNAL).unlink()
    assert [one["kind"] for one in findings(spool)] == ["damage"]


def findings(spool: Path) -> list[dict[str, Any]]:
    """Return what `doctor` says, but of what waits."""
    found = json.loads(run("doctor", spool, "--json").stdout)["findings"]
    return [one for one in found if one["queue"] is None]
