"""Output tokens a second of many requests that are all there at the start.

    python benchmarks/offline.py [--shapes 0.6B,1B,8B] [--peer transformers]

"offline": 256 requests, prompts and outputs uniform in 100 to 1024 tokens (random.Random(1), all prompts drawn first).
"nano": 128 tokens in, 256 out, at batch 1, 16, 64, 256. `--peer transformers` runs transformers' continuous batching
on the offline workload of the 0.6B shape in the same run, for scale. The floor column is the highest rate that memory
and arithmetic allow.
"""

import time
from collections.abc import Iterator

import torch
from benched_engine import BenchedEngine
from floors import whole_floor_s
from offline_profile import offline_parts
from result_rows import Row, RowSink
from shapes import ALL_SHAPES
from workload import Workload, prompt

PEER_LIMIT_S = 30.0
_WARM_UP_TOKENS = 8


def offline_rows(bench: BenchedEngine, sink: RowSink) -> Iterator[Row]:
    """One timed run after a short one of equal shape, and its parts."""
    prompt_lens, output_lens = bench.workload.offline()
    bench.seconds(prompt_lens, [1 + length // 64 for length in output_lens])
    duration_s = bench.seconds(prompt_lens, output_lens)
    least_s = whole_floor_s(bench.config, bench.ceilings, prompt_lens, output_lens, bench.workload.bytes_per_value)
    num_tokens = sum(output_lens)
    print(f"   {sum(prompt_lens)} tokens in, {num_tokens} out, {duration_s:.2f} s; {bench.steps_line()}")
    parts = offline_parts(bench, prompt_lens, output_lens)
    sink.profile(f"offline/{bench.shape}", {"whole_s": duration_s, "parts": parts})
    yield Row.of(f"offline/{bench.shape}", num_tokens / duration_s, "tokens/s", num_tokens / least_s)


def fixed_rows(bench: BenchedEngine) -> Iterator[Row]:
    """Equal requests, prefill included; the best of two."""
    prompt_len, output_len = bench.workload.fixed_lens
    for batch in bench.workload.batches:
        lens = ([prompt_len] * batch, [output_len] * batch)
        bench.batch_seconds(batch, prompt_len, 4)
        duration_s = min(bench.seconds(*lens) for _ in range(2))
        least_s = whole_floor_s(bench.config, bench.ceilings, *lens, bench.workload.bytes_per_value)
        num_tokens = batch * output_len
        yield Row.of(
            f"nano/{bench.shape}/batch{batch}", num_tokens / duration_s, "tokens/s", num_tokens / least_s
        )  # fmt: skip


def peer_rows(shape: str, device: str, workload: Workload) -> Iterator[Row]:
    """transformers' continuous batching on the offline workload; past the limit, the rate so far."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = ALL_SHAPES[shape]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    known = AutoConfig.for_model(**{name: value for name, value in config.items() if name != "torch_dtype"})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(known, dtype=dtype).eval()
    prompt_lens, output_lens = workload.offline()
    generation = GenerationConfig(
        do_sample=False, max_new_tokens=max(output_lens), eos_token_id=-1, pad_token_id=0, bos_token_id=1
    )  # fmt: skip
    small = None
    if device == "cpu":
        # Left to itself it takes most of the machine's memory.
        from transformers import ContinuousBatchingConfig

        small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=small, timeout=5
    ) as batching:
        few = prompt_lens[:8]
        _peer_run(batching, config, few, [_WARM_UP_TOKENS] * len(few))
        num_tokens, num_done, duration_s = _peer_run(batching, config, prompt_lens, output_lens)
    print(f"   transformers: {num_done} of {len(prompt_lens)} requests done in {duration_s:.1f} s", flush=True)
    yield Row.of(f"offline_transformers/{shape}", num_tokens / duration_s, "tokens/s")


def _peer_run(batching, config: dict, prompt_lens: list[int], output_lens: list[int]) -> tuple[int, int, float]:
    """Tokens that came, requests that ended, seconds; whatever still runs at the limit is cancelled."""
    start_s = time.perf_counter()
    counts: dict[str, int] = {}
    for index, (length, output_len) in enumerate(zip(prompt_lens, output_lens, strict=True)):
        ids = prompt(length, index, config["vocab_size"])["prompt_token_ids"]
        counts[batching.add_request(ids, max_new_tokens=output_len, eos_token_id=-1, streaming=True)] = 0
    running = set(counts)
    while running and time.perf_counter() - start_s < PEER_LIMIT_S:
        result = batching.get_result(timeout=1)
        if result is None:
            if not batching.is_running():
                raise RuntimeError("the peer's thread ended")
            continue
        if result.request_id not in counts:  # cancelled in an earlier run
            continue
        assert result.error is None, result.error
        counts[result.request_id] = len(result.generated_tokens)
        if result.is_finished():
            running.discard(result.request_id)
    duration_s = time.perf_counter() - start_s
    for request_id in running:
        batching.cancel_request(request_id)
    return sum(counts.values()), len(counts) - len(running), duration_s


if __name__ == "__main__":
    from worker import run_alone

    run_alone(__doc__, ["offline", "nano"], has_peer=True)
