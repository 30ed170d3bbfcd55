"""The daemon of PySpark, with the steps of a query imported: `python -m qflow.spark.daemon WORKER_MODULE`.

Spark forks a process from it for each step of a query, three to seven for a batch, each of which would import them
anew. What starts a thread when it is imported, as PyArrow does, is left to those: who forks has one thread.
"""

from __future__ import annotations

import gc

from pyspark import daemon

from qflow.spark import batch, sink, source, streaming  # noqa: F401 - for those to come

if __name__ == "__main__":
    gc.freeze()
    daemon.manager()
