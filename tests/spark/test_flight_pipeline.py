"""`qflow pipeline run` of brokers at their doors, and of several spools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import qflow
from qflow.cli.main import app
from qflow.spark.archive import Archive, Contents
from spark.reader_process import publish

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")
pytest.importorskip("pyarrow.flight", reason="Arrow Flight is not installed: pip install .[net]")


def run(*arguments: object) -> Any:
    """Run a command."""
    return CliRunner().invoke(app, ["pipeline", "run", *map(str, arguments)])


def test_an_archive_of_a_broker_and_a_spool_goes_on(spark: Any, tmp_path: Path) -> None:
    """Each message once, of both; the one at a URL may be named by its path later."""
    from qflow.flight import serve

    out = tmp_path / "out"
    with qflow.open(tmp_path / "one") as one, qflow.open(tmp_path / "other") as other, serve(one, port=0) as door:
        for number, broker in enumerate((one, other)):
            broker.declare_stream("plants", topics=["plant/#"])
            publish(broker, 20, start=20 * number)
        url = f"grpc://127.0.0.1:{door.port}"
        for start, first in ((0, url), (40, str(one.path))):
            if start:
                publish(one, 10, start=start)
            with Archive(f"{first},{other.path}", Contents("plants"), str(out)) as archive:
                assert archive.run(spark) == (10 if start else 40)
        rows = spark.read.parquet(str(out)).select("value").collect()
        assert sorted(int(row.value) for row in rows) == list(range(50))
        with (
            Archive(str(other.path), Contents("plants"), str(out)) as archive,
            pytest.raises(qflow.StorageError, match="this query has read from log .*, and none of .*other holds it"),
        ):
            archive.run(spark)


def test_what_is_not_there_is_told_before_spark_is_started(tmp_path: Path) -> None:
    """A stream at none of them, a broker, a spool, a directory inside of one of several."""
    from qflow.flight import serve

    other = tmp_path / "other"
    qflow.open(other).close()
    with qflow.open(tmp_path / "one") as broker, serve(broker, port=0) as door:
        broker.declare_stream("plants", topics=["plant/#"])
        url = f"grpc://127.0.0.1:{door.port}"
        out = f"parquet:{tmp_path / 'out'}"
        found = run(url, "pears", "--to", out)
        assert (found.exit_code, f"there is no stream 'pears' in {url}; there are: 'plants'" in found.output) == (
            2,
            True,
        )
        found = run(f"{url},{tmp_path}/nowhere", "plants", "--to", out)
        assert found.exit_code == 2
        assert "nowhere' does not exist" in " ".join(found.output.split())
        found = run(f"{url},{other}", "plants", "--to", f"parquet:{other}/out")
        assert "lies inside the spool" in " ".join(found.output.split())
        again = url.replace("127.0.0.1", "localhost")
        found = run(f"{url},{again}", "plants", "--to", out)
        assert f"{url} and {again} are the same spool, or copies of one: name each once" in found.output
        found = run("grpc://127.0.0.1", "plants", "--to", out)
        assert "a URL of a door is grpc+tls://HOST:PORT" in " ".join(found.output.split())
        found = run("ftp://host/spool", "plants", "--to", out)
        assert "cannot be read through 'ftp'" in " ".join(found.output.split())
