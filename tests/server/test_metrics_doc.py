"""docs/metrics.md, the exposition and the Grafana dashboard agree."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.outputs import StepRecord
from graphrunner.core.shape_key import ForwardMode, ForwardVariant, ShapeKey
from graphrunner.entrypoints.openai.front_metrics import FrontMetrics
from graphrunner.telemetry.metrics import EngineMetrics

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "graphrunner.json"
PARTS = ("_bucket", "_sum", "_count")
Metric = tuple[str, str, frozenset[str]]


def exposed() -> set[Metric]:
    """(name, type, labels) of everything a server says, once each metric has been used."""
    engine, front = EngineMetrics(), FrontMetrics()
    key = ShapeKey(4, 4, ForwardVariant.GREEDY)
    miss = GraphMiss(GraphMissReason.PADDING)
    engine.add_step(StepRecord(0, ForwardMode.DECODE, "eager", key, 3, 3, False, miss, 0.0, 1.0))
    engine.add_first_token(0.1, 5, 3)
    engine.add_tokens(1, 0.01)
    engine.add_finished("stop")
    front.requests.labels("/health", "200").inc()
    text = (front.text() + engine.text(EngineStats())).decode()
    found = set()
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        if not family.name.endswith("_created"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found.add((name, family.type, frozenset(labels)))
    return found


def documented() -> set[Metric]:
    rows = re.findall(r"^\| (graphrunner_\w+) \| (\w+) \| ([\w, ]*)\|", (ROOT / "docs/metrics.md").read_text(), re.M)
    return {(name, kind, frozenset(labels.replace(",", " ").split())) for name, kind, labels in rows}


def names_in(text: str) -> set[str]:
    """Metrics that queries use, without the suffixes of a histogram's parts."""
    found = set(re.findall(r"\bgraphrunner_[a-z_]+", text))
    histograms = {name for name, kind, _ in exposed() if kind == "histogram"}
    return {
        next((name.removesuffix(part) for part in PARTS if name.removesuffix(part) in histograms), name)
        for name in found
    }


def test_the_page_lists_what_is_exposed() -> None:
    assert documented() == exposed()


def test_queries_on_the_page_use_what_is_exposed() -> None:
    queries = re.findall(r"`([^`]*rate\([^`]*)`", (ROOT / "docs/metrics.md").read_text())
    assert queries and names_in(" ".join(queries)) <= {name for name, _, _ in exposed()}


def test_every_miss_reason_is_listed() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    assert [reason.name for reason in GraphMissReason if reason.name not in page] == []


def test_dashboard_uses_what_is_exposed() -> None:
    board = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) and len(panels) > 15
    known = {name: labels for name, _, labels in exposed()}
    for panel in panels:
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel["targets"]:
            used = names_in(target["expr"])
            assert used and used <= set(known), panel["title"]
            allowed = {"instance", "le"}.union(*(known[name] for name in used))
            matched = set(re.findall(r"(\w+)(?:=~|!=|!~|=)\"", target["expr"]))
            grouped = {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert matched | grouped | shown <= allowed, panel["title"]
    covered = set().union(*(names_in(target["expr"]) for panel in panels for target in panel["targets"]))
    assert {
        "graphrunner_time_to_first_token_seconds",
        "graphrunner_kv_pages_used",
        "graphrunner_steps_total",
    } <= covered
