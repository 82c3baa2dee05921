"""Where the time of an offline run goes: prompts, and decode steps by batch size, each beside its floor."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benched_engine import BenchedEngine
from floors import decode_contexts, decode_floor_s, prefill_floor_s

BATCH_RANGES = ((193, 256), (129, 192), (65, 128), (17, 64), (1, 16))
PROMPTS = "prompts"


@dataclass(slots=True)
class OfflinePart:
    """Steps of one kind.

    Attributes:
        part: PROMPTS, or "decode, 65 to 128 requests".
        spent_s, floor_s: of all its steps together.
    """

    part: str
    num_steps: int = 0
    spent_s: float = 0.0
    floor_s: float = 0.0


def offline_parts(bench: BenchedEngine, prompt_lens: Sequence[int], output_lens: Sequence[int]) -> list[dict]:
    """Parts of the last call of `bench.seconds`, whose lengths these were; the floor has all prompts come first."""
    parts = {None: OfflinePart(PROMPTS)} | {
        (low, high): OfflinePart(f"decode, {low} to {high} requests") for low, high in BATCH_RANGES
    }

    def part_of(num_reqs: int) -> OfflinePart:
        return next(part for span, part in parts.items() if span is not None and span[0] <= num_reqs <= span[1])

    for step, spent_s in bench.charged_steps():
        part = part_of(step.num_reqs) if step.mode.value == "decode" else parts[None]
        part.num_steps += 1
        part.spent_s += spent_s
    bytes_per_value = bench.workload.bytes_per_value
    parts[None].floor_s = prefill_floor_s(bench.config, bench.ceilings, prompt_lens, bytes_per_value)
    for context in decode_contexts(prompt_lens, output_lens):
        part = part_of(len(context))
        part.floor_s += decode_floor_s(bench.config, bench.ceilings, len(context), sum(context), bytes_per_value)
    return [asdict(part) for part in parts.values() if part.num_steps or part.floor_s]
