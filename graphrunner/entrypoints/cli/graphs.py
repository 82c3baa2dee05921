"""`graphrunner graphs`: the capture plan before and after some traffic."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from graphrunner.entrypoints.cli.sampling_options import Model
from graphrunner.entrypoints.cli.start import llm_class
from graphrunner.entrypoints.cli.startup_table import show_startup, startup_as_dict

if TYPE_CHECKING:
    from graphrunner.runner.graph_account import GraphReport

MIB = 1 << 20
MIN_SHOWN_MS = 0.5
"""Keys that cost less and never ran are counted, not listed."""


def graphs(
    model: Model = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to run between the two tables.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a request.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    *,
    engine_options: dict[str, object],
) -> None:
    """Print the start and what was captured, run some requests, print it again: memory, replays, padding, misses."""
    from graphrunner.core.sampling_params import SamplingParams

    with llm_class()(model, **engine_options) as llm:
        start, before = llm.startup_report(), llm.graph_report()
        prompts = [{"prompt_token_ids": list(range(10, 18 + index))} for index in range(num_requests)]
        lens = [max(1, max_tokens - index) for index in range(num_requests)]  # so that the batch shrinks step by step
        params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lens]
        if not as_json:
            show_startup(start)
            show("captured", before)
        llm.generate(prompts, params, use_tqdm=False)
        after = llm.graph_report()
    if as_json:
        reports = {"start": startup_as_dict(start), "captured": _as_dict(before), "after": _as_dict(after)}
        typer.echo(json.dumps(reports, indent=2))
    else:
        show(f"after {num_requests} requests", after)


def show(title: str, report: GraphReport) -> None:
    """Print a report as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        "runner", "key", "nodes", "capture ms", "MiB", "replays", "padding", title=title, title_justify="left"
    )
    shown = [row for row in report.keys if row.num_replays or row.stats.capture_ms >= MIN_SHOWN_MS]
    for row in shown:
        share = f"{row.padding_share:.0%}" if row.num_replays else ""
        nodes = str(row.stats.num_nodes) if row.stats.num_nodes else ""
        cost = f"{row.stats.capture_ms:.1f}{' (from cache)' if row.stats.is_cached else ''}"
        mib = f"{row.stats.memory_bytes / MIB:.1f}"
        table.add_row(row.runner, str(row.key), nodes, cost, mib, str(row.num_replays), share)
    total_ms = sum(row.stats.capture_ms for row in report.keys)
    total_mib = sum(row.stats.memory_bytes for row in report.keys) / MIB
    num_replays = sum(row.num_replays for row in report.keys)
    if len(shown) < len(report.keys):
        hidden = [row.key.num_tokens for row in report.keys if row not in shown]
        sizes = f"{min(hidden)}t to {max(hidden)}t"
        table.add_row(f"{len(hidden)} more, unused", sizes, "", "0.0", "", "0", "")
    table.add_section()
    table.add_row("all", f"{len(report.keys)} keys", "", f"{total_ms:.1f}", f"{total_mib:.1f}", str(num_replays), "")
    console.print(table)
    for runner, key, cause in report.failed:
        console.print(f"not captured: {runner} {key}: {cause}", markup=False)
    if report.num_checked_steps:
        console.print(f"{report.num_checked_steps} replays checked against eager")
    if report.misses:
        misses = Table("runner", "miss reason", "steps", title="steps without a graph", title_justify="left")
        for (runner, reason), count in sorted(report.misses_by_runner.items(), key=lambda item: -item[1]):
            misses.add_row(runner, reason, str(count))
        console.print(misses)


def _as_dict(report: GraphReport) -> dict[str, object]:
    keys = [
        {
            "runner": row.runner,
            "key": str(row.key),
            "num_nodes": row.stats.num_nodes,
            "capture_ms": row.stats.capture_ms,
            "memory_bytes": row.stats.memory_bytes,
            "is_cached": row.stats.is_cached,
            "num_replays": row.num_replays,
            "padding_share": row.padding_share,
        }
        for row in report.keys
    ]
    failed = [{"runner": runner, "key": str(key), "cause": cause} for runner, key, cause in report.failed]
    return {
        "keys": keys,
        "failed": failed,
        "misses": report.misses,
        "misses_by_runner": [
            {"runner": runner, "reason": reason, "steps": count}
            for (runner, reason), count in report.misses_by_runner.items()
        ],
        "num_eager_steps": report.num_eager_steps,
        "num_checked_steps": report.num_checked_steps,
    }
