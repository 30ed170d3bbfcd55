"""Schedules: messages that are put again and again."""

from __future__ import annotations

from typing import Any

from qflow.periodic import plain
from qflow.remote.server import arguments
from qflow.remote.server.arguments import Columns
from qflow.remote.server.session import Session, by_name

_OPTIONS = {"every_s", "cron", "time_zone", "headers"}


async def schedule(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    name, queue = arguments.text(head, "name"), arguments.text(head, "queue")
    (body,) = arguments.column(head, columns, 0)
    options = arguments.settings(head, "options", _OPTIONS)
    return plain(await session.broker.schedule(name, queue, body, **options))


async def schedules(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    return [plain(one) for one in session.broker.schedules()]


async def cancel_schedule(session: Session, head: dict[str, Any], columns: Columns) -> None:
    await session.broker.cancel_schedule(arguments.text(head, "name"))


OPERATIONS = by_name(schedule, schedules, cancel_schedule)
