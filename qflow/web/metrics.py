"""`/metrics` at the page's own address. It lies behind the guard: with users, Prometheus comes with HTTP Basic."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qflow.aio.broker import in_thread
from qflow.metrics import collector
from qflow.serving.extras import load
from qflow.web.rights import Forbidden, Rights


async def _metrics(request: Request) -> Response:
    """Answer a scrape, which takes milliseconds, in a thread.

    Raises:
        Forbidden: not to an administrator, nor to a user with the tag `monitoring`.
        NotFound: prometheus-client is not installed.
    """
    rights: Rights = request.state.rights
    if not rights.sees_everybody:
        raise Forbidden("metrics tell of all queues: they are for administrators and for the tag 'monitoring'")
    state = request.app.state
    broker = state.site.broker
    if not hasattr(state, "metrics"):  # one for all scrapes: it knows which queues have series of their own
        exposing: Any = load("qflow.metrics.exposing", needs="prometheus_client", what="/metrics")
        state.metrics = exposing.Exposition(collector(broker))
    body, content_type = await in_thread(broker, lambda: state.metrics.answer(request.headers.get("accept", "")))
    return Response(body, headers={"Content-Type": content_type})


def routes() -> list[Route]:
    """Return the route of metrics."""
    return [Route("/metrics", _metrics, methods=["GET"])]
