"""Single messages of durable queues, as the log has them."""

from __future__ import annotations

import os
from contextlib import suppress

from qflow.config import spool_path
from qflow.errors import NotFound
from qflow.inspect.child import in_child
from qflow.inspect.facts import MessageFacts
from qflow.inspect.logs import as_now, opened_log, queue_of
from qflow.message import Message, Record, decode_headers, lane_of
from qflow.storage.log.keys import LAST_LANE
from qflow.storage.log.marks import is_settled
from qflow.storage.log.reading import find_message
from qflow.storage.log.rows import Row


def read_message(path: str | os.PathLike[str], queue: str, sequence: int) -> MessageFacts:
    """Return one message of a durable queue from the log, settled or not, as long as its block is there.

    Raises:
        NotFound: no such queue, or the log does not hold the message (any more).
        CorruptionError: its block is damaged.
    """
    spool = spool_path(path)
    return in_child(spool, lambda: _read_message(spool, queue, sequence))


def _read_message(spool: str, queue: str, sequence: int) -> MessageFacts:
    lane = lane_of(sequence)
    message: Record | None = None
    with opened_log(spool) as (env, found):
        record = queue_of(found, queue)
        settled = False
        with env.reading() as txn:
            rows = as_now(txn, record).rows or {min(lane, LAST_LANE): Row()}  # a damaged row does not prevent a look
            if lane in rows:
                settled = is_settled(txn, record.owner, lane, rows[lane], sequence)
                with suppress(NotFound):
                    message, time_ms = find_message(txn, record.owner, lane, sequence)
    if message is None or (settled and not message):
        where = "it was settled and its bytes are gone" if settled else "it was never logged"
        raise NotFound(f"message {sequence} of queue {queue!r} is not in the log: {where}")
    headers = decode_headers(message.header_bytes) if type(message) is Message else {}
    return MessageFacts(
        queue=queue,
        sequence=sequence,
        body=message.body if type(message) is Message else bytes(message),
        headers=headers,
        time_ms=time_ms,
        settled=settled,
        size_bytes=len(message.body if type(message) is Message else message),
    )
