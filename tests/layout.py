"""Measures of the code's shape, and their limits: `python tests/layout.py` prints what is above them.

As `layout_exceptions.toml` lists it, with one table for each limit.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import click

import qflow
import qflow.aio
from qflow.cli.main import app

ROOT = Path(__file__).parent.parent
FOLDERS = ("qflow", "pyspark_qflow", "bench")
MOST_FILE_LINES = 450
MOST_FUNCTION_LINES = 60
"""Without the docstring."""
MOST_PARAMETERS = 8
OF_NAMED_TUPLES = {"_replace", "_asdict", "_make", "_fields"}

Files = dict[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def project() -> Files:
    """Return the text of each file, by its path in the project."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


PROJECT = project()
parse = cache(ast.parse)


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a module, which to find takes longer than to look at each."""
    return list(ast.walk(tree))


def functions(files: Files) -> Iterator[tuple[str, Function]]:
    """Yield (path and dotted name, function)."""
    for path, text in files.items():
        for name, function in functions_of(text):
            yield f"{path}:{name}", function


@cache
def functions_of(text: str) -> list[tuple[str, Function]]:
    """Return (dotted name, function) of each in a module; no expression holds one."""

    def below(node: ast.AST, name: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            is_named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            inner = f"{name}.{child.name}".lstrip(".") if is_named else name  # type: ignore[attr-defined]
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield inner, child
            yield from below(child, inner)

    return list(below(parse(text), ""))


def file_lines(files: Files) -> dict[str, int]:
    return {path: text.count("\n") for path, text in files.items()}


def function_lines(files: Files) -> dict[str, int]:
    found = {}
    for name, function in functions(files):
        first = function.body[0]
        has_words = ast.get_docstring(function, clean=False) is not None
        words = (first.end_lineno or 0) - first.lineno + 1 if has_words else 0
        found[name] = (function.end_lineno or 0) - function.lineno + 1 - words
    return found


def parameters(files: Files) -> dict[str, int]:
    """How many parameters each function has that no user calls."""
    installed = Path(qflow.__file__).parent.parent
    public = {(str(Path(code.co_filename).relative_to(installed)), code.co_name) for code in public_code()}
    found = {}
    for name, function in functions(files):
        taken = function.args
        if (name.partition(":")[0], function.name) not in public:
            found[name] = len(taken.posonlyargs) + len(taken.args) + len(taken.kwonlyargs)
    return found


def public_code() -> Iterator[Any]:
    """Yield the code of each function that users call, or that the command line calls with its options."""
    for module in (qflow, qflow.aio):
        for name in module.__all__:
            thing = getattr(module, name)
            for holder in thing.__mro__ if inspect.isclass(thing) else ():
                for method, function in vars(holder).items():
                    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
                    if code is not None and not method.startswith("_") and "qflow" in code.co_filename:
                        yield code
            if isinstance(thing, FunctionType):
                yield thing.__code__
    for command in commands().values():
        if command.callback is not None:
            yield inspect.unwrap(command.callback).__code__


def commands() -> dict[str, click.Command]:
    """Return each command and group of the command line, by its words."""
    found: dict[str, click.Command] = {}

    def add(command: click.Command, words: str) -> None:
        found[words] = command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                below = command.get_command(context, name)
                assert below is not None, name
                add(below, f"{words} {name}")

    add(app, "qflow")
    return found


def borrowed_names(files: Files) -> dict[str, int]:
    """How often each file takes `other._private` of another module, or imports it."""
    found = {}
    for path, text in files.items():
        tree = parse(text)
        own = own_names(tree)
        taken = [
            node.attr
            for node in nodes(tree)
            if isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and node.attr not in own
            and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"} | sys.stdlib_module_names)
        ]
        taken += [
            alias.name
            for node in nodes(tree)
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in FOLDERS
            for alias in node.names
            if is_private(alias.name)
        ]
        found[path] = len(taken)
    return found


def own_names(tree: ast.Module) -> set[str]:
    """Return what a module gives a name to: functions, attributes of `self`, slots and fields."""
    own = set()
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
                own.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
    return own


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in OF_NAMED_TUPLES


def circles(files: Files) -> dict[str, int]:
    """The circles of imports between files, by their first file, with how many files are in each."""
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files}
    below: dict[str, set[str]] = {}
    for path, text in files.items():
        below[path] = set()
        for node in nodes(parse(text)):
            wanted: list[str] = []
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                wanted = [
                    whole if (whole := f"{node.module}.{alias.name}") in names else str(node.module)
                    for alias in node.names
                ]
            below[path] |= {names[name] for name in wanted if name in names} - {path}
    reached = {path: closure(path, below) for path in files}
    found: dict[str, int] = {}
    seen: set[str] = set()
    for path in sorted(files):
        circle = {other for other in reached[path] if path in reached[other]}
        if circle and path not in seen:
            found[path] = len(circle)
            seen |= circle
    return found


def closure(start: str, below: dict[str, set[str]]) -> set[str]:
    """Return what a file imports, and what that imports, and so on."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = below[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


LIMITS = {
    "file_lines": (file_lines, MOST_FILE_LINES),
    "function_lines": (function_lines, MOST_FUNCTION_LINES),
    "parameters": (parameters, MOST_PARAMETERS),
    "borrowed_names": (borrowed_names, 0),
    "circles": (circles, 0),
}


if __name__ == "__main__":
    for table, (measure, most) in LIMITS.items():
        print(f"\n[{table}]")
        for name, number in measure(PROJECT).items():
            if number > most:
                print(f'"{name}" = {number}')
