"""Actions: what planners and groups of readers ask of a log, and what a sink hands in. JSON in, JSON out.

`ACTIONS` says what each is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import qflow
from qflow.arrow.bounds import COMMITTED, EARLIEST, LATEST, OFFSETS, TIMES, Bound, resolve
from qflow.arrow.eras import eras_of, other_era
from qflow.arrow.handover import LONGEST_S, Handing, discard_staged
from qflow.arrow.ranges import Cutting, cut, offset_after
from qflow.arrow.states import StreamState
from qflow.arrow.takers import Takers
from qflow.errors import InvalidArgument, NotFound
from qflow.flight.leases import Leases
from qflow.flight.owner import Owner
from qflow.flight.words import Command
from qflow.flight.writing import TOKEN, check_file_name
from qflow.named_tuples import NamedTuple
from qflow.storage.inbox.batches import Target
from qflow.storage.inbox.stage_files import StageFile
from qflow.storage.inbox.stages import Batch, Manifest, check_batch
from qflow.storage.streams.groups import committed_of

_LEASE_S = 60.0


class House(NamedTuple):
    """What actions work on."""

    owner: Owner
    leases: Leases


def _describe(house: House, _asked: Command) -> Any:
    owner = house.owner
    state = owner.state()
    return {
        "product": f"qflow {qflow.__version__}",
        "uuid": state.uuid,
        "path": owner.path,
        "streams": [
            {
                "name": record.name,
                "number": record.owner,
                "settings": record.settings,
                "partitions": _partitions(state.streams[record.name]),
            }
            for record in state.found.streams
            if not record.deleted
        ],
        "queues": [
            {"name": record.name, "number": record.owner, "settings": record.settings}
            for record in state.found.queues
            if not record.deleted
        ],
    }


def _partitions(stream: StreamState) -> list[dict[str, int]] | None:
    found = []
    for number, row in enumerate(stream.rows):
        first, end = stream.bounds(number)
        found.append({"first": first, "end": end, "messages": row.messages, "bytes": row.bytes})
    return found or None


def _resolve(house: House, asked: Command) -> Any:
    said = asked.object("assigned")
    assigned = {name: frozenset(said.numbers(name)) for name in said.value}
    names = dict.fromkeys(asked.texts("streams"))
    streams = [house.owner.stream(name)._replace(assigned=assigned.get(name)) for name in names]
    bound = _bound(asked.object("bound"))
    which = asked.text("which", "bound")
    with house.owner.transaction() as txn:
        return {"offsets": resolve(txn, bound, which, streams, asked.offsets("committed"))}


def _bound(said: Command) -> Bound:
    kind = said.text("kind")
    if kind not in (EARLIEST, LATEST, COMMITTED, OFFSETS, TIMES):
        raise InvalidArgument(
            f"'kind' of {said.what} is one of {EARLIEST}, {LATEST}, {COMMITTED}, {OFFSETS}, {TIMES}, not {kind!r:.100}"
        )
    return Bound(
        kind, said.offsets("numbers"), said.maybe_number("time_ms"), must_exist=said.flag("must_exist", default=False)
    )


def _known(streams: dict[int, StreamState], number: int, partition: int) -> StreamState:
    found = streams.get(number)
    if found is None or not 0 <= partition < len(found.rows):
        raise NotFound(f"there is no partition {partition} of a stream with number {number}: it may have been deleted")
    return found


def _known_range(streams: dict[int, StreamState], number: int, partition: int, start: int, end: int) -> StreamState:
    """Return the stream of a range. Raises NotFound: there is none. InvalidArgument: the range is not all in it."""
    found = _known(streams, number, partition)
    _, there = found.bounds(partition)
    if not 0 <= min(start, end) <= max(start, end) <= there:
        raise InvalidArgument(
            f"stream {found.name!r}, partition {partition}, has offsets from 0 to its end {there}: a range from "
            f"{start} to {end} is not in it"
        )
    return found


def _cut(house: House, asked: Command) -> Any:
    rows = asked.rows("ranges", int, int, int, int)
    streams = house.owner.numbered(number for number, *_ in rows)
    ranges = [(_known_range(streams, *row), *row[1:]) for row in rows]
    said = asked.object("cutting")
    cutting = Cutting(
        said.number("parallelism", 1, least=1),
        said.maybe_number("least", least=1),
        said.maybe_number("most_messages", least=1),
    )
    return {"spans": [list(span) for span in cut(house.owner.transaction, ranges, cutting)]}


def _offset_after(house: House, asked: Command) -> Any:
    rows = asked.rows("asked", int, int, int, int, int)
    if len({(number, partition) for number, partition, *_ in rows}) < len(rows):
        raise InvalidArgument(f"'asked' of {asked.what} names a partition twice")
    streams = house.owner.numbered(number for number, *_ in rows)
    for number, partition, start, end, _ in rows:
        _known_range(streams, number, partition, start, end)
    offsets = []
    for row in rows:
        with house.owner.transaction() as txn:  # one each: others read between them
            offsets.append(offset_after(txn, *row))
    return {"offsets": offsets}


def _eras(house: House, asked: Command) -> Any:
    with house.owner.transaction() as txn:
        return {"eras": {number: eras_of(txn, number, parts) for number, parts in asked.numbered("offsets").items()}}


def _other_era(house: House, asked: Command) -> Any:
    offsets = asked.by_partition("offsets")
    known = asked.texts_by_partition("known")
    if not known.keys() <= offsets.keys():
        raise InvalidArgument(
            f"'known' of {asked.what} has partition {min(known.keys() - offsets.keys())}, and 'offsets' not"
        )
    number = asked.number("number")
    if number >= 2**32:
        raise NotFound(f"there is no stream with number {number}")
    with house.owner.transaction() as txn:
        return {"partition": other_era(txn, number, offsets, known)}


def _takers(house: House, asked: Command) -> Any:
    takers = Takers(house.owner.state().found, house.owner.path, asked.maybe_text("stream"))
    rooms = {topic: takers.room(topic) for topic in asked.texts("topics")}
    return {"rooms": rooms, "takers": sorted(takers.found)}


# Groups of readers ----------------------------------------------------------------------------------------------------


def _positions(house: House, asked: Command) -> Any:
    return {"offsets": committed_of(house.owner.path, _group(asked), house.owner.uuid)}


def _group(asked: Command) -> str:
    """Raises InvalidArgument: there is no name of a group."""
    group = asked.text("group")
    if not group:
        raise InvalidArgument(f"'group' of {asked.what} is empty: give the group a name")
    return group


def _lease(house: House, asked: Command) -> Any:
    found = house.leases.take(_group(asked), asked.maybe_number("token", least=1), asked.seconds("seconds", _LEASE_S))
    return {"token": found.token, "offsets": found.offsets}


def _commit_positions(house: House, asked: Command) -> Any:
    group, token, offsets = _group(asked), asked.number("token", least=1), asked.numbered("offsets")
    _check_positions(house.owner, offsets)
    house.leases.acknowledge(group, token, offsets, asked.seconds("seconds", _LEASE_S))
    return {}


def _check_positions(owner: Owner, offsets: Mapping[int, Mapping[int, int]]) -> None:
    """Check where a group says it is: from a place that is none, retention would keep nothing, or all for ever.

    Raises:
        NotFound: there is no such stream, nor was there one that was deleted; or no such partition.
        InvalidArgument: an offset is past the end.
    """
    streams = owner.numbered(offsets)
    found = owner.state().found if offsets.keys() - streams.keys() else None
    queues = set() if found is None else {record.owner for record in found.queues}
    for number, parts in offsets.items():
        if found is not None and number not in streams and number < found.next_owner and number not in queues:
            continue
        for partition, offset in parts.items():
            stream = _known(streams, number, partition)
            _, end = stream.bounds(partition)
            if offset > end:
                raise InvalidArgument(
                    f"offset {offset} of stream {stream.name!r}, partition {partition}, is past its end {end}: what a "
                    "group has read is there, unless the spool was replaced by an older copy of it"
                )


def _release(house: House, asked: Command) -> Any:
    house.leases.release(_group(asked), asked.number("token", least=1))
    return {}


class Action(NamedTuple):
    """An action, and what it is for."""

    run: Callable[[House, Command], Any]
    words: str


ACTIONS = {
    "describe": Action(_describe, "the log, its streams with their bounds, its queues"),
    "resolve": Action(_resolve, "the offsets that a bound stands for, by stream and partition"),
    "cut": Action(_cut, "ranges of offsets, cut for tasks at the ends of blocks"),
    "offset_after": Action(_offset_after, "the ends of the blocks that reach so many bytes"),
    "eras": Action(_eras, "what tells this log from a copy of it that was written on"),
    "other_era": Action(_other_era, "a partition in which this log is not the one that was read"),
    "takers": Action(_takers, "the streams and queues that take some topics"),
    "positions": Action(_positions, "where a group of readers has come to"),
    "lease": Action(_lease, "take or renew the lease of a group of readers"),
    "commit_positions": Action(_commit_positions, "keep that a group has read everything below some offsets"),
    "adopt": Action(
        lambda house, asked: adopt(house.owner, asked),
        "have a batch that was staged put into the log, once; it is there when this answers",
    ),
    "withdraw": Action(
        lambda house, asked: withdraw(house.owner, asked), "remove what was staged under some tokens and not handed in"
    ),
    "release": Action(_release, "give the lease of a group back"),
}


def act(house: House, name: str, asked: Command) -> Any:
    """Do what an action asks for; return its answer.

    Raises:
        InvalidArgument: there is no such action, or it makes no sense. StorageError: it means another log.
    """
    found = ACTIONS.get(name)
    if found is None:
        raise InvalidArgument(
            f"this owner (qflow {qflow.__version__}) does not know the action {name!r:.100}; it knows: "
            f"{', '.join(ACTIONS)}"
        )
    house.owner.check_uuid(asked.maybe_text("uuid"))
    return found.run(house, asked)


class _Handing(Handing):
    """One attempt at one batch, for a sink on another host."""

    def __init__(self, owner: Owner, manifest: Manifest, timeout_s: float, staged: Batch) -> None:
        super().__init__(owner.path, manifest, timeout_s, staged)
        self._owner = owner

    def _reading(self) -> AbstractContextManager[Any]:
        self._owner.check_staying()
        return self._owner.broker.engine.log.read()

    def _adopt_here(self) -> bool:
        adoption = self._owner.broker.engine.adoption
        adoption.look()
        found = adoption.stats()
        self._problem = found.problem
        return found.problem is None and not found.waiting

    def _in_vain(self) -> str:
        why = f" ({self._problem})" if self._problem else ""
        return (
            f"batch {self._batch.batch} of query {self._batch.query} was handed in to the spool at {self._spool}, and "
            f"its owner did not adopt it within {self._timeout_s:g} s{why}"
        )


def adopt(owner: Owner, asked: Command) -> dict[str, Any]:
    """Return when a batch is in the log, by this attempt or an earlier one; see `Handing.run`.

    Raises:
        InvalidArgument: the manifest makes no sense. StorageError: it could not be adopted, or is another log's.
    """
    said = asked.object("manifest")
    batch, token = check_batch(*said.row("batch", str, int)), said.text("token")
    staged = check_batch(*asked.row("staged", str, int)) if "staged" in asked else batch
    owner.check_uuid(said.text("uuid"))
    if not TOKEN.fullmatch(token):
        raise InvalidArgument(f"'token' of {said.what} must be 32 digits of hexadecimal, not {token!r:.100}")
    files = tuple(StageFile(*row) for row in said.rows("files", str, int, int, int, int))
    for file in files:
        check_file_name(file.name, said.what)
    manifest = Manifest(
        batch=batch,
        token=token,
        uuid=owner.uuid,
        once=said.flag("once", default=False),
        files=files,
        every=said.flag("every", default=False),
        plan=said.text("plan", ""),
        targets=tuple(Target(*row) for row in said.rows("targets", str, str)) if "targets" in said else (),
    )
    handing = _Handing(owner, manifest, asked.seconds("timeout_s", 60.0, most=LONGEST_S), staged)
    if asked.flag("check", default=False):
        handing.check()
    else:
        handing.run()
    return {}


def withdraw(owner: Owner, asked: Command) -> dict[str, Any]:
    """Remove the stages of some tokens that were not handed in; return how many. Raises StorageError."""
    return {"stages": discard_staged(owner.path, frozenset(asked.texts("tokens")))}
