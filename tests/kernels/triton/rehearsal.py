"""What a start would compile on an H200, told by a machine without one; for the test beside it, and for counting.

The engine runs on the CPU with the GPU's kernels in its forwards, none of which is run, and its products are skipped.

usage: python rehearsal.py CONFIG_FOLDER MAX_NUM_SEQS TOKEN_BUDGET [SPECULATIVE_CONFIG]
CONFIG_FOLDER "" is the embedded model.
prints one JSON object: "rehearsed", what the rehearsal of a start names, and "captured", what its recordings launch;
each a list of Triton's descriptions of specialised kernels.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from graphrunner import LLM
from graphrunner.attention.triton_attention import TritonAttention
from graphrunner.engine import build_runners, largest_step
from graphrunner.engine.largest_step import rehearse_prompts, run_largest_steps
from graphrunner.engine.model_runner import ModelRunner
from graphrunner.engine.residency import Residency
from graphrunner.kernels.triton import runtime
from graphrunner.kernels.triton.compile_server import OfflineDriver
from graphrunner.layers import ops
from graphrunner.runner import base_draft_runner, decode_cuda_graph_runner, draft_rows, gather_rows

_NEW = {torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default}
_PRODUCTS = {torch.ops.aten.mm.default: (0, 1), torch.ops.aten.addmm.default: (1, 2)}


class SkippedProducts(TorchDispatchMode):
    """Matrix products have a shape and no values; what a kernel would have written is 1: an id, a count, a place."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in _PRODUCTS:
            left, right = (args[place] for place in _PRODUCTS[func])
            return left.new_empty(left.shape[0], right.shape[1])
        if func is torch.ops.aten.addmm_.default:
            return args[0]
        made = func(*args, **(kwargs or {}))
        if func not in _NEW:
            return made
        return made.fill_(torch.finfo(made.dtype).max if made.is_floating_point() else torch.iinfo(made.dtype).max)


class StreamDriver(OfflineDriver):
    """For a launch that is only compiled."""

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def h200() -> Iterator[None]:
    """Inside, an engine on the CPU makes what one on an H200 makes."""
    driver.set_active(StreamDriver(GPUTarget("cuda", 90, 32)))
    values = {
        (runtime, "use_dependent_launch"): lambda device: True,
        (runtime, "num_multiprocessors"): lambda device: 132,
        (runtime, "device_key"): lambda device: "sm90x132",
        (ops, "_on_cpu"): lambda x, weight: False,
        (build_runners, "create_attention"): lambda device, is_batch_invariant=False: TritonAttention(),
        (decode_cuda_graph_runner, "gather_for"): lambda device, is_traced: gather_rows._cuda_gather(),
        (decode_cuda_graph_runner, "advance_for"): lambda device, n, is_traced: gather_rows._cuda_advance(device, n),
        (decode_cuda_graph_runner, "advance_accepted_for"): lambda device, n, width, is_traced: (
            gather_rows._cuda_advance_accepted(device, n, width)
        ),
        (base_draft_runner, "place_step_for"): lambda device, is_traced: draft_rows._cuda_kernels()[0],
        (base_draft_runner, "place_round_for"): lambda device, is_traced: draft_rows._cuda_kernels()[1],
        (base_draft_runner, "store_drafts_for"): lambda device, is_traced: draft_rows._cuda_kernels()[2],
        (Residency, "settle"): lambda self, clock, rehearsal: engines.append((self._model_runner, self._limits)),
    }
    patches = [mock.patch.object(owner, name, value) for (owner, name), value in values.items()]
    for patch in patches:
        patch.start()
    yield
    for patch in patches:
        patch.stop()


engines: list[tuple] = []


@contextmanager
def listening() -> Iterator[set[str]]:
    """Inside, kernels are neither run nor compiled; what would have been is in the set."""
    met: set[str] = set()

    def hook(*, compile, **_told) -> bool:
        met.add(compile["specialization_data"])
        return True

    knobs.runtime.jit_cache_hook = hook
    is_cuda = mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: True), create=True)
    with runtime.compiling_only(), torch.inference_mode(), SkippedProducts(), is_cuda:
        yield met
    knobs.runtime.jit_cache_hook = None


def _take_prompts(model_runner: ModelRunner) -> None:
    """What a draft does with prompts of every recorded size, one of them and many."""
    runner = model_runner.prefill_cuda_graph_runner
    for key in runner.all_keys():
        views = runner.capture_prepare(key)
        output = runner.forward_over(views, key.variant)
        for num_reqs in {1, key.num_reqs}:
            lens = largest_step._spread(key.num_tokens, num_reqs, key.num_tokens)
            model_runner.take_prompts(largest_step._prompts(lens), views, output)


def main(folder: str, max_num_seqs: int, token_budget: int, speculative: str = "null") -> None:
    unread = {"load_format": "dummy", "skip_tokenizer_init": True} if folder else {}
    with h200():
        LLM(
            folder or None, device="cpu", dtype="bfloat16", enable_prefix_caching=False, prefill_graph="recording",
            max_num_seqs=max_num_seqs, max_num_batched_tokens=token_budget, cpu_kv_cache_mib=64, num_threads=1,
            max_model_len=256, speculative_config=json.loads(speculative), **unread,
        )  # fmt: skip
        ((model_runner, limits),) = engines
        with listening() as rehearsed:
            run_largest_steps(model_runner, limits)
            for runner in model_runner.graph_runners:
                runner.rehearse()
            rehearse_prompts(model_runner, limits)
        with listening() as captured:
            run_largest_steps(model_runner, limits)
            for runner in model_runner.graph_runners:
                for key in runner.all_keys():
                    runner.forward_over(runner.capture_prepare(key), key.variant)
            _take_prompts(model_runner)
    print(json.dumps({"rehearsed": sorted(rehearsed), "captured": sorted(captured)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
