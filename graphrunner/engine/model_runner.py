"""The forward half of a step: select, load, execute, sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphrunner.core.outputs import GenerationBatchResult, ModelOutput
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.engine.check.graph_check import GraphCheck
from graphrunner.runner.base_graph_runner import BaseGraphRunner, OnCapture
from graphrunner.runner.base_runner import BaseRunner, LoadedBatch
from graphrunner.runner.graph_account import GraphAccount, GraphReport
from graphrunner.runner.request_table import RequestTable
from graphrunner.runner.select_runner import select_runner
from graphrunner.sampling.pooler import Pooler
from graphrunner.sampling.sampled_tokens import SampledTokens
from graphrunner.sampling.sampler import Sampler
from graphrunner.telemetry import ranges


class ModelRunner:
    """Owns the runners. Any of the first two may be the eager one, when graphs are off for its phase.

    Args:
        decode_cuda_graph_runner, prefill_cuda_graph_runner: whichever runners fit the device.
        eager_runner: takes what they refuse.
        request_table: device rows.
        sampler: picks tokens when the forward did not.
        pooler: makes the vectors of embedding requests.
        eos_token_ids: what min_tokens holds back.
        check: runs every replay twice; None runs it once.
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
        account: GraphAccount,
        eos_token_ids: frozenset[int],
        check: GraphCheck | None = None,
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
        self._runners = (decode_cuda_graph_runner, prefill_cuda_graph_runner)

    @torch.inference_mode()
    def forward(self, batch: ScheduledBatch) -> GenerationBatchResult:
        """Run one step. Sync: none with in-graph sampling."""
        self._capture_pending()
        self.request_table.apply(batch)
        self.sampler.apply(batch, self._eos_token_ids)
        self._pooler.apply(batch)
        selected = select_runner(self._runners, batch, self.eager_runner)
        loaded, output = self._run(selected.runner, batch)
        with ranges.SAMPLE:
            sampled = self.sampler.sample(output, batch)
        if self._check is not None:
            self._check.sampled(output, sampled)
        if output.token_ids is None:
            self._store_tokens(batch, sampled)
        if selected.miss is not None and selected.missed_by:
            self._account.missed(selected.missed_by, selected.miss)
        return GenerationBatchResult(
            tokens=sampled,
            can_run_cuda_graph=selected.miss is None,
            runner=selected.runner.name,
            key=loaded.key,
            miss_reason=selected.miss,
            logprobs=sampled.logprobs,
            prompt_logprobs=sampled.prompt_logprobs,
            embeddings=self._embeddings(output, batch),
        )

    def _run(self, runner: BaseRunner, batch: ScheduledBatch) -> tuple[LoadedBatch, ModelOutput]:
        if self._check is not None:
            return self._check.run(runner, batch)
        with ranges.LOAD_BATCH:
            loaded = runner.load_batch(batch)
        with ranges.EXECUTE:
            return loaded, runner.execute(loaded)

    def capture(self, on_progress: OnCapture = lambda name, done, total: None) -> None:
        """Record every runner's list."""
        for runner in self._graph_runners():
            runner.capture(on_progress)

    def graph_report(self) -> GraphReport:
        """Per runner and key what capture cost and how often it ran; misses by reason."""
        for runner in self._graph_runners():
            runner.count_nodes()
        return self._account.report()

    def close(self) -> None:
        """Give the recordings back. Idempotent."""
        for runner in self._graph_runners():
            runner.close()

    def _graph_runners(self) -> list[BaseGraphRunner]:
        return [runner for runner in self._runners if isinstance(runner, BaseGraphRunner)]

    def _capture_pending(self) -> None:
        for runner in self._runners:
            if isinstance(runner, BaseGraphRunner):
                runner.capture_pending()

    def _embeddings(self, output: ModelOutput, batch: ScheduledBatch) -> Sequence[tuple[float, ...] | None]:
        if not batch.needs_hidden_states:
            return ()
        assert output.hidden_states is not None, "every runner but the eager one refuses such a batch"
        return self._pooler.pool(output.hidden_states, batch)

    def _store_tokens(self, batch: ScheduledBatch, sampled: SampledTokens) -> None:
        """Make the sampled tokens the rows' last ones, where the forward did not do so itself."""
        rows = [row for row, samples in zip(batch.rows, batch.samples, strict=True) if samples]
        if rows:
            token_ids = sampled.token_ids
            self.request_table.store_tokens(torch.tensor(rows, dtype=torch.int32, device=token_ids.device), token_ids)
