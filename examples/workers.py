"""Worker processes: a function of this file is called with each message; what fails says why.

python examples/workers.py SPOOL
"""

import json
import threading
import time
from collections import Counter

from flights import flights
from usage import spool_of

import qflow
import qflow.workers

COUNT = 2_000
MOST_DELIVERIES = 2


def check(delivery: qflow.Delivery) -> None:
    """Called in the worker processes: a flight that never left has no departure time, and fails."""
    flight = json.loads(delivery.body)
    late = int(flight["dep_delay"])
    if late > 300:
        delivery.nack(requeue=False, reason=f"{late} minutes late: ask the airline")


def main(spool: str) -> None:
    with qflow.open(spool) as broker:
        jobs = broker.declare_queue("flights", max_deliveries=MOST_DELIVERIES, dead_letter="flights, dead")
        jobs.put_many(flights(COUNT))

        done = threading.Event()

        def watch() -> None:
            while len(jobs):
                time.sleep(0.05)
            done.set()

        threading.Thread(target=watch).start()
        begun = time.perf_counter()
        qflow.workers.run(spool, "flights", check, processes=2, retry_delay_s=0.1, stop=done)
        print(f"2 processes had {COUNT:,} flights for {time.perf_counter() - begun:.1f} s")

        letters = broker.queue("flights, dead").get_many(COUNT)
        reasons = Counter(str(letter.headers["dead_letter_nack_reason"]) for letter in letters)
        for reason, count in reasons.most_common():
            print(f"{count:4} x {reason}")
        assert sum(count for reason, count in reasons.items() if reason.startswith("ValueError: invalid literal")) > 0
        assert len(letters) < COUNT
        letters.ack()


if __name__ == "__main__":
    main(spool_of(__doc__))
