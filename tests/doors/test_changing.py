"""Verbs that delete, move or drop: what they would do, what they ask, and what they then do; completion of all."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import qflow
from doors.command_line import CommandLine, error_line
from layout import commands
from qflow.altering import dropped_by
from qflow.cli import asking, chosen
from qflow.cli.main import app
from qflow.config import QueueSettings
from unit.clocks import Clock, open_still


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """A queue whose messages die, their queue, a ring, and a stream that a group reads."""
    path = tmp_path / "spool"
    with qflow.open(path) as broker:
        jobs = broker.declare_queue("jobs", max_deliveries=1, dead_letter="dead")
        jobs.put_many([b"%d" % number for number in range(3)])
        for delivery in jobs.get_many(2):
            delivery.nack()
        broker.queue("dead").put(b"of nowhere")
        ring = broker.declare_queue("ring", on_overflow=qflow.Overflow.DROP_OLDEST)
        ring.put_many([b"%d" % number for number in range(5)])
        broker.declare_stream("plant", topics=["plant/#"])
        with broker.subscribe("plant", group="readers", start="earliest") as readers:
            for number in range(6):
                broker.publish("plant/a", b"%d" % number)
            readers.ack(readers.get_many(4), wait=True)
        broker.declare_stream("parts", topics=["parts/#"], partitions=2)
        broker.subscribe("parts", name="one").close()
    return path


def run(*words: object, stdin: str = "") -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words], input=stdin)


def depths(spool: Path) -> dict[str, int]:
    """Return how deep each queue is."""
    return {queue.name: queue.messages for queue in qflow.inspect.read_spool(spool).queues}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["purge", "ring"], ["would delete 5 messages, of which consumers hold 0"]),
        (["delete", "ring"], ["would delete the queue ring, with 5 messages"]),
        (["delete", "plant", "--stream"], ["would delete the stream plant, with 6 messages"]),
        (["delete", "ring", "--sequence", "1", "--sequence", "4"], ["would delete 2 messages of the queue ring"]),
        (["move", "ring", "jobs", "--limit", "2"], ["messages that would be moved from ring: 2", "  2 to jobs"]),
        (
            ["redrive", "dead"],
            [
                "messages that would be moved from dead: 2",
                "  2 to jobs",
                "messages kept: 1",
                "  1: no dead letter: nothing says where it came from",
                "another queue gets them by --to QUEUE",
            ],
        ),
        (
            ["alter", "ring", "limit_messages=2"],
            [
                "would set limit_messages of ring to 2; now none",
                "would drop its oldest 3 messages, down to 2, at once",
            ],
        ),
        (
            ["alter", "jobs", "limit_messages=1"],
            ["would set limit_messages of jobs to 1; now none", "would drop no message"],
        ),
    ],
)
def test_a_dry_run_says_what_would_happen_and_changes_nothing(spool: Path, words: list[str], said: list[str]) -> None:
    """Nobody needs to be asked for that."""
    before = depths(spool)
    done = run(words[0], spool, *words[1:], "--dry-run")
    assert (done.exit_code, done.stdout.splitlines()) == (0, said)
    assert depths(spool) == before
    assert qflow.inspect.read_spool(spool).streams[0].messages == 6


FORESEEN = [
    ["schedules"],
    ["purge", "ring", "--dry-run"],
    ["delete", "ring", "--dry-run"],
    ["delete", "ring", "--sequence", "1", "--dry-run"],
    ["delete", "plant", "--stream", "--dry-run"],
    ["alter", "ring", "limit_messages=2", "--dry-run"],
    ["alter", "plant", "retention_messages=2", "--stream", "--dry-run"],
]
"""What changes nothing."""


def test_what_changes_nothing_opens_no_spool(spool: Path) -> None:
    """One that an owner was killed over stays as it is: what it spilled, and that it was not closed."""
    left = spool.parent / "left"
    with qflow.open(spool, capacity_bytes=0) as broker:
        broker.declare_queue("passing", durable=False).put(b"spilled")
        broker.schedule("nightly", "jobs", b"report", every_s=60)
        shutil.copytree(spool, left, ignore=shutil.ignore_patterns("door"))
    before = {path: path.read_bytes() for path in left.rglob("*") if path.is_file() and path.name != "lock.mdb"}
    for words in FORESEEN:
        done = run(words[0], left, *words[1:])
        assert (done.exit_code, done.stderr) == (0, ""), words
        assert done.stdout == run(words[0], spool, *words[1:]).stdout
    assert {path: path.read_bytes() for path in left.rglob("*") if path.is_file() and path.name != "lock.mdb"} == before
    assert not qflow.inspect.read_spool(left).clean
    for words in (["purge", "jbos"], ["delete", "plan", "--stream"], ["alter", "rign", "limit_messages=2"]):
        done = run(words[0], left, *words[1:], "--dry-run")
        assert (done.exit_code, "did you mean" in done.stderr) == (2, True), done.stderr


def test_what_changes_nothing_needs_no_owner_that_lets_others_in(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log tells; and what consumers hold, if the owner wrote it, which is older."""
    with qflow.open(cli.spool, door=False) as broker:
        ring = broker.declare_queue("ring")
        broker.declare_queue("ended")
        mixed = broker.declare_queue("mixed")
        mixed.put(b"logged")
        for body in (b"1", b"2"):
            mixed.put(body, durable=False)
        held = mixed.get()
        broker.engine.figures.note_changed(broker.engine.queues.all())  # maintenance may have looked before
        broker.engine.figures.write()
        monkeypatch.setattr(broker.engine.figures, "write", lambda: None)
        ring.put_many([b"1", b"2", b"3"])
        broker.delete_queue("ended")
        broker.declare_stream("plant", topics=["plant/#"])
        for words in FORESEEN:
            done = cli.run(words[0], cli.spool, *words[1:])
            assert (done.returncode, done.stderr) == (0, b""), words
        assert cli.json("purge", cli.spool, "ring", "--dry-run")["would_purge"] == 3
        assert cli.json("purge", cli.spool, "mixed", "--dry-run") == {"queue": "mixed", "would_purge": 3, "held": 1}
        assert cli.run("purge", cli.spool, "ended", "--dry-run").returncode == 2
        held.ack()


def test_schedules_are_shown_as_their_owner_has_them_and_one_that_is_damaged_is_told(cli: CommandLine) -> None:
    """A dash is where there is no trouble."""
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("jobs")
        broker.schedule("nightly", "jobs", b"report", every_s=60)
        living = cli.run("schedules", cli.spool).stdout.decode().splitlines()
        assert [line.split()[-1] for line in living] == ["trouble", "-"]
        broker.engine.spool.log.keep_facts("periodic", {"broken": b"{}"})
    done = cli.run("schedules", cli.spool)
    assert done.stdout.decode().splitlines() == living
    assert (done.returncode, "the schedule 'broken' cannot be read" in error_line(done)) == (1, True)


def test_what_was_foreseen_of_a_redrive_happens(spool: Path) -> None:
    """The same queues, counts and reasons."""
    foreseen = json.loads(run("redrive", spool, "dead", "--dry-run", "--json").stdout)
    done = json.loads(run("redrive", spool, "dead", "--json").stdout)
    assert (foreseen["would_move"], foreseen["kept"]) == (done["moved"], done["kept"])


def test_what_was_foreseen_of_a_move_happens(spool: Path) -> None:
    """What is not due yet stays, and is told; what has expired is gone."""
    clock = Clock()
    with open_still(spool, clock) as broker:
        waiting = broker.declare_queue("waiting", priorities=2)
        waiting.put_many([b"%d" % number for number in range(3)], priority=1)
        waiting.put_many([b"later"] * 2000, delay_s=10 * 365 * 86_400)
        waiting.put(b"soon", delay_s=1)
        waiting.put(b"brief", ttl_s=1)
    foreseen = json.loads(run("move", spool, "waiting", "jobs", "--dry-run", "--json").stdout)
    assert (foreseen["would_move"], foreseen["kept"]) == ({"jobs": 4}, {"not due yet": 2000})
    done = json.loads(run("move", spool, "waiting", "jobs", "--json").stdout)
    assert (done["moved"], done["kept"]) == (foreseen["would_move"], foreseen["kept"])
    said = run("redrive", spool, "waiting").stdout.splitlines()
    assert said == ["messages moved from waiting: 0", "messages kept: 2,000", "  2,000: not due yet"]


@pytest.mark.parametrize(
    "words",
    [
        ["purge", "ring"],
        ["delete", "ring"],
        ["delete", "ring", "--sequence", "0", "--sequence", "1"],
        ["alter", "ring", "limit_messages=2"],
    ],
)
def test_what_loses_messages_needs_a_yes(spool: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal by option; at one, a no changes nothing."""
    refused = run(words[0], spool, *words[1:])
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    monkeypatch.setattr(asking, "is_there", lambda: True)
    assert run(words[0], spool, *words[1:], stdin="n\n").exit_code == 1
    assert depths(spool)["ring"] == 5
    assert run(words[0], spool, *words[1:], stdin="y\n").exit_code == 0
    with qflow.open(spool) as broker:
        if "ring" in broker.queues():
            broker.queue("ring").put(b"one more")
    assert depths(spool).get("ring", 0) < 5


def test_single_messages_are_deleted_and_the_others_named(spool: Path) -> None:
    """Once each, in any order; whoever is told of one that does not wait ends with 1."""
    done = run("delete", spool, "ring", "--sequence", 3, "--sequence", 1, "--sequence", 3, "--yes")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "messages deleted from ring: 2\n", "")
    for mode, said in (
        ("--dry-run", "would delete 1 message of the queue ring\n"),
        ("--yes", "messages deleted from ring: 1\n"),
    ):
        done = run("delete", spool, "ring", "--sequence", 3, "--sequence", 0, "--sequence", 99, mode)
        assert (done.exit_code, done.stdout) == (1, said)
        assert done.stderr == "not waiting in ring, and left alone: 3, 99\n"
    with qflow.open(spool) as broker:
        assert list(broker.queue("ring").get_many(9, 0).sequences) == [2, 4]
    for words in (
        ["plant", "--stream", "--sequence", "0"],
        ["ring", "--sequence", "-1"],
        ["nowhere", "--sequence", "1"],
    ):
        assert run("delete", spool, *words, "--yes").exit_code == 2


@pytest.mark.parametrize("words", [["move", "ring", "jobs"], ["redrive", "dead"]])
def test_what_loses_nothing_asks_only_where_somebody_is(
    spool: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script goes on as it did."""
    before = depths(spool)
    monkeypatch.setattr(asking, "is_there", lambda: True)
    assert run(words[0], spool, *words[1:], stdin="n\n").exit_code == 1
    assert depths(spool) == before
    assert run(words[0], spool, *words[1:], "--yes").exit_code == 0
    assert depths(spool) != before


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["peek", "plant"], "stream"),
        (["tail", "plant"], "stream"),
        (["show", "plant", "0"], "stream"),
        (["get", "plant"], "stream"),
        (["purge", "plant", "--yes"], "stream"),
        (["purge", "plant", "--dry-run"], "stream"),
        (["delete", "plant", "--yes"], "stream"),
        (["alter", "plant", "ttl_s=5"], "stream"),
        (["alter", "plant", "ttl_s=5", "--dry-run"], "stream"),
        (["redrive", "plant", "--dry-run"], "stream"),
        (["move", "ring", "plant"], "stream"),
        (["subscribe", "ring"], "queue"),
        (["delete", "ring", "--stream", "--yes"], "queue"),
        (["alter", "ring", "--stream", "retention_s=5", "--dry-run"], "queue"),
    ],
)
def test_a_name_of_another_kind_is_told_as_one(spool: Path, words: list[str], kind: str) -> None:
    """It is there, as `ls` shows: whoever reads that there is none looks for a slip of the pen."""
    done = run(words[0], spool, *words[1:])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"; it is a {kind}\n" in done.stderr


def test_a_delete_tells_programs_how_many_messages_are_gone(spool: Path) -> None:
    """Of single ones, of a queue and of a stream; of a dry run, how many would be."""
    for kind, words, count in (
        ("queue", ("ring", "--sequence", 3, "--sequence", 1), 2),
        ("queue", ("ring",), 3),
        ("stream", ("plant", "--stream"), 6),
    ):
        for key, sure in (("would_delete", "--dry-run"), ("deleted", "--yes")):
            done = run("delete", spool, *words, sure, "--json")
            left = {"left": 0} if "--sequence" in words and sure == "--yes" else {}
            assert (done.exit_code, json.loads(done.stdout)) == (0, {kind: words[0], key: count, **left})


def test_one_word_is_how_many_at_most_for_all(spool: Path) -> None:
    """`--limit`, which some commands name otherwise, too."""
    assert len(run("peek", spool, "ring", "--limit", 2, "--json").stdout.splitlines()) == 2
    assert len(run("grep", spool, ".", "ring", "--limit", 2).stdout.splitlines()) == 2
    assert len(CommandLine(spool.parent).run("get", spool, "ring", "--limit", 2).stdout.splitlines()) == 2
    assert depths(spool)["ring"] == 3


@pytest.mark.parametrize("stops", [True, False])
def test_a_delete_that_ends_in_the_middle_says_what_is_deleted(
    spool: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """By Ctrl-C, which or an error, which leave it open whether more are."""
    deleted, delete_many = [], qflow.Queue.delete_many

    def end(queue: qflow.Queue[Any], sequences: list[int]) -> list[int]:
        if deleted:
            raise KeyboardInterrupt if stops else qflow.DiskFull("the disk is full")
        deleted.append(sequences)
        return delete_many(queue, sequences)

    monkeypatch.setattr(chosen, "AT_ONCE", 2)
    monkeypatch.setattr(qflow.Queue, "delete_many", end)
    done = run("delete", spool, "ring", "--yes", *(f"--sequence={number}" for number in (0, 2, 3, 4)))
    doubt = "not known of up to 2 more: they were being deleted when this ended"
    assert done.stdout.splitlines() == ["messages deleted from ring: 2", doubt]
    assert (done.exit_code, depths(spool)["ring"]) == (130 if stops else 4, 3)


@pytest.mark.parametrize(("to", "now"), [("earliest", 0), ("latest", 6), ("2", 2), ("2020-01-01", 0)])
def test_a_group_goes_on_where_it_is_told(spool: Path, to: str, now: int) -> None:
    """At an end, an offset or a time; a dry run only says where that is."""
    words = ("streams", "reset", spool, "plant", "readers", "--to", to, "--dry-run")
    assert run(*words).stdout.endswith(f": at {now}; now at 4\n")
    told = {"stream": "plant", "group": "readers", "before": [4], "would_be": [now]}
    assert json.loads(run(*words, "--json").stdout) == told
    done = run("streams", "reset", spool, "plant", "readers", "--to", to, "--yes", "--json")
    assert json.loads(done.stdout) == {"stream": "plant", "group": "readers", "before": [4], "now": [now]}
    with qflow.open(spool) as broker, broker.subscribe("plant", group="readers", follow=False) as readers:
        assert [one.body for one in readers] == [b"%d" % number for number in range(now, 6)]


@pytest.mark.parametrize("is_owned", [True, False], ids=["beside an owner", "alone"])
def test_a_group_is_deleted_with_its_place(spool: Path, is_owned: bool) -> None:
    """Not by a dry run; another of its name begins anew; who has it open is told. One that is not there is named."""
    shell, words = CommandLine(spool.parent), ("streams", "unsubscribe", spool, "plant")
    told = {"stream": "plant", "group": "readers", "lag": 2}
    assert shell.json(*words, "readers", "--dry-run") == {**told, "would_delete": True}
    owner = qflow.open(spool) if is_owned else None
    readers = None if owner is None else owner.subscribe("plant", group="readers")
    assert shell.run(*words, "readers").returncode == 2
    assert shell.json(*words, "readers", "--yes") == {**told, "deleted": True}
    done = shell.run(*words, "readers", "--yes")
    assert (done.returncode, "no durable subscription 'readers'" in error_line(done)) == (2, True)
    if owner is not None and readers is not None:
        with pytest.raises(qflow.StreamDeleted):
            readers.get(0)
        owner.close()
    anew = {"group": "readers", "follow": False, "start": "earliest"}
    with qflow.open(spool) as broker, broker.subscribe("plant", **anew) as readers:
        assert (readers.lag, len(list(readers))) == (6, 6)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["plant", "reader", "--to", "0"], "'readers'"),
        (["plan", "readers", "--to", "0"], "'plant'"),
        (["plant", "readers", "--to", "7"], "past the end"),
        (["plant", "readers", "--to", "soon"], "earliest, latest"),
        (["parts", "one", "--to", "0"], "give --partition"),
        (["parts", "one", "--to", "0", "--partition", "2"], "partitions 0 to 1"),
    ],
)
def test_a_place_that_is_none_is_bad_usage(spool: Path, words: list[str], sentence: str) -> None:
    """The sentence names what there is; a dry run has the same."""
    for sure in ("--yes", "--dry-run"):
        done = run("streams", "reset", spool, *words, sure)
        assert (done.exit_code, done.stdout) == (2, "")
        assert sentence in done.stderr


def test_a_subscription_of_one_that_is_open_is_not_said_to_be_moved(spool: Path) -> None:
    """A dry run asks the owner; where somebody else has it open, it ends as the command does."""
    shell, words = CommandLine(spool.parent), ("streams", "reset", spool, "parts", "one", "--to", "earliest")
    with qflow.open(spool) as broker:
        assert shell.run(*words, "--dry-run").stdout == b"would move one to earliest: at 0, 0; now at 0, 0\n"
        with broker.subscribe("parts", name="one"):
            for sure in ("--yes", "--dry-run"):
                done = shell.run(*words, sure)
                assert (done.returncode, "is open already" in error_line(done)) == (2, True)


def test_the_end_is_that_of_the_moment_at_which_somebody_says_yes(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is published while it asks is behind it."""

    def publish(*_: object) -> None:
        with qflow.open(spool) as broker:
            broker.publish("plant/a", b"meanwhile")

    monkeypatch.setattr(asking, "make_sure", publish)
    done = run("streams", "reset", spool, "plant", "readers", "--to", "latest", "--json")
    assert json.loads(done.stdout)["now"] == [7]


def test_facts_of_what_would_be_altered_are_for_programs_too(spool: Path) -> None:
    """What it is, and would be; what that drops is a text, as it is for people."""
    done = run("alter", spool, "ring", "limit_messages=2", "ttl_s=60", "--dry-run", "--json")
    assert json.loads(done.stdout) == {
        "queue": "ring",
        "before": {"limit_messages": None, "ttl_s": None},
        "would_be": {"limit_messages": 2, "ttl_s": 60},
        "would_drop": "its oldest 3 messages, down to 2",
    }
    done = run("alter", spool, "plant", "retention_messages=90", "--stream", "--dry-run", "--json")
    assert json.loads(done.stdout) == {
        "stream": "plant",
        "before": {"retention_messages": None},
        "would_be": {"retention_messages": 90},
        "would_drop": "what is beyond that",
    }
    done = run("alter", spool, "ring", "on_overflow=reject", "--dry-run", "--json")
    assert json.loads(done.stdout) == {
        "queue": "ring",
        "before": {"on_overflow": "drop_oldest"},
        "would_be": {"on_overflow": "reject"},
        "would_drop": None,
    }


@pytest.mark.parametrize(
    ("changes", "dropped"),
    [
        ({"ttl_s": 60}, None),
        ({"limit_messages": 8}, None),
        ({"limit_messages": 5, "limit_bytes": 500}, None),
        ({"limit_messages": 4}, "its oldest 5 messages, down to 4"),
        ({"limit_bytes": "400B"}, "its oldest messages, down from 900 bytes to 400"),
        ({"on_overflow": "block", "limit_messages": 4}, None),
    ],
)
def test_what_a_ring_drops_whatever_is_altered_is_not_dropped_by_that(
    changes: dict[str, Any], dropped: str | None
) -> None:
    """As while it still comes down to the limit it was given last, or where consumers hold more than that."""
    settings = QueueSettings(on_overflow=qflow.Overflow.DROP_OLDEST, limit_messages=5, limit_bytes=500)
    assert dropped_by(settings, changes, messages=9, size_bytes=900) == dropped


def test_streams_are_listed_without_naming_the_command(spool: Path) -> None:
    """As they were before there was another one."""
    assert run("streams", spool).stdout == run("streams", "list", spool).stdout
    assert "readers" in run("streams", spool).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_completion_for_each_shell(shell: str) -> None:
    """It is a script that the shell takes, if the machine has that shell."""
    done = run("completion", shell)
    assert done.exit_code == 0
    assert "_QFLOW_COMPLETE" in done.stdout
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n", "-c", done.stdout], check=True)


@pytest.mark.parametrize(
    ("line", "last", "offered"),
    [
        ("qflow pu", 1, {"put", "purge", "publish"}),
        ("qflow peek {spool} r", 3, {"ring"}),
        ("qflow purge --dr", 2, {"--dry-run"}),
        ("qflow streams re", 2, {"reset"}),
        ("qflow peek nowhere r", 3, set()),
        ("qflow redrive {spool} d", 3, {"dead"}),
        ("qflow move {spool} ring j", 4, {"jobs"}),
        ("qflow delete {spool} r", 3, {"ring"}),
        ("qflow delete --stream {spool} pl", 4, {"plant"}),
        ("qflow spilled {spool} r", 3, {"ring"}),
        ("qflow subscribe {spool} pl", 3, {"plant"}),
        ("qflow streams reset {spool} pl", 4, {"plant"}),
        ("qflow export {spool} r", 3, {"ring"}),
        ("qflow export {spool} pl", 3, {"plant"}),
        ("qflow grep {spool} text pl", 4, {"plant"}),
    ],
)
def test_commands_options_and_queues_are_completed(spool: Path, line: str, last: int, offered: set[str]) -> None:
    """A spool that cannot be read offers nothing."""
    variables = {
        "_QFLOW_COMPLETE": "bash_complete",
        "COMP_WORDS": line.format(spool=spool),
        "COMP_CWORD": str(last),
    }
    done = CliRunner().invoke(app, prog_name="qflow", env=variables)
    assert {word.partition(",")[2] for word in done.stdout.split()} == offered


def test_every_help_has_examples_and_they_are_commands_that_are_there() -> None:
    """Each part of a pipe that begins with `qflow` is parsed as a shell and the command would."""
    import shlex

    there = commands()
    for named, command in there.items():
        parts = [part.strip() for line in (command.help or "").splitlines() for part in line.split(" | ")]
        examples = [part for part in parts if part.startswith("qflow ")]
        assert examples or isinstance(command, click.Group), f"{named} has no example"
        for line in examples:
            words = shlex.split(line.partition("  #")[0].partition(" > ")[0])
            name = " ".join(words[:2])
            assert name in there, line
            rest = words[2:]
            found = there[name]
            if f"{name} {rest[0] if rest else ''}" in there:
                found, rest = there[f"{name} {rest[0]}"], rest[1:]
            elif f"{name} list" in there:
                found = there[f"{name} list"]
            options = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
            for word in rest[: rest.index("--")] if "--" in rest else rest:
                if word.startswith("--"):
                    assert word.partition("=")[0] in {*options, "--help"}, line


@pytest.mark.parametrize("change", ["name=x", "self=1", "colour=red"])
@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_setting_that_there_is_none_of_is_refused(spool: Path, change: str, options: list[str]) -> None:
    """Also where a parameter of the method has its name; those there are are named."""
    done = CliRunner().invoke(app, ["alter", str(spool), "jobs", change, *options])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.exception
    assert f"no setting {change.partition('=')[0]!r}; there are ack_timeout_s, " in done.stderr


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_what_is_done_at_a_limit_is_named_as_it_is_typed(spool: Path, options: list[str]) -> None:
    """And not as programs name it."""
    done = run("alter", spool, "jobs", "on_overflow=Reject", *options)
    assert done.exit_code == 2
    assert "on_overflow is one of block, reject, drop_oldest, drop_newest, dead_letter, not 'Reject'" in done.stderr
    assert run("alter", spool, "jobs", "on_overflow=reject", *options).exit_code == 0


@pytest.mark.parametrize("live", [False, True], ids=["dead", "live"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("a dead_letter=a", "in a cycle: 'a' -> 'a'"),
        ("c dead_letter=a", "in a cycle: 'c' -> 'a' -> 'b' -> 'c'"),
        ("a dead_letter=", "this one takes 0"),
        ("a dead_letter=nobody", None),
        ("c on_overflow=dead_letter", "needs dead_letter"),
        ("a limit_messages=-1", "at least 1, got -1"),
        ("a durable=false", "cannot be changed"),
        ("plant topics= --stream", "'' takes 0"),
        ("plant topics=a//#b --stream", "wildcard"),
        ("plant partitions=3 --stream", "cannot be changed"),
        ("plant retention_s=-1 --stream", "retention_s must be"),
    ],
)
def test_a_dry_run_refuses_what_would_be_refused(tmp_path: Path, change: str, sentence: str | None, live: bool) -> None:
    """In the same words."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("a", dead_letter="b")
        broker.declare_queue("b", dead_letter="c")
        broker.declare_queue("c")
        broker.declare_stream("plant", topics=["plant/#"])
        if not live:
            broker.close()
        foreseen, done = (
            run("alter", tmp_path / "spool", *change.split(), option) for option in ("--dry-run", "--yes")
        )
    assert (foreseen.exit_code, foreseen.stderr) == (done.exit_code, done.stderr)
    assert (done.exit_code == 0) if sentence is None else (sentence in done.stderr)


def test_a_dry_run_knows_what_the_log_does_not(tmp_path: Path) -> None:
    """A queue that is not durable, which its owner tells of."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("a")
        broker.declare_queue("transient", durable=False)
        done = run("alter", tmp_path / "spool", "a", "dead_letter=transient", "--dry-run")
    assert (done.exit_code, "is durable and its dead-letter queue 'transient' is not" in done.stderr) == (2, True)


@pytest.mark.parametrize("live", [False, True], ids=["dead", "live"])
def test_settings_of_a_stream_are_changed(tmp_path: Path, live: bool) -> None:
    """What is to keep less is asked about first, for it drops messages at once; the rest is not."""
    path = tmp_path / "plants"

    def alter(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["alter", str(path), *arguments, "--stream"])

    with qflow.open(path) as broker:
        broker.declare_stream("plant", topics=["plant/#"])
        broker.publish_many([("plant/1", b"%d" % number) for number in range(10)])
        if not live:
            broker.close()
        done = alter("plant", "topics=plant/#,works/#", "retain_until_consumed=true", "retention_s=7d", "--yes")
        assert done.exit_code == 0, done.output
        assert "plant/#,works/#" in done.output
        foreseen = alter("plant", "retention_messages=3", "--dry-run")
        assert (
            "would set retention_messages of plant to 3; now none\nwould drop what is beyond that\n" in foreseen.output
        )
        assert alter("plant", "retention_messages=3").exit_code == 2
        changed = alter("plant", "retention_messages=3", "retain_until_consumed=false", "--yes", "--json")
        settings = json.loads(changed.output)["settings"]
        assert (settings["retention_messages"], settings["retain_until_consumed"]) == (3, False)
        assert (settings["topics"], settings["retention_s"]) == (["plant/#", "works/#"], 7 * 86_400)
        assert alter("plant", "retention_messages=none", "retention_s=none").exit_code == 0
        for arguments, text in (
            (("plant", "limit_messages=3"), "a stream has no setting 'limit_messages'; there are max_message_bytes, "),
            (("plant", "partitions=2", "--yes"), "partitions"),
            (("plan", "retention_s=7d", "--yes"), "there is no stream 'plan'"),
        ):
            done = alter(*arguments)
            assert (done.exit_code, text in done.stderr) == (2, True), done.stderr
