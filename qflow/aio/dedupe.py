"""Puts that bear a key, for tasks; see `qflow.queues.dedupe`."""

from __future__ import annotations

import asyncio
from functools import partial

from qflow.aio.loops import Homes, Worker
from qflow.aio.transaction import AsyncTogether
from qflow.config import parse_timeout
from qflow.durations import Duration
from qflow.message import Record
from qflow.queues.assembly import Insert
from qflow.queues.dedupe import Keys
from qflow.queues.puts import Puts


class AsyncKeys:
    """What the queues of a broker know of keys."""

    def __init__(self, keys: Keys, together: AsyncTogether, homes: Homes, worker: Worker) -> None:
        self._keys = keys
        self._together = together
        self._homes = homes
        self._worker = worker

    async def put(self, puts: Puts, key: object, number: int, record: Record, timeout_s: Duration | None) -> int | None:
        """Put a message unless its key is stored; see `qflow.queues.dedupe.Keys.put`."""
        home, keys, timeout = self._homes.here(), self._keys, parse_timeout(timeout_s)
        ends = None if timeout is None else home.loop.time() + timeout
        claim = keys.claim(puts, key, record)
        ask = partial(keys.ask, claim)
        try:
            home.unfinished.add(claim.give_up)
            while (answer := ask() if keys.is_quick(claim) else await self._worker.run(home, ask)) is not None:
                if isinstance(answer, int):
                    return answer
                left = None if ends is None else max(0.0, ends - home.loop.time())
                try:
                    stored = await asyncio.wait_for(asyncio.wrap_future(answer), left)
                except TimeoutError:
                    raise keys.busy(claim) from None
                if stored is not None:
                    return stored
            left = None if ends is None else max(0.0, ends - home.loop.time())
            receipts = await self._together.commit([Insert(puts, number, [record])], [claim], left)  # type: ignore[list-item]
        except BaseException:
            claim.give_up()
            raise
        finally:
            home.unfinished.discard(claim.give_up)
        return receipts[0].first
