"""Copies stream `plants` of a spool into stream `copies`, in small batches, once told to run and until it is killed.

    python sink_worker.py SPOOL CHECKPOINT [TARGET]

`copies` is in the same spool, or in a target of its own.
"""

from __future__ import annotations

import sys

from qflow.spark import session


def main(spool: str, checkpoint: str, target: str = "") -> None:
    """Tell when it runs."""
    spark = session("worker", master="local[2]")
    sys.stdin.readline()
    frame = (
        spark.readStream.format("qflow")
        .option("subscribe", "plants")
        .option("startingOffsets", "earliest")
        .option("group", "copier")
        .option("maxOffsetsPerTrigger", 300)
        .load(spool)
        .selectExpr("key", "value", "concat('copy/', topic) as topic")
    )
    query = frame.writeStream.format("qflow").option("checkpointLocation", checkpoint).start(target or spool)
    print("running", flush=True)
    query.awaitTermination()


main(*sys.argv[1:])
