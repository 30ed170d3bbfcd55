"""Worker processes: a function is called with each message of a queue, in as many processes as are wanted."""

from qflow.workers.coming import broker
from qflow.workers.supervisor import run

__all__ = ["broker", "run"]
