"""Operations on a whole broker: `hello`, figures, copies, schedules, sessions of MQTT, events."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import qflow
from qflow import restoring
from qflow.aio.broker import AsyncBroker, in_thread
from qflow.events import Event
from qflow.periodic import plain as plain_schedule
from qflow.remote.server import arguments
from qflow.remote.server.arguments import Columns
from qflow.remote.server.records import restored_items
from qflow.remote.server.session import Session, by_name, of_calls
from qflow.remote.wire.errors import encode_error
from qflow.remote.wire.values import plain

MOST_REQUESTS = 3000
"""With columns, under way of one connection."""
FRAME_BYTES = 64 * 2**20
"""A frame holds as much beside one transaction."""
_SCHEDULE_OPTIONS = {"every_s", "cron", "time_zone", "headers"}


def frame_bytes(session_or_settings: Any) -> int:
    """Return the longest frame a broker with these settings takes."""
    return FRAME_BYTES + int(session_or_settings.max_transaction_bytes)


async def hello(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    arguments.text(head, "product")
    if head.get("pid") is not None:
        said = arguments.number(head, "pid", 1)
        session.pid = said if session.peer_pid is None else session.peer_pid
    broker = session.broker.broker
    limits = {"frame_bytes": frame_bytes(broker.settings), "requests": MOST_REQUESTS, "bytes": session.credit_bytes}
    return {
        "product": f"qflow {qflow.__version__}",
        "uuid": str(broker.uuid),
        "path": broker.path,
        "settings": plain(broker.settings),
        "limits": limits,
        "recovery": plain(broker.recovery),
    }


async def figures(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    """They are plain as they are: to go through those of 10,000 queues would hold up all sessions for a second."""
    return list(await session.broker.figures(arguments.number(head, "since")))


async def restore(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    """One commit; what is refused is told with its place in the batch, and nothing was put."""
    broker = session.broker
    items = restored_items(head, columns)
    try:
        expired = await in_thread(broker, partial(restoring.restore, broker.broker, items))
    except restoring.Refused as refused:
        return {"refused": refused.index, **encode_error(refused.why)}
    return {"expired": expired}


async def schedule(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    name, queue = arguments.text(head, "name"), arguments.text(head, "queue")
    (body,) = arguments.column(head, columns, 0)
    options = arguments.settings(head, "options", _SCHEDULE_OPTIONS)
    return plain_schedule(await session.broker.schedule(name, queue, body, **options))


async def delete_session(session: Session, head: dict[str, Any], columns: Columns) -> None:
    """The door of an owner without MQTT imports it only then."""
    from qflow.mqtt.server.forgetting import forget_session

    await forget_session(session.broker, arguments.text(head, "client"))


async def events(session: Session, head: dict[str, Any], columns: Columns) -> None:
    """One listener at the broker for all connections: who is gone is not told, and nothing keeps it."""
    hearing = _hearing.get(session.broker)
    if hearing is None:
        hearing = _hearing[session.broker] = set()
        session.broker.on_event(partial(_tell, hearing))
    if session not in hearing:
        hearing.add(session)
        session.ended.append(partial(hearing.discard, session))


_hearing: WeakKeyDictionary[AsyncBroker, set[Session]] = WeakKeyDictionary()
"""Who has asked for events of a broker."""


def _tell(hearing: set[Session], event: Event) -> None:
    if hearing:
        head = {"event": plain(event._asdict())}
        for session in list(hearing):
            session.notify(head)


OPERATIONS = by_name(hello, figures, restore, schedule, delete_session, events) | of_calls(
    recovery=lambda session, head: session.broker.recovery,
    stats=lambda session, head: session.broker.stats(),
    check=lambda session, head: session.broker.check(),
    snapshot=lambda session, head: session.broker.snapshot(arguments.text(head, "path")),
    compact=lambda session, head: session.broker.compact(),
    schedules=lambda session, head: [plain_schedule(one) for one in session.broker.schedules()],
    cancel_schedule=lambda session, head: session.broker.cancel_schedule(arguments.text(head, "name")),
)
