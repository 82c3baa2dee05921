"""A scripted engine that also has steps to show: graphs with padding, and an eager one for each prompt."""

from __future__ import annotations

from scripted_engine import FakeEngine

from graphrunner.core.engine_stats import EngineStats
from graphrunner.core.graph_miss import GraphMiss, GraphMissReason
from graphrunner.core.outputs import EngineOutput, StepRecord
from graphrunner.core.shape_key import ForwardMode, ForwardVariant, ShapeKey

NUM_SHOWN_STEPS = 300


class SteppingEngine(FakeEngine):
    """Even steps are decode graphs of four rows with one of padding; every eighth is an eager prefill.

    The step before a prefill has verified drafts.
    """

    max_model_len = 4096

    def __init__(self, script: str = "Hello, world!", *, num_steps: int = 0) -> None:
        super().__init__(script)
        self.records: list[StepRecord] = []
        self.num_out = 0
        for _ in range(num_steps):
            self._record()

    def step(self) -> list[EngineOutput]:
        self._record()
        outputs = super().step()
        self.num_out += sum(len(output.new_token_ids) for output in outputs)
        return outputs

    def stats_since(self, step_id: int) -> EngineStats:
        steps = tuple(record for record in self.records[-NUM_SHOWN_STEPS:] if record.step_id > step_id)
        return EngineStats(
            steps=steps,
            num_running=len(self.live),
            num_waiting=2,
            num_used_pages=30,
            num_pages=120,
            num_preemptions=5,
            num_output_tokens=self.num_out,
        )

    def _record(self) -> None:
        step_id = len(self.records)
        is_graph = step_id % 8 != 0
        variant = ForwardVariant.GREEDY if is_graph else ForwardVariant.LOGITS
        self.records.append(
            StepRecord(
                step_id=step_id,
                mode=ForwardMode.DECODE if is_graph else ForwardMode.PREFILL,
                runner="decode_cuda_graph_runner" if is_graph else "eager",
                key=ShapeKey(4, 4, variant) if is_graph else ShapeKey(7, 1, variant),
                num_reqs=3 if is_graph else 1,
                num_tokens=3 if is_graph else 7,
                is_graph=is_graph,
                miss_reason=None if is_graph else GraphMiss(GraphMissReason.NUM_TOKENS, 7, 4),
                start_s=step_id * 0.01,
                duration_ms=2.0 + step_id % 5,
                num_drafts=6 if step_id % 8 == 7 else 0,
                accepted_lengths=(2, 0, 1) if step_id % 8 == 7 else (),
            )
        )
