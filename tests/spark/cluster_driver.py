"""Copies stream `plants` of some brokers into stream `copies` of the same, on a cluster, until it is killed.

    python cluster_driver.py MASTER HOST URLS CHECKPOINT PATH TOKEN CA

It says first what Spark makes of the path of a spool, which is on this host only. It says `running` when a query runs, and begins the next one from its checkpoint when one fails, which it tells, too.
"""

from __future__ import annotations

import sys

from qflow.errors import QflowError
from qflow.spark import session
from qflow.spark.words import spark_errors

SETTINGS = {
    "spark__driver__extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark__executor__extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark__executor__memory": "512m",
    "spark__executor__cores": 1,
    "spark__task__maxFailures": 100,
    "spark__sql__codegen__wholeStage": False,
}


def main(master: str, host: str, urls: str, checkpoint: str, path: str, token_file: str, ca: str) -> None:
    """Go on for ever."""
    reach = {"tokenFile": token_file, "ca": ca}
    here = {"spark__driver__host": host, "spark__driver__bindAddress": host}
    spark = session("cluster", master=master, **here, **SETTINGS)  # type: ignore[arg-type]
    try:
        with spark_errors():
            spark.read.format("qflow").option("subscribe", "plants").load(path).count()
    except QflowError as error:
        print(type(error).__name__, error, flush=True)
    while True:
        frame = (
            spark.readStream.format("qflow")
            .option("subscribe", "plants")
            .option("startingOffsets", "earliest")
            .option("group", "copier")
            .option("minPartitions", 6)
            .option("maxOffsetsPerTrigger", 2000)
            .options(**reach)
            .load(urls)
            .selectExpr("key", "value", "concat('copy/', topic) as topic")
        )
        writer = frame.writeStream.format("qflow").options(**reach)
        query = writer.option("checkpointLocation", checkpoint).start(urls)
        print("running", flush=True)
        try:
            with spark_errors():
                query.awaitTermination()
        except QflowError as error:
            print("failed", error, flush=True)


main(*sys.argv[1:])
