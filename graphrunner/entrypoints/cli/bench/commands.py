"""The `bench` group."""

from __future__ import annotations

import typer

from graphrunner.entrypoints.cli.bench.graphs import graphs
from graphrunner.entrypoints.cli.bench.latency import latency
from graphrunner.entrypoints.cli.bench.offline import offline
from graphrunner.entrypoints.cli.bench.serve import serve
from graphrunner.entrypoints.cli.engine_options import with_engine_options

bench = typer.Typer(help="Measure: offline throughput, latency, graphs, or a server under load.", no_args_is_help=True)
bench.command()(with_engine_options(offline))
bench.command()(with_engine_options(latency))
bench.command()(with_engine_options(graphs))
bench.command()(serve)
