"""Runs a streaming query until it is killed: a spool's stream `plants` into Parquet, in small batches."""

from __future__ import annotations

import sys

from qflow.spark import session


def main(spool: str, out: str, checkpoint: str) -> None:
    """Tell when it runs."""
    spark = session("worker", master="local[2]")
    frame = (
        spark.readStream.format("qflow")
        .option("subscribe", "plants")
        .option("startingOffsets", "earliest")
        .option("group", "archive")
        .option("maxOffsetsPerTrigger", 700)
        .load(spool)
    )
    query = frame.writeStream.format("parquet").option("checkpointLocation", checkpoint).start(out)
    print("running", flush=True)
    query.awaitTermination()


main(*sys.argv[1:])
