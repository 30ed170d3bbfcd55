"""Streams: publish once, keep, replay what you want of it; and go on where you were, also after a crash.

python examples/streams.py SPOOL
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice

from flights import flights, weather
from usage import spool_of

import qflow

COUNT = 50_000
BATCH = 1_000


def batches(messages: Iterable[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Cut messages into batches."""
    left = iter(messages)
    while batch := list(islice(left, BATCH)):
        yield batch


def departures(count: int) -> Iterator[tuple[str, bytes]]:
    """Yield (topic, body) of flights: `flights/JFK/UA`."""
    for body in flights(count):
        flight = json.loads(body)
        yield f"flights/{flight['origin']}/{flight['carrier']}", body


def observations() -> Iterator[tuple[str, bytes]]:
    """Yield (topic, body) of the weather: `weather/JFK`."""
    for body in weather():
        yield f"weather/{json.loads(body)['origin']}", body


def main(spool: str) -> None:
    with qflow.open(spool) as broker:
        broker.declare_stream("new york", topics=["flights/#", "weather/#"])
        published = 0
        for source in (departures(COUNT), observations()):
            for batch in batches(source):
                published += len(broker.publish_many(batch))  # one commit
        print(f"{published:,} messages published")

        # Any number of readers, each with a filter of its own. Blocks without a match are not read.
        with broker.subscribe("new york", "flights/+/UA", start="earliest", follow=False) as united:
            origins = {delivery.topic for delivery in united}
        print(f"United left from {len(origins)} airports: {sorted(origins)}")

        # With a name, a subscription is kept: it goes on where it was, message by message.
        with broker.subscribe("new york", "weather/JFK", name="storms", start="earliest") as storms:
            half = storms.get_many(4_000)
            half.ack(wait=True)
            print(f"{len(half):,} observations are settled, then the process ends")
            settled = half.offsets[-1]

    with qflow.open(spool) as broker:
        stream = broker.stream("new york")
        with broker.subscribe(stream, "weather/JFK", name="storms", follow=False) as storms:
            rest = list(storms)
        print(f"after it was opened again, {len(rest):,} more came")
        assert rest[0].offset > settled

        # Without a subscription: the last message of each topic, the newest few, a range.
        last = stream.last("weather/+")
        print(
            "the last temperatures:", {topic[8:]: json.loads(one.body)["temp"] for topic, one in sorted(last.items())}
        )
        newest = list(stream.query("flights/JFK/+", newest=3))
        print("the newest flights from JFK:", [json.loads(one.body)["dest"] for one in newest])
        assert len(half) + len(rest) == sum(1 for _ in stream.query("weather/JFK"))


if __name__ == "__main__":
    main(spool_of(__doc__))
