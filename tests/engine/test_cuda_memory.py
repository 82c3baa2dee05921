"""The memory of a real card: the share kept, given back, restored; estimates beside what came of them."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from engine_driver import generate, greedy, pool_check, prompts_of

from graphrunner import LLM, SamplingParams
from graphrunner.core.startup_report import StartupPhase
from graphrunner.device.registry import device_of
from graphrunner.execution.full_cuda_graph import FullCudaGraphBackend

pytestmark = pytest.mark.cuda
MIB = 1 << 20
ROOM = 3072 * MIB
SLACK = 64 * MIB  # what the driver itself takes and gives in the background

Make = Callable[..., LLM]


def used_bytes() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    return device_of(torch.device("cuda")).used_bytes()


@pytest.fixture
def share() -> Iterator[float]:
    """A share of the card that leaves `ROOM` beside what is in use."""
    torch.zeros(1, device="cuda")
    yield (used_bytes() + ROOM) / device_of(torch.device("cuda")).total_bytes()


def phase_of(llm: LLM, name: str) -> StartupPhase:
    (phase,) = [phase for phase in llm.startup_report().phases if phase.name.startswith(name)]
    return phase


def test_the_driver_has_virtual_memory() -> None:
    assert device_of(torch.device("cuda")).has_virtual_memory


def test_utilization_is_used_up_and_never_exceeded(make_llm: Make, solo, share: float) -> None:
    llm = make_llm(
        device="cuda", num_pages=None, max_num_seqs=8000, gpu_memory_utilization=share, max_num_batched_tokens=4096
    )
    report = llm.startup_report()
    limit = report.limit_bytes
    assert limit - 512 * MIB < used_bytes() <= limit
    device, most = device_of(torch.device("cuda")), 0
    prompts = prompts_of([20 + index % 60 for index in range(300)])
    params = [greedy(20) if index % 2 else greedy(20, logprobs=3) for index in range(300)]
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        llm.engine.add_request(str(index), {"prompt_token_ids": prompt}, each)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
        most = max(most, device.used_bytes())
    assert most <= limit, f"{(most - limit) / MIB:.0f} MiB above the share"
    assert generate(llm, prompts[:2], greedy(9)) == [solo(prompt, 9) for prompt in prompts[:2]]
    pool_check(llm)


def test_the_last_page_is_there(make_llm: Make) -> None:
    """And all are zero but page 0, the dummy page: recording runs write there, as padding does."""
    llm = make_llm(device="cuda", num_pages=3000)
    for layer in llm.engine.core.model_runner.decode_cuda_graph_runner.context.kv_layers:
        for cache in (layer.k, layer.v):
            assert cache.shape[0] == 3000 and not cache[1:].any()
            cache[-1].fill_(1)
            assert cache[-1].float().sum().item() == cache[-1].numel()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_the_card_back(make_llm: Make, level: int) -> None:
    before = used_bytes()
    llm = make_llm(device="cuda", num_pages=60_000, max_num_seqs=2000, decode_sizes=[1, 2, 4, 8], prefill_sizes=[64])
    prompts = prompts_of([5, 16, 33])
    random = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True, detokenize=False)
    expected = [generate(llm, prompts, params) for params in (greedy(12), random)]
    awake = used_bytes()
    assert awake - before > 400 * MIB
    llm.sleep(level)
    asleep = used_bytes()
    assert asleep - before < (awake - before) // 4 + SLACK
    llm.wake()
    assert abs(used_bytes() - awake) < SLACK
    again = [generate(llm, prompts, params) for params in (greedy(12), random)]
    assert again == expected
    assert sum(key.num_replays for key in llm.graph_report().keys) > 0
    pool_check(llm)


def test_weights_reloaded_in_place_are_read_by_recorded_graphs(make_llm: Make) -> None:
    llm = make_llm(device="cuda", decode_sizes=[1, 2, 4], prefill_sizes=[64])
    prompts = prompts_of([5, 16, 33])
    expected = generate(llm, prompts, greedy(8))
    model = llm.engine.token_engine._residency._memory
    addresses = [block.storage.data_ptr() for block in model._blocks.values()]
    for block in model._blocks.values():
        if block.is_loaded:
            block.bytes().zero_()
    llm.reload_weights()
    assert addresses == [block.storage.data_ptr() for block in model._blocks.values()]
    assert generate(llm, prompts, greedy(8)) == expected


def test_a_size_that_fails_is_served_eagerly(make_llm: Make, solo, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FullCudaGraphBackend.capture_one

    def capture_one(self, key, forward, reset=None):
        def reads_back():
            output = forward()
            tensor = output.token_ids if output.token_ids is not None else output.logits
            tensor.sum().item()  # not while recording
            return output

        return real(self, key, reads_back if key.num_reqs == key.num_tokens == 2 else forward, reset)

    monkeypatch.setattr(FullCudaGraphBackend, "capture_one", capture_one)
    llm = make_llm(device="cuda", prefill_graph="off", decode_sizes=[1, 2, 4])
    assert {key.num_reqs for _, key, _ in llm.graph_report().failed} == {2}
    prompts = prompts_of([5, 7, 9, 4])
    for count in (1, 2, 4):
        assert generate(llm, prompts[:count], greedy(6)) == [solo(prompt, 6) for prompt in prompts[:count]]
    pool_check(llm)


def test_estimates_come_true(make_llm: Make, share: float) -> None:
    llm = make_llm(device="cuda", num_pages=None, gpu_memory_utilization=share, max_num_seqs=64)
    for phase in llm.startup_report().phases:
        if phase.estimated_bytes is not None:
            real, estimate = phase.num_bytes, phase.estimated_bytes
            print(f"{phase.name}: estimated {estimate / MIB:.0f} MiB, real {real / MIB:.0f} MiB")
            assert abs(real - estimate) <= max(256 * MIB, 0.1 * estimate), phase


def test_half_the_sizes_take_about_half_the_time(make_llm: Make) -> None:
    sizes = list(range(8, 129, 8))
    common = {"device": "cuda", "prefill_graph": "off", "max_num_seqs": 128}
    make_llm(**common, decode_sizes=sizes)  # kernels are compiled
    whole = phase_of(make_llm(**common, decode_sizes=sizes), "capture").seconds
    half = phase_of(make_llm(**common, decode_sizes=sizes[1::2]), "capture").seconds
    assert 0.3 < half / whole < 0.75


def test_outputs_of_recordings_share_their_memory(make_llm: Make) -> None:
    """Logits of every size would be the sum of the sizes; they are the largest one's."""
    sizes = list(range(16, 513, 16))
    before = used_bytes()
    one = phase_of(make_llm(device="cuda", prefill_graph="off", max_num_seqs=512, decode_sizes=[512]), "capture")
    many = phase_of(make_llm(device="cuda", prefill_graph="off", max_num_seqs=512, decode_sizes=sizes), "capture")
    print(f"{before / MIB:.0f} MiB before; one size {one.num_bytes / MIB:.0f} MiB, 32 {many.num_bytes / MIB:.0f} MiB")
    assert many.num_bytes - one.num_bytes < 3 * 31 * 8 * MIB
