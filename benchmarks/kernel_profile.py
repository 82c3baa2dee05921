"""Where the device's time goes, kernel by kernel, as the device's own profiler saw it."""

import re
from collections import defaultdict
from collections.abc import Callable

import torch
from ceilings import synchronize

LIBRARY_KERNEL = re.compile(r"(void )?(nvjet|cublas|cutlass|sm\d+_xmma|gemm|gemv|splitk)", re.I)


def profile_call(call: Callable[[], object], device: str, num_steps: int = 1) -> dict:
    """Profile one call.

    Kernels chained by dependent launch overlap, so each one is charged from the end of the one before it, or from its
    own start if that is later.

    Args:
        num_steps: that the call does one after the other; figures are of one of them.

    Returns:
        kernels: {name: {"us", "count"}}, most time first.
        idle_us: when none ran, between the first one and the last.
    """
    return by_kernel(device_events(call, device), num_steps)


def device_events(call: Callable[[], object], device: str) -> list[tuple[int, int, str]]:
    """What the device did during one call: (start, end, name) in nanoseconds, ordered by start."""
    is_gpu = device == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if is_gpu else torch.profiler.ProfilerActivity.CPU
    synchronize(device)
    with torch.profiler.profile(activities=[activity], acc_events=True) as profiler:
        call()
        synchronize(device)
    kind = torch.autograd.DeviceType.CUDA if is_gpu else torch.autograd.DeviceType.CPU
    events = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == kind and event.duration_ns() > 0
    ]
    return sorted(events)


def by_kernel(events: list[tuple[int, int, str]], num_steps: int) -> dict:
    """Sum (start, end, name) in nanoseconds, ordered by start, over kernels of one name."""
    spent_ns: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    idle_ns, last_end = 0, events[0][0] if events else 0
    for start, end, name in events:
        idle_ns += max(0, start - last_end)
        kernel = kernel_name(name)
        spent_ns[kernel] += max(0, end - max(start, last_end))
        counts[kernel] += 1
        last_end = max(last_end, end)
    kernels = {
        kernel: {"us": round(spent / 1e3 / num_steps, 2), "count": round(counts[kernel] / num_steps, 2)}
        for kernel, spent in sorted(spent_ns.items(), key=lambda item: -item[1])
    }
    return {"kernels": kernels, "idle_us": round(idle_ns / 1e3 / num_steps, 2)}


def kernel_name(name: str) -> str:
    """A kernel's name without what templates and the vendor's tile sizes add to it."""
    if LIBRARY_KERNEL.match(name):
        return "cuBLAS"
    name = name.removeprefix("void ").split("<")[0].split("(")[0]
    return name.split("::")[-1].strip() or "unnamed"
