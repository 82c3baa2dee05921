"""Shares a step's token budget out between decode rows and prompts. Who comes first is stated in `policy`."""

from collections.abc import Sequence

from graphrunner.scheduler.batch_builder import DecodeColumns, PromptChunk
from graphrunner.scheduler.prompt_planner import PromptPlanner
from graphrunner.scheduler.running_set import RunningSet

_NOBODY = DecodeColumns()


class StepFiller:
    """Decode rows and prompt chunks of each step.

    Args:
        running: its decode rows are ready for one more token.
        planner: chooses the chunks.
        token_budget: most tokens in a step; no fewer than rows.
        most_waited_steps: for how many steps in a row decode rows may wait for prompts; 0 puts them first.
    """

    def __init__(self, running: RunningSet, planner: PromptPlanner, token_budget: int, most_waited_steps: int) -> None:
        self._running = running
        self._planner = planner
        self._token_budget = token_budget
        self._most_waited_steps = most_waited_steps
        self._num_waited_steps = 0
        self._decode = _NOBODY

    def fill(self, step_id: int, oldest_launched_step: int) -> tuple[DecodeColumns, Sequence[PromptChunk]]:
        """The decode rows, all or none of them, and the chunks, counted as launched. See `PromptPlanner.plan`."""
        decode = self._decode_columns()
        num_rows = len(decode.rows)
        chunks: list[PromptChunk] = []
        if self._planner.has_prompts:
            may_wait = self._num_waited_steps < self._most_waited_steps
            num_tokens = self._token_budget if may_wait else self._token_budget - num_rows
            chunks = self._planner.plan(num_tokens, step_id, oldest_launched_step)
        if chunks and num_rows + sum(chunk.length for chunk in chunks) > self._token_budget:
            self._num_waited_steps += 1
            return _NOBODY, chunks
        self._num_waited_steps = 0
        return decode, chunks

    def _decode_columns(self) -> DecodeColumns:
        if self._running.is_decoding_changed:
            self._decode = DecodeColumns.of(self._running.decoding)
            self._running.is_decoding_changed = False
        return self._decode
