"""`qflow stats`, `spilled`, `show` and `check`: what lies in a spool, beside an owner or without one."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import qflow
from doors.command_line import NOT_READING, CommandLine, error_line, numbers, text
from qflow import inspect
from unit.clocks import until


def test_stats_tell_what_waits(cli: CommandLine) -> None:
    """Messages, bytes, sequences and settings of each queue, as text and as JSON."""
    cli.run("put", cli.spool, "q", stdin=text(numbers(0, 1500)))
    cli.run("put", cli.spool, "other queue\n", stdin=b"x\n")
    cli.run("get", cli.spool, "q", "--max", 500)
    facts = cli.json("stats", cli.spool)
    assert (facts["clean"], facts["owner_pid"], facts["problems"]) == (True, None, [])
    first, second = facts["queues"]
    assert (first["name"], first["messages"], first["floor"], first["next_sequence"]) == ("q", 1000, 500, 1500)
    assert first["settings"]["durable"] is True
    assert (second["name"], second["bytes"]) == ("other queue\n", 1)
    shown = cli.run("stats", cli.spool).stdout.decode().splitlines()
    assert shown[0] == "no owner; closed cleanly; nothing is held, and nobody waits"
    assert [line.split() for line in shown[2:4]] == [
        ["queue", "messages", "bytes", "floor", "next"],
        ["q", "1,000", "3,500", "500", "1,500"],
    ]
    assert shown[4].startswith(r"'other queue\n'")


def test_a_spool_without_queues(cli: CommandLine) -> None:
    """Nothing to show is no error."""
    qflow.open(cli.spool).close()
    assert cli.json("stats", cli.spool)["queues"] == []
    assert b"no durable queues" in cli.run("stats", cli.spool).stdout
    assert cli.run("spilled", cli.spool).returncode == 0


def test_everything_can_be_read_beside_a_live_owner(cli: CommandLine) -> None:
    """Facts come from log, stats.json and spill directory while another process owns the spool."""
    process = cli.start("pipe", cli.spool, "q", "--capacity", "16KiB", "--", *NOT_READING)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(text(numbers(0, 1000)))
    assert process.stdout.readline() == b"ready\n"
    cli.wait_until_stored(1000)
    facts = cli.json("stats", cli.spool)
    assert facts["owner_pid"] == process.pid
    assert facts["queues"][0]["messages"] == 1000
    while not cli.json("stats", cli.spool)["live"]:
        pass
    shown = cli.run("stats", cli.spool).stdout.decode()
    assert f"owned by process {process.pid}" in shown
    assert "resident bytes" in shown
    spilled = [json.loads(line) for line in cli.run("spilled", cli.spool, "q", "--json").stdout.splitlines()]
    assert spilled
    assert all(found["queue"] == "q" and found["sequence"] < 1000 for found in spilled)
    assert Path(spilled[0]["file"]).parent.parent == cli.spool / "spill"
    assert all(line.startswith(b"q  ") for line in cli.run("spilled", cli.spool).stdout.splitlines())
    assert cli.json("show", cli.spool, "q", 999)["body"] == "999"
    assert cli.json("check", cli.spool)["problems"] == []


def test_a_spool_has_one_owner(cli: CommandLine) -> None:
    """Commands that need the spool for themselves say so, in one line, and change nothing; others ask the owner."""
    process = cli.start("pipe", cli.spool, "q", "--", *NOT_READING)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"0\n")
    assert process.stdout.readline() == b"ready\n"
    done = cli.run("pipe", cli.spool, "q", stdin=b"x\n")
    assert done.returncode == 3
    assert str(process.pid) in done.stderr.decode()
    assert cli.json("stats", cli.spool)["queues"][0]["next_sequence"] == 1


def test_show_tells_all_about_a_message(cli: CommandLine) -> None:
    """Body, headers, time, size; text as text, other bytes as base64 or as they are."""
    with qflow.open(cli.spool) as broker:
        queue = broker.declare_queue("q")
        queue.put("grüße".encode(), headers={"kind": "greeting", "n": 3})
        queue.put(b"\xff\x00\x1b[2J")
        queue.put(b"acked")
        queue.get_many(1).ack()
    facts = cli.json("show", cli.spool, "q", 1)
    assert (facts["body_base64"], facts["size_bytes"], facts["settled"]) == ("/wAbWzJK", 6, False)
    assert facts["put_at"].endswith("+00:00")
    first = cli.run("show", cli.spool, "q", 0)
    if first.returncode == 0:  # its block may be gone
        assert "header    kind = 'greeting'" in first.stdout.decode()
        assert "(settled)" in first.stdout.decode()
    assert cli.run("show", cli.spool, "q", 1, "--body").stdout == b"\xff\x00\x1b[2J"
    assert b"\x1b" not in cli.run("show", cli.spool, "q", 1).stdout


def test_what_is_not_there_is_named(cli: CommandLine) -> None:
    """A message or a queue that does not exist: one line that helps, exit code 2."""
    cli.run("put", cli.spool, "q", stdin=b"x\n")
    for arguments, expected in (
        (("show", cli.spool, "q", 7), "message 7 of queue 'q'"),
        (("show", cli.spool, "p", 0), "'p'"),
        (("spilled", cli.spool, "p"), "'p'"),
        (("get", cli.spool, "p"), "'p'"),
    ):
        done = cli.run(*arguments)
        assert done.returncode == 2
        assert expected in error_line(done)


def test_check_finds_a_flipped_bit(cli: CommandLine) -> None:
    """Damage in the log is reported and makes the exit code 1."""
    body = b"a message that is easily found in the log"
    cli.run("put", cli.spool, "q", stdin=body)
    done = cli.run("check", cli.spool)
    assert (done.returncode, done.stdout) == (0, b"no problems found\n")
    log = cli.spool / "log" / "data.mdb"
    log.write_bytes(log.read_bytes().replace(b"easily", b"fasily"))  # also in pages that are no longer part of it
    done = cli.run("check", cli.spool)
    assert done.returncode == 1
    assert b"queue 'q'" in done.stdout
    done = cli.run("check", cli.spool, "--json")
    assert done.returncode == 1
    assert len(json.loads(done.stdout)["problems"]) >= 1
    cli.discard_spool()


def test_spilled_lists_the_messages_of_segments_too(cli: CommandLine) -> None:
    """Each message of each block, with where it lies; what a segment held before it was filled again is not shown."""
    with qflow.open(cli.spool, capacity_bytes="64KiB", spill="segments", segment_bytes="8KiB") as broker:
        queue = broker.declare_queue("q", durable=False)
        for _ in range(2):
            first = queue.put_many([b"%d" % number * 100 for number in range(1000)]).start
            waiting = {
                entry.sequence: len(str(entry.sequence - first)) * 100 for entry in queue.browse() if entry.spilled
            }
            found = [json.loads(line) for line in cli.run("spilled", cli.spool, "--json").stdout.splitlines()]
            assert [entry for entry in found if entry["problem"]] == []
            listed = {entry["sequence"]: entry["size_bytes"] for entry in found}
            assert listed.items() >= waiting.items()
            assert len({(entry["file"], entry["position"]) for entry in found}) > 10
            while len(queue):
                queue.get_many(1000, timeout_s=0).ack()


def test_spilled_goes_on_behind_a_damaged_block(cli: CommandLine) -> None:
    """One block of a segment that does not match its checksum is one line; the messages of the others are listed."""
    with qflow.open(cli.spool, capacity_bytes="64KiB", spill="segments") as broker:
        queue = broker.declare_queue("q", durable=False)
        for _ in range(10):
            queue.put_many([b"x" * 100] * 500)
        (segment,) = (path for path in (cli.spool / "spill").rglob("*") if path.is_file())
        with open(segment, "r+b") as file:
            file.seek(800)
            file.write(b"damage")
        found = [json.loads(line) for line in cli.run("spilled", cli.spool, "--json").stdout.splitlines()]
        assert [bool(entry["problem"]) for entry in found[:2]] == [True, False]
        assert len(found) > 1000
        queue.purge()


def test_what_an_owner_would_not_write_tells_nothing(cli: CommandLine) -> None:
    """A `stats.json` of another shape, of whatever program, is none."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("q")
        until((cli.spool / "stats.json").exists)
    whole = json.loads((cli.spool / "stats.json").read_text())
    assert inspect.read_spool(cli.spool).live == whole
    wrong = [5, None, [1], "time_s", {"time_s": 1}, {"pid": 1}]
    wrong += [whole | one for one in ({"time_s": "x"}, {"time_s": []}, {"queues": 5}, {"queues": {"q": 5}})]
    for facts in wrong:
        (cli.spool / "stats.json").write_text(json.dumps(facts))
        found = inspect.read_spool(cli.spool)
        assert (found.live, found.live_age_s) == (None, None)
        assert list(inspect.spilled(cli.spool)) == []


def test_stats_show_what_the_owner_sees_of_queues_that_are_not_in_the_log(cli: CommandLine) -> None:
    """A spool with transient queues alone has a table, too."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("clicks", durable=False).put(b"x")
        shown = ""
        while "clicks" not in shown:
            shown = cli.run("stats", cli.spool).stdout.decode()
        assert "no durable queues" in shown


def test_stats_show_who_holds_and_who_waits_while_there_is_an_owner(cli: CommandLine) -> None:
    """Names are escaped; what an owner told that has gone is told no more, in text or in JSON."""
    with qflow.open(cli.spool) as broker:
        queue = broker.declare_queue("q", limit_messages=2)
        queue.put_many([b"x"] * 2)
        held = queue.get(consumer="mailer\x1b[31m")
        putter = threading.Thread(target=queue.put, args=(b"y",), daemon=True)
        putter.start()
        queue.pause()
        shown = ""
        while not all(words in shown for words in ("limit_messages", "q, paused", "mailer")):  # as of one moment
            shown = cli.run("stats", cli.spool).stdout.decode()
        row = next(line for line in shown.splitlines() if "mailer" in line)
        assert "'mailer\\x1b[31m'" in row
        assert str(os.getpid()) in row
        held.ack()
        putter.join()
    assert "mailer" not in cli.run("stats", cli.spool).stdout.decode()
    told = json.loads(cli.run("stats", cli.spool, "--json").stdout)
    assert (told["owner_pid"], told["live"], told["live_age_s"]) == (None, None, None)


def test_a_large_body_is_cut_and_that_is_said(cli: CommandLine) -> None:
    """A terminal is not filled for minutes: `--body` has all of it. No letter is cut in the middle."""
    with qflow.open(cli.spool) as broker:
        queue = broker.declare_queue("q")
        queue.put_many([("ä" * 2**20).encode() + b"end", b"\xff" * 2**20, b"short"], headers={"h": "x" * 10_000})
    for sequence, begins in ((0, "äää".encode()), (1, rb"b'\xff\xff")):
        shown = cli.run("show", cli.spool, "q", sequence).stdout
        head, _, body = shown.partition(b"\n\n")
        assert b"body      " in head
        assert len(head) < 2000
        assert body.startswith(begins)
        assert body.endswith(b"\n... cut: --body writes all of it\n")
        assert len(body) < 5 * 2**16
    assert cli.run("show", cli.spool, "q", 0, "--body").stdout.endswith(b"end")
    assert cli.run("show", cli.spool, "q", 2).stdout.endswith(b"\n\nshort\n")
