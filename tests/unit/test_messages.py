"""Bodies, headers, names and paths: what is taken, what is refused, and that it comes out as it went in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import qflow

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]


@pytest.mark.parametrize("body", [None, "text", 7, ["x"], object()])
@pytest.mark.parametrize("durable", [True, False])
def test_a_body_that_is_not_bytes_is_refused(open_spool: Open, body: object, durable: bool) -> None:
    """Edge 19: the error says what to do, and nothing was put."""
    queue = open_spool().declare_queue("q", durable=durable)
    with pytest.raises(qflow.InvalidArgument, match="encode"):
        queue.put(body)  # type: ignore[arg-type]
    with pytest.raises(qflow.InvalidArgument, match="encode"):
        queue.put_many([b"fine", body])  # type: ignore[list-item]
    assert len(queue) == 0


def test_bytes_like_bodies_are_copied(open_spool: Open) -> None:
    """Edge 19: changing what was put afterwards changes nothing."""
    queue = open_spool().declare_queue("q", durable=False)
    changing = bytearray(b"abc")
    queue.put(changing)
    queue.put(memoryview(changing)[1:])
    queue.put(b"")
    changing[:] = b"xyz"
    assert queue.get_many(3).bodies == [b"abc", b"bc", b""]


@pytest.mark.parametrize(
    "headers", [{1: "x"}, {"x": b"bytes"}, {"x": [1]}, {"x": float("nan")}, {"x": "\ud800"}, "text", [("a", "b")]]
)
def test_headers_that_cannot_be_kept_are_refused(open_spool: Open, headers: object) -> None:
    """Edge 19: names are str, values plain."""
    queue = open_spool().declare_queue("q")
    with pytest.raises(qflow.InvalidArgument, match="header"):
        queue.put(b"x", headers=headers)  # type: ignore[arg-type]
    assert len(queue) == 0


@pytest.mark.parametrize("capacity", [0, "1MiB"])
def test_headers_survive_spilling_and_a_restart(open_spool: Open, capacity: object) -> None:
    """Edge 19: 10,000 of them, in memory, from the spill store and from the log."""
    many = {f"name {number}": number for number in range(10_000)}
    plain = {"a": None, "b": True, "c": 1.5, "d": "ü☃"}
    broker = open_spool()
    queue = broker.declare_queue("q", capacity_bytes=capacity)
    expected = [many, plain, {}]
    for headers in expected:
        queue.put(b"x", headers=headers)
    for position, headers in enumerate(expected):
        delivery = queue.get()
        assert (delivery.sequence, delivery.headers) == (position, headers)
        if position:
            delivery.ack()
        else:
            delivery.nack()
            queue.get().ack()
    queue.put(b"x", headers=many)
    broker.close()
    assert open_spool().queue("q").get().headers == many


@pytest.mark.owner_only
def test_a_body_of_200_megabytes_goes_through_the_log(open_spool: Open) -> None:
    """Edge 19: larger than every block and every capacity, when the queue admits it."""
    broker = open_spool()
    queue = broker.declare_queue("q", max_message_bytes="256MiB")
    body = os.urandom(2**20) * 200
    with pytest.raises(qflow.MessageTooLarge):
        broker.declare_queue("small").put(body)
    queue.put(body)
    broker.close()
    assert open_spool().queue("q").get().body == body


@pytest.mark.owner_only
@pytest.mark.parametrize(
    "name", ["..", ".", "/", "a/b", "nul\0", "x" * 300, "🦉", "Case", "case", "ca%73e", " ", "-rf", "\n", "spill"]
)
def test_any_text_is_a_queue_name(open_spool: Open, spool: Path, name: str) -> None:
    """Edge 11: hostile names spill and come back, and nothing appears outside the spool."""
    before = set(spool.parent.iterdir())
    broker = open_spool()
    queue = broker.declare_queue(name, capacity_bytes=0)
    queue.put_many([b"1", b"2"])
    assert broker.queues() == [name]
    assert queue.stats().spilled_messages == 2
    assert set(spool.parent.iterdir()) - before == {spool}
    broker.close()
    assert open_spool().queue(name).get().body == b"1"


@pytest.mark.parametrize("name", ["", "x" * 1025, "\ud800", b"bytes", None])
def test_what_cannot_be_a_queue_name_is_refused(open_spool: Open, name: object) -> None:
    """Edge 11: with a sentence."""
    with pytest.raises(qflow.InvalidArgument, match="queue name"):
        open_spool().declare_queue(name)  # type: ignore[arg-type]


def test_names_that_differ_only_by_case_are_two_queues(open_spool: Open) -> None:
    """Edge 11: also where they would be equal once escaped."""
    broker = open_spool()
    names = ["q", "Q", "%51", "q%"]
    for name in names:
        broker.declare_queue(name, capacity_bytes=0).put(name.encode())
    assert [broker.queue(name).get().body for name in names] == [name.encode() for name in names]


def test_a_deleted_queue_comes_back_empty_while_its_old_files_go(open_spool: Open) -> None:
    """Edge 11: a new queue of the name has a place of its own."""
    broker = open_spool()
    for _ in range(3):
        queue = broker.declare_queue("q", capacity_bytes=0)
        assert len(queue) == 0
        queue.put_many([b"x" * 100] * 20)
        broker.delete_queue("q")
    assert broker.queues() == []


def test_a_queue_that_is_not_there_is_named(open_spool: Open) -> None:
    """The error says how to get one."""
    with pytest.raises(qflow.NotFound, match="declare it first"):
        open_spool().queue("nope")


@pytest.mark.parametrize("path", ["", "a\0b", None, 7])
def test_a_path_that_cannot_be_is_refused(path: object) -> None:
    """Nothing is created for it."""
    with pytest.raises(qflow.InvalidArgument, match="path"):
        qflow.open(path)  # type: ignore[arg-type]


def test_a_file_where_the_spool_should_be_is_refused(tmp_path: Path) -> None:
    """And left as it is."""
    file = tmp_path / "spool"
    file.write_text("mine")
    with pytest.raises(qflow.InvalidArgument, match="not a directory"):
        qflow.open(file)
    assert file.read_text() == "mine"


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Edge 12: a non-empty directory without a log is not made a spool."""
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(qflow.InvalidArgument, match=r"thesis\.tex"):
        qflow.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.owner_only
def test_a_second_process_is_refused_before_it_touches_anything(open_spool: Open, spool: Path) -> None:
    """Edge 12: the owner's spilled messages are still there."""
    queue = open_spool().declare_queue("q", capacity_bytes=0)
    queue.put_many([b"1", b"2", b"3"])
    code = "import sys, qflow\ntry: qflow.open(sys.argv[1])\nexcept qflow.SpoolInUse as error: print(error)"
    result = subprocess.run([sys.executable, "-c", code, str(spool)], capture_output=True, text=True, check=True)
    assert f"process {os.getpid()}" in result.stdout
    assert [queue.get(0).body for _ in range(1)] == [b"1"]
    assert queue.stats().lost_total == queue.stats().spill_repaired_total == 0


@pytest.mark.owner_only
def test_a_transient_message_keeps_its_place_and_is_lost_at_restart(open_spool: Open) -> None:
    """Sequences of what was not logged are not used again either."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put(b"kept")
    queue.put(b"not kept", durable=False)
    last = queue.put(b"kept, too")
    assert [entry.sequence for entry in queue.browse()] == [0, 1, 2]
    broker.close()
    queue = open_spool().queue("q")
    assert queue.get_many(5).bodies == [b"kept", b"kept, too"]
    assert queue.put(b"new") > last


def test_a_durable_message_on_a_transient_queue_is_refused(open_spool: Open) -> None:
    """It could not be kept."""
    queue = open_spool().declare_queue("q", durable=False)
    with pytest.raises(qflow.InvalidArgument, match="not durable"):
        queue.put(b"x", durable=True)
