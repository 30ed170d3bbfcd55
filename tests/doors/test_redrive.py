"""`qflow redrive`: dead letters go back, from a shell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import qflow
from doors.command_line import CommandLine, error_line
from qflow import inspect
from qflow.cli.main import app
from qflow.queues.together import Together


@pytest.fixture
def dead(cli: CommandLine) -> CommandLine:
    """A spool with three dead letters of `q`, one of a queue that is gone, and one message that is none."""
    with qflow.open(cli.spool) as broker:
        for name, bodies in (("q", [b"1", b"2", b"3"]), ("gone", [b"4"])):
            queue = broker.declare_queue(name, dead_letter="dead")
            queue.put_many(bodies)
            queue.get_many(len(bodies)).nack(requeue=False)
        broker.delete_queue("gone")
        broker.queue("dead").put(b"5")
    return cli


def test_dead_letters_go_back_and_the_rest_is_told(dead: CommandLine) -> None:
    """How many went where, how many stay and why."""
    done = dead.run("redrive", dead.spool, "dead")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().splitlines() == [
        "messages moved from dead: 3",
        "  3 to q",
        "messages kept: 2",
        "  1: no dead letter: nothing says where it came from",
        "  1: queue 'gone', where it came from, is gone",
        "another queue gets them by --to QUEUE",
    ]
    assert dead.waiting() == [b"1", b"2", b"3"]
    assert dead.run("get", dead.spool, "dead").stdout == b"4\n5\n"


def test_facts_for_programs_a_limit_and_another_queue(dead: CommandLine) -> None:
    """--json, --limit and --to."""
    assert dead.json("redrive", dead.spool, "dead", "--limit", 2) == {"queue": "dead", "moved": {"q": 2}, "kept": {}}
    assert dead.json("redrive", dead.spool, "dead", "--to", "q")["moved"] == {"q": 3}
    assert dead.waiting() == [b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize("verb", ["redrive", "move"])
def test_what_an_interrupt_came_upon_is_told_as_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A commit goes on without whoever waits for it: those in it are not among the moved, and may have moved."""
    spool, committed = tmp_path / "spool", Together.commit
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("q", dead_letter="dead")
        queue.put_many([b"x"] * 250)
        queue.get_many(250).nack(requeue=False)
    words = [verb, str(spool), "dead", *(["q"] if verb == "move" else [])]
    counts: list[int] = []

    def commit(together: Together, *arguments: Any, **options: Any) -> Any:
        receipts = committed(together, *arguments, **options)
        counts.append(len(receipts))
        if len(counts) == 2:
            raise KeyboardInterrupt
        return receipts

    monkeypatch.setattr(Together, "commit", commit)
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stdout.splitlines()) == (
        130,
        [
            "messages moved from dead: 100",
            "  100 to q",
            "not known of up to 100 more: they were being committed when this ended",
        ],
    )
    assert {queue.name: queue.messages for queue in inspect.read_spool(spool).queues} == {"q": 200, "dead": 50}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("spool", "missing"), 2, "'missing'"),
        (("spool", "dead", "--to", "missing"), 2, "'missing'"),
        (("spool", "dead", "--to", "dead"), 2, "itself"),
    ],
)
def test_a_bad_queue_is_one_line(dead: CommandLine, arguments: tuple[str, ...], code: int, words: str) -> None:
    """Nothing is moved."""
    done = dead.run("redrive", *arguments)
    assert (done.returncode, done.stdout) == (code, b"")
    assert words in error_line(done)
    assert dead.run("get", dead.spool, "dead").stdout == b"1\n2\n3\n4\n5\n"


def test_bad_usage_and_a_spool_in_use(dead: CommandLine) -> None:
    """The exit codes of the other commands."""
    assert dead.run("redrive", "nowhere", "dead").returncode == 2
    assert dead.run("redrive", dead.spool, "dead", "--limit", 0).returncode == 2
    assert dead.run("redrive", dead.spool).returncode == 2
    with qflow.open(dead.spool, door=False):
        done = dead.run("redrive", dead.spool, "dead")
    assert done.returncode == 3
    said = error_line(done)
    assert (
        f"in use by process {os.getpid()}, which lets nobody in, and `qflow doctor {dead.spool}` says why: wait" in said
    )
    assert "qflow.connect" not in said
