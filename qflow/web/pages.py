"""The pages: made on the server, whole without a script; a script renews what is marked as live, and draws charts."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import attrs
import jinja2
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from qflow import __version__
from qflow.aio.broker import at_a_glance
from qflow.amqp import letters
from qflow.config import Overflow, QueueSettings
from qflow.errors import InvalidArgument
from qflow.names import command, printable
from qflow.web import actions, listing, peeking, text
from qflow.web.arguments import Arguments
from qflow.web.rights import Rights, queue_of, stream_of, visible
from qflow.web.site import Site

Page = Callable[[Request], Awaitable[Response]]
_LIVE = "x-live"
"""The header of requests that renew a page."""
_OPEN, _LOOK = ("Open the queue", "/queue", ""), ("Look at messages", "/messages", "")
_ALTER, _REDRIVE = ("Alter…", "/queue", "alter"), ("Redrive…", "/queue", "move")
_PURGE = ("Purge…", "/confirm/purge", "")
"""What a link says, its page, and a place there."""
_REMEDIES = {
    "held-too-long": (_OPEN, _ALTER),
    "blocked-producers": (_OPEN, _ALTER, _PURGE),
    "no-consumer": (_LOOK, _PURGE),
    "paused": (_OPEN,),
    "coming-back": (_LOOK, _ALTER),
    "dead-letters": (_LOOK, _REDRIVE, _PURGE),
    "slow-consumers": (_OPEN,),
}
"""Where the page has the remedy of a finding, by its kind."""


def _at(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def link(path: str, **query: object) -> str:
    """Return a link, without what is empty."""
    said = {name: value for name, value in query.items() if value not in (None, "", False)}
    return f"{path}?{urlencode(said, errors='surrogateescape')}"


def _remedies(finding: Mapping[str, Any], may_act: bool) -> list[tuple[str, str]]:
    """Return what a finding offers: what to say, and where that leads."""
    query = urlencode({"queue": finding["queue"] or ""})
    return [
        (says, f"{page}?{query}" + (f"#{place}" if place else ""))
        for says, page, place in _REMEDIES.get(finding["kind"], ())
        if may_act or (says, page, place) in (_OPEN, _LOOK)
    ]


_COMMAND = re.compile(r"`([^`]*)`")
"""As a sentence has them: between backticks, which none of them has."""


def _commands(sentence: str) -> Markup:
    """Return a sentence with what is between backticks as commands."""
    parts = enumerate(map(_sentence, _COMMAND.split(sentence)))
    return Markup("").join(Markup("<code>{}</code>").format(part) if number % 2 else part for number, part in parts)


_RIGHT_TO_LEFT = "\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff"
_TURNED = re.compile(rf"([{_RIGHT_TO_LEFT}]+(?:\W*[{_RIGHT_TO_LEFT}]+)*)")
"""Words that are written from right to left."""


def _sentence(sentence: str) -> Markup:
    """Return a sentence in which names that are written from right to left turn no number beside them."""
    parts = enumerate(_TURNED.split(printable(sentence)))
    return Markup("").join(Markup("<bdi>{}</bdi>").format(part) if number % 2 else part for number, part in parts)


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "name": text.name,
    "visible": printable,
    "sentence": _sentence,
    "count": text.count,
    "size": text.size,
    "span": text.span,
    "at": _at,
    "commands": _commands,
    "furthest": listing.furthest_behind,
}
_TEMPLATES.globals |= {
    "link": link, "remedies": _remedies, "command": command, "version": __version__, "pid": os.getpid,
    "AT_ONCE": listing.AT_ONCE, "SHOWN_HEADERS": text.SHOWN_HEADERS,
}  # fmt: skip


def shown(request: Request, template: str, status: int = 200, /, **values: Any) -> HTMLResponse:
    """Return a page."""
    state, site = request.state, request.app.state.site
    rights = getattr(state, "rights", None)
    session = getattr(state, "session", None)
    notes: list[tuple[str, str]] = []
    if session is not None and _LIVE not in request.headers:
        notes, session.notes = session.notes, []
    values |= {
        "rights": rights,
        "has_users": site.has_users,
        "csrf": session.csrf if session is not None else "",
        "may_act": session is not None,
        "notes": notes,
        "path": site.broker.path,
        "here": request.url.path,
    }
    return HTMLResponse(_TEMPLATES.get_template(template).render(values), status)


def error_page(request: Request, status: int, sentence: str) -> Response:
    """Return what is shown instead of a page."""
    return shown(request, "error.html", status, sentence=sentence, number=status)


def _given(request: Request) -> tuple[Site, Rights, Arguments]:
    return request.app.state.site, request.state.rights, Arguments(dict(request.query_params))


# Looking ---------------------------------------------------------------------------------------------------------


async def _overview(request: Request) -> Response:
    site, rights, _ = _given(request)
    look = await site.figures.look()
    busiest = (await site.queues(rights, listing.Wanted(sort="messages", descending=True)))[0][:10]
    return shown(
        request, "overview.html", totals=look.totals, findings=await site.findings(rights), inside=site.inside,
        queues=busiest, events=site.events(rights)[:20],
    )  # fmt: skip


async def _queues(request: Request) -> Response:
    site, rights, given = _given(request)
    wanted = listing.Wanted.of(given)
    found, count = await site.queues(rights, wanted)
    pages = max(1, -(-count // listing.AT_ONCE))
    if wanted.page > pages:  # there are fewer by now
        wanted = attrs.evolve(wanted, page=pages)
        found, count = await site.queues(rights, wanted)
    return shown(request, "queues.html", queues=found, count=count, wanted=wanted, pages=pages)


async def _queue(request: Request) -> Response:
    site, rights, given = _given(request)
    name = visible(rights, given.text("queue"))
    settings = queue_of(site.broker, rights, name).settings
    facts = await site.figures.one(name)
    return shown(
        request, "queue.html", name=name, facts=facts, settings=settings.to_dict(), bindings=site.bindings(name),
        changes=_changes(settings), consumers=listing.consumers({name: facts}, rights), overflows=list(Overflow),
        may={action: rights.may(action, name) for action in ("configure", "write", "read")},
        findings=await site.findings(rights, name),
    )  # fmt: skip


def _changes(settings: QueueSettings) -> list[tuple[str, Any, Any]]:
    """Return what can be altered: name, value, default."""
    now, defaults = settings.to_dict(), QueueSettings().to_dict()
    return [(name, now[name], defaults[name]) for name in actions.CHANGES]


async def _messages(request: Request) -> Response:
    site, rights, given = _given(request)
    form, most = _form(given), given.number("most") or 10
    queue, stream = given.optional_text("queue"), given.optional_text("stream")
    topic_filter = given.optional_text("filter") or "#"
    name, waiting = queue or stream or given.text("queue"), 0
    rights.check("read", name)
    if queue is not None:
        waiting = len(queue_of(site.broker, rights, name))
        found = await peeking.first_of_queue(site.broker, name, most, site.reading)
    else:
        stream_of(site.broker, rights, name)
        found = await peeking.last_of_stream(site.broker, name, most, topic_filter)
    messages = await at_a_glance(site.broker, partial(_legible, found, form))
    return shown(
        request, "messages.html", messages=messages, form=form, forms=text.FORMS, most=most, queue=queue, stream=stream,
        topic_filter=topic_filter, waiting=waiting,
    )  # fmt: skip


def _legible(found: list[peeking.Shown], form: text.Form) -> list[tuple[peeking.Shown, list[tuple[str, str]], str]]:
    """Return messages with their headers and bodies as they are shown. Cost: up to 2 ms each."""
    return [
        (one, text.headers(letters.legible(one.headers)), text.body(one.body or b"", form, one.size_bytes))
        for one in found
    ]


def _form(given: Arguments) -> text.Form:
    wanted = given.optional_text("as") or "text"
    for form in text.FORMS:
        if form == wanted:
            return form
    raise InvalidArgument(f"bodies are shown as {', '.join(text.FORMS)}, not as {wanted!r}")


async def _streams(request: Request) -> Response:
    site, rights, _ = _given(request)
    look = await site.figures.look()
    found = [facts for name, facts in sorted(look.streams.items()) if rights.sees(name)]
    return shown(request, "streams.html", streams=found)


async def _stream(request: Request) -> Response:
    site, rights, given = _given(request)
    name = visible(rights, given.text("stream"))
    stats = await stream_of(site.broker, rights, name).stats()
    may = {action: rights.may(action, name) for action in ("configure", "read")}
    return shown(request, "stream.html", name=name, stats=stats, may=may)


async def _consumers(request: Request) -> Response:
    site, rights, _ = _given(request)
    look = await site.figures.look()
    subscriptions = [
        one for name, facts in sorted(look.streams.items()) if rights.sees(name) for one in facts["subscriptions"]
    ]
    consumers = await site.consumers(rights)
    return shown(request, "consumers.html", consumers=consumers, subscriptions=subscriptions)


async def _connections(request: Request) -> Response:
    site, rights, _ = _given(request)
    return shown(request, "connections.html", connections=site.connections(rights))


async def _publish(request: Request) -> Response:
    _given(request)
    return shown(request, "publish.html")


# Logging in ------------------------------------------------------------------------------------------------------


async def _login(request: Request) -> Response:
    if not request.app.state.site.has_users:
        return RedirectResponse("/", 303)
    wanted, undone = inside(request.query_params.get("next", "/")), "undone" in request.query_params
    return shown(request, "login.html", wanted=wanted, failed=False, undone=undone)


def inside(wanted: str) -> str:
    """Return where to go after a login: a page of this server, whatever the link says."""
    is_inside = wanted.startswith("/") and not wanted.startswith("//") and "\\" not in wanted and wanted.isprintable()
    return wanted if is_inside else "/"


def routes() -> list[Route]:
    """Return the routes of all pages."""
    looking: dict[str, Page] = {
        "/": _overview,
        "/queues": _queues,
        "/queue": _queue,
        "/messages": _messages,
        "/streams": _streams,
        "/stream": _stream,
        "/consumers": _consumers,
        "/connections": _connections,
        "/publish": _publish,
        "/login": _login,
    }
    return [Route(path, page, methods=["GET"]) for path, page in looking.items()]
