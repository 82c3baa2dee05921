"""Runners, a request table and a pool around the fake model, driven without a scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from fakes.fake_model import HEAD_DIM, NUM_KV_HEADS, VOCAB_SIZE, FakeModel

from graphrunner.attention.backend import AttentionBackend
from graphrunner.attention.torch_attention import TorchAttention
from graphrunner.config.engine_config import GraphBackend
from graphrunner.core.forward_batch import KVLayer
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.sampling_params import SamplingParams
from graphrunner.core.scheduled_batch import PageAppend, RowInit, SamplingNeed, ScheduledBatch
from graphrunner.core.shape_key import ForwardMode, ForwardVariant
from graphrunner.device.registry import device_of
from graphrunner.execution.backend import ExecutionBackend
from graphrunner.execution.registry import create_execution_backend
from graphrunner.runner.base_runner import BaseRunner
from graphrunner.runner.cpu_graph_runner import CPUGraphRunner
from graphrunner.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from graphrunner.runner.eager_runner import EagerRunner
from graphrunner.runner.graph_account import GraphAccount
from graphrunner.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from graphrunner.runner.request_table import RequestTable
from graphrunner.runner.runner_context import RunnerContext
from graphrunner.runner.select_runner import Selection, select_runner

PAGE_SIZE = 4
MAX_SEQ_LEN = 64
CPU = torch.device("cpu")


@dataclass(slots=True)
class Live:
    """A request that runs: what the host knows of it."""

    name: str
    row: int
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    cached_len: int = 0
    is_known: bool = False  # whether the table has its row


class World:
    """Args: what the runners are built from; sizes None builds no graph runner of that phase."""

    def __init__(
        self,
        device: torch.device = CPU,
        *,
        backend: GraphBackend = GraphBackend.RECORDING,
        decode_sizes: Sequence[int] | None = (1, 2, 4, 8),
        prefill_sizes: Sequence[int] | None = (8, 16, 32),
        max_reqs: int = 9,
        num_pages: int = 160,
        query_width: int = 1,
        is_lazy: bool = False,
        is_poisoning: bool = True,
        is_cpu_runner: bool = False,
        attention: AttentionBackend | None = None,
        fails_at: int | None = None,
        seed: int = 0,
    ) -> None:
        shape = (num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        # Memory that nobody owns is poison from the start, the dummy page included.
        self.kv = KVLayer(*(torch.full(shape, float("nan"), device=device) for _ in range(2)))
        self.model = FakeModel(device)
        self.model.fails_at = fails_at
        self.table = RequestTable(max_reqs + 1, MAX_SEQ_LEN // PAGE_SIZE, device, query_width - 1)
        self.context = RunnerContext(
            self.model.forward, self.model.tail, self.table, (self.kv,), attention or TorchAttention(), device,
            PAGE_SIZE, MAX_SEQ_LEN,
        )  # fmt: skip
        self.account = GraphAccount()
        self.eager = EagerRunner(self.context)
        self.backends: list[ExecutionBackend] = []
        self.decode: BaseRunner = self.eager
        self.prefill: BaseRunner = self.eager
        options = {"is_lazy": is_lazy, "is_poisoning": is_poisoning}
        pool = device_of(device).graph_pool()
        if is_cpu_runner:
            self.backends.append(create_execution_backend(backend, device, pool=pool))
            self.decode = self.prefill = CPUGraphRunner(
                self.context, self.backends[-1], self.account, decode_sizes or (1,),
                prefill_sizes=prefill_sizes or (), max_reqs=max_reqs, **options,
            )  # fmt: skip
            decode_sizes = prefill_sizes = None
        if decode_sizes:
            self.backends.append(create_execution_backend(backend, device, pool=pool))
            variants = [ForwardVariant.LOGITS, ForwardVariant.GREEDY]
            variants += [ForwardVariant.SAMPLE] if query_width == 1 else []
            self.decode = DecodeCudaGraphRunner(
                self.context, self.backends[-1], self.account, decode_sizes, variants=variants,
                query_width=query_width, **options,
            )  # fmt: skip
        if prefill_sizes:
            self.backends.append(create_execution_backend(backend, device, pool=pool))
            self.prefill = PrefillCudaGraphRunner(
                self.context, self.backends[-1], self.account, prefill_sizes, max_reqs=max_reqs, **options
            )
        self.device = device
        self._rng = random.Random(seed)
        self._free_pages = list(range(1, num_pages))
        self._rng.shuffle(self._free_pages)
        self._free_rows = list(range(1, max_reqs + 1))
        self._num_made = 0
        self.last: Selection | None = None

    def capture(self) -> World:
        """Record both runners' lists."""
        for runner in (self.decode, self.prefill):
            if runner is not self.eager:
                runner.capture()  # type: ignore[attr-defined]
        return self

    def new(self, num_tokens: int) -> Live:
        """A request with a random prompt."""
        self._num_made += 1
        prompt = [self._rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
        return Live(f"r{self._num_made}", self._free_rows.pop(), prompt)

    def free(self, live: Live) -> None:
        """End a request; its pages keep what they hold."""
        self._free_pages.extend(live.pages)
        self._free_rows.append(live.row)

    def batch(
        self,
        decode: Sequence[Live] = (),
        chunks: Sequence[tuple[Live, int]] = (),
        need: SamplingNeed = SamplingNeed.GREEDY,
        **flags: bool,
    ) -> ScheduledBatch:
        """One step: a token for each of `decode`, the next `length` known tokens for each of `chunks`."""
        inits, appends, ids = [], [], [-1] * len(decode)
        for live, length in [*((each, 1) for each in decode), *chunks]:
            start = len(live.pages)
            while len(live.pages) * PAGE_SIZE < live.cached_len + length:
                live.pages.append(self._free_pages.pop())
            if not live.is_known:
                prompt = tuple(live.tokens)
                inits.append(RowInit(live.row, live.name, SamplingParams(), 0, prompt, (), tuple(live.pages)))
                live.is_known = True
            elif live.pages[start:]:
                appends.append(PageAppend(live.row, start, tuple(live.pages[start:])))
        for live, length in chunks:
            ids += live.tokens[live.cached_len : live.cached_len + length]
        everyone = [*decode, *(live for live, _ in chunks)]
        ends = [live.cached_len + length == len(live.tokens) for live, length in chunks]
        kind = ForwardMode.DECODE if not chunks else ForwardMode.MIXED if decode else ForwardMode.PREFILL
        return ScheduledBatch(
            step_id=0,
            mode=kind,
            request_ids=tuple(live.name for live in everyone),
            rows=tuple(live.row for live in everyone),
            cached_lens=tuple(live.cached_len for live in everyone),
            query_lens=(1,) * len(decode) + tuple(length for _, length in chunks),
            input_ids=tuple(ids) if chunks else (),
            samples=(True,) * len(decode) + tuple(ends),
            sampling_need=need,
            row_inits=tuple(inits),
            page_appends=tuple(appends),
            **flags,
        )

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch, poison: int | None = None) -> ModelOutput:
        """The forward half of a step; `poison` goes into every static buffer before the load."""
        for runner in (self.decode, self.prefill):
            if runner is not self.eager:
                runner.capture_pending()  # type: ignore[attr-defined]
                if poison is not None:
                    runner.poison(poison)  # type: ignore[attr-defined]
        self.table.apply(batch)
        self.last = select_runner((self.decode, self.prefill), batch, self.eager)
        if self.last.miss is not None and self.last.missed_by:
            self.account.missed(self.last.missed_by, self.last.miss)
        runner = self.last.runner
        return runner.execute(runner.load_batch(batch))

    def step(
        self,
        decode: Sequence[Live] = (),
        chunks: Sequence[tuple[Live, int]] = (),
        need: SamplingNeed = SamplingNeed.GREEDY,
        poison: int | None = None,
    ) -> list[int]:
        """A whole step: run, pick greedily where the forward did not, append. The new tokens."""
        batch = self.batch(decode, chunks, need)
        output = self.run(batch, poison)
        everyone = [*decode, *(live for live, _ in chunks)]
        if output.token_ids is None:
            assert output.logits is not None
            token_ids = output.logits.argmax(-1).to(torch.int32)
            sampling = [index for index, samples in enumerate(batch.samples) if samples]
            rows = torch.tensor([batch.rows[index] for index in sampling], dtype=torch.int32, device=self.device)
            if sampling:
                self.table.store_tokens(rows, token_ids[sampling])
        else:
            token_ids = output.token_ids
        new = []
        for live, length, samples, token in zip(everyone, batch.query_lens, batch.samples, token_ids.tolist()):
            live.cached_len += length
            if samples:
                live.tokens.append(token)
                new.append(token)
        return new


def solo_tokens(prompt: Sequence[int], num_tokens: int, device: torch.device = CPU) -> list[int]:
    """What a prompt alone, eager, in one piece goes on with."""
    world = World(device, decode_sizes=None, prefill_sizes=None)
    live = world.new(len(prompt))
    live.tokens[:] = prompt
    world.step(chunks=[(live, len(prompt))])
    for _ in range(num_tokens - 1):
        world.step(decode=[live])
    return live.tokens[len(prompt) :]
