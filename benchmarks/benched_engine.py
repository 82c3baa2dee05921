"""An engine of random weights under test, with what the measurements share."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ceilings import Ceilings, synchronize
from shapes import ALL_SHAPES
from workload import Workload, prompt

if TYPE_CHECKING:
    from graphrunner import LLM
    from graphrunner.telemetry.step_trace import StepRecord


@dataclass(slots=True)
class BenchedEngine:
    """One engine and its surroundings.

    Attributes:
        shape: a name of `shapes.ALL_SHAPES`.
        step_ms: what decode steps through `LLM.generate` took, by batch size, once measured.
        first_s: until every one of so many prompts of the full length had its first token, once measured.
        last_step_id: of the step before the last call of `seconds`.
    """

    llm: "LLM"
    shape: str
    device: str
    workload: Workload
    ceilings: Ceilings
    step_ms: dict[int, float] = field(default_factory=dict)
    first_s: dict[int, float] = field(default_factory=dict)
    last_step_id: int = -1

    @property
    def config(self) -> dict:
        """The model's config.json."""
        return ALL_SHAPES[self.shape]

    def decode_prompt_len(self, batch: int) -> int:
        """What a decode step comes after: the peer's figure for 1B at batch 1 is of a short prompt."""
        is_short = self.shape == "1B" and batch == 1
        return self.workload.short_prompt_len if is_short else self.workload.prompt_len

    def seconds(self, prompt_lens: Sequence[int], output_lens: Sequence[int]) -> float:
        """Wall time of one `LLM.generate`, host included. Raises when an answer is not as long as asked."""
        from graphrunner import SamplingParams

        vocab_size = self.config["vocab_size"]
        prompts = [prompt(length, index, vocab_size) for index, length in enumerate(prompt_lens)]
        params = [
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in output_lens
        ]
        synchronize(self.device)
        self.last_step_id = self.llm.steps[-1].step_id if self.llm.steps else -1
        start_s = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        duration_s = time.perf_counter() - start_s
        for output, length in zip(outputs, output_lens, strict=True):
            got = len(output.outputs[0].token_ids)
            assert got == length, f"{got} tokens came, {length} were asked for"
        return duration_s

    def batch_seconds(self, batch: int, prompt_len: int, output_len: int) -> float:
        """`seconds` of equal requests."""
        return self.seconds([prompt_len] * batch, [output_len] * batch)

    def charged_steps(self) -> Iterator[tuple["StepRecord", float]]:
        """The steps of the last call of `seconds`, each with the seconds from the end of the one before it."""
        last_end_s = 0.0
        for step in self.llm.steps:
            if step.step_id > self.last_step_id:
                end_s = step.start_s + step.duration_ms / 1e3
                yield step, end_s - max(step.start_s, last_end_s)
                last_end_s = end_s

    def steps_line(self) -> str:
        """The steps of the last call of `seconds` by kind: how many, how long together, and how many had a graph."""
        counts: Counter[str] = Counter()
        graphs: Counter[str] = Counter()
        spent_s: Counter[str] = Counter()
        for step, seconds in self.charged_steps():
            kind = step.mode.value
            counts[kind] += 1
            graphs[kind] += step.is_graph
            spent_s[kind] += seconds
        return ", ".join(
            f"{counts[kind]} {kind} steps in {1e3 * spent_s[kind]:.0f} ms ({graphs[kind]} from graphs)"
            for kind in counts
        )
