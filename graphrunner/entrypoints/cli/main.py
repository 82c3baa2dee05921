"""The command line. Heavy imports stay inside the commands, so that --help is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from graphrunner.core.errors import GraphRunnerError
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.entrypoints.cli.bench import bench
from graphrunner.entrypoints.cli.engine_options import with_engine_options
from graphrunner.entrypoints.cli.graphs import graphs
from graphrunner.entrypoints.cli.serve import serve

app = typer.Typer(
    help="An LLM inference engine: generate, chat, serve; and a full account of which graph ran.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Model = Annotated[str | None, typer.Option(help="Hub id, folder or GGUF file; none is the embedded SmolLM2-135M.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the smallest set of tokens that reaches this probability.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Penalty = Annotated[float, typer.Option(help="Above 1 discourages tokens that were there before.")]
Seed = Annotated[int | None, typer.Option("--sampling-seed", help="The same seed gives the same text.")]


def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    model: Model = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the chat template.")] = False,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    repetition_penalty: Penalty = 1.0,
    sampling_seed: Seed = None,
    trace: Annotated[Path | None, typer.Option(help="Write the steps as a Chrome / Perfetto trace.")] = None,
    *,
    engine_options: dict[str, object],
) -> None:
    """Generate text for one prompt, streamed to the terminal."""
    from graphrunner import LLM

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=sampling_seed,
    )
    with LLM(model, **engine_options) as llm:
        given = llm.chat_prompt([{"role": "user", "content": prompt}]) if chat else prompt
        if not chat:
            typer.echo(prompt, nl=False)
        for output in llm.stream(given, params):
            typer.echo(output.outputs[0].text, nl=False)
        typer.echo()
        if trace is not None:
            llm.engine.step_trace.write_chrome_trace(trace)


def chat(
    model: Model = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    repetition_penalty: Penalty = 1.1,
    *,
    engine_options: dict[str, object],
) -> None:
    """Talk to the model; an empty line or Ctrl-D ends the conversation."""
    from graphrunner import LLM

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, repetition_penalty=repetition_penalty
    )
    messages: list[dict[str, str]] = []
    with LLM(model, **engine_options) as llm:
        while line := _ask():
            messages.append({"role": "user", "content": line})
            parts = []
            for output in llm.stream(llm.chat_prompt(messages), params):
                parts.append(output.outputs[0].text)
                typer.echo(parts[-1], nl=False)
            typer.echo()
            messages.append({"role": "assistant", "content": "".join(parts)})


def env() -> None:
    """Print what a bug report needs."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    rows = [("python", platform.python_version()), ("platform", platform.platform())]
    for package in ("graphrunner", "torch", "triton", "transformers", "tokenizers", "xgrammar"):
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            rows.append((package, "not installed"))
    rows.append(("threads", str(torch.get_num_threads())))
    rows.append(("cuda", torch.cuda.get_device_name() if torch.cuda.is_available() else "no"))
    for name, value in rows:
        typer.echo(f"{name:14} {value}")


app.command()(with_engine_options(generate))
app.command()(with_engine_options(chat))
app.command()(with_engine_options(serve))
app.command()(with_engine_options(graphs))
app.command()(env)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line; an error of ours is one line and exit code 2."""
    try:
        app()
    except GraphRunnerError as error:
        typer.echo(f"graphrunner: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
