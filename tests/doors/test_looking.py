"""`qflow peek`, `tail` and `grep`: what lies in queues and streams, found without taking it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import qflow
from doors.command_line import CommandLine, numbers, text
from qflow import inspect
from qflow.cli import messages, tail
from qflow.cli.main import app
from qflow.cli.stop import Stopped
from qflow.errors import NotFound
from qflow.inspect import Page, pages, read_newest, read_page, read_whole
from unit.clocks import Clock, open_still


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """Two queues and a stream that nobody owns."""
    path = tmp_path / "spool"
    clock = Clock()
    with open_still(path, clock) as broker:
        jobs = broker.declare_queue("jobs", priorities=3)
        jobs.put_many([b"mail %d" % number for number in range(20)])
        clock.advance(1)
        jobs.put(b"urgent", priority=2, headers={"tenant": "acme", "try": 3, "late": True, "a=b": None})
        clock.advance(1)
        jobs.put(b"\xff\x00\x1b[31mred", headers={"tenant": "other"}, ttl_s=3600)
        clock.advance(1)
        jobs.put(b"tomorrow", delay_s=86_400)
        broker.declare_queue("empty")
        broker.declare_stream("plant", topics=["plant/#", "$own/#"])
        broker.publish("plant/a", b"23 degrees", key=b"a")
        broker.publish("$own/b", b"mail of the plant", headers={"tenant": "acme"})
    return path


def run(*words: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


def found(*words: object) -> list[dict[str, object]]:
    """Run a command that prints JSON lines."""
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("conditions", "bodies"),
    [
        (["tenant=acme"], ["urgent"]),
        (["tenant"], ["urgent", None]),
        (["tenant=acme", "try=3", "late=true"], ["urgent"]),
        (["a=b"], ["urgent"]),
        (["a=b=null"], []),
        (["try=4"], []),
    ],
)
def test_peek_shows_those_with_a_header(spool: Path, conditions: list[str], bodies: list[str | None]) -> None:
    """All conditions hold; values are compared as they are written."""
    options = [word for condition in conditions for word in ("--where", condition)]
    assert [message.get("body") for message in found("peek", spool, "jobs", *options)] == bodies


REASON = 'Error: "b\\c" is there\nDETAIL: it\'s a duplicate\x1b'


@pytest.mark.parametrize(
    "written",
    [
        REASON,
        r"""Error: "b\c" is there\nDETAIL: it's a duplicate\x1b""",
        r"""Error: "b\\c" is there\nDETAIL: it\'s a duplicate\x1b""",
    ],
    ids=["as it is", "as peek shows it", "as doctor and show quote it"],
)
def test_a_value_is_found_as_it_is_shown(tmp_path: Path, written: str) -> None:
    """With escapes, such as for the lines of an exception: whoever looks copies that."""
    with qflow.open(tmp_path / "spool") as broker:
        jobs = broker.declare_queue("jobs", dead_letter="dead")
        for reason in (REASON, "another"):
            jobs.put(reason.encode())
            jobs.get().nack(requeue=False, reason=reason)
    where = f"dead_letter_nack_reason={written}"
    assert [message["body"] for message in found("peek", tmp_path / "spool", "dead", "--where", where)] == [REASON]


def test_peek_shows_headers_and_why_a_letter_is_dead(spool: Path) -> None:
    """Where there are any, and of a terminal they do nothing to it; long ones are cut."""
    with qflow.open(spool) as broker:
        orders = broker.declare_queue("orders", dead_letter="dead")
        for reason, headers in (
            ("card\x1b[31m declined", {"tenant": "acme", "a\nb": None}),
            (None, {"long": "x" * 999}),
        ):
            orders.put(b"an order", headers=headers)
            orders.get().nack(requeue=False, reason=reason)
        orders.put(b"one more", headers={"try": 3})
        orders.put(b"")
        broker.declare_queue("plain").put(b"no headers")
    heading, first, second = run("peek", spool, "dead").stdout.splitlines()
    assert heading.split() == ["sequence", "put", "at", "bytes", "body", "reason", "headers"]
    assert r"an order  card\x1b[31m declined  tenant=acme a\nb=null dead_letter_queue=orders " in first
    assert "an order  rejected" in second
    assert len(second) < 350
    heading, line, last = run("peek", spool, "orders").stdout.splitlines()
    assert heading.split() == ["sequence", "put", "at", "bytes", "body", "headers"]
    assert line.endswith("one more  try=3")
    assert last.endswith("  -")
    assert run("peek", spool, "plain").stdout.splitlines()[0].split() == ["sequence", "put", "at", "bytes", "body"]


def test_peek_is_in_the_order_of_delivery(spool: Path) -> None:
    """High priority comes first, delayed ones at the end; -n ends it."""
    bodies = [message.get("body") for message in found("peek", spool, "jobs", "-n", 100)]
    assert (bodies[0], bodies[1], bodies[-1], len(bodies)) == ("urgent", "mail 0", "tomorrow", 23)
    assert len(found("peek", spool, "jobs", "-n", 2)) == 2


def test_bodies_are_cut_where_the_log_is_read(spool: Path) -> None:
    """So that large ones are in memory once, whoever asks for how many; conditions look at all of them."""
    for page in (
        read_page(spool, "jobs", keep=lambda one: one.body == b"urgent", body_bytes=3),
        read_newest(spool, "jobs", 1, keep=lambda one: one.body == b"urgent", body_bytes=3),
    ):
        assert [(one.body, one.size_bytes) for one in page.messages] == [(b"urg", 6)]
    assert read_page(spool, "jobs").messages[0].size_bytes == 6


def test_a_condition_without_a_name_is_bad_usage(spool: Path) -> None:
    """The sentence says what one looks like."""
    done = run("peek", spool, "jobs", "--where", "=acme")
    assert done.exit_code == 2
    assert "NAME=VALUE" in done.stderr


def test_tail_shows_the_last_ones_a_line_each(spool: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In the order in which they were put, whatever their priority; a terminal obeys none of it."""
    assert run("tail", spool, "jobs", "-n", 4).exit_code == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split("  ")[-1] for line in lines] == ["mail 19", "urgent", "\ufffd\\x00\\x1b[31mred", "tomorrow"]
    assert run("tail", spool, "jobs", "-n", 1, "--where", "tenant=acme", "--json").exit_code == 0
    assert json.loads(capfd.readouterr().out)["body"] == "urgent"
    assert run("tail", spool, "empty").exit_code == 0
    assert capfd.readouterr().out == ""


def test_escapes_are_made_a_piece_at_a_time() -> None:
    """A large body of control characters takes little more memory than what is shown of it."""
    text = "\x1b[2J\n" * 200_000
    tracemalloc.start()
    shown = messages.escaped(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert shown == r"\x1b[2J\n" * 200_000
    assert peak < 3 * len(shown)


def test_tail_looks_further_back_where_much_is_settled(spool: Path) -> None:
    """What was acked at the end of a queue does not hide what waits before it."""
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("holes")
        queue.put_many([b"%d" % number for number in range(500)])
        held = queue.get_many(500)
        queue.ack_many(list(held)[3:], wait=True)
    assert [message.body for message in read_newest(spool, "holes", 2).messages] == [b"1", b"2"]


@pytest.mark.parametrize("as_json", [False, True])
def test_tail_has_a_few_large_messages_in_memory_at_once(
    spool: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], as_json: bool
) -> None:
    """However many it shows, whole and in order; neither it nor the process that reads the log has more."""
    clock = Clock()
    with open_still(spool, clock) as broker:
        large = broker.declare_queue("large", priorities=2)
        for number in range(32):
            large.put(b"%d" % number + b"x" * 2**20, priority=number % 3 // 2)
            clock.advance(1)
            large.put(b"%d" % number)
            clock.advance(1)
        large.put_many([b"small"] * 100)
        large.put_many([b"a bit more" * 100] * 100)
    monkeypatch.setattr(pages, "PAGE_BYTES", 2**21)
    monkeypatch.setattr(tail, "FIRST_BYTES", 2**17)
    monkeypatch.setattr(pages, "in_child", lambda _spool, work: work())
    options = ["--json"] if as_json else []
    tracemalloc.start()
    try:
        assert run("tail", spool, "large", "-n", 264 - 2, *options).exit_code == 0
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()
    lines = capfd.readouterr().out.splitlines()
    bodies = [json.loads(line)["body"] if as_json else line.split("  ", 2)[2] for line in lines]
    pairs = [body for number in range(1, 32) for body in (f"{number}{'x' * 2**20}", f"{number}")]
    assert bodies == [*pairs, *["small"] * 100, *["a bit more" * 100] * 100]


def test_what_is_settled_before_it_is_read_whole_is_left_out(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had been read whole by then is there."""
    page = read_newest(spool, "jobs", 4, body_bytes=6)
    assert [message.body for message in page.messages] == [b"mail 1", b"urgent", b"\xff\x00\x1b[31", b"tomorr"]
    with qflow.open(spool) as broker:
        broker.queue("jobs").delete(page.messages[2].sequence)
    (whole,) = read_whole(spool, "jobs", page.messages)
    assert [message.body for message in whole] == [b"mail 19", b"urgent", b"tomorrow"]


def test_tail_follows_what_comes(cli: CommandLine) -> None:
    """Beside an owner, without taking anything; a reader that goes away ends it."""
    cli.run("put", cli.spool, "q", stdin=text(numbers(0, 3)))
    tail = cli.start("tail", cli.spool, "q", "-n", 1, "--follow")
    assert tail.stdout is not None
    assert tail.stdout.readline().endswith(b"  2\n")
    with qflow.open(cli.spool) as broker:
        broker.queue("q").put_many(numbers(3, 6))
        assert [tail.stdout.readline().split()[-1] for _ in range(3)] == numbers(3, 6)
        assert len(broker.queue("q")) == 6
    tail.stdout.close()
    assert tail.wait() == 141


def test_tail_tells_the_queue_it_found_from_a_later_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Which is shown from its beginning; the first is found by its number, and not by going through all queues."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("q").put_many(numbers(0, 3))
    looks: list[int | None] = []

    def look(*given: Any, **more: Any) -> Any:
        looks.append(more.get("number"))
        if len(looks) > 1:
            raise Stopped
        with qflow.open(tmp_path / "spool") as broker:
            broker.delete_queue("q")
            broker.declare_queue("q").put_many(numbers(10, 15))
        return read_page(*given, **more)

    monkeypatch.setattr(inspect, "read_page", look, raising=False)
    run("tail", tmp_path / "spool", "q", "--follow")
    assert [line.split()[-1] for line in capfd.readouterr().out.splitlines()] == [
        "0",
        "1",
        "2",
        *map(str, range(10, 15)),
    ]
    assert looks[0] is not None
    assert looks[1] not in (None, looks[0])


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["urg.nt"], ["jobs:144115188075855872: urgent"]),
        (["URGENT", "-i", "-F"], ["jobs:144115188075855872: urgent"]),
        (["^tenant=acme$"], ["jobs:144115188075855872: urgent", "plant:1: mail of the plant"]),
        (["mail", "plant"], ["plant:1: mail of the plant"]),
        (["mail", "-c"], ["jobs: 20", "empty: 0", "plant: 1"]),
        (["mail", "-m", "1"], ["jobs:0: mail 0", "plant:1: mail of the plant"]),
        (["red$"], ["jobs:20: \ufffd\\x00\\x1b[31mred"]),
    ],
)
def test_grep_looks_into_bodies_and_headers(spool: Path, words: list[str], lines: list[str]) -> None:
    """Of all queues and streams, or of those that are named."""
    done = run("grep", spool, *words)
    assert (done.exit_code, sorted(done.stdout.splitlines())) == (0, sorted(lines))


def test_grep_finds_nothing_with_1_and_takes_no_bad_pattern(spool: Path) -> None:
    """As `grep` does it; a queue that is not there is told the nearest names."""
    assert run("grep", spool, "nowhere").exit_code == 1
    done = run("grep", spool, "(")
    assert done.exit_code == 2
    assert "no regular expression" in done.stderr
    done = run("grep", spool, "mail", "job")
    assert done.exit_code == 2
    assert "'jobs'" in done.stderr
    assert [one.get("topic") for one in found("grep", spool, "plant")] == ["$own/b"]


def test_pages_hold_a_queue_of_any_size(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message is on one page, whatever a page holds."""
    monkeypatch.setattr(pages, "PAGE_BYTES", 1)
    monkeypatch.setattr(pages, "READ_BYTES", 1)
    with qflow.open(spool) as broker:
        for number in range(20, 25):
            broker.queue("jobs").put(b"mail %d" % number)
    positions: dict[int, int] | None = None
    bodies, count = [], 0
    while True:
        page = read_page(spool, "jobs", positions, most=3)
        bodies += [message.body for message in page.messages]
        positions, count = page.positions, count + 1
        if not page.more:
            break
    assert count > 8
    assert len(bodies) == len(set(bodies)) == 28
    assert all(message.time_ms for message in page.messages)


OWNER = """
import sys, qflow
with qflow.open(sys.argv[1]) as broker:
    jobs = broker.declare_queue("jobs")
    for number in range(100):
        jobs.put(b"%d" % number)
    print("ready", flush=True)
    sys.stdin.readline()
    exec(sys.argv[2])
    print("done", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("words", ["grep SPOOL 'mail'", "export SPOOL", "peek SPOOL jobs --where tenant"])
def test_a_spool_with_many_queues_is_not_read_for_each_of_them(
    spool: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """It was, and for each page: with 5,000 queues a search took an hour."""
    monkeypatch.setattr(pages, "PAGE_BYTES", 1)
    looked = spool.parent / "looked"
    by_name = pages.queue_of

    def noted(*given: Any) -> Any:  # in a child process
        with looked.open("a") as file:
            file.write("x")
        return by_name(*given)

    monkeypatch.setattr(pages, "queue_of", noted)
    command, _, *rest = words.replace("'", "").split()
    done = run(command, spool, *rest)
    assert done.exit_code == 0, done.output
    assert done.output
    assert len(looked.read_text() if looked.exists() else "") == (command == "peek")


def test_a_queue_that_took_the_place_of_another_one_is_found_by_its_name(spool: Path) -> None:
    before = read_page(spool, "jobs", most=2)
    with qflow.open(spool) as broker:
        broker.delete_queue("jobs")
        broker.declare_queue("jobs").put(b"anew")
    page = read_page(spool, "jobs", before.positions, number=before.number)
    assert [one.body for one in page.messages] == [b"anew"]
    assert page.number != before.number


@pytest.mark.parametrize("look", [read_page, partial(read_newest, count=5)], ids=["page", "newest"])
@pytest.mark.parametrize("gone", [False, True], ids=["settled", "deleted"])
def test_what_is_settled_while_it_is_looked_for_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[..., Page], gone: bool
) -> None:
    """The consumers of a live spool go on between the moment in which its queues are read and that of the blocks."""
    path, found = tmp_path / "spool", pages.queue_of
    act = "broker.delete_queue('jobs')" if gone else "jobs.get_many(100).ack(wait=True)"
    arguments = [sys.executable, "-c", OWNER, str(path), act]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"

        def held_up(*given: Any) -> Any:
            record = found(*given)
            owner.stdin.write(b"\n")  # type: ignore[union-attr]
            assert owner.stdout.readline() == b"done\n"  # type: ignore[union-attr]
            return record

        monkeypatch.setattr(pages, "queue_of", held_up)
        if gone:
            with pytest.raises(NotFound, match="'jobs' was deleted"):
                look(path, "jobs")
        else:
            page = look(path, "jobs")
            assert (page.problems, page.messages) == ([], [])
        owner.stdin.write(b"\n")


@pytest.mark.parametrize(
    "words",
    ["doctor", "ls", "du", "stats", "streams", "sessions", "check", "compact", "export", "grep mail", "metrics"],
)
def test_a_spool_is_looked_at_through_a_link_to_it(spool: Path, words: str) -> None:
    """As it is opened through one; the links that nobody may plant are those inside."""
    link = spool.parent / "link"
    link.symlink_to(spool)
    command, *more = words.split()
    done = run(command, link, *more)
    assert (done.exit_code, done.stderr) == (0, ""), done.output


def _many_queues(path: Path) -> list[str]:
    """Make queues of which some are empty and one has several pages; return a line for each message, as `grep` has it."""
    lines = []
    with qflow.open(path) as broker:
        for number in range(12):
            queue = broker.declare_queue(f"q{number:02}")
            for each in range([1, 0, 5][number % 3]):
                queue.put(b"%d" % each + b"x" * 2**10)
                lines.append(f"q{number:02}:{each}: {each}")
    return lines


def test_grep_tells_a_queue_from_a_stream_of_its_name(tmp_path: Path) -> None:
    """Both are looked through, once each, also where that name is asked for."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("both").put(b"x of the queue")
        broker.declare_stream("both", topics=["t"])
        broker.publish("t", b"x of the stream")
    lines = ["both:0: x of the stream", "both:0: x of the queue"]
    assert run("grep", tmp_path / "spool", "x").stdout.splitlines() == lines
    assert run("grep", tmp_path / "spool", "x", "both").stdout.splitlines() == lines


def test_grep_reads_many_queues_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a page holds; of one that has more than that, the rest by itself."""
    lines = _many_queues(tmp_path / "many")
    children = []
    in_child = pages.in_child
    monkeypatch.setattr(pages, "in_child", lambda spool, work: children.append(spool) or in_child(spool, work))
    assert [line.partition("x")[0] for line in run("grep", tmp_path / "many", "x").stdout.splitlines()] == lines
    assert len(children) == 1
    monkeypatch.setattr(pages, "PAGE_BYTES", 2**13)
    monkeypatch.setattr(pages, "READ_BYTES", 2**10)
    assert [line.partition("x")[0] for line in run("grep", tmp_path / "many", "x").stdout.splitlines()] == lines
    assert 3 < len(children) < 12


def test_grep_shows_all_that_comes_before_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One queue kills who reads it: what the queues before it hold was shown, then the damage is told."""
    lines = _many_queues(tmp_path / "many")
    as_now = pages.as_now

    def read_or_die(txn: Any, record: Any) -> Any:
        if record.name == "q06":
            os.abort()
        return as_now(txn, record)

    monkeypatch.setattr(pages, "as_now", read_or_die)
    done = run("grep", tmp_path / "many", "x")
    assert [line.partition("x")[0] for line in done.stdout.splitlines() if line[0] == "q"] == lines[:12]
    assert (done.exit_code, "is damaged" in done.output) == (1, True)


def test_grep_finds_nothing_in_a_queue_that_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are looked through."""
    lines = _many_queues(tmp_path / "many")
    read_first_pages = inspect.read_first_pages

    def read_later(path: Path, queues: Any, **options: Any) -> list[Page]:
        with qflow.open(path) as broker:
            broker.delete_queue("q02")
        monkeypatch.setattr(inspect, "read_first_pages", read_first_pages)
        return read_first_pages(path, queues, **options)

    monkeypatch.setattr(inspect, "read_first_pages", read_later)
    done = run("grep", tmp_path / "many", "x")
    assert done.exit_code == 0, done.output
    shown = [line.partition("x")[0] for line in done.stdout.splitlines()]
    assert shown == [line for line in lines if not line.startswith("q02")]
