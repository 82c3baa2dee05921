"""A picture of a load run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from graphrunner.core.errors import ConfigError
from graphrunner.entrypoints.cli.bench.load_report import Objective, RequestTimes


def write_plot(path: Path, requests: Sequence[RequestTimes], objective: Objective) -> None:
    """Time to first token over the run, and how inter-token times are spread; the objective as dashed lines.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("plot", str(path), "needs matplotlib: pip install matplotlib") from None
    done = [request for request in requests if request.error is None and request.token_s]
    figure, (first, second) = pyplot.subplots(1, 2, figsize=(11, 4))
    first.scatter([each.start_s for each in done], [each.ttft_s * 1e3 for each in done], s=8)
    first.set(xlabel="sent, s", ylabel="time to first token, ms")
    if math.isfinite(objective.ttft_ms):
        first.axhline(objective.ttft_ms, linestyle="--", color="tab:red", label="objective")
    gaps = sorted(gap * 1e3 for each in done for gap in each.inter_token_s)
    shares = [(index + 1) / len(gaps) for index in range(len(gaps))]
    second.plot(gaps, shares)
    second.set(xlabel="between two tokens, ms", ylabel="share of gaps up to this")
    if math.isfinite(objective.itl_ms):
        second.axvline(objective.itl_ms, linestyle="--", color="tab:red", label="objective")
    for axes in (first, second):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError("plot", str(path), f"cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
