"""`qflow redrive`: dead letters go back, from a shell."""

from __future__ import annotations

import pytest

import qflow
from doors.command_line import CommandLine, error_line


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
    assert "in use" in error_line(done)
