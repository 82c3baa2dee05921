"""`graphrunner serve`."""

from __future__ import annotations

import asyncio
from typing import Annotated, cast

import typer

from graphrunner.core.errors import GraphRunnerError


def serve(
    model: Annotated[str | None, typer.Option(help="Hub id, folder or GGUF file; none is the embedded model.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="Name of the model in the API.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Key that clients must send; may be repeated.")] = None,
    max_concurrent_requests: Annotated[int, typer.Option(help="Most requests at once; more get 429.")] = 2048,
    *,
    engine_options: dict[str, object],
) -> None:
    """Serve the OpenAI API."""
    from graphrunner.config.options import engine_config_from_options
    from graphrunner.engine.build import build_engine
    from graphrunner.entrypoints.openai.async_engine import AsyncEngine, SyncEngine
    from graphrunner.entrypoints.openai.serve import ServerFailedError, ServerProcess
    from graphrunner.entrypoints.openai.server_options import ServerOptions

    options = ServerOptions(
        host=host,
        port=port,
        served_model_name=served_model_name,
        api_key=tuple(api_key or ()),
        max_concurrent_requests=max_concurrent_requests,
    )
    config = engine_config_from_options({"model": model, **engine_options})
    server = ServerProcess(
        lambda on_death: AsyncEngine(lambda: cast("SyncEngine", build_engine(config)), on_death=on_death),
        options,
        on_listening=lambda url: typer.echo(f"listening on {url}, loading the model"),
        on_ready=lambda: typer.echo("ready"),
    )
    try:
        asyncio.run(server.run())
    except ServerFailedError as error:
        if isinstance(error.__cause__, GraphRunnerError):
            raise error.__cause__ from None
        typer.echo(f"graphrunner: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
