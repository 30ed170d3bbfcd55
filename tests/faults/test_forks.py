"""Forks of a program that has a broker, at the moments that are bad for the child."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from crash.seams import run_in_child
from faults.seams import in_thread
from faults.strikes import Strike
from qflow.compat import Queue, items
from qflow.importing import importing

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
IN_THE_MIDDLE = """
import faulthandler, importlib, os, subprocess, sys, threading

sys.setswitchinterval(100)  # whoever forks does so before another thread goes on, unless it waits for one
begun, forking = threading.Event(), threading.Event()
spool, module, what = sys.argv[1:]


class Held:
    def find_spec(self, name, path, target=None):
        if name == module and threading.current_thread().name.startswith("qflow-"):
            begun.set()
            forking.wait()


import qflow

sys.meta_path.insert(0, Held())
with qflow.open(spool) as broker:
    os.register_at_fork(before=forking.set)  # called before those of the package
    exec(what)
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(15, exit=True)
        importlib.import_module(module)
        with qflow.connect(spool) as near:
            near.declare_queue("q").put(b"x")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert broker.queue("q").get().body == b"x"
"""
CALLER = "import sys, qflow; qflow.connect(sys.argv[1]).close()"


@pytest.mark.parametrize(
    ("module", "what"),
    [
        ("asyncio", f"caller = subprocess.Popen([sys.executable, '-c', {CALLER!r}, spool])"),
        ("qflow.remote.wire.frames", f"caller = subprocess.Popen([sys.executable, '-c', {CALLER!r}, spool])"),
        ("qflow.stats", "broker.declare_stream('s', topics=['#'])"),
        ("attrs", "broker.declare_stream('s', topics=['#'])"),
    ],
)
def test_a_fork_does_not_cut_off_what_a_thread_of_the_package_imports(module: str, what: str, spool: Path) -> None:
    """Else the child waits for good where it imports the same: for its module's lock, which nobody gives back."""
    command = [sys.executable, "-W", "ignore", "-c", IN_THE_MIDDLE, str(spool), module, what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


WITHIN_AN_IMPORT = """
import faulthandler, os, sys, threading
from pathlib import Path
import qflow.importing

begun = threading.Event()


def import_it():
    with qflow.importing.importing:
        begun.set()
        import forking_one


class Other:
    def find_spec(self, name, path, target=None):
        if name == "forking_one" and threading.current_thread() is threading.main_thread():
            other.start()
            begun.wait()


faulthandler.dump_traceback_later(15, exit=True)
qflow.importing.PATIENCE_S = 0.01
other = threading.Thread(target=import_it)
Path(sys.argv[1], "forking_one.py").write_text("import os\\nif not os.fork():\\n    os._exit(0)\\nos.wait()\\n")
sys.path.insert(0, sys.argv[1])
sys.meta_path.insert(0, Other())
import forking_one

other.join()
"""


def test_a_fork_of_who_imports_the_same_does_not_wait_for_good(tmp_path: Path) -> None:
    """As that of a signal's handler, which comes in the middle of an import."""
    command = [sys.executable, "-W", "ignore", "-c", WITHIN_AN_IMPORT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


WATCHED = """
import asyncio, gc, sys, threading
import qflow
from qflow.importing import importing

spool, caller = sys.argv[1:]
cut_off = []


def look(event, arguments):
    name = threading.current_thread().name
    if event == "import" and name.startswith("qflow-") and name != "qflow-sheltered" and not importing._lock._is_owned():
        cut_off.append((name, arguments[0]))


with qflow.open(spool) as broker:
    broker.declare_queue("jobs", dead_letter="dead", max_deliveries=2, ttl_s=60, dedupe_window_s=60)
    broker.declare_queue("dead")
    broker.declare_stream("plant", topics=["plant/#"], retention_s=60)
    sys.addaudithook(look)
    import subprocess

    assert subprocess.run([sys.executable, "-c", caller, spool]).returncode == 0
assert cut_off == [], cut_off
"""
CALLS = """
import sys, qflow

with qflow.connect(sys.argv[1]) as broker:
    jobs = broker.queue("jobs")
    jobs.put(b"one", dedupe_key="k" * 255)
    jobs.put_many([b"two", b"three"])
    jobs.submit(b"four").result()
    jobs.get().ack(wait=True)
    jobs.get().nack(requeue=False)
    jobs.get_many(2).ack(wait=True)
    jobs.put(b"later", delay_s=60)
    print(broker.redrive("dead"), list(jobs.browse()), jobs.stats(), broker.stats(), broker.check())
    with broker.transaction() as transaction:
        transaction.put(jobs, b"five")
    with jobs.consume(lambda delivery: None):
        jobs.put(b"six")
    broker.publish("plant/1", b"21", key="hall")
    with broker.subscribe("plant", "plant/#", name="panel", start="earliest", follow=False) as panel:
        print([message.body for message in panel], panel.stats(), broker.stream("plant").stats())
    broker.stream("plant").last("plant/#")
    broker.on_event(print)
    broker.alter_queue("jobs", limit_messages=5)
    broker.schedule("tick", "jobs", b"tick", every_s=60)
    broker.cancel_schedule("tick")
    try:
        broker.queue("job")
    except qflow.NotFound as error:
        print(error)
    jobs.purge()
    broker.snapshot(sys.argv[1] + ".copy")
    broker.compact()
    broker.delete_queue("dead")
"""


def test_threads_of_the_package_import_nothing_where_a_fork_could_cut_them_off(spool: Path) -> None:
    """What those of a door and of maintenance import, as they serve all that a caller may ask."""
    command = [sys.executable, "-c", WATCHED, str(spool), CALLS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_does_not_leave_taken_what_a_fork_waits_for() -> None:
    """Nor what threads of the package wait for, who import as they serve callers."""

    def import_something() -> None:
        with importing:
            pass

    def is_free() -> bool:
        return in_thread(lambda: importing._lock.acquire(blocking=False) and importing._lock.release() is None)

    assert is_free()
    struck = Strike(0)
    while struck.run(import_something):
        assert is_free(), struck.where
        struck = Strike(struck.seen)
    assert is_free()


def test_a_lock_of_the_process_does_not_stay_taken_in_a_child() -> None:
    """The one that belongs to no broker: another thread may have it at a fork."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with items._remover._lock:
            taken.set()
            done.wait()

    holding = threading.Thread(target=hold)
    holding.start()
    taken.wait()
    try:
        assert run_in_child(lambda: Queue().put(1)) == 0
    finally:
        done.set()
        holding.join()


WAITING = """
import os, signal, sys, threading
import qflow
from qflow.memory.line import Alarm

children, status, parent, waits, wait = [], [], os.getpid(), threading.Event(), Alarm.wait


def fork(*_):
    children.append(os.fork())
    if not children[0]:
        signal.alarm(30)


def waited(self, timeout_s):
    if threading.current_thread() is threading.main_thread():
        waits.set()
    wait(self, timeout_s)


def end_wait():
    waits.wait()
    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
    while not children:
        waits.wait()
    status.append(os.waitpid(children[0], 0)[1])
    exec(sys.argv[3])


signal.signal(signal.SIGUSR1, fork)
with qflow.open(sys.argv[1]) as broker:
    queue, full = broker.declare_queue("q"), broker.declare_queue("full", limit_messages=1)
    full.put(b"x")
    broker.declare_stream("s", topics=["s/#"])
    told = broker.subscribe("s", "s/#")
    Alarm.wait = waited
    ending = threading.Thread(target=end_wait)
    ending.start()
    try:
        exec(sys.argv[2])
    except qflow.ForkedProcess:
        os._exit(0)
    finally:
        if os.getpid() != parent:
            os._exit(1)
    ending.join()
print(status)
"""


@pytest.mark.parametrize(
    ("call", "end"),
    [
        ("queue.get()", "queue.put(b'x')"),
        ("full.put(b'y')", "full.get().ack()"),
        ("told.get()", "broker.publish('s/1', b'x')"),
    ],
)
def test_a_child_of_a_handler_does_not_wait_for_what_only_its_parent_has(call: str, end: str, tmp_path: Path) -> None:
    """It is refused, where it waited for good."""
    command = [sys.executable, "-W", "ignore", "-c", WAITING, str(tmp_path / "spool"), call, end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[0]\n", "")
