"""How much memory a stream takes that holds ten gibibytes and has a hundred subscribers, who all lag.

A whole process, sampled while it publishes, while they read here and there and hold what they got, and while both go
on at once. Figures are *RssAnon* over that of a bare interpreter, as in `bench.memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from time import perf_counter
from typing import Any

import qflow
from bench import cgroup, children, sampler
from bench.measure import Row, Series, Setup, Workload, at_most
from bench.streams import BATCH, batch_of, opened, topic_of

MIB = 2**20
ALLOWED = 64 * MIB
LIMIT = 256 * MIB
TOPICS = 8


# In the parent -----------------------------------------------------------------------------------------------------


def lagging(setup: Setup) -> Iterator[Row]:
    count, size = setup.size(10 * 2**20, 20_000), 1024
    capacity, subscribers = setup.size(64, 4) * MIB, setup.size(100, 10)
    setup.need_disk(count * size * 14 // 10)
    bare = children.bare_interpreter_bytes()
    with ExitStack() as stack:
        path = stack.enter_context(setup.scratch())
        group, note = (None, "") if setup.quick else cgroup.limited_if_can(stack, LIMIT)
        found = children.run("lagging", path, count, size, capacity, subscribers, group=group)
    retained = f"{count * size / MIB:,.0f} MiB retained"
    yield Row(
        name=f"{retained}, {subscribers} lagging subscribers: peak RssAnon over a bare interpreter",
        figure=Series("peak RssAnon over a bare interpreter", "MiB", [(found["peak_anonymous"] - bare) / MIB]),
        bound=at_most((capacity + ALLOWED) / MIB, "MiB"),
        details=[
            Series("peak RssAnon", "MiB", [found["peak_anonymous"] / MIB]),
            *(
                Series(f"of that over a bare interpreter, {when}", "MiB", [(value - bare) / MIB])
                for when, value in found["marks"].items()
            ),
            Series("peak RssFile", "MiB", [found["peak_file"] / MIB]),
            *([Series("peak charge of the cgroup", "MiB", [found["peak_cgroup"] / MIB])] if group else []),
            Series("published", "/s", [count / found["fill_s"]]),
            Series("read by the lagging ones", "/s", [found["read"] / found["read_s"]]),
        ],
        notes=[
            f"{count:,} x {size:,} B of {TOPICS} topics through {capacity / MIB:.0f} MiB; each third subscriber is",
            "durable, each second one wants one topic; each holds the batch it got last, up to 1,000 messages",
            *filter(None, [note]),
        ],
    )


WORKLOADS = [
    Workload("stream-memory", "ten gibibytes retained, 100 subscribers that lag, in a cgroup of 256 MiB", lagging)
]


# In a child --------------------------------------------------------------------------------------------------------


def _lagging(path: str, count_text: str, size_text: str, capacity: str, subscribers_text: str) -> None:
    count, size, subscribers = int(count_text), int(size_text), int(subscribers_text)
    marks: dict[str, int] = {}

    def publish(broker: qflow.Broker, messages: int) -> None:
        for _ in range(0, messages, BATCH):
            broker.publish_many(batch_of(lambda number: topic_of(number % TOPICS), size))

    with ExitStack() as stack:
        broker, stream = stack.enter_context(opened(Path(path) / "spool", capacity_bytes=int(capacity)))
        watched = sampler.Sampler(lambda: stream.stats().bytes, children.joined_group())
        with watched.running():
            marks["after the import and open"] = children.memory_now()[0]
            start = perf_counter()
            publish(broker, count)
            filled = perf_counter()
            marks["when it was filled"] = children.memory_now()[0]
            held = [_subscribed(stack, broker, stream, number, subscribers, count) for number in range(subscribers)]
            marks["with all subscribers"] = children.memory_now()[0]
            began = perf_counter()
            read = _read(held, rounds=8)
            took = perf_counter() - began
            marks["when they had read"] = children.memory_now()[0]
            for _ in range(10):  # now publishing goes on as well
                publish(broker, 10 * BATCH)
                read += _read(held, rounds=1)
            marks["when both went on"] = children.memory_now()[0]
    children.report({**watched.curves(), "marks": marks, "fill_s": filled - start, "read_s": took, "read": read})


def _subscribed(
    stack: ExitStack, broker: qflow.Broker, stream: Any, number: int, subscribers: int, count: int
) -> list[Any]:
    """Return a subscription that begins somewhere in the stream, and place for what it holds."""
    topic_filter = topic_of(number % TOPICS) if number % 2 else "#"
    name = None if number % 3 else f"reader-{number}"
    subscription = broker.subscribe(stream, topic_filter, name=name, start=count * number // subscribers)
    return [stack.enter_context(closing(subscription)), None, number]


def _read(held: list[list[Any]], rounds: int) -> int:
    """Let each subscriber settle what it holds and take more, in turns; return how many messages came."""
    taken = 0
    for turn in range(rounds):
        for place in held:
            subscription, batch, number = place
            if batch:
                batch.ack()
            most = 1 if (number + turn) % 10 == 0 else BATCH
            place[1] = batch = subscription.get_many(most, timeout_s=0)
            taken += len(batch.bodies)
    return taken


ROLES: dict[str, Callable[..., None]] = {"lagging": _lagging}
