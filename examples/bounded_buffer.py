"""An ingestion buffer: a fast producer, a slow consumer, and memory that stays where it is.

python examples/bounded_buffer.py SPOOL
"""

import json
import threading

from flights import flights
from usage import spool_of

import qflow

COUNT = 2_000
ROUNDS = 10


def main(spool: str) -> None:
    with qflow.open(spool, capacity_bytes="1MiB") as broker:
        # Not durable: nothing is logged, and what does not fit in memory still spills to disk.
        buffer = broker.declare_queue("buffer", durable=False)
        most_resident = most_spilled = 0

        bodies = list(flights(COUNT))

        def produce() -> None:
            for _ in range(ROUNDS):
                for body in bodies:
                    buffer.put(body)

        producer = threading.Thread(target=produce)
        producer.start()
        received = 0
        delay = 0.0
        while received < COUNT * ROUNDS:
            with buffer.get() as delivery:
                flight = json.loads(delivery.body)
                delay += float(flight["dep_delay"].replace("NA", "0"))
                received += 1
            if received % 500 == 0:
                stats = buffer.stats()
                most_resident = max(most_resident, stats.resident_bytes)
                most_spilled = max(most_spilled, stats.spilled_messages)
        producer.join()
        print(f"{received:,} flights, {delay / received:.1f} minutes late on average")
        print(f"at most {most_resident / 2**20:.2f} MiB in memory, {most_spilled:,} flights on disk")
        assert most_resident <= 2**20


if __name__ == "__main__":
    main(spool_of(__doc__))
