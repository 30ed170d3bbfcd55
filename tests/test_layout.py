"""The shape of the code: who may import whom, and who may touch LMDB, the file system and the byte layout."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from layout import LIMITS, PROJECT, borrowed_names, circles, file_lines, function_lines, nodes, parameters, parse

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "qflow"
LISTED: dict[str, dict[str, int]] = tomllib.loads(Path(__file__).with_name("layout_exceptions.toml").read_text())
"""What is above the limits of `layout.py`. Whoever divides one takes it off; none is added."""

WORDS = {
    "allocator",
    "altering",
    "backoff",
    "batch_index",
    "callbacks",
    "children",
    "errors",
    "problems",
    "message",
    "config",
    "settings",
    "options",
    "stats",
    "deliveries",
    "delivery",
    "descriptors",
    "durations",
    "events",
    "handlers",
    "held_batch",
    "identity",
    "importing",
    "collector",
    "inherited",
    "loggers",
    "names",
    "pace",
    "named_tuples",
    "pickling",
    "rates",
    "starting",
    "steps",
    "takers",
    "tokens",
    "troubles",
    "used",
}
PARTS = {"spool", "listeners", "routing", "adoption", "publishing", "periodic", "figures", "upkeep"}
"""Of a broker, beside its memory, queues and streams."""
MAY_IMPORT = {
    "words": {"words"},
    "memory": {"words", "memory"},
    "storage": {"words", "storage"},
    "spool": {"words", "memory", "storage"},
    "door": {"words"},
    "listeners": {"words"},
    "queues": {"words", "memory", "storage", "spool", "queues"},
    "streams": {"words", "memory", "storage", "streams"},
    "routing": {"words", "storage", "queues", "streams", "routing"},
    "adoption": {"words", "storage", "spool", "queues", "streams", "routing", "adoption"},
    "periodic": {"words", "memory", "spool", "queues", "publishing"},
    "publishing": {"words", "storage", "spool", "queues", "streams", "routing"},
    "figures": {"words", "memory", "storage", "spool", "queues", "streams", "routing", "adoption"},
    "upkeep": {"words", "memory", "spool", "listeners", "queues", "streams", "adoption", "figures"},
    "engine": {"words", "memory", "storage", "queues", "streams", "door"} | PARTS,
    "broker": {"words", "memory", "storage", "queues", "streams", "engine"} | PARTS,
    "opening": {"words", "memory", "door", "broker"},
    "restoring": {"words", "broker", "queues", "streams"},
    "remote": {
        "words",
        "listeners",
        "restoring",
        "amqp",
        "facade",
        "memory",
        "door",
        "broker",
        "aio",
        "mqtt",
        "queues",
        "streams",
        "routing",
        "periodic",
        "serving",
        "remote",
    },
    "inspect": {"words", "storage", "streams", "inspect"},
    "doctor": {"words", "facade", "door", "inspect", "amqp", "doctor"},
    "arrow": {"words", "storage", "streams", "arrow"},
    "spark": {"words", "storage", "streams", "routing", "opening", "arrow", "flight", "spark"},
    "cli": {
        "words",
        "restoring",
        "facade",
        "door",
        "broker",
        "queues",
        "periodic",
        "streams",
        "routing",
        "inspect",
        "doctor",
        "spark",
        "aio",
        "amqp",
        "bridge",
        "mqtt",
        "serving",
        "workers",
        "remote",
        "top",
        "metrics",
        "web",
        "cli",
    },
    "aio": {"words", "memory", "broker", "opening", "queues", "streams", "routing", "periodic", "publishing", "aio"},
    "web": {
        "words",
        "facade",
        "broker",
        "aio",
        "amqp",
        "doctor",
        "queues",
        "streams",
        "inspect",
        "serving",
        "metrics",
        "web",
    },
    "serving": {"words", "streams", "serving"},
    "workers": {"words", "facade", "broker", "inspect", "aio", "serving", "workers"},
    "flight": {
        "words",
        "facade",
        "broker",
        "aio",
        "routing",
        "storage",
        "streams",
        "memory",
        "serving",
        "remote",
        "arrow",
        "flight",
    },
    "amqp": {"words", "facade", "memory", "queues", "broker", "aio", "serving", "amqp"},
    "mqtt": {"words", "facade", "memory", "streams", "broker", "aio", "serving", "mqtt"},
    "bridge": {"words", "facade", "memory", "broker", "aio", "amqp", "mqtt", "serving", "bridge"},
    "kombu": {"words", "amqp", "kombu"},
    "metrics": {"words", "facade", "memory", "storage", "broker", "aio", "inspect", "remote", "serving", "metrics"},
    "tracing": {
        "words",
        "facade",
        "broker",
        "aio",
        "queues",
        "streams",
        "routing",
        "remote",
        "serving",
        "amqp",
        "mqtt",
        "tracing",
    },
    "top": {"words", "facade", "doctor", "storage", "inspect", "remote", "top"},
    "compat": {"words", "facade", "compat"},
    "facade": {"words", "aio", "broker", "opening", "queues", "periodic", "remote", "streams", "routing"},
    "__main__": {"cli"},
}
"""Imports go down only: memory and storage never meet below queues and streams, nor those two below the broker."""


@cache
def modules() -> list[tuple[str, Path, ast.Module]]:
    """Return (dotted name, path, tree) of every module."""
    return [
        (
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"),
            path,
            parse(path.read_text()),
        )
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def room(dotted: str) -> str:
    """Return the room a module belongs to."""
    parts = dotted.split(".")
    if len(parts) == 1 or parts == ["qflow", "aio"]:
        return "facade"
    return "words" if parts[1] in WORDS else parts[1]


@cache
def imports(tree: ast.Module) -> list[str]:
    """Return the dotted name of everything a module imports."""
    found: list[str] = []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = (ROOT / whole.replace(".", "/")).with_suffix(".py").exists()
                found.append(whole if is_module or (ROOT / whole.replace(".", "/")).is_dir() else str(node.module))
    return found


def test_imports_go_down_only() -> None:
    """A room imports only rooms below it, and memory and storage know nothing of each other."""
    wrong = [
        f"{dotted} imports {name}"
        for dotted, _, tree in modules()
        for name in imports(tree)
        if name.split(".")[0] == "qflow" and room(name) not in MAY_IMPORT[room(dotted)]
    ]
    assert wrong == []


SETS_UP_LOGGING = {"qflow.amqp.local.server", "qflow.cli.server", "qflow.cli.spool", "qflow.web.door"}
"""Who adds handlers or sets levels, and logs by loggers of the package all the same."""


def test_everybody_logs_by_loggers_that_raise_nothing() -> None:
    """What a handler of the program raises must end no thread, and fail nothing: `loggers` sees to that."""
    levels = "debug|info|warning|error|exception|critical|log"
    asks = re.compile(rf"logging\.(getLogger|{levels})\(|from logging import")
    texts = {dotted: path.read_text() for dotted, path, _ in modules()}
    assert {dotted for dotted, text in texts.items() if asks.search(text)} == {"qflow.loggers", *SETS_UP_LOGGING}
    logs = re.compile(rf"logger = logging\.getLogger|getLogger\(.*\)\.({levels})\(|logging\.({levels})\(")
    assert [dotted for dotted in SETS_UP_LOGGING if logs.search(texts[dotted])] == []


def users_of(names: set[str]) -> set[str]:
    """Return the modules that import one of these top-level names."""
    return {dotted for dotted, _, tree in modules() if names & {name.split(".")[0] for name in imports(tree)}}


def test_one_room_touches_lmdb() -> None:
    """LMDB can be replaced, or made to fail, in one place."""
    assert users_of({"lmdb"}) == {"qflow.storage.environment"}


def test_the_byte_layout_is_known_to_few() -> None:
    """Messages and blocks are packed in one room each; keys and small records in those that own them."""
    assert {name for name in users_of({"struct"}) if not name.startswith("qflow.cli")} == {
        "qflow.amqp.wire.frames",
        "qflow.amqp.wire.methods",
        "qflow.amqp.wire.properties",
        "qflow.message",
        "qflow.remote.server.serving",
        "qflow.remote.wire.columns",
        "qflow.remote.wire.frames",
        "qflow.storage.blocks",
        "qflow.storage.encoding",
        "qflow.storage.last_commit",
        "qflow.storage.log.alike",
        "qflow.storage.log.changes",
        "qflow.storage.log.journal",
        "qflow.storage.log.keys",
        "qflow.storage.log.marks",
        "qflow.storage.topics.postings",
        "qflow.storage.streams.producers",
        "qflow.storage.log.recovery",
        "qflow.storage.log.notes",
        "qflow.storage.log.rows",
        "qflow.storage.log.windows",
        "qflow.storage.spill.singles",
        "qflow.storage.topics.records",
    }


def test_the_engine_changes_files_through_the_seam_only() -> None:
    """Whoever hands in a faulty `Files` reaches every file operation of the engine."""
    changing = re.compile(
        r"\bos\.(open|write|pwrite|unlink|remove|rename|replace|mkdir|makedirs|rmdir|truncate|ftruncate|fsync)\("
    )
    elsewhere = {
        dotted
        for dotted, path, _ in modules()
        if room(dotted) in {"memory", "storage", "queues", "streams", "engine", "broker", "opening"} | PARTS
        if changing.search(path.read_text())
    }
    assert elsewhere == {"qflow.storage.files", "qflow.storage.lock"}  # the lock's file is nobody else's


def test_a_queue_is_composed() -> None:
    """No class of `queues`, or of its `memory`, has its state, or a part of its methods, from another one there.

    But `Unused`, which becomes a `Queue`: a class with `__getattr__` looks everything up slowly.
    """
    plain = {
        "Protocol",
        "NamedTuple",
        "Exception",
        "enum.Enum",
        "enum.StrEnum",
        "Generic[Placed]",
        "Generic[T]",
        "Made",
        "OfSpool",
        "Unpicklable",
        "list[Group]",
        "set[str]",
        "_thread.RLock",
    }
    heirs = {
        f"{dotted}.{node.name}": bases
        for dotted, _, tree in modules()
        if room(dotted) in {"queues", "memory"}
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef) and (bases := {ast.unparse(base) for base in node.bases} - plain)
    }
    assert heirs == {"qflow.queues.making.Unused": {"Queue"}}


def test_nothing_is_swallowed_or_left_to_do() -> None:
    """No bare handler that passes, no note to self, no sleep in a test."""
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        if path == Path(__file__):
            continue
        text = path.read_text()
        assert not re.search(r"except (Base)?Exception:\s*\n\s*pass", text), path
        assert not re.search(r"\b(TODO|FIXME|XXX)\b", text), path
        if "tests" in path.relative_to(ROOT).parts:
            assert "time.sleep(" not in text, path


def test_every_public_name_is_there_without_the_engine_being_imported_before_it_is_asked_for() -> None:
    """In a process of its own, where nothing is imported yet; for type checkers the same names are spelled out."""
    script = (
        "import sys; before = set(sys.modules)\n"
        "import qflow; assert set(sys.modules) - before <= {'qflow', '__future__', 'atexit'}, set(sys.modules) - before\n"
        "qflow.NotFound, qflow.errors\n"
        "assert not {'qflow.broker', 'lmdb'} & set(sys.modules)\n"
        "print(*sorted(name for name in qflow.__all__ if getattr(qflow, name) is not None and name in dir(qflow)))\n"
        "assert qflow.inspect.read_spool"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    tree = ast.parse((ROOT / "qflow" / "__init__.py").read_text())
    spelled = {
        alias.asname or alias.name
        for block in tree.body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module != "typing"
        for alias in statement.names
    }
    assert set(said.split()) == spelled


def test_opening_a_spool_imports_nothing_that_only_some_need() -> None:
    """Commands and workers open spools in processes of their own: what a few calls need is imported by them."""
    script = "import sys, qflow; qflow.open; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    needless = {
        "asyncio",
        "click",
        "dataclasses",
        "difflib",
        "hashlib",
        "qflow.stats",
        "random",
        "rich",
        "subprocess",
        "tempfile",
        "urllib.parse",
    }
    if sys.version_info >= (3, 14):
        needless.remove("dataclasses")  # the standard library's `traceback` imports it
    assert needless & set(said.split()) == set()


def rooms_of(page: str) -> Iterator[str]:
    """Yield what the table of rooms names, as a path in the package: a word alone lies beside what its row began with."""
    for row in re.findall(r"^\| (`[^|]+) \| [^|]+ \| [^|]+ \|$", page.partition("## The parts of a queue")[0], re.M):
        beside = PACKAGE
        for word in re.findall(r"`([a-z_/]+)`", row):
            found = [
                path for path in (beside / word, PACKAGE / word) if path.is_dir() or path.with_suffix(".py").exists()
            ]
            assert found, f"{word}, of {row}"
            yield str(found[0].relative_to(PACKAGE))
            beside = found[0].parent if beside == PACKAGE else beside


def test_every_module_stands_in_one_row_of_the_table_of_rooms() -> None:
    """By itself, or with its folder; and nothing stands there twice, or is no more."""
    named = list(rooms_of((ROOT / "docs" / "explanation" / "architecture.md").read_text()))
    assert [name for name in named if named.count(name) > 1] == []
    files = [path.relative_to(PACKAGE).with_suffix("") for path in sorted(PACKAGE.rglob("*.py"))]
    missing = [
        str(file)
        for file in files
        if file.name not in ("__init__", "__main__") and not {str(file), *map(str, file.parents)} & set(named)
    ]
    assert missing == []


@pytest.mark.parametrize("table", LIMITS)
def test_what_is_above_a_limit_is_listed_and_the_list_only_shrinks(table: str) -> None:
    """A new one is divided, not listed."""
    measure, most = LIMITS[table]
    listed = LISTED[table]
    above = {name: number for name, number in measure(PROJECT).items() if number > most}
    grown = {name: number for name, number in above.items() if number > listed.get(name, most)}
    assert grown == {}, f"above {most}, or more than `layout_exceptions.toml` says"
    assert set(listed) <= set(above), "within the limit by now: take it off `layout_exceptions.toml`"


def test_the_measures_find_what_they_look_for() -> None:
    """A long file, a long function, nine parameters, a borrowed name, and a circle that only type checkers go round."""
    long = 'def f(a, b, c, d, *, e, f, g, h, i):\n    """Two\n    lines."""\n' + "    a\n" * 60
    files = {
        "qflow/one.py": "from qflow.two import _taken\nself._own = other._own\nother._theirs, other._replace()\n",
        "qflow/two.py": "if TYPE_CHECKING:\n    from qflow import one\n" + long,
    }
    assert file_lines(files) == {"qflow/one.py": 3, "qflow/two.py": 65}
    assert function_lines(files) == {"qflow/two.py:f": 61}
    assert parameters(files) == {"qflow/two.py:f": 9}
    assert borrowed_names(files) == {"qflow/one.py": 2, "qflow/two.py": 0}
    assert circles(files) == {"qflow/one.py": 2}
