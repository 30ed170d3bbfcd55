"""The application: pages, the API, what is static, and routes of others, behind the guard.

Routes that others add are handed to `application`, or to `qflow.web.serve`. They pass the guard like all others: with
users, only who has logged in or comes with HTTP Basic gets there. A handler finds the broker in
`request.app.state.site.broker`, and what may be seen in `request.state.rights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from qflow.aio.broker import at_a_glance
from qflow.errors import (
    BrokerClosed,
    DiskFull,
    InvalidArgument,
    MessageTooLarge,
    NotFound,
    QflowError,
    QueueDeleted,
    QueueFull,
    SettingsConflict,
    StorageError,
    StreamDeleted,
)
from qflow.metrics import collector
from qflow.serving.extras import load
from qflow.web import api, forms, pages
from qflow.web.actions import Changed, WouldDrop
from qflow.web.guard import AnyJSON, Guard, keep_safe
from qflow.web.rights import Forbidden, Rights
from qflow.web.site import Site

_STATUS: Sequence[tuple[type[QflowError], int]] = (
    (InvalidArgument, 400),
    (Forbidden, 403),
    (NotFound, 404),
    (QueueDeleted, 404),
    (StreamDeleted, 404),
    (SettingsConflict, 409),
    (Changed, 409),
    (WouldDrop, 409),
    (MessageTooLarge, 413),
    (QueueFull, 503),
    (DiskFull, 503),
    (BrokerClosed, 503),
    (StorageError, 503),
)


class _Static(StaticFiles):
    """Files that change with the version alone."""

    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        response.headers["Cache-Control"] = "public, max-age=3600"
        return response


def application(site: Site, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """Return the application of a door, with routes of others before those of its own."""
    metrics = Route("/metrics", _metrics, methods=["GET"])
    static = Mount("/static", _Static(directory=Path(__file__).parent / "static"), name="static")
    app = Starlette(
        routes=[*routes, *api.routes(), *pages.routes(), *forms.routes(), metrics, static],
        middleware=[Middleware(Guard, site=site)],
        exception_handlers={QflowError: _refused, HTTPException: _failed, ClientDisconnect: _gone, Exception: _broken},
    )
    app.state.site = site
    return app


async def _metrics(request: Request) -> Response:
    """Answer a scrape of Prometheus, which takes milliseconds, in a thread. With users, it comes with HTTP Basic.

    Raises:
        Forbidden: not to an administrator, nor to a user with the tag `monitoring`.
        NotFound: prometheus-client is not installed.
    """
    rights: Rights = request.state.rights
    if not rights.sees_everybody:
        raise Forbidden("metrics tell of all queues: they are for administrators and for the tag 'monitoring'")
    state = request.app.state
    broker = state.site.broker

    def answer() -> tuple[bytes, str]:
        if not hasattr(state, "metrics"):  # one for all scrapes: it knows which queues have series of their own
            collecting: Any = load("qflow.metrics.collecting", needs="prometheus_client", what="/metrics")
            state.metrics = collecting.Exposition(collector(broker))
        answered: tuple[bytes, str] = state.metrics.answer(request.headers.get("accept", ""))
        return answered

    body, content_type = await at_a_glance(broker, answer)
    return Response(body, headers={"Content-Type": content_type})


async def _refused(request: Request, error: Exception) -> Response:
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    return await _told(request, status, str(error))


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = await _told(request, error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response


async def _gone(_request: Request, _error: Exception) -> Response:
    """The client went before it had said all; nobody reads this."""
    return Response(status_code=400)


async def _broken(request: Request, _error: Exception) -> Response:
    """The server's own fault, which its log has with all that led to it."""
    response = await _told(request, 500, "a fault of the server; its log says more")
    keep_safe(response.headers)  # it goes past the guard
    return response


async def _told(request: Request, status: int, sentence: str) -> Response:
    if request.url.path.startswith("/api/"):
        return AnyJSON({"error": sentence}, status)
    return pages.error_page(request, status, sentence)
