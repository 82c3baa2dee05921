"""How deep an engine sleeps."""

from enum import Enum


class SleepLevel(Enum):
    """What becomes of the weights; KV pages and graphs are always given back."""

    KEEP = 1  # moved to host memory
    DROP = 2  # forgotten, and read from the checkpoint again
