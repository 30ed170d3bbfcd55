"""What Prometheus and Grafana are given names metrics that there are, with labels that those have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("yaml")

import yaml

from layout import ROOT
from qflow.metrics.names import Listed, listed

DEPLOY = ROOT / "deploy"
KNOWN = {one.name: one for one in listed()}
ENDINGS = ("_bucket", "_count", "_sum")
RULES = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((DEPLOY / "grafana/qflow.json").read_text())


def metric(name: str) -> Listed | None:
    """Return the metric of a series."""
    ending = next((one for one in ENDINGS if name.endswith(one)), "")
    found = KNOWN.get(name)
    return found if found is not None or not ending else KNOWN.get(name.removesuffix(ending))


def panels() -> Iterator[dict[str, Any]]:
    """Yield what draws something."""
    yield from (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def expressions() -> Iterator[tuple[str, str]]:
    """Yield every expression of rules and dashboard, and what the text beside it shows of labels."""
    for rule in RULES:
        yield rule["expr"], rule["annotations"]["summary"]
    for panel in panels():
        yield from ((target["expr"], target["legendFormat"]) for target in panel["targets"])
    for variable in DASHBOARD["templating"]["list"][1:]:
        yield variable["query"]["query"], ""


def test_every_metric_that_is_named_exists() -> None:
    """With the labels that are asked of it, or shown beside it."""
    for expression, text in expressions():
        names = re.findall(r"\bqflow_\w+", expression)
        assert names, expression
        labels: set[str] = {"instance", "le"}
        for name in names:
            found = metric(name)
            assert found is not None, f"there is no {name}"
            labels |= set(found.labels)
        shown = {*re.findall(r"\{\{ ?\$labels\.(\w+)", text), *re.findall(r"\{\{(\w+)\}\}", text)}
        asked = set(re.findall(r'[{,](\w+)[=!]~?"', expression))
        assert shown | asked <= labels, expression


def test_counters_are_rates_and_gauges_are_not() -> None:
    """As their types demand."""
    for expression, _ in expressions():
        for function, name in re.findall(r"(\w+)\((qflow_\w+)", expression):
            found = metric(name)
            assert found is not None
            if function in ("rate", "increase"):
                assert found.type in ("counter", "histogram"), expression
            if found.type == "counter":
                assert function in ("rate", "increase"), expression


def test_every_alert_leads_to_a_section_of_the_runbook() -> None:
    """That exists."""
    for rule in RULES:
        page, anchor = rule["annotations"]["runbook"].split("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), flags=re.M)
        assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_panels_lie_beside_each_other() -> None:
    """None covers another, and each has a number of its own."""
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    covered: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & covered, panel["title"]
        assert place["x"] + place["w"] <= 24
        covered |= cells


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool of Prometheus is not installed")
def test_prometheus_takes_the_rules() -> None:
    """Its own tool reads them, and their tests pass."""
    for arguments in (["check", "rules", "rules.yml"], ["test", "rules", "rules.test.yml"]):
        subprocess.run(["promtool", *arguments], cwd=DEPLOY / "prometheus", check=True, timeout=120)


def test_the_reference_lists_every_metric() -> None:
    """As the collector names it, with its type, labels and what it is."""
    rows = [line for line in (ROOT / "docs/reference/metrics.md").read_text().splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{one.name}` | {one.type} | {', '.join(f'`{label}`' for label in one.labels)} | {one.text} |"
        for one in listed()
    ]
