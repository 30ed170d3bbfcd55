"""What is delivered is settled or given back, whatever becomes of its spans."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

import qflow
import qflow.aio
import qflow.tracing
from qflow.tracing import deliveries, spans


class Failing(SpanProcessor):
    """Notes the spans that end, and fails at one of some name."""

    def __init__(self) -> None:
        self.at, self.error = "", KeyboardInterrupt()
        self.ended: list[str] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span.name)
        if span.name == self.at:
            self.at = ""
            raise self.error


FAILING = Failing()


@pytest.fixture(scope="module", autouse=True)
def provider() -> None:
    """One for the process: a second one is not taken."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())
    trace.get_tracer_provider().add_span_processor(FAILING)


@pytest.fixture
def failing() -> Iterator[Failing]:
    FAILING.ended.clear()
    yield FAILING
    FAILING.at = ""


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("at", ["get jobs", "process jobs", "get_many jobs"])
@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_where_a_span_is_exported_leaves_nothing_held(
    tmp_path: Path, failing: Failing, connected: bool, at: str, fails: bool
) -> None:
    """As an exporter that sends each span at once takes milliseconds: nobody would settle the message any more."""
    with (
        qflow.open(tmp_path / "spool") as owner,
        qflow.connect(owner.path) if connected else owner as broker,
    ):
        owner.declare_queue("jobs").put_many([b"a", b"b"])
        jobs = qflow.tracing.instrument(broker).queue("jobs")
        failing.at = at
        with pytest.raises(KeyboardInterrupt):
            if at == "get_many jobs":
                jobs.get_many(2)
            else:
                with jobs.get():
                    if fails:
                        raise LookupError
        told = jobs.stats()
        assert told.acquired_messages == 0
        assert told.messages == (1 if at == "process jobs" and not fails else 2)


@pytest.mark.parametrize("at", ["get jobs", "process jobs", "get_many jobs"])
@pytest.mark.parametrize("fails", [False, True])
def test_tasks_hold_nothing_after_a_span_that_failed(
    tmp_path: Path, failing: Failing, at: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same."""
    monkeypatch.setattr(failing, "error", RuntimeError("no collector"))

    async def test() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            jobs = await qflow.tracing.instrument(broker).declare_queue("jobs")
            await jobs.put_many([b"a", b"b"])
            failing.at = at
            with pytest.raises(RuntimeError, match="no collector"):
                if at == "get_many jobs":
                    await jobs.get_many(2)
                else:
                    async with await jobs.get():
                        if fails:
                            raise LookupError
            told = await jobs.stats()
            assert told.acquired_messages == 0
            assert told.messages == (1 if at == "process jobs" and not fails else 2)

    asyncio.run(test())


def test_a_block_that_cannot_begin_gives_the_message_back(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not entered is not left."""

    def struck(_delivery: object) -> None:
        raise KeyboardInterrupt

    with qflow.open(tmp_path / "spool") as broker:
        jobs = qflow.tracing.instrument(broker).declare_queue("jobs")
        jobs.put(b"x")
        monkeypatch.setattr(spans, "processing", struck)
        with pytest.raises(KeyboardInterrupt), jobs.get():
            pass
        assert jobs.stats().acquired_messages == 0
        assert len(jobs) == 1


def test_a_block_is_ended_in_another_context_than_it_was_begun_in(tmp_path: Path, failing: Failing) -> None:
    """So frameworks run both ends of a generator in threads; and blocks may end in another order than they began."""
    with qflow.open(tmp_path / "spool") as broker:
        jobs = qflow.tracing.instrument(broker).declare_queue("jobs")
        jobs.put_many([b"a", b"b"])
        first, second = jobs.get(), jobs.get()
        for one in (first, second):
            contextvars.copy_context().run(one.__enter__)
        failing.ended.clear()
        for one in (first, second):
            contextvars.copy_context().run(one.__exit__, None, None, None)
        assert failing.ended == ["process jobs", "ack jobs"] * 2
        assert len(jobs) == 0
        assert not deliveries._blocks


def test_an_error_without_a_text_is_raised_as_it_is(tmp_path: Path, failing: Failing) -> None:
    """Its span says that it failed."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise TypeError("no text")

    with qflow.open(tmp_path / "spool") as broker:
        jobs = qflow.tracing.instrument(broker).declare_queue("jobs")
        jobs.put(b"x")
        with pytest.raises(Mute), jobs.get():
            raise Mute
        assert jobs.stats().acquired_messages == 0
        assert "process jobs" in failing.ended


def test_of_a_large_batch_no_more_deliveries_are_made_than_are_linked_to(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A get and an ack of twenty thousand took twenty times as long as those of a broker that does not trace."""
    made: list[object] = []
    become = deliveries.delivery

    def noting(one: object) -> object:
        made.append(one)
        return become(one)

    with qflow.open(tmp_path / "spool") as broker:
        jobs = qflow.tracing.instrument(broker).declare_queue("jobs")
        jobs.put_many([b"x"] * 2000)
        monkeypatch.setattr(deliveries, "delivery", noting)
        batch = jobs.get_many(2000)
        batch.ack()
        assert len(batch) == 2000
        assert len(made) <= 4 * spans.MOST_LINKS + 8  # twice each, where a slice is made of it
