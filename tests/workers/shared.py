"""What tests of workers have in common."""

from __future__ import annotations

import os

from qflow.workers.desk import Slot, make_descriptor, slots_in


def slots(workers: int) -> list[Slot]:
    """Return the slots of so many workers."""
    descriptor = make_descriptor(workers)
    try:
        return slots_in(descriptor, workers)
    finally:
        os.close(descriptor)
