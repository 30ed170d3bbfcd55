"""`qflow publish`, `qflow subscribe` and `qflow streams`; and streams in `stats` and `check`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

import qflow
from doors.command_line import CommandLine, error_line, numbers, python, text

OWNER = python(
    "import sys, qflow\n"
    "with qflow.open(sys.argv[1]) as broker:\n"
    "    broker.declare_stream('plant', topics=['plant/#'])\n"
    "    print('ready', flush=True)\n"
    "    for line in sys.stdin:\n"
    "        topic, _, body = line.strip().partition(' ')\n"
    "        broker.publish(topic, body.encode())\n"
)
"""Owns a spool and publishes each line of stdin: a topic and a body."""


def declare(cli: CommandLine, *more: str, name: str = "plant", topics: str = "plant/#") -> None:
    done = cli.run("streams", cli.spool, "--declare", name, "--topics", topics, *more)
    assert done.returncode == 0, done.stderr


def read(cli: CommandLine, *arguments: object) -> list[bytes]:
    """Return the lines of `qflow subscribe`, which has nothing to complain of."""
    done = cli.run("subscribe", cli.spool, *arguments)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.splitlines()


# Publishing ----------------------------------------------------------------------------------------------------------


def test_what_is_published_is_read_again(cli: CommandLine) -> None:
    """An argument or lines of stdin; any number of readers get it, from where they want."""
    declare(cli)
    done = cli.run("publish", cli.spool, "plant/1/heat", "21.5")
    assert (done.returncode, done.stdout) == (
        0,
        b"messages confirmed: 1 (4 bytes)\n  1 in stream plant, offset 0\n",
    )
    done = cli.run("publish", cli.spool, "plant/2/heat", stdin=b"19\n\nlast")
    assert done.stdout == b"messages confirmed: 3 (6 bytes)\n  3 in stream plant, offsets 1 to 3\n"
    for _ in range(2):
        assert read(cli, "plant") == [b"21.5", b"19", b"", b"last"]
    assert read(cli, "plant", "plant/1/+") == [b"21.5"]
    assert read(cli, "plant", "--from", 3) == [b"last"]
    assert read(cli, "plant", "--from", 4) == []
    assert read(cli, "plant", "--from", "latest") == []
    assert read(cli, "plant", "--limit", 2) == [b"21.5", b"19"]
    done = cli.run("subscribe", cli.spool, "plant", "--delimiter", r"\0", "--limit", 2)
    assert done.stdout == b"21.5\0" + b"19\0"


def test_a_filter_that_can_match_nothing_is_told(cli: CommandLine) -> None:
    """One sentence, and nothing else is other than for one that matches none by chance."""
    declare(cli)
    cli.run("publish", cli.spool, "plant/1/heat", "21.5")
    done = cli.run("subscribe", cli.spool, "plant", "works/#")
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr == b"qflow: stream plant takes plant/#, of which works/# matches nothing\n"
    for wanted in ("plant/9", "+/+/cold", "#"):
        assert cli.run("subscribe", cli.spool, "plant", wanted).stderr == b""


def test_more_than_one_read_holds(cli: CommandLine) -> None:
    """Every message once and in order, across many blocks; --limit counts across reads."""
    declare(cli)
    lines = [b"%06d" % number * 20 for number in range(20_000)]
    cli.run("publish", cli.spool, "plant/1", stdin=text(lines))
    assert read(cli, "plant") == lines
    assert read(cli, "plant", "--from", 100, "--limit", 15_000) == lines[100:15_100]


def test_all_of_a_message_as_json(cli: CommandLine) -> None:
    """Topic, key, headers, time, offset; what is no text as base64."""
    declare(cli)
    cli.run("publish", cli.spool, "plant/1", "grüße", "--key", "k", "--header", "a=b=c", "--header", "d=")
    cli.run("publish", cli.spool, "plant/2", stdin=b"\xff\x00")
    first, second = map(json.loads, read(cli, "plant", "--format", "json"))
    moment = datetime.fromisoformat(first.pop("published_at"))
    assert abs(datetime.now(UTC) - moment) < timedelta(days=1)
    assert first == {
        "stream": "plant", "partition": 0, "offset": 0, "topic": "plant/1", "key": "k", "body": "grüße",
        "headers": {"a": "b=c", "d": ""},
    }  # fmt: skip
    assert (second["body_base64"], second["key"], second["headers"]) == ("/wA=", None, {})


def test_topics_can_stand_in_the_lines(cli: CommandLine) -> None:
    """What --format=topic writes, --topic-in-line reads: one spool is copied to another."""
    declare(cli)
    lines = [b"plant/%d\tbody\t%d" % (number % 7, number) for number in range(3000)]
    facts = json.loads(cli.run("publish", cli.spool, "--topic-in-line", "--json", stdin=text(lines)).stdout)
    assert facts == {
        "confirmed": 3000, "bytes": sum(len(line) - 8 for line in lines), "duplicates": 0, "unrouted": 0,
        "streams": {"plant": {"messages": 3000, "offsets": {"0": [0, 2999]}}}, "queues": {}, "dropped": {},
    }  # fmt: skip
    assert read(cli, "plant", "--format", "topic") == lines
    assert read(cli, "plant", "plant/3", "--format", "topic") == lines[3::7]
    other = cli.directory / "other"
    cli.run("streams", other, "--declare", "copy", "--topics", "#")
    assert cli.run("publish", other, "--topic-in-line", stdin=text(lines)).returncode == 0
    assert cli.run("subscribe", other, "copy", "--format", "topic").stdout == text(lines)


def test_bound_queues_get_it_too(cli: CommandLine) -> None:
    """One commit for streams and queues; what a queue drops is told, and one that waits for room is given up."""
    with qflow.open(cli.spool) as broker:
        broker.declare_stream("plant", topics=["plant/#"])
        broker.bind(broker.declare_queue("q"), "plant/#")
        broker.bind(broker.declare_queue("newest", limit_messages=3, on_overflow="drop_newest"), "plant/1")
        broker.bind(broker.declare_queue("full", limit_messages=1), "full/#")
    facts = json.loads(cli.run("publish", cli.spool, "plant/1", "--json", stdin=b"a\nb\nc\n").stdout)
    assert (facts["confirmed"], facts["queues"], facts["dropped"]) == (3, {"q": 3, "newest": 3}, {})
    done = cli.run("publish", cli.spool, "plant/1", "d")
    assert done.stdout == (
        b"messages confirmed: 1 (1 byte)\n  1 in stream plant, offset 3\n  1 in queue q\n"
        b"  1 dropped by queue newest, or made dead letters\n"
    )
    assert cli.waiting() == [b"a", b"b", b"c", b"d"]
    assert cli.run("publish", cli.spool, "full/x", "1").returncode == 0
    done = cli.run("publish", cli.spool, "full/x", "2")
    assert done.returncode == 4
    assert "'full'" in error_line(done)
    assert done.stdout == b"messages confirmed: 0 (0 bytes)\n"


def test_more_than_the_memory_can_be_published_to_a_queue(cli: CommandLine) -> None:
    """The spool is opened again before messages of a bound queue would spill."""
    with qflow.open(cli.spool) as broker:
        broker.bind(broker.declare_queue("q"), "#")
    lines = numbers(0, 50_000)
    assert cli.run("publish", cli.spool, "x", "--capacity", "2MiB", stdin=text(lines)).returncode == 0
    assert cli.run("spilled", cli.spool).stdout == b""
    assert cli.waiting() == lines


def test_a_producer_may_publish_again(cli: CommandLine) -> None:
    """What has a number he published before is counted and not stored; the rest is."""
    declare(cli)
    lines = numbers(0, 1500)
    producer = ("--producer", "loader", "--number")
    first = cli.run("publish", cli.spool, "plant/1", *producer, 0, stdin=text(lines[:1000]))
    assert first.stdout.startswith(b"messages confirmed: 1,000 ")
    again = cli.run("publish", cli.spool, "plant/1", *producer, 900, "--json", stdin=text(lines[900:]))
    facts = json.loads(again.stdout)
    assert (facts["confirmed"], facts["duplicates"]) == (500, 100)
    assert read(cli, "plant") == lines
    late = cli.run("publish", cli.spool, "plant/1", *producer, 3, stdin=b"x\ny\n")
    assert late.returncode == 2
    assert "stdin: line 1:" in error_line(late)


def test_nobody_takes_the_topic(cli: CommandLine) -> None:
    """An error that tells how to make a stream; of lines with topics, the others are stored."""
    declare(cli)
    done = cli.run("publish", cli.spool, "it's/a", "x")
    assert done.returncode == 2
    assert "nobody takes topic it's/a" in error_line(done)
    assert f"qflow streams {cli.spool} --declare NAME --topics='it'\"'\"'s/a'" in error_line(done)
    done = cli.run("publish", cli.spool, "--topic-in-line", stdin=b"plant/1\ta\nx\tb\nplant/1\tc\ny\td\n")
    assert done.returncode == 2
    assert "line 2: nobody takes topic x" in error_line(done)
    assert "2 such messages" in error_line(done)
    assert b"taken by nobody, and not stored: 2\n" in done.stdout
    assert read(cli, "plant") == [b"a", b"c"]


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (b"no tab", "there is no tab"),
        (b"plant/+\tx", "contains '+'"),
        (b"\xff\tx", "not UTF-8"),
        (b"\tx", "topic"),
        (b"plant/1\t" + b"x" * 101, "101 bytes"),
    ],
)
@pytest.mark.parametrize("producer", [(), ("--producer", "p", "--number", "1")])
def test_a_line_that_is_refused_is_named(cli: CommandLine, bad: bytes, expected: str, producer: tuple[str]) -> None:
    """Those before it are confirmed, those behind it are not stored."""
    with qflow.open(cli.spool) as broker:
        broker.declare_stream("plant", topics=["plant/#"], max_message_bytes=100)
    lines = [b"plant/1\t%d" % number for number in range(20)]
    done = cli.run("publish", cli.spool, "--topic-in-line", *producer, stdin=text([*lines, bad, lines[0]]))
    assert done.returncode == 2
    assert error_line(done).startswith("qflow: stdin: line 21: ")
    assert expected in error_line(done)
    assert done.stdout.startswith(b"messages confirmed: 20 ")
    assert read(cli, "plant") == numbers(0, 20)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "Missing argument 'TOPIC'"),
        (("a", "b", "--topic-in-line"), "leave TOPIC out"),
        (("a", "b", "--producer", "p"), "go together"),
        (("a", "b", "--number", "1"), "go together"),
        (("a", "b", "--header", "x"), "'x' is not NAME=VALUE"),
        (("a/#", "b"), "contains '#'"),
        (("plant/\udcff", "b"), "cannot be encoded"),
        (("plant/1", "b", "--producer", "", "--number", "1"), "producer"),
    ],
)
def test_what_cannot_be_published(cli: CommandLine, arguments: tuple[str, ...], expected: str) -> None:
    """Refused with exit code 2, and nothing is stored."""
    declare(cli)
    done = cli.run("publish", cli.spool, *arguments)
    assert done.returncode == 2
    assert expected in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert read(cli, "plant") == []


def test_publish_does_not_wait_to_fill_a_batch_and_stops_on_a_signal(cli: CommandLine) -> None:
    """A line from a slow pipe can be read by others while the pipe is open; after SIGTERM, the count is right."""
    declare(cli)
    process = cli.start("publish", cli.spool, "plant/1")
    assert process.stdin is not None
    process.stdin.write(b"first\nsec")
    while read(cli, "plant") != [b"first"]:
        pass
    assert cli.run("publish", cli.spool, "plant/1", "x").returncode == 3
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    output, errors = process.communicate()
    assert output.startswith(b"messages confirmed: 1 (5 bytes)\n")
    assert b"its first 3 bytes were not stored" in errors


# Subscribing ---------------------------------------------------------------------------------------------------------


def test_follow_sees_what_a_live_owner_adds(cli: CommandLine) -> None:
    """What was there and what comes, in order, of the topics asked for; a signal ends it."""
    owner = subprocess.Popen([*OWNER, str(cli.spool)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert owner.stdin is not None
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == b"ready\n"
        owner.stdin.write(b"plant/1/heat 1\nplant/1/door open\nplant/2/heat 2\n")
        process = cli.start("subscribe", cli.spool, "plant", "plant/+/heat", "--follow", "--format", "topic")
        assert process.stdout is not None
        assert process.stdout.readline() == b"plant/1/heat\t1\n"
        assert process.stdout.readline() == b"plant/2/heat\t2\n"
        for number in range(3, 10):
            owner.stdin.write(b"plant/1/door shut\nplant/%d/heat %d\n" % (number, number))
            assert process.stdout.readline() == b"plant/%d/heat\t%d\n" % (number, number)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
        assert process.communicate() == (b"", b"")
        assert cli.json("check", cli.spool)["problems"] == []
        (stream,) = cli.json("streams", cli.spool)
        assert stream["messages"] == 17
    finally:
        owner.stdin.close()
        assert owner.wait() == 0
        owner.stdout.close()


def test_follow_outlives_owners(cli: CommandLine) -> None:
    """It goes on while one owner leaves and another one comes; --limit ends it; --from=latest leaves out what was."""
    declare(cli)
    cli.run("publish", cli.spool, "plant/1", "old")
    process = cli.start("subscribe", cli.spool, "plant", "--follow", "--limit", 3)
    late = cli.start("subscribe", cli.spool, "plant", "--follow", "--from", "latest", "--limit", 1)
    assert process.stdout is not None
    assert process.stdout.readline() == b"old\n"
    bodies = (b"new %d" % number for number in range(1_000_000))
    while late.poll() is None:  # it may not have looked where the stream ends yet
        assert cli.run("publish", cli.spool, "plant/1", next(bodies).decode()).returncode == 0
    assert late.stdout is not None
    assert late.stdout.read().startswith(b"new ")
    while process.poll() is None:
        cli.run("publish", cli.spool, "plant/1", next(bodies).decode())
    assert process.stdout.read() == b"new 0\nnew 1\n"
    assert process.returncode == 0


def test_follow_goes_on_while_the_owner_compacts(cli: CommandLine) -> None:
    """Each message once and in order, however often the log is replaced under it."""
    with qflow.open(cli.spool) as broker:
        broker.declare_stream("plant", topics=["plant/#"])
        process = cli.start("subscribe", cli.spool, "plant", "plant/+", "--follow", "--limit", 400)
        for number in range(0, 400, 20):
            broker.publish_many([(f"plant/{one % 7}", b"%d" % one) for one in range(number, number + 20)])
            broker.compact()
        output, errors = process.communicate()
    assert (process.returncode, errors) == (0, b"")
    assert output == text(numbers(0, 400))


def test_a_reader_that_leaves_ends_it(cli: CommandLine) -> None:
    """Before the end of the stream, or while it waits for more."""
    declare(cli)
    cli.run("publish", cli.spool, "plant/1", stdin=text(numbers(0, 100_000)))
    for options in ((), ("--follow", "--from", 99_999)):
        process = cli.start("subscribe", cli.spool, "plant", *options)
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdigit()
        process.stdout.close()
        assert process.wait() == 128 + signal.SIGPIPE
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_what_retention_took_from_a_slow_reader_is_counted(cli: CommandLine) -> None:
    """A reader that was stopped finds the floor above its place: it says how many are gone, and goes on behind them."""
    with qflow.open(cli.spool) as broker:
        stream = broker.declare_stream("plant", topics=["plant/#"])
        broker.publish("plant/1", b"first")
        process = cli.start("subscribe", cli.spool, "plant", "--follow")
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        broker.publish_many([("plant/1", b"%d" % number) for number in range(100)])
        broker.alter_stream("plant", retention_messages=10)
        while stream.retain():
            pass
        os.kill(process.pid, signal.SIGCONT)
        assert [process.stdout.readline() for _ in range(10)] == [b"%d\n" % number for number in range(90, 100)]
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
        assert process.stderr is not None
        assert process.stderr.read() == (
            b"qflow: stream plant, partition 0: 90 messages of all topics are gone, offsets 1 to 90: "
            b"retention took them\n"
        )
    done = cli.run("subscribe", cli.spool, "plant", "--from", 95, "--limit", 1)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"94\n", b"")
    done = cli.run("subscribe", cli.spool, "plant", "--from", 0, "--limit", 1)
    assert (done.returncode, done.stdout) == (0, b"90\n")
    assert "91 messages" in error_line(done)


def test_a_stream_that_is_deleted_ends_it(cli: CommandLine) -> None:
    """One line that says so."""
    with qflow.open(cli.spool) as broker:
        broker.declare_stream("plant", topics=["plant/#"])
        broker.publish("plant/1", b"first")
        process = cli.start("subscribe", cli.spool, "plant", "--follow")
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        broker.delete_stream("plant")
        assert process.wait() == 2
        assert process.stderr is not None
        assert process.stderr.read() == b"qflow: stream 'plant' was deleted\n"


def test_several_partitions_are_merged_by_time(cli: CommandLine) -> None:
    """Each in order; one of them alone; an offset needs to know which."""
    declare(cli, "--partitions", "4")
    for number in range(4):
        lines = [b"plant/%d\t%d" % (topic, number * 10 + topic) for topic in range(10)]
        cli.run("publish", cli.spool, "--topic-in-line", stdin=text(lines))
    found = [json.loads(line) for line in read(cli, "plant", "--format", "json")]
    assert sorted(int(one["body"]) for one in found) == list(range(40))
    times = [one["published_at"] for one in found]
    assert times == sorted(times)
    for number in range(4):
        own = [one for one in found if one["partition"] == number]
        assert [one["offset"] for one in own] == list(range(len(own)))
        alone = [json.loads(line) for line in read(cli, "plant", "--partition", number, "--format", "json")]
        assert alone == own
    assert len({one["partition"] for one in found}) > 1
    first = found[0]["partition"]
    own = [one["body"].encode() for one in found if one["partition"] == first]
    assert read(cli, "plant", "--partition", first, "--from", 1) == own[1:]
    done = cli.run("subscribe", cli.spool, "plant", "--from", 1)
    assert done.returncode == 2
    assert "say which partition" in error_line(done)
    done = cli.run("subscribe", cli.spool, "plant", "--partition", 4)
    assert done.returncode == 2
    assert "partitions 0 to 3, not 4" in error_line(done)


def test_from_a_moment(cli: CommandLine) -> None:
    """The first message that is not earlier."""
    declare(cli)
    cli.run("publish", cli.spool, "plant/1", "a")
    (first,) = map(json.loads, read(cli, "plant", "--format", "json"))
    cli.run("publish", cli.spool, "plant/1", "b")
    later = (datetime.fromisoformat(first["published_at"]) + timedelta(milliseconds=1)).isoformat()
    assert read(cli, "plant", "--from", first["published_at"]) == [b"a", b"b"]
    assert read(cli, "plant", "--from", later) == [b"b"]
    assert read(cli, "plant", "--from", "2000-01-01T00:00:00Z") == [b"a", b"b"]
    assert read(cli, "plant", "--from", "9000-01-01T00:00:00+02:00") == []


def publish_at(cli: CommandLine, *moments: datetime) -> None:
    """Publish a message at each of these moments, whose body is its number; the broker believes it is then."""
    times = iter(moments)
    now = [next(times).timestamp()]
    with qflow.broker.make_broker(cli.spool, qflow.config.BrokerSettings(), clock=lambda: now[0]) as broker:
        broker.declare_stream("plant", topics=["plant/#"])
        for number in range(len(moments)):
            broker.publish("plant/1", b"%d" % number)
            now[0] = next(times, datetime.now(UTC)).timestamp()


def test_from_a_date_a_zone_or_some_time_ago(cli: CommandLine) -> None:
    """What an error suggests is taken; a date or moment without a zone is one of this machine's zone."""
    dated = [datetime(2020, 1, day, hour, tzinfo=UTC) for day, hour in ((30, 14), (30, 16), (30, 23), (31, 2))]
    now = datetime.now(UTC)
    publish_at(cli, *dated, now - timedelta(hours=2), now)
    for start, first in (
        ("2020-01-31Z", 3),
        ("2020-01-31+02:00", 2),
        ("2020-01-31", 1),
        ("2020-01-31T10:30", 3),
        ("-1h", 5),
        ("-2h90m", 4),
        ("-7d", 4),
    ):
        done = cli.run("subscribe", cli.spool, "plant", "--from", start, shell='TZ=JST-9 exec "$@"')
        assert (done.returncode, done.stderr) == (0, b""), start
        assert done.stdout.splitlines() == numbers(first, 6), start


def test_what_is_refused_as_a_start_is_told_what_would_be_taken(cli: CommandLine) -> None:
    """Each example in the sentence is taken."""
    declare(cli)
    for start in ("2020-13-01", "-99999999999999d"):
        done = cli.run("subscribe", cli.spool, "plant", "--from", start)
        said = " ".join(done.stderr.decode().replace("│", " ").split())
        assert done.returncode == 2
        assert f"not {start!r}" in said
    examples = [example for pair in re.findall(r"such as (\S+?)(?: or (\S+?))?,", said) for example in pair if example]
    assert len(examples) == 4
    for example in examples:
        assert read(cli, "plant", "--from", example) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("plant", "a/#/b"), "goes on after '#'"),
        (("plant", ""), "topic filter"),
        (("plant", "#", "--from", "2"), "offset 2 is past the end of stream 'plant', partition 0: the next message"),
        (("plant", "#", "--from", "9" * 4000), "past the end"),
        (("plant", "#", "--from", "20261122"), "; if a date is meant, it is 2026-11-22"),
        (("plant", "#", "--from", "garbage"), "not 'garbage'"),
        (("plant", "#", "--from", "-1"), "not '-1'"),
        (("plant", "#", "--from", "1960-01-31T12:00:00Z"), "not before 1970"),
        (("plant", "#", "--limit", "0"), "--limit"),
        (("plant", "#", "--format", "xml"), "--format"),
        (("nonsense",), "there is no stream 'nonsense' in"),
        (("nonsense",), "there are: 'other\\n', 'plant'"),
    ],
)
def test_what_cannot_be_read(cli: CommandLine, arguments: tuple[str, ...], expected: str) -> None:
    """Refused with exit code 2, with what there is."""
    declare(cli, name="other\n", topics="x")
    declare(cli)
    cli.run("publish", cli.spool, "plant/1", "a")
    done = cli.run("subscribe", cli.spool, *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert expected in done.stderr.decode()
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("command", [("subscribe", "plant"), ("streams",), ("publish", "plant/1", "x")])
def test_no_stream_and_no_spool(cli: CommandLine, command: tuple[str, ...]) -> None:
    """Nothing is made where there is none, and nothing is taken over."""
    (cli.directory / "file").write_bytes(b"precious")
    (cli.directory / "there").mkdir()
    for path, expected in (("nowhere", "no"), ("file", "'file' is a file"), ("there", "not a spool")):
        done = cli.run(command[0], path, *command[1:])
        assert done.returncode == 2
        assert expected in done.stderr.decode()
        assert b"Traceback" not in done.stderr
    assert sorted(os.listdir(cli.directory)) == ["file", "there"]
    assert os.listdir(cli.directory / "there") == []
    cli.run("put", cli.spool, "q", stdin=b"x\n")
    done = cli.run(command[0], cli.spool, *command[1:])
    if command[0] == "streams":
        assert (done.returncode, done.stdout) == (0, b"no streams\n")
        assert cli.json("streams", cli.spool) == []
    else:
        assert done.returncode == 2
        assert error_line(done)


# Looking -------------------------------------------------------------------------------------------------------------


def test_streams_are_listed_with_who_reads_them(cli: CommandLine) -> None:
    """Topics, partitions, offsets, retention, and durable subscriptions with their lag, beside a live owner."""
    declare(cli, "--topics", "heat/+", "--retention-bytes", "1MiB", "--retention-s", "60")
    declare(cli, "--partitions", "2", "--retain-until-consumed", name="odd\n", topics="odd/#")
    with qflow.open(cli.spool) as broker:
        broker.publish_many([("plant/1", b"%d" % number) for number in range(2000)])
        broker.publish_many([(f"odd/{number}", b"x") for number in range(20)])
        with broker.subscribe("plant", "plant/1", name="panel", start="earliest") as panel:
            panel.get_many(500).ack(wait=True)
        broker.subscribe("odd\n", "#", group="workers", start="earliest").close()
        plant, odd = cli.json("streams", cli.spool)
        shown = cli.run("streams", cli.spool).stdout.decode().splitlines()
        stats = cli.run("stats", cli.spool).stdout.decode()
        assert cli.json("stats", cli.spool)["streams"] == [plant, odd]
    assert (plant["name"], plant["topics"], plant["messages"]) == ("plant", ["plant/#", "heat/+"], 2000)
    assert plant["partitions"] == [
        {"number": 0, "messages": 2000, "bytes": 6890, "first_offset": 0, "next_offset": 2000}
    ]
    assert plant["settings"]["retention_bytes"] == 2**20
    assert plant["subscriptions"] == [
        {
            "name": "panel", "group": False, "filter": "plant/1", "committed": [500], "lag_messages": 1500,
            "session_expiry_s": None, "problem": None,
        }
    ]  # fmt: skip
    assert [part["number"] for part in odd["partitions"]] == [0, 1]
    assert sum(part["messages"] for part in odd["partitions"]) == odd["messages"] == 20
    assert (odd["subscriptions"][0]["committed"], odd["subscriptions"][0]["lag_messages"]) == ([0, 0], 20)
    assert shown[0].split() == ["stream", "topics", "partitions", "messages", "bytes", "first", "next", "keeps"]
    assert shown[1].split(maxsplit=8) == [
        "plant", "plant/#", "heat/+", "1", "2,000", "6,890", "0", "2,000", "for 60 s, newest 1,048,576 bytes",
    ]  # fmt: skip
    assert shown[2].startswith(r"'odd\n'")
    assert shown[2].split()[-4:] == ["-", "-", "until", "consumed"]
    assert shown[4].split() == ["stream", "partition", "messages", "bytes", "first", "next"]
    assert shown[-3].split() == ["stream", "subscription", "of", "filter", "committed", "lag"]
    assert shown[-2].split() == ["plant", "panel", "one", "plant/1", "500", "1,500"]
    assert shown[-1].split() == [r"'odd\n'", "workers", "group", "#", "0", "0", "20"]
    assert "no durable queues" in stats
    assert shown[1] in stats


def test_declaring_again_changes_nothing(cli: CommandLine) -> None:
    """The same is fine, anything else is an error; so are settings that make no sense, and settings without a name."""
    declare(cli, "--retention-messages", "5")
    declare(cli, "--retention-messages", "5")
    for arguments, expected in (
        (("--declare", "plant", "--topics", "plant/#"), "has retention_messages=5"),
        (("--declare", "plant"), "needs --topics"),
        (("--declare", "x", "--topics", "a#"), "a wildcard takes a whole level"),
        (("--declare", "x", "--topics", "a", "--partitions", "65"), "at most 64"),
        (("--declare", "x", "--topics", "a", "--retention-bytes", "some"), "retention_bytes"),
        (("--declare", "", "--topics", "a"), "stream name"),
        (("--topics", "a"), "--topics goes with --declare NAME"),
        (("--retention-s", "0"), "--retention-s goes with --declare NAME"),
    ):
        done = cli.run("streams", cli.spool, *arguments)
        assert done.returncode == 2, arguments
        assert expected in done.stderr.decode()
    (stream,) = cli.json("streams", cli.spool)
    assert stream["settings"]["retention_messages"] == 5


def test_a_damaged_block_is_named_and_read_past(cli: CommandLine) -> None:
    """`check` finds it; `subscribe` counts what is gone, writes the rest, and exits with 1."""
    declare(cli)
    for number in range(5):
        body = b"block %d, easily found in the log " % number
        cli.run("publish", cli.spool, "plant/1", stdin=text([body * 100] * 20))
    log = cli.spool / "log" / "data.mdb"
    log.write_bytes(log.read_bytes().replace(b"block 2, easily", b"block 2, fasily"))
    done = cli.run("check", cli.spool)
    assert done.returncode == 1
    assert b"stream 'plant', partition 0: " in done.stdout
    done = cli.run("subscribe", cli.spool, "plant")
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) < 100
    assert {line[:7] for line in done.stdout.splitlines()} >= {b"block 0", b"block 4"}
    assert b"fasily" not in done.stdout
    *_, told = done.stderr.decode().splitlines()
    assert "gone, offset" in told
    assert "does not match its checksum" in told
    cli.discard_spool()
