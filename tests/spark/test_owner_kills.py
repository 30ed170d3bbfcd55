"""Spark copies a spool into another one; it, and both owners, are killed beside processes that read the spools."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import qflow
from crash.beside import reader_beside
from spark.trees import in_flight, kill, left_in_inbox
from unit.clocks import until

TORTURE = bool(os.environ.get("QFLOW_TORTURE"))
ROUNDS = int(os.environ.get("QFLOW_ROUNDS", "0")) or (30 if TORTURE else 1)
SEED = int(os.environ.get("QFLOW_SEED", "0")) or Random().randrange(10**6)
COUNT = 20_000
HERE = Path(__file__).parent

Processes = list["subprocess.Popen[str]"]


@pytest.fixture
def started() -> Iterator[Processes]:
    """Those that have been started and not killed."""
    processes: Processes = []
    yield processes
    for process in processes:
        kill(process)


def test_kills_of_spark_and_of_both_owners_beside_readers_lose_and_double_nothing(
    spark: Any, tmp_path: Path, started: Processes
) -> None:
    """What was confirmed to the one who published is in the copy once, whoever was killed at whatever moment."""
    draw = Random(SEED)
    print("seed", SEED)
    source, target, checkpoint = tmp_path / "source", tmp_path / "target", tmp_path / "checkpoint"
    with qflow.open(source) as broker:
        broker.declare_stream("plants", topics=["plant/#"])
    with qflow.open(target) as broker:
        broker.declare_stream("copies", topics=["copy/#"])

    def start(worker: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / worker), *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen(command, start_new_session=True, text=True, **pipes))
        return started[-1]

    def end(process: subprocess.Popen[str]) -> list[str]:
        os.killpg(process.pid, 9)
        started.remove(process)
        said, _ = process.communicate()
        return said.splitlines()

    confirmed = -1
    following = start("sink_worker.py", source, checkpoint, target)
    with reader_beside(source), reader_beside(target):
        for number in range(ROUNDS):
            owners = [start("owner_worker.py", source, COUNT), start("owner_worker.py", target, 0)]
            for owner in owners:
                assert owner.stdout is not None
                assert owner.stdout.readline() == "ready\n"
            tree = following
            if number + 1 < ROUNDS:
                following = start("sink_worker.py", source, checkpoint, target)  # its Java starts meanwhile
            assert tree.stdin is not None
            assert tree.stdout is not None
            tree.stdin.write("run\n")
            tree.stdin.flush()
            assert tree.stdout.readline() == "running\n"
            for _ in range(draw.randrange(1, 4)):
                moment = draw.randrange(2)
                until(lambda moment=moment: in_flight(target, moment))  # type: ignore[misc]
            killed = [tree, *owners]
            draw.shuffle(killed)
            for process in killed:
                said = end(process)
                confirmed = max([confirmed, *(int(line.split()[1]) for line in said if line.startswith("pub "))])
    with qflow.open(source) as owner, qflow.open(target) as taker:
        stored = sum(owner.stream("plants").stats().next_offsets)
        assert stored > confirmed
        frame = (
            spark.readStream.format("qflow")
            .option("subscribe", "plants")
            .option("startingOffsets", "earliest")
            .option("group", "copier")
            .load(str(source))
            .selectExpr("key", "value", "concat('copy/', topic) as topic")
        )
        written = frame.writeStream.format("qflow").option("checkpointLocation", str(checkpoint))
        written.trigger(availableNow=True).start(str(target)).awaitTermination()
        found = sorted(int(message.body) for message in taker.stream("copies").query())
        assert found == list(range(stored))
        assert left_in_inbox(target) == []
        assert owner.check() == []
        assert taker.check() == []
    print(f"{ROUNDS} rounds: {stored} messages, {confirmed + 1} confirmed, 0 lost, 0 doubled")
