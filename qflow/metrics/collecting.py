"""A collector of prometheus-client: what one spool tells, as families of metrics."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    Sample,
)
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from qflow import __version__
from qflow.errors import InvalidArgument, QflowError
from qflow.memory.waiting import sheltered
from qflow.metrics.names import (
    BROKER,
    COUNTS,
    DISK,
    INBOX,
    LABELS,
    OTHER,
    PREFIX,
    QUEUE,
    STREAM,
    SUBSCRIPTION,
    TIMES,
    UNDER_WAY,
    Figure,
    listed,
)
from qflow.metrics.naming import Divided, Labels, Naming, Subscriber, Told, label_of
from qflow.metrics.sources import Source
from qflow.stats import TIME_BOUNDS_S
from qflow.storage.log.directory import DATA, LOG

MOST_NAMED = 10_000
_BOUNDS = [*map(floatToGoString, TIME_BOUNDS_S), "+Inf"]


class SpoolCollector(Collector):
    """See the module. `collect` may be called by several threads."""

    def __init__(self, source: Source, *, named: int, strict: bool = False) -> None:
        """`strict`: what the source raises is raised, rather than told as `qflow_up 0`."""
        if isinstance(named, bool) or not isinstance(named, int) or not 0 <= named <= MOST_NAMED:
            raise InvalidArgument(f"named must be a number from 0 to {MOST_NAMED:,}, not {named!r}")
        self._source = source
        self._strict = strict
        self._queues: Naming[str] = Naming(QUEUE, named)
        self._streams: Naming[str] = Naming(STREAM, named)
        self._subscriptions: Naming[Subscriber] = Naming(SUBSCRIPTION, named)
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """Return what there may be, without asking the spool: a registry takes each name from one collector only."""
        return [Metric(one.name.removesuffix("_total"), one.text, one.type) for one in listed()]

    def collect(self) -> Iterator[Metric]:
        """Return the families of all metrics."""
        told: Told | None = None
        try:
            told = self._source.look()
        except QflowError as error:
            if self._strict or isinstance(error, InvalidArgument):
                raise
        has_owner = told is not None and told.has_owner
        yield GaugeMetricFamily(f"{PREFIX}up", "1 if the spool has an owner that answers.", has_owner)
        yield InfoMetricFamily(f"{PREFIX}build", "Which qflow tells this.", {"version": __version__})
        yield from _disk(self._source.where())
        if told is not None:
            yield from self._families(told)

    def _families(self, told: Told) -> Iterator[Metric]:
        for figures, row in ((BROKER, told.broker), (INBOX, told.inbox)):
            yield from _of_rows(figures, (), Divided({(): row}, None, 0))
        for name, (field, text) in TIMES.items():
            if field in told.times:
                yield _histogram(name, text, told.times[field])
        for name, (field, text) in UNDER_WAY.items():
            if "under_way_s" in told.times.get(field, {}):
                yield GaugeMetricFamily(PREFIX + name, text, told.times[field]["under_way_s"])
        queues, streams, subscriptions = told.queues, told.streams, told.subscriptions
        of_queues, of_streams, of_subscriptions = self._divide(told)
        pairs = (queues, of_queues), (streams, of_streams), (subscriptions, of_subscriptions)
        counts = [count for all_of_them, divided in pairs for count in (len(all_of_them), divided.summed)]
        for (name, text), count in zip(COUNTS.items(), counts, strict=True):
            yield GaugeMetricFamily(PREFIX + name, text, count)
        for figures, divided in ((QUEUE, of_queues), (STREAM, of_streams), (SUBSCRIPTION, of_subscriptions)):
            yield from _of_rows(figures, LABELS[figures], divided)

    @sheltered  # a signal handler may collect, too
    def _divide(self, told: Told) -> tuple[Divided, Divided, Divided]:
        with self._lock:
            return (
                self._queues.divide(told.queues, _labels(told.queues)),
                self._streams.divide(told.streams, _labels(told.streams)),
                self._subscriptions.divide(told.subscriptions, _subscriber_labels(told.subscriptions)),
            )


def _labels(told: Iterable[str]) -> list[tuple[str, Labels]]:
    return [(name, (label_of(name),)) for name in sorted(told)]


def _subscriber_labels(told: Iterable[Subscriber]) -> Iterator[tuple[Subscriber, Labels | None]]:
    for key in sorted(told, key=lambda key: (key[0], key[1] or "", key[2])):
        stream, name, _ = key
        yield key, None if name is None else (label_of(stream), label_of(name))


def _of_rows(figures: Sequence[Figure], labels: Sequence[str], divided: Divided) -> Iterator[Metric]:
    """Yield a family for each figure that somebody has."""
    rows = [(dict(zip(labels, own, strict=True)), row) for own, row in divided.named.items()]
    if divided.together is not None:
        rows.append((dict.fromkeys(labels, OTHER), divided.together))
    for place, figure in enumerate(figures):
        family = Metric(PREFIX + figure.name, figure.text, figure.kind)
        sample = family.name + "_total" * (figure.kind == "counter")
        family.samples = [Sample(sample, own, row[place]) for own, row in rows if row[place] is not None]
        if family.samples:
            yield family


def _histogram(name: str, text: str, times: Mapping[str, Any]) -> Metric:
    buckets, total = [], 0
    for bound, count in zip(_BOUNDS, times["counts"], strict=False):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=times["sum_s"])


def _disk(path: str) -> Iterator[Metric]:
    """Yield what the spool's disk has, as far as this process may see it."""
    try:
        disk = os.statvfs(path)
        length = os.stat(os.path.join(path, LOG, DATA)).st_size
    except OSError:
        return
    values = length, disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    for (name, text), value in zip(DISK.items(), values, strict=True):
        yield GaugeMetricFamily(PREFIX + name, text, value)


def understood(accept: str) -> str:
    """Return an `Accept` of a request; nothing in place of one that prometheus-client cannot read."""
    try:
        choose_encoder(accept)
    except (TypeError, ValueError):
        return ""
    return accept


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
        encode, content_type = choose_encoder(understood(accept))
        if content_type.startswith("application/openmetrics-text"):
            # Our names have nothing to escape, in which encoders differ; this one takes half the time.
            encode = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
        return encode(self._registry), content_type

    def text(self) -> bytes:
        """Return the text of Prometheus, which textfile collectors read."""
        return generate_latest(self._registry)
