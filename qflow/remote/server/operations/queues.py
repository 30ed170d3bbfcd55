"""Operations on queues."""

from __future__ import annotations

from functools import partial
from typing import Any

from qflow.aio.broker import at_length, in_thread
from qflow.aio.delivery import AsyncDeliveries, held_of
from qflow.aio.queue import AsyncQueue, work_of
from qflow.amqp.letters import reviving
from qflow.config import parse_count, parse_sequences, parse_timeout
from qflow.delivery import Entry
from qflow.errors import InvalidArgument
from qflow.memory.waiting import in_place
from qflow.options import QueueOptions
from qflow.queues.entries import Entries
from qflow.queues.queue import parts_of
from qflow.queues.redrive import redrive as move_back
from qflow.remote.server import arguments
from qflow.remote.server.arguments import Columns
from qflow.remote.server.grants import Grant
from qflow.remote.server.records import MOST_MESSAGES, describe, fitting
from qflow.remote.server.session import Reply, Session, by_name, of_calls
from qflow.takers import Taker, parse_name

MOST_TAKERS = 1000
"""Names of who gets, kept of one connection."""
MOST_CONSUMERS = 10_000
"""Of one connection."""


def queue_of(session: Session, head: dict[str, Any]) -> AsyncQueue[Any]:
    """Return the queue of a request. Raises NotFound: there is none. QueueDeleted: the caller has used it before."""
    return session.named("queue", arguments.text(head, "queue"), session.broker.queue)


async def declare_queues(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    names = arguments.texts(head, "names")
    queues = await session.broker.declare_queues(
        names, **arguments.settings(head, "settings", QueueOptions.__annotations__)
    )
    session.known["queue"].update(names)
    return [queue.settings.to_dict() for queue in queues]


async def alter_queue(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    name = arguments.text(head, "queue")
    queue = await session.broker.alter_queue(name, **arguments.settings(head, "changes", QueueOptions.__annotations__))
    return queue.settings.to_dict()


async def queue(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    name = arguments.text(head, "queue")
    found = session.broker.queue(name)
    session.known["queue"].add(name)
    return found.settings.to_dict()


async def _redrive(session: Session, head: dict[str, Any], sequences: list[int] | None) -> Any:
    """Cancelled, it goes on: what waits for it does not hold it up."""
    name = arguments.text(head, "queue")
    to = None if head.get("to") is None else arguments.text(head, "to")
    limit = None if head.get("limit") is None else arguments.number(head, "limit", 1)
    moving = partial(move_back, session.broker.broker, name, to, limit, sequences, revive=reviving(name, to))
    return await at_length(session.broker, moving)


async def put(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    queue, bodies = queue_of(session, head), arguments.column(head, columns, 0)
    options = arguments.put_options(head, "timeout_s")
    if head.get("single") is True and len(bodies) == 1:
        if head.get("dedupe_key") is not None:
            options["dedupe_key"] = head["dedupe_key"]
        return {"first": await queue.put(bodies[0], **options), "count": 1}
    placed = await queue.put_many(bodies, **options)
    return {"first": placed.start if placed else None, "count": len(placed)}


async def get(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    queue = queue_of(session, head)
    pace = session.pace.get(queue.name, MOST_MESSAGES)
    most = min(parse_count(head.get("most", 1), "max_messages"), pace)
    work, taker = work_of(queue), _taker(session, head)

    async def collect(timeout: float | None) -> AsyncDeliveries | None:
        if taker.is_closed:
            return None
        batch = AsyncDeliveries(await work.collect(most, timeout, taker), work)
        return batch if len(batch) else None

    batch = await session.acquire(collect, work.give_up, parse_timeout(head.get("timeout_s")))
    if taker.is_closed:
        if batch is not None:
            work.give_up(batch)
        return {"result": {"sequences": [], "closed": True}}, []
    if batch is None:
        return {"result": {"sequences": []}}, []
    try:
        segments = held_of(batch).segments
        held_of(batch).check_unsettled(0)  # it may have been held for too long
        count = fitting(segments)
        told, answer = describe(segments, count)
        if count < len(batch):
            work.give_up_from(batch, count)
            session.pace[queue.name] = count
        elif len(batch) == pace < MOST_MESSAGES:
            session.pace[queue.name] = min(2 * pace, MOST_MESSAGES)
    except BaseException:
        work.give_up(batch)
        raise
    told["leased"] = work.is_leased
    told["grant"] = session.grants.add(Grant(batch, work, head["request"]))
    return {"result": told}, answer


def _taker(session: Session, head: dict[str, Any]) -> Taker:
    """Return who gets: what was told by name, or by the number of a consumer."""
    given = head.get("consumer")
    if given is not None and not isinstance(given, str):
        number = arguments.number(head, "consumer", 1)
        if number not in session.consumers:
            raise InvalidArgument(f"there is no consumer {number}: `consume` tells the number of one")
        return session.consumers[number][0]
    name = "" if given is None else parse_name(given)
    taker = session.takers.get(name)
    if taker is None:
        if len(session.takers) >= MOST_TAKERS:
            session.takers.clear()
        taker = session.takers[name] = Taker(name, "get", session.pid)
    return taker


async def consume(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    """A consumer of the caller begins: from now on it is told of."""
    at_once = arguments.number(head, "at_once", 1) if "at_once" in head else None
    taker = Taker(parse_name(arguments.text(head, "name"), "name"), "consumer", session.pid, at_once)
    known = work_of(queue_of(session, head)).consumed
    if len(session.consumers) >= MOST_CONSUMERS:
        raise InvalidArgument(f"{MOST_CONSUMERS} consumers run at this connection: end some, or connect once more")
    in_place(partial(known.welcome, taker))
    number = next(session.numbers)
    session.consumers[number] = taker, known
    return number


async def consume_end(session: Session, head: dict[str, Any], columns: Columns) -> None:
    found = session.consumers.pop(arguments.number(head, "consumer", 1), None)
    if found is not None:
        in_place(partial(found[1].see_off, found[0]))


async def browse(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    return _told(*await session.browsing.begin(queue_of(session, head).queue.browse))


async def browse_next(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    return _told(*await session.browsing.go_on(arguments.number(head, "browse", 1)))


def _told(entries: list[Entry], number: int | None) -> Any:
    page = [[entry.sequence, entry.size_bytes, entry.state, entry.due_ms] for entry in entries]
    return {"browse": number, "entries": page}


async def move_entry(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    entries = Entries(parts_of(queue_of(session, head).queue))
    sequence = arguments.number(head, "sequence")
    match head.get("to"):
        case "disk":
            move = partial(entries.spill_entry, sequence)
        case "memory":
            move = partial(entries.restore_entry, sequence)
        case other:
            raise InvalidArgument(f"an entry is moved to disk or to memory, not to {other!r:.100}")
    return await in_thread(session.broker, move)


OPERATIONS = by_name(
    declare_queues, alter_queue, queue, put, get, consume, consume_end, browse, browse_next, move_entry
) | of_calls(
    queues=lambda session, head: session.broker.queues(),
    delete_queue=lambda session, head: session.broker.delete_queue(arguments.text(head, "queue")),
    bind=lambda session, head: session.broker.bind(arguments.text(head, "queue"), arguments.text(head, "filter")),
    unbind=lambda session, head: session.broker.unbind(arguments.text(head, "queue"), arguments.text(head, "filter")),
    redrive=lambda session, head: _redrive(session, head, None),
    redrive_chosen=lambda session, head: _redrive(session, head, parse_sequences(head.get("sequences"))),  # type: ignore[arg-type]
    purge=lambda session, head: queue_of(session, head).purge(),
    delete_message=lambda session, head: queue_of(session, head).delete(arguments.number(head, "sequence")),
    delete_messages=lambda session, head: queue_of(session, head).delete_many(head.get("sequences")),  # type: ignore[arg-type]
    pause=lambda session, head: queue_of(session, head).pause(),
    resume=lambda session, head: queue_of(session, head).resume(),
    length=lambda session, head: len(queue_of(session, head)),
    queue_stats=lambda session, head: queue_of(session, head).stats(),
    on_slow_consumer=lambda session, head: queue_of(session, head).on_slow_consumer(
        head.get("after_s"), head.get("policy", "notify")
    ),
    browse_close=lambda session, head: session.browsing.close(arguments.number(head, "browse", 1)),
)
