"""The command line. What is slow to import stays inside the commands, so that --help is instant."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphrunner import __version__
from graphrunner.config.env import log_level
from graphrunner.core.errors import GraphRunnerError
from graphrunner.entrypoints.cli.bench.commands import bench
from graphrunner.entrypoints.cli.chat import chat
from graphrunner.entrypoints.cli.engine_options import with_engine_options, with_server_options
from graphrunner.entrypoints.cli.env import env
from graphrunner.entrypoints.cli.generate import generate
from graphrunner.entrypoints.cli.graphs import graphs
from graphrunner.entrypoints.cli.serve import serve
from graphrunner.entrypoints.openai.server_options import ServerOptions
from graphrunner.telemetry.log import setup_logging

EXIT_OUR_ERROR = 2
EXIT_INTERRUPTED = 130


class Commands(TyperGroup):
    """Turns an error of ours into one line and exit code 2, and Ctrl-C into exit code 130 without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GraphRunnerError as error:
            line = " ".join(str(error).split())
            typer.echo(f"graphrunner: {line}", err=True)
            raise typer.Exit(EXIT_OUR_ERROR) from None
        except KeyboardInterrupt:
            typer.echo(err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    help="An LLM inference engine: generate, chat, serve; and a full account of which graph ran.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """An LLM inference engine: generate, chat, serve; and a full account of which graph ran."""
    setup_logging(log_level())


app.command()(with_engine_options(generate))
app.command()(with_engine_options(chat))
app.command()(with_engine_options(with_server_options(serve, ServerOptions)))
app.command()(with_engine_options(graphs))
app.add_typer(bench, name="bench")
app.command()(env)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
