"""Functions by name: what can be called in another process, and the sentences for what cannot."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from json import JSONDecoder
from pathlib import Path
from typing import Any

import pytest

import qflow
from qflow.workers import supervisor, targets
from qflow.workers.job import Job, Order
from qflow.workers.targets import Target

PROGRAM = """
import functools, sys
def work(delivery): return delivery * 2
def two(delivery, other): ...
def optional(delivery, other=1): ...
async def waits(delivery): ...
waits_too = functools.partial(waits)
def yields(delivery): yield
class Works:
    @staticmethod
    def inside(delivery): return delivery
    def __call__(self, delivery): return delivery
works = Works()
number = 5
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory to import from; what was imported from it is forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["work", "optional", "waits", "waits_too", "Works.inside", "works", "two", "yields"])
@pytest.mark.parametrize("is_file", [True, False])
def test_a_function_is_found_by_its_name(modules: Path, name: str, is_file: bool) -> None:
    (modules / "found_here.py").write_text(PROGRAM)
    target = targets.parse(f"{modules / 'found_here.py' if is_file else 'found_here'}:{name}")
    if name == "two":
        with pytest.raises(qflow.InvalidArgument, match="cannot be called with a delivery alone: .*'other'"):
            targets.load(target)
    elif name == "yields":
        with pytest.raises(qflow.InvalidArgument, match="yields must not be a generator function"):
            targets.load(target)
    else:
        assert callable(targets.load(target))


def test_a_file_is_no_main_program(modules: Path) -> None:
    """It begins nothing when it is imported, and finds what lies beside it."""
    (modules / "inner").mkdir()
    (modules / "inner" / "beside.py").write_text("factor = 3")
    path = modules / "inner" / "program.py"
    path.write_text("import beside\ndef work(d): return d * beside.factor\nif __name__ == '__main__': raise SystemExit")
    assert targets.load(targets.parse(f"{path}:work"))(2) == 6


@pytest.mark.parametrize("text", ["", "module", "module:", ":function", "a b:c", "a:b c", "a.:b", "a:.b", "dir/x:b"])
def test_what_is_no_name_of_a_function_is_refused(text: str) -> None:
    with pytest.raises(qflow.InvalidArgument, match="say what to call as module:function or file.py:function"):
        targets.parse(text)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("not_there:work", "there is no module 'not_there', neither in '.*' nor installed"),
        ("found_here.inner:work", "found_here.inner"),
        ("found_here:not_there", "there is no 'not_there' in found_here"),
        ("found_here:number", "found_here:number must be callable, not int"),
        ("raises:work", "raises cannot be imported: ZeroDivisionError: division by zero"),
        ("leaves:work", "leaves cannot be imported: SystemExit: 3"),
        ("lacks:work", "lacks cannot be imported: ModuleNotFoundError: No module named 'not_there'"),
        ("wrong:work", "wrong cannot be imported: .*SyntaxError"),
        ("not_there.py:work", "there is no file .*not_there.py"),
    ],
)
def test_what_cannot_be_imported_is_said(modules: Path, target: str, sentence: str) -> None:
    for name, text in {
        "found_here": PROGRAM,
        "raises": "1 / 0",
        "leaves": "raise SystemExit(3)",
        "lacks": "import not_there",
        "wrong": "def",
    }.items():
        (modules / f"{name}.py").write_text(text)
    with pytest.raises(qflow.InvalidArgument, match=f"(?s){sentence}"):
        targets.load(targets.parse(target))


def test_a_function_of_this_process_is_named() -> None:
    assert targets.of(JSONDecoder.decode) == Target("json.decoder", "JSONDecoder.decode")
    assert targets.of("a.b:c") == Target("a.b", "c")


@pytest.mark.parametrize("function", [lambda _: None, functools.partial(print), 5, object()])
def test_what_another_process_would_not_find_is_refused(function: object) -> None:
    with pytest.raises(qflow.InvalidArgument, match=r"by itself|is no function"):
        targets.of(function)  # type: ignore[arg-type]


def test_an_order_says_all_of_a_job() -> None:
    job = Job(
        spool="/s",
        queue="jobs ü",
        target=Target("a", "b"),
        processes=3,
        lease_s=1.5,
        retry_delay_s=0,
        sys_path=("", "x"),
    )
    order = Order(job, 2, 7, 8)
    line = order.encode()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert Order.decode(line) == order


def test_a_stop_that_cannot_be_asked_is_refused_before_anything_is_begun(tmp_path: Path) -> None:
    """It was found when the processes were at work."""
    with pytest.raises(qflow.InvalidArgument, match="stop must have is_set"):
        qflow.workers.run(tmp_path / "spool", "q", print, stop=3)  # type: ignore[arg-type]
    assert not (tmp_path / "spool").exists()


def test_an_argument_that_run_does_not_have_is_refused_with_those_it_has(tmp_path: Path) -> None:
    """The error told of settings of a broker, and not of `lease_s`; beside another owner there was none."""
    with pytest.raises(qflow.InvalidArgument, match="^run has no argument 'lease'; there are .*lease_s.* token_file"):
        qflow.workers.run(tmp_path / "spool", "q", print, lease=1)  # type: ignore[call-arg]
    assert not (tmp_path / "spool").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"token_file": 5}, "token_file must be the path of a file, not 5"),
        ({"ca": b"ca.pem"}, "ca must be the path of a file, not b'ca.pem'"),
        ({"processes": 10_001}, "processes must be at most 10000"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_begun(options: dict[str, Any], said: str) -> None:
    """A file that is none was a TypeError; too many processes took all memory."""
    with pytest.raises(qflow.InvalidArgument, match=said):
        qflow.workers.run("grpc+tls://127.0.0.1:1", "q", print, **options)


def test_what_no_import_looks_at_is_not_told_to_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python passes over what is no text in `sys.path`, such as a `Path`; it could not be written."""
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    told: list[Job] = []
    monkeypatch.setattr(supervisor, "supervise", lambda job, *_, **__: told.append(job))
    qflow.workers.run(tmp_path / "spool", "q", print)
    assert Order.decode(Order(told[0], 0, 1, 2).encode()).job == told[0]
    assert set(told[0].sys_path) < set(sys.path)
