"""What is answered to those who scrape."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector


class Exposition:
    """Metrics of one collector, in the format that is asked for.

    `/metrics` of a server: the body and the content type for the `Accept` of a request. It takes milliseconds, so a
    server of tasks calls it in a thread.
    """

    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)

    def answer(self, accept: str = "") -> tuple[bytes, str]:
        """Return the body, and its content type: OpenMetrics where the client takes it, else Prometheus's text."""
        encode, content_type = choose_encoder(accept)
        if content_type.startswith("application/openmetrics-text"):
            # Our names have nothing to escape, in which encoders differ; this one takes half the time.
            encode = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
        return encode(self._registry), content_type

    def text(self) -> bytes:
        """Return the text of Prometheus, which textfile collectors read."""
        return generate_latest(self._registry)
