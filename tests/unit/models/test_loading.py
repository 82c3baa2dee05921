"""What `load_weights` accepts, and the one line it says when it does not."""

import pytest
import torch

from graphrunner.config.model_config import NATIVE_ARCHITECTURES, ModelConfig
from graphrunner.config.quantization import Quantization
from graphrunner.core.errors import ConfigError, ModelLoadError
from graphrunner.kvcache.pool import KVPool
from graphrunner.models.options import ModelOptions
from graphrunner.models.registry import NATIVE_MODELS, build_model, native_model_class
from graphrunner.weights.dummy import iterate_dummy
from graphrunner.weights.quantize import quantize_int8
from graphrunner.weights.shapes import expected_shapes


def config_of(architecture="LlamaForCausalLM", **numbers) -> ModelConfig:
    defaults = {
        "model_type": "any", "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_layers": 2,
        "num_q_heads": 3, "num_kv_heads": 1, "head_dim": 8, "max_position": 64,
    }  # fmt: skip
    return ModelConfig(architecture=architecture, **(defaults | numbers))


def weights_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    return dict(iterate_dummy(config, torch.float32, torch.device("cpu")))


def test_every_native_architecture_has_a_file():
    assert set(NATIVE_MODELS) == set(NATIVE_ARCHITECTURES)
    assert all(native_model_class(name).__name__ == name for name in NATIVE_MODELS)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("architecture", NATIVE_MODELS)
def test_slots_are_the_checkpoint(architecture, tie):
    """The model asks for exactly the tensors that the readers promise, in the same shapes."""
    config = config_of(architecture, tie_embeddings=tie, attention_bias=True, qk_norm=True, mlp_bias=True)
    slots = build_model(config, ModelOptions()).weight_slots()
    slots = {slot.name: slot.shape for slot in slots if not slot.is_optional}
    assert slots == expected_shapes(config)


def test_order_does_not_matter():
    config = config_of()
    first, second = (build_model(config, ModelOptions()) for _ in range(2))
    first.load_weights(weights_of(config).items())
    second.load_weights(reversed(weights_of(config).items()))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_missing_tensor_is_named():
    weights = weights_of(config_of())
    del weights["model.layers.1.mlp.up_proj.weight"], weights["model.norm.weight"]
    with pytest.raises(
        ModelLoadError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing \(and 1 more\)"
    ):
        build_model(config_of(), ModelOptions()).load_weights(weights.items())


def test_an_unknown_tensor_is_named():
    weights = weights_of(config_of()) | {"model.layers.0.extra.weight": torch.zeros(2)}
    with pytest.raises(ModelLoadError, match=r"tensor model\.layers\.0\.extra\.weight is not part of the architecture"):
        build_model(config_of(), ModelOptions()).load_weights(weights.items())


def test_a_doubled_tensor_is_named():
    weights = [*weights_of(config_of()).items()]
    with pytest.raises(ModelLoadError, match=r"tensor model\.embed_tokens\.weight comes twice"):
        build_model(config_of(), ModelOptions()).load_weights([weights[0], *weights])


def test_a_misshapen_tensor_is_named():
    weights = weights_of(config_of()) | {"model.norm.weight": torch.zeros(5)}
    with pytest.raises(ModelLoadError, match=r"tensor model\.norm\.weight has shape \[5\], expected \[24\]"):
        build_model(config_of(), ModelOptions()).load_weights(weights.items())


@pytest.mark.parametrize("quantization", Quantization)
@pytest.mark.parametrize("tie", [False, True])
def test_a_second_load_keeps_addresses(quantization, tie):
    """Captured graphs hold pointers: new weights must land where the old ones were."""
    config = config_of(tie_embeddings=tie, hidden_size=32, intermediate_size=64, head_dim=32)
    model = build_model(config, ModelOptions(quantization=quantization))
    model.load_weights(weights_of(config).items())
    packed = [module.packed for module in model.modules() if hasattr(module, "packed")]
    before = [weight.data.data_ptr() for weight in packed]
    old = model.head.packed.data.clone()
    model.load_weights(iterate_dummy(config, torch.float32, torch.device("cpu"), seed=9))
    packed = [module.packed for module in model.modules() if hasattr(module, "packed")]
    assert [weight.data.data_ptr() for weight in packed] == before
    assert not torch.equal(model.head.packed.data, old)


def test_nothing_big_is_allocated_before_its_tensor_comes():
    model = build_model(config_of(vocab_size=4096), ModelOptions())
    assert sum(p.numel() for p in model.parameters()) < 500


def test_gemma_norms_are_kept_minus_one():
    config = config_of("Gemma2ForCausalLM", tie_embeddings=True)
    model = build_model(config, ModelOptions())
    weights = weights_of(config)
    model.load_weights(weights.items())
    torch.testing.assert_close(model.head.norm.weight.data, weights["model.norm.weight"] + 1)


@pytest.mark.parametrize("group_size", [0, 8, 7])
def test_int8_rounds_to_half_a_step(group_size):
    dense = torch.randn(6, 24, generator=torch.Generator().manual_seed(0))
    dense[3] = 0.0
    weight = quantize_int8(dense, group_size)
    assert weight.data.dtype == torch.int8 and not weight.is_dense
    scale = weight.scale.view(6, -1, 1)
    restored = (weight.data.float().view(6, scale.shape[1], -1) * scale).view(6, 24)
    step = scale.expand(6, -1, 24 // scale.shape[1]).reshape(6, 24)
    assert ((restored - dense).abs() <= 0.5001 * step).all()
    assert scale.shape[1] == (3 if group_size == 8 else 1)


def test_int4_names_the_projection_width_that_has_no_groups():
    model = build_model(config_of(), ModelOptions(quantization=Quantization.INT4))
    with pytest.raises(ConfigError, match="quantization='int4': a projection of 24 inputs is not a multiple of any of"):
        model.load_weights(weights_of(config_of()).items())


def test_unknown_quantization_is_refused():
    with pytest.raises(ConfigError, match="quantization='int3': must be one of none, int8, int4, fp8, fp8_block"):
        Quantization.from_name("int3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pool_counts_its_bytes_and_poisons(dtype):
    spec = build_model(config_of(), ModelOptions()).kv_spec
    pool = KVPool(spec, num_pages=5, page_size=4, dtype=dtype, device="cpu")
    assert pool.num_bytes == sum(layer.k.nbytes + layer.v.nbytes for layer in pool.layers)
    pool.poison(float("nan"), pages=[0, 3])
    pages = [(layer.k.float(), layer.v.float()) for layer in pool.layers]
    assert all(k[[0, 3]].isnan().all() and v[[1, 2, 4]].eq(0).all() for k, v in pages)
    pool.release()
    pool.reopen()
    assert all(layer.k.eq(0).all() for layer in pool.layers)
