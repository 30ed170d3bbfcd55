"""qflow imported from a zip file, as `python -m zipapp` makes it: what needs files of its own says so."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import qflow

PROGRAM = """
import threading, qflow, qflow.workers, qflow.web
assert ".zip" in qflow.__file__
with qflow.open("spool") as broker:
    broker.declare_queue("q").put(b"x")
    with qflow.connect("spool") as client:
        client.queue("q").get().ack(wait=True)
ended = threading.Event()
ended.set()
for call in (lambda: qflow.workers.run("spool", "q", "os:fspath", stop=ended), lambda: qflow.web.serve):
    try:
        call()
    except qflow.NotFound as error:
        print(error)
"""


@pytest.fixture
def zipped(tmp_path: Path) -> Path:
    """A zip file with the modules of qflow."""
    package = Path(qflow.__file__).parent
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as file:
        for module in package.rglob("*.py"):
            file.write(module, module.relative_to(package.parent))
    return tmp_path / "app.zip"


def test_what_needs_files_says_that_there_are_none(zipped: Path) -> None:
    """Queues and the door work; workers were started again and again, and the page was a `RuntimeError`."""
    pytest.importorskip("starlette", reason="the page is not installed: pip install .[serve]")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=zipped.parent,
        env={**os.environ, "PYTHONPATH": str(zipped)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    workers, page = done.stdout.splitlines()
    why = "which is not there: qflow was imported from a zip file"
    assert workers.startswith(f"workers need {zipped}/qflow/workers/__main__.py, {why}")
    assert page.startswith(f"the page needs {zipped}/qflow/web/static, {why}")
