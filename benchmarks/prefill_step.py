"""Time to first token: one prompt of 960 tokens, 256 such prompts at once, and small prompts with graphs against eager.

    python benchmarks/prefill_step.py [--shapes 0.6B,8B]

All through `LLM.generate` with one output token, host included. "small_prefill" is how many times faster a prompt of
that length is with prefill graphs than without, the two engines asked in turn, the best of each.
"""

from collections.abc import Iterator

from benched_engine import BenchedEngine
from ceilings import Ceilings
from dummy_llm import build_llm
from floors import prefill_floor_s
from kernel_profile import profile_call
from result_rows import Row, RowSink
from workload import Workload

NUM_ROUNDS = 10
NUM_PROFILED = 16
"""Prompts at once in the profile of the largest batch: enough to fill every step."""


def prefill_rows(bench: BenchedEngine, sink: RowSink) -> Iterator[Row]:
    """One prompt, then as many at once as the largest batch; what the kernels of one and of some of them take."""
    load, length = bench.workload, bench.workload.prompt_len
    bench.batch_seconds(1, length, 1)
    first_s = min(bench.batch_seconds(1, length, 1) for _ in range(5))
    floor_s = prefill_floor_s(bench.config, bench.ceilings, [length], load.bytes_per_value)
    print(f"   {step_line(bench)}")
    yield Row.of(f"ttft/{bench.shape}", 1e3 * first_s, "ms", 1e3 * floor_s)
    batch = load.batches[-1]
    all_s = min(bench.first_s.get(batch, float("inf")), bench.batch_seconds(batch, length, 1))
    floor_s = prefill_floor_s(bench.config, bench.ceilings, [length] * batch, load.bytes_per_value)
    print(f"   {bench.steps_line()}")
    yield Row.of(f"prefill{batch}/{bench.shape}", all_s, "s", floor_s)
    for count in (1, min(batch, NUM_PROFILED)):
        wall_s = bench.batch_seconds(count, length, 1)
        kernels = profile_call(lambda count=count: bench.batch_seconds(count, length, 1), bench.device)
        sink.profile(f"prefill/{bench.shape}/{count}x{length}", {"step_us": 1e6 * wall_s} | kernels)


def graph_gain_rows(
    shape: str, device: str, workload: Workload, ceilings: Ceilings, options: dict[str, object]
) -> Iterator[Row]:
    """How much faster prompts are with prefill graphs, at batch 1."""
    lengths = (*workload.small_prompts, *workload.larger_prompts)
    fixed = {"num_pages": 2 + max(lengths), "decode_graph": "off"}
    backend = {"prefill_graph": "recording"} if device == "cpu" else {}
    graphs = BenchedEngine(build_llm(shape, device, fixed | backend | options), shape, device, workload, ceilings)
    eager_llm = build_llm(shape, device, fixed | options | {"prefill_graph": "off"})
    eager = BenchedEngine(eager_llm, shape, device, workload, ceilings)
    for length in lengths:
        for each in (graphs, eager):
            each.batch_seconds(1, length, 1)
        pairs = [(graphs.batch_seconds(1, length, 1), eager.batch_seconds(1, length, 1)) for _ in range(NUM_ROUNDS)]
        graph_s, eager_s = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
        print(f"   {length} tokens: {1e3 * graph_s:.2f} ms, eager {1e3 * eager_s:.2f} ms; {step_line(graphs)}")
        yield Row.of(f"small_prefill/{shape}/{length}", round(eager_s / graph_s, 2), "x")
    for each in (graphs, eager):
        each.llm.close()


def step_line(bench: BenchedEngine) -> str:
    """Which runner took the last step, at which key, and why no graph did."""
    step = bench.llm.steps[-1]
    return f"last step: {step.runner}, {step.key}" + (f", {step.miss_reason}" if step.miss_reason else "")


if __name__ == "__main__":
    from worker import run_alone

    run_alone(__doc__, ["prefill", "graph_gain"])
