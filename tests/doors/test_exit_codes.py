"""One set of exit codes: what is no spool is 2 to every command, and damage is never a traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner, Result

import qflow
import refused
import top_seen
from layout import commands
from qflow.cli.exits import Exit
from qflow.cli.main import app, main

SPOOL = {"spool", "a"}
"""How the argument is called; the other spool of `diff` is `b`."""
WITH_SPOOL = {
    words: command
    for words, command in commands().items()
    if any(one.name in SPOOL for one in command.params) and words != "qflow demo"
}
"""All but the demo, which makes what it needs first."""
STAY = {"qflow serve", "qflow top", "qflow work", "qflow pipe", "qflow metrics"}
"""Commands that go on until they are ended, or take over the terminal."""
GIVEN = {
    "changes": ["limit_messages=1"],
    "sequence": ["0"],
    "destination": ["copy"],
    "source": ["copy"],
    "to": ["other"],
    "pattern": ["one"],
    "function": ["module:function"],
    "b": ["second"],
}
"""What stands for arguments that take no name; all others are called `q`."""
NEEDED = {"qflow streams reset": ["--to", "0"], "qflow serve": ["--amqp"], "qflow publish": ["t/a", "body"]}
SPARK = {"qflow pipeline run", "qflow pipeline report"}
"""They start a Spark; see tests/spark."""
WELL = (Exit.FINE, Exit.FINE)
ROWS = {
    "qflow doctor": (Exit.FINE, Exit.DIFFERS),  # nobody consumes what was put just now
    "qflow sessions delete": (Exit.USAGE, Exit.USAGE),  # no client of MQTT was here
    "qflow snapshot load": (Exit.USAGE, Exit.USAGE),  # something is there already
}
"""How commands end on a spool that nobody owns, and on one that another process owns; those that are not here: well."""


def arguments_of(words: str, spool: Path) -> list[str]:
    """Return a command on a spool, with whatever else it must be given."""
    arguments: list[str] = []
    for parameter in WITH_SPOOL[words].params:
        if not isinstance(parameter, click.Argument):
            continue
        if parameter.name in SPOOL:
            arguments.append(str(spool))
        elif parameter.required:
            arguments += GIVEN.get(str(parameter.name), ["q"])
    given = [*words.split()[1:], *arguments, *NEEDED.get(words, [])]
    if any("--yes" in parameter.opts for parameter in WITH_SPOOL[words].params):
        given.append("--yes")
    return given


def run(words: str, spool: Path) -> Result:
    """Run a command on a spool, in this process."""
    return CliRunner().invoke(app, arguments_of(words, spool), input="")


def sentence(done: Result) -> str:
    """Return what it said on stderr; it ended by an exit code, and by no error of its own."""
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("words", WITH_SPOOL)
def test_what_is_no_spool_is_bad_usage(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, a directory of others, and where nothing is; what is there stays as it is."""
    monkeypatch.chdir(tmp_path)
    file, others, missing = tmp_path / "file", tmp_path / "others", tmp_path / "missing"
    file.write_text("precious")
    others.mkdir()
    (others / "thesis.txt").write_text("precious")
    makes = any(one.name in SPOOL and not getattr(one.type, "exists", True) for one in WITH_SPOOL[words].params)
    for place in (file, others, *([] if makes else [missing])):
        done = run(words, place)
        assert (done.exit_code, bool(sentence(done))) == (Exit.USAGE, True), (place, done.output)
    assert (file.read_text(), [one.name for one in others.iterdir()]) == ("precious", ["thesis.txt"])
    assert not missing.exists()


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spool whose log is no log any more."""
    path = tmp_path_factory.mktemp("damaged") / "spool"
    with qflow.open(path) as broker:
        broker.declare_queue("q").put(b"one")
    log = path / "log" / "data.mdb"
    log.write_bytes(b"no log" * 1000)
    return path


@pytest.mark.parametrize("words", [words for words in WITH_SPOOL if words not in STAY])
def test_a_damaged_log_ends_with_1(words: str, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it is bad usage for another reason; `doctor` calls it urgent. It is a sentence in any case."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(damaged, tmp_path / "spool")
    done = run(words, tmp_path / "spool")
    said = sentence(done) + done.stdout
    assert done.exit_code in (Exit.DIFFERS, Exit.USAGE, Exit.URGENT), done.output
    assert said


FILL = """
for name in broker.queues():
    broker.delete_queue(name)
for name in broker.streams():
    broker.delete_stream(name)
queue = broker.declare_queue('q')
queue.put_many([b'one', b'two'])
broker.declare_queue('other')
broker.declare_stream('q', topics=['t/#'])
broker.subscribe('q', group='q').close()
"""
"""What all commands find, whatever the one before has left."""
NOT_STAYING = [words for words in WITH_SPOOL if words not in STAY | SPARK]


def fill(broker: qflow.Broker) -> None:
    exec(FILL, {"broker": broker})


def put_there(words: str, dead: Path) -> None:
    """Make what a command needs besides, in the directory of the test."""
    if words == "qflow snapshot load":
        Path("copy").mkdir()
    if words == "qflow diff":
        shutil.copytree(dead, "second")


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has room, whatever that of this machine has."""
    usage = SimpleNamespace(total=2**40, free=2**39)
    monkeypatch.setattr("qflow.doctor.looking.shutil.disk_usage", lambda path: usage)


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spool that nobody owns."""
    path = tmp_path_factory.mktemp("dead") / "spool"
    with qflow.open(path) as broker:
        fill(broker)
    return path


@pytest.mark.parametrize("words", NOT_STAYING)
def test_a_spool_that_nobody_owns(words: str, dead: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command does on it what it is for; the next owner finds it sound."""
    monkeypatch.chdir(tmp_path)
    spool = tmp_path / "spool"
    shutil.copytree(dead, spool)
    put_there(words, dead)
    done = run(words, spool)
    assert done.exit_code == ROWS.get(words, WELL)[0], (done.output, sentence(done))
    assert bool(sentence(done)) == (done.exit_code != Exit.FINE), done.stderr
    with qflow.open(spool) as broker:
        assert broker.check() == []


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A spool that another process owns."""
    path = tmp_path_factory.mktemp("live") / "spool"
    with top_seen.owned(path, ""):
        yield path


@pytest.mark.parametrize("words", NOT_STAYING)
def test_a_spool_that_is_owned(
    words: str, live: Path, dead: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its owner all the same, but for what needs a spool for itself; and the owner goes on."""
    monkeypatch.chdir(tmp_path)
    put_there(words, dead)
    with qflow.connect(live) as broker:
        fill(broker)
        done = run(words, live)
        assert done.exit_code == ROWS.get(words, WELL)[1], (done.output, sentence(done))
        assert bool(sentence(done)) == (done.exit_code not in (Exit.FINE, Exit.DIFFERS)), done.stderr
        assert broker.check() == []


@pytest.mark.parametrize("place", [".", "log/data.mdb"])
def test_a_spool_that_one_may_not_read(place: str, dead: Path, tmp_path: Path) -> None:
    """Every command says whose move it is; none takes it for no spool, or for a damaged one."""
    spool = tmp_path / "spool"
    shutil.copytree(dead, spool)
    asked = [words for words in WITH_SPOOL if words not in SPARK | {"qflow snapshot load", "qflow work", "qflow top"}]
    shutil.copytree(dead, tmp_path / "second")
    (spool / place).chmod(0)
    try:
        done = subprocess.run(
            [sys.executable, refused.__file__],
            input=json.dumps([arguments_of(words, spool) for words in asked]),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=True,
        )
    finally:
        (spool / place).chmod(0o700)
    wrong = {
        words: answer
        for words, answer in zip(asked, json.loads(done.stdout), strict=True)
        if answer[0] != Exit.USAGE or "Permission denied; give this user" not in answer[1]
    }
    assert wrong == {}
    with qflow.open(spool) as broker:
        assert broker.check() == []


def test_a_spool_that_one_may_read_and_not_write_says_what_reading_takes(dead: Path, tmp_path: Path) -> None:
    """Write access to one file, and to nothing else; a command that gets it reads as any other."""
    spool = tmp_path / "spool"
    shutil.copytree(dead, spool)
    there = [spool, *spool.rglob("*")]
    looking = [["ls"], ["stats"], ["check"], ["doctor"], ["peek", "q"], ["schedules"], ["purge", "q", "--dry-run"]]
    for one in there:
        one.chmod(0o555 if one.is_dir() else 0o444)

    def answers() -> list[tuple[int, str]]:
        done = subprocess.run(
            [sys.executable, refused.__file__],
            input=json.dumps([[command, str(spool), *more] for command, *more in looking]),
            capture_output=True,
            text=True,
            check=True,
        )
        return [tuple(one) for one in json.loads(done.stdout)]

    try:
        for code, said in answers():
            assert (code, "lock.mdb: that must be writable, or the spool be on a read-only mount" in said) == (2, True)
        (spool / "log" / "lock.mdb").chmod(0o644)
        assert {said for _code, said in answers()} == {""}
    finally:
        for one in there:
            one.chmod(0o755 if one.is_dir() else 0o644)


@pytest.mark.parametrize(
    "step",
    [
        "signal.signal",
        "qflow.cli.main.occupy_standard",
        "click.Command.make_context",
        "click.Group.parse_args",
        "click.Context.invoke",
        "click.Context.exit",
        "click.Context.close",
        "click.Parameter.process_value",
    ],
)
def test_ctrl_c_at_any_moment_of_a_start_ends_with_130(
    step: str, dead: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while click works, before the command begins and after it: click would say "Aborted!", and 1."""

    def struck(*_given: Any, **_named: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["qflow", "ls", str(dead)])
    monkeypatch.setattr(step, struck)
    with pytest.raises(SystemExit) as ended:
        main(hears_interrupts=step == "signal.signal")
    monkeypatch.undo()
    assert ended.value.code == 130
    assert capsys.readouterr().err.strip() == ""


@pytest.mark.parametrize(
    "words",
    [
        "purge SPOOL q",
        "delete SPOOL q",
        "delete SPOOL q --sequence 0",
        "delete SPOOL s --stream",
        "alter SPOOL q limit_messages=1",
        "alter SPOOL s --stream retention_messages=1",
    ],
)
def test_nobody_is_kept_out_while_somebody_thinks_about_a_question(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is asked may take an hour: the spool is not owned meanwhile."""
    spool = tmp_path / "spool"
    with qflow.open(spool) as broker:
        broker.declare_queue("q", limit_messages=9, on_overflow="drop_oldest").put_many([b"x"] * 3)
        broker.declare_stream("s", topics=["t"], retention_messages=9)
    asked: list[str] = []

    def answer(prompt: str) -> str:
        with qflow.open(spool) as other:
            other.queue("q").put(b"from others")
        asked.append(prompt)
        return "y"

    monkeypatch.setattr("qflow.cli.asking.is_there", lambda: True)
    monkeypatch.setattr("click.termui.visible_prompt_func", answer)
    monkeypatch.setattr(sys, "argv", ["qflow", *words.replace("SPOOL", str(spool)).split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, len(asked)) == (0, 1)


@pytest.mark.parametrize(("struck", "code"), [(KeyboardInterrupt, 130), (EOFError, 1)])
def test_ctrl_c_at_a_question_is_no_answer(
    struck: type[BaseException],
    code: int,
    dead: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ends the command with 130; the end of the input is a no."""

    def answer(_prompt: str) -> NoReturn:
        raise struck

    monkeypatch.setattr("qflow.cli.asking.is_there", lambda: True)
    monkeypatch.setattr("click.termui.visible_prompt_func", answer)
    monkeypatch.setattr(sys, "argv", ["qflow", "purge", str(dead), "q"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert ("Aborted!" in capsys.readouterr().err) == (code == 1)


def test_sigterm_ends_the_first_process_of_a_container_before_a_command_hears_it() -> None:
    """Where Linux has it do nothing else; the exit code is that of a shell."""
    code = (
        "import os, signal, sys, types\n"
        "number, os.getpid = os.getpid(), lambda: 1\n"
        "command = sys.modules['qflow.cli.main'] = types.ModuleType('qflow.cli.main')\n"
        "command.main = lambda **_: os.kill(number, signal.SIGTERM)\n"
        "from qflow.__main__ import main\n"
        "main()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 143
