"""`graphrunner serve` with a scripted core: `scripted_front.py [--restart-engine] [options of scripted_core.py]`."""

# ruff: noqa: E402
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # from the first line on, as the command has it from its first import on

import argparse
import sys
from pathlib import Path

from graphrunner.entrypoints.cli.start import ending_at_once

signal.signal(signal.SIGINT, signal.default_int_handler)
with ending_at_once():
    import typer
    from scripted_engine import ByteTokenizer

    from graphrunner.config.engine_config import EngineConfig
    from graphrunner.entrypoints.cli.serve import run_server
    from graphrunner.entrypoints.core_process.launch import launcher
    from graphrunner.entrypoints.openai.server_options import ServerOptions

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--restart-engine", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    given, rest = parser.parse_known_args()
    command = [sys.executable, str(Path(__file__).with_name("scripted_core.py")), *rest]
    options = ServerOptions(port=given.port, restart_engine=given.restart_engine, log_requests=False)
    try:
        run_server(launcher(EngineConfig(), command), ByteTokenizer, options)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
