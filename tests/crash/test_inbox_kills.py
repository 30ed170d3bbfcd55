"""SIGKILL at every step of handing a batch in and of adopting it: it is in the log once, or not yet, and never in part."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import inside
import qflow
from crash.beside import reader_beside
from crash.seams import SteppedFiles, Steps, ended_by_a_kill, open_stepped
from qflow.adoption import Adoption
from qflow.storage.files import Files
from qflow.storage.inbox import batches as sink_batches
from qflow.storage.inbox import stages
from qflow.storage.inbox.stages import Batch
from unit.handing import hand, staged

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
ROWS = [("plant/1", b"%04d" % number * 50) for number in range(40)]
BODIES = [body for _, body in ROWS]


def kills(task: Callable[[Steps, Path], None], spool: Path, start: Path) -> Iterator[int]:
    """Run a task on a copy of a spool again and again, killed one step later each time; yield after each kill."""
    for step in range(2_000):
        shutil.rmtree(spool, ignore_errors=True)
        shutil.copytree(start, spool)
        with reader_beside(spool, step // 2 % 2 == 0):
            if not ended_by_a_kill(task, spool, step):
                return
            yield step
    raise AssertionError("the task never ended")


def stored(broker: qflow.Broker) -> list[bytes]:
    """Return what was adopted."""
    return [message.body for message in broker.stream("plants").query()]


def recorded(broker: qflow.Broker) -> int:
    """Return the highest batch in the log."""
    with broker.engine.log.read() as txn:
        return sink_batches.read(txn, "q").batch


def adopt(steps: Steps, spool: Path, most: str = "64MiB") -> None:
    """Adopt what waits, in an owner whose steps are counted, and stop there."""
    broker = open_stepped(spool, Steps(), max_transaction_bytes=most)
    inside.still(broker)
    files, log = broker.engine.adoption._inbox, broker.engine.log._env
    files._files = SteppedFiles(steps)
    for name in ("begin", "commit", "make_room"):
        setattr(log, name, steps.watched(name, getattr(log, name)))
    broker.engine.adoption.run()
    assert broker.stats().inbox.problem is None


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A spool with a stream, closed."""
    path = tmp_path / "start"
    with qflow.open(path) as broker:
        broker.declare_stream("plants", topics=["plant/#"])
    return path


@pytest.mark.parametrize("most", ["64MiB", "2KiB"])
def test_an_owner_that_is_killed_while_it_adopts_leaves_a_batch_once(start, spool, monkeypatch, most):
    """Whoever opens the spool next finds it in the log, or in the inbox, and adopts the rest of it."""
    monkeypatch.setattr(Adoption, "look", lambda self: None)  # by maintenance, before the test does
    with qflow.open(start) as broker:
        uuid = broker.uuid
    hand(start, uuid, ROWS)
    seen: set[int] = set()
    for _ in kills(lambda steps, path: adopt(steps, path, most), spool, start):
        with qflow.open(spool, max_transaction_bytes=most) as broker:
            inside.still(broker)
            found = stored(broker)
            if most == "64MiB":
                assert found in ([], BODIES)
            assert (recorded(broker) == 0) is (found == BODIES)
            seen.add(len(found))
            broker.engine.adoption.run()
            assert stored(broker) == BODIES
            hand(spool, uuid, ROWS)  # the query comes again with it
            broker.engine.adoption.run()
            assert stored(broker) == BODIES
            assert broker.check() == []
        assert not [name for name in (spool / "inbox").iterdir() if name.name.startswith("q-")]
    assert {0, len(ROWS)} < seen if most == "2KiB" else seen == {0, len(ROWS)}


def test_a_sink_that_is_killed_while_it_hands_in_leaves_a_batch_or_none(start, spool):
    """And when it comes again with the batch, that is stored once, whichever attempt it is of."""
    with qflow.open(start) as broker:
        uuid = broker.uuid

    def hand_in(steps: Steps, path: Path) -> None:
        assert hand(path, uuid, ROWS, files=SteppedFiles(steps), at_once=20)

    whole = 0
    for _ in kills(hand_in, spool, start):
        handed = (spool / "inbox" / "q-0").exists()
        whole += handed
        if handed:
            stages.read_manifest(Files(), str(spool / "inbox" / "q-0"))
        assert hand(spool, uuid, ROWS) is not handed
        stages.remove_staged(Files(), str(spool), "q", up_to=0)
        with qflow.open(spool) as broker:
            broker.engine.adoption.run()
            assert stored(broker) == BODIES
        assert not list((spool / "inbox" / "staging").iterdir())
    assert whole > 0


def test_a_stage_that_is_taken_back_is_adopted_or_gone(start, spool):
    """Never both, wherever the one who takes it back is killed."""
    with qflow.open(start) as broker:
        uuid = broker.uuid
    manifest = staged(start, uuid, ROWS)
    stages.hand_in(Files(), str(start), manifest)

    def take_back(steps: Steps, path: Path) -> None:
        assert stages.withdraw(SteppedFiles(steps), str(path), Batch("q", 0), manifest.token)

    for _ in kills(take_back, spool, start):
        there = (spool / "inbox" / "q-0").exists()
        with qflow.open(spool) as broker:
            broker.engine.adoption.run()
            assert stored(broker) == (BODIES if there else [])
