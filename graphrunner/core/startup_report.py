"""What starting an engine took, phase by phase."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartupPhase:
    """One stretch of the start. Phases follow each other without a gap.

    Attributes:
        name: what was done.
        seconds: wall time.
        num_bytes: memory in use after it, less before: of the whole card on a GPU, of this process on a CPU.
        estimated_bytes: what was expected before it began; None where nothing was.
    """

    name: str
    seconds: float
    num_bytes: int
    estimated_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StartupReport:
    """From the start of the process (for its first engine; else from the call) to ready.

    Attributes:
        phases: in order.
        wall_s: the same time by a clock of its own, to compare the sum with.
        limit_bytes: the share of the card's memory that the engine may fill; None on a CPU.
        used_bytes: of the card at the end, whoever uses it; None on a CPU.
        num_pages: KV pages, the reserved page 0 included.
    """

    phases: tuple[StartupPhase, ...] = ()
    wall_s: float = 0.0
    limit_bytes: int | None = None
    used_bytes: int | None = None
    num_pages: int = 0

    @property
    def total_s(self) -> float:
        """Sum over the phases."""
        return sum(phase.seconds for phase in self.phases)
