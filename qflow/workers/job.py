"""What workers are to do, as the supervisor tells each of them in a line of JSON."""

from __future__ import annotations

import json
import os
from typing import Any

import attrs

from qflow.named_tuples import NamedTuple
from qflow.workers.targets import Target


@attrs.frozen
class Reach:
    """What goes with a URL: files, which each connection reads anew."""

    token_file: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def connect(self, spool: str) -> Any:
        """Use a spool that another process owns, here or at a URL. Raises as `qflow.connect`."""
        import qflow

        return qflow.connect(spool, token_file=self.token_file, ca=self.ca, cert=self.cert, key=self.key)


@attrs.frozen(kw_only=True)
class Job:
    """What all workers of a supervisor do."""

    spool: str
    """Its directory, or a URL."""
    reach: Reach = Reach()
    queue: str
    target: Target
    processes: int
    lease_s: float | None = None
    """How long a message may be held; None = as long as the queue's `ack_timeout_s`, or for ever."""
    retry_delay_s: float = 1.0
    """How long a message waits after its first failure; twice as long after each of the next."""
    sys_path: tuple[str, ...] = ()
    """Where modules are looked for."""


class Order(NamedTuple):
    """What one worker is told."""

    job: Job
    seat: int
    """Its number, from 0."""
    report: int
    """The descriptor it reports to."""
    desk: int
    """The descriptor of the memory that all share."""

    def encode(self) -> bytes:
        """Return it as a line."""
        facts = {"job": attrs.asdict(self.job), "seat": self.seat, "report": self.report, "desk": self.desk}
        return json.dumps(facts).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Order:
        """Return what a line says."""
        facts = json.loads(line)
        job = facts["job"]
        job["target"], job["sys_path"] = Target(*job["target"]), tuple(job["sys_path"])
        job["reach"] = Reach(**job["reach"])
        return cls(Job(**job), facts["seat"], facts["report"], facts["desk"])


READY, REFUSED, AWAY, FAILED = "ready", "refused", "away", "failed"
"""What a worker reports: that it works; why it cannot; that the owner of the spool, or the queue, is gone; and which
message failed, where stderr does not take that."""
_MOST_TEXT = 2000


def report(descriptor: int, kind: str, text: str = "") -> None:
    """Tell the supervisor something; nothing if that is dead."""
    line = json.dumps({"kind": kind, "text": text[:_MOST_TEXT]}).encode() + b"\n"
    try:
        os.write(descriptor, line)
    except BrokenPipeError:
        return
