"""A work queue with retries: what may work later is tried again, what never will becomes a dead letter.

python examples/retries.py SPOOL
"""

import json
from collections import Counter

from flights import flights
from usage import spool_of

import qflow

COUNT = 2_000
MOST_DELIVERIES = 3
FIRST_DELAY_S = 0.01


class Registry:
    """Says who flies a plane. The first question about one times out; the answer is there for the next."""

    def __init__(self) -> None:
        self._asked: set[str] = set()
        self.reaches_hawaii = False

    def owner(self, flight: dict[str, str]) -> str:
        plane, carrier = flight["tailnum"], flight["carrier"]
        known = plane in self._asked
        self._asked.add(plane)
        if not known or (carrier == "HA" and not self.reaches_hawaii):
            raise TimeoutError(f"no answer about {plane}")
        return carrier


def minutes_late(flight: dict[str, str]) -> int:
    """Raises ValueError for a flight that never left: it has no departure time."""
    return int(flight["dep_delay"])


def work(jobs: qflow.Queue, registry: Registry) -> Counter[str]:
    """Take flights until none is left, not even one that waits for another try. Return how often what happened."""
    happened: Counter[str] = Counter()
    while len(jobs):
        for delivery in jobs.get_many(100, timeout_s=1):  # waits for the next that is due, and not longer
            flight = json.loads(delivery.body)
            try:
                late = minutes_late(flight)
                owner = registry.owner(flight)
            except ValueError:
                delivery.nack(requeue=False)  # no try will ever help
                happened["rejected"] += 1
            except TimeoutError:  # the next try comes later, and the one after that later still
                delivery.nack(delay_s=FIRST_DELAY_S * 2 ** (delivery.delivery_count - 1))
                happened["timed out"] += 1
            else:
                happened[f"done at delivery {delivery.delivery_count}"] += 1
                happened["late"] += late > 0 and owner != ""
                delivery.ack()
    return happened


def main(spool: str) -> None:
    with qflow.open(spool) as broker:
        jobs = broker.declare_queue("flights", max_deliveries=MOST_DELIVERIES, dead_letter="flights, dead")
        jobs.put_many(flights(COUNT))
        registry = Registry()
        happened = work(jobs, registry)
        done = happened["done at delivery 1"] + happened["done at delivery 2"]
        print(f"{done:,} of {COUNT:,} flights are done, {happened['late']} left late; in detail: {dict(happened)}")

        # What is dead says why. Read it in a batch, keep what may be tried again, ack the rest.
        dead = broker.queue("flights, dead")
        print(f"{len(dead)} are dead letters:")
        again = []
        reasons: Counter[str] = Counter()
        for letter in dead.get_many(COUNT):
            flight, why = json.loads(letter.body), letter.headers
            reasons[str(why["dead_letter_reason"])] += 1
            if reasons[str(why["dead_letter_reason"])] == 1:
                print(
                    f"  {flight['carrier']} {flight['flight']} to {flight['dest']}, departure {flight['dep_time']}: "
                    f"{why['dead_letter_reason']} after {why['dead_letter_deliveries']} deliveries "
                    f"as message {why['dead_letter_sequence']} of {why['dead_letter_queue']!r}"
                )
            if why["dead_letter_reason"] == "rejected":
                letter.ack()
            else:
                again.append(letter)
        print(f"  in all: {dict(reasons)}")
        assert reasons["rejected"] == happened["rejected"] > 0
        assert reasons["max_deliveries"] == len(again) > 0
        assert done + sum(reasons.values()) == COUNT
        assert happened["done at delivery 2"] > 0

        # The cause is gone: move them back. One commit, so a crash leaves them in one queue or in the other.
        registry.reaches_hawaii = True
        with broker.transaction() as tx:
            for letter in again:
                tx.put(str(letter.headers["dead_letter_queue"]), letter.body)
            tx.ack_many(again)
        happened = work(jobs, registry)
        print(f"after the registry answered: {dict(happened)}")
        assert happened["done at delivery 1"] == len(again)
        assert (len(jobs), len(dead)) == (0, 0)


if __name__ == "__main__":
    main(spool_of(__doc__))
