"""Packed weights and an fp8 cache through the whole engine: the same tokens in any batch and by any recording."""

import json

import pytest
from engine_driver import VOCAB_SIZE, generate, greedy, prompts_of

from graphrunner import LLM
from graphrunner.config.engine_config import KVCacheDtype
from graphrunner.core.errors import ConfigError

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": VOCAB_SIZE, "max_position_embeddings": 128, "eos_token_id": None, "bos_token_id": 1,
}  # fmt: skip
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


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "recording"), *(pytest.param("cuda", name, marks=pytest.mark.cuda) for name in ("full", "breakable"))],
)
@pytest.mark.parametrize("setting", [*SETTINGS, "int4"])
def test_replays_agree_with_eager_under_poison(tmp_path, setting: str, device: str, backend: str) -> None:
    """Every step of every kind twice, everything unreadable poisoned: at, below and above the captured sizes."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    options = SETTINGS.get(setting, {"quantization": setting})
    llm = LLM(
        str(tmp_path), load_format="dummy", skip_tokenizer_init=True, device=device, num_threads=1, num_pages=200,
        max_model_len=128, max_num_seqs=6, dtype="bfloat16" if device == "cuda" else "auto", check_graphs=True,
        decode_graph=backend, prefill_graph=backend, decode_sizes=[1, 2, 5], prefill_sizes=[16, 48], **options,
    )  # fmt: skip
    with llm:
        for lengths in ([3], [15], [16], [17, 2], [9, 17, 5], [4] * 5, [6] * 6):
            generate(llm, prompts_of(lengths), greedy(4))
        assert llm.graph_report().num_checked_steps > 15


@pytest.mark.parametrize("setting", ["int8", "fp8_block", "fp8 both"])
def test_the_same_tokens_after_sleep_and_reload(make_llm, setting: str) -> None:
    llm = make_llm(**SETTINGS[setting], decode_graph="recording")
    prompts = prompts_of([9, 5])
    before = generate(llm, prompts, greedy(4))
    for level in (1, 2):
        llm.sleep(level)
        llm.wake()
        assert generate(llm, prompts, greedy(4)) == before
    llm.reload_weights()
    assert generate(llm, prompts, greedy(4)) == before


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
