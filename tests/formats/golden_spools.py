"""Makes the spool that `golden` keeps of each format: `python tests/formats/golden_spools.py DIRECTORY`, with that qflow.

It uses what every format has had: queues with lanes, delays, limits and settings, headers, acks in order and not, a
spilled tail, streams with subscriptions. The owner is killed, so that the journal or the log is read again as after a
crash. What is to be found stands in `FOUND`, in the order of delivery.
"""

from __future__ import annotations

import os
import signal
import sys
import tarfile
from pathlib import Path

FOUND = {
    "plain": [b"plain %d" % number for number in range(20) if number not in (0, 1, 2, 7, 11)],
    "lanes": [b"urgent", b"late", b"normal"],
    "letters": [b"expired"],
    "empty": [],
}
BIG = b"\x00\xff" * 4096
LARGE = b"0123456789" * 950_000
"""Since format 7, in which it lies in pieces, in the queue `large`."""
PUBLISHED = [(f"plant/{number % 3}/heat", b"%d degrees" % number) for number in range(12)]
SETTLED = 5
"""Of those, by the subscription `panel`."""


def fill(path: str) -> None:
    """Make a spool, and die."""
    import qflow

    broker = qflow.open(path, capacity_bytes="1MiB")
    plain = broker.declare_queue("plain", limit_messages=100)
    plain.put_many(b"plain %d" % number for number in range(20))
    held = [plain.get() for _ in range(12)]
    for number in (0, 1, 2, 7, 11):
        held[number].ack(wait=True)
    letters = broker.declare_queue("letters")
    letters.put(b"expired", headers={"dead_letter_reason": "expired", "dead_letter_queue": "lanes", "number": 3})
    lanes = broker.declare_queue("lanes", priorities=3, dead_letter="letters", max_deliveries=4)
    lanes.put(b"normal")
    lanes.put(b"urgent", priority=2, headers={"name": "Ä", "ratio": 0.5, "sure": True, "none": None})
    lanes.put(b"late", delay_s=0.001)
    broker.declare_queue("empty", ttl_s=60)
    broker.declare_queue("big").put(BIG)
    broker.declare_queue("large").put(LARGE)
    broker.declare_queue("transient", durable=False).put(b"gone after a crash")
    broker.declare_stream("plant", topics=["plant/#"])
    with broker.subscribe("plant", name="panel", start="earliest") as panel:
        for topic, body in PUBLISHED:
            broker.publish(topic, body)
        for _ in range(SETTLED):
            panel.get().ack(wait=True)
    os.kill(os.getpid(), signal.SIGKILL)


def pack(path: Path, archive: Path) -> None:
    """Keep a spool, without its socket and what is written anew each second."""
    with tarfile.open(archive, "w:xz") as tar:
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.name != "stats.json":
                tar.add(file, file.relative_to(path))


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    child = os.fork()
    if not child:
        fill(str(directory / "spool"))
    os.waitpid(child, 0)
    pack(directory / "spool", directory / "golden.tar.xz")
