"""What a verify step of a few rows costs beside a decode step, kernel by kernel, before and after tuning.

    python benchmarks/verify_step.py [--shapes 135M] [--tune-rows 1,4,8] [--layers 0]

An engine of random weights records its steps for one request: decode, and verify at widths 2, 3, 5 and 8. Each greedy
recording is replayed by itself over the padding row, whose context is empty: what is left are projections, launches
and what follows the head. `--tune-rows ""` measures only; tuned rows are printed in the form of
kernels/triton/tuned_configs.py and hold for this process. `--layers` cuts a large model short.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ceilings import elapsed_s, synchronize
from kernel_profile import by_kernel, device_events, kernel_name
from shapes import ALL_SHAPES, write_config_folder

REPLAYS_A_ROUND, NUM_ROUNDS = 8, 20
MOST_KERNELS = 8
LAYER_MARK = "decode_attention_kernel"
OPTIONS: dict[str, object] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_seqs": 1,
    "max_model_len": 1024, "max_num_batched_tokens": 64, "prefill_graph": "off",
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 7},
}  # fmt: skip
CPU_OPTIONS: dict[str, object] = {"cpu_kv_cache_mib": 64, "max_model_len": 128, "num_threads": 1}


@dataclass(frozen=True, slots=True)
class Place:
    """One launch of a layer, the mean over all layers of all replays.

    Attributes:
        name: of the kernel.
        charged_us: from the end of the launch before it, or from its own start if that is later.
        own_us: from its start to its end; launches overlap.
    """

    name: str
    charged_us: float
    own_us: float


def layer_places(events: list[tuple[int, int, str]]) -> list[Place]:
    """The launches between one layer's attention and the next one's, in order; none where no layer is seen twice."""
    marks = [index for index, (_, _, name) in enumerate(events) if kernel_name(name) == LAYER_MARK]
    if len(marks) < 2:
        return []
    period = marks[1] - marks[0]
    whole = [mark for mark, after in pairwise(marks) if after - mark == period]
    return [_place([_spent_ns(events, mark + offset) for mark in whole]) for offset in range(period)]


def _spent_ns(events: list[tuple[int, int, str]], index: int) -> tuple[str, int, int]:
    start, end, name = events[index]
    before = max(end for _, end, _ in events[max(0, index - 8) : index]) if index else start
    return kernel_name(name), max(0, end - max(start, before)), end - start


def _place(spent: list[tuple[str, int, int]]) -> Place:
    charged, own = (sum(each[kind] for each in spent) / len(spent) / 1e3 for kind in (1, 2))
    return Place(spent[0][0], charged, own)


@contextmanager
def greedy_steps(shape: str, device: str, num_layers: int) -> Iterator[dict[str, Callable[[], object]]]:
    """Replays of an engine's greedy recordings by the name of their runner; the engine is closed at the end."""
    from graphrunner import LLM

    config = ALL_SHAPES[shape] | ({"num_hidden_layers": num_layers} if num_layers else {})
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_config_folder(config, Path(folder))
        llm = LLM(folder, device=device, **(OPTIONS | (CPU_OPTIONS if device == "cpu" else {})))
    print(f"start {shape}: {time.perf_counter() - started_s:.1f} s", flush=True)
    try:
        yield {
            runner.name: lambda runner=runner, key=key: runner.backend.replay(key)
            for runner in llm.engine.core.model_runner.graph_runners
            for key in runner.all_keys()
            if key.variant.value == "greedy" and key.num_reqs == 1 and runner.backend.can_run(key)
        }
    finally:
        llm.close()


def report_step(label: str, replay: Callable[[], object], device: str) -> float:
    """Print a step's time, its kernels, and a layer launch by launch; returns milliseconds, the best round."""

    def replays() -> None:
        for _ in range(REPLAYS_A_ROUND):
            replay()

    replays()
    synchronize(device)
    best_s = min(elapsed_s(replays, device) / REPLAYS_A_ROUND for _ in range(NUM_ROUNDS))
    events = device_events(replays, device)
    told = by_kernel(events, REPLAYS_A_ROUND)
    count = sum(each["count"] for each in told["kernels"].values())
    print(f"\n{label}: {1e3 * best_s:.3f} ms, {count:.0f} launches, idle {told['idle_us']:.0f} us")
    for name, each in list(told["kernels"].items())[:MOST_KERNELS]:
        print(f"   {each['us']:9.1f} us {each['count']:6.0f} x {name}")
    for place in layer_places(events):
        print(f"      a layer: {place.charged_us:6.2f} us of {place.own_us:6.2f} {place.name}")
    sys.stdout.flush()
    return 1e3 * best_s


def report_steps(state: str, shape: str, device: str, num_layers: int) -> dict[str, float]:
    """`report_step` of every greedy recording; returns milliseconds by name."""
    with torch.inference_mode(), greedy_steps(shape, device, num_layers) as steps:
        return {
            f"{shape} {name} {state}": report_step(f"{shape} {name} {state}", replay, device)
            for name, replay in steps.items()
        }


def main() -> None:
    """Measure, tune, measure again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="135M", help=f"comma-separated: {', '.join(ALL_SHAPES)}")
    parser.add_argument("--tune-rows", default="1,4,8", help="rows of the projections to tune; empty for none")
    parser.add_argument("--layers", type=int, default=0, help="layers of the measured engine; 0 is all")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path, help="also write what was found here")
    args = parser.parse_args()
    found: dict[str, dict] = {"ms": {}, "tuned": {}}
    for shape in args.shapes.split(","):
        found["ms"] |= report_steps("as shipped", shape, args.device, args.layers)
        if args.tune_rows and args.device == "cuda":
            from benchmarks.kernel_tuning import Shape, tune_linears

            rows = [int(count) for count in args.tune_rows.split(",")]
            started_s = time.perf_counter()
            found["tuned"] |= tune_linears({shape: Shape.of(ALL_SHAPES[shape])}, rows, is_exhaustive=False)
            print(f"tuned in {time.perf_counter() - started_s:.1f} s", flush=True)
            found["ms"] |= report_steps("tuned", shape, args.device, args.layers)
    print()
    for key, row in found["tuned"].items():
        print(f'    "{key}": {row},')
    for name, milliseconds in found["ms"].items():
        print(f"{name:48s} {milliseconds:7.3f} ms")
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
