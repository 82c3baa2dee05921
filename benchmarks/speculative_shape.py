"""The part of `benchmarks/speculative.py` that runs random weights of an 8B shape, with a draft of given acceptance."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from round_probe import timed_rounds
from shapes import LLAMA_8B, TINY, write_config_folder
from speculative_engine import acceptance_by_position, finished, mean_accepted, opened, warm_runs

MOST_DRAFTS, PROMPT_TOKENS = 5, 32
BATCHES = (1, 8, 64, 32, 2, 16, 4)
"""In the order of what a run that is cut short should have measured."""
TOKENS = {1: 832, 2: 512, 4: 384, 8: 256, 16: 192}
"""Of an answer by batch size, 128 at larger ones: about 2.8 a round, so at least 300 rounds of some request."""
_LARGE_BATCH_TOKENS = 128
_TINY_BATCHES = (1, 4)
# About what an EAGLE-3 draft of an 8B model reads a step: 0.24 GB of layers, 0.53 GB of head.
DRAFT_8B = LLAMA_8B | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "head_dim": 64}


def shape_rows(is_gpu: bool, most_tokens: int | None, has_time: Callable[[], bool]) -> Iterator[dict[str, object]]:
    """A row a batch size, as they come: plain and speculating, on two engines that live side by side.

    Args:
        most_tokens: of an answer; None is `TOKENS`.
    """
    shape, draft = (LLAMA_8B, DRAFT_8B) if is_gpu else (TINY, TINY | {"num_hidden_layers": 1})
    batches = BATCHES if is_gpu else _TINY_BATCHES
    options: dict[str, object] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda" if is_gpu else "cpu",
        "max_model_len": 896 if is_gpu else 256, "max_num_seqs": max(batches), "decode_sizes": tuple(sorted(batches)),
        "enable_prefix_caching": False, "num_threads": None if is_gpu else 1, "num_pages": max(batches) * 16 + 1,
        "prefill_sizes": tuple(PROMPT_TOKENS * batch for batch in sorted(batches)) if is_gpu else None,
        "max_num_batched_tokens": PROMPT_TOKENS * max(batches) if is_gpu else None,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        target = str(write_config_folder(shape, Path(name) / "target"))
        config = {
            "method": "stand_in_proposer",
            "model": str(write_config_folder(draft, Path(name) / "draft")),
            "num_speculative_tokens": MOST_DRAFTS,
        }
        with (
            opened(target, **options) as plain,
            opened(target, speculative_config=config, **options) as speculating,
        ):
            for batch in batches:
                if not has_time():
                    return
                num_tokens = TOKENS.get(batch, _LARGE_BATCH_TOKENS)
                num_tokens = num_tokens if most_tokens is None else min(num_tokens, most_tokens)
                plain_speed = _batch_speed(plain, batch, num_tokens)[0]
                row = _speculating_row(speculating, batch, num_tokens, is_gpu)
                speed = row["tokens_per_s"]
                assert isinstance(speed, float)
                yield {"batch": batch, **row, "plain_tokens_per_s": plain_speed, "speedup": speed / plain_speed}


def _speculating_row(llm, batch: int, num_tokens: int, is_gpu: bool) -> dict[str, object]:
    with timed_rounds(llm) as rounds:
        speed, outputs, steps = _batch_speed(llm, batch, num_tokens)
    stats = [output.outputs[0].speculation for output in outputs if output.outputs[0].speculation is not None]
    widths: dict[int, int] = {}
    for step in steps:
        if step.mode.value in ("decode", "verify"):
            width = step.key.num_tokens // step.key.num_reqs
            widths[width] = widths.get(width, 0) + 1
    return {
        "tokens_per_s": speed,
        "mean_accepted_length": mean_accepted(stats),
        "acceptance_by_position": acceptance_by_position(stats),
        "widths": dict(sorted(widths.items())),
        # On a CPU the model itself runs on the host, so there is nothing to tell apart.
        **(rounds.medians() if is_gpu else {"host_us": None}),
    }


def _batch_speed(llm, batch: int, num_tokens: int) -> tuple[float, list, list]:
    """(tokens a second, outputs, steps) of the better of two warm runs, after one from which adaptive k learns."""
    from graphrunner import SamplingParams

    prompts = [{"prompt_token_ids": [100 + 3 * row + place for place in range(PROMPT_TOKENS)]} for row in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)

    def run() -> tuple[float, list, list]:
        first_step = llm.steps[-1].step_id + 1 if llm.steps else 0
        start_s = time.perf_counter()
        outputs = finished(llm.generate(prompts, params, use_tqdm=False))
        speed = batch * num_tokens / (time.perf_counter() - start_s)
        return speed, list(outputs), [step for step in llm.steps if step.step_id >= first_step]

    run()
    return max(warm_runs(run, 2), key=lambda made: made[0])
