"""A Celery app for the tests: what a user writes, with the URL of a spool and nothing else of qflow."""

import os
from pathlib import Path

from celery import Celery

app = Celery("celery_app", broker=os.environ["QFLOW_TEST_URL"], backend="rpc://")
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True
app.conf.broker_connection_retry_on_startup = True


@app.task(name="note")
def note(number: int, path: str) -> int:
    """Append a number to a file."""
    with Path(path).open("a") as file:
        file.write(f"{number}\n")
    return number


@app.task(name="add")
def add(one: int, two: int) -> int:
    return one + two
