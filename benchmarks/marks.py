"""What is asked of one H200: bf16, random weights, greedy. Names are those of the rows; see docs/performance.md.

The peer is vLLM 0.26.0 on such a machine; offline must be 1.15 times its rate and aims at 1.4 times.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """The value to reach and the value to aim at; None where none is set."""

    must: float | None = None
    aim: float | None = None


DECODE_MS = {
    "0.6B": {1: (0.75, 0.50), 16: (1.55, 1.1), 64: (3.0, 2.5), 256: (8.6, 7.8)},
    "1B": {1: (0.95, 0.70), 16: (1.6, 1.2), 64: (2.4, 2.0), 256: (4.8, 4.2)},
    "8B": {1: (3.95, 3.65), 16: (4.8, 4.3), 64: (6.6, 6.0), 256: (15.0, 13.5)},
}
PEER_DECODE_MS = {
    "0.6B": {1: 1.98, 16: 2.73, 64: 4.06, 256: 9.92},
    "1B": {1: 2.34, 16: 2.56, 64: 3.25, 256: 5.44},
    "8B": {1: 4.93, 16: 5.44, 64: 7.44, 256: 17.3},
}
PEER_FIRST_TOKEN = {"ttft/0.6B": 19.0, "ttft/8B": 27.0, "prefill256/0.6B": 0.59, "prefill256/8B": 5.6}
"""ms of one prompt of 960 tokens; s of 256 of them at once. Ours must be no slower."""
PEER_OFFLINE_TOKENS_PER_S = {"0.6B": 24_400, "1B": 25_100, "8B": 10_000}
NANO_TOKENS_PER_S = {1: 392, 16: 7_000, 64: 20_600, 256: 40_800}
"""nano-vllm, 0.6B, 128 tokens in, 256 out, prefill included."""
SMALL_PROMPT_LENS = (16, 32, 64, 128, 256)
LARGER_PROMPT_LENS = (512, 1024, 2048)


def _marks() -> dict[str, Mark]:
    marks = {
        f"decode/{shape}/batch{batch}": Mark(*limits)
        for shape, batches in DECODE_MS.items()
        for batch, limits in batches.items()
    }
    marks |= {
        f"offline/{shape}": Mark(round(1.15 * rate), round(1.4 * rate))
        for shape, rate in PEER_OFFLINE_TOKENS_PER_S.items()
    }
    marks |= {name: Mark(limit) for name, limit in PEER_FIRST_TOKEN.items()}
    marks |= {f"nano/0.6B/batch{batch}": Mark(rate) for batch, rate in NANO_TOKENS_PER_S.items()}
    marks |= {f"small_prefill/0.6B/{length}": Mark(1.5) for length in SMALL_PROMPT_LENS}
    marks |= {f"small_prefill/8B/{length}": Mark(1.0) for length in SMALL_PROMPT_LENS}
    marks |= {f"small_prefill/{shape}/{length}": Mark(1.0) for shape in ("0.6B", "8B") for length in LARGER_PROMPT_LENS}
    return marks | {
        "host_share/0.6B": Mark(12.0),
        "host_share/8B": Mark(5.0),
        "capture/8B": Mark(4.0),
        "start/warm/8B": Mark(15.0),
        "start/cold/8B": Mark(40.0),
        "start/phase_gap/8B": Mark(5.0),
        "start/memory/8B": Mark(100.0),
    }


MARKS = _marks()


def mark_of(name: str) -> Mark:
    """The mark of a row; empty where nothing is asked."""
    return MARKS.get(name, Mark())
