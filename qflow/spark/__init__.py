"""Streams of a spool in Spark: `spark.read.format("qflow")`, `spark.readStream.format("qflow")`.

from qflow.spark import session

spark = session("planes")
plants = spark.read.format("qflow").option("subscribe", "plants").load("/var/spool/plants")

Needs the extra: `pip install '.[spark]'` in a clone, and a Java; see `session`. Spark finds the format by itself, or
else by `register`.
"""

from __future__ import annotations

from qflow.spark.offsets import lag
from qflow.spark.sessions import register, session

__all__ = ["lag", "register", "session"]
