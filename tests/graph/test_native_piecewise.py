"""Native models cut at attention and compiled in between: traced whole, right in every step, refused with a reason."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from tiny_models import NATIVE, TinyModel, save_tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode

from graphrunner import LLM, SamplingParams
from graphrunner.attention.backend import AttentionBackend, AttentionSpec, GraphSupport
from graphrunner.config.quantization import Quantization
from graphrunner.core.errors import CaptureError
from graphrunner.core.forward_batch import ForwardBatch, KVLayer
from graphrunner.core.outputs import ModelOutput
from graphrunner.core.shape_key import ForwardMode, ForwardVariant
from graphrunner.execution import artifact_cache
from graphrunner.execution.split import Break, Piece, SplitForward, split_forward
from graphrunner.kernels import reference, traced_ops
from graphrunner.kernels.packed_weight import Weight, dense_weight, dequantize
from graphrunner.kernels.tracing import is_tracing, tracing
from graphrunner.layers import ops
from graphrunner.layers.linear import PackedLinear
from graphrunner.models.causal_lm import CausalLM
from graphrunner.models.options import ModelOptions
from graphrunner.models.registry import ModelImpl, load_model
from graphrunner.runner.base_graph_runner import BaseGraphRunner
from graphrunner.weights.quantize import quantize
from graphrunner.weights.source import load_model_config, resolve_source

CUDA = torch.device("cuda")
# Every packing has a group that divides these widths.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 4}
MODELS = NATIVE | {"qwen3-wide": TinyModel("qwen3", WIDE)}
SIZES = {"decode_sizes": [2, 4], "prefill_sizes": [16, 32]}
EAGER = {"decode_graph": "off", "prefill_graph": "off"}
PIECEWISE = {"decode_graph": "piecewise", "prefill_graph": "piecewise"}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function: name of a tiny model -> its folder."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        save_tiny_model(MODELS[name], folder)
        return folder

    return make


@pytest.fixture
def make_llm(folder_of: Callable[[str], Path]) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(name: str, **options: object) -> LLM:
        base = {
            "max_model_len": 96, "max_num_seqs": 4, "num_pages": 200, "max_num_batched_tokens": 32,
            "skip_tokenizer_init": True, "model_impl": "native", "enable_prefix_caching": False,
        }  # fmt: skip
        made.append(LLM(str(folder_of(name)), **(base | options)))
        return made[-1]

    make.folder_of = folder_of  # type: ignore[attr-defined]
    yield make
    for llm in made:
        llm.close()


def generate(llm: LLM, temperature: float = 0.0) -> list[list[int]]:
    """Three prompts, one of which is longer than a step, so that its chunks run beside the others' decode rows."""
    rng = random.Random(2)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 90) for _ in range(length)]} for length in (9, 21, 43)]
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=8, ignore_eos=True, detokenize=False)
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


def check_all_replayed(llm: LLM) -> None:
    """Every step ran as pieces, whatever it was."""
    assert not llm.graph_report().failed
    modes = {step.mode.value for step in llm.steps}
    assert modes >= {"prefill", "decode", "mixed"} and all(step.is_graph for step in llm.steps)


def num_compiled(llm: LLM) -> int:
    runner = llm.engine.core.model_runner
    runners = (runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner)
    backends = [each.backend for each in runners if isinstance(each, BaseGraphRunner)]
    return sum(backend.cache.num_compiled for backend in backends)


class ShapeOnlyAttention(AttentionBackend):
    """Results of the right shape, for tensors that have no memory."""

    name = "shape only"
    graph_support = GraphSupport.ALWAYS

    def forward(self, spec: AttentionSpec, qkv: torch.Tensor, kv: KVLayer, batch: ForwardBatch) -> torch.Tensor:
        return qkv.new_empty(qkv.shape[0], spec.num_q_heads * spec.head_dim)


def fake_weight(weight: Weight) -> Weight:
    data, scale, zero = (None if one is None else torch.empty_like(one, device=CUDA) for one in
                         (weight.data, weight.scale, weight.zero))  # fmt: skip
    assert data is not None
    return Weight(weight.layout, data, scale, zero, weight.group_size, weight.row_block)


def move_to_fake_gpu(model: CausalLM) -> None:
    """Give every weight a place on a GPU that need not exist. Call it in a FakeTensorMode."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            place = torch.empty_like(parameter, device=CUDA)
            setattr(module, name, torch.nn.Parameter(place, requires_grad=False))
        if isinstance(module, PackedLinear):
            module.packed = fake_weight(module.packed)
    is_tied = model.head.packed.is_dense and model.head.proj is None
    tied = model.embed_tokens.weight
    model.head.packed = dense_weight(tied.data) if is_tied and tied is not None else fake_weight(model.head.packed)


def split_on_gpu(model: CausalLM) -> SplitForward:
    """A mixed step of 8 tokens and 4 requests, traced as on a GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        move_to_fake_gpu(model)

        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=CUDA)

        batch = ForwardBatch(
            mode=ForwardMode.MIXED, input_ids=numbers(8, dtype=torch.int32), positions=numbers(8),
            slot_mapping=numbers(8), request_rows=numbers(4), seq_lens=numbers(4), query_start_loc=numbers(5),
            page_table=numbers(5, 8), logits_indices=numbers(4),
            kv_layers=(KVLayer(numbers(1), numbers(1)),) * model.config.num_layers,
            attention=ShapeOnlyAttention(), attention_metadata=None, num_tokens=8, num_reqs=4, max_query_len=8,
            max_seq_len=64,
        )  # fmt: skip

        @torch.inference_mode()
        def forward() -> ModelOutput:
            return ModelOutput(logits=model.logits(model(batch)))

        return split_forward(forward)


@pytest.mark.parametrize("packing", [Quantization.NONE, Quantization.INT8], ids=lambda p: p.value)
@pytest.mark.parametrize("name", ["llama-tied-bias", "qwen3", "gemma2", "gemma3"])
def test_a_gpu_sees_whole_pieces_of_plain_operators(name: str, packing: Quantization, folder_of) -> None:
    source = resolve_source(str(folder_of(name)))
    options = ModelOptions(dtype=torch.bfloat16, quantization=packing)
    model = load_model(source, load_model_config(source), options, impl=ModelImpl.NATIVE)
    split = split_on_gpu(model)
    num_layers = model.config.num_layers
    assert [type(step) for step in split.steps] == [Piece, *[Break, Piece] * num_layers]
    called = [str(node.target) for node in split.traced.module.graph.nodes if node.op == "call_function"]
    products = [each for each in called if each.startswith(("aten.mm", "aten.addmm", "graphrunner.packed_linear"))]
    assert len(products) == 4 * num_layers + 1, "qkv, o, gate and up, down of each layer, and the head"
    assert {each.split(".")[0] for each in called} <= {"aten", "graphrunner", "<built-in function getitem>"}
    assert ("graphrunner.packed_linear.default" in called) == (packing is not Quantization.NONE)
    # What stands between two layers is one program.
    assert len({step.module.code for step in split.steps[2:-1] if isinstance(step, Piece)}) == 1


def check_formulas(make_llm, monkeypatch: pytest.MonkeyPatch, name: str, **options: object) -> None:
    """The CPU compiles what a GPU would be given; a second start compiles nothing."""
    expected = generate(make_llm(name, **(options | EAGER)))
    monkeypatch.setattr(ops, "_is_compiled", lambda x: is_tracing())
    llm = make_llm(name, **(PIECEWISE | options))
    assert generate(llm) == expected
    assert not llm.graph_report().failed
    assert all(step.is_graph for step in llm.steps if step.mode.value == "decode")
    assert num_compiled(llm) > 0
    again = make_llm(name, **(PIECEWISE | options))
    assert num_compiled(again) == 0
    assert generate(again) == expected


def test_formulas_of_the_gpu_in_decode_steps(make_llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact_cache, "cache_dir", lambda: tmp_path)
    check_formulas(make_llm, monkeypatch, "qwen3", prefill_graph="off", decode_sizes=[4])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "quantization"), [("qwen3", None), ("gemma2", None), ("llama", "int8")])
def test_formulas_of_the_gpu_end_to_end(
    name: str, quantization: str | None, make_llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_cache, "cache_dir", lambda: tmp_path)
    check_formulas(make_llm, monkeypatch, name, quantization=quantization, **SIZES)


@pytest.mark.parametrize("layout", [Quantization.INT8, Quantization.INT4, Quantization.FP8, Quantization.FP8_BLOCK],
                         ids=lambda each: each.value)  # fmt: skip
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_formulas_of_packed_weights(layout: Quantization, activation: str) -> None:
    generator = torch.Generator().manual_seed(4)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / 8

    weight, x, norm, bias = quantize(numbers(256, 128), layout), numbers(3, 128) * 8, numbers(128).exp(), numbers(256)
    wide, residual = dequantize(weight), numbers(3, 256)
    near = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    near(traced_ops.norm_linear(x, norm, 1e-6, weight, bias), reference.norm_linear(x, norm, 1e-6, wide, bias))
    near(
        traced_ops.norm_gate_up(x, norm, 1e-6, weight, activation),
        reference.norm_gate_up(x, norm, 1e-6, wide, activation),
    )
    near(traced_ops.linear_residual(x, weight, bias, residual), reference.linear_residual(x, wide, bias, residual))


def test_a_kernel_met_in_a_trace_names_itself(device: torch.device) -> None:
    norms = pytest.importorskip("graphrunner.kernels.triton.norms")
    x, weight = torch.ones(2, 16, device=device), torch.ones(16, device=device)
    with tracing(), pytest.raises(CaptureError, match=r"kernel .*norm.* cannot be traced"):
        norms.rms_norm(x, weight, 1e-6)
    with tracing(), tracing(False):
        assert torch.allclose(norms.rms_norm(x, weight, 1e-6), x, atol=1e-5)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for what the tests on a GPU compile."""
    return tmp_path_factory.mktemp("artifacts")


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama-tied-bias", "qwen3", "gemma2"])
def test_same_tokens_on_a_gpu(name: str, make_llm, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact_cache, "cache_dir", lambda: kept)
    options = {"device": "cuda", "dtype": "float32"}
    expected = generate(make_llm(name, **EAGER, **options))
    llm = make_llm(name, **PIECEWISE, **SIZES, **options)
    assert num_compiled(llm) > 0
    assert generate(llm) == expected
    check_all_replayed(llm)
    llm.sleep()
    llm.wake()
    assert generate(llm) == expected
    again = make_llm(name, **PIECEWISE, **SIZES, **options)
    assert num_compiled(again) == 0
    assert generate(again) == expected


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("bfloat16", None), ("float16", None), ("bfloat16", "int8"), ("bfloat16", "int4"), ("bfloat16", "fp8")],
)
def test_each_step_is_close_to_eager_on_a_gpu(
    dtype: str, quantization: str | None, make_llm, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph check runs every step both ways and raises where a row is further off than its dtype explains."""
    monkeypatch.setattr(artifact_cache, "cache_dir", lambda: kept)
    llm = make_llm(
        "qwen3-wide", **(PIECEWISE | SIZES), device="cuda", dtype=dtype, quantization=quantization, check_graphs=True
    )
    generate(llm)
    check_all_replayed(llm)
    assert llm.graph_report().num_checked_steps > 0


@pytest.mark.cuda
@pytest.mark.parametrize("phase", ["decode_graph", "prefill_graph"])
def test_one_phase_alone_on_a_gpu(phase: str, make_llm, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is recorded whole, into the same pool."""
    monkeypatch.setattr(artifact_cache, "cache_dir", lambda: kept)
    options = {"device": "cuda", "dtype": "float32"}
    expected = generate(make_llm("qwen3", **EAGER, **options))
    llm = make_llm("qwen3", **{phase: "piecewise"}, **SIZES, **options)
    assert generate(llm) == expected
    check_all_replayed(llm)


@pytest.mark.cuda
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_on_a_gpu(temperature: float, make_llm, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify steps are pieces; drafts too, unless they are drawn: that kernel refuses, and drafts run eagerly."""
    monkeypatch.setattr(artifact_cache, "cache_dir", lambda: kept)
    options = {"device": "cuda", "dtype": "float32", "decode_sizes": [4], "prefill_graph": "off"}
    expected = generate(make_llm("qwen3", decode_graph="off", **options), temperature)
    draft = {"model": str(make_llm.folder_of("qwen3")), "method": "draft_model", "num_speculative_tokens": 2}
    llm = make_llm("qwen3", decode_graph="piecewise", speculative_config=draft | {"adaptive": False}, **options)
    assert generate(llm, temperature) == expected
    verify = [step for step in llm.steps if step.mode.value == "verify"]
    assert verify and all(step.is_graph for step in verify)
    assert all(key.variant is ForwardVariant.SAMPLE for _, key, _ in llm.graph_report().failed)
