"""Two streams joined by Spark while they are published, each row once, though their publisher is killed in the middle.

python examples/spark_flights.py SPOOL [DAYS]

A process publishes the flights and the weather of New York, day by day; 366 days, or the first DAYS. Spark joins
them as they come and writes to SPOOL-hours, as Parquet, what each hour was like at each airport. Half-way the
publisher is killed with SIGKILL, started again, and begins at the first day. In the end, pandas does the same with the
files of the data, and the two are compared. Needs the extras: pip install '.[demo,spark]'
"""

import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from flights import data, flights, weather
from usage import spool_of

import qflow

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

DAYS = 366
PUBLISHING_S = 5.0
"""Publishing takes so long, at least: there is to be something to read meanwhile."""


# The publisher, in a process of its own -----------------------------------------------------------------------------


def messages_by_day(count: int) -> dict[str, list[tuple[str, bytes]]]:
    """Return (topic, body) of flights and weather, by the day (UTC): at least those of the first `count` days."""
    first = 1_100 * (count + 1) if count < 31 else None  # the table begins with January, at most 1,014 flights a day
    days: dict[str, list[tuple[str, bytes]]] = defaultdict(list)
    for kind, bodies in (("weather", weather()), ("flights", flights(first))):
        for body in bodies:
            row = json.loads(body)
            days[row["time_hour"][:10]].append((f"{kind}/{row['origin']}", body))
    return dict(sorted(days.items()))


def publish(spool: str, count: int) -> None:
    """Publish days, each in one commit and under its number: one that is stored already is not stored twice."""
    days = list(messages_by_day(count).items())[:count]
    again = 0
    with qflow.open(spool) as broker:
        for number, (day, messages) in enumerate(days):
            print(day, flush=True)  # whoever reads it may kill this process now
            results = broker.publish_many(messages, producer="new york", number=number)
            again += results[0].duplicate
            if not results[0].duplicate:
                time.sleep(PUBLISHING_S / len(days))
        # An hour is written when no more of it can come: when both streams have gone on for a day.
        tick = json.dumps({"origin": "nowhere", "time_hour": "2014-02-01T00:00:00Z"}).encode()
        broker.publish_many([("weather/tick", tick), ("flights/tick", tick)], producer="new york", number=len(days))
    print(f"{again} of {len(days)} days were there already", flush=True)


def publish_and_kill(spool: str, days: int, query: "StreamingQuery") -> None:
    """Have it published by a process that is killed half-way, and by another one, while a query reads."""
    command = [sys.executable, __file__, spool, str(days), "publish"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as publisher:
        assert publisher.stdout is not None
        for number, line in enumerate(publisher.stdout):
            if number == days // 2:
                publisher.kill()  # perhaps before its commit, perhaps after
                print(f"killed while it published {line.strip()}; Spark has read {progress(query)}")
                break
    assert publisher.returncode == -signal.SIGKILL
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(f"started again: {done.stdout.splitlines()[-1]}; Spark has read {progress(query)}")


def progress(query: "StreamingQuery") -> str:
    """Return how much a query has read."""
    batches = [batch.numInputRows for batch in query.recentProgress if batch.numInputRows]
    return f"{sum(batches):,} messages in {len(batches)} batches"


# Spark --------------------------------------------------------------------------------------------------------------


def rows_of(spark: "SparkSession", spool: str, stream: str, fields: str) -> "DataFrame":
    """Return what a stream says, with the hour as event time: a row is at most a day late, for so it is published."""
    messages = spark.readStream.format("qflow").option("subscribe", stream).option("startingOffsets", "earliest")
    rows = messages.load(spool).selectExpr(f"from_json(cast(value as string), '{fields}') as row").select("row.*")
    return rows.selectExpr("*", "to_timestamp(time_hour) as hour").withWatermark("hour", "1 day")


def hours(spark: "SparkSession", spool: str) -> "DataFrame":
    """Return each hour at each airport with its weather, if that is known: when no more of either can come."""
    from pyspark.sql.functions import expr

    departures = rows_of(spark, spool, "flights", "origin string, time_hour string, dep_delay string")
    observations = rows_of(spark, spool, "weather", "origin string, time_hour string, temp string, wind_speed string")
    observed = observations.selectExpr("origin as place", "hour as observed", "temp", "wind_speed")
    same = (departures.origin == observed.place) & (departures.hour == observed.observed)
    joined = departures.join(observed, same, "left").drop("place", "observed")
    values = ("count(*) as flights", "count(delay) as departed", "sum(delay) as delay", "max(delay) as worst")
    weather_then = ("max(try_cast(temp as double)) as temp", "max(try_cast(wind_speed as double)) as wind")
    return (
        joined.withColumn("delay", expr("try_cast(dep_delay as bigint)"))
        .groupBy("hour", "origin")
        .agg(*map(expr, values + weather_then))
    )


def by_pandas(days: int) -> "pd.DataFrame":
    """Return the same, from the files."""
    import pandas as pd

    measured = ["temp", "wind_speed"]  # first as text: how exactly a number is read depends on the version of pandas
    of_weather = pd.read_csv(data() / "weather.csv", dtype=dict.fromkeys(measured, str))
    tables = [pd.read_csv(data() / "flights.csv.zip"), of_weather.astype(dict.fromkeys(measured, float))]
    taken = sorted({day for table in tables for day in table["time_hour"].str[:10]})[:days]
    departures, observed = (table[table["time_hour"].str[:10].isin(taken)] for table in tables)
    joined = departures.merge(observed, "left", ["origin", "time_hour"])
    joined["hour"] = pd.to_datetime(joined["time_hour"])
    grouped = joined.groupby(["hour", "origin"])
    found = grouped.agg(
        flights=("carrier", "size"),
        departed=("dep_delay", "count"),
        worst=("dep_delay", "max"),
        temp=("temp", "max"),
        wind=("wind_speed", "max"),
    )
    found["delay"] = grouped["dep_delay"].sum(min_count=1)  # where nobody departed: not known, as in SQL
    return found.reset_index()


def main(spool: str, days: int) -> None:
    from qflow.spark import session

    data()  # it is looked for before Spark starts
    with qflow.open(spool) as broker:
        for name in ("flights", "weather"):
            broker.declare_stream(name, topics=[f"{name}/#"])
    spark = session("flights", master="local[2]")
    out = f"{spool}-hours"
    writer = hours(spark, spool).writeStream.format("parquet").outputMode("append")
    query = writer.option("checkpointLocation", f"{spool}-checkpoint").start(out)
    query.processAllAvailable()  # nothing yet: the first batch takes Spark longest
    publish_and_kill(spool, days, query)
    query.processAllAvailable()
    print(f"in the end, Spark has read {progress(query)}")
    query.stop()

    found = spark.read.parquet(out).toArrow().to_pandas()  # by Spark, which knows which files count
    expected = by_pandas(days)
    both = found.merge(expected, "outer", [*expected], indicator="whose")
    different = both[both["whose"] != "both"]
    print(both.loc[both["temp"].notna()].nlargest(3, "delay").drop(columns="whose").to_string(index=False))
    print(f"{len(found):,} hours by Spark, {len(expected):,} by pandas, of {expected['flights'].sum():,} flights")
    print(f"{len(different)} of them differ")
    assert different.empty, different


if __name__ == "__main__":
    arguments = sys.argv[2:]
    spool, days = spool_of(__doc__), int(arguments[0]) if arguments else DAYS
    if arguments[1:] == ["publish"]:
        publish(spool, days)
    else:
        main(spool, days)
