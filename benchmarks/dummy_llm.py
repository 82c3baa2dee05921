"""An `LLM` of random weights, as every measurement builds it. Nothing slow is imported before it is built."""

import tempfile
from ast import literal_eval
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shapes import ALL_SHAPES, write_config_folder

if TYPE_CHECKING:
    from graphrunner import LLM

ENGINE_OPTIONS: dict[str, object] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.85,
    "max_model_len": 2304,
    "max_num_seqs": 256,
}
CPU_OPTIONS: dict[str, object] = {"cpu_kv_cache_mib": 64, "max_model_len": 128, "max_num_seqs": 8, "num_threads": 1}


def build_llm(shape: str, device: str, options: dict[str, object]) -> "LLM":
    """An `LLM` of a shape's config alone."""
    from graphrunner import LLM

    of_device = CPU_OPTIONS if device == "cpu" else {}
    with tempfile.TemporaryDirectory() as folder:
        write_config_folder(ALL_SHAPES[shape], Path(folder))
        return LLM(folder, **(ENGINE_OPTIONS | {"device": device} | of_device | options))


def parse_options(given: Sequence[str]) -> dict[str, object]:
    """name=value pairs to engine options; a value that is no Python literal is text."""
    options: dict[str, object] = {}
    for pair in given:
        name, _, text = pair.partition("=")
        try:
            options[name] = literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    return options
