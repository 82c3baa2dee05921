"""`graphrunner bench latency`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from graphrunner.entrypoints.cli.sampling_options import Model
from graphrunner.entrypoints.cli.start import llm_class


def latency(
    *,
    model: Model = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    prompt_len: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 32,
    num_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 128,
    num_repeats: Annotated[int, typer.Option(min=1, help="The best of so many runs counts.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    engine_options: dict[str, object],
) -> None:
    """Milliseconds to the first token and between tokens, for a fixed batch."""
    from graphrunner.entrypoints.cli.bench.measured import batch_times

    with llm_class()(model, **engine_options) as llm:
        times = batch_times(llm, batch, prompt_len, num_tokens, num_repeats)
    if as_json:
        typer.echo(json.dumps(asdict(times)))
        return
    typer.echo(f"first token {times.first_token_ms:.1f} ms, then {times.step_ms:.2f} ms a step")
    typer.echo(f"{times.tokens_per_s:.1f} tokens/s at batch {batch}")
