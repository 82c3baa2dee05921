"""Everyone who watches the steps of one engine, made from the telemetry settings."""

from __future__ import annotations

from pathlib import Path

import torch

from graphrunner.config.engine_config import TelemetryConfig
from graphrunner.config.env import has_nvtx
from graphrunner.core.outputs import StepRecord
from graphrunner.telemetry import ranges
from graphrunner.telemetry.chrome_trace import TraceFile
from graphrunner.telemetry.metrics import EngineMetrics
from graphrunner.telemetry.request_trace import RequestTrace
from graphrunner.telemetry.step_trace import StepTrace

_NUM_TRACED_STEPS = 200_000
"""Kept for a trace file: about half an hour of the fastest decode; the last ones win."""


class Observation:
    """Takes in every step's record.

    Args:
        config: what is watched.
        device: whose profiler ranges are for.

    Attributes:
        steps, metrics: always there.
        trace_file: None when no trace was asked for.

    Raises:
        ConfigError: the trace file cannot be written.
    """

    def __init__(self, config: TelemetryConfig, device: torch.device) -> None:
        self.metrics = EngineMetrics()
        self.steps = StepTrace(_NUM_TRACED_STEPS) if config.trace else StepTrace()
        self.trace_file = TraceFile(Path(config.trace), self.steps, RequestTrace()) if config.trace else None
        if config.nvtx or has_nvtx():
            turn_ranges_on(device)

    def on_step(self, record: StepRecord) -> None:
        """See `EngineCore`."""
        self.steps.add(record)
        self.metrics.add_step(record)
        if self.trace_file is not None:
            self.trace_file.requests.computed(record)


def turn_ranges_on(device: torch.device) -> None:
    """Profiler ranges for the rest of the process: NVTX on a GPU, those of torch.profiler elsewhere."""
    if device.type == "cuda":
        ranges.turn_on(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
        return
    opened: list[torch.profiler.record_function] = []

    def push(name: str) -> None:
        opened.append(torch.profiler.record_function(name))
        opened[-1].__enter__()

    def pop() -> None:
        if opened:  # ranges may be turned on in the middle of one
            opened.pop().__exit__(None, None, None)

    ranges.turn_on(push, pop)
