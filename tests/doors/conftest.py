"""Fixtures of the command line tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import qflow
import scratch
from doors.command_line import CommandLine
from qflow import inspect


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory for many spools that no test of the disk is about."""
    with scratch.directory(scratch.in_memory(), "doors") as path:
        yield path


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[CommandLine]:
    """The command line; its spool is sound when the test ends."""
    cli = CommandLine(tmp_path)
    yield cli
    cli.end()
    if (cli.spool / "log").is_dir():
        assert inspect.check_spool(cli.spool) == []
        with qflow.open(cli.spool) as broker:
            assert broker.check() == []
