"""Requests of schedules: each made once, for threads and for tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qflow.config import check_name
from qflow.message import body_bytes, decode_headers, encode_headers
from qflow.options import ScheduleOptions, check_options
from qflow.periodic import Schedule, from_plain
from qflow.remote.client.link import Reply, Request
from qflow.remote.client.requests import named
from qflow.remote.wire.values import plain


def schedule(name: str, queue: Any, body: Any, options: Mapping[str, Any]) -> Request:
    """Its reply is a `Schedule`."""
    check_options("schedule", options, ScheduleOptions.__annotations__.keys())
    given = {option: plain(value) for option, value in options.items() if value is not None}
    if "headers" in given:
        given["headers"] = decode_headers(encode_headers(given["headers"]))
    head = {"op": "schedule", "name": check_name(name, "schedule"), **named("queue", queue), "options": given}
    return Request(head, ((body_bytes(body),),), "the schedule", _schedule)


def schedules() -> Request:
    return Request({"op": "schedules"}, read=lambda reply: [from_plain(one) for one in reply.result])


def cancel(name: str) -> Request:
    return Request({"op": "cancel_schedule", "name": name}, doubt="the schedule")


def _schedule(reply: Reply) -> Schedule:
    return from_plain(reply.result)
