"""`graphrunner serve`: the OpenAI API over one model."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from graphrunner.config.env import log_level
from graphrunner.entrypoints.cli.sampling_options import Model
from graphrunner.entrypoints.cli.start import ending_at_once
from graphrunner.telemetry.log import adopt_logger, announce, setup_logging

_GC_THRESHOLDS = (20_000, 10, 10)
"""A step at hundreds of streams makes thousands of short-lived objects; collecting at every one is wasted."""

if TYPE_CHECKING:
    from graphrunner.entrypoints.core_process.launch import LaunchCore
    from graphrunner.entrypoints.openai.server_options import ServerOptions
    from graphrunner.tokenizer.tokenizer import Tokenizer


def serve(
    model: Model = None,
    *,
    server_options: dict[str, object],
    engine_options: dict[str, object],
) -> None:
    """Serve the OpenAI API. SIGTERM finishes what runs; Ctrl-C stops at once."""
    with ending_at_once():
        from graphrunner.config.options import engine_config_from_options
        from graphrunner.engine.tokenizer import load_tokenizer, source_of
        from graphrunner.entrypoints.core_process.launch import launcher
        from graphrunner.entrypoints.openai.server_options import server_options_from

    options = server_options_from(server_options)
    config = engine_config_from_options({"model": model, **engine_options})
    setup_logging(log_level(), config.telemetry.log_format)
    for name in ("uvicorn", "opentelemetry"):
        adopt_logger(name)
    if options.log_requests:
        logging.getLogger("graphrunner.access").setLevel(logging.INFO)

    run_server(launcher(config), lambda: load_tokenizer(config.load, source_of(config.load)), options)


def run_server(launch: LaunchCore, read_tokenizer: Callable[[], Tokenizer | None], options: ServerOptions) -> None:
    """Serve one core until a signal or its death; says on stderr where and when, and why it ended.

    Args:
        launch: starts the core.
        read_tokenizer: called on a thread while the core loads.
    """
    with ending_at_once():  # pydantic makes an error of its own of a Ctrl-C
        from graphrunner.entrypoints.openai.async_engine import AsyncEngine
        from graphrunner.entrypoints.openai.serve import ServerFailedError, ServerProcess

    def make_engine(on_death: Callable[[], None]) -> AsyncEngine:
        return AsyncEngine(launch, read_tokenizer, on_death=on_death, may_restart=options.restart_engine)

    server = ServerProcess(
        make_engine,
        options,
        on_listening=lambda url: announce(f"listening on {url}, loading the model"),
        on_ready=_on_ready,
    )
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(server.run())
    except ServerFailedError as error:
        announce(f"graphrunner: {' '.join(str(error).split())}")
        raise typer.Exit(error.exit_code) from None


def _on_ready() -> None:
    """What is loaded by now is never garbage: looking through it again would hold up every stream."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    announce("ready")


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed (it does not exist for every system)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
