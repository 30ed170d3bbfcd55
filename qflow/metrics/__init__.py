"""What a broker counts, as metrics for Prometheus; needs the extra `metrics`.

import prometheus_client
import qflow.metrics

prometheus_client.REGISTRY.register(qflow.metrics.collector(broker))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qflow.serving.extras import load

if TYPE_CHECKING:
    from qflow.aio import AsyncBroker
    from qflow.broker import Broker
    from qflow.metrics.collecting import SpoolCollector
    from qflow.remote.client.broker import RemoteBroker
    from qflow.remote.client.task_broker import AsyncRemoteBroker

__all__ = ["NAMED", "collector"]

NAMED = 100
"""As many queues have series of their own, and as many subscriptions; the others are summed as `other`."""


def collector(broker: Broker | RemoteBroker | AsyncBroker | AsyncRemoteBroker, *, named: int = NAMED) -> SpoolCollector:
    """Return a collector of prometheus-client for a broker, to be registered where a program has its own exporter.

    A queue keeps its series as long as it exists; those that come when so many are named are summed as `other`, and
    counters of that never fall. Once the broker is closed, or has failed, all that is left is `qflow_up 0`; so it is
    while the owner of one that is connected does not answer within 10 s.

    Args:
        broker: of threads or of tasks, here or connected. One that is connected in an event loop is asked there, so it
            is to be collected in another thread, as exporters do.
        named: as many queues, and subscriptions, have series of their own.

    Raises:
        NotFound: prometheus-client is not installed.
        InvalidArgument: `named` is no number from 0 to 10,000.
    Cost: see `docs/howto/metrics.md`; a put meanwhile waits for nothing but the interpreter's lock.
    """
    module = load("qflow.metrics.collecting", needs="prometheus_client", what="qflow.metrics")
    sources = load("qflow.metrics.sources", needs="prometheus_client", what="qflow.metrics")
    made: SpoolCollector = module.SpoolCollector(sources.source_of(broker), named=named)
    return made
