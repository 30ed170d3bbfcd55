"""Asking people before something is deleted, while nobody keeps the spool: an answer may take an hour."""

from __future__ import annotations

import sys

import click

yes = click.option("--yes", "is_sure", is_flag=True, help="Do not ask.")


def make_sure(is_sure: bool, question: str) -> None:
    """Return if the answer is yes; without a terminal to ask at, --yes is needed."""
    if is_sure:
        return
    if not is_there():
        raise click.UsageError(f"{question} There is nobody to ask: give --yes")
    click.confirm(question, abort=True, err=True)


def ask_if_there(is_sure: bool, question: str) -> None:
    """Return if the answer is yes, or there is nobody to ask: for what loses nothing."""
    if not is_sure and is_there():
        click.confirm(question, abort=True, err=True)


def is_there() -> bool:
    """Tell whether stdin is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()
