"""The engine drafts what the training code says a draft of these weights would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafts import MTP, Draft, Eagle, Shape
from engine_driver import VOCAB_SIZE, generate, greedy, prompts_of
from export_draft import export, packed
from objective import acceptance, loss_of
from prompts import HELD_OUT_KINDS, held_out_prompts, training_prompts
from target import SAMPLE_HERE, Target

from graphrunner import LLM
from graphrunner.speculative.proposer import DraftRound

NUM_TOKENS = 24
SHAPE = Shape(hidden_size=48, intermediate_size=96, num_q_heads=4, num_kv_heads=2, head_dim=16, norm_eps=1e-6)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target]:
    """A tiny model whose weights are bfloat16 numbers, on disk and as the training code has it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB_SIZE, max_position_embeddings=128, tie_word_embeddings=True,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().float().save_pretrained(folder)
    return folder, Target(str(folder), torch.device("cpu"), torch.float32)


def _made(kind: str, target: Target) -> Draft:
    """A draft of random weights that int8 holds exactly."""
    torch.manual_seed(8)
    ids = torch.randperm(VOCAB_SIZE)[:70].sort().values
    draft: Draft = Eagle(target, SHAPE, (1, 3), ids, 4) if kind == "eagle" else MTP(target, SHAPE, ids, 2)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(3.0)
                pair = list(packed(name, parameter).values())
                parameter.copy_(pair[0].float() * pair[1].float())
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return draft.eval()


def _chain(draft: Draft, target: Target, tokens: list[int], drafts: list[int]) -> list[int]:
    """What the training code drafts after `tokens`, given that its own first drafts were `drafts`."""
    row = torch.tensor([[*tokens, *drafts, 0]])
    script = torch.cat((row, torch.full((1, 1), -1)), 1)
    corpus = target.generate(script, torch.zeros(1), row.shape[1], draft.tap_layers)
    anchor = len(tokens) - 2
    with torch.no_grad():
        hidden = draft(row, corpus.taps.float())
        return [
            int(draft.draft_ids[draft.draft_logits(hidden[step][0, anchor], step).argmax(-1)])
            for step in range(draft.num_steps)
        ]


def _rounds(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[tuple[str, int, list[int], bool]]]:
    """Tokens of each prompt; (request, length known, drafts, whether it came from a prompt step) of each round."""
    rounds: list[tuple[str, int, list[int], bool]] = []
    runner = llm.engine.core.model_runner
    proposer, table = runner._speculation.proposer, runner.request_table
    propose = proposer.propose

    def watched(round_: DraftRound) -> None:
        propose(round_)
        for request, row, samples in zip(round_.batch.request_ids, round_.batch.rows, round_.batch.samples):
            if samples and round_.num_drafts:
                known = int(table.num_computed[row]) + 1
                rounds.append((request, known, table.draft_tokens[row].tolist(), bool(round_.batch.input_ids)))

    proposer.propose = watched
    return generate(llm, prompts, greedy(NUM_TOKENS)), rounds


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8}], ids=["whole", "chunks"])
@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_the_engine_drafts_what_was_trained(
    target: tuple[Path, Target], tmp_path: Path, kind: str, options: dict[str, int]
) -> None:
    folder, trained_on = target
    draft = _made(kind, trained_on)
    export(draft, tmp_path / kind, {})
    llm = LLM(
        str(folder), max_model_len=96, max_num_seqs=4, num_pages=100, skip_tokenizer_init=True, num_threads=1,
        speculative_config={
            "method": kind, "model": str(tmp_path / kind), "num_speculative_tokens": draft.num_steps,
            "adaptive": False,
        },
        **options,
    )  # fmt: skip
    prompts = prompts_of([9, 14])
    outputs, rounds = _rounds(llm, prompts)
    llm.close()
    names = list(dict.fromkeys(request for request, *_ in rounds))
    assert len(names) == 2 and len(rounds) > 10
    for request, num_known, drafts, is_prompt in rounds:
        whole = prompts[names.index(request)] + outputs[names.index(request)]
        if num_known > len(whole):
            continue
        expected = _chain(draft, trained_on, whole[:num_known], drafts)
        # A later head's keys at the ends of earlier rounds were made from drafts: only its first round is exact.
        count = draft.num_steps if kind == "eagle" or is_prompt else 1
        assert drafts[:count] == expected[:count], (request, num_known)


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_training_learns(target: tuple[Path, Target], kind: str) -> None:
    torch.manual_seed(4)
    _, trained_on = target
    scripts = torch.cat((torch.randint(3, VOCAB_SIZE, (8, 4)), torch.full((8, 1), -1)), 1)
    corpus = trained_on.generate(scripts, torch.zeros(8), 24, (1, 3))
    ids = torch.arange(VOCAB_SIZE)
    draft: Draft = Eagle(trained_on, SHAPE, (1, 3), ids, 3) if kind == "eagle" else MTP(trained_on, SHAPE, ids, 2)
    before = acceptance(draft, corpus, 4).num_accepted
    optimizer = torch.optim.AdamW(draft.parameters(), lr=4e-3)
    for _ in range(40):
        optimizer.zero_grad()
        loss_of(draft, corpus, torch.arange(8)).backward()
        optimizer.step()
    after = acceptance(draft, corpus, 4)
    assert after.num_accepted > before + 0.5
    assert list(after.by_step) == sorted(after.by_step, reverse=True)


def test_held_out_prompts_are_held_out() -> None:
    seen = " ".join(turn for prompt in training_prompts(2000, 1) for turn in prompt.turns)
    for kind in HELD_OUT_KINDS:
        for prompt in held_out_prompts(kind, 20, 0):
            assert len(prompt.turns) == 1 and prompt.turns[0] not in seen


def test_a_row_follows_its_script(target: tuple[Path, Target]) -> None:
    """Forced tokens are forced, free ones are the model's best, and its end of turn leads to the next entry."""
    _, model = target
    script = torch.tensor([[5, 6, SAMPLE_HERE, 7, 8, SAMPLE_HERE]])
    corpus = model.generate(script, torch.zeros(1), 12, (3,))
    tokens, is_chosen = corpus.tokens[0].tolist(), corpus.is_chosen[0].tolist()
    assert tokens[:2] == [5, 6] and not any(is_chosen[:2])
    chosen = [place for place in range(2, 12) if is_chosen[place]]
    assert chosen and all(tokens[place] == int(corpus.best[0, place - 1]) for place in chosen)
    if 2 in tokens[2:]:
        end = tokens.index(2, 2)
        assert tokens[end + 1 : end + 3] == [7, 8][: 11 - end]
