"""The part of `benchmarks/speculative.py` that runs a real model over real prompts, one request at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from round_probe import device_ms, timed_rounds, waits_in_rounds
from speculative_engine import acceptance_by_position, finished, mean_accepted, opened, warm_runs
from speculative_prompts import PROMPTS

ROOT = Path(__file__).parent.parent
NUM_DRAFTS = 4
METHODS: Mapping[str, Mapping[str, object]] = {
    "ngram": {"method": "ngram"},
    "eagle": {"method": "eagle"},
    "eagle_tree": {"method": "eagle", "speculative_eagle_topk": 3},
    "mtp": {"method": "mtp"},
}
"""What is measured, by the name in the tables. The number of drafts is the default; a tree has 7, on 5 levels."""

Prompts = Mapping[str, Sequence[tuple[str, bool]]]
"""By kind: texts, and whether each is a user's turn (else it is continued as it is)."""


@dataclass(frozen=True, slots=True)
class TextPlan:
    """What to run.

    Attributes:
        model: a GGUF file or a folder; None is the embedded model.
        methods: names of `METHODS`.
        prompts: what to answer.
        num_tokens: most tokens of an answer.
        num_runs: timed runs; the best one counts.
        is_gpu: whether the device has a clock of its own.
    """

    model: str | None
    methods: Sequence[str]
    prompts: Prompts
    num_tokens: int
    num_runs: int
    is_gpu: bool


def held_out(num_prompts: int) -> Prompts:
    """Chats and stories that no training prompt resembles, and the summaries of `speculative_prompts`."""
    sys.path.append(str(ROOT / "training"))
    from prompts import Kind, held_out_prompts

    made: dict[str, Sequence[tuple[str, bool]]] = {}
    for kind in (Kind.CHAT, Kind.STORY):
        made[kind.value] = [(one.turns[0], one.is_chat) for one in held_out_prompts(kind, num_prompts, seed=7)]
    made["summary"] = [(text, True) for text in PROMPTS["summary"][:num_prompts]]
    return made


def text_rows(plan: TextPlan, has_time: Callable[[], bool]) -> Iterator[dict[str, object]]:
    """A row for each method and kind, as they come; a method that cannot run is a row that says why."""
    plain: dict[str, dict] = {}
    for name in ("plain", *plan.methods):
        if not has_time():
            yield {"method": name, "error": "no time was left"}
            continue
        try:
            made = _method_rows(plan, name)
        except Exception as error:  # the other methods are still worth measuring
            yield {"method": name, "error": f"{type(error).__name__}: {error}"}
            continue
        if name == "plain":
            plain = {row["kind"]: row for row in made}
            continue
        for row in made:
            yield _compared(row, plain[row["kind"]]) if plain else row


def _method_rows(plan: TextPlan, name: str) -> list[dict]:
    config = None if name == "plain" else {**METHODS[name], "adaptive": False}
    if config is not None and config["method"] in ("eagle", "mtp") and plan.model is not None:
        import graphrunner

        data = Path(graphrunner.__file__).parent / "speculative" / "data"
        config["model"] = str(data / f"SmolLM2-135M-Instruct-{config['method']}")
    options: dict[str, object] = {
        "device": "cuda" if plan.is_gpu else "cpu", "max_model_len": 1024, "max_num_seqs": 1, "decode_sizes": [1],
        "prefill_sizes": [64, 256, 512] if plan.is_gpu else None, "num_pages": 129, "enable_prefix_caching": False,
    }  # fmt: skip
    with opened(plan.model, speculative_config=config, **options) as llm:
        prompts = {kind: _prompts(llm, texts) for kind, texts in plan.prompts.items()}
        _warm_up(llm, [prompt for given in prompts.values() for prompt in given], plan)
        rows = [_row(llm, plan, name, kind, given) for kind, given in prompts.items()]
        if plan.is_gpu:
            rows[0] |= _device_figures(llm, next(iter(prompts.values()))[0], is_plain=name == "plain")
    return rows


def _prompts(llm, texts: Sequence[tuple[str, bool]]) -> list[object]:
    return [llm.chat_prompt([{"role": "user", "content": text}]) if is_chat else text for text, is_chat in texts]


def _warm_up(llm, prompts: Sequence[object], plan: TextPlan) -> None:
    """All prompts once on a card: some hundred rounds. One of them elsewhere, where a round is long."""
    from graphrunner import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=plan.num_tokens if plan.is_gpu else 24, ignore_eos=True)
    for prompt in prompts if plan.is_gpu else prompts[:1]:
        llm.generate([prompt], params, use_tqdm=False)


def _row(llm, plan: TextPlan, name: str, kind: str, prompts: Sequence[object]) -> dict:
    from graphrunner import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=plan.num_tokens)

    def run() -> tuple[float, list]:
        start_s, outputs = time.perf_counter(), []
        for prompt in prompts:  # one at a time: batch 1
            outputs += finished(llm.generate([prompt], params, use_tqdm=False))
        return time.perf_counter() - start_s, outputs

    with timed_rounds(llm) as rounds:
        seconds, outputs = min(warm_runs(run, plan.num_runs), key=lambda timed: timed[0])
    token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    stats = [output.outputs[0].speculation for output in outputs if output.outputs[0].speculation is not None]
    accepted = mean_accepted(stats)
    return {
        "method": name,
        "kind": kind,
        "num_prompts": len(prompts),
        "tokens_per_s": sum(map(len, token_ids)) / seconds,
        "mean_accepted_length": accepted,
        "tokens_per_round": accepted + 1,
        "acceptance_by_position": acceptance_by_position(stats),
        # On a CPU the model itself runs on the host, so there is nothing to tell apart.
        **(rounds.medians() if plan.is_gpu else {}),
        "token_ids": token_ids,
    }


def _device_figures(llm, prompt: object, *, is_plain: bool) -> dict[str, object]:
    from graphrunner import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    figures: dict[str, object] = {
        "device_ms": device_ms(llm, lambda: llm.generate([prompt], params, use_tqdm=False))  # type: ignore[list-item]
    }
    if not is_plain:
        figures["waits"] = waits_in_rounds(llm, range(100, 140), 20)
    return figures


def _compared(row: dict, plain: dict) -> dict[str, object]:
    """The row beside plain decoding. In bfloat16 a near tie may go the other way; the share of equal text says so."""
    mine, its = row.pop("token_ids"), plain["token_ids"]
    row["plain_tokens_per_s"] = plain["tokens_per_s"]
    row["speedup"] = row["tokens_per_s"] / plain["tokens_per_s"]
    row["equal_outputs"] = sum(a == b for a, b in zip(mine, its, strict=True)) / len(its)
    if "device_ms" in plain and "device_ms" in row:
        row["plain_device_ms"] = plain["device_ms"]
    return row
