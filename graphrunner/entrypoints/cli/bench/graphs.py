"""`graphrunner bench graphs`: what recording gains, step by step size."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from graphrunner.core.errors import ConfigError
from graphrunner.entrypoints.cli.sampling_options import Model
from graphrunner.entrypoints.cli.start import llm_class


def graphs(
    model: Model = None,
    batches: Annotated[str, typer.Option(help="Batch sizes, joined by commas.")] = "1,2,4,8",
    prompt_len: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 32,
    num_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    engine_options: dict[str, object],
) -> None:
    """Milliseconds of a decode step, eager and with graphs, side by side."""
    sizes = _sizes(batches)
    from graphrunner.entrypoints.cli.bench.measured import batch_times

    step_ms: dict[str, list[float]] = {}
    for name, options in (("eager", {**engine_options, "enforce_eager": True}), ("graph", engine_options)):
        with llm_class()(model, **options) as llm:
            step_ms[name] = [batch_times(llm, size, prompt_len, num_tokens).step_ms for size in sizes]
    if as_json:
        typer.echo(json.dumps({"batches": sizes, **step_ms}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("batch", "eager ms", "graph ms", "gain", title="a decode step", title_justify="left")
    for size, eager_ms, graph_ms in zip(sizes, step_ms["eager"], step_ms["graph"], strict=True):
        table.add_row(str(size), f"{eager_ms:.2f}", f"{graph_ms:.2f}", f"{eager_ms / graph_ms:.2f}x")
    Console().print(table)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(item) for item in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ConfigError("batches", text, "must be positive whole numbers joined by commas")
    return sizes
