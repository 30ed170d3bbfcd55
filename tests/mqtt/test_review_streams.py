"""What is confirmed is stored where those who want it find it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import qflow.aio
from mqtt_loop import client, cut_all
from qflow.errors import InvalidArgument
from qflow.mqtt import serve

run = asyncio.run


def test_a_stream_that_takes_not_all_topics_is_refused(spool: Path) -> None:
    run(_narrow(spool))


async def _narrow(spool: Path) -> None:
    async with qflow.aio.open(spool) as broker:
        await broker.declare_stream("mqtt", topics=["a/#"])
        with pytest.raises(InvalidArgument, match="topics"):
            async with await serve(broker, port=0) as server:
                raw = await client(server)
                await raw.subscribe("b")
                await raw.published("b")
                assert (await raw.message()).topic == "b"
        await cut_all()
