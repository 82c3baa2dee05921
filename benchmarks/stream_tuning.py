"""How far each projection asks ahead along the stream of weights, measured in whole decode steps.

    python benchmarks/stream_tuning.py [--models 0.6B,1B,8B] [--batches 1,16]

What a kernel asks for comes while its predecessor still computes, so a projection by itself shows nothing: each
distance is tried in a step of all layers, one projection after the other, the best kept.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernel_steps import Model, capture_step, read_bandwidth_tb_s
from benchmarks.kernel_tuning import DEVICE, DTYPE, MODELS, Shape
from graphrunner.kernels.triton import linear_config
from graphrunner.kernels.triton.linear_config import LinearKind, LinearShape

MIB = 1 << 20
DISTANCES_MIB = (0, 2, 4, 8, 12, 16, 24, 32, 40)
NUM_REPLAYS, NUM_ROUNDS = 12, 8


def step_us(model: Model, batch: int) -> float:
    """Microseconds of one replay; the best of some rounds."""
    graph = capture_step(model, batch)
    best = float("inf")
    for _ in range(NUM_ROUNDS):
        model.reset()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        for _ in range(NUM_REPLAYS):
            graph.replay()
        stop.record()
        stop.synchronize()
        best = min(best, 1e3 * start.elapsed_time(stop) / NUM_REPLAYS)
    return best


def tune_stream(shape: Shape, batch: int, model: Model) -> dict[str, int]:
    """Print every trial; returns the best distance in bytes of each projection's table row."""
    found: dict[str, int] = {}
    print(f"   as it is {step_us(model, batch):.1f} us", flush=True)
    qkv, output, gate_up, down, _ = shape.linears
    for linear in (output, down, gate_up, qkv):
        config = linear_config.select_config(linear, batch, DTYPE, DEVICE)
        if config.kind is LinearKind.LIBRARY:
            continue
        key = linear_config.config_key(DEVICE, DTYPE, linear, batch)
        trials = {}
        for distance in DISTANCES_MIB:
            linear_config.set_config(key, replace(config, stream_bytes=distance * MIB))
            trials[distance] = step_us(model, batch)
        best = min(trials, key=lambda distance: trials[distance])
        linear_config.set_config(key, replace(config, stream_bytes=best * MIB))
        found[key] = best * MIB
        print(f"   {_name(linear)}: " + ", ".join(f"{mib} {us:.1f}" for mib, us in trials.items()), flush=True)
    print(f"   then {step_us(model, batch):.1f} us", flush=True)
    return found


def _name(linear: LinearShape) -> str:
    return f"{linear.mode.name.lower()}/{linear.num_outputs}x{linear.num_inputs}"


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="0.6B,1B,8B", help="comma-separated: 135M, 0.6B, 1B, 8B")
    parser.add_argument("--batches", default="1,16")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("measures a CUDA device, and there is none")
    batches = [int(batch) for batch in arguments.batches.split(",")]
    print(f"{torch.cuda.get_device_name()}, read bandwidth {read_bandwidth_tb_s():.2f} TB/s")
    found, start_s = {}, time.time()
    for name in arguments.models.split(","):
        shape = Shape.of(MODELS[name])
        model = Model(shape, max(batches))
        for batch in batches:
            print(f"{name} batch {batch}, at {time.time() - start_s:.0f} s", flush=True)
            found |= tune_stream(shape, batch, model)
        del model
        torch.cuda.empty_cache()
    for key, distance in found.items():
        print(f"{key}: {distance}")


if __name__ == "__main__":
    main()
