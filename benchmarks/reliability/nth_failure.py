"""Every part of the server fails once, at its first call, its second, and so on, under a workload of five requests.

python benchmarks/reliability/nth_failure.py [--max-nth 30]
"""

import argparse
import logging
import tempfile
from pathlib import Path

from failing import CAPTURE, PLACES, config_of, failing, start_tried, trial
from serving import save
from tiny_model import write_tiny_model

from graphrunner.core.errors import CaptureError


def captures(folder: Path, max_nth: int) -> tuple[int, list[str]]:
    """Each recorded shape fails once; the engine must start and say what it says otherwise."""
    whole = start_tried(config_of(folder))
    expected, wrong = whole.canary(), []
    whole.stop()
    for nth in range(1, max_nth + 1):
        with failing(*CAPTURE, nth, CaptureError) as injection:
            tried = start_tried(config_of(folder))
        if not injection.has_failed:
            tried.stop()
            return nth - 1, wrong
        if tried.canary() != expected or not tried.is_whole():
            wrong.append(f"capture, call {nth}: another answer, or pages lost")
        tried.stop()
    return max_nth, wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-nth", type=int, default=30)
    given = parser.parse_args()
    logging.getLogger("graphrunner").setLevel(logging.CRITICAL + 1)
    tried_by_place: dict[str, int] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(write_tiny_model(Path(folder)))
        tried = start_tried(config)
        for place in PLACES:
            tried_by_place[place] = 0
            for nth in range(1, given.max_nth + 1):
                if not tried.is_alive():
                    tried.stop()
                    tried = start_tried(config)
                injection, found = trial(tried, place, nth)
                wrong += [f"{place}, call {nth}: {each}" for each in found]
                if not injection.has_failed:
                    break
                tried_by_place[place] = nth
        tried.stop()
        tried_by_place["capture"], wrong_captures = captures(Path(folder), given.max_nth)
        wrong += wrong_captures
    for line in wrong:
        print("WRONG", line)
    save(
        "nth_failure",
        f"tiny random model, core on a thread of the front's process; at most {given.max_nth} calls a part",
        failures_by_part=tried_by_place,
        num_failures=sum(tried_by_place.values()),
        num_wrong=len(wrong),
        holds=not wrong,
    )


if __name__ == "__main__":
    main()
