"""What forms do: an action, then the page it came from, which says what became of it.

What deletes is asked for on a page of its own, which says how many messages were there; if there are more when the
answer comes, it asks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import attrs
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from qflow.errors import InvalidArgument, NotFound
from qflow.web import actions
from qflow.web.arguments import Arguments
from qflow.web.guard import peer_of, session_of
from qflow.web.pages import inside, link, shown
from qflow.web.rights import queue_of, stream_of, visible
from qflow.web.site import LONGEST_S, Session
from qflow.web.text import name as readable

_MOST_FIELDS = 40
_SHOWN = "shown:"
"""Begins the name of a field that says what another one was when the form was shown."""


@attrs.frozen
class Form:
    """What a form does."""

    action: actions.Action
    done: str
    """What is said then, with values of what the action returns."""
    question: str = ""
    """What is asked before; without it nothing is."""
    leaves: str = ""
    """Where to go if the thing itself is gone."""


FORMS: Mapping[str, Form] = {
    "put": Form(actions.put, "put as message {sequence}"),
    "publish": Form(actions.publish, "published: {queues} of queues, {streams} of streams"),
    "purge": Form(actions.purge, "messages deleted: {purged:,}", "Delete all messages of queue"),
    "move": Form(actions.move, "moved: {moved}; kept: {kept}"),
    "redrive": Form(actions.redrive, "moved: {moved}; kept: {kept}"),
    "pause": Form(actions.pause, "delivers nothing until it is resumed"),
    "resume": Form(actions.resume, "delivers again"),
    "alter": Form(actions.alter, "changed: {changed}"),
    "delete": Form(actions.delete, "queue deleted", "Delete, with all its messages, queue", "/queues"),
    "delete_stream": Form(
        actions.delete_stream, "stream deleted", "Delete, with all its messages and subscriptions, stream", "/streams"
    ),
    "delete_subscription": Form(
        actions.delete_subscription, "subscription deleted", "Delete, with its position, a subscription of stream"
    ),
}


async def _confirm(request: Request) -> Response:
    return _asked(request, _form(request), Arguments(dict(request.query_params)))


def _asked(request: Request, form: Form, given: Arguments, status: int = 200, sentence: str = "") -> Response:
    """Return the page that asks whether something is to be deleted."""
    broker = request.app.state.site.broker
    fields = {name: given.text(name) for name in ("queue", "stream", "subscription") if given.optional_text(name)}
    of = fields.get("queue") or fields.get("stream")
    if not form.question or of is None:
        raise NotFound("there is no such question")
    rights = request.state.rights
    visible(rights, of)
    if "queue" in fields:
        fields["seen"] = str(len(queue_of(broker, rights, of)))
    else:
        stream_of(broker, rights, of)
    return shown(
        request, "confirm.html", status, action=request.path_params["action"], question=form.question, of=of,
        fields=fields, sentence=sentence, back=_back(form, given, is_gone=False),
    )  # fmt: skip


async def _do(request: Request) -> Response:
    form = _form(request)
    session, given = await _of_session(request)
    given = _changed(given)
    try:
        found = await form.action(request.app.state.site.broker, request.state.rights, given)
    except actions.Changed as error:
        return _asked(request, form, given, 409, str(error))
    of = given.optional_text("queue") or given.optional_text("stream") or given.optional_text("topic") or ""
    values = {name: _in_words(value) for name, value in found.items()}
    session.note("done", f"{readable(of)}: {form.done.format(**values)}")
    return RedirectResponse(_back(form, given, is_gone=bool(form.leaves)), 303)


def _changed(given: Arguments) -> Arguments:
    """Return what is asked for: without what a form has to be told by, and what is as it was when it was shown.

    So whoever has a form open takes nothing back that somebody else has set meanwhile.
    """
    shown = {name.removeprefix(_SHOWN): value for name, value in given.fields.items() if name.startswith(_SHOWN)}
    return Arguments(
        {
            name: value
            for name, value in given.fields.items()
            if name != "csrf" and not name.startswith(_SHOWN) and (name not in shown or shown[name] != value)
        }
    )


def _in_words(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{readable(str(name))}: {one}" for name, one in value.items()) or "nothing"
    return value


def _back(form: Form, given: Arguments, *, is_gone: bool) -> str:
    if is_gone:
        return form.leaves
    queue, stream = given.optional_text("queue"), given.optional_text("stream")
    if queue:
        return link("/queue", queue=queue)
    return link("/stream", stream=stream) if stream else "/publish"


async def _login(request: Request) -> Response:
    site, given = request.app.state.site, await _fields(request)
    name, password = given.optional_text("name") or "", given.optional_text("password") or ""
    wanted = inside(given.optional_text("next") or "/")
    key = await site.open_session(name, password, peer_of(request.scope))
    if key is None:
        return shown(request, "login.html", 401, wanted=wanted, failed=True, undone=False)
    site.sessions.close(request.cookies.get(site.cookie, ""))
    response = RedirectResponse(wanted, 303)
    response.set_cookie(
        site.cookie, key, max_age=int(LONGEST_S), path="/", secure=site.is_secure, httponly=True, samesite="strict"
    )
    return response


async def _logout(request: Request) -> Response:
    site = request.app.state.site
    await _of_session(request)
    site.sessions.close(request.cookies.get(site.cookie, ""))
    response = RedirectResponse("/login", 303)
    response.delete_cookie(site.cookie, path="/", secure=site.is_secure, httponly=True, samesite="strict")
    return response


def _form(request: Request) -> Form:
    form = FORMS.get(request.path_params["action"])
    if form is None:
        raise NotFound("there is no such action")
    return form


async def _of_session(request: Request) -> tuple[Session, Arguments]:
    """Return the session of who sends a form, and its fields; refuse what another site may have sent."""
    session, given = session_of(request.scope), await _fields(request)
    if session is None or not session.matches(given.optional_text("csrf") or ""):
        raise HTTPException(403, "this form is not one of your session: open the page again")
    return session, given


async def _fields(request: Request) -> Arguments:
    """Return the fields of a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "a form comes as application/x-www-form-urlencoded")
    try:
        sent = (await request.body()).decode("ascii")
        pairs = parse_qsl(sent, keep_blank_values=True, errors="surrogateescape", max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise InvalidArgument(f"this is no form: {error}") from error
    return Arguments({name: value.replace("\r\n", "\n") for name, value in pairs})


def routes() -> list[Route]:
    """Return the routes of what forms send."""
    return [
        Route("/confirm/{action}", _confirm, methods=["GET"]),
        Route("/do/{action}", _do, methods=["POST"]),
        Route("/login", _login, methods=["POST"]),
        Route("/logout", _logout, methods=["POST"]),
    ]
