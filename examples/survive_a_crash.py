"""Kill -9 and go on: a worker dies in the middle of its work, the next one takes over where it stood.

python examples/survive_a_crash.py SPOOL
"""

import os
import signal
import subprocess
import sys

from flights import flights
from usage import spool_of

import qflow


def work_and_die(spool: str) -> None:
    """Put 1,000 flights, ack 400 of them for certain, hold 100 more, and be killed."""
    broker = qflow.open(spool)
    queue = broker.declare_queue("flights")
    queue.put_many(flights(1_000))
    queue.get_many(400).ack(wait=True)
    queue.get_many(100)
    os.kill(os.getpid(), signal.SIGKILL)


def main(spool: str) -> None:
    worker = subprocess.run([sys.executable, __file__, spool, "die"], check=False)
    print("the worker ended with", worker.returncode)
    with qflow.open(spool) as broker:
        found = broker.recovery
        print(f"recovered {found.messages} messages, {found.bytes} bytes; closed properly: {found.clean}")
        queue = broker.queue("flights")
        first = queue.get()
        print(f"first is {first.sequence}, redelivered: {first.redelivered}")
        first.nack()
        received = 0
        while batch := queue.get_many(250, timeout_s=0):
            received += len(batch)
            batch.ack()
        print(f"received the {received} that were not acked")
        assert (received, first.sequence) == (600, 400)


if __name__ == "__main__":
    if sys.argv[2:] == ["die"]:
        work_and_die(sys.argv[1])
    else:
        main(spool_of(__doc__))
