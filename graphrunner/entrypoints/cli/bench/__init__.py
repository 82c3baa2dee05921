"""Owns: the bench commands.
May import: everything a command may.
Must not contain: engine code."""

from __future__ import annotations

import time
from typing import Annotated

import typer

bench = typer.Typer(help="Measure: one request's latency, or offline throughput.", no_args_is_help=True)
Model = Annotated[str | None, typer.Option(help="Hub id, folder or GGUF file; none is the embedded model.")]


@bench.command()
def latency(
    model: Model = None,
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 1,
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 32,
    num_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
) -> None:
    """Milliseconds to the first token and between tokens, for a fixed batch."""
    from graphrunner import LLM, SamplingParams

    with LLM(model) as llm:
        prompts = [{"prompt_token_ids": list(range(10 + row, 10 + row + prompt_len))} for row in range(batch)]

        def seconds(count: int) -> float:
            start_s = time.perf_counter()
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - start_s

        seconds(8)
        first_s, whole_s = seconds(1), seconds(num_tokens)
        per_step_s = (whole_s - first_s) / (num_tokens - 1)
        typer.echo(f"first token {first_s * 1e3:.1f} ms, then {per_step_s * 1e3:.2f} ms a step")
        typer.echo(f"{batch / per_step_s:.1f} tokens/s at batch {batch}")


@bench.command()
def offline(
    model: Model = None,
    num_requests: Annotated[int, typer.Option(help="Requests at once.")] = 16,
    max_len: Annotated[int, typer.Option(help="Longest prompt and longest output, tokens.")] = 64,
) -> None:
    """Output tokens a second for many requests of mixed lengths."""
    import random

    from graphrunner import LLM, SamplingParams

    rng = random.Random(1)
    prompt_lens = [rng.randint(max_len // 8 + 1, max_len) for _ in range(num_requests)]
    output_lens = [rng.randint(max_len // 8 + 1, max_len) for _ in range(num_requests)]
    with LLM(model) as llm:
        prompts = [{"prompt_token_ids": [rng.randint(10, 9999) for _ in range(length)]} for length in prompt_lens]
        params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in output_lens]
        start_s = time.perf_counter()
        llm.generate(prompts, params)
        typer.echo(f"{sum(output_lens) / (time.perf_counter() - start_s):.1f} output tokens/s")
