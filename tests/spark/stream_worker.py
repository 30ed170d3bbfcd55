"""Runs a streaming query until it is killed: a spool's stream `plants` into Parquet, in small batches."""

from __future__ import annotations

import sys

from qflow.spark import session


def main(spool: str, out: str, checkpoint: str) -> None:
    """Make ready, and begin when a line comes: Spark takes seconds to start."""
    spark = session(
        "worker",
        master="local[1]",
        spark__driver__extraJavaOptions="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        spark__sql__codegen__wholeStage=False,
    )
    print("ready", flush=True)
    sys.stdin.readline()
    frame = (
        spark.readStream.format("qflow")
        .option("subscribe", "plants")
        .option("startingOffsets", "earliest")
        .option("group", "archive")
        .option("maxOffsetsPerTrigger", 300)
        .load(spool)
    )
    query = frame.writeStream.format("parquet").option("checkpointLocation", checkpoint).start(out)
    query.awaitTermination()


main(*sys.argv[1:])
