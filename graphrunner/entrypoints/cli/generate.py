"""`graphrunner generate`: one prompt, streamed to the terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from graphrunner.core.sampling_params import SamplingParams
from graphrunner.entrypoints.cli.sampling_options import (
    MaxTokens,
    MinP,
    Model,
    RepetitionPenalty,
    SamplingSeed,
    Stop,
    Temperature,
    TopK,
    TopP,
)
from graphrunner.entrypoints.cli.start import llm_class
from graphrunner.telemetry.log import lines_held

if TYPE_CHECKING:
    from graphrunner.core.outputs import SpeculationStats, StepRecord
    from graphrunner.runner.graph_account import GraphReport


def generate(
    *,
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads it from standard input.")],
    model: Model = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the chat template.")] = False,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    sampling_seed: SamplingSeed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    stats: Annotated[bool, typer.Option(help="Say speed and graph coverage at the end, on stderr.")] = True,
    engine_options: dict[str, object],
) -> None:
    """Generate text for one prompt, streamed to the terminal."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=sampling_seed,
        stop=stop or None,
        ignore_eos=ignore_eos,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    with llm_class()(model, **engine_options) as llm:
        given = llm.chat_prompt([{"role": "user", "content": text}]) if chat else text
        if not chat:
            typer.echo(text, nl=False)
        num_tokens, ended_by, speculation = 0, "", None
        start_s = time.perf_counter()
        with lines_held():
            for output in llm.stream(given, params):
                num_tokens += len(output.outputs[0].token_ids)
                ended_by, speculation = output.outputs[0].finish_reason or "", output.outputs[0].speculation
                typer.echo(output.outputs[0].text, nl=False)
            typer.echo()
        if stats:
            typer.echo(_summary(num_tokens, ended_by, time.perf_counter() - start_s, llm.steps), err=True)
            if speculation is not None:
                typer.echo(_drafts(speculation), err=True)
            typer.echo(_compiled(llm.graph_report()), err=True)
        if engine_options.get("check_graphs"):
            num_checked = llm.graph_report().num_checked_steps
            typer.echo(f"[{num_checked} replays checked against eager, no difference]", err=True)


def _drafts(stats: SpeculationStats) -> str:
    stood = f"{stats.num_accepted} of {stats.num_drafts} drafts stood"
    return f"[{stood}, {stats.mean_accepted_length:.2f} a round in {stats.num_rounds} rounds]"


def _compiled(report: GraphReport) -> str:
    """What this start had to compile: a second start says that it was nothing."""
    from graphrunner.kernels.cpu.build import num_libraries_built

    num_graphs = sum(row.stats.num_compiled for row in report.keys)
    if num_graphs + num_libraries_built() == 0:
        return "[nothing was compiled]"
    return f"[compiled: {num_libraries_built()} kernel library, {num_graphs} graphs; the next start finds them on disk]"


def _summary(num_tokens: int, ended_by: str, duration_s: float, steps: list[StepRecord]) -> str:
    num_graph = sum(step.is_graph for step in steps)
    coverage = num_graph / len(steps) if steps else 0.0
    speed = num_tokens / duration_s if duration_s > 0 else 0.0
    graphs = f"{coverage:.0%} of {len(steps)} steps ran a graph"
    return f"[{num_tokens} tokens, ended by {ended_by}, in {duration_s:.2f} s, {speed:.1f} tokens/s; {graphs}]"
