"""`qflow check --repair`: what can be read of a damaged spool comes into a new one; the old one is not touched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import inside
import qflow
from faults.test_full_disk import disk_of, fill
from qflow.cli.main import app
from qflow.inspect import check_spool, compare, repair, repair_spool
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.log import table
from qflow.storage.log.keys import BLOCKS, key_of, parts_of, queue_key

PAGE = 4096
LEAF = 2


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    with qflow.open(tmp_path / "spool", capacity_bytes="4MiB", door=False) as broker:
        jobs = broker.declare_queue("jobs")
        for start in range(0, 500, 50):
            jobs.put_many([b"%d" % number + b"x" * 2000 for number in range(start, start + 50)])
        broker.declare_queue("mail", priorities=2).put_many([b"m"] * 50, priority=1)
        broker.declare_stream("plant", topics=["plant/#"])
        broker.subscribe("plant", "#", name="reader").close()
        for number in range(60):
            broker.publish(f"plant/{number % 3}", b"y" * 3000)
    return tmp_path / "spool"


def edit(spool: Path, change: Callable[[Any], object]) -> None:
    env = Environment(str(spool / "log"), Files())
    with env.begin(write=True) as txn:
        change(txn)
    env.close()


def blocks_of(txn: Any, owner: int) -> list[bytes]:
    stop = key_of(BLOCKS, owner + 1, 0, 0)
    return [key for key in table.keys(txn, key_of(BLOCKS, owner, 0, 0), stop) if parts_of(key)[3] != table.LAST]


def flip(txn: Any, key: bytes) -> None:
    value = bytearray(txn.get(key))
    value[-20] ^= 1
    txn.put(key, bytes(value))


def contents(spool: Path) -> dict[str, bytes]:
    """What lies in a spool's directory, without LMDB's list of who reads."""
    files = [path for path in spool.rglob("*") if path.is_file() and path.name != "lock.mdb"]
    return {str(path): path.read_bytes() for path in sorted(files)}


def test_a_spool_that_is_whole_comes_over_as_it_is(spool: Path, tmp_path: Path) -> None:
    """Nothing is lost, and nothing differs; the new one is a copy with a uuid of its own."""
    done = repair_spool(spool, tmp_path / "new")
    assert (done.queues, done.streams, done.messages, done.lost, done.problems) == (2, 1, 610, [], [])
    assert compare(spool, tmp_path / "new") == []
    assert check_spool(tmp_path / "new") == []


def test_what_is_lost_is_listed_and_the_rest_is_there(spool: Path, tmp_path: Path) -> None:
    """Damaged and missing blocks at the front, in the middle and at the end, of a queue and of a stream."""
    shutil.copytree(spool, tmp_path / "whole")

    def change(txn: Any) -> None:
        for owner in (1, 3):
            found = blocks_of(txn, owner)
            flip(txn, found[0])
            flip(txn, found[len(found) // 2])
            txn.delete(found[-1])

    edit(spool, change)
    before = contents(spool)
    done = CliRunner().invoke(app, ["check", str(spool), "--repair", str(tmp_path / "new"), "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, contents(spool)) == (1, before)
    lost = [(loss["name"], loss["first"], loss["last"]) for loss in told["lost"]]
    gone = [
        (f"{one.kind} {one.name!r}", one.first, one.last)
        for one in compare(tmp_path / "whole", tmp_path / "new")
        if one.first is not None
    ]
    assert lost == gone
    assert [name for name, _, _ in lost] == ["queue 'jobs'"] * 3 + ["stream 'plant'"] * 3
    assert told["messages"] == 610 - sum(loss["messages"] for loss in told["lost"])
    assert all("plant" in problem and "vanished" in problem for problem in check_spool(tmp_path / "new"))


def test_the_new_spool_is_used_like_any_other(spool: Path, tmp_path: Path) -> None:
    """What is put comes behind what was there, and each message that is left is delivered once."""
    edit(spool, lambda txn: flip(txn, blocks_of(txn, 1)[4]))
    done = repair_spool(spool, tmp_path / "new")
    (loss,) = done.lost
    with qflow.open(tmp_path / "new", capacity_bytes="4MiB", door=False) as broker:
        assert broker.recovery.problems == ()
        jobs = broker.queue("jobs")
        jobs.put(b"500")
        bodies = jobs.get_many(1000, timeout_s=0).bodies
        numbers = [int(body.rstrip(b"x")) for body in bodies]
        assert loss.first is not None
        assert loss.last is not None
        assert numbers == [number for number in range(501) if not loss.first <= number <= loss.last]
        assert broker.check() == []


def test_a_queue_whose_record_is_gone_gets_another_name(spool: Path, tmp_path: Path) -> None:
    """Its messages are whole, and nobody knows any more what it was called."""
    edit(spool, lambda txn: txn.put(queue_key(1), b"nonsense"))
    repair_spool(spool, tmp_path / "new")
    with qflow.open(tmp_path / "new", capacity_bytes="4MiB", door=False) as broker:
        assert broker.queues() == ["mail", "recovered-1"]
        assert len(broker.queue("recovered-1")) == 500


def leaves_with(data: bytes, key: bytes) -> list[int]:
    """Return the pages of a file of LMDB that hold a record with this key, or held it once."""
    pages = [page for page in range(2, len(data) // PAGE) if data[page * PAGE + 10] == LEAF]
    return [page for page in pages if key in data[page * PAGE : (page + 1) * PAGE]]


def test_what_was_deleted_right_before_stays_so(spool: Path, tmp_path: Path) -> None:
    """The commit of a delete is what counts, also while the log still holds what is left of it; nothing is lost."""
    with qflow.open(spool, door=False) as broker:
        inside.still(broker)
        broker.delete_queue("jobs")
        broker.delete_stream("plant")
    done = repair_spool(spool, tmp_path / "new")
    assert (done.queues, done.streams, done.messages, done.lost, done.problems) == (1, 0, 50, [], [])
    assert compare(spool, tmp_path / "new") == []


def test_what_was_delivered_before_a_kill_says_so_in_the_new_spool(spool: Path, tmp_path: Path) -> None:
    with qflow.open(spool, door=False) as broker:
        broker.queue("mail").get(0)
        (tmp_path / "killed").mkdir()
        inside.copy_as_killed(broker, tmp_path / "killed")
    repair_spool(tmp_path / "killed", tmp_path / "new")
    with qflow.open(tmp_path / "new", door=False) as broker:
        assert not broker.recovery.clean
        assert broker.queue("mail").get(0).redelivered


@pytest.mark.parametrize("key", [key_of(BLOCKS, 1, 0, table.LAST), queue_key(3)], ids=["row", "record"])
def test_pages_that_cannot_be_read_are_passed_over(key: bytes, spool: Path, tmp_path: Path) -> None:
    """Whatever they hold: what lies on other pages comes over, and the new spool can be opened."""
    path = spool / "log" / "data.mdb"
    data = bytearray(path.read_bytes())
    for page in leaves_with(data, key):
        data[page * PAGE + 10 : page * PAGE + 80] = b"\xa5" * 70
    path.write_bytes(data)
    done = repair_spool(spool, tmp_path / "new")
    assert done.lost
    with qflow.open(tmp_path / "new", capacity_bytes="4MiB", door=False) as broker:
        waiting = sum(len(broker.queue(name)) for name in broker.queues())
        kept = sum(stream.messages for stream in broker.stats().streams.values())
        assert (waiting + kept, broker.check()) == (done.messages, [])


def test_bad_targets_and_owners_are_refused(spool: Path, tmp_path: Path) -> None:
    """By a sentence, before anything is made."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "file").touch()
    for target in (tmp_path / "full", tmp_path / "file", spool / "inside"):
        with pytest.raises(qflow.InvalidArgument):
            repair_spool(spool, target)
    script = f"import qflow, sys; b = qflow.open({str(spool)!r}); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        done = CliRunner().invoke(app, ["check", str(spool), "--repair", str(tmp_path / "new")])
        assert (done.exit_code, str(owner.pid) in done.stderr) == (3, True)
        owner.communicate()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("existed", [False, True], ids=["new", "empty"])
@pytest.mark.parametrize("place", ["_copy_part", "mend"])
def test_a_repair_for_which_the_disk_has_no_room_leaves_nothing_on_it(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, existed: bool
) -> None:
    """It says so, wherever in it the disk is full; and it may be given again, once there is room."""
    with disk_of("8m", tmp_path / "disk") as disk:
        new, found = disk / "new", getattr(repair, place)
        if existed:
            new.mkdir()

        def full(*given: Any) -> Any:
            fill(disk)
            return found(*given)

        with monkeypatch.context() as patched:
            patched.setattr(repair, place, full)
            with pytest.raises(qflow.DiskFull, match="free some space"):
                repair_spool(spool, new)
        assert {path.name for path in disk.rglob("*") if path.is_file()} == {"ballast", *["lock"] * existed}
        assert new.exists() == existed
        (disk / "ballast").unlink()
        assert (repair_spool(spool, new).messages, check_spool(new)) == (610, [])


@pytest.mark.parametrize("place", ["_copy_part", "mend"])
def test_a_repair_goes_on_where_one_was_killed(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """What that has left is removed; another file is not."""
    new = tmp_path / "new"
    pid = os.fork()
    if not pid:
        repairing = os.getpid()
        monkeypatch.setattr(repair, place, lambda *_: os.kill(repairing, signal.SIGKILL))
        repair_spool(spool, new)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert (new / "log.new").exists()
    (new / "file").touch()
    with pytest.raises(qflow.InvalidArgument, match="not empty .it holds 'file'."):
        repair_spool(spool, new)
    (new / "file").unlink()
    assert repair_spool(spool, new).messages == 610
    assert check_spool(new) == []


def test_what_cannot_be_read_at_all_is_told(tmp_path: Path, spool: Path) -> None:
    """Nothing is left of the directory that was begun."""
    data = spool / "log" / "data.mdb"
    data.write_bytes(b"\xff" * data.stat().st_size)
    with pytest.raises(qflow.CorruptionError):
        repair_spool(spool, tmp_path / "new")
    assert not (tmp_path / "new").exists()
