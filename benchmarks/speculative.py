"""Speculation: acceptance by position, accepted length, speed by batch, host time a round. One table, one JSON line.

    python benchmarks/speculative.py [--model PATH] [--parts text,shape] [--methods ngram,eagle] [--json FILE]
    python benchmarks/speculative.py --from-json FILE,... --plot docs/images/speculative.svg --page docs/speculative.md

`text` runs a real model (default: the embedded one; a GGUF file or a checkpoint folder elsewhere) over prompts of three
kinds, one at a time, greedily, plain and with each method. `shape` runs random weights of an 8B shape (on a CPU: a tiny
one) with a stand-in draft of given acceptance, k = 4, by batch, against an engine without speculation. Both sides of
every ratio are the better of two timed runs after a warm-up of the same shape. Host time is a round's wall time without
the wait for the device's tokens, a median over the rounds of the timed run.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import stand_in_proposer
from shapes import LLAMA_8B, TINY, write_config_folder
from speculative_prompts import PROMPTS
from speculative_report import plot, table, write_page

NUM_DRAFTS = 4
BATCHES = (1, 2, 4, 8, 16, 32, 64)
# About what an EAGLE-3 draft of an 8B model reads a step: 0.24 GB of layers, 0.53 GB of head.
DRAFT_8B = LLAMA_8B | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "head_dim": 64}


def main() -> None:
    """See the module."""
    args = _arguments()
    if args.from_json:
        results = [json.loads(Path(name).read_text()) for name in args.from_json.split(",")]
        if args.plot:
            plot(results[0], Path(args.plot))
        if args.page:
            write_page(results, Path(args.page))
        return
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = args.parts.split(",")
    result = {"benchmark": "speculative", "num_drafts": NUM_DRAFTS, "device": _device_name(device)}
    if "text" in parts:
        result["text"] = text_part(args.model, args.methods.split(","), device, args.num_tokens)
    if "shape" in parts:
        result["shape"] = shape_part(device, args.num_tokens)
    print("\n".join(["", *table(result), ""]))
    line = json.dumps(result)
    print(line)
    if args.json:
        Path(args.json).write_text(line + "\n")


def text_part(model: str | None, methods: Sequence[str], device: str, num_tokens: int) -> list[dict[str, object]]:
    """A row for each method and kind of prompt."""
    from graphrunner.core.errors import ConfigError, ModelLoadError

    options: dict[str, object] = {
        "device": device, "max_model_len": 2048, "max_num_seqs": 4, "capture": "lazy", "num_pages": 4 * 128 + 1,
    }  # fmt: skip
    rows: list[dict[str, object]] = []
    plain = {}
    for method in ("plain", *methods):
        config = None if method == "plain" else {"method": method, "num_speculative_tokens": NUM_DRAFTS}
        try:
            with _llm(model, speculative_config=config, **options) as llm:
                made = [_text_row(llm, method, kind, prompts, num_tokens) for kind, prompts in PROMPTS.items()]
        except (ConfigError, ModelLoadError) as error:
            print(f"{method} is not run: {error}")
            continue
        if method == "plain":
            plain = {row["kind"]: row for row in made}
        else:
            rows += [_compared(row, plain[row["kind"]]) for row in made]
    return rows


def _text_row(llm, method: str, kind: str, prompts: Sequence[str], num_tokens: int) -> dict[str, object]:
    from graphrunner import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]

    def run() -> tuple[float, list]:
        start_s, outputs = time.perf_counter(), []
        for chat in chats:  # one at a time: batch 1
            outputs += llm.chat([chat], params, use_tqdm=False)
        return time.perf_counter() - start_s, outputs

    run()
    seconds, outputs = min((run() for _ in range(2)), key=lambda timed: timed[0])
    token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    stats = [output.outputs[0].speculation for output in outputs if output.outputs[0].speculation is not None]
    return {
        "method": method,
        "kind": kind,
        "tokens_per_s": sum(map(len, token_ids)) / seconds,
        "mean_accepted_length": _mean_accepted(stats),
        "acceptance_by_position": _by_position(stats),
        "token_ids": token_ids,
    }


def _compared(row: dict, plain: dict) -> dict[str, object]:
    """The row beside plain decoding. In bfloat16 a near tie may go the other way; the share of equal text says so."""
    mine, its = row.pop("token_ids"), plain["token_ids"]
    row["plain_tokens_per_s"] = plain["tokens_per_s"]
    row["speedup"] = row["tokens_per_s"] / plain["tokens_per_s"]
    row["equal_outputs"] = sum(a == b for a, b in zip(mine, its, strict=True)) / len(its)
    return row


def shape_part(device: str, num_tokens: int) -> dict[str, object]:
    """Speed by batch at an 8B shape, with a draft of given acceptance."""
    is_gpu = device == "cuda"
    shape, draft = (LLAMA_8B, DRAFT_8B) if is_gpu else (TINY, TINY | {"num_hidden_layers": 1})
    batches = BATCHES if is_gpu else BATCHES[:4]
    options: dict[str, object] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "device": device, "max_model_len": 512 if is_gpu else 256,
        "max_num_seqs": batches[-1], "decode_sizes": batches, "enable_prefix_caching": False, "capture": "lazy",
        "num_threads": None if is_gpu else 1, "num_pages": batches[-1] * 32 + 1,
    }  # fmt: skip
    num_tokens = num_tokens if is_gpu else min(num_tokens, 64)
    rows: dict[int, dict[str, object]] = {batch: {"batch": batch} for batch in batches}
    with tempfile.TemporaryDirectory() as name:
        target = write_config_folder(shape, Path(name) / "target")
        config = {
            "method": "stand_in_proposer",
            "model": str(write_config_folder(draft, Path(name) / "draft")),
            "num_speculative_tokens": NUM_DRAFTS,
        }
        with _llm(str(target), **options) as llm:
            for batch in batches:
                rows[batch]["plain_tokens_per_s"] = _batch_speed(llm, batch, num_tokens)[0]
        with _llm(str(target), speculative_config=config, **options) as llm:
            for batch in batches:
                rows[batch] |= _speculating_row(llm, batch, num_tokens, is_gpu)
    for row in rows.values():
        row["speedup"] = row["tokens_per_s"] / row["plain_tokens_per_s"]  # type: ignore[operator]
    return {"acceptance": stand_in_proposer.ACCEPTANCE, "is_8b": is_gpu, "rows": list(rows.values())}


def _speculating_row(llm, batch: int, num_tokens: int, is_gpu: bool) -> dict[str, object]:
    with _timed_rounds(llm) as rounds:
        speed, outputs, steps = _batch_speed(llm, batch, num_tokens)
    stats = [output.outputs[0].speculation for output in outputs if output.outputs[0].speculation is not None]
    widths: dict[int, int] = {}
    for step in steps:
        if step.mode.value in ("decode", "verify"):
            width = step.key.num_tokens // step.key.num_reqs
            widths[width] = widths.get(width, 0) + 1
    return {
        "tokens_per_s": speed,
        "mean_accepted_length": _mean_accepted(stats),
        "acceptance_by_position": _by_position(stats),
        "widths": dict(sorted(widths.items())),
        # On a CPU the model itself runs on the host, so there is nothing to tell apart.
        "host_us": 1e6 * statistics.median(rounds) if rounds and is_gpu else None,
    }


def _batch_speed(llm, batch: int, num_tokens: int) -> tuple[float, list, list]:
    """(tokens a second, outputs, steps) of the better of two runs, after one that records and measures."""
    from graphrunner import SamplingParams

    prompts = [{"prompt_token_ids": [100 + 3 * row + place for place in range(32)]} for row in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    best: tuple[float, list, list] = (0.0, [], [])
    for attempt in range(3):
        first_step = llm.steps[-1].step_id + 1 if llm.steps else 0
        start_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        speed = batch * num_tokens / (time.perf_counter() - start_s)
        if attempt and speed > best[0]:
            best = (speed, outputs, [step for step in llm.steps if step.step_id >= first_step])
    return best


@contextmanager
def _timed_rounds(llm) -> Iterator[list[float]]:
    """Collects, for each round, its wall time without the wait for tokens, in seconds."""
    from graphrunner.sampling.sampled_tokens import VerifiedTokens

    core, rounds = llm.engine.core, []
    plain_step, plain_wait = core.step, VerifiedTokens.wait_blocks
    waited = [0.0, 0]

    def wait(self: VerifiedTokens) -> list[list[int]]:
        start_s = time.perf_counter()
        blocks = plain_wait(self)
        waited[0] += time.perf_counter() - start_s
        waited[1] += 1
        return blocks

    def step() -> object:
        waited[:] = [0.0, 0]
        start_s = time.perf_counter()
        outputs = plain_step()
        if waited[1]:
            rounds.append(time.perf_counter() - start_s - waited[0])
        return outputs

    core.step, VerifiedTokens.wait_blocks = step, wait  # type: ignore[method-assign]
    try:
        yield rounds
    finally:
        del core.step
        VerifiedTokens.wait_blocks = plain_wait  # type: ignore[method-assign]


def _mean_accepted(stats: Sequence) -> float:
    num_rounds = sum(one.num_rounds for one in stats)
    return sum(one.num_accepted for one in stats) / num_rounds if num_rounds else 0.0


def _by_position(stats: Sequence) -> list[float]:
    """Share of rounds with a draft at a position in which it and all before it stand."""
    shares = []
    for place in range(1, NUM_DRAFTS + 1):
        drafted = sum(sum(one.drafted_lengths[place:]) for one in stats)
        stands = sum(sum(one.accepted_lengths[place:]) for one in stats)
        if drafted:
            shares.append(stands / drafted)
    return shares


@contextmanager
def _llm(model: str | None, **options: object) -> Iterator:
    """An `LLM`, and its memory given back after it. Pages are counted, so that two of them fit beside each other."""
    import torch

    from graphrunner import LLM

    llm = LLM(model, **options)
    try:
        yield llm
    finally:
        llm.close()
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--parts", default="text,shape")
    parser.add_argument("--methods", default="ngram,eagle,mtp")
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--page")
    parser.add_argument("--from-json")
    args = parser.parse_args()
    if (args.plot or args.page) and not args.from_json:
        sys.exit("--plot and --page need --from-json: they show what an earlier run wrote")
    return args


if __name__ == "__main__":
    main()
