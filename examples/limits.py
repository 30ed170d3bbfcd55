"""Capacity bounds memory, a limit bounds depth: what a full queue does is the queue's choice.

python examples/limits.py SPOOL
"""

from flights import flights
from usage import spool_of

import qflow


def main(spool: str) -> None:
    with qflow.open(spool) as broker:
        rejecting = broker.declare_queue("rejecting", limit_messages=100, on_overflow=qflow.Overflow.REJECT)
        blocking = broker.declare_queue("blocking", limit_messages=100, on_overflow=qflow.Overflow.BLOCK)
        refused = 0
        for body in flights(150):
            try:
                rejecting.put(body)
            except qflow.QueueFull:
                refused += 1
        blocking.put_many(flights(100))
        try:
            blocking.put(b"one more", timeout_s=0.1)
        except qflow.QueueFull as error:
            print(error)
        blocking.get().ack()
        blocking.put(b"now there is room")
        print(f"refused {refused} of 150; {len(rejecting)} and {len(blocking)} wait")
        assert (refused, len(rejecting), len(blocking)) == (50, 100, 100)


if __name__ == "__main__":
    main(spool_of(__doc__))
