"""`graphrunner bench offline`."""

from __future__ import annotations

import json
import random
import time
from typing import Annotated

import typer

from graphrunner.entrypoints.cli.bench.measured import random_prompt
from graphrunner.entrypoints.cli.sampling_options import Model
from graphrunner.entrypoints.cli.start import llm_class


def offline(
    model: Model = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    max_len: Annotated[int, typer.Option(min=8, help="Longest prompt and longest output, tokens.")] = 64,
    seed: Annotated[int, typer.Option("--workload-seed", help="Of the lengths and the prompts.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    engine_options: dict[str, object],
) -> None:
    """Output tokens a second for many requests of mixed lengths, all there at the start."""
    from graphrunner.core.sampling_params import SamplingParams

    rng = random.Random(seed)
    prompt_lens = [rng.randint(max_len // 8, max_len) for _ in range(num_requests)]
    output_lens = [rng.randint(max_len // 8, max_len) for _ in range(num_requests)]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in output_lens]
    with llm_class()(model, **engine_options) as llm:
        warm_up, *prompts = [random_prompt(rng, length, llm.engine.vocab_size) for length in (max_len, *prompt_lens)]
        llm.generate(warm_up, params[0], use_tqdm=False)
        start_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=not as_json)
        duration_s = time.perf_counter() - start_s
    tokens_per_s = sum(output_lens) / duration_s
    if as_json:
        counts = {"num_prompt_tokens": sum(prompt_lens), "num_output_tokens": sum(output_lens)}
        typer.echo(json.dumps({**counts, "duration_s": duration_s, "output_tokens_per_s": tokens_per_s}))
        return
    typer.echo(f"{tokens_per_s:.1f} output tokens/s ({sum(output_lens)} tokens in {duration_s:.2f} s)")
