"""The forward half of a step: select, load, execute, sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import GenerationBatchResult, ModelOutput
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.device.transfer import to_device
from graphrunner.engine.check.graph_check import GraphCheck
from graphrunner.runner.base_graph_runner import BaseGraphRunner, OnCapture
from graphrunner.runner.base_runner import BaseRunner, LoadedBatch
from graphrunner.runner.graph_account import GraphAccount, GraphReport
from graphrunner.runner.request_table import RequestTable
from graphrunner.runner.select_runner import select_runner
from graphrunner.sampling.pooler import Pooler
from graphrunner.sampling.sampled_tokens import SampledTokens, VerifiedTokens
from graphrunner.sampling.sampler import Sampler
from graphrunner.sampling.verifier import Verifier
from graphrunner.speculative.proposer import DraftRound
from graphrunner.speculative.speculation import Speculation
from graphrunner.telemetry import ranges


class ModelRunner:
    """Owns the runners. Any of the first two may be the eager one, when graphs are off for its phase.

    Args:
        decode_cuda_graph_runner, prefill_cuda_graph_runner: whichever runners fit the device.
        eager_runner: takes what they refuse.
        request_table: device rows.
        sampler: picks tokens when the forward did not.
        pooler: makes the vectors of embedding requests.
        verifier: accepts drafts when the forward did not.
        speculation: makes drafts; None for none.
        verify_runners: graph runners of VERIFY steps, by query width.
        eos_token_ids: what min_tokens holds back.
        check: runs every replay twice; None runs it once.

    Attributes:
        graph_runners: all that record, the draft's included, in the order of their capture.
    """

    def __init__(
        self,
        *,
        decode_cuda_graph_runner: BaseRunner,
        prefill_cuda_graph_runner: BaseRunner,
        eager_runner: BaseRunner,
        request_table: RequestTable,
        sampler: Sampler,
        pooler: Pooler,
        verifier: Verifier,
        account: GraphAccount,
        eos_token_ids: frozenset[int],
        check: GraphCheck | None = None,
        speculation: Speculation | None = None,
        verify_runners: Mapping[int, BaseRunner] | None = None,
    ) -> None:
        self.decode_cuda_graph_runner = decode_cuda_graph_runner
        self.prefill_cuda_graph_runner = prefill_cuda_graph_runner
        self.eager_runner = eager_runner
        self.request_table = request_table
        self.sampler = sampler
        self._pooler = pooler
        self._account = account
        self._eos_token_ids = eos_token_ids
        self._check = check
        self.verify_runners = dict(verify_runners or {})
        self._verifier = verifier
        self._speculation = speculation
        self._inference_mode = torch.inference_mode()  # one for all steps: to make one takes longer than to enter it
        self._runners = (decode_cuda_graph_runner, prefill_cuda_graph_runner)
        drafting = speculation.runners() if speculation is not None else ()
        self.graph_runners = _by_largest_shape((*self._runners, *self.verify_runners.values(), *drafting))
        self._lazy_runners = [runner for runner in self.graph_runners if runner.is_lazy]

    def forward(self, batch: ScheduledBatch) -> GenerationBatchResult:
        """Run one step. Sync: none with in-graph sampling."""
        with self._inference_mode:
            return self._forward(batch)

    def _forward(self, batch: ScheduledBatch) -> GenerationBatchResult:
        self._capture_pending()
        self.request_table.apply(batch)
        self.sampler.apply(batch, self._eos_token_ids)
        self._pooler.apply(batch)
        if self._speculation is not None:
            self._speculation.take_rows(batch)
        selected = select_runner(self._runners_for(batch), batch, self.eager_runner)
        loaded, output = self._run(selected.runner, batch)
        sampled: SampledTokens | VerifiedTokens
        with ranges.SAMPLE:
            if batch.mode is ForwardMode.VERIFY:
                sampled = self._verified(batch, loaded, output)
            else:
                sampled = self._sampled(batch, output)
        num_proposed = 0
        if self._speculation is not None:
            num_proposed = self._propose(self._speculation, batch, loaded, output, sampled)
        if selected.miss is not None and selected.missed_by:
            self._account.missed(selected.missed_by, selected.miss)
        return GenerationBatchResult(
            tokens=sampled,
            can_run_cuda_graph=selected.miss is None,
            runner=selected.runner.name,
            key=loaded.key,
            miss_reason=selected.miss,
            logprobs=sampled.logprobs,
            prompt_logprobs=sampled.prompt_logprobs if isinstance(sampled, SampledTokens) else (),
            embeddings=self._embeddings(output, batch),
            num_proposed=num_proposed,
        )

    def take_prompts(self, batch: ScheduledBatch, views: ForwardBatch, output: ModelOutput) -> None:
        """Have the drafts, where a device makes them, take in a step of prompts that are nobody's."""
        if self._speculation is not None and self._speculation.has_device_drafts:
            token_ids = torch.zeros(batch.num_reqs, 1, dtype=torch.int32, device=views.input_ids.device)
            states = output.hidden_states, output.aux_hidden_states
            self._speculation.propose(DraftRound(batch, views, 0, token_ids, torch.ones_like(token_ids[:, 0]), *states))

    def _run(self, runner: BaseRunner, batch: ScheduledBatch) -> tuple[LoadedBatch, ModelOutput]:
        if self._check is not None:
            return self._check.run(runner, batch)
        with ranges.LOAD_BATCH:
            loaded = runner.load_batch(batch)
        with ranges.EXECUTE:
            return loaded, runner.execute(loaded)

    def capture(self, on_progress: OnCapture = lambda name, done, total: None) -> None:
        """Record every runner's list."""
        for runner in self.graph_runners:
            runner.capture(on_progress)

    def graph_report(self) -> GraphReport:
        """Per runner and key what capture cost and how often it ran; misses by reason."""
        for runner in self.graph_runners:
            runner.count_nodes()
        return self._account.report()

    def release_graphs(self) -> None:
        """Give the recordings back; `capture` may follow, on new pages."""
        for runner in self.graph_runners:
            runner.close()
        if self._check is not None:
            self._check.forget_pages()

    def close(self) -> None:
        """Give the recordings back, and what a draft holds. Idempotent."""
        self.release_graphs()
        if self._speculation is not None:
            self._speculation.close()

    def _capture_pending(self) -> None:
        for runner in self._lazy_runners:
            runner.capture_pending()

    def _runners_for(self, batch: ScheduledBatch) -> Sequence[BaseRunner]:
        if batch.mode is not ForwardMode.VERIFY:
            return self._runners
        runner = self.verify_runners.get(batch.max_query_len)
        return () if runner is None else (runner,)

    def _sampled(self, batch: ScheduledBatch, output: ModelOutput) -> SampledTokens:
        sampled = self.sampler.sample(output, batch)
        if self._check is not None:
            self._check.sampled(output, sampled)
        if output.token_ids is None:
            self._store_tokens(batch, sampled)
        return sampled

    def _verified(self, batch: ScheduledBatch, loaded: LoadedBatch, output: ModelOutput) -> VerifiedTokens:
        drafts = loaded.batch.draft_tokens
        assert drafts is not None, "a verify step has drafts"
        verified = self._verifier.verify(output, batch, drafts)
        if output.token_ids is None:
            rows = loaded.batch.request_rows[: batch.num_reqs]
            self.request_table.store_accepted(rows, verified.token_ids, verified.num_new)
        return verified

    def _propose(
        self,
        speculation: Speculation,
        batch: ScheduledBatch,
        loaded: LoadedBatch,
        output: ModelOutput,
        sampled: SampledTokens | VerifiedTokens,
    ) -> int:
        """Have the next drafts made on the device, behind the step that was just launched; how many a row."""
        num_drafts = speculation.num_drafts_after(batch)
        if num_drafts is not None:
            token_ids, num_new = _new_tokens(batch, sampled)
            round_ = DraftRound(
                batch, loaded.batch, num_drafts, token_ids, num_new, output.hidden_states, output.aux_hidden_states
            )
            try:
                speculation.propose(round_)
            except Exception as error:
                speculation.give_up(error)
                num_drafts = None
        speculation.took_step(batch, num_drafts)
        return num_drafts or 0

    def _embeddings(self, output: ModelOutput, batch: ScheduledBatch) -> Sequence[tuple[float, ...] | None]:
        if not batch.needs_hidden_states:
            return ()
        assert output.hidden_states is not None, "a step with prompt tokens returns them, recorded or not"
        return self._pooler.pool(output.hidden_states, batch)

    def _store_tokens(self, batch: ScheduledBatch, sampled: SampledTokens) -> None:
        """Make the sampled tokens the rows' last ones, where the forward did not do so itself."""
        rows = [row for row, samples in zip(batch.rows, batch.samples, strict=True) if samples]
        if rows:
            # Through pinned memory: a plain copy would wait for this step, and nothing of the next be done beside it.
            placed = to_device(torch.tensor(rows, dtype=torch.int32), sampled.token_ids.device)
            self.request_table.store_tokens(placed, sampled.token_ids)


def _new_tokens(batch: ScheduledBatch, sampled: SampledTokens | VerifiedTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """(token_ids [R, W], num_new [R]) of any step, as `DraftRound` has them."""
    token_ids = sampled.token_ids
    if isinstance(sampled, VerifiedTokens):
        return token_ids, sampled.num_new
    if all(batch.samples):
        return token_ids[: batch.num_reqs].unsqueeze(1), torch.ones_like(token_ids[: batch.num_reqs])
    places = [index for index, samples in enumerate(batch.samples) if samples]
    at = to_device(torch.tensor(places, dtype=torch.int64), token_ids.device)
    picked = token_ids if token_ids.shape[0] == len(places) else token_ids.index_select(0, at)
    whole = torch.full((batch.num_reqs,), -1, dtype=torch.int32, device=token_ids.device).index_copy_(0, at, picked)
    return whole.unsqueeze(1), (whole >= 0).to(torch.int32)


def _by_largest_shape(runners: Iterable[BaseRunner]) -> list[BaseGraphRunner]:
    """Those that record, falling: what is recorded later finds room in the memory of what came before."""
    recording = {id(each): each for each in runners if isinstance(each, BaseGraphRunner)}
    return sorted(recording.values(), key=lambda each: max(key.num_tokens for key in each.all_keys()), reverse=True)
