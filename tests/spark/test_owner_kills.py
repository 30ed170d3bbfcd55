"""Spark copies a spool into another one; it, and both owners, are killed beside processes that read the spools."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import qflow
from crash.beside import reader_beside
from spark.trees import Trees, copy_the_rest, in_flight, left_in_inbox, said, tell
from thorough import TORTURE
from unit.clocks import until

ROUNDS = int(os.environ.get("QFLOW_ROUNDS", "0")) or (30 if TORTURE else 1)
SEED = int(os.environ.get("QFLOW_SEED", "0")) or Random().randrange(10**6)
COUNT = 20_000


def test_kills_of_spark_and_of_both_owners_beside_readers_lose_and_double_nothing(
    spark: Any, tmp_path: Path, trees: Trees
) -> None:
    """What was confirmed to the one who published is in the copy once, whoever was killed at whatever moment."""
    draw = Random(SEED)
    print("seed", SEED)
    source, target, checkpoint = tmp_path / "source", tmp_path / "target", tmp_path / "checkpoint"
    with qflow.open(source) as broker:
        broker.declare_stream("plants", topics=["plant/#"])
    with qflow.open(target) as broker:
        broker.declare_stream("copies", topics=["copy/#"])

    def start_worker() -> subprocess.Popen[str]:
        return trees.start("sink_worker.py", source, checkpoint, target)

    confirmed = -1
    following = start_worker()
    with reader_beside(source), reader_beside(target):
        for number in range(ROUNDS):
            owners = [trees.start("owner_worker.py", source, COUNT), trees.start("owner_worker.py", target, 0)]
            for owner in owners:
                assert said(owner) == "ready\n"
            tree = following
            if number + 1 < ROUNDS:
                following = start_worker()  # its Java starts meanwhile
            tell(tree, "run")
            assert said(tree) == "running\n"
            for _ in range(draw.randrange(1, 4)):
                moment = draw.randrange(2)
                until(lambda moment=moment: in_flight(target, moment))  # type: ignore[misc]
            killed = [tree, *owners]
            draw.shuffle(killed)
            for process in killed:
                lines = trees.kill(process)
                confirmed = max([confirmed, *(int(line.split()[1]) for line in lines if line.startswith("pub "))])
    with qflow.open(source) as owner, qflow.open(target) as taker:
        stored = sum(owner.stream("plants").stats().next_offsets)
        assert stored > confirmed
        copy_the_rest(spark, source, target, checkpoint)
        found = sorted(int(message.body) for message in taker.stream("copies").query())
        assert found == list(range(stored))
        assert left_in_inbox(target) == []
        assert owner.check() == []
        assert taker.check() == []
    print(f"{ROUNDS} rounds: {stored} messages, {confirmed + 1} confirmed, 0 lost, 0 doubled")
