"""A log that is damaged, as the command line meets it: an exit code, a line that counts, and all that can be had."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

import qflow
from doors.command_line import CommandLine, error_line
from qflow.storage.log.keys import BLOCKS, key_of

BODY = b"%05d" + b"x" * 5000
MESSAGES = 240  # of 5 KB: 13 make a block


def written(spool: Path, *, stream: bool = False) -> None:
    """Make a spool whose first number, 1, is that of a queue or a stream with 240 messages in blocks of 13."""
    bodies = [BODY % number for number in range(MESSAGES)]
    with qflow.open(spool, capacity_bytes="8MiB") as broker:
        if stream:
            broker.declare_stream("s", topics=["#"])
            broker.publish_many([("t", body) for body in bodies])
            return
        broker.declare_queue("q").put_many(bodies)
        broker.declare_queue("other").put(b"fine")


def edit(spool: Path, change: Callable[[Any, list[bytes]], None], owner: int = 1) -> None:
    """Change a closed log with plain LMDB; `change` gets a transaction, and the keys of the blocks of an owner."""
    env = lmdb.open(str(spool / "log"), map_size=2**30, lib_version=0)
    with env.begin(write=True) as txn:
        prefix = key_of(BLOCKS, owner, 0, 0)[:-8]
        change(txn, [key for key, _ in txn.cursor() if key.startswith(prefix) and not key.endswith(b"\xff" * 8)])
    env.close()


def damage(spool: Path, *indices: int) -> None:
    """Flip a bit in some blocks of the first queue or stream."""

    def change(txn: Any, keys: list[bytes]) -> None:
        for index in indices:
            value = bytearray(txn.get(keys[index]))
            value[5000] ^= 0x10
            txn.put(keys[index], bytes(value))

    edit(spool, change)


def swap(spool: Path) -> None:
    """Put a block where another one belongs."""
    edit(spool, lambda txn, keys: txn.put(keys[3], txn.get(keys[5])))


@pytest.fixture
def shell(tmp_path: Path) -> CommandLine:
    """The command line on a spool that stays damaged."""
    return CommandLine(tmp_path)


def test_get_of_a_damaged_spool_counts_what_is_lost_and_exits_with_1(shell: CommandLine) -> None:
    """It delivers what is good. One line, whatever the number of blocks; what is gone is gone only once."""
    written(shell.spool)
    damage(shell.spool, 0, 1, 3, 5, 7, 9, 18)
    done = shell.run("get", shell.spool, "q")
    lost = {*range(26), *(first + place for first in (39, 65, 91, 117) for place in range(13)), *range(234, 240)}
    assert done.stdout.splitlines() == [BODY % number for number in range(MESSAGES) if number not in lost]
    assert done.returncode == 1
    said = error_line(done)
    assert (
        f"{len(lost)} messages of queue q are lost, of sequences 0 to 25, 39 to 51, 65 to 77 and 3 more ranges" in said
    )
    assert shell.run("get", shell.spool, "q").returncode == 0
    done = shell.run("check", shell.spool)
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 2)
    assert b"damaged block 0 and 6 more, the last one 234, were set aside" in done.stdout


def test_check_snapshot_and_compact_of_a_damaged_spool_exit_with_1(shell: CommandLine) -> None:
    """Each counts what cannot be read, in one line, and does its work; blocks in a row are one problem."""
    written(shell.spool)
    damage(shell.spool, 2, 3, 4, 9)
    done = shell.run("check", shell.spool)
    assert done.returncode == 1
    assert done.stdout.decode().splitlines() == [
        "queue 'q': blocks 26 to 52, 3 of them: the block does not match its checksum",
        "queue 'q': block 117: the block does not match its checksum",
        "queue 'q': the row says 240 messages of 1201200 bytes, the blocks hold 188 of 940940",
        "3 problems found",
        "messages that cannot be read: 52 of queue 'q'",
    ]
    for command in (
        ("snapshot", "create", shell.spool, "taken"),
        ("snapshot", "load", "taken", "back"),
        ("compact", "taken"),
    ):
        done = shell.run(*command)
        assert (done.returncode, len(done.stdout.splitlines())) == (1, 1)
        assert "messages that cannot be read: 52 of queue 'q'; `qflow check " in error_line(done)
    done = shell.run("snapshot", "create", shell.spool, "again", "--json")
    facts = json.loads(done.stdout)
    assert (done.returncode, facts["messages"], facts["lost"], len(facts["problems"])) == (1, 241, {"queue 'q'": 52}, 3)
    for spool in ("taken", "back"):
        done = shell.run("get", spool, "q", "--max", 200)
        assert (done.returncode, len(done.stdout.splitlines())) == (1, 188)


def test_what_a_dry_run_cannot_read_it_does_not_leave_out_without_a_word(shell: CommandLine) -> None:
    """What would be moved then is not all that is there; the command itself ends with 1, too."""
    written(shell.spool)
    damage(shell.spool, 2)
    for words in (("redrive", shell.spool, "q", "--to", "other"), ("move", shell.spool, "q", "other")):
        done = shell.run(*words, "--dry-run", "--json")
        assert (done.returncode, json.loads(done.stdout)["would_move"]) == (1, {"other": MESSAGES - 13})
        assert "block 26: the block does not match its checksum; `qflow check " in error_line(done)
    assert shell.run(*words).returncode == 1


def test_commands_that_come_upon_damage_on_their_way(shell: CommandLine) -> None:
    """`pipe` exits with 1 unless its command failed; what is asked for and is all there leaves 0, whatever else is."""
    written(shell.spool)
    damage(shell.spool, 0)
    done = shell.run("put", shell.spool, "q", stdin=b"more\n")
    assert (done.returncode, done.stderr) == (0, b"")
    done = shell.run("get", shell.spool, "other")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"fine\n", b"")
    done = shell.run("pipe", shell.spool, "q", "--", "sh", "-c", "exit 7")
    assert done.returncode == 5
    assert b"13 messages of queue q are lost, of sequences 0 to 12" in done.stderr
    damage(shell.spool, 5)
    done = shell.run("pipe", shell.spool, "q", "--", "cat")
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 241 - 26)
    assert b"messages of queue q are lost, of sequences " in done.stderr


def test_a_queue_that_cannot_be_served_is_told_of_by_commands_for_others(shell: CommandLine) -> None:
    """Not by their exit code: what they were to do is done. `stats` is asked about all, and exits with 1."""
    written(shell.spool)

    def change(txn: Any, _: list[bytes]) -> None:
        key = key_of(BLOCKS, 1, 0, 2**64 - 1)
        txn.put(key, txn.get(key)[:-1] + b"?")

    edit(shell.spool, change)
    done = shell.run("put", shell.spool, "other", stdin=b"more\n")
    assert (done.returncode, done.stdout) == (0, b"lines confirmed in other: 1 (4 bytes)\n")
    assert "queue 'q' cannot be served" in error_line(done)
    assert shell.run("get", shell.spool, "q").returncode == 1
    assert shell.run("stats", shell.spool).returncode == 1


def test_redrive_of_damaged_dead_letters_exits_with_1(shell: CommandLine) -> None:
    """Those that can be read are moved."""
    with qflow.open(shell.spool) as broker:
        broker.declare_queue("dead").put_many([BODY % number for number in range(MESSAGES)])
        broker.declare_queue("q")
    damage(shell.spool, 1)
    done = shell.run("redrive", shell.spool, "dead", "--to", "q", "--json")
    assert (done.returncode, json.loads(done.stdout)["moved"]) == (1, {"q": MESSAGES - 13})
    assert "13 messages of queue dead are lost, of sequences 13 to 25" in error_line(done)


def test_subscribe_to_a_damaged_stream_tells_in_one_line(shell: CommandLine) -> None:
    """All of a partition together, neighbours as one range; `check` names blocks in a row once."""
    written(shell.spool, stream=True)
    damage(shell.spool, 1, 2, 4, 6, 8, 10)
    done = shell.run("subscribe", shell.spool, "s")
    lost = {*range(13, 39), *range(52, 65), *range(78, 91), *range(104, 117), *range(130, 143)}
    assert done.stdout.splitlines() == [BODY % number for number in range(MESSAGES) if number not in lost]
    assert done.returncode == 1
    said = error_line(done)
    assert (
        "78 messages of all topics are gone, offsets 13 to 38, 52 to 64, 78 to 90 and 2 more ranges: block 13" in said
    )
    done = shell.run("check", shell.spool)
    assert b"stream 's', partition 0: offsets 13 to 38, 2 blocks: the block does not match" in done.stdout
    assert done.stdout.endswith(b"messages that cannot be read: 78 of stream 's'\n")


@pytest.mark.parametrize("stream", [False, True])
def test_no_command_shows_what_only_the_code_understands(shell: CommandLine, stream: bool) -> None:
    """A block under the key of another one is named in words."""
    written(shell.spool, stream=stream)
    swap(shell.spool)
    commands: list[tuple[object, ...]] = [("check",), ("stats",)]
    commands += [("subscribe", "s")] if stream else [("show", "q", 40), ("get", "q")]
    said = b""
    for name, *arguments in commands:
        done = shell.run(name, shell.spool, *arguments)
        said += done.stderr + b"".join(line for line in done.stdout.splitlines() if not line.endswith(b"xxx"))
    assert b"what lies there is block 65 of number 1" in said
    for internal in (b"BlockKey", b"Row(", b"namedtuple", b"object at 0x", b"18446744073709551615"):
        assert internal not in said


def test_the_statistics_of_a_queue_say_where_messages_were_lost(
    open_spool: Callable[..., qflow.Broker], spool: Path
) -> None:
    """In the log, and in spill files of messages that are in no log."""
    written(spool)
    damage(spool, 1, 2, 7)
    broker = open_spool(capacity_bytes="1MiB")
    queue = broker.queue("q")
    while batch := queue.get_many(50, timeout_s=0):
        batch.ack()
    stats = queue.stats()
    assert (stats.quarantined_total, stats.lost_ranges) == (39, ((13, 38), (91, 103)))
    assert any("blocks 13 to 26, 2 of them" in problem for problem in broker.recovery.problems)
    assert broker.recovery.quarantined_blocks == 3
    transient = broker.declare_queue("transient", durable=False, capacity_bytes=0)
    transient.put_many([b"x"] * 5)
    for file in [path for path in (spool / "spill").rglob("*") if path.is_file()][1:3]:
        file.write_bytes(b"damaged")
    while batch := transient.get_many(1, timeout_s=0):
        batch.ack()
    stats = transient.stats()
    assert stats.lost_total == sum(last - first + 1 for first, last in stats.lost_ranges) == 2
