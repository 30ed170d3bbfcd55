"""A broker on another host, over Arrow Flight: plans are made beside its log, tasks read and write from anywhere."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from qflow.arrow.bounds import Bound, Offsets
from qflow.arrow.losses import ByOption
from qflow.arrow.ranges import Cutting, Span
from qflow.arrow.schema import Column, arrow_schema
from qflow.arrow.states import SpoolState, StreamState
from qflow.arrow.takers import Taker
from qflow.errors import CorruptionError, GapError, GroupInUse, InvalidArgument, NotFound, QflowError, StreamDeleted
from qflow.flight.trust import check_certificates, check_url
from qflow.loggers import get_logger
from qflow.message import LANE_SHIFT
from qflow.spark.offsets import LogPosition, Progress
from qflow.spark.places.calls import CALL_S, Door, read_file
from qflow.spark.places.place import OfOwners, Reading, Staging, Written
from qflow.spark.places.sent import Sent
from qflow.spark.spools import other_log
from qflow.spark.words import Away
from qflow.storage.inbox.stage_files import StageFile
from qflow.storage.inbox.stages import Batch, Manifest
from qflow.storage.log.recovery import QueueRecord, Recovery
from qflow.storage.log.rows import Row
from qflow.tokens import check_token, token_in

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
_logger = get_logger("qflow.spark")
_CLOSED = "already closed"
"""What Arrow says of a row behind one that lay in a buffer as the broker ended."""
LEASE_S = 10.0
"""How long a group is this query's after it was last heard of: Spark tells nobody that a query has ended."""


@attrs.frozen
class FlightPlace:
    """The broker at a URL; see `Place`."""

    door: Door

    @classmethod
    def of(
        cls, url: str, *, token: str | None, token_file: str | None, ca: str | None, patience_s: float
    ) -> FlightPlace:
        """Return the place that options name. Raises InvalidArgument. NotFound: a file is missing, or pyarrow."""
        try:
            import pyarrow.flight  # noqa: F401
        except ImportError as error:
            raise NotFound(f"{url}: Arrow Flight is not installed ({error}): pip install pyarrow") from error
        place = check_url(url)
        if token is not None and token_file is not None:
            raise InvalidArgument("options 'token' and 'tokenFile' say the same in two ways: leave one of them out")
        if token_file is not None:
            token = token_in(read_file("tokenFile", token_file).decode(errors="replace"))
            if token is None:
                raise InvalidArgument(f"option 'tokenFile' is {token_file!r}, which has no token: write one on a line")
        token = None if token is None else check_token(token)
        certificates = None if ca is None else read_file("ca", ca)
        if certificates is not None:
            check_certificates(certificates, f"option 'ca' is {ca!r}, which")
        return cls(Door(place, token, token_file, certificates, patience_s))

    @property
    def where(self) -> str:
        return self.door.url

    @property
    def rests(self) -> bool:
        """See `Place`."""
        return self.door.rests

    def look(self, uuid: str | None = None) -> SpoolState:
        """Return the streams and queues there are."""
        found = self.door.action("describe", {})
        if uuid is not None and found["uuid"] != uuid:
            raise other_log(self.where, uuid, found["uuid"])
        return _state(found)

    def resolve(
        self, uuid: str, bound: Bound, which: str, streams: list[StreamState], committed: Mapping[str, dict[int, int]]
    ) -> Offsets:
        """Return the offsets that a bound stands for."""
        if not streams:
            return {}
        asked = {
            "uuid": uuid,
            "bound": attrs.asdict(bound),
            "which": which,
            "streams": [one.name for one in streams],
            "assigned": {one.name: sorted(one.assigned) for one in streams if one.assigned is not None},
            "committed": committed,
        }
        found = self.door.action("resolve", asked)["offsets"]
        return {name: _numbered(parts) for name, parts in found.items()}

    def cut(self, uuid: str, ranges: Sequence[tuple[StreamState, int, int, int]], cutting: Cutting) -> list[Span]:
        """Cut ranges into spans for tasks."""
        asked = [[stream.owner, *numbers] for stream, *numbers in ranges]
        found = self.door.action("cut", {"uuid": uuid, "ranges": asked, "cutting": cutting._asdict()})
        return [Span(*span) for span in found["spans"]]

    def with_eras(self, uuid: str, streams: Mapping[str, Progress]) -> LogPosition:
        """Return a position with eras."""
        asked = {one.number: one.offsets for one in streams.values()}
        found = self.door.action("eras", {"uuid": uuid, "offsets": asked})["eras"] if asked else {}
        eras = {int(number): _numbered(parts) for number, parts in found.items()}
        return LogPosition(uuid, {name: one._replace(eras=eras.get(one.number, {})) for name, one in streams.items()})

    def other_era(self, known: Progress) -> int | None:
        """Return a partition whose last message that was read has another era now."""
        asked = {"number": known.number, "offsets": known.offsets, "known": known.eras or {}}
        found: int | None = self.door.action("other_era", asked)["partition"]
        return found

    def offsets_after(self, uuid: str, asked: Collection[tuple[Span, int]]) -> list[int]:
        """Return, for each (span, bytes), the offset at the end of the block that reaches so many bytes."""
        spans = [[*span[1:], most_bytes] for span, most_bytes in asked]
        found: list[int] = self.door.action("offset_after", {"uuid": uuid, "asked": spans})["offsets"]
        return found

    def committed(self, uuid: str, group: str) -> OfOwners:
        """Return where a group has come to."""
        return _of_owners(self.door.action("positions", {"uuid": uuid, "group": group})["offsets"])

    def lease(self, uuid: str, group: str) -> FlightLease:
        """Take a group's lease; one that another query had is waited for."""
        return FlightLease(self.door, uuid, group)

    def read(self, asked: Reading) -> Iterator[pa.RecordBatch]:
        """Yield the matching messages of a span, in order; behind what was read, where the broker was away."""
        import pyarrow as pa

        schema = arrow_schema(asked.columns)
        columns = [*asked.columns, *(() if "offset" in schema.names else (Column("offset"),))]
        losses = ByOption(asked.fail_on_data_loss, f"`qflow check` of the spool behind {self.where}")
        span, waiting = asked.span, self.door.waiting()
        while span.start < span.end:
            try:
                with self.door.errors():
                    for chunk in self._begin_read(asked._replace(span=span, columns=columns)):
                        if chunk.app_metadata is not None:
                            losses.told(span, chunk.app_metadata.to_pybytes())
                        batch = chunk.data
                        if batch.num_rows:
                            waiting.answered()
                            span = span._replace(start=batch.column("offset")[-1].as_py() + 1)
                            yield pa.RecordBatch.from_arrays(batch.columns[: len(schema)], schema=schema)
                waiting.answered()
                return
            except Away as error:
                waiting.go_on(error)
            except (NotFound, StreamDeleted):
                losses.stream(span)
                return
            except (GapError, CorruptionError) as error:
                losses.raised(span, error)
                raise

    def _begin_read(self, asked: Reading) -> Any:
        import pyarrow.flight as pf

        span = asked.span
        ticket = {
            "uuid": asked.uuid,
            "stream": span.stream,
            "number": span.owner,
            "partition": span.partition,
            "start": span.start,
            "end": span.end,
            "filter": asked.filter,
            "columns": asked.columns,
            "fail_on_data_loss": asked.fail_on_data_loss,
        }
        if asked.known is not None:
            ticket["era"] = list(asked.known)
        wire = pf.Ticket(json.dumps(ticket).encode())
        return self.door.client().do_get(wire, self.door.options())

    def stage(self, asked: Staging) -> FlightStage:
        """Begin a file of a batch."""
        return FlightStage(self.door, asked)

    def check_hand_over(self, manifest: Manifest) -> None:
        """See that a batch would not be refused for its number or its plan."""
        self.door.action("adopt", {"manifest": manifest._asdict(), "check": True})

    def hand_over(self, manifest: Manifest, staged: Batch, timeout_s: float) -> None:
        """Return when a batch is in the log."""
        asked = {"manifest": manifest._asdict(), "staged": staged, "timeout_s": timeout_s}
        self.door.action("adopt", asked, within_s=2 * timeout_s + CALL_S)

    def discard(self, tokens: Collection[str]) -> None:
        """Remove the stages of these tokens that are not handed in."""
        self.door.action("withdraw", {"tokens": list(tokens)})


class FlightLease:
    """A group's lease, renewed by a thread; see `Lease`."""

    def __init__(self, door: Door, uuid: str, group: str) -> None:
        self._door = door
        self._asked = {"uuid": uuid, "group": group, "seconds": LEASE_S}
        found = self._take()
        self._token: int = found["token"]
        self._committed = _of_owners(found["offsets"])
        self._closed = threading.Event()
        self.renewing = threading.Thread(target=self._renew, name="qflow-lease", daemon=True)
        self.renewing.start()

    def _take(self) -> Any:
        deadline = time.monotonic() + LEASE_S
        while True:
            try:
                return self._door.action("lease", self._asked)
            except GroupInUse:
                if time.monotonic() > deadline:
                    raise
            time.sleep(1)

    def _renew(self) -> None:
        said = ""
        while not self._closed.wait(LEASE_S / 4):
            try:
                self._door.action("lease", self._asked | {"token": self._token})
                said = ""
            except GroupInUse:  # another query has it: the next acknowledgement says so
                return
            except Away:
                continue
            except QflowError as error:  # such as a token that has ended: another may be given
                text = f"the lease of group {self._asked['group']!r} is not renewed for now: {error}"
                if text != said:
                    said = text
                    _logger.warning("%s", text)

    def committed(self) -> OfOwners:
        """Return where the group has come to."""
        return self._committed

    def acknowledge(self, offsets: Mapping[int, Mapping[int, int]]) -> None:
        """Keep that everything below these offsets is done."""
        done = {number: dict(parts) for number, parts in offsets.items()}
        self._door.action("commit_positions", self._asked | {"token": self._token, "offsets": done})
        self._committed = done

    def stop(self) -> None:
        """Renew it no more: it ends by itself."""
        self._closed.set()

    def close(self) -> None:
        """Give it back."""
        self.stop()
        self._door.action("release", self._asked | {"token": self._token})


class FlightStage:
    """One file that a task writes, sent as it grows; see `Stage`. Where the broker goes away, another file is begun."""

    def __init__(self, door: Door, asked: Staging) -> None:
        self._door = door
        self._asked = asked
        self._files = 0
        """How many were begun."""
        self._ends: Any = None
        self._errors = door.errors()
        """Of the file that was begun last."""
        self._sent: Sent | None = None

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows."""
        sent = self._sent = self._sent or Sent(rows.schema)
        sent.add(rows)
        self._wait_for(sent, [rows], lambda: None)

    def _wait_for(self, sent: Sent, rows: Iterable[pa.RecordBatch], end: Callable[[], T]) -> T:
        """Write rows, and do `end`; where the broker goes away meanwhile, write all that was sent in their place.

        Raises:
            Away: it stayed away, or there is no copy of what was sent.
        """
        waiting = self._door.waiting()
        while True:
            if self._ends is None:
                self._errors = self._door.errors()
            try:
                with self._errors:
                    self._write(rows)
                    return end()
            except Away as error:
                self._ends = None
                if not sent.is_kept:
                    raise
                waiting.go_on(error)
            rows = sent.batches()

    def _write(self, rows: Iterable[pa.RecordBatch]) -> None:
        import pyarrow as pa

        if self._ends is None:
            self._ends = self._begin()
        writer, _ = self._ends
        for batch in rows:
            try:
                writer.write_batch(batch)
            except (pa.ArrowException, OSError) as error:
                writer.close()  # which raises what the broker has said
                if isinstance(error, OSError) or _CLOSED in str(error):
                    raise Away(f"the broker at {self._door.url} is away (it ended without an answer)") from error
                raise

    def _begin(self) -> Any:
        import pyarrow.flight as pf

        assert self._sent is not None
        asked, schema = self._asked, self._sent.schema
        self._files += 1
        command = {
            "stage": {
                "uuid": asked.uuid,
                "query": asked.batch.query,
                "batch": asked.batch.batch,
                "token": asked.token,
                "name": asked.name if self._files == 1 else f"{asked.name}-{self._files}",
                "topic": asked.topic,
                "stream": asked.stream,
                "replaces": asked.replaces,
            }
        }
        descriptor = pf.FlightDescriptor.for_command(json.dumps(command).encode())
        return self._door.client().do_put(descriptor, schema, self._door.options())

    def finish(self) -> Written:
        """Have them on the disk, at the broker."""
        if self._sent is None:
            return Written(None, frozenset())
        found = self._wait_for(self._sent, (), self._end)
        self._door.answered()
        self._sent.close()
        file = None if found["file"] is None else StageFile(*found["file"])
        return Written(file, frozenset(Taker(*taker) for taker in found["takers"]))

    def _end(self) -> Any:
        writer, answers = self._ends
        writer.done_writing()
        answer = answers.read()  # None: it failed, and `close` mostly raises why
        writer.close()
        self._ends = None
        if answer is None:
            raise Away(f"the broker at {self._door.url} is away (it ended without an answer)")
        return json.loads(answer.to_pybytes())

    def discard(self) -> None:
        """Leave: what the broker has of it goes with its stage."""
        if self._sent is not None:
            self._sent.close()
        ends, self._ends = self._ends, None
        if ends is not None:
            self._door.let_go()


def _state(found: Mapping[str, Any]) -> SpoolState:
    streams, queues = found["streams"], found["queues"]
    records = Recovery(found["uuid"], True, _records(queues), _records(streams), [], [], 0, frozenset())
    states = {one["name"]: StreamState(one["name"], one["number"], _rows(one["partitions"])) for one in streams}
    return SpoolState(found["uuid"], states, records)


def _rows(found: list[dict[str, int]] | None) -> list[Row]:
    """Return the rows of partitions, as far as plans need them."""
    bases = [number << LANE_SHIFT for number in range(len(found or ()))]
    return [
        Row(base + one["end"], base + one["first"], one["messages"], one["bytes"])
        for base, one in zip(bases, found or (), strict=True)
    ]


def _records(found: list[dict[str, Any]]) -> list[QueueRecord]:
    return [QueueRecord(one["number"], one["name"], 0, one["settings"], {}, False) for one in found]


def _numbered(found: Mapping[str, Any]) -> dict[int, Any]:
    return {int(number): value for number, value in found.items()}


def _of_owners(found: Mapping[str, Mapping[str, int]]) -> OfOwners:
    return {int(number): _numbered(parts) for number, parts in found.items()}
