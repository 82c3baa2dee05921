"""From a replay and its eager twin to the first thing that differs.

The quick half compares what both left behind. Only when that differs, the recorded closure is called uncaptured at the
padded shape, layer by layer beside eager: if those two agree, the recording itself is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.scheduled_batch import ScheduledBatch
from graphrunner.core.shape_key import ForwardMode, ForwardVariant
from graphrunner.engine.check.compare import Difference, are_ties, row_difference
from graphrunner.engine.check.finding import Finding, FindingKind
from graphrunner.engine.check.layer_probe import LayerProbe
from graphrunner.engine.check.poison import VALID_GARBAGE
from graphrunner.engine.check.step_state import StepState, StepStates, counting_tokens
from graphrunner.runner.base_graph_runner import BaseGraphRunner, poison_output
from graphrunner.runner.base_runner import BaseRunner, LoadedBatch
from graphrunner.runner.runner_context import RunnerContext

_TOKEN_INPUTS = ("input_ids", "positions", "slot_mapping")
_REQUEST_INPUTS = ("request_rows", "seq_lens")
_PICKED_IN_GRAPH = (ForwardVariant.GREEDY, ForwardVariant.SAMPLE)


Pick = Callable[[Tensor, ForwardBatch, ForwardVariant], tuple[Tensor, Tensor | None]]
"""(logits, batch, variant) -> token ids and, of a verify step, how many; a pure function of device state."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One replay and what it left.

    Attributes:
        replayed: copies of its outputs; None for a step that was not replayed.
        states, before, after: how to take it back, and the device before and after it.
    """

    runner: BaseRunner
    batch: ScheduledBatch
    loaded: LoadedBatch
    replayed: ModelOutput | None = None
    states: StepStates | None = None
    before: StepState | None = None
    after: StepState | None = None

    def finding(self, kind: FindingKind, where: str, detail: str, rows: Sequence[int] = (), of: int = 0) -> Finding:
        """A report. `rows` are row numbers among `of` (tokens or requests); none given names every request."""
        batch = self.batch
        owners = list(range(batch.num_reqs))
        if rows and of != batch.num_reqs:
            by_token = [index for index, length in enumerate(batch.query_lens) for _ in range(length)]
            owners = sorted({by_token[row] for row in rows if row < len(by_token)})
        elif rows:
            owners = sorted(row for row in set(rows) if row < batch.num_reqs)
        names = tuple(f"{batch.request_ids[index]} (row {batch.rows[index]})" for index in owners)
        return Finding(kind, where, detail, self.runner.name, self.loaded.key, batch.step_id, names)


@dataclass(frozen=True, slots=True)
class _Twin:
    """The eager run: logits of the rows that the replay has, the tokens it would pick, and the state it left."""

    loaded: LoadedBatch
    logits: Tensor
    token_ids: Tensor | None
    state: StepState


class Diagnosis:
    """Args as `GraphCheck`."""

    def __init__(
        self,
        context: RunnerContext,
        eager: BaseRunner,
        model: object,
        pick: Pick,
    ) -> None:
        self._context = context
        self._eager = eager
        self._model = model
        self._pick = pick

    def of(self, evidence: Evidence) -> Finding | None:
        """The fault of a replay, None when there is none. The step must have been taken back; it is left run."""
        twin = self._run_eagerly(evidence)
        fault = self._wrong_input(evidence, twin.loaded.batch) or self._row_fault(evidence)
        if fault is not None:
            return fault
        if self._is_alike(evidence, twin):
            poison_output(ModelOutput(logits=twin.logits))
            return None
        return self._cause(evidence, twin)

    def poison_padding(self, runner: BaseGraphRunner, loaded: LoadedBatch) -> None:
        """Let padding rows compute garbage: other tokens, and, for rows that read the dummy page, NaN from it."""
        runner.buffers.poison_padding(loaded.num_tokens, loaded.key.num_tokens)
        table = self._context.table
        table.last_token[0] = VALID_GARBAGE
        # The dummy row then has a token before this step's, and reads it where poison is.
        table.num_computed[0] = 1

    def _run_eagerly(self, evidence: Evidence) -> _Twin:
        variant = evidence.loaded.key.variant
        loaded = self._eager.load_batch(evidence.batch)
        logits = self._eager.execute(loaded).logits
        assert logits is not None and evidence.states is not None
        tokens = None
        if variant in _PICKED_IN_GRAPH:
            tokens, _ = self._pick(logits, loaded.batch, variant)
        return _Twin(loaded, logits, tokens, evidence.states.take())

    def _row_fault(self, evidence: Evidence) -> Finding | None:
        """Whether the replay advanced the table as the host's own numbers say."""
        batch, before, after, replayed = evidence.batch, evidence.before, evidence.after, evidence.replayed
        assert before is not None and after is not None and replayed is not None
        rows = torch.tensor(batch.rows, device=before.num_computed.device)
        computed, last = before.num_computed.clone(), before.last_token.clone()
        if batch.mode is not ForwardMode.VERIFY:
            lengths = [cached + query for cached, query in zip(batch.cached_lens, batch.query_lens, strict=True)]
            computed[rows] = torch.tensor(lengths, dtype=computed.dtype, device=computed.device)
            if replayed.token_ids is not None:
                last[rows] = replayed.token_ids
        elif replayed.token_ids is not None and replayed.num_new is not None:
            computed[rows] += replayed.num_new
            last[rows] = replayed.token_ids.gather(1, (replayed.num_new.long() - 1).unsqueeze(1))[:, 0]
        for name, expected, found in (
            ("num_computed", computed, after.num_computed),
            ("last_token", last, after.last_token),
        ):
            off = (expected[1:] != found[1:]).nonzero()[:, 0]
            if off.numel():
                row = int(off[0]) + 1
                detail = f"row {row} holds {int(found[row])} instead of {int(expected[row])}"
                places = [place for place, owner in enumerate(batch.rows) if owner == row]
                return evidence.finding(FindingKind.ROWS, name, detail, places, batch.num_reqs)
        return None

    def _is_alike(self, evidence: Evidence, twin: _Twin) -> bool:
        replayed = evidence.replayed
        assert replayed is not None and evidence.after is not None
        if replayed.token_ids is not None and not torch.equal(replayed.token_ids, _cut(twin.token_ids, replayed)):
            return False
        if replayed.logits is not None and self._difference(evidence, twin.logits, replayed.logits) is not None:
            return False
        return self._kv_difference(twin.state, evidence.after) is None

    def _cause(self, evidence: Evidence, twin: _Twin) -> Finding | None:
        """Run the closure beside eager and name the first place where two of the three differ."""
        assert evidence.states is not None and evidence.before is not None
        assert evidence.after is not None and evidence.replayed is not None
        states, before = evidence.states, evidence.before
        probe = LayerProbe(self._model, self._dtype(), counting_tokens(evidence.batch), evidence.batch.num_tokens)
        states.put(before)
        with probe.recording():
            twin = self._run_eagerly(evidence)
        states.put(before)
        with probe.comparing():
            logits = self._call_closure(evidence, is_picking=False).logits
        assert logits is not None
        called = states.take()
        if probe.found is not None:
            return _of_rows(evidence, FindingKind.LAYER, probe.found.layer, probe.found.difference)
        difference = self._difference(evidence, twin.logits, logits)
        if difference is not None:
            return _of_rows(evidence, FindingKind.LAYER, "logits", difference)
        kv = self._kv_difference(twin.state, called)
        if kv is not None:
            return _of_rows(evidence, FindingKind.LAYER, f"KV pages of layer {kv[0]}", kv[1])
        return self._recording_fault(evidence, called, logits)

    def _recording_fault(self, evidence: Evidence, called: StepState, logits: Tensor) -> Finding | None:
        """The closure gives what eager gives; does the recording give what its closure gives?"""
        assert evidence.states is not None and evidence.before is not None
        assert evidence.after is not None and evidence.replayed is not None
        kv, replayed = self._kv_difference(called, evidence.after), evidence.replayed
        if kv is not None:
            return _of_rows(evidence, FindingKind.RECORDING, f"KV pages of layer {kv[0]}", kv[1])
        if replayed.logits is not None:
            difference = self._difference(evidence, logits[: replayed.logits.shape[0]], replayed.logits)
            return None if difference is None else _of_rows(evidence, FindingKind.RECORDING, "logits", difference)
        assert replayed.token_ids is not None
        count, views = replayed.token_ids.shape[0], evidence.loaded.batch
        picked = self._pick(logits, views, evidence.loaded.key.variant)[0][:count]
        if torch.equal(picked, replayed.token_ids):
            return None  # the two shapes round a tie differently: both tokens are right
        is_greedy = evidence.loaded.key.variant is ForwardVariant.GREEDY
        if is_greedy and are_ties(logits, picked, replayed.token_ids, self._dtype()):
            return None  # a kernel that finds the largest while it multiplies rounds it in its own way
        evidence.states.put(evidence.before)
        token_ids = self._call_closure(evidence, is_picking=True).token_ids
        assert token_ids is not None
        is_recorded_right = torch.equal(token_ids[:count], replayed.token_ids)
        kind = FindingKind.SAMPLING if is_recorded_right else FindingKind.RECORDING
        off = (picked != replayed.token_ids).view(count, -1).any(dim=1).nonzero()[:, 0].tolist()
        detail = f"{replayed.token_ids[off[0]].tolist()} instead of {picked[off[0]].tolist()} in row {off[0]}"
        return evidence.finding(kind, "token_ids", detail, off, count)

    def _call_closure(self, evidence: Evidence, *, is_picking: bool) -> ModelOutput:
        """What was recorded, called: on the same static views, after the same poisoning."""
        runner, loaded = evidence.runner, evidence.loaded
        assert isinstance(runner, BaseGraphRunner)
        self.poison_padding(runner, loaded)
        variant = loaded.key.variant
        if variant in _PICKED_IN_GRAPH and not is_picking:
            variant = ForwardVariant.LOGITS
        output = runner.forward_over(loaded.batch, variant)
        if variant is not ForwardVariant.HIDDEN:
            return output
        assert output.hidden_states is not None
        rows = loaded.batch.logits_indices[: loaded.num_reqs]
        return self._context.tail(output.hidden_states.index_select(0, rows))

    def _wrong_input(self, evidence: Evidence, exact: ForwardBatch) -> Finding | None:
        """The first static tensor whose real part is not the eager run's."""
        batch, padded = evidence.batch, evidence.loaded.batch
        for name in (*_REQUEST_INPUTS, *_TOKEN_INPUTS):
            count = batch.num_reqs if name in _REQUEST_INPUTS else batch.num_tokens
            expected, found = getattr(exact, name)[:count], getattr(padded, name)[:count]
            counting = set(counting_tokens(batch)) if count == batch.num_tokens else set(range(count))
            off = [place for place in (expected != found).nonzero()[:, 0].tolist() if place in counting]
            if off:
                detail = f"entry {off[0]} holds {int(found[off[0]])} instead of {int(expected[off[0]])}"
                return evidence.finding(FindingKind.STATIC_BUFFER, name, detail, off, count)
        return None

    def _kv_difference(self, right: StepState, other: StepState) -> tuple[int, Difference] | None:
        for index, (layer, pair, its) in enumerate(zip(self._context.kv_layers, right.kv, other.kv, strict=True)):
            dtype = layer.k.dtype
            for a, b in zip(pair, its, strict=True):
                difference = row_difference(a.view(dtype).float(), b.view(dtype).float(), self._coarser(dtype))
                if difference is not None:
                    return index, difference
        return None

    def _difference(self, evidence: Evidence, right: Tensor, other: Tensor) -> Difference | None:
        batch = evidence.batch
        rows = counting_tokens(batch) if batch.mode is ForwardMode.VERIFY else None
        return row_difference(right, other, self._dtype(), rows)

    def _dtype(self) -> torch.dtype:
        options = getattr(self._model, "options", None)
        return torch.float32 if options is None else options.dtype

    def _coarser(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype.itemsize == 1 else self._dtype()


def _cut(token_ids: Tensor | None, replayed: ModelOutput) -> Tensor:
    assert token_ids is not None and replayed.token_ids is not None
    return token_ids[: replayed.token_ids.shape[0]].to(replayed.token_ids.dtype)


def _of_rows(evidence: Evidence, kind: FindingKind, where: str, difference: Difference) -> Finding:
    return evidence.finding(kind, where, str(difference), difference.rows, difference.num_rows)
