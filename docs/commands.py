"""The page of the command line, made of what `--help` says."""

from __future__ import annotations

import inspect
import re

import click

from qflow.cli.exits import EXIT_CODES
from qflow.cli.main import COMMANDS, app


def page() -> str:
    """Return the page, in Markdown."""
    parts = [
        "# Command line",
        "What `qflow COMMAND --help` says, command by command. Where a command stands among the others, and what it "
        "does to a spool, is in the [reference](index.md#commands).",
        _fenced(_plain(EXIT_CODES)),
    ]
    context = click.Context(app, info_name="qflow")
    for section, names in COMMANDS.items():
        parts.append(f"## {section}")
        for name in names:
            command = app.get_command(context, name)
            assert command is not None
            parts += _described(command, f"qflow {name}", "###")
    return "\n\n".join(parts) + "\n"


def _described(command: click.Command, words: str, heading: str) -> list[str]:
    context = click.Context(command, info_name=words)
    usage = command.get_usage(context).partition(": ")[2]
    parts = [f"{heading} {words}", _fenced(" ".join(usage.split())), _text(command.help or "")]
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    rows = [row for option in options if (row := option.get_help_record(context)) is not None]
    if rows:
        lines = [f"| `{_cell(names)}` | {_cell(said)} |" for names, said in rows]
        parts.append("\n".join(["| option | what it is |", "|---|---|", *lines]))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            parts += _described(below, f"{words} {name}", "####")
    return parts


def _text(said: str) -> str:
    """Return paragraphs; those that stand as they are become blocks."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(said))
    return "\n\n".join(
        _fenced(_plain(one)) if one.startswith("\b") else _escaped(" ".join(one.split())) for one in paragraphs
    )


def _plain(said: str) -> str:
    return inspect.cleandoc(said.replace("\b\n", "\n").strip("\n"))


def _fenced(said: str) -> str:
    return f"```text\n{said}\n```"


def _escaped(said: str) -> str:
    """Return words as they are: no stars, no links and no tags but in what is code already."""
    pieces = said.split("`")
    return "`".join(
        re.sub(r"([\\*_<>\[\]#|])", r"\\\1", piece) if number % 2 == 0 else piece for number, piece in enumerate(pieces)
    )


def _cell(said: str) -> str:
    return " ".join(said.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(page(), end="")
