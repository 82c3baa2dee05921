"""Time is charged once, whatever overlaps."""

import pytest
from kernel_profile import by_kernel, kernel_name


def test_overlapping_kernels_share_the_time_and_gaps_are_nobodys() -> None:
    events = [(0, 1000, "a"), (800, 2000, "b"), (900, 1500, "c"), (3000, 4000, "a")]
    step = by_kernel(events, 1)
    assert step["kernels"] == {
        "a": {"us": 2.0, "count": 2.0},
        "b": {"us": 1.0, "count": 1.0},
        "c": {"us": 0.0, "count": 1.0},
    }
    assert step["idle_us"] == 1.0
    assert sum(each["us"] for each in step["kernels"].values()) + step["idle_us"] == 4.0


def test_figures_are_of_one_step() -> None:
    assert by_kernel([(0, 100, "a"), (100, 300, "a")], 2) == {
        "kernels": {"a": {"us": 0.15, "count": 1.0}},
        "idle_us": 0.0,
    }
    assert by_kernel([], 1) == {"kernels": {}, "idle_us": 0.0}


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_skinny_kernel", "_skinny_kernel"),
        ("nvjet_tst_128x64_64x8_2x1_v_bz_TNT", "cuBLAS"),
        ("void cutlass::Kernel2<cutlass_80_wmma>(Params)", "cuBLAS"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::Fill>(int)", "vectorized_elementwise_kernel"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
    ],
)
def test_names(name: str, short: str) -> None:
    assert kernel_name(name) == short
