"""`qflow work` and `qflow.workers.run`, with real processes: they die, hang, are drained, and lose nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.workers
from doors.command_line import CommandLine
from pages import blocks_of
from planted import plant
from workers.conftest import JOBS, Working, kill, owner


def put(spool: Path, *bodies: bytes, **settings: Any) -> None:
    """Have messages in queue `jobs` of a spool that nobody owns."""
    with qflow.open(spool) as broker:
        broker.declare_queue("jobs", **settings).put_many(bodies)


def left(spool: Path, queue: str = "jobs") -> list[tuple[bytes, int]]:
    """Return what is in a queue of a spool that nobody owns, and how often it was delivered."""
    with qflow.open(spool) as broker:
        return [(one.body, one.delivery_count) for one in broker.queue(queue).get_many(1000, timeout_s=0)]


def test_several_processes_share_a_queue_until_a_signal(cli: CommandLine) -> None:
    """Nobody owns the spool, so the command does; it ends with the number of the signal, as other commands do."""
    put(cli.spool, *(b"%d" % number for number in range(40)))
    working = Working(cli, "say", "--processes", 3)
    done = [working.until(r"(\d+) does (\d+)") for _ in range(40)]
    assert sorted(int(one[2]) for one in done) == list(range(40))
    working.until_all("3 processes work on queue 'jobs'; this process owns the spool")
    working.signal()
    assert working.end() == 128 + signal.SIGTERM
    assert left(cli.spool) == []


def test_as_process_1_it_buries_what_functions_have_left(cli: CommandLine) -> None:
    """The first process of a container is given all orphans; unburied, they take up its processes for good."""
    alone = [
        "unshare",
        *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]),
        "--pid",
        "--fork",
        "--mount-proc",
    ]
    tried = subprocess.run([*alone, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no process 1 can be had: {tried.stderr}")
    put(cli.spool, b"leave", b"look")
    command = [sys.executable, "-m", "qflow", "work", cli.spool, "jobs", f"{JOBS}:orphan", "--processes", "1"]
    done = subprocess.run(
        [*alone, "--kill-child", *command, "--retry-delay", "0"], capture_output=True, text=True, cwd=cli.directory
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "for good" not in done.stdout


def test_a_process_that_a_function_forks_ends_by_a_signal(cli: CommandLine) -> None:
    put(cli.spool, b"")
    working = Working(cli, "fork", "--processes", 1)
    assert working.until(r"it ended with (.*)")[1] == str(-signal.SIGTERM)
    working.signal()
    assert working.end() == 128 + signal.SIGTERM


def test_a_drain_finishes_what_is_at_hand_and_takes_nothing_more(cli: CommandLine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "one")
    put(cli.spool, b"one", b"two")
    working = Working(cli, "wait", "--processes", 1)
    working.until("does one")
    working.signal(signal.SIGINT)
    working.until("finish what they have at hand")
    with open(tmp_path / "one", "w"):
        pass
    assert working.end() == 128 + signal.SIGINT
    assert left(cli.spool) == [(b"two", 1)]


def test_a_second_signal_ends_it_at_once_and_the_message_comes_back(cli: CommandLine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "one")
    put(cli.spool, b"one")
    working = Working(cli, "wait", "--processes", 1)
    working.until("does one")
    working.signal(signal.SIGTERM)
    working.signal(signal.SIGINT)
    assert working.end() in (128 + signal.SIGTERM, 128 + signal.SIGINT)  # who sees two sees them in any order
    assert left(cli.spool) == [(b"one", 2)]


def test_one_that_hangs_is_killed_after_its_lease_and_its_message_goes_to_another(cli: CommandLine) -> None:
    """It is counted, so it ends as a dead letter; what waits goes on meanwhile. What it has started is killed, too: the
    run of the tests looks for processes that are left.
    """
    put(cli.spool, b"hang", b"1", b"2", max_deliveries=2, dead_letter="dead")
    working = Working(cli, "hang", "--processes", 2, "--lease", 0.5)
    killed = working.until("killed").string, working.until("killed").string
    assert all("has held message 0 of queue 'jobs' for longer than its lease" in line for line in killed)
    working.until_all("does 1", "does 2")
    working.signal()
    working.end()
    assert sum("does hang" in line for line in working.lines) == 2
    assert left(cli.spool) == []
    assert left(cli.spool, "dead") == [(b"hang", 1)]


def test_the_queues_ack_timeout_is_the_lease_where_none_is_given(cli: CommandLine) -> None:
    put(cli.spool, b"hang", ack_timeout_s=0.5, max_deliveries=1, dead_letter="dead")
    working = Working(cli, "hang", "--processes", 1)
    working.until("for longer than its lease")
    working.signal()
    working.end()
    assert left(cli.spool, "dead") == [(b"hang", 1)]


def test_the_dead_letter_of_what_raises_has_the_reason(cli: CommandLine) -> None:
    put(cli.spool, b"street", max_deliveries=2, dead_letter="dead")
    working = Working(cli, "fail", "--processes", 2)
    working.until("failed at delivery 2")
    working.until("ValueError: no street")
    working.signal()
    working.end()
    with qflow.open(cli.spool) as broker:
        headers = broker.queue("dead").get(0).headers
    assert headers["dead_letter_nack_reason"] == "ValueError: no street"
    assert headers["dead_letter_reason"] == "max_deliveries"


@pytest.mark.parametrize("how", [b"none", b"closed", b"descriptor"])
def test_what_fails_is_said_though_the_function_has_taken_stderr_away(cli: CommandLine, how: bytes) -> None:
    """By the supervisor; the process goes on."""
    put(cli.spool, how, b"next", max_deliveries=1, dead_letter="dead")
    working = Working(cli, "mute", "--processes", 1)
    first = working.found(
        r"worker 1 \(process (\d+)\): message 0 of queue 'jobs' failed at delivery 1: ValueError: no "
    )
    second = working.found(
        r"worker 1 \(process (\d+)\): message 1 of queue 'jobs' failed at delivery 1: ValueError: no n"
    )
    assert first[1] == second[1]
    working.signal()
    assert working.end() == 128 + signal.SIGTERM


def test_one_that_crashes_or_is_killed_is_started_again(cli: CommandLine) -> None:
    put(cli.spool, b"crash", b"1", max_deliveries=1, dead_letter="dead")
    working = Working(cli, "crash", "--processes", 1)
    working.until("SIGSEGV at message 0 of queue 'jobs', which goes back; it is started again")
    kill(int(working.until(r"(\d+) does 1")[1]))
    working.until("SIGKILL.*; it is started again")  # before or after it has acked
    working.signal()
    assert working.end() == 128 + signal.SIGTERM
    assert left(cli.spool, "dead")[0] == (b"crash", 1)


def test_a_supervisor_that_is_killed_leaves_no_process_and_loses_nothing(cli: CommandLine, tmp_path: Path) -> None:
    """It owned the spool, so what was at hand is there, too. (The run looks for processes that are left.)"""
    os.mkfifo(tmp_path / "one")
    put(cli.spool, b"one", b"two")
    working = Working(cli, "wait", "--processes", 1)
    working.until("does one")
    working.signal(signal.SIGKILL)
    working.process.wait()
    with open(tmp_path / "one", "w"):
        pass
    working.end()  # the worker has the other end of the pipe as long as it lives
    assert [body for body, _ in left(cli.spool)] == [b"one", b"two"]


def test_an_owner_beside_it_stays_the_owner_and_may_be_killed(cli: CommandLine, tmp_path: Path) -> None:
    """The workers wait, say so once, and go on with the next owner. What was at hand is done again."""
    os.mkfifo(tmp_path / "one")
    put(cli.spool, b"one", b"two")
    os.mkfifo(tmp_path / "two")
    with owner(cli.spool) as first:
        working = Working(cli, "wait", "--processes", 1)
        working.until("does one")
        first.kill()
        first.wait()
        with open(tmp_path / "one", "w"):
            pass
        working.until("the workers wait")
    with owner(cli.spool):
        for name in ("one", "two"):
            working.until(f"does {name}")
            with open(tmp_path / name, "w"):
                pass
        working.signal()
        assert working.end() == 128 + signal.SIGTERM
    assert "1 process works on queue 'jobs'; another process owns the spool" in working.lines
    assert sum("the workers wait" in line for line in working.lines) == 1
    assert "qflow: the workers go on" in working.lines
    assert left(cli.spool) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("spool", "jobs", "not_there:work"), "there is no module 'not_there'"),
        (("spool", "jobs", f"{JOBS}:not_there"), "there is no 'not_there' in "),
        (("spool", "jobs", f"{JOBS}:os"), "must be callable, not module"),
        (("spool", "jobs", "no function"), "say what to call as module:function"),
        (("spool", "jbos", f"{JOBS}:say"), "'jbos'"),
        (("elsewhere", "jobs", f"{JOBS}:say"), "'elsewhere' does not exist"),
        (("empty", "jobs", f"{JOBS}:say"), "empty"),
        (("spool", "jobs", f"{JOBS}:say", "--lease", "0"), "--lease"),
        (("spool", "jobs", f"{JOBS}:say", "--processes", "0"), "--processes"),
    ],
)
def test_what_makes_no_sense_is_said_and_nothing_is_taken(
    cli: CommandLine, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    put(cli.spool, b"1")
    (tmp_path / "empty").mkdir()
    is_refused(cli, arguments, sentence)
    assert left(cli.spool) == [(b"1", 1)]


@pytest.mark.parametrize(
    ("queue", "function", "sentence"), [("jobs", "not_there:work", "'not_there'"), ("jbos", f"{JOBS}:say", "'jbos'")]
)
def test_the_same_is_said_beside_an_owner(cli: CommandLine, queue: str, function: str, sentence: str) -> None:
    put(cli.spool, b"1")
    with owner(cli.spool):
        is_refused(cli, (str(cli.spool), queue, function), sentence)
    assert left(cli.spool) == [(b"1", 1)]


def is_refused(cli: CommandLine, arguments: tuple[str, ...], sentence: str) -> None:
    done = cli.run("work", *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert sentence in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_the_module_and_the_program_of_the_page_run(cli: CommandLine, tmp_path: Path) -> None:
    """What the page shows: a module for `qflow work`, and a program."""
    module, _, _, program = blocks_of("docs/howto/workers.md")
    (tmp_path / "sums.py").write_text(module)
    (tmp_path / "program.py").write_text(program)
    for queue, body in (("sums", b"[1, 2, 3]"), ("numbers", b"5")):
        assert cli.run("put", "spool", queue, stdin=body).returncode == 0
    for arguments, line in (
        (["-m", "qflow", "work", "spool", "sums", "sums:work", "--processes", "1"], b"14\n"),
        (["program.py"], b"25\n"),
    ):
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, cwd=tmp_path)
        with process:
            assert process.stdout is not None
            assert line in iter(process.stdout.readline, b"")
            process.terminate()
    assert left(cli.spool, "sums") == left(cli.spool, "numbers") == []


def test_the_module_of_the_page_puts_what_follows(cli: CommandLine, tmp_path: Path) -> None:
    """In the process that works, whose broker is a connection."""
    (tmp_path / "orders.py").write_text(blocks_of("docs/howto/workers.md")[2])
    put(cli.spool, b"5")
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("invoices")
    working = Working(cli, "work", "--processes", 1, file=tmp_path / "orders.py")
    working.until("1 process works")
    with qflow.connect(cli.spool) as remote:
        assert remote.queue("invoices").get(timeout_s=60).body == b"invoice of 5"
    working.signal()
    assert working.end() == 128 + signal.SIGTERM
    assert left(cli.spool) == []


PROGRAM = """
import os
import sys
import qflow
import qflow.workers

def work(delivery):
    print("did", delivery.body.decode(), delivery.headers, flush=True)

if __name__ == "__main__":
    with qflow.open(sys.argv[1]) as broker:
        broker.declare_queue("jobs").put(b"1", headers={"a": 1})
    print("ended by", qflow.workers.run(sys.argv[1], "jobs", work, processes=1))
"""


RUN = "import sys, qflow.workers; qflow.workers.run(*sys.argv[1:])"


def test_workers_run_no_file_of_the_current_directory(tmp_path: Path) -> None:
    """They look for modules where their supervisor does; what a function starts has the environment of that."""
    program, elsewhere = tmp_path / "program.py", tmp_path / "elsewhere"
    elsewhere.mkdir()
    program.write_text(PROGRAM.replace("delivery.headers", "os.environ.get('PYTHONPATH')"))
    running = subprocess.Popen(
        [sys.executable, program, tmp_path / "spool"], stdout=subprocess.PIPE, cwd=plant(elsewhere)
    )
    with running:
        assert running.stdout is not None
        said = running.stdout.readline().decode()
        running.send_signal(signal.SIGINT)
        assert running.stdout.read() == b"ended by 2\n"
    assert said == f"did 1 {os.environ.get('PYTHONPATH')}\n"


def test_a_program_gives_a_function_of_its_own(tmp_path: Path) -> None:
    """A file that is run is imported by the workers, and begins nothing there."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    running = subprocess.Popen([sys.executable, program, tmp_path / "spool"], stdout=subprocess.PIPE, cwd=tmp_path)
    with running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"did 1 {'a': 1}\n"
        running.terminate()
        assert running.stdout.read() == b"ended by 15\n"
    assert left(tmp_path / "spool") == []


def test_a_program_that_owns_the_spool_runs_workers_in_a_thread(tmp_path: Path, capfd: Any) -> None:
    """They come through the door of this process; an event ends them."""
    stop = threading.Event()
    ended = []
    with qflow.open(tmp_path / "spool") as broker:
        queue = broker.declare_queue("jobs")
        done = broker.declare_queue("done", durable=False)

        def run() -> None:
            ended.append(qflow.workers.run(tmp_path / "spool", "jobs", f"{JOBS}:say", processes=2, stop=stop))

        thread = threading.Thread(target=run)
        thread.start()
        queue.put_many([b"1", b"2", b"3"])
        while len(queue):
            assert not done.get_many(1, timeout_s=0.02)
        stop.set()
        thread.join()
    assert ended == [0]
    assert sorted(line.split()[-1] for line in capfd.readouterr().out.splitlines()) == ["1", "2", "3"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", [["-m", "qflow", "work"], ["-c", RUN]], ids=["command", "program"])
def test_workers_write_nowhere_where_their_supervisor_has_no_stdout_or_stderr(
    cli: CommandLine, tmp_path: Path, closed: str, command: list[str]
) -> None:
    """Nothing of theirs has such a number, which everything is written to."""
    put(cli.spool, b"1")
    words = [sys.executable, *command, str(cli.spool), "jobs", f"{JOBS}:show"]
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *words], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode in (0, 128 + signal.SIGTERM)
    links = (tmp_path / "done").read_text().split()
    for link, sign in zip(links, [">&-", "2>&-"], strict=True):
        assert (link == "/dev/null") == (sign in closed.split()), links
    assert left(cli.spool) == []
