"""What the site has beside the pages here: the README as its first page, examples, results, the Python reference.

Links of pages are those of the repository; here they are led to where the site has what they point to.
"""

from __future__ import annotations

import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import qflow

ROOT = Path(__file__).parent.parent
WHOLE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "examples": "examples/index.md",
}
"""Where the site has what lies outside of `docs`, by its place in the repository."""
SHOWN = ("examples/*.py", "bench/results/*.txt")
"""Files that are pages of their own, as they are."""
LINK = re.compile(r"(?<!!)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
OTHERS = ("qflow.aio.AsyncBroker", "qflow.aio.AsyncQueue", "qflow.aio.connect", "qflow.aio.open", "qflow.inspect")
"""Of the Python surface, beside what `qflow` itself has."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    shown = sorted(path for pattern in SHOWN for path in ROOT.glob(pattern))
    for path in shown:
        fence = "python" if path.suffix == ".py" else "text"
        text = f"# {path.name}\n\n```{fence}\n{path.read_text()}\n```\n"
        files.append(_made(config, _place(path.relative_to(ROOT).as_posix()), text))
    for name, place in WHOLE.items():
        if (ROOT / name).is_file():
            text = (ROOT / name).read_text()
            files.append(_made(config, place, f"# Licence\n\n```text\n{text}\n```\n" if name == "LICENSE" else text))
    rows = [f"- [{path.name}]({path.stem}.md): {_first_line(path)}" for path in shown if path.suffix == ".py"]
    files.append(_made(config, WHOLE["examples"], "\n".join(["# Examples", "", *rows, ""])))
    files.append(_made(config, "reference/python.md", _python()))
    files.append(_made(config, "reference/cli.md", _commands()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the site has what they point to."""
    source = next((name for name, place in WHOLE.items() if place == page.file.src_uri), f"docs/{page.file.src_uri}")
    if source == "examples":
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def led(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        return f"]({posixpath.relpath(_place(target), here or '.')}{link[2] or ''})"

    return LINK.sub(led, markdown)


def _place(name: str) -> str:
    """Return where the site has a file of the repository."""
    if name in WHOLE:
        return WHOLE[name]
    if name.startswith(("examples/", "bench/")):
        return posixpath.splitext(name)[0] + ".md"
    return name.removeprefix("docs/")


def _made(config: MkDocsConfig, place: str, text: str) -> File:
    return File.generated(config, place, content=text)


def _first_line(example: Path) -> str:
    return example.read_text().split('"""')[1].strip().split("\n")[0]


def _commands() -> str:
    """Return the page of the command line."""
    return str(runpy.run_path(str(ROOT / "docs" / "commands.py"))["page"]())


def _python() -> str:
    """Return the page of the Python surface, with a directive for each public name."""
    names: list[Any] = [f"qflow.{name}" for name in sorted(qflow.__all__, key=str.lower)]
    directives = [f"::: {name}" for name in (*names, *OTHERS)]
    return "\n\n".join(["# Python", "What the docstrings say, name by name.", *directives, ""])
