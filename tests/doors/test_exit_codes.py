"""One set of exit codes: what is no spool is 2 to every command, and damage is never a traceback."""

from __future__ import annotations

import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import qflow
from layout import commands
from qflow.cli.exits import Exit
from qflow.cli.main import app

WITH_SPOOL = {
    words: command
    for words, command in commands().items()
    if any(one.name == "spool" for one in command.params) and words != "qflow demo"
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
    "other": ["other-spool"],
}
"""What stands for arguments that take no name; all others are called `q`."""
NEEDED = {"qflow streams reset": ["--to", "0"], "qflow serve": ["--amqp"], "qflow publish": ["body"]}


def run(words: str, spool: Path) -> Result:
    """Run a command on a spool, in this process, with whatever else it must be given."""
    arguments: list[str] = []
    for parameter in WITH_SPOOL[words].params:
        if not isinstance(parameter, click.Argument):
            continue
        if parameter.name == "spool":
            arguments.append(str(spool))
        elif parameter.required:
            arguments += GIVEN.get(str(parameter.name), ["q"])
    given = [*words.split()[1:], *arguments, *NEEDED.get(words, [])]
    if any("--yes" in parameter.opts for parameter in WITH_SPOOL[words].params):
        given.append("--yes")
    return CliRunner().invoke(app, given, input="")


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
    makes = any(one.name == "spool" and not getattr(one.type, "exists", True) for one in WITH_SPOOL[words].params)
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
