"""Who takes messages, where that is a task."""

from __future__ import annotations

import asyncio

from qflow.takers import Noted, Taker, here, named


def task_name() -> Noted:
    """Return the name of the running task, of the thread where it is none."""
    task = asyncio.current_task()
    return here.thread if task is None else task.get_name()


def loop_taker() -> Taker:
    """Return what is noted with what a loop of the running task fetches; what it hands out has left its batch."""
    return Taker(named(task_name())[0], "get", in_hand=0)
