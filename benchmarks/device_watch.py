"""What the card says of itself while something is measured on it: its clock falls once its power reaches the limit."""

import shutil
import statistics
import subprocess
from types import TracebackType

QUERY = "clocks.sm,clocks.max.sm,power.draw,power.limit"
PERIOD_MS = 50


class DeviceWatch:
    """While open, asks nvidia-smi for clock and power of the first card; without that program it knows nothing."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._samples: list[list[float]] = []

    def __enter__(self) -> "DeviceWatch":
        program = shutil.which("nvidia-smi")
        if program is not None:
            command = [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", f"-lms={PERIOD_MS}", "-i=0"]
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        self._process.terminate()
        text, _ = self._process.communicate()
        self._samples = [fields for fields in map(numbers, text.splitlines()) if len(fields) == QUERY.count(",") + 1]

    def line(self) -> str:
        """Medians of clock (MHz) and power (W), each with the most there can be; empty where nothing is known."""
        if not self._samples:
            return ""
        clock, most_clock, power, most_power = (
            statistics.median(values) for values in zip(*self._samples, strict=True)
        )
        return f"clock {clock:.0f} MHz of {most_clock:.0f}, power {power:.0f} W of {most_power:.0f}"


def numbers(line: str) -> list[float]:
    """The fields of a line; none where one is no number ("[N/A]", or the last line is cut)."""
    try:
        return [float(field) for field in line.split(",")]
    except ValueError:
        return []
