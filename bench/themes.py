"""All workloads, by theme, in the order in which they run."""

from __future__ import annotations

from bench import (
    acks,
    aging,
    asyncio_rows,
    attribution,
    broker_features,
    delayed,
    durable,
    family,
    hot_path,
    journaling,
    latency,
    memory,
    memory_shapes,
    oscillation,
    overhead,
    pressure,
    promises,
    reading,
    restart,
    satellite,
    scale,
    spark,
    spark_triggers,
    spark_writing,
    spill,
    stores,
    stream_memory,
    stream_retention,
    stream_topics,
    streams,
    threads,
)
from bench.measure import Workload

THEMES: dict[str, list[Workload]] = {
    "hot_path": hot_path.WORKLOADS,
    "durable": [*durable.WORKLOADS, *journaling.WORKLOADS, *acks.WORKLOADS, *threads.WORKLOADS],
    "spill": [*spill.WORKLOADS, *stores.WORKLOADS, *satellite.WORKLOADS, *oscillation.WORKLOADS],
    "memory": [
        *memory.WORKLOADS,
        *memory_shapes.WORKLOADS,
        *overhead.WORKLOADS,
        *pressure.WORKLOADS,
        *attribution.WORKLOADS,
    ],
    "asyncio": asyncio_rows.WORKLOADS,
    "restart": restart.WORKLOADS,
    "aging": aging.WORKLOADS,
    "scale": scale.WORKLOADS,
    "broker": [*broker_features.WORKLOADS, *delayed.WORKLOADS, *reading.WORKLOADS],
    "streams": [
        *streams.WORKLOADS,
        *stream_topics.WORKLOADS,
        *stream_retention.WORKLOADS,
        *stream_memory.WORKLOADS,
    ],
    "spark": [*spark.WORKLOADS, *spark_triggers.WORKLOADS, *spark_writing.WORKLOADS],
    "engines": [*promises.WORKLOADS, *family.WORKLOADS, *latency.WORKLOADS],
}
