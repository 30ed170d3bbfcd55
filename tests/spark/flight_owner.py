"""Owns a spool with a door for Arrow Flight, until it is killed; publishes numbered messages, if it is told how many.

    python flight_owner.py SPOOL HOST PORT COUNT TOKENS PEM

The door has TLS, by `server.pem` and `server.key` in PEM, and asks for a token of the file TOKENS.
It goes on behind the last number of stream `plants`, whose bodies are the spool's name and a number, and says `ready`,
then `pub NUMBER` for the last of each batch that is confirmed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import qflow
from qflow.flight import serve
from qflow.serving.certificates import Certificates

AT_ONCE = 5


def main(spool: str, host: str, port: str, count: str, tokens: str, pem: str) -> None:
    """Publish, then wait for the kill."""
    name = Path(spool).name
    certificates = Certificates(Path(pem) / "server.pem", Path(pem) / "server.key")
    with (
        qflow.open(spool) as broker,
        serve(broker, host=host, port=int(port), certificates=certificates, token_file=Path(tokens)),
    ):
        print("ready", flush=True)
        first = sum(broker.stream("plants").stats().next_offsets)
        for start in range(first, first + int(count), AT_ONCE):
            numbers = range(start, start + AT_ONCE)
            broker.publish_many([(f"plant/{n % 5}", f"{name} {n}".encode(), f"{n % 50}") for n in numbers])
            print("pub", start + AT_ONCE - 1, flush=True)
        sys.stdin.read()


main(*sys.argv[1:])
