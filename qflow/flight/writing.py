"""Record batches published, put into a queue, or staged for a sink. Each answer is JSON, as metadata."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.flight as pf

from qflow.arrow.columns import Check, found_columns, taken
from qflow.arrow.outgoing import Outgoing, header_values
from qflow.arrow.schema import NULL_HEADER
from qflow.arrow.takers import Takers
from qflow.broker import Broker
from qflow.errors import InvalidArgument, MessageTooLarge, QflowError, TransactionTooLarge
from qflow.flight.owner import Owner
from qflow.flight.room import BUDGET_BYTES, Share
from qflow.flight.words import Command, as_json
from qflow.message import HeaderValue
from qflow.routing.results import InOneStream, PublishResult
from qflow.storage.files import Files, storage_error
from qflow.storage.inbox import stages
from qflow.storage.inbox.stage_files import StageFile, StageWriter
from qflow.storage.inbox.stages import Batch, check_batch

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
TOKEN = re.compile(r"[0-9a-f]{32}")
_Row = tuple[str, bytes, bytes | None]
_Run = tuple[int, dict[str, HeaderValue] | None]
Answer = Callable[[dict[str, Any]], object]
_OF_PUTS = ("priority", "ttl_s", "delay_s", "durable")
ROW_BYTES = 500
"""What a row takes beside its bytes while it is published or put: some objects of Python."""


def answering(writer: Any) -> Answer:
    """Return what sends an answer to a client. It raises FlightCancelledError: the client has left."""

    def answer(value: dict[str, Any]) -> None:
        try:
            writer.write(as_json(value))
        except (pa.ArrowException, OSError):
            raise pf.FlightCancelledError("the client has left") from None

    return answer


class Batches:
    """What a client sends: batches of a schema, each of which has room in memory while it is taken."""

    def __init__(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch], share: Share) -> None:
        self.schema = schema
        self._batches = batches
        self._share = share

    def taken(self, columns: dict[str, int], check: Check | None = None) -> Iterator[pa.RecordBatch]:
        """Yield these columns of each batch; nothing may keep one of them.

        Args:
            columns: as of `found_columns`.
            check: see `columns.taken`.

        Raises:
            InvalidArgument: a batch makes no sense. TransactionTooLarge: it stands for far more than was sent.
            What `check` raises.
        """
        for batch in self._batches:
            rows = taken(batch, columns, partial(self._admit, batch.nbytes, check))
            del batch
            yield rows
            del rows
            self._share.free()

    def _admit(self, sent_bytes: int, check: Check | None, rows: int, sizes: Mapping[str, int]) -> None:
        """Wait until there is room for a batch, as large as it is once it is decoded."""
        if check is not None:
            check(rows, sizes)
        size = sum(sizes.values())
        if size > max(sent_bytes, BUDGET_BYTES):
            raise TransactionTooLarge(
                f"{rows} rows stand for {size} bytes, by dictionaries or views of {sent_bytes} bytes, and "
                f"{BUDGET_BYTES} are the most: send them in smaller batches"
            )
        self._share.wait(size + ROW_BYTES * rows)


def _check_size(owner: Owner, largest: Callable[[], int]) -> Check:
    """Return what checks that a batch can be stored at all, by its rows and bytes.

    Args:
        largest: returns the size of the largest message that is admitted.
    """
    most = owner.broker.settings.max_transaction_bytes

    def check(rows: int, sizes: Mapping[str, int]) -> None:
        size = sizes["value"]
        if size <= most:
            return
        if rows > 1:
            raise TransactionTooLarge(
                f"{rows} messages of {size} bytes together are more than max_transaction_bytes={most}: send them in "
                "smaller batches"
            )
        admitted = largest()
        if size > admitted:
            raise MessageTooLarge(
                f"a message of {size} bytes is more than max_message_bytes={admitted} of whoever may take it: split it"
            )

    return check


def _largest(broker: Broker) -> int:
    """Return the size of the largest message that a stream or queue admits. Cost: looks at each."""
    found = [0]
    for find, names in ((broker.stream, broker.streams()), (broker.queue, broker.queues())):
        for name in names:
            with suppress(QflowError):  # it was deleted just now, or is damaged
                found.append(find(name).settings.max_message_bytes)
    return max(found)


def write(owner: Owner, command: Command, batches: Batches, answer: Answer) -> None:
    """Do what the command of a put says with its batches.

    Raises:
        InvalidArgument: the command or a column makes no sense. What publishing, putting or staging raises; the batches
        that were answered are stored.
    """
    command.check_known(*KINDS, "uuid")
    owner.check_uuid(command.maybe_text("uuid"))
    kinds = [kind for kind in KINDS if kind in command]
    if len(kinds) != 1:
        raise InvalidArgument(
            f"{command.what} must have one of {', '.join(map(repr, KINDS))}, not {list(command.value)}"
        )
    KINDS[kinds[0]](owner, command, batches, answer)


def _publish(owner: Owner, command: Command, batches: Batches, answer: Answer) -> None:
    said = command.object("publish")
    said.check_known("topic", "producer", "number", "timeout_s")
    topic = said.maybe_text("topic")
    columns = found_columns(batches.schema, _names(batches.schema, topic))
    producer, number = said.maybe_text("producer"), said.maybe_number("number")
    timeout_s = said.seconds("timeout_s", 60.0)

    def publish(batch: pa.RecordBatch) -> dict[str, Any]:
        rows, headers = _rows(batch, topic)
        results: Sequence[PublishResult] = []
        if not rows:
            pass
        elif len(headers) == 1:
            plain: Any = [row[:2] for row in rows] if all(row[2] is None for row in rows) else rows
            results = owner.broker.publish_many(  # pairs have a shorter way than those with keys
                plain, headers=headers[0][1], producer=producer, number=number, timeout_s=timeout_s
            )
        elif producer is not None:
            raise InvalidArgument("rows that a producer numbers have the same headers in all of a batch, or none")
        else:
            with owner.broker.transaction(timeout_s) as transaction:
                for start, stop, same in _runs(headers, len(rows)):
                    for name, body, key in rows[start:stop]:
                        transaction.publish(name, body, key=key, headers=same)
            results = transaction.result
        return {"messages": len(rows), **_places(results)}

    for batch in batches.taken(columns, _check_size(owner, lambda: _largest(owner.broker))):
        answered = publish(batch)
        del batch
        answer(answered)
        number = None if number is None else number + 1


def _names(schema: pa.Schema, topic: str | None) -> tuple[str, ...]:
    """Return the columns of rows that are published. Raises InvalidArgument: nothing says where."""
    if topic is None and "topic" not in schema.names:
        raise InvalidArgument(
            "say where the rows are published: by a column 'topic', or 'topic' within 'publish' or 'stage'"
        )
    return ("key", "value", "headers") + (("topic",) if topic is None else ())


def _places(results: Sequence[PublishResult]) -> dict[str, Any]:
    """Return how many messages each stream and each queue took."""
    if isinstance(results, InOneStream):  # all in one stream, and made on access
        return {"streams": dict.fromkeys(results[0].offsets, len(results)), "queues": {}, "duplicate": False}
    streams: dict[str, int] = {}
    queues: dict[str, int] = {}
    for result in results:
        for found, names in ((streams, result.offsets), (queues, result.sequences)):
            for name in names:
                found[name] = found.get(name, 0) + 1
    return {"streams": streams, "queues": queues, "duplicate": any(result.duplicate for result in results)}


def _put(owner: Owner, command: Command, batches: Batches, answer: Answer) -> None:
    names_queue = isinstance(command.value.get("put"), str)
    said = Command({"queue": command.text("put")}, command.what) if names_queue else command.object("put")
    said.check_known("queue", "timeout_s", *_OF_PUTS)
    queue = owner.broker.queue(said.text("queue"))
    options: dict[str, Any] = {name: said.value[name] for name in _OF_PUTS if name in said}
    timeout_s = said.seconds("timeout_s", 60.0)

    def put(batch: pa.RecordBatch) -> dict[str, Any]:
        rows, headers = _rows(batch, "")
        bodies = [body for _, body, _ in rows]
        first: int | None = None
        if not bodies:
            pass
        elif len(headers) == 1:
            placed = queue.put_many(bodies, headers=headers[0][1], timeout_s=timeout_s, **options)
            first = placed.start if isinstance(placed, range) and len(placed) else None
        else:
            with owner.broker.transaction(timeout_s) as transaction:
                for start, stop, same in _runs(headers, len(bodies)):
                    transaction.put_many(queue, bodies[start:stop], headers=same, **options)
        return {"messages": len(bodies), "first": first}

    columns = found_columns(batches.schema, ("value", "headers"))
    for batch in batches.taken(columns, _check_size(owner, lambda: queue.settings.max_message_bytes)):
        answered = put(batch)
        del batch
        answer(answered)


def _rows(
    batch: pa.RecordBatch, topic: str | None
) -> tuple[list[_Row], list[tuple[int, dict[str, HeaderValue] | None]]]:
    """Return (topic, body, key) of each row, and the runs of rows with the same headers: (first, headers)."""
    count = batch.num_rows
    bodies = batch.column("value").to_pylist()
    names = batch.schema.names
    topics = [topic] * count if topic is not None else batch.column("topic").to_pylist()
    keys = batch.column("key").to_pylist() if "key" in names else [None] * count
    if None in topics:
        raise InvalidArgument(f"row {topics.index(None)} has null in column 'topic': fill it")
    headers = batch.column("headers") if "headers" in names else None
    runs: list[_Run] = [(0, None)] if count else []
    if None in bodies or (headers is not None and headers.null_count < count):
        said = [None] * count if headers is None else headers.to_pylist()
        runs = []
        for place, (body, one) in enumerate(zip(bodies, said, strict=True)):
            found = header_values(one or ()) | ({NULL_HEADER: True} if body is None else {})
            if not runs or runs[-1][1] != (found or None):
                runs.append((place, found or None))
        bodies = [body or b"" for body in bodies]
    return list(zip(topics, bodies, keys, strict=True)), runs


def _runs(headers: list[_Run], count: int) -> Iterator[tuple[int, int, Any]]:
    ends = [start for start, _ in headers[1:]] + [count]
    for (start, same), stop in zip(headers, ends, strict=True):
        yield start, stop, same


# Staging --------------------------------------------------------------------------------------------------------------


def check_file_name(name: str, what: str) -> None:
    """Raises InvalidArgument: it could not be the name of a file of a stage."""
    if not _NAME.fullmatch(name) or name in (stages.MANIFEST, stages.REASON):
        raise InvalidArgument(f"the name of a file of {what} must be letters, digits, '-' and '_', not {name!r:.100}")


def _stage_of(said: Command) -> tuple[Batch, str]:
    """Return whose stage it is, and its token. Raises InvalidArgument: they could not be names of files."""
    token = said.text("token")
    if not TOKEN.fullmatch(token):
        raise InvalidArgument(f"'token' of {said.what} must be 32 digits of hexadecimal, not {token!r:.100}")
    return check_batch(said.text("query"), said.number("batch")), token


def _stage(owner: Owner, command: Command, batches: Batches, answer: Answer) -> None:
    said = command.object("stage")
    said.check_known("uuid", "query", "batch", "token", "name", "topic", "stream", "replaces")
    owner.check_uuid(said.text("uuid"))
    batch, token = _stage_of(said)
    name = said.text("name")
    check_file_name(name, said.what)
    topic = said.maybe_text("topic")
    columns = found_columns(batches.schema, _names(batches.schema, topic))
    takers = Takers(owner.state().found, owner.path, said.maybe_text("stream"))
    if topic is not None:
        takers.room(topic)
    directory = stages.staged(owner.path, batch, token)
    replaces = said.flag("replaces", default=False)
    try:
        if replaces:
            stages.remove_earlier(Files(), owner.path, batch, token)
        file = _staged(Outgoing(_in_order(columns), topic, takers), batches.taken(columns), directory, name)
    except OSError as error:
        raise storage_error(error, "write a batch", directory) from error
    answer({"file": file, "takers": sorted(takers.found)})


def _in_order(columns: dict[str, int]) -> dict[str, int]:
    """Return where the columns are in what `taken` returns."""
    return {name: place for place, name in enumerate(columns)}


def _staged(outgoing: Outgoing, batches: Iterator[pa.RecordBatch], directory: str, name: str) -> StageFile | None:
    writer: StageWriter | None = None
    try:
        for batch in batches:
            if batch.num_rows:
                writer = writer or StageWriter(Files(), directory, name)
                outgoing.add(batch, writer)
            del batch
        return None if writer is None else writer.finish()
    except BaseException:
        if writer is not None:
            writer.discard()
        raise


KINDS = {"publish": _publish, "put": _put, "stage": _stage}
