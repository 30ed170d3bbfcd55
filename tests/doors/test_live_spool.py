"""The shell beside a program that owns the spool: what acts goes through the owner's door."""

from __future__ import annotations

import json
import os
import pty
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import qflow
from doors.command_line import POLLS, CommandLine, error_line, numbers, text
from other_owner import owned
from qflow import inspect
from qflow.cli.chosen import AT_ONCE
from qflow.cli.main import app
from qflow.cli.spool import largest_message
from qflow.config import QueueSettings
from qflow.remote.client.broker import RemoteBroker


@pytest.fixture
def owner(cli: CommandLine) -> Iterator[qflow.Broker]:
    """A broker in this process, with an empty queue `q`."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("q")
        yield broker


def opened(cli: CommandLine) -> qflow.Broker:
    """Open the spool, once a command that looks into it has closed it."""
    for _ in range(POLLS):
        with suppress(qflow.SpoolInUse):
            return qflow.open(cli.spool)
    raise AssertionError("the spool was never free")


def bodies(queue: qflow.Queue) -> list[bytes]:
    """Take everything out of a queue."""
    batch = queue.get_many(100, timeout_s=0)
    batch.ack()
    return list(batch.bodies)


def test_lines_go_in_and_come_out(cli: CommandLine, owner: qflow.Broker) -> None:
    """In order, and acked; what is not asked for stays."""
    done = cli.run("put", cli.spool, "q", stdin=text(numbers(0, 2500)))
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(owner.queue("q")) == 2500
    assert cli.run("get", cli.spool, "q", "--max", 2400).stdout == text(numbers(0, 2400))
    assert bodies(owner.queue("q")) == numbers(2400, 2500)


def test_a_queue_that_is_paused_gives_nothing_and_is_said_to_be(cli: CommandLine, owner: qflow.Broker) -> None:
    """On stderr: nothing on stdout would look as if it were empty."""
    queue = owner.queue("q")
    queue.put(b"kept")
    queue.pause()
    done = cli.run("get", cli.spool, "q")
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr == b"the queue q is paused, and delivers nothing\n"
    queue.resume()
    assert cli.run("get", cli.spool, "q").stdout == b"kept\n"


def test_a_queue_at_its_limit_is_waited_for_until_a_signal(cli: CommandLine, owner: qflow.Broker) -> None:
    """Others take from it; what was confirmed is in it."""
    queue = owner.declare_queue("limited", limit_messages=2)
    putting = cli.start("put", cli.spool, "limited")
    assert putting.stdin is not None
    putting.stdin.write(b"a\nb\nc\n")
    putting.stdin.close()
    taken: list[bytes] = []
    while len(taken) < 3:
        with queue.get() as delivery:
            taken.append(delivery.body)
    assert putting.wait() == 0
    assert taken == [b"a", b"b", b"c"]


def test_following_waits_for_what_others_put_and_outlives_the_owner(cli: CommandLine, owner: qflow.Broker) -> None:
    """The next owner is found, too."""
    following = cli.start("get", cli.spool, "q", "--follow")
    assert following.stdout is not None
    owner.queue("q").put(b"one")
    assert following.stdout.readline() == b"one\n"
    owner.queue("q").put(b"two")
    assert following.stdout.readline() == b"two\n"
    assert any(not len(owner.queue("q")) for _ in range(POLLS)), "it was not acked"
    owner.close()
    assert cli.run("put", cli.spool, "q", stdin=b"three\n").returncode == 0
    assert following.stdout.readline() == b"three\n"
    following.send_signal(signal.SIGTERM)
    assert following.wait() == 128 + signal.SIGTERM


def test_following_up_to_a_number_counts_once_what_it_took_before_an_owner_came_and_went(cli: CommandLine) -> None:
    """It took from a spool of its own, then through the door of an owner, which closed: what is left is as many less."""
    assert cli.run("put", cli.spool, "q", stdin=text(numbers(0, 3))).returncode == 0
    following = cli.start("get", cli.spool, "q", "--follow", "--max", 8)
    assert following.stdout is not None
    assert [following.stdout.readline() for _ in range(3)] == [b"0\n", b"1\n", b"2\n"]
    with opened(cli) as broker:
        broker.queue("q").put(b"3")
        assert following.stdout.readline() == b"3\n"
        assert any(not len(broker.queue("q")) for _ in range(POLLS)), "it was not acked"
    with opened(cli) as broker:
        broker.queue("q").put_many(numbers(4, 9))
    assert [following.stdout.readline() for _ in range(4)] == [b"4\n", b"5\n", b"6\n", b"7\n"]
    assert (following.wait(), following.stdout.read()) == (0, b"")
    assert cli.waiting() == [b"8"]


def test_following_finds_an_owner_that_comes_later(cli: CommandLine) -> None:
    """What that one puts comes at once, not when it has gone; also from a queue that is not logged."""
    assert cli.run("put", cli.spool, "q", stdin=b"one\n").returncode == 0
    following = cli.start("get", cli.spool, "q", "--follow")
    assert following.stdout is not None
    assert following.stdout.readline() == b"one\n"
    with opened(cli) as broker:
        broker.queue("q").put(b"two", durable=False)
        assert following.stdout.readline() == b"two\n"


def test_messages_are_looked_at_and_stay(cli: CommandLine, owner: qflow.Broker) -> None:
    """Those of a high priority first, delayed ones last; nothing reaches a terminal as it is."""
    queue = owner.declare_queue("mixed", priorities=2)
    queue.put_many([b"plain", b"\x1b[31mred", b"\xff"], headers={"kind": "x"})
    queue.put(b"later", delay_s=1000)
    queue.put(b"x" * 300, priority=1)
    held = queue.get()
    shown = cli.run("peek", cli.spool, "mixed").stdout.decode().splitlines()
    assert shown[0].split()[-2:] == ["body", "headers"]
    assert [line.split()[-2:] for line in shown[1:]] == [
        ["x" * 57 + "...", "-"],
        ["plain", "kind=x"],
        [r"\x1b[31mred", "kind=x"],
        ["\N{REPLACEMENT CHARACTER}", "kind=x"],
        ["later", "-"],
    ]
    lines = cli.run("peek", cli.spool, "mixed", "--json", "-n", 4).stdout.splitlines()
    assert len(lines) == 4
    assert b'"headers": {"kind": "x"}' in lines[1]
    assert b'"body_base64": "/w=="' in lines[3]
    held.nack()
    assert len(queue) == 5
    assert cli.run("peek", cli.spool, "q").stdout == b"no message waits in q\n"
    assert "'mixed', 'q'" in error_line(cli.run("peek", cli.spool, "nothing"))


def test_settings_are_changed(cli: CommandLine, owner: qflow.Broker) -> None:
    """Names and values are those of Python; a wrong one changes nothing."""
    assert cli.run("alter", cli.spool, "q", "limit_messages=3", "dead_letter=dead", "ttl_s=1.5").returncode == 0
    settings = owner.queue("q").settings
    assert (settings.limit_messages, settings.dead_letter, settings.ttl_s) == (3, "dead", 1.5)
    changed = cli.json("alter", cli.spool, "q", "limit_messages=none", "capacity_bytes=1MiB")["settings"]
    assert (changed["limit_messages"], changed["capacity_bytes"]) == (None, 2**20)
    for wrong in ("limit_mesages=3", "limit_messages=many", "durable=1"):
        done = cli.run("alter", cli.spool, "q", wrong)
        assert done.returncode == 2
        assert wrong.partition("=")[0] in error_line(done)
    assert cli.run("alter", cli.spool, "q", "limit_messages").returncode == 2
    assert owner.queue("q").settings.limit_messages is None


def test_messages_are_deleted_by_who_is_sure(cli: CommandLine, owner: qflow.Broker) -> None:
    """Without a terminal to ask at, somebody has to say --yes."""
    owner.queue("q").put_many([b"a", b"b"])
    for verb in ("purge", "delete"):
        done = cli.run(verb, cli.spool, "q")
        assert done.returncode == 2
        assert b"2 messages" in done.stderr
        assert b"--yes" in done.stderr
    assert cli.run("delete", cli.spool, "q", "--sequence", 1, "--yes").stdout == b"messages deleted from q: 1\n"
    assert cli.json("purge", cli.spool, "q", "--yes") == {"queue": "q", "purged": 1}
    assert cli.run("delete", cli.spool, "q", "--yes").stdout == b"queue q deleted, with 0 messages\n"
    assert owner.queues() == []
    assert "there are: none" in error_line(cli.run("delete", cli.spool, "q", "--yes"))


def test_a_terminal_is_asked_at(cli: CommandLine, owner: qflow.Broker) -> None:
    """No is the answer of who says nothing."""
    owner.queue("q").put(b"a")
    for answer, code, left in ((b"\n", 1, 1), (b"y\n", 0, 0)):
        keyboard, terminal = pty.openpty()
        try:
            process = cli.start_on(terminal, None, "purge", cli.spool, "q", stderr=None)
            os.write(keyboard, answer)
            assert (process.wait(), len(owner.queue("q"))) == (code, left)
        finally:
            os.close(keyboard)
            os.close(terminal)


def test_streams_are_declared_published_to_and_deleted(cli: CommandLine, owner: qflow.Broker) -> None:
    """As without an owner."""
    assert cli.run("streams", cli.spool, "--declare", "s", "--topics", "plant/#").returncode == 0
    assert cli.run("publish", cli.spool, "plant/1", stdin=b"a\nb\n").returncode == 0
    assert owner.stream("s").stats().messages == 2
    done = cli.run("delete", cli.spool, "s", "--stream", "--yes")
    assert done.stdout == b"stream s deleted, with 2 messages\n"
    assert owner.streams() == []


def test_messages_move(cli: CommandLine, owner: qflow.Broker) -> None:
    """To where they came from, or to a queue that is named; in order."""
    q = owner.declare_queue("source", dead_letter="dead")
    q.put_many([b"1", b"2", b"3"])
    q.get_many(3).nack(requeue=False)
    assert cli.json("redrive", cli.spool, "dead", "--limit", 1) == {"queue": "dead", "moved": {"source": 1}, "kept": {}}
    assert cli.json("move", cli.spool, "dead", "q")["moved"] == {"q": 2}
    assert (bodies(q), bodies(owner.queue("q"))) == ([b"1"], [b"2", b"3"])
    done = cli.run("move", cli.spool, "q", "q")
    assert (done.returncode, "itself" in error_line(done)) == (2, True)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_interrupt_ends_a_move_and_what_is_printed_is_true(
    cli: CommandLine, owner: qflow.Broker, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner goes on with what it was asked for last and nothing else; of those messages it is said."""
    owner.queue("q").put_many(numbers(0, 3 * AT_ONCE))
    target, asked, real = owner.declare_queue("other"), [], RemoteBroker.redrive

    def interrupted(broker: RemoteBroker, name: str, **given: int) -> qflow.RedriveReport:
        asked.append(given["limit"])
        report = real(broker, name, **given)  # type: ignore[arg-type]
        if len(asked) == 2:
            raise KeyboardInterrupt
        return report

    monkeypatch.setattr(RemoteBroker, "redrive", interrupted)
    done = CliRunner().invoke(app, ["move", str(cli.spool), "q", "other", *options])
    assert (done.exit_code, asked) == (130, [AT_ONCE] * 2)
    assert len(target) == 2 * AT_ONCE
    if options:
        assert json.loads(done.stdout) == {
            "queue": "q",
            "moved": {"other": AT_ONCE},
            "kept": {},
            "in_doubt": AT_ONCE,
        }
    else:
        assert done.stdout.splitlines() == [
            f"messages moved from q: {AT_ONCE:,}",
            f"  {AT_ONCE:,} to other",
            f"not known of up to {AT_ONCE:,} more: the owner was asked, and has not said how many it moved",
        ]


def test_what_stays_is_counted_once_however_often_the_owner_is_asked(cli: CommandLine, owner: qflow.Broker) -> None:
    """Those at the front are looked at each time; a limit is kept to."""
    source = owner.declare_queue("source", dead_letter="dead")
    owner.declare_queue("dead").put_many(numbers(0, 10))
    source.put_many(numbers(0, 3 * AT_ONCE))
    source.get_many(3 * AT_ONCE).nack(requeue=False)
    said = cli.json("redrive", cli.spool, "dead", "--limit", 2 * AT_ONCE + 1)
    assert said["moved"] == {"source": 2 * AT_ONCE + 1}
    said = cli.json("redrive", cli.spool, "dead")
    assert said["moved"] == {"source": AT_ONCE - 1}
    assert said["kept"] == {"no dead letter: nothing says where it came from": 10}


def test_the_log_is_compacted_by_its_owner(cli: CommandLine, owner: qflow.Broker) -> None:
    """The same line is printed."""
    assert cli.run("compact", cli.spool).stdout.startswith(b"log: ")
    owner.queue("q").put(b"still there")
    assert bodies(owner.queue("q")) == [b"still there"]


def test_an_owner_that_lets_nobody_in_is_named(cli: CommandLine) -> None:
    """As before there were doors: exit code 3."""
    with qflow.open(cli.spool, door=False) as broker:
        broker.declare_queue("q")
        for verb in (("put", cli.spool, "q"), ("get", cli.spool, "q"), ("purge", cli.spool, "q", "--yes")):
            done = cli.run(*verb)
            assert done.returncode == 3
            assert str(os.getpid()) in error_line(done)


def test_the_largest_message_is_asked_of_the_owner_for_what_the_log_does_not_have_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call for each of thousands of queues kept whoever publishes a line waiting for seconds."""
    asked: list[str] = []
    queue = RemoteBroker.queue

    def noted(broker: RemoteBroker, name: str) -> Any:
        asked.append(name)
        return queue(broker, name)

    monkeypatch.setattr(RemoteBroker, "queue", noted)
    with owned(tmp_path / "spool"), qflow.connect(tmp_path / "spool") as broker:
        assert largest_message(broker) == QueueSettings().max_message_bytes
        broker.declare_stream("s", topics=["t"], max_message_bytes="80MiB")
        assert largest_message(broker) == 80 * 2**20
        assert asked == []
        broker.declare_queue("unlogged", durable=False, max_message_bytes="90MiB")
        assert largest_message(broker) == 90 * 2**20
        assert asked == ["unlogged"]


def test_an_import_asks_once_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is declared in it: the names of thousands of queues were asked for, for each of them."""
    declared = [f'{{"declare": "queue", "name": "{number}", "settings": {{}}}}' for number in range(20)]
    calls: list[object] = []
    queues = qflow.Broker.queues
    monkeypatch.setattr(qflow.Broker, "queues", lambda broker: calls.append(0) or queues(broker))
    done = CliRunner().invoke(app, ["import", str(tmp_path / "spool")], input="\n".join([*declared, *declared]))
    assert (done.exit_code, len(calls)) == (0, 2)
    assert len(inspect.read_spool(tmp_path / "spool").queues) == 20
