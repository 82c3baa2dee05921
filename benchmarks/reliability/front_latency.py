"""What the front adds: from a step's message to the token on its socket, at 256 streams; and its share of throughput.

    python benchmarks/reliability/front_latency.py [--rounds 5]

Latency, before a core that computes nothing: from hearing of a step to having written the last of its 256 tokens, in
wall time and in the event loop's own work (its thread's CPU time, without the machine's other work). A token waits for
those before it in the step, so the last one's time bounds them all. Throughput: the same requests through
`LLM.generate` and through the server, round by round, each one's best.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from serving import HERE, PACED, save, served

NUM_STREAMS = 256
NUM_TOKENS = 150
STEP_MS = 30.0
LIMIT_MS = 2.0
SHARE_LIMIT = 0.95
PROMPTS = [f"Here is a short story about number {i}. It" for i in range(16)]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def stream(port: int) -> dict[str, float]:
    """256 clients in a process of their own."""
    command = [sys.executable, str(HERE / "stream_client.py"), "--port", str(port)]
    command += ["--num-clients", str(NUM_STREAMS), "--num-tokens", str(NUM_TOKENS)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def latency_round() -> dict[str, float]:
    """One front, one run of all streams; milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "steps"
        with served("--step-ms", str(STEP_MS), "--steps", str(noted), program=PACED) as server:
            report = stream(server.port)
            assert report["num_complete"] == NUM_STREAMS, report
        rows = [tuple(map(float, line.split())) for line in noted.read_text().splitlines()]
    full = [row for row in rows if row[0] == NUM_STREAMS]
    wall, own = ([row[place] * 1e3 for row in full] for place in (1, 2))
    return {"num_steps": len(full), "own_p50_ms": percentile(own, 0.5), "own_p99_ms": percentile(own, 0.99),
            "wall_p50_ms": percentile(wall, 0.5), "wall_p99_ms": percentile(wall, 0.99)}  # fmt: skip


def throughput(rounds: int, num_tokens: int) -> dict[str, float]:
    """Tokens a second of both, best of some rounds in turn."""
    from stream_client import open_streams, read_all

    from graphrunner import LLM, SamplingParams

    # One thread: two of them wait for each other wherever something else runs, which is all that would be measured.
    options = {"max_num_seqs": len(PROMPTS), "max_model_len": 256, "enable_prefix_caching": False, "num_threads": 1}
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    body = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    flags = ["--max-num-seqs", str(len(PROMPTS)), "--max-model-len", "256", "--no-enable-prefix-caching"]
    flags += ["--num-threads", "1"]
    best = {"llm": 0.0, "server": 0.0}
    with LLM(**options) as llm, served(*flags) as server:
        for turn in range(rounds + 1):
            start_s = time.perf_counter()
            llm.generate(PROMPTS, params, use_tqdm=False)
            middle_s = time.perf_counter()
            streams = open_streams(server.port, [{"prompt": prompt, **body} for prompt in PROMPTS])
            read_all(streams)
            end_s = time.perf_counter()
            assert all(each.is_complete for each in streams)
            if turn:  # the first is a warm-up
                num_all = len(PROMPTS) * num_tokens
                best["llm"] = max(best["llm"], num_all / (middle_s - start_s))
                best["server"] = max(best["server"], num_all / (end_s - middle_s))
    return best


def latency_trial(num_rounds: int) -> None:
    """Some rounds: run, print, save the best."""
    best = min((latency_round() for _ in range(num_rounds)), key=lambda each: each["own_p99_ms"])
    save(
        "front_latency",
        f"{NUM_STREAMS} streams in step, a step every {STEP_MS:g} ms; best of {num_rounds} rounds",
        **{name: round(value, 2) for name, value in best.items()},
        holds=best["own_p99_ms"] < LIMIT_MS,
    )


def throughput_trial(num_rounds: int, num_tokens: int) -> None:
    """Both in turn: run, print, save each one's best."""
    rates = throughput(num_rounds, num_tokens)
    share = rates["server"] / rates["llm"]
    save(
        "throughput_share",
        f"embedded model, fp32; {len(PROMPTS)} requests of {num_tokens} tokens at once; best of {num_rounds} in turn",
        llm_tokens_per_s=round(rates["llm"], 1),
        server_tokens_per_s=round(rates["server"], 1),
        share=round(share, 3),
        holds=share >= SHARE_LIMIT,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-throughput", action="store_true")
    parser.add_argument("--skip-latency", action="store_true")
    parser.add_argument("--throughput-tokens", type=int, default=48)
    given = parser.parse_args()
    if not given.skip_latency:
        latency_trial(given.rounds)
    if not given.skip_throughput:
        throughput_trial(given.rounds, given.throughput_tokens)


if __name__ == "__main__":
    main()
