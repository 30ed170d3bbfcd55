"""A commit fails so that nobody knows whether it holds: publishers get no answer, and find out by sending again."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

import qflow
from doubt import Doubt
from mqtt_loop import PUBREC, Gone, client, serving, unconnected

KEPT = {"clean": False, "SessionExpiryInterval": 1000}


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [1, 2])
def test_a_publish_in_doubt_ends_the_connection(
    qos: int, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By DISCONNECT where there is one; with QoS 2 it is stored once, though it is sent again after a restart."""
    asyncio.run(_in_doubt(tmp_path / "spool", Doubt(monkeypatch), qos, version))
    with qflow.open(tmp_path / "spool") as broker:
        found = [message.body for message in broker.stream("mqtt").query()]
    assert found == ([b"before", b"doubtful"] if qos == 2 else [b"before", b"doubtful", b"doubtful"])


async def _in_doubt(spool: Path, doubt: Doubt, qos: int, version: int) -> None:
    kept = KEPT if version == 5 else {"clean": False}
    async with serving(spool) as server:
        raw = await client(server, "raw", version=version, **kept)  # type: ignore[arg-type]
        await raw.released("a", b"before", packet_id=1)
        doubt.armed = True
        raw.publish("a", b"doubtful", qos=qos, packet_id=7)
        said = await raw.gone()
        assert [(one.kind, one.code) for one in said] == ([(14, 0x80)] if version == 5 else [])
        again = await unconnected(server, version=version)
        with suppress(Gone):  # one of 3.1.1 is told nothing
            assert (await again.connect("raw", **kept)).code == 0x80  # type: ignore[arg-type]
    async with serving(spool) as server:
        raw = await client(server, "raw", version=version, **kept)  # type: ignore[arg-type]
        if qos == 1:
            await raw.published("a", b"doubtful", packet_id=7, dup=True)
        else:
            await raw.released("a", b"doubtful", packet_id=7, dup=True)


def test_what_is_refused_after_a_doubt_is_known_not_to_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that was there before is told so."""
    asyncio.run(_refused(tmp_path / "spool", Doubt(monkeypatch)))
    with qflow.open(tmp_path / "spool") as broker:
        assert [message.body for message in broker.stream("mqtt").query()] == [b"doubtful"]


async def _refused(spool: Path, doubt: Doubt) -> None:
    async with serving(spool) as server:
        raw, other = await client(server), await client(server)
        doubt.armed = True
        raw.publish("a", b"doubtful")
        await raw.gone()
        other.publish("a", b"later", qos=2, packet_id=7)
        assert (await other.expect(PUBREC)).code == 0x80
