"""Queries over several spools, step by step and without a Spark; what one spool has had so far stays as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qflow
from qflow.errors import InvalidArgument
from qflow.storage.streams import groups
from spark import reader_process as there
from spark.reader_process import EARLIEST, ReaderProcess, Told, publish

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")
from qflow.spark.places.local import LocalPlace
from qflow.spark.places.parse import parse_places
from qflow.spark.write_options import parse_for_writing

Open = Callable[[str], qflow.Broker]


@pytest.fixture
def owned(tmp_path: Path, process: ReaderProcess) -> Iterator[Open]:
    """Opens spools by name, each with a stream."""
    opened = []

    def open_one(name: str) -> qflow.Broker:
        opened.append(qflow.open(tmp_path / name))
        opened[-1].declare_stream("plants", topics=["plant/#"])
        return opened[-1]

    yield open_one
    for broker in opened:
        process(there.let_go, str(broker.path))
        broker.close()


def both(*brokers: qflow.Broker) -> str:
    """Return option `path` for some spools."""
    return ",".join(str(broker.path) for broker in brokers)


def test_offsets_of_one_spool_are_what_they_have_been(
    broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path
) -> None:
    """To the letter; and a checkpoint from before there were eras goes on."""
    publish(broker, 10)
    start = reader(there.begin, str(spool), **EARLIEST)
    end = reader(there.latest, start)
    known = start["streams"]["plants"]
    assert start == {
        "uuid": str(broker.uuid),
        "streams": {"plants": {"number": known["number"], "offsets": {"0": 0}, "began": {"0": 0}}},
    }
    (era,) = end["streams"]["plants"]["eras"].values()
    assert end == {
        "uuid": str(broker.uuid),
        "streams": {"plants": {"number": known["number"], "offsets": {"0": 10}, "began": {"0": 0}, "eras": {"0": era}}},
    }
    old = {"uuid": str(broker.uuid), "streams": {"plants": {"number": known["number"], "offsets": {"0": 4}}}}
    reader(there.go_on, str(spool))
    assert reader(there.micro_batch, old, reader(there.latest, old)) == list(range(4, 10))


def test_a_batch_query_reads_all_spools(owned: Open, process: ReaderProcess) -> None:
    """Each partition of each; a stream may be in one of them only."""
    one, other = owned("one"), owned("other")
    publish(one, 100)
    publish(other, 100, start=100)
    other.declare_stream("more", topics=["more"])
    other.publish("more", b"200")
    assert sorted(process(there.batch, both(one, other))) == list(range(200))
    assert process(there.batch, both(one, other), subscribe="more") == [200]
    assert process(there.batch, both(one, other), startingOffsets="latest") == []
    with pytest.raises(
        Told, match="NotFound: there is no stream 'less' in .*one, .*other; there are: 'more', 'plants'"
    ):
        process(there.batch, both(one, other), subscribe="less")
    with pytest.raises(Told, match="startingOffsets gives offsets, and each of .* has its own"):
        process(there.batch, both(one, other), startingOffsets='{"plants":{"0":4}}')


def test_a_query_goes_on_in_all_spools_and_its_group_holds_at_each(owned: Open, process: ReaderProcess) -> None:
    """A limit is shared by what waits in them."""
    one, other = owned("one"), owned("other")
    publish(one, 30)
    publish(other, 90, start=30)
    options = {"group": "g", "maxOffsetsPerTrigger": "40", **EARLIEST}
    at = process(there.begin, both(one, other), **options)
    assert [log["uuid"] for log in at["logs"]] == sorted([str(one.uuid), str(other.uuid)])
    read: list[int] = []
    sizes = []
    while (end := process(there.latest, at)) != at:
        found = process(there.micro_batch, at, end)
        sizes.append((sum(n < 30 for n in found), len(found)))
        read += found
        at = end
    assert [size for _, size in sizes] == [40] * 3
    assert all(9 <= of_one <= 11 for of_one, _ in sizes)
    assert sorted(read) == list(range(120))
    for broker, count in ((one, 30), (other, 90)):
        owner = at["logs"][[log["uuid"] for log in at["logs"]].index(str(broker.uuid))]["streams"]["plants"]["number"]
        assert groups.committed_of(str(broker.path), "g", str(broker.uuid)) == {owner: {0: count}}


def test_a_query_of_one_spool_goes_on_with_another_one_beside(owned: Open, process: ReaderProcess) -> None:
    """Which is read from its beginning; without the first it does not go on."""
    one, other = owned("one"), owned("other")
    publish(one, 10)
    publish(other, 5, start=100)
    start = process(there.begin, str(one.path), **EARLIEST)
    at = process(there.latest, start)
    publish(one, 3, start=10)
    process(there.go_on, both(one, other))
    end = process(there.latest, at)
    assert sorted(process(there.micro_batch, at, end)) == [10, 11, 12, *range(100, 105)]
    process(there.go_on, str(other.path))
    with pytest.raises(Told, match=f"this query has read from log {one.uuid}, and none of .* holds it|made anew"):
        process(there.latest, end)


def test_a_spool_made_anew_is_refused_and_so_is_one_named_twice(
    owned: Open, process: ReaderProcess, tmp_path: Path
) -> None:
    """As it is where there is one only."""
    one, other, third = owned("one"), owned("other"), owned("third")
    at = process(there.begin, both(one, other), **EARLIEST)
    process(there.go_on, both(one, third))
    with pytest.raises(Told, match=f"StorageError: this query has read from log {other.uuid}, and none of"):
        process(there.latest, at)
    link = tmp_path / "link"
    link.symlink_to(one.path)
    with pytest.raises(Told, match="are the same spool, or copies of one: name each once"):
        process(there.batch, f"{one.path},{link}")
    with pytest.raises(Told, match="option 'path' names .*one twice"):
        process(there.batch, both(one, one))


def test_a_path_with_a_comma_is_one_path(tmp_path: Path, process: ReaderProcess) -> None:
    path = tmp_path / "a,b"
    with qflow.open(path) as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        publish(broker, 3)
        assert process(there.batch, str(path)) == [0, 1, 2]
        process(there.let_go, str(path))


def test_several_places_may_be_named_from_here_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comma ends a URL, and a path where a directory follows; else it is in a name."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "b", "a,b"):
        (tmp_path / name).mkdir()
    url = "grpc://127.0.0.1:7420"

    def named(text: str) -> list[str]:
        return [place.where.removeprefix(f"{tmp_path}/") for place in parse_places({"path": text})]

    assert named("one,two") == ["one", "two"]
    assert named(f"{url}, one,two ,/there") == [url, "one", "two", "/there"]
    assert named(f"{url},nowhere") == [url, "nowhere"]
    assert named("a,b,one") == ["a,b", "one"]
    assert named(f"/there/a,c,{url}") == ["/there/a,c", url]


WORKER = """
import os, sys
from qflow.spark.places.parse import local_path, parse_places
os.chdir(sys.argv[1])
named = ",".join(place.where for place in parse_places({"path": "one,two,/there"}))
print(named, local_path("checkpoint"), sep="|")
try:
    parse_places({"path": "grpc://127.0.0.1:7420", "tokenFile": "token"})
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("runtime", "base"),
    [({"SPARK_PYTHON_RUNTIME": "PYTHON_WORKER"}, "spark"), ({}, "session")],
    ids=["a worker", "no worker"],
)
def test_a_relative_path_is_from_where_spark_was_started(tmp_path: Path, runtime: dict[str, str], base: str) -> None:
    """Also where a worker runs in a directory of its session, as by Spark Connect; what is no worker is where it is."""
    for name in ("spark", "session"):
        for inner in ("one", "two"):
            (tmp_path / name / inner).mkdir(parents=True)
    (tmp_path / "java").symlink_to("/bin/sh")  # it is known by its name
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_PYTHON_RUNTIME"}
    ran = subprocess.run(
        [tmp_path / "java", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", WORKER, str(tmp_path / "session")],
        cwd=tmp_path / "spark",
        env=environment | runtime,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    here = tmp_path / base
    paths, error = ran.stdout.splitlines()
    assert paths.split("|") == [f"{here}/one,{here}/two,/there", f"{here}/checkpoint"]
    assert f"{here}/token" in error


def test_a_path_is_refused_where_tasks_run_on_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is planned, by a sentence that names the door; a user may know better."""
    from qflow.spark.places import parse

    place = LocalPlace("/spools/one")
    for given in (None, "local", "local[*]", "local[4,2]", "local-cluster[2,1,1024]"):
        monkeypatch.setattr(parse, "master", lambda given=given: given)
        parse.check_hosts([place], same=False)
    monkeypatch.setattr(parse, "master", lambda: "spark://somewhere:7077")
    parse.check_hosts([place], same=True)
    parse.check_hosts([], same=False)
    with pytest.raises(InvalidArgument, match="qflow serve /spools/one --flight HOST:PORT.*sameOnEveryHost"):
        parse.check_hosts([place], same=False)


def test_an_older_copy_on_the_host_of_a_task_is_told_from_a_loss(
    broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path, tmp_path: Path
) -> None:
    """It has the same log, which ends before what was planned."""
    publish(broker, 10)
    copy = tmp_path / "copy"
    shutil.copytree(spool / "log", copy / "log", ignore=shutil.ignore_patterns("lock.mdb"))
    publish(broker, 10, start=10)
    _, (part,) = reader(there.plan, str(spool))
    with pytest.raises(
        Told, match="StorageError: .*ends at offset 10 .*planned ends at 20: it is an older copy.*--flight"
    ):
        reader(there.run_at, str(copy), part)
    reader(there.let_go, str(copy))


def test_a_uri_of_a_path_names_it_as_it_is_written_and_as_it_is_meant(tmp_path: Path) -> None:
    """Percents stand for other characters where there is no directory of that very name."""
    meant = tmp_path / "a spool"
    meant.mkdir()
    assert parse_places({"path": meant.as_uri()}) == parse_places({"path": str(meant)})
    written = tmp_path / "a%20spool"
    written.mkdir()
    assert parse_places({"path": written.as_uri().replace("%25", "%")}) == (LocalPlace(str(written)),)
    assert parse_places({"path": f"file:{meant}"}) == (LocalPlace(str(meant)),)


def test_a_commit_is_waited_for_as_long_as_a_door_waits(tmp_path: Path) -> None:
    """What is longer is refused where it is given; on this host there is no such limit."""
    for path, timeout in (("grpc://127.0.0.1:7420", "3600"), (str(tmp_path), "7200s")):
        parse_for_writing({"path": path, "commitTimeout": timeout})
    with pytest.raises(InvalidArgument, match="option 'commitTimeout' is '3601': the owner .* waits 3600 s at most"):
        parse_for_writing({"path": f"{tmp_path},grpc://127.0.0.1:7420", "commitTimeout": "3601"})
