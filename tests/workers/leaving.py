"""Functions that leave something behind: threads, tasks and processes. Each message says what."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import qflow
import qflow.aio
from qflow.workers import ending

ending.GRACE_S = 0.2
idle = ThreadPoolExecutor(1)


def leave(delivery: qflow.Delivery | qflow.aio.AsyncDelivery) -> None:
    """Do what the message says."""
    what = bytes(delivery.body).decode()
    say(f"{os.getpid()} does {what}")
    match what.split():
        case ["thread"]:
            threading.Thread(target=hang, name="mine").start()
        case ["mute"]:
            sys.stderr = None  # type: ignore[assignment]
        case ["idle"]:
            idle.submit(int).result()
        case ["patient"]:
            ending.GRACE_S = 1000.0
        case ["exit"]:
            sys.exit(3)
        case ["hang", "at", "exit"]:
            atexit.register(hang)
        case ["fork", *how] if not os.fork():
            sys.stdout.write("written in a process of its own\n")  # in one piece, others write beside it
            if how == ["exits"]:
                sys.exit("it says why")
            if how == ["raises"]:
                raise ValueError("no")


async def leave_async(delivery: qflow.aio.AsyncDelivery) -> None:
    """As `leave`."""
    match bytes(delivery.body):
        case b"thread":
            asyncio.get_running_loop().run_in_executor(None, hang)
        case b"threads":
            for _ in range(100):  # more than there are
                asyncio.get_running_loop().run_in_executor(None, hang)
        case b"task":
            tasks.append(asyncio.create_task(refuse()))
            await asyncio.sleep(0)
        case b"later fork":
            tasks.append(asyncio.create_task(fork_later()))
    leave(delivery)


tasks = []


async def refuse() -> None:
    """Do not end when cancelled."""
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            continue


async def fork_later() -> None:
    """Fork while the next message is waited for, and say how the other ended."""
    await asyncio.sleep(0)
    child = os.fork()
    if child:
        say(f"it ended with {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")


def hang() -> None:
    threading.Event().wait()


def say(text: str) -> None:
    """Print a line in one write."""
    os.write(1, f"{text}\n".encode())


@atexit.register
def at_exit() -> None:
    say("called at exit")
