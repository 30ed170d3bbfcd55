"""What every request passes before anything else looks at it.

- Without users only this machine may ask, and under a name of it: a page of another site cannot have a browser ask here
  by a name that was made to lead to 127.0.0.1. (With users it finds no session.)
- A body of more than 2 MiB, or of 16 KiB before a login, is refused before it is read, one that turns out to be longer
  when it does.
- What changes something comes from a page of this server, or from no browser: `Origin` and `Sec-Fetch-Site` say so.
- Who asks is known by a session's cookie, or by HTTP Basic; with a cookie, what changes something by the API has the
  token of the session in `X-CSRF-Token`. Forms have it in a field, which who reads them checks.
- No answer may be put into a frame, run a script that did not come from here, or be kept by a cache.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qflow.serving.addresses import is_loopback
from qflow.web.rights import Rights
from qflow.web.site import Session, Site

MOST_BODY_BYTES = 2 * 1024**2
MOST_UNKNOWN_BYTES = 16 * 1024
"""Of somebody who has not logged in."""
TOO_LARGE = {
    MOST_BODY_BYTES: f"the body is larger than {MOST_BODY_BYTES // 1024**2} MiB; `qflow put` takes larger ones",
    MOST_UNKNOWN_BYTES: f"the body is larger than {MOST_UNKNOWN_BYTES // 1024} KiB, and you have not logged in",
}
"""What is said, by what is too large."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_READING = frozenset({"GET", "HEAD"})
_FOR_ALL = ("/login", "/static/", "/favicon.ico")
_SENT_TO = ("/do/", "/login", "/logout")
"""Where forms go: an answer of theirs is a page, too, which nobody can get again."""
_MOST_HEADER = 4096


class AnyJSON(JSONResponse):
    """JSON of any text, as a path that is no UTF-8: half a character is an escape."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode(errors="backslashreplace")


class Guard:
    """See the module. An application of ASGI around another one."""

    def __init__(self, app: ASGIApp, site: Site) -> None:
        self._app = app
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                keep_safe(MutableHeaders(scope=message))
            await send(message)

        refusal = await self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send_guarded)
            return
        await self._app(scope, _counted(receive, _most(scope)), send_guarded)

    async def _refusal(self, scope: Scope) -> Response | None:
        """Return why a request is refused; None if it is not, and `scope["state"]` has whose it is."""
        headers = Headers(scope=scope)
        if _claims(headers) > MOST_BODY_BYTES:
            return _too_large(scope, MOST_BODY_BYTES)
        if not self._site.has_users and not _is_local(headers.get("host", "")):
            return _refused(scope, 421, "ask for this page as http://127.0.0.1 or http://localhost, with the port")
        changes = scope["method"] not in _READING
        if changes and not _is_from_here(headers):
            return _refused(scope, 403, "this was sent by a page of another site, so nothing was done")
        refusal = await self._admit(scope, headers, changes)
        if refusal is None and _claims(headers) > _most(scope):
            return _too_large(scope, _most(scope))
        return refusal

    async def _admit(self, scope: Scope, headers: Headers, changes: bool) -> Response | None:
        """Find out who asks; return where to log in if nobody knows."""
        site, state = self._site, scope.setdefault("state", {})
        state["session"], rights = None, site.anybody()
        is_api = _is_api(scope)
        if rights is None:
            session = site.sessions.find(HTTPConnection(scope).cookies.get(site.cookie, ""))
            rights = None if session is None else site.rights_of(session)
            if rights is not None:
                state["session"] = session
                if is_api and changes and session is not None and not session.matches(headers.get("x-csrf-token", "")):
                    return _refused(scope, 403, "what changes something needs the token of the session: X-CSRF-Token")
            else:
                rights = await self._by_password(scope, headers)
        state["rights"] = rights
        if rights is not None or scope["path"].startswith(_FOR_ALL):
            return None
        if is_api or "text/html" not in headers.get("accept", ""):
            from_browser = "sec-fetch-mode" in headers or "cookie" in headers
            asked = {} if from_browser else {"WWW-Authenticate": 'Basic realm="qflow", charset="UTF-8"'}
            return _refused(scope, 401, "log in: with a name and a password of the users file", asked)
        wanted = scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
        if changes:
            wanted = _page_before(headers)
        undone = "&undone=1" if changes and scope["path"] != "/logout" else ""
        return RedirectResponse(f"/login?next={quote(wanted, safe='')}{undone}", status_code=303)

    async def _by_password(self, scope: Scope, headers: Headers) -> Rights | None:
        kind, _, packed = headers.get("authorization", "").partition(" ")
        if kind.lower() != "basic" or len(packed) > _MOST_HEADER:
            return None
        try:
            name, colon, password = (
                base64.b64decode(packed, validate=True).decode(errors="surrogateescape").partition(":")
            )
        except (binascii.Error, ValueError):
            return None
        user = await self._site.logins.check(name, password, peer_of(scope)) if colon else None
        return None if user is None else Rights(user)


def keep_safe(headers: MutableHeaders) -> None:
    """Give an answer the headers that keep a browser safe; one that nobody has guarded, as of a fault, too."""
    for name, value in _HEADERS.items():
        headers.setdefault(name, value)
    headers.setdefault("Cache-Control", "no-store")


def peer_of(scope: Scope) -> str:
    """Return the IP address of who asks; empty if it is not known."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def session_of(scope: Scope) -> Session | None:
    """Return the session of who asks; None if there is none, as with HTTP Basic."""
    session: Session | None = scope["state"]["session"]
    return session


def _most(scope: Scope) -> int:
    """Return how long a body of who asks may be."""
    return MOST_UNKNOWN_BYTES if scope["state"]["rights"] is None else MOST_BODY_BYTES


def _claims(headers: Headers) -> int:
    length = headers.get("content-length", "0")
    return int(length) if length.isascii() and length.isdecimal() and len(length) < 19 else 0


def _counted(receive: Receive, most: int) -> Receive:
    """Return what receives a body up to a length, and raises what says that it is too large."""
    received = 0

    async def receive_some() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > most:
            raise HTTPException(413, TOO_LARGE[most], {"Connection": "close"})
        return message

    return receive_some


def _is_local(host: str) -> bool:
    """Tell whether a name is one that nobody else can give to this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or is_loopback(name)


def _is_from_here(headers: Headers) -> bool:
    """Tell whether no page of another site has sent a request."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    origin = headers.get("origin")
    if origin is None:
        return True
    try:
        return urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
    except ValueError:
        return False


def _page_before(headers: Headers) -> str:
    """Return the page of this server that a form was sent from, or the first one."""
    try:
        page = urlsplit(headers.get("referer", ""))
    except ValueError:
        return "/"
    if page.netloc.lower() != headers.get("host", "").lower() or page.path.startswith(_SENT_TO):
        return "/"
    return (page.path or "/") + (f"?{page.query}" if page.query else "")


def _is_api(scope: Scope) -> bool:
    return bool(scope["path"].startswith("/api/"))


def _too_large(scope: Scope, most: int) -> Response:
    return _refused(scope, 413, TOO_LARGE[most], {"Connection": "close"})


def _refused(scope: Scope, status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    if _is_api(scope):
        return AnyJSON({"error": why}, status, headers)
    return PlainTextResponse(f"{why}\n", status, headers)
