"""`graphrunner graphs`: the capture plan before and after some traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from graphrunner.runner.graph_account import GraphReport


def graphs(
    model: Annotated[str | None, typer.Option(help="Hub id, folder or GGUF file; none is the embedded model.")] = None,
    num_requests: Annotated[int, typer.Option(help="Requests to run between the two tables.")] = 6,
    *,
    engine_options: dict[str, object],
) -> None:
    """Print, per runner and key, what capture cost, how often it ran, its padding, and misses by reason."""
    from graphrunner import LLM, SamplingParams

    with LLM(model, **engine_options) as llm:
        show("captured", llm.graph_report())
        prompts = [{"prompt_token_ids": list(range(10, 18 + index))} for index in range(num_requests)]
        params = [
            SamplingParams(temperature=0.0, max_tokens=4 + index, ignore_eos=True) for index in range(num_requests)
        ]
        llm.generate(prompts, params, use_tqdm=False)
        show(f"after {num_requests} requests", llm.graph_report())


def show(title: str, report: GraphReport) -> None:
    """Print a report as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("runner", "key", "capture ms", "MiB", "replays", "padding", title=title)
    for row in report.keys:
        mib = f"{row.stats.memory_bytes / (1 << 20):.1f}"
        share = f"{row.padding_share:.0%}" if row.num_replays else ""
        table.add_row(row.runner, str(row.key), f"{row.stats.capture_ms:.1f}", mib, str(row.num_replays), share)
    console.print(table)
    for runner, key, cause in report.failed:
        console.print(f"not captured: {runner} {key}: {cause}")
    if report.misses:
        misses = Table("miss reason", "steps")
        for reason, count in report.misses.items():
            misses.add_row(reason, str(count))
        console.print(misses)
