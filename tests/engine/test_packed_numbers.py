"""Packed weights and an fp8 cache through the whole engine: the same tokens in any batch and by any recording."""

import pytest
from engine_driver import generate, greedy, prompts_of

from graphrunner.config.engine_config import KVCacheDtype
from graphrunner.core.errors import ConfigError

# 48 inputs have no int4 groups; int4 meets the engine in tests/engine/test_embedded.py.
SETTINGS = {
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "fp8_block": {"quantization": "fp8_block"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "fp8 both": {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_same_tokens_however_it_runs(make_llm, setting: str) -> None:
    options = SETTINGS[setting]
    prompts = prompts_of([9, 17, 5])
    alone = make_llm(**options, enforce_eager=True, enable_prefix_caching=False, max_num_seqs=1)
    expected = [generate(alone, [prompt], greedy(6))[0] for prompt in prompts]
    for decode_graph in ("off", "recording"):
        llm = make_llm(**options, decode_graph=decode_graph, decode_sizes=[2, 4], max_num_batched_tokens=12)
        assert generate(llm, prompts, greedy(6)) == expected
        assert generate(llm, prompts, greedy(6)) == expected  # the prefix cache's pages, read back


def test_an_fp8_cache_takes_a_quarter_of_float32(make_llm) -> None:
    wide, packed = (
        make_llm(kv_cache_dtype=dtype, num_pages=None, cpu_kv_cache_mib=1, max_num_seqs=64) for dtype in ("auto", "fp8")
    )
    pages = [llm.engine.core.scheduler.stats().num_free_pages for llm in (wide, packed)]
    assert pages[1] >= 3.9 * pages[0]


def test_a_compiled_forward_reads_an_fp8_cache(make_llm) -> None:
    prompts = prompts_of([9, 17])
    expected = generate(make_llm(kv_cache_dtype="fp8", enforce_eager=True), prompts, greedy(4))
    llm = make_llm(kv_cache_dtype="fp8", decode_graph="inductor", prefill_graph="off", decode_sizes=[2])
    assert generate(llm, prompts, greedy(4)) == expected


def test_settings_that_cannot_be(make_llm) -> None:
    known = ", ".join(item.value for item in KVCacheDtype)
    with pytest.raises(ConfigError, match=f"kv_cache_dtype='fp4': must be one of {known}"):
        make_llm(kv_cache_dtype="fp4")
    with pytest.raises(ConfigError, match="quantization='int3': must be one of none, int8, int4, fp8, fp8_block"):
        make_llm(quantization="int3")
    with pytest.raises(ConfigError, match="quantization='int4': a projection of 48 inputs is not a multiple of any"):
        make_llm(quantization="int4")
