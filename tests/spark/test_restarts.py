"""A query that is started again, after something has become another thing meanwhile: a right result or a sentence.

Each line of the table in the docs has a test here. Nothing is ever left out in silence, and nothing is there twice that
the table does not say so of.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qflow
from pages import ROOT

BEFORE, LATER, NOW = range(10), range(10, 20), range(20, 30)
"""What was copied by the first run of the query, by the second, and what is there to be copied by the one that is tried."""
ANIMALS = range(100, 105)
ALL = [*BEFORE, *LATER, *NOW, *ANIMALS]


def publish(spool: Path, numbers: range, topic: str = "plant/1") -> None:
    with qflow.open(spool) as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        broker.declare_stream("animals", topics=["animal/#"])
        broker.publish_many([(topic, b"%d" % number) for number in numbers])


def make_target(spool: Path) -> None:
    with qflow.open(spool) as broker:
        broker.declare_stream("copies", topics=["copy/#"])


def replace(path: Path, by: Path) -> None:
    """Put a copy in the place of a directory."""
    shutil.rmtree(path)
    shutil.copytree(by, path)


class Query:
    """A query that copies two streams of a spool into a stream of another one: what it is started with."""

    def __init__(self, spark: Any, place: Path) -> None:
        self._spark = spark
        self.source, self.target, self.checkpoint = (place / name for name in ("source", "target", "checkpoint"))
        self.older = place.parent / "older"
        """Of the same names, as they were after its first run."""
        self.options: dict[str, Any] = {"subscribe": "plants,animals", "startingOffsets": "earliest"}

    def run(self) -> None:
        """Copy what is there."""
        frame = self._spark.readStream.format("qflow").options(**self.options).load(str(self.source))
        writer = frame.selectExpr("value", "'copy/x' as topic").writeStream.format("qflow")
        writer = writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True)
        writer.start(str(self.target)).awaitTermination()

    def copied(self) -> list[int]:
        """Return what is in the target, sorted."""
        with qflow.open(self.target) as broker:
            return sorted(int(message.body) for message in broker.stream("copies").query())


@pytest.fixture(scope="module")
def ran(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a query has run twice, with what it was after the first time beside it."""
    root = tmp_path_factory.mktemp("restarts")
    query = Query(spark, root / "ran")
    publish(query.source, BEFORE)
    publish(query.source, ANIMALS, "animal/1")
    make_target(query.target)
    query.run()
    shutil.copytree(root / "ran", root / "older")
    publish(query.source, LATER)
    query.run()
    assert query.copied() == [*BEFORE, *LATER, *ANIMALS]
    return root / "ran"


Case = Callable[[Query], "list[int] | str"]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    """Have a function change what the line of this name says; it returns what is there then, or a sentence."""

    def add(change: Case) -> Case:
        CASES[name] = change
        return change

    return add


@case("nothing has changed")
def _(query: Query) -> list[int]:
    return ALL


@case("it was killed in its first batch")
def _(query: Query) -> list[int]:
    replace(query.checkpoint, query.older / "checkpoint")
    shutil.rmtree(query.target)
    make_target(query.target)
    for name in ("0", ".0.crc"):
        (query.checkpoint / "commits" / name).unlink()
    query.options["startingOffsets"] = "latest"
    return ALL


@case("the same, and retention took some of that batch")
def _(query: Query) -> str:
    CASES["it was killed in its first batch"](query)
    query.options["startingOffsets"] = "earliest"
    with qflow.open(query.source) as broker:
        broker.alter_stream("plants", retention_messages=1)
        while broker.stream("plants").retain():
            pass
    return "stream 'plants', partition 0: offsets 0 to 9 are gone, retention took them before this query has read them"


@case("the same, and it is to read other streams, of those of that batch at least one")
def _(query: Query) -> list[int]:
    CASES["it was killed in its first batch"](query)
    with qflow.open(query.source) as broker:
        broker.declare_stream("others", topics=["other/#"])
    publish(query.source, range(200, 205), "other/1")
    publish(query.source, range(300, 305), "animal/1")  # behind that batch, in a stream that is left
    del query.options["subscribe"]
    query.options["subscribePattern"] = "plants|others"
    return [*ALL, *range(200, 205)]


@case("the same, and it is to read none of them")
def _(query: Query) -> str:
    CASES["it was killed in its first batch"](query)
    return CASES["the checkpoint is one of another query"](query)


@case("the same, and it is to read other partitions")
def _(query: Query) -> list[int]:
    CASES["it was killed in its first batch"](query)
    return CASES["other partitions are assigned"](query)


@case("the checkpoint is gone")
def _(query: Query) -> list[int]:
    shutil.rmtree(query.checkpoint)
    return sorted([*BEFORE, *LATER, *ANIMALS, *ALL])


@case("the checkpoint is an older copy")
def _(query: Query) -> str:
    replace(query.checkpoint, query.older / "checkpoint")
    return "is at batch 1, and the spool at .* has its batches up to 1, which is of other messages: the checkpoint was"


@case("the checkpoint is one of another query")
def _(query: Query) -> str:
    with qflow.open(query.source) as broker:
        broker.declare_stream("others", topics=["other"])
    query.options["subscribe"] = "others"
    return "the checkpoint is one of a query that reads 'animals', 'plants', and this one reads nothing of that"


@case("the spool is gone")
def _(query: Query) -> str:
    shutil.rmtree(query.source)
    return "there is no spool at .*/source on host"


@case("the spool was made anew")
def _(query: Query) -> str:
    shutil.rmtree(query.source)
    publish(query.source, range(1000, 1050))
    return "the spool at .*/source was made anew: its log is"


@case("the spool is a snapshot of it")
def _(query: Query) -> str:
    with qflow.open(query.source) as broker:
        broker.snapshot(query.source.with_name("snapshot"))
    replace(query.source, query.source.with_name("snapshot"))
    return "the spool at .*/source was made anew: its log is"


@case("the spool is an older copy")
def _(query: Query) -> str:
    replace(query.source, query.older / "source")
    return "knows offsets up to 20, and the spool at .*/source ends at 10: it was replaced by an older copy"


@case("the spool is an older copy, into which more was published since")
def _(query: Query) -> str:
    replace(query.source, query.older / "source")
    publish(query.source, range(1000, 1050))
    return "what this query has read up to offset 20 is not what the spool at .*/source holds there: it was replaced by"


@case("the target is gone")
def _(query: Query) -> str:
    shutil.rmtree(query.target)
    return "there is no spool at .*/target on host"


@case("the target was made anew")
def _(query: Query) -> str:
    shutil.rmtree(query.target)
    make_target(query.target)
    return "is at batch 2, and the spool at .*/target has none of its batches: it was made anew"


@case("the target is an older copy")
def _(query: Query) -> str:
    replace(query.target, query.older / "target")
    return "is at batch 2, and the spool at .*/target has its batches up to 0 only: it was made anew, or replaced by"


@case("a stream was deleted, and declared again")
def _(query: Query) -> str:
    with qflow.open(query.source) as broker:
        broker.delete_stream("animals")
    publish(query.source, range(200, 205), "animal/1")
    return "stream 'animals' was deleted, perhaps before this query has read it to its end: set option failOnDataLoss"


@case("the same, with `failOnDataLoss` set to `false`")
def _(query: Query) -> list[int]:
    CASES["a stream was deleted, and declared again"](query)
    query.options["failOnDataLoss"] = "false"
    return [*ALL, *range(200, 205)]


@case("the stream of the target was deleted, and declared again")
def _(query: Query) -> list[int]:
    with qflow.open(query.target) as broker:
        broker.delete_stream("copies")
    make_target(query.target)
    return list(NOW)


@case("a stream was left, and is taken again")
def _(query: Query) -> list[int]:
    publish(query.source, range(200, 205), "animal/1")
    both = query.options["subscribe"]
    query.options["subscribe"] = "plants"
    query.run()
    assert query.copied() == ALL
    query.options["subscribe"] = both
    return [*ALL, *range(200, 205)]


@case("other partitions are assigned")
def _(query: Query) -> list[int]:
    with qflow.open(query.source) as broker, pytest.raises(qflow.QflowError, match="partitions"):
        broker.alter_stream("plants", partitions=2)  # that there are others cannot come to pass
    del query.options["subscribe"]
    query.options["assign"] = '{"plants":[0]}'
    return ALL


@case("it is to read a stream, or a partition, too, that is not there")
def _(query: Query) -> str:
    query.options |= {"subscribe": "plants,animals,animal", "failOnDataLoss": "false"}
    query.run()
    assert query.copied() == ALL
    del query.options["failOnDataLoss"]
    return "there is no stream 'animal' in .*/source; there are: 'animals', 'plants'"


@case("other options are given")
def _(query: Query) -> list[int]:
    query.options |= {"startingOffsets": "latest", "maxOffsetsPerTrigger": 4, "minPartitions": 3}
    return ALL


@pytest.mark.parametrize("name", CASES)
def test_a_query_that_is_started_again(spark: Any, ran: Path, tmp_path: Path, name: str) -> None:
    """Has each message once, or says why not; after a sentence the target holds what it held."""
    shutil.copytree(ran, tmp_path / "place")
    query = Query(spark, tmp_path / "place")
    query.older = ran.parent / "older"
    publish(query.source, NOW)
    expected = CASES[name](query)
    if isinstance(expected, list):
        query.run()
        assert query.copied() == expected
        return
    held = query.copied() if query.target.exists() else None
    with pytest.raises(Exception, match=expected):
        query.run()
    assert held is None or query.copied() == held


def test_the_table_of_the_docs_has_these_lines() -> None:
    """And no others."""
    page = (ROOT / "docs" / "explanation" / "spark.md").read_text()
    table = page.partition("## Started again")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (.*?) \|", table, re.M)[1:] == list(CASES)
