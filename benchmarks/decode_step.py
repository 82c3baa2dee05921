"""Milliseconds a decode step through `LLM.generate`, host included, beside the floor that memory sets.

    python benchmarks/decode_step.py [--shapes 0.6B,1B,8B] [--batches 1,16,64,256] [--prompt-len 960] [--json FILE]

Random weights, bf16, greedy. A step is (time of 129 tokens - time of 1 token) / 128, best of the rounds. The floor is
(weights + KV bytes read by one step) / read bandwidth, the bandwidth measured here. Prints a table and one JSON line.
"""

import argparse
import json
import tempfile
import time
import traceback
from pathlib import Path

import torch
from shapes import GPU_SHAPES, num_kv_bytes_per_token, num_weight_bytes_per_step, write_config_folder

NUM_STEPS = 128


def read_bandwidth() -> float:
    """Bytes a second of a large sum, the best of ten."""
    data = torch.zeros(1 << 32, dtype=torch.uint8, device="cuda").view(torch.int32)
    best = float("inf")
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        data.sum(dtype=torch.int32)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end))
    return data.numel() * 4 / (best / 1e3)


def measure(folder: str, batches: list[int], prompt_len: int, rounds: int) -> dict:
    from graphrunner import LLM, SamplingParams

    start_s = time.perf_counter()
    llm = LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
        gpu_memory_utilization=0.85, max_model_len=2304, max_num_seqs=max(batches), decode_sizes=batches,
        prefill_graph="off", max_num_batched_tokens=8192,
    )  # fmt: skip
    rows: dict = {"start_s": time.perf_counter() - start_s}
    report = llm.graph_report()
    rows["capture_ms"] = sum(key.stats.capture_ms for key in report.keys)
    rows["failed"] = [cause for _, _, cause in report.failed][:2]

    def seconds(batch: int, count: int) -> float:
        prompts = [
            {"prompt_token_ids": [(7 * i + 13 * p) % 30000 + 5 for p in range(prompt_len)]} for i in range(batch)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    for batch in batches:
        seconds(batch, 4)
        first_s = min(seconds(batch, 1) for _ in range(2))
        whole_s = min(seconds(batch, NUM_STEPS + 1) for _ in range(rounds))
        steps = [step for step in llm.steps if step.mode.value == "decode"][-50:]
        rows[f"batch {batch}"] = {
            "ms": 1e3 * (whole_s - first_s) / NUM_STEPS,
            "ttft_ms": 1e3 * first_s,
            "graph_share": sum(step.is_graph for step in steps) / len(steps),
        }
    llm.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="0.6B,1B,8B")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--prompt-len", type=int, default=960)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    bandwidth = read_bandwidth()
    results: dict = {"device": torch.cuda.get_device_name(), "read_bytes_per_s": bandwidth}
    for name in args.shapes.split(","):
        config = GPU_SHAPES[name]
        try:
            with tempfile.TemporaryDirectory() as folder:
                results[name] = measure(
                    str(write_config_folder(config, Path(folder))), batches, args.prompt_len, args.rounds
                )
        except Exception:  # one shape that fails is a row of the table, not its end
            traceback.print_exc()
            results[name] = {"error": traceback.format_exc(limit=1)}
        torch.cuda.empty_cache()
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s\n")
    print("| shape | batch | ms a step | floor ms | share | first token ms | steps from a graph |")
    print("|---|---|---|---|---|---|---|")
    for name in args.shapes.split(","):
        for batch in batches:
            row = results[name].get(f"batch {batch}")
            if row is None:
                continue
            kv = batch * (args.prompt_len + NUM_STEPS // 2) * num_kv_bytes_per_token(GPU_SHAPES[name])
            floor = 1e3 * (num_weight_bytes_per_step(GPU_SHAPES[name]) + kv) / bandwidth
            row["floor_ms"] = floor
            print(
                f"| {name} | {batch} | {row['ms']:.3f} | {floor:.3f} | {floor / row['ms']:.0%} | {row['ttft_ms']:.1f} "
                f"| {row['graph_share']:.0%} |"
            )
    print("\n" + json.dumps(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
