"""The account of a start, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphrunner.core.startup_report import StartupReport

MIB = 1 << 20


def show_startup(report: StartupReport) -> None:
    """Print time and memory of each phase."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("phase", "seconds", "MiB", "expected MiB", title="start", title_justify="left")
    for phase in report.phases:
        table.add_row(phase.name, f"{phase.seconds:.2f}", _mib(phase.num_bytes), _mib(phase.estimated_bytes))
    table.add_section()
    total_bytes = sum(phase.num_bytes for phase in report.phases)
    table.add_row("together", f"{report.total_s:.2f} of {report.wall_s:.2f}", _mib(total_bytes), "")
    console.print(table)
    text = f"{report.num_pages} KV pages"
    if report.limit_bytes is not None and report.used_bytes is not None:
        text += f"; {_mib(report.used_bytes)} MiB of the card are in use, {_mib(report.limit_bytes)} may be"
    console.print(text, highlight=False)


def startup_as_dict(report: StartupReport) -> dict[str, object]:
    """For JSON."""
    return asdict(report) | {"total_s": report.total_s}


def _mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / MIB:.0f}"
