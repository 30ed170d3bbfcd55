"""Celery without a server: the broker is a directory, and the worker is killed in the middle of its work.

python examples/celery_spool.py SPOOL
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from celery import Celery
from usage import spool_of

app = Celery("celery_spool", broker=os.environ.get("CELERY_SPOOL"), backend="rpc://")
app.conf.task_acks_late = True  # a task that a worker died with comes again
app.conf.task_reject_on_worker_lost = True


@app.task(name="square")
def square(number: int) -> int:
    return number * number


def worker() -> subprocess.Popen[bytes]:
    options = ["--concurrency=2", "--loglevel=WARNING"]
    command = [sys.executable, "-m", "celery", "-q", "-A", "celery_spool", "worker", *options]
    return subprocess.Popen(command, cwd=Path(__file__).parent, start_new_session=True)


def main(spool: str) -> None:
    os.environ["CELERY_SPOOL"] = app.conf.broker_url = f"qflow://{quote(os.path.abspath(spool))}"
    results = [square.delay(number) for number in range(200)]
    print(len(results), "tasks are on the disk, and no worker runs yet")
    first = worker()
    print("the first result:", results[0].get(timeout=60))
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    second = worker()
    try:
        print("the sum after a kill of the worker:", sum(result.get(timeout=60) for result in results))
    finally:
        second.send_signal(signal.SIGTERM)
        second.wait()


if __name__ == "__main__":
    main(spool_of(__doc__))
