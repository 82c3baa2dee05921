"""Train an EAGLE-3 draft and multi-token-prediction heads for a model, on text that the model writes itself.

    python training/train_draft.py --model model.gguf --work draft-work --out drafts --max-seconds 360

Three stages within --max-seconds: the target writes its text (kept in --work, so that a second run replays it), short
trials choose which target layers EAGLE reads, and both drafts are trained. Everything is seeded; an interrupted run
goes on from the last checkpoint in --work. See docs/training-a-draft.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from drafts import MTP, Draft, Eagle, Shape
from export_draft import export
from objective import acceptance, loss_of
from prompts import HELD_OUT_KINDS, Kind, held_out_prompts, training_prompts
from safetensors.torch import load_file, save_file
from target import Corpus, Target, scripts_of
from torch import Tensor

_TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 0.7, 1.0, 1.0)
_CORPUS_SHARE, _TRIAL_SHARE, _EAGLE_SHARE = 0.35, 0.05, 0.62
_WARM_UP_STEPS = 60


@dataclass(frozen=True, slots=True)
class Settings:
    """The command line."""

    model: str | None
    work: Path
    out: Path
    max_seconds: float
    rows: int
    batch: int
    length: int
    train_rows: int
    held_out: int
    held_out_length: int
    vocab: int
    steps: int
    heads: int
    rate: float
    max_steps: int
    seed: int
    checkpoint_steps: int
    report_steps: int
    taps: tuple[tuple[int, ...], ...]


def main() -> None:
    """Run all stages and write the drafts."""
    settings, start_s = _settings(), time.perf_counter()
    torch.manual_seed(settings.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = Target(settings.model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    settings.work.mkdir(parents=True, exist_ok=True)
    layers = target.config.num_layers
    choices = settings.taps or ((layers,), (2, layers // 2, layers - 3), (layers // 3, 2 * layers // 3, layers))
    taps = tuple(sorted({layers, *(layer for choice in choices for layer in choice)}))
    say(f"target on {device}: {layers} layers; taps {taps}")
    held_out = _held_out(target, settings, taps)
    corpora = _corpora(target, settings, taps, start_s + settings.max_seconds * _CORPUS_SHARE)
    vocabulary = settings.work / "draft_ids.safetensors"
    if not vocabulary.exists():  # a run that goes on must keep it, whatever text it has by then
        save_file({"draft_ids": _draft_ids(corpora, settings.vocab, target).cpu()}, vocabulary)
    draft_ids = load_file(vocabulary)["draft_ids"].to(device)
    _train_all(target, settings, choices, draft_ids, corpora, held_out, start_s)


def say(line: str) -> None:
    """Print with the time since the start."""
    print(f"[{time.perf_counter() - _START_S:6.1f} s] {line}", flush=True)


_START_S = time.perf_counter()


def _train_all(
    target: Target,
    settings: Settings,
    choices: tuple[tuple[int, ...], ...],
    draft_ids: Tensor,
    corpora: list[Corpus],
    held_out: dict[Kind, Corpus],
    start_s: float,
) -> None:
    config = target.config
    shape = Shape(
        config.hidden_size,
        config.intermediate_size,
        config.num_q_heads,
        config.num_kv_heads,
        config.head_dim,
        config.norm_eps,
    )

    def eagle(choice: tuple[int, ...]) -> Draft:
        torch.manual_seed(settings.seed)
        return Eagle(target, shape, choice, draft_ids, settings.steps).to(target.device)

    plan = settings.work / "taps.json"
    if plan.exists():
        best = tuple(json.loads(plan.read_text()))
    else:
        best = _best_taps(eagle, settings, choices, corpora, held_out) if len(choices) > 1 else choices[0]
        plan.write_text(json.dumps(best))
    say(f"EAGLE reads the layers {best}")
    left = start_s + settings.max_seconds - time.perf_counter()
    jobs: list[tuple[str, Draft, float]] = [("eagle", eagle(best), left * _EAGLE_SHARE)]
    torch.manual_seed(settings.seed)
    heads = MTP(target, shape, draft_ids, settings.heads).to(target.device)
    jobs.append(("mtp", heads, left * (1 - _EAGLE_SHARE)))
    for name, draft, seconds in jobs:
        _train(draft, name, settings, corpora, seconds, settings.work / f"{name}.checkpoint")
        report = {kind.value: acceptance(draft, held_out[kind], 4) for kind in HELD_OUT_KINDS}
        for kind, one in report.items():
            say(f"{name} on held-out {kind}: {one}")
        export(draft, settings.out / name, report)


def _best_taps(
    eagle: Callable[[tuple[int, ...]], Draft],
    settings: Settings,
    choices: tuple[tuple[int, ...], ...],
    corpora: list[Corpus],
    held_out: dict[Kind, Corpus],
) -> tuple[int, ...]:
    """The layers whose draft is accepted most after a short training."""
    scores = {}
    for choice in choices:
        draft = _train(eagle(choice), f"trial {choice}", settings, corpora, settings.max_seconds * _TRIAL_SHARE, None)
        reports = [acceptance(draft, held_out[kind], 4).num_accepted for kind in HELD_OUT_KINDS]
        scores[choice] = sum(reports) / len(reports)
        say(f"trial of layers {choice}: accepted {scores[choice]:.3f} of 4 drafts")
    return max(choices, key=lambda choice: scores[choice])


def _train(
    draft: Draft, name: str, settings: Settings, corpora: list[Corpus], seconds: float, checkpoint: Path | None
) -> Draft:
    """Train for `seconds`, or `max_steps`; the learning rate falls to nothing over that time."""
    parameters = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.01)
    draw = torch.Generator().manual_seed(settings.seed)
    step, spent_s = _resume(draft, optimizer, draw, checkpoint)
    start_s, device = time.perf_counter() - spent_s, draft.target.device
    while step < settings.max_steps and (spent_s := time.perf_counter() - start_s) < seconds:
        progress = max(spent_s / seconds, step / settings.max_steps)
        rate = settings.rate * min((step + 1) / _WARM_UP_STEPS, 1.0) * max(0.02, 1 - progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        corpus = corpora[int(torch.randint(len(corpora), (), generator=draw))]
        rows = torch.randint(corpus.tokens.shape[0], (settings.train_rows,), generator=draw).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(draft, corpus, rows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if step % settings.report_steps == 0:
            say(f"{name} step {step}: loss {loss.item():.4f}, rate {rate:.2e}")
        if checkpoint is not None and step % settings.checkpoint_steps == 0:
            _save(draft, optimizer, draw, checkpoint, step, time.perf_counter() - start_s)
    say(f"{name} trained for {step} steps")
    return draft.eval()


def _save(
    draft: Draft, optimizer: torch.optim.Optimizer, draw: torch.Generator, path: Path, step: int, spent_s: float
) -> None:
    state = {"draft": draft.state_dict(), "optimizer": optimizer.state_dict(), "draw": draw.get_state()}
    part = path.with_suffix(".part")
    torch.save({**state, "step": step, "spent_s": spent_s}, part)
    part.replace(path)


def _resume(
    draft: Draft, optimizer: torch.optim.Optimizer, draw: torch.Generator, path: Path | None
) -> tuple[int, float]:
    """(steps done, seconds spent) of an earlier run with the same draft; (0, 0) without one."""
    if path is None or not path.exists():
        return 0, 0.0
    state = torch.load(path, map_location="cpu", weights_only=True)
    draft.load_state_dict(state["draft"])
    optimizer.load_state_dict(state["optimizer"])
    draw.set_state(state["draw"])
    say(f"going on from {path} at step {state['step']}")
    return state["step"], state["spent_s"]


def _corpora(target: Target, settings: Settings, taps: tuple[int, ...], until_s: float) -> list[Corpus]:
    """The training text, batch by batch, until there are `rows` or the time is up."""
    corpora: list[Corpus] = []
    for index in range(-(-settings.rows // settings.batch)):
        begun_s = time.perf_counter()
        seed = settings.seed + 1 + index
        path = settings.work / f"corpus{index}.safetensors"
        prompts = training_prompts(settings.batch, seed)
        scripts = scripts_of(prompts, target.tokenizer, target.config, settings.length)
        choice = torch.arange(settings.batch) % len(_TEMPERATURES)
        temperatures = torch.tensor(_TEMPERATURES)[choice]
        corpora.append(_written(target, path, scripts, temperatures, settings.length, taps, seed))
        took_s = time.perf_counter() - begun_s
        num_chosen = int(corpora[-1].is_chosen.sum())
        say(f"corpus {index}: {num_chosen} tokens chosen of {corpora[-1].tokens.numel()}, {took_s:.1f} s")
        if time.perf_counter() + took_s > until_s:
            break
    return corpora


def _written(
    target: Target,
    path: Path,
    scripts: Tensor,
    temperatures: Tensor,
    length: int,
    taps: tuple[int, ...],
    seed: int,
) -> Corpus:
    """Sample a batch, or replay the text that an earlier run wrote to `path`."""
    device = target.device
    if path.exists():
        saved = load_file(path)
        replay = torch.cat((saved["tokens"].long(), torch.full((len(scripts), 1), -1)), 1)
        corpus = target.generate(replay.to(device), temperatures.to(device), length, taps)
        return Corpus(corpus.tokens, corpus.best, saved["is_chosen"].to(device), corpus.taps, corpus.tap_layers)
    torch.manual_seed(seed)
    corpus = target.generate(scripts.to(device), temperatures.to(device), length, taps)
    save_file({"tokens": corpus.tokens.int().cpu(), "is_chosen": corpus.is_chosen.cpu()}, path)
    return corpus


def _held_out(target: Target, settings: Settings, taps: tuple[int, ...]) -> dict[Kind, Corpus]:
    """Greedy answers to held-out prompts of each kind; nothing after the end of an answer counts as chosen."""
    count, length = settings.held_out, settings.held_out_length
    prompts = [one for kind in HELD_OUT_KINDS for one in held_out_prompts(kind, count, settings.seed)]
    scripts = scripts_of(prompts, target.tokenizer, target.config, length).to(target.device)
    corpus = target.generate(scripts, torch.zeros(len(prompts), device=target.device), length, taps)
    ends = torch.isin(corpus.tokens, torch.tensor(target.config.eos_token_ids, device=target.device))
    is_end = (ends & corpus.is_chosen).long()
    chosen = corpus.is_chosen & (is_end.cumsum(1) == is_end)
    parts = {}
    for index, kind in enumerate(HELD_OUT_KINDS):
        rows = slice(index * count, (index + 1) * count)
        parts[kind] = Corpus(corpus.tokens[rows], corpus.best[rows], chosen[rows], corpus.taps[rows], corpus.tap_layers)
        say(f"held-out {kind.value}: {int(chosen[rows].sum())} tokens chosen")
    return parts


def _draft_ids(corpora: list[Corpus], size: int, target: Target) -> Tensor:
    """int64 [size], rising: the tokens that the target chose or ranked first most often, and its end tokens."""
    counts = torch.zeros(target.config.vocab_size, device=target.device)
    for corpus in corpora:
        for ids in (corpus.tokens[corpus.is_chosen], corpus.best[corpus.is_chosen]):
            counts += torch.bincount(ids, minlength=len(counts))
    covered = counts.sort(descending=True).values[:size].sum() / counts.sum()
    counts[list(target.config.eos_token_ids)] = counts.max() + 1
    say(f"draft vocabulary of {size} covers {100 * covered:.2f}% of the chosen tokens")
    return counts.topk(size).indices.sort().values


def _settings() -> Settings:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add: Callable[..., object] = parser.add_argument
    add("--model", default=None, help="GGUF file or checkpoint folder; default: the embedded model")
    add("--work", type=Path, default=Path("draft-work"), help="checkpoints and text, to go on from")
    add("--out", type=Path, default=Path("drafts"), help="where the finished drafts go")
    add("--max-seconds", type=float, default=900, help="for everything")
    add("--rows", type=int, default=12288, help="texts to write")
    add("--batch", type=int, default=4096, help="texts written at once")
    add("--length", type=int, default=512, help="tokens a text")
    add("--train-rows", type=int, default=32, help="texts a training step")
    add("--held-out", type=int, default=64, help="evaluation prompts of each kind")
    add("--held-out-length", type=int, default=320, help="tokens of an evaluation text, prompt included")
    add("--vocab", type=int, default=8192, help="size of the draft vocabulary")
    add("--steps", type=int, default=5, help="chain length that EAGLE is trained for")
    add("--heads", type=int, default=2, help="multi-token-prediction heads")
    add("--rate", type=float, default=1e-3, help="learning rate at its peak")
    add("--max-steps", type=int, default=1_000_000, help="of each draft, should time not end it first")
    add("--seed", type=int, default=0, help="of everything drawn")
    add("--checkpoint-steps", type=int, default=500, help="training steps between checkpoints")
    add("--report-steps", type=int, default=100, help="training steps between lines printed")
    add("--taps", default="", help="layers that EAGLE reads, as 2,15,27; several sets with / are tried in turn")
    given = vars(parser.parse_args())
    given["taps"] = tuple(tuple(map(int, one.split(","))) for one in given["taps"].split("/") if one)
    return Settings(**given)


if __name__ == "__main__":
    main()
