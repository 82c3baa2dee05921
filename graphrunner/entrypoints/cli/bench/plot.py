"""A picture of a load run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graphrunner.core.errors import ConfigError
from graphrunner.entrypoints.cli.bench.load_report import RequestTimes


def write_plot(path: Path, requests: Sequence[RequestTimes]) -> None:
    """Time to first token over the run, and how inter-token times are spread.

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
    gaps = sorted(gap * 1e3 for each in done for gap in each.inter_token_s)
    shares = [(index + 1) / len(gaps) for index in range(len(gaps))]
    second.plot(gaps, shares)
    second.set(xlabel="between two tokens, ms", ylabel="share of gaps up to this")
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError("plot", str(path), f"cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
