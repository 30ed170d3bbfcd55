"""A durable work queue: each message is confirmed when put, and gone only when it was acked.

python examples/work_queue.py SPOOL
"""

import json
from collections import Counter

from flights import flights
from usage import spool_of

import qflow


def main(spool: str) -> None:
    with qflow.open(spool) as broker:
        jobs = broker.declare_queue("flights")
        jobs.put_many(flights(5_000))  # one commit: all of them, or none

        carriers: Counter[str] = Counter()
        while batch := jobs.get_many(1_000, timeout_s=0):
            carriers.update(json.loads(body)["carrier"] for body in batch.bodies)
            batch.ack()  # rides the next commit; ack(wait=True) would wait for it

        try:
            with jobs.get_nowait():
                raise AssertionError("the queue should be empty")
        except qflow.QueueEmpty:
            print("flights by carrier:", carriers.most_common(3))


if __name__ == "__main__":
    main(spool_of(__doc__))
