"""Owns a spool until it is killed; publishes numbered messages into stream `plants`, if it is told how many.

    python owner_worker.py SPOOL COUNT

It goes on behind the last number that the stream has, and says `ready`, then `pub NUMBER` for the last of each batch that
is confirmed.
"""

from __future__ import annotations

import sys

import qflow

AT_ONCE = 5


def main(spool: str, count: str) -> None:
    """Publish, then wait for the kill."""
    with qflow.open(spool) as broker:
        print("ready", flush=True)
        if int(count):
            first = sum(broker.stream("plants").stats().next_offsets)
            for start in range(first, first + int(count), AT_ONCE):
                broker.publish_many([(f"plant/{n % 5}", b"%d" % n) for n in range(start, start + AT_ONCE)])
                print("pub", start + AT_ONCE - 1, flush=True)
        sys.stdin.read()


main(*sys.argv[1:])
