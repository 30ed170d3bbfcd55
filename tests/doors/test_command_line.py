"""The command line as a whole: what it imports, and that its parts agree."""

from __future__ import annotations

import re
import runpy
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from layout import ROOT, commands
from qflow.cli.main import app


def test_the_help_imports_no_command_and_nothing_heavy() -> None:
    """Whoever looks for a command waits for none of them."""
    script = "import sys\nsys.argv = ['qflow', '--help']\nfrom qflow.cli.main import main\ntry:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy = {"lmdb", "asyncio", "attrs", "json", "rich", "qflow.broker", "qflow.config", "qflow.inspect"}
    assert heavy & set(done.stderr.split()) == set()
    assert {module for module in done.stderr.split() if module.startswith("qflow.cli.")} == {
        "qflow.cli.main",
        "qflow.cli.exits",
        "qflow.cli.standard",
        "qflow.cli.stop",
    }


STRUCK = """
import signal, sys

at, sign, entry = sys.argv[1:]
sys.argv[1:] = ["ls", "spool"]

class Striking:
    def find_spec(self, name, *_):
        if name == at:
            signal.raise_signal(getattr(signal, sign))

sys.meta_path.insert(0, Striking())
module, _, function = entry.partition(":")
getattr(__import__(module, fromlist=["_"]), function)()
"""


@pytest.mark.parametrize("sign", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("at", ["click", "qflow.cli.main", "qflow.cli.ls"])
def test_a_signal_while_it_is_imported_ends_it_without_a_word(at: str, sign: str, tmp_path: Path) -> None:
    """As by that signal, or by the exit code that stands for it; so it is with the script that is installed."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    command = [sys.executable, "-c", STRUCK, at, sign, scripts["qflow"]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == done.stdout == ""
    number = signal.Signals[sign]
    assert done.returncode in (-number, 128 + number)


def test_an_unknown_command_is_told_the_nearest_names() -> None:
    """A misspelt command is bad usage, and click names those that look like it."""
    done = subprocess.run([sys.executable, "-m", "qflow", "peak"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "did you mean 'peek'" in done.stderr


def test_every_command_has_a_help_that_fits() -> None:
    """Whatever a group holds has a short help of its own, which ends with a period."""
    for words, command in commands().items():
        assert command.help, words
        if words != "qflow":
            assert (command.short_help or "").endswith("."), words
    assert isinstance(commands()["qflow"], click.Group)


def test_the_page_of_the_command_line_has_every_command_and_option() -> None:
    """It is made of the helps, when the site is built."""
    page = runpy.run_path(str(ROOT / "docs" / "commands.py"))["page"]()
    for words, command in commands().items():
        assert words == "qflow" or re.search(rf"^#+ {words}$", page, re.MULTILINE), words
        for parameter in command.params if words != "qflow" else []:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.opts[-1] in page, (words, parameter.opts)


def test_the_page_about_looking_inside_can_be_typed_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of it, in one directory; only the first has nothing to work on."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "howto" / "inspect.md").read_text()
    (tmp_path / "jobs.jsonl").write_text("".join(re.findall(r"```json\n(.*?)```", page, re.DOTALL)))
    lines = "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)).splitlines()
    codes = [CliRunner().invoke(app, shlex.split(line)[1:]).exit_code for line in lines]
    assert dict(zip(lines, codes, strict=True)) == {**dict.fromkeys(lines, 0), lines[0]: 2}
