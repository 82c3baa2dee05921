"""`graphrunner bench serve`: load on any OpenAI endpoint, ours or another's."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphrunner.core.errors import ConfigError
from graphrunner.entrypoints.cli.bench.arrivals import Arrival, poisson_arrivals, trace_arrivals
from graphrunner.entrypoints.cli.bench.load_report import LoadReport, Objective, RequestTimes, make_report

if TYPE_CHECKING:
    from graphrunner.entrypoints.cli.bench.load_generator import Target


def serve(
    *,
    base_url: Annotated[str, typer.Option(help="The API's root.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="Model name; without it the first that the server has.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 100,
    rate: Annotated[float, typer.Option(help="Mean requests a second, Poisson; inf sends all at once.")] = 4.0,
    trace: Annotated[Path | None, typer.Option(help="Replay this CSV's times and lengths instead.")] = None,
    time_scale: Annotated[float, typer.Option(help="With --trace: 0.5 makes it twice as fast.")] = 1.0,
    prompt_len: Annotated[int, typer.Option(min=1, help="Mean prompt tokens.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Mean output tokens.")] = 64,
    spread: Annotated[float, typer.Option(min=0.0, max=1.0, help="Lengths vary by this share either way.")] = 0.5,
    max_len: Annotated[int | None, typer.Option(min=1, help="With --trace: cut lengths to this.")] = None,
    slo_ttft_ms: Annotated[float, typer.Option(help="Goodput counts requests with a first token by then.")] = math.inf,
    slo_itl_ms: Annotated[float, typer.Option(help="And with a mean inter-token time up to this.")] = math.inf,
    text_prompts: Annotated[bool, typer.Option("--text-prompts", help="Send words instead of token ids.")] = False,
    allow_eos: Annotated[bool, typer.Option("--allow-eos", help="Let outputs end early (no ignore_eos).")] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report and every request here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture here (needs matplotlib).")] = None,
) -> None:
    """Send requests at their times, however slow the server is; print latencies, throughput and goodput."""
    for name, path in (("json", json_file), ("plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():  # said before minutes of load, not after
            raise ConfigError(name, str(path), "its folder does not exist")
    arrivals = _arrivals(trace, num_requests, time_scale, max_len) if trace else None
    if arrivals is None:
        if not rate > 0:
            raise ConfigError("rate", rate, "must be above 0")
        arrivals = poisson_arrivals(num_requests, rate, prompt_len, output_len, spread=spread, seed=seed)
    from graphrunner.entrypoints.cli.bench.load_generator import Target

    target = Target(
        base_url=base_url,
        model=model or _first_model(base_url, api_key),
        api_key=api_key,
        has_token_prompts=not text_prompts,
        has_ignore_eos=not allow_eos,
    )
    requests, duration_s = _run(target, arrivals, seed)
    objective = Objective(slo_ttft_ms, slo_itl_ms)
    report = make_report(requests, duration_s, objective)
    _show(report)
    if json_file is not None:
        how = {"trace": trace.name, "time_scale": time_scale, "max_len": max_len} if trace else {
            "rate": rate, "prompt_len": prompt_len, "output_len": output_len, "spread": spread}  # fmt: skip
        _write(json_file, {"model": target.model, "seed": seed, **how}, objective, report, requests)
    if plot is not None:
        from graphrunner.entrypoints.cli.bench.plot import write_plot

        write_plot(plot, requests, objective)
    if report.num_failed:
        raise typer.Exit(1)


def _arrivals(trace: Path, num_requests: int, time_scale: float, max_len: int | None) -> list[Arrival]:
    if not (time_scale >= 0 and math.isfinite(time_scale)):
        raise ConfigError("time_scale", time_scale, "must be a number from 0")
    return trace_arrivals(trace, num_requests=num_requests, time_scale=time_scale, max_len=max_len)


def _first_model(base_url: str, api_key: str | None) -> str:
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{base_url}/models", headers=headers, timeout=10, trust_env=False).raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ConfigError("base_url", base_url, f"does not say which models it has: {error}") from None


def _run(target: Target, arrivals: list[Arrival], seed: int) -> tuple[list[RequestTimes], float]:
    """Send under a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    from graphrunner.entrypoints.cli.bench.load_generator import run_load

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=len(arrivals))
        return asyncio.run(run_load(target, arrivals, seed=seed, on_done=lambda _: progress.advance(task)))


def _show(report: LoadReport) -> None:
    from rich.console import Console
    from rich.table import Table

    typer.echo(f"{report.num_requests} requests in {report.duration_s:.1f} s, {report.num_failed} failed")
    typer.echo(f"{report.requests_per_s:.2f} requests/s, {report.output_tokens_per_s:.1f} output tokens/s")
    typer.echo(f"goodput {report.goodput_requests_per_s:.2f} requests/s")
    table = Table("ms", *report.ttft_ms)
    for name, row in (
        ("first token", report.ttft_ms),
        ("between tokens", report.itl_ms),
        ("whole", report.e2e_ms),
        ("sent late", report.late_ms),
    ):
        table.add_row(name, *(f"{value:.1f}" for value in row.values()))
    Console().print(table)
    for error, count in report.errors.items():
        typer.echo(f"{count} x {error}", err=True)


def _write(
    path: Path,
    settings: dict[str, object],
    objective: Objective,
    report: LoadReport,
    requests: list[RequestTimes],
) -> None:
    """Everything a reader needs to know what was measured. A limit that was not set is null."""
    limits = {"ttft_ms": objective.ttft_ms, "itl_ms": objective.itl_ms}
    objective_json = {name: value if math.isfinite(value) else None for name, value in limits.items()}
    settings = {name: str(value) if value == math.inf else value for name, value in settings.items()}
    each = [
        {
            "start_s": one.start_s,
            "token_s": one.token_s,
            "end_s": one.end_s,
            "num_tokens": one.num_tokens,
            "error": one.error,
            "late_s": one.late_s,
        }
        for one in requests
    ]
    try:
        document = {"settings": settings, "objective": objective_json, **report.as_dict(), "requests": each}
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("json", str(path), f"cannot be written: {error}") from None
