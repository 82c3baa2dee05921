"""`graphrunner chat`: a conversation in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from graphrunner.core.errors import InvalidRequestError
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.entrypoints.cli.sampling_options import (
    MaxTokens,
    Model,
    RepetitionPenalty,
    SamplingSeed,
    Temperature,
    TopP,
)
from graphrunner.entrypoints.cli.start import llm_class
from graphrunner.telemetry.log import lines_held

if TYPE_CHECKING:
    from graphrunner.entrypoints.llm import LLM


def chat(
    *,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    repetition_penalty: RepetitionPenalty = 1.1,
    sampling_seed: SamplingSeed = None,
    engine_options: dict[str, object],
) -> None:
    """Talk to the model. /reset forgets, Ctrl-C stops an answer, an empty line or Ctrl-D ends."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=sampling_seed,
    )
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    with llm_class()(model, **engine_options) as llm:
        typer.echo("/reset forgets, Ctrl-C stops an answer, an empty line ends", err=True)
        while line := _ask():
            if line == "/reset":
                messages = list(first)
                continue
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
            except InvalidRequestError as error:
                typer.echo(f"{error} (/reset starts anew)", err=True)
                messages.pop()


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Stream one answer; Ctrl-C keeps what was said so far."""
    parts: list[str] = []
    with lines_held():
        stream = llm.stream(llm.chat_prompt(messages), params)
        try:
            for output in stream:
                parts.append(output.outputs[0].text)
                typer.echo(parts[-1], nl=False)
        except KeyboardInterrupt:
            typer.echo(" [stopped]", nl=False)
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()  # aborts what still runs
        typer.echo()
    return "".join(parts)


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
