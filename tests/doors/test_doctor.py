"""`qflow doctor`: dead, damaged, foreign and live spools, through the real entry point."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

import inside
import qflow
from qflow.cli.main import app
from qflow.doctor import Look, examine, judge
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.log.keys import FORMAT, OLDEST_FORMAT, meta_key
from qflow.storage.log.sealing import seal


def doctor(spool: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code, and what was found."""
    done = CliRunner().invoke(app, ["doctor", str(spool), "--json"])
    return done.exit_code, json.loads(done.stdout)["findings"]


@pytest.fixture(autouse=True)
def roomy_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever disk the tests are on."""
    usage = SimpleNamespace(total=2**40, free=2**39)
    monkeypatch.setattr("qflow.doctor.looking.shutil.disk_usage", lambda path: usage)
    status = SimpleNamespace(f_flag=0, f_files=2**20, f_favail=2**19)
    monkeypatch.setattr("qflow.doctor.looking.os.statvfs", lambda path: status)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner answers, however slow the machine is."""
    monkeypatch.setattr("qflow.doctor.looking.ANSWERS_S", 60.0)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    with qflow.open(tmp_path / "spool", capacity_bytes="1MiB") as broker:
        broker.declare_queue("orders", dead_letter="dead").put_many([b"x"] * 10)
    return tmp_path / "spool"


UNOWNED = "nobody owns the spool: its log was judged, and not who puts, takes, holds and reads"


def killed(spool: Path) -> Path:
    """Return a copy of a spool that its owner has not closed."""
    with qflow.open(spool, capacity_bytes="1MiB") as broker:
        broker.queue("orders").put(b"late")
        return shutil.copytree(spool, spool.parent / "killed", ignore=shutil.ignore_patterns("door"))


def test_a_spool_that_is_well(spool: Path) -> None:
    """Nothing but that nobody could be asked, and the exit code is 0."""
    assert doctor(spool) == (0, [])
    assert CliRunner().invoke(app, ["doctor", str(spool)]).stdout == f"nothing is wrong\n{UNOWNED}\n"
    assert json.loads(CliRunner().invoke(app, ["doctor", str(spool), "--json"]).stdout)["owner_pid"] is None


def test_a_log_that_is_gone_is_urgent(spool: Path) -> None:
    """What is left says that there was one; a directory that never was a spool is bad usage."""
    (spool / "log").rename(spool.parent / "log")
    code, [found] = doctor(spool)
    assert (code, found["kind"], found["severity"]) == (6, "damage", "urgent")
    assert "the log is gone" in found["sentence"]
    assert "qflow snapshot load" in found["remedy"]
    with pytest.raises(qflow.CorruptionError, match="its log is gone"):
        qflow.inspect.check_there(spool)
    (spool.parent / "nothing").mkdir()
    assert CliRunner().invoke(app, ["doctor", str(spool.parent / "nothing")]).exit_code == 2


def test_a_flipped_bit_of_a_body_is_told(spool: Path) -> None:
    """Nothing but reading shows it: of a log that is not long, all of it is read, whoever owns it."""
    with qflow.open(spool, capacity_bytes="1MiB") as broker:
        broker.queue("orders").put(b"a body that is found")
    data = spool / "log" / "data.mdb"
    data.write_bytes(data.read_bytes().replace(b"a body that is found", b"a body that is foune"))
    code, (found, *_) = doctor(spool)
    assert (code, found["kind"]) == (6, "damage")
    assert found["sentence"].startswith("the log is damaged: queue 'orders': block ")
    assert "qflow check" in found["remedy"]


def test_what_was_not_read_is_said(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long log it reads little: also where something else is found, it names what reads everything."""
    monkeypatch.setattr("qflow.doctor.looking.READ_BYTES", 1)
    done = CliRunner().invoke(app, ["doctor", str(spool)])
    unread = f"the log is long, and the messages were not read: `qflow check {spool}` reads everything"
    assert (done.exit_code, done.stdout) == (0, f"nothing is wrong as far as was looked\n{UNOWNED}\n{unread}\n")
    with qflow.open(spool, capacity_bytes="1MiB") as broker:
        broker.queue("orders").get().nack(requeue=False, reason="card declined")
        broker.engine.upkeep.tick()
    done = CliRunner().invoke(app, ["doctor", str(spool)])
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (1, unread)
    assert not json.loads(CliRunner().invoke(app, ["doctor", str(spool), "--json"]).stdout)["read"]


def test_dead_letters_are_told_without_an_owner(spool: Path) -> None:
    """With the commonest reason, and the exit code 1."""
    with qflow.open(spool, capacity_bytes="1MiB") as broker:
        for reason in ("card declined", "card declined", "no such customer"):
            broker.queue("orders").get().nack(requeue=False, reason=reason)
        broker.engine.upkeep.tick()
    code, (found,) = doctor(spool)
    assert (code, found["kind"], found["queue"]) == (1, "dead-letters", "dead")
    assert found["sentence"] == "3 dead letters in queue 'dead'; 2 for the commonest reason: 'card declined'"


@pytest.mark.parametrize(("version", "kind"), [(FORMAT + 1, "newer-format"), (OLDEST_FORMAT - 1, "older-format")])
def test_a_format_that_cannot_be_read_is_told(spool: Path, version: int, kind: str) -> None:
    """In place of all that this version cannot know; as something urgent."""
    env = Environment(str(spool / "log"), Files())
    with env.begin(write=True) as txn:
        txn.put(meta_key("format"), seal(version.to_bytes(4, "little")))
    env.close()
    code, (found,) = doctor(spool)
    assert (code, found["kind"]) == (6, kind)
    assert f"format {version}" in found["sentence"]


@pytest.mark.parametrize("content", [b"\xff", b"\xff" * 2**16, b"", None], ids=["short", "long", "empty", "cut"])
def test_a_log_that_is_no_log_is_told(spool: Path, content: bytes | None) -> None:
    """By what is urgent, with a remedy that is one, and no traceback: a repair could not read anything either."""
    data = spool / "log" / "data.mdb"
    data.write_bytes(data.read_bytes()[:8192] if content is None else content)
    code, found = doctor(spool)
    assert (code, [one["kind"] for one in found]) == (6, ["damage"])
    assert ("--repair" in found[0]["remedy"], "qflow snapshot load" in found[0]["remedy"]) == (False, True)
    assert CliRunner().invoke(app, ["check", str(spool), "--repair", str(spool.parent / "new")]).exit_code == 1


def test_a_log_of_which_some_can_be_read_may_be_repaired(spool: Path) -> None:
    """Its file can be opened, and the tree in it not be followed from the top: other pages are read."""
    data = spool / "log" / "data.mdb"
    data.write_bytes(data.read_bytes()[:8192] + b"\xff" * (data.stat().st_size - 8192))
    code, found = doctor(spool)
    assert (code, {one["kind"] for one in found}) == (6, {"damage"})
    assert "--repair" in found[0]["remedy"]


@pytest.mark.parametrize(
    ("name", "kind"), [("lock", "directory"), ("spill", "file"), ("wiping", "link"), ("spill", "0")]
)
def test_what_keeps_everybody_from_opening_is_told(spool: Path, name: str, kind: str) -> None:
    """In the words of the error that an opening has; while somebody owns it, it was opened before."""
    place = spool / name
    place.chmod(0o700)
    if kind == "0":
        place.chmod(0)
    else:
        place.unlink() if name == "lock" else place.rmdir()
        {"directory": place.mkdir, "file": place.touch, "link": lambda: place.symlink_to("/tmp")}[kind]()
    code, [found] = doctor(spool)
    assert (code, found["kind"], found["severity"]) == (6, "obstacle", "urgent")
    with pytest.raises(qflow.QflowError) as refused:
        qflow.open(spool)
    assert found["sentence"] == f"nobody can open the spool: {refused.value}"


@pytest.mark.parametrize(
    ("others", "mode", "told"),
    [
        ({"spill"}, 0o660, "{spool}/spill belongs to user {other}, and {spool}/wiping to user {me}: "),
        ({"spill", "wiping"}, 0o600, "{spool}/spill belongs to user {other}, who may not write {spool}/lock: "),
        ({"spill", "wiping", "lock"}, 0o600, "{spool}/spill belongs to user {other}, who may not write {spool}/log/"),
        ({"spill", "wiping"}, 0o660, None),
        ({"spill", "wiping", "lock", "log/data.mdb"}, 0o600, None),
    ],
)
def test_directories_of_a_user_who_cannot_open_the_rest_are_told(
    spool: Path, monkeypatch: pytest.MonkeyPatch, others: set[str], mode: int, told: str | None
) -> None:
    """Everybody else is refused for these directories, and their user for the rest, unless a group may write that."""
    spool = killed(spool)
    for place in ("log/data.mdb", "lock"):
        (spool / place).chmod(mode)
    real, me = Files.lstat, os.geteuid()

    def lstat(files: Files, path: str) -> os.stat_result:
        found = list(real(files, path))
        found[stat.ST_UID] = me + (os.path.relpath(path, spool) in others)
        return os.stat_result(found)

    monkeypatch.setattr(Files, "lstat", lstat)
    code, found = doctor(spool)
    assert (code, [one["kind"] for one in found]) == ((6, ["obstacle"]) if told else (1, ["not-closed"]))
    if told:
        told = told.format(spool=spool, me=me, other=me + 1)
        assert found[0]["sentence"].startswith(f"nobody can open the spool: {told}")


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_what_stands_in_the_place_of_the_door_is_told(spool: Path, kind: str) -> None:
    """Before somebody opens the spool, who would let nobody in, and while somebody has it open."""
    place = spool / "door"
    place.mkdir() if kind == "directory" else place.touch()
    code, (found,) = doctor(spool)
    assert (code, found["kind"], found["severity"]) == (1, "no-door", "notice")
    assert "something else stands at `door`" in found["sentence"]
    with owned(spool, door=True) as pid:
        code, (found,) = doctor(spool)
    assert (code, found["kind"], found["facts"]["pid"]) == (1, "no-door", pid)
    assert "something else stands at `door`" in found["remedy"]


@pytest.mark.parametrize("has_lock", [True, False])
def test_a_file_system_for_reading_alone_keeps_everybody_from_opening(
    spool: Path, has_lock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of the error that an opening has."""
    if not has_lock:
        (spool / "lock").unlink()
    status = SimpleNamespace(f_flag=os.ST_RDONLY | os.ST_NODEV, f_files=0, f_favail=0)
    monkeypatch.setattr("qflow.storage.lock.os.statvfs", lambda path: status)
    code, [found] = doctor(spool)
    assert (code, found["kind"], found["severity"]) == (6, "obstacle", "urgent")
    assert found["sentence"].startswith(
        f"nobody can open the spool: cannot lock the spool ({spool / 'lock'}): Read-only file system; "
    )
    assert "mount it for writing" in found["remedy"]


def test_a_disk_without_inodes_is_full(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has room for bytes, and none for one more file; one that makes inodes as it needs them has no such end."""
    for whole, free, expected in ((2**20, 7, 6), (0, 0, 0)):
        status = SimpleNamespace(f_flag=0, f_files=whole, f_favail=free)
        monkeypatch.setattr("qflow.doctor.looking.os.statvfs", lambda path, status=status: status)
        code, found = doctor(spool)
        assert (code, [one["kind"] for one in found]) == (expected, ["disk-full"] if expected else [])
    remedy = judge(Look(path="s", disk_inodes=10, disk_free_inodes=0))[0].remedy
    assert all(word in remedy for word in ("df -i", "`qflow serve --spill segments`", "`qflow.open(spill='segments')`"))


def test_what_is_no_spool_is_bad_usage(tmp_path: Path) -> None:
    """As for every other command."""
    for path in (tmp_path, tmp_path / "nothing"):
        assert CliRunner().invoke(app, ["doctor", str(path)]).exit_code == 2


@contextmanager
def owned(spool: Path, door: bool) -> Iterator[int]:
    """Have a process own a spool that holds a message and lets nobody in, or everybody."""
    script = (
        "import sys, qflow\n"
        f"broker = qflow.open({str(spool)!r}, capacity_bytes='1MiB', door={door})\n"
        "held = broker.queue('orders').get()\n"
        "broker.engine.figures.write()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.communicate()


def test_an_owner_is_asked(spool: Path) -> None:
    """Through its door; one without a door is judged by what it wrote, and that is told."""
    with owned(spool, door=True):
        assert doctor(spool) == (0, [])
    with owned(spool, door=False) as pid:
        code, (found,) = doctor(spool)
        assert (code, found["kind"], found["facts"]["pid"]) == (1, "no-door", pid)


def test_a_socket_that_was_removed_under_its_owner_is_named(spool: Path) -> None:
    """Nobody makes it anew but the next owner."""
    with owned(spool, door=True) as pid:
        (spool / "door").unlink()
        code, (found,) = doctor(spool)
    assert (code, found["kind"], found["facts"]["pid"]) == (1, "no-door", pid)
    assert found["remedy"].startswith("its socket `door` is not there: ")


def test_an_owner_that_is_stopped_is_urgent_at_once(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However new the figures are that it wrote."""
    monkeypatch.setattr("qflow.doctor.looking.ANSWERS_S", 0.1)
    with owned(spool, door=True) as pid:
        os.kill(pid, signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, pid, os.WSTOPPED)
            code, found = doctor(spool)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert (code, [one["kind"] for one in found]) == (6, ["silent-owner"])
    assert f"process {pid}, is stopped" in found[0]["sentence"]
    assert f"`kill -CONT {pid}`" in found[0]["remedy"]


def test_the_program_that_owns_it_asks_in_another_process(spool: Path) -> None:
    """LMDB opens a log once in a process, which is said."""
    with qflow.open(spool, capacity_bytes="1MiB") as broker:
        with pytest.raises(qflow.StorageError, match="is open in this process: .* or look from another process"):
            examine(spool)
        broker.declare_queue("dead")
        orders = broker.declare_queue("spoiled", max_deliveries=1, dead_letter="dead")
        orders.put(b"x")
        orders.get().nack(reason="card declined")
        with ProcessPoolExecutor(1, get_context("spawn")) as beside:
            found = beside.submit(examine, broker.path).result()
    (letters,) = (one for one in found if one.kind == "dead-letters")
    assert "'card declined'" in letters.sentence


def test_what_maintenance_cannot_do_is_told(spool: Path) -> None:
    """By the owner, in its statistics."""
    with qflow.open(spool, capacity_bytes="1MiB") as broker:
        inside.still(broker)
        inside.upkeep(broker).attempt("spilling", lambda: 1 / 0)
        assert broker.stats().troubles == {"spilling": "ZeroDivisionError: division by zero"}
        (found,) = judge(Look(path=broker.path, stats=attrs.asdict(broker.stats())))
        assert (found.kind, found.facts["what"]) == ("maintenance", "spilling")
        inside.upkeep(broker).attempt("spilling", lambda: False)
        assert broker.stats().troubles == {}
