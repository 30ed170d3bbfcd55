"""Copies stream `plants` of a spool into stream `copies`, in small batches, once told to run and until it is killed."""

from __future__ import annotations

import sys

from qflow.spark import session


def main(spool: str, checkpoint: str) -> None:
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
    query = frame.writeStream.format("qflow").option("checkpointLocation", checkpoint).start(spool)
    print("running", flush=True)
    query.awaitTermination()


main(*sys.argv[1:])
