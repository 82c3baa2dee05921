"""Milliseconds a decode step through `LLM.generate`, host included, beside the floor that the device sets.

    python benchmarks/decode_step.py [--shapes 0.6B,1B,8B]

A step is (time of 129 tokens - time of 1 token) / 128 after a prompt of 960 tokens (32 for 1B at batch 1), each time
the best of two. The floor sums bytes or arithmetic, whichever takes longer, over the step's operations, by ceilings
that the same run measures.
"""

from collections.abc import Iterator

from benched_engine import BenchedEngine
from device_watch import DeviceWatch
from floors import decode_floor_s
from result_rows import Row

NUM_ROUNDS = 2


def decode_rows(bench: BenchedEngine) -> Iterator[Row]:
    """A row a batch size, small ones first."""
    for batch in bench.workload.batches:
        yield decode_row(bench, batch)


def decode_row(bench: BenchedEngine, batch: int) -> Row:
    """One batch size; `bench` keeps the figure."""
    load, prompt_len = bench.workload, bench.decode_prompt_len(batch)
    bench.batch_seconds(batch, prompt_len, 4)
    first_s = min(bench.batch_seconds(batch, prompt_len, 1) for _ in range(NUM_ROUNDS))
    with DeviceWatch() as watch:
        whole_s = min(bench.batch_seconds(batch, prompt_len, load.num_steps + 1) for _ in range(NUM_ROUNDS))
    if prompt_len == load.prompt_len:
        bench.first_s[batch] = first_s
    bench.step_ms[batch] = step_ms = 1e3 * (whole_s - first_s) / load.num_steps
    context = batch * (prompt_len + (load.num_steps + 1) // 2)
    floor_s = decode_floor_s(bench.config, bench.ceilings, batch, context, load.bytes_per_value)
    print(f"   all first tokens after {1e3 * first_s:.1f} ms; then of the whole: {bench.steps_line()}")
    print(f"   the card: {watch.line() or 'unknown'}")
    return Row.of(f"decode/{bench.shape}/batch{batch}", step_ms, "ms", 1e3 * floor_s)


if __name__ == "__main__":
    from worker import run_alone

    run_alone(__doc__, ["decode"])
