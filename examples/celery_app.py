"""A Celery app whose broker is a spool, with a worker in a process of its own.

python examples/celery_app.py SPOOL      SPOOL may be the URL of a broker that runs: amqp://guest:guest@127.0.0.1
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

from amqp_server import serving
from celery import Celery, chain, group
from usage import spool_of

URL, QUEUE = "CELERY_APP_URL", "CELERY_APP_QUEUE"

app = Celery("celery_app", broker=os.environ.get(URL), backend="rpc://")
app.conf.task_default_queue = os.environ.get(QUEUE, "celery")
app.conf.task_acks_late = True  # a task that a worker died with comes again
app.conf.broker_transport_options = {"confirm_publish": True}  # `delay` returns when the task is on the disk


@app.task(name="add")
def add(one: int, two: int) -> int:
    return one + two


@app.task(name="flaky", bind=True, max_retries=5)
def flaky(self, times: int) -> str:
    """Fail so many times, then succeed."""
    if self.request.retries < times:
        raise self.retry(countdown=0)
    return f"done after {times} failures"


def main(spool: str) -> None:
    with serving(spool) as url:
        os.environ[URL] = app.conf.broker_url = url
        os.environ[QUEUE] = app.conf.task_default_queue = f"celery-{uuid4().hex}"
        command = [sys.executable, "-m", "celery", "-A", "celery_app", "worker", "--pool=solo", "--loglevel=WARNING"]
        with subprocess.Popen(command, cwd=Path(__file__).parent) as worker:
            try:
                print("sum:", add.delay(2, 3).get(timeout=60))
                print("chain:", chain(add.s(1, 2), add.s(4), add.s(8))().get(timeout=60))
                print("group:", sorted(group(add.s(number, number) for number in range(5))().get(timeout=60)))
                print("retried:", flaky.delay(3).get(timeout=60))
            finally:
                worker.send_signal(signal.SIGTERM)  # it finishes what it has begun
        with app.connection_for_write() as connection:
            connection.default_channel.queue_delete(os.environ[QUEUE])
            connection.default_channel.exchange_delete(os.environ[QUEUE])


if __name__ == "__main__":
    main(spool_of(__doc__))
