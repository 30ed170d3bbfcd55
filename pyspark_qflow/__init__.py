"""Spark finds `format("qflow")` here by itself: it imports every module whose name begins with `pyspark_`."""

from contextlib import suppress

with suppress(Exception):  # what is raised here would hide every format that is found in this way
    from qflow.spark.source import QflowDataSource as DefaultSource  # noqa: F401
