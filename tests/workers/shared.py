"""What tests of workers have in common."""

from __future__ import annotations

import os

from qflow.workers.desk import Desk, Slot, make_descriptor


def slots(workers: int) -> list[Slot]:
    """Return the slots of so many workers."""
    descriptor = make_descriptor(workers)
    try:
        return Desk(descriptor, workers).slots
    finally:
        os.close(descriptor)
