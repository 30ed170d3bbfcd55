"""Who takes messages, where that is a task."""

from __future__ import annotations

import asyncio

from qflow.takers import Noted, here


def task_name() -> Noted:
    """Return the name of the running task, of the thread where it is none."""
    task = asyncio.current_task()
    return here.thread if task is None else task.get_name()
