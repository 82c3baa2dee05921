"""--check-graphs: silent on engines that are right, and a planted fault of each kind is found and named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engine_driver import generate, greedy, pool_check, prompts_of

from graphrunner import LLM, SamplingParams
from graphrunner.core.errors import GraphCheckError
from graphrunner.runner.staging import StagingBlock
from graphrunner.sampling import readback

CASES = [
    pytest.param(("cpu", "recording"), id="recording"),
    pytest.param(("cpu", "full"), id="tape"),
    pytest.param(("cuda", "full"), id="cuda", marks=pytest.mark.cuda),
]
Make = Callable[..., LLM]


@pytest.fixture(params=CASES)
def checked(request: pytest.FixtureRequest, make_llm: Make) -> Make:
    """An engine whose graphs are made at first use, so that a fault planted before is recorded with them."""
    device, backend = request.param

    def make(**options: object) -> LLM:
        base = {
            "check_graphs": True,
            "device": device,
            "decode_graph": backend,
            "prefill_graph": "off",
            "capture": "lazy",
            "decode_sizes": [4],
            "prefill_sizes": [16, 32],
        }
        return make_llm(**(base | options))

    return make


def model_of(llm: LLM) -> torch.nn.Module:
    return llm.engine.core.model_runner.decode_cuda_graph_runner.context.forward._model


def run(llm: LLM, lengths: tuple[int, ...] = (9, 17, 5), num_tokens: int = 6) -> list[list[int]]:
    return generate(llm, prompts_of(list(lengths)), greedy(num_tokens))


def fails_with(llm: LLM, *words: str) -> None:
    """The next requests end with a report that holds these words; the engine's books are in order after it."""
    with pytest.raises(GraphCheckError) as caught:
        run(llm)
    text = str(caught.value)
    for word in words:
        assert re.search(word, text), f"{word!r} is not in: {text}"
    pool_check(llm)


@pytest.mark.parametrize("backend", ["recording", "full", "breakable"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_nothing_to_report(make_llm: Make, solo, backend: str, overlap: bool) -> None:
    llm = make_llm(
        check_graphs=True, decode_graph=backend, prefill_graph=backend, decode_sizes=[2, 4], prefill_sizes=[16, 32, 64],
        overlap=overlap, max_num_batched_tokens=24,
    )  # fmt: skip
    prompts = prompts_of([9, 40, 5])
    assert generate(llm, prompts, greedy(6)) == [solo(prompt, 6) for prompt in prompts]
    assert generate(llm, prompts, greedy(6)) == [solo(prompt, 6) for prompt in prompts]  # from the prefix cache
    assert llm.graph_report().num_checked_steps == sum(step.is_graph for step in llm.steps) > 10
    pool_check(llm)


@pytest.mark.parametrize("need", ["random", "logits"])
def test_checking_changes_no_token(make_llm: Make, need: str) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=8, ignore_eos=True, detokenize=False)
    params = replace(params, presence_penalty=1.0, logprobs=2) if need == "logits" else params
    options = {"decode_graph": "recording", "prefill_graph": "recording", "decode_sizes": [4], "prefill_sizes": [32]}
    with_check, without = (make_llm(**options, check_graphs=is_on) for is_on in (True, False))
    prompts = prompts_of([9, 5])
    assert generate(with_check, prompts, params) == generate(without, prompts, params)
    assert with_check.graph_report().num_checked_steps and not without.graph_report().num_checked_steps


def test_a_layer_that_reads_padded_rows(checked: Make) -> None:
    llm = checked()
    layer = model_of(llm).layers[1].o_proj
    plain = layer.forward
    layer.forward = lambda x, residual: (y := plain(x, residual)) + 0.0 * y.sum(0)
    fails_with(llm, r"decode_cuda_graph_runner 4t x 4r greedy", r"layers\.1\.o_proj", "request-0 .row", "inf")


def test_one_request_that_reads_its_neighbour_is_named(checked: Make) -> None:
    llm = checked()
    layer = model_of(llm).layers[0].down_proj
    plain = layer.forward

    def leaks(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = plain(x, residual)
        last = y.shape[0] - 1
        return torch.cat((y[:1], y[1:2] + 0.5 * y[last:], y[2:]))  # the last row is padding, or the third request

    layer.forward = leaks
    fails_with(llm, r"layers\.0\.down_proj", r"1 of 3 rows differ", r"requests request-\d \(row \d\)$")


def test_a_pad_value_that_leaks(checked: Make) -> None:
    llm = checked()
    attention = llm.engine.core.model_runner.decode_cuda_graph_runner.context.attention
    plain = attention.forward
    attention.forward = lambda spec, qkv, kv, batch: plain(spec, qkv, kv, batch) * batch.seq_lens.min().log()
    fails_with(llm, r"layers\.0\.attention", "differs from eager")


def test_a_static_buffer_that_was_not_loaded(checked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = checked(capture="eager")
    run(llm)
    buffers = llm.engine.core.model_runner.decode_cuda_graph_runner.buffers
    send = StagingBlock.send

    def loses_one(self: StagingBlock, num_bytes: int | None = None) -> None:
        send(self, num_bytes)
        if self is buffers._staging:
            rows = buffers.tensors["request_rows"]
            rows[1] = rows[1] % 3 + 1  # another request's

    monkeypatch.setattr(StagingBlock, "send", loses_one)
    fails_with(llm, "static buffer .*: request_rows: entry 1 holds . instead of .", r"requests request-. \(row .\)$")


def test_a_column_that_is_missing(checked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphrunner.runner import prefill_cuda_graph_runner as module

    whole = module.token_columns
    broken = {"positions": lambda column: column[: len(column) // 2]}
    monkeypatch.setattr(
        module, "token_columns", lambda batch: {n: broken.get(n, lambda c: c)(c) for n, c in whole(batch).items()}
    )
    llm = checked(prefill_graph="recording", capture="eager")
    fails_with(llm, r"prefill_cuda_graph_runner 32t", "static buffer .*: positions: entry 15 holds 0 instead of")


def test_an_output_that_another_forward_overwrites(checked: Make) -> None:
    llm = checked()
    context = llm.engine.core.model_runner.decode_cuda_graph_runner.context
    shared = torch.zeros(8, context.forward._model.config.vocab_size, device=context.device)
    model = context.forward._model
    plain = model.logits

    def into_shared(hidden: torch.Tensor) -> torch.Tensor:
        out = shared[: hidden.shape[0]]
        return out.copy_(plain(hidden))

    model.logits = into_shared
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=1)
    with pytest.raises(GraphCheckError, match="an output was overwritten before it was read: logits"):
        generate(llm, prompts_of([5, 6]), params)


def test_tokens_that_are_read_too_late(checked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: readback.TokenReadback, token_ids: torch.Tensor) -> readback.TokenCopy:
        return readback.TokenCopy(token_ids, None, [])

    monkeypatch.setattr(readback.TokenReadback, "start", keep)
    fails_with(checked(overlap=True), "token_ids", "read after the next replay")


def test_a_recording_that_reads_replaced_memory(checked: Make) -> None:
    llm = checked(capture="eager")
    runner = llm.engine.core.model_runner.decode_cuda_graph_runner
    if runner.backend.name == "recording":
        pytest.skip("a closure has no addresses of its own")
    run(llm)
    projection = model_of(llm).layers[1].gate_up_proj
    projection.packed = replace(projection.packed, data=projection.packed.data.flip(1).contiguous())
    fails_with(llm, "recording differs from its own closure", "logits|token_ids|KV pages of layer")


def test_rows_that_are_not_advanced(checked: Make) -> None:
    llm = checked()
    runner = llm.engine.core.model_runner.decode_cuda_graph_runner
    runner._advance = lambda table, rows, seq_lens, ids: table.store_tokens(rows, ids)
    fails_with(llm, "request table .*num_computed: row .* holds 10 instead of 11", r"requests request-0 \(row")


def test_tokens_picked_wrongly_from_right_logits(checked: Make) -> None:
    llm = checked()
    forward = llm.engine.core.model_runner.decode_cuda_graph_runner.context.forward
    picked = forward._picked
    forward._picked = lambda *args: ((picked(*args)[0] + 1) % 90, None)
    fails_with(llm, "the logits are right and the tokens picked", "token_ids: .* instead of")


def test_a_write_into_a_page_that_nobody_owns(checked: Make) -> None:
    llm = checked(enable_prefix_caching=False)
    attention = llm.engine.core.model_runner.decode_cuda_graph_runner.context.attention
    plain = attention.forward

    def strays(spec, qkv, kv, batch):  # type: ignore[no-untyped-def]
        kv.v[199, 3] = 0.25
        return plain(spec, qkv, kv, batch)

    attention.forward = strays
    run(llm)
    scheduler = llm.engine.core.scheduler
    allocator = next(value for value in vars(scheduler).values() if type(value).__name__ == "PageAllocator")
    allocator._free.sort()  # so that page 199 is the next one
    fails_with(llm, "written while nobody owned it: page 199")


def test_near_ties_are_no_fault(checked: Make) -> None:
    """Two shapes may round an exact tie apart; both tokens are right."""
    llm = checked()
    model = model_of(llm)
    plain = model.logits

    def tied(hidden: torch.Tensor) -> torch.Tensor:
        logits = plain(hidden)
        top = logits.max(1, keepdim=True).values
        nudge = 1e-6 if hidden.shape[0] == 4 else -1e-6  # by the padded shape
        return torch.cat((top + nudge * top.abs(), top, logits[:, 2:]), dim=1)

    model.logits = tied
    model.greedy_tokens = lambda rows: None  # on a card it would not look at these logits
    run(llm)
    assert llm.graph_report().num_checked_steps > 3


def test_a_kernel_of_its_own_may_break_a_tie_otherwise(checked: Make) -> None:
    """On a card the largest logit is found while the head multiplies, which rounds in its own way."""
    llm = checked()
    model = model_of(llm)
    plain = model.logits

    def tied(hidden: torch.Tensor) -> torch.Tensor:
        logits = plain(hidden)
        top = logits.max(1, keepdim=True).values
        return torch.cat((top, top * (1 - 1e-6), logits[:, 2:]), dim=1)

    model.logits = tied
    model.greedy_tokens = lambda rows: torch.ones(rows.shape[0], dtype=torch.int32, device=rows.device)
    run(llm)
    assert llm.graph_report().num_checked_steps > 3
    model.greedy_tokens = lambda rows: torch.full((rows.shape[0],), 7, dtype=torch.int32, device=rows.device)
    llm.engine.core.model_runner.decode_cuda_graph_runner.close()
    fails_with(llm, "the logits are right and the tokens picked")


@pytest.mark.parametrize("temperature", [0.0, 0.05])
@pytest.mark.parametrize("backend", ["recording", "full"])
def test_verify_steps_are_checked(make_llm: Make, solo, backend: str, temperature: float) -> None:
    llm = make_llm(
        check_graphs=True, decode_graph=backend, prefill_graph="off", decode_sizes=[4],
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
    )  # fmt: skip
    prompts = [[5, 6, 7, 8] * 5, *prompts_of([9])]
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=12, ignore_eos=True, detokenize=False)
    found = generate(llm, prompts, params)
    if temperature == 0.0:
        assert found == [solo(prompt, 12) for prompt in prompts]
    verified = [step for step in llm.steps if step.mode.value == "verify" and step.is_graph]
    assert verified and llm.graph_report().num_checked_steps == sum(step.is_graph for step in llm.steps)


def test_a_padded_row_that_reaches_a_verify_step(make_llm: Make) -> None:
    llm = make_llm(
        check_graphs=True, decode_graph="recording", prefill_graph="off", decode_sizes=[4],
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
    )  # fmt: skip
    layer = model_of(llm).layers[0].o_proj
    plain = layer.forward
    layer.forward = lambda x, residual: (y := plain(x, residual)) + (0.0 * y.sum(0) if x.shape[0] > 12 else 0.0)
    with pytest.raises(GraphCheckError, match=r"verify_4 16t x 4r .*layers\.0\.o_proj"):
        generate(llm, [[5, 6, 7, 8] * 5] * 3, greedy(12))
