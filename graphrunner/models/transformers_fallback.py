"""Any Hugging Face causal LM, through transformers' own model code with our paged attention plugged in.

Transformers runs the flat token batch as one sequence of length T with explicit positions; wherever it attends, it
calls `paged_attention` below, which finds the pages in the active batch. Nothing of the model is rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import AttentionInterface

from graphrunner.attention.backend import AttentionSpec, GraphSupport
from graphrunner.config.model_config import ModelConfig
from graphrunner.config.quantization import Quantization
from graphrunner.core.active_batch import current_batch
from graphrunner.core.errors import ConfigError, ModelLoadError
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.device.graph import eager_break
from graphrunner.kvcache.pool import KVLayerSpec, KVSpec
from graphrunner.models.options import ModelOptions
from graphrunner.weights.dummy import fill_random_

ATTENTION_NAME = "graphrunner_paged"
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ROPE_WITH_SYNC = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class _Seen:
    """One attention call of the probing forward."""

    layer_index: int
    kv: KVLayerSpec
    value_dim: int
    sliding_window: int | None
    has_sinks: bool


_probed: ContextVar[list[_Seen] | None] = ContextVar("graphrunner_probed_layers", default=None)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Transformers' attention interface over the pages of the active batch.

    Args:
        module: the attention layer; its `layer_idx` says which pages.
        query: float [1, Hq, T, D], already rotated and normalised.
        key, value: float [1, Hk, T, D].

    Returns:
        float [1, T, Hq, D], and no attention weights.
    """
    _, num_q_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    layer_index = int(module.layer_idx)  # type: ignore[arg-type]
    seen = _probed.get()
    if seen is not None:
        layer = KVLayerSpec(num_kv_heads, head_dim)
        seen.append(_Seen(layer_index, layer, value.shape[-1], sliding_window, unused.get("s_aux") is not None))
        return query.new_zeros(1, num_tokens, num_q_heads, value.shape[-1]), None
    spec = AttentionSpec(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        soft_cap=softcap,
    )
    qkv = torch.cat([query[0], key[0], value[0]]).transpose(0, 1).flatten(1)

    def attend(batch: ForwardBatch, qkv: Tensor) -> Tensor:
        return batch.attention.forward(spec, qkv, batch.kv_layers[layer_index], batch)

    out = eager_break(attend, current_batch(), qkv)
    return out.view(1, num_tokens, num_q_heads, head_dim), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class _Relay(nn.Module):
    """Stands where the decoder stands inside the causal LM, and can answer in its place.

    So a head is run exactly as the model's own code runs it (scales, caps, biases), on rows of our choice.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder
        self._answer: Tensor | None = None

    @contextmanager
    def answering(self, hidden: Tensor):
        """Let the decoder's next result be `hidden`, float [1, rows, hidden_size]."""
        self._answer = hidden
        try:
            yield
        finally:
            self._answer = None

    def forward(self, *args: object, **kwargs: object) -> MoeModelOutputWithPast:
        if self._answer is not None:
            return MoeModelOutputWithPast(last_hidden_state=self._answer)
        return self.decoder(*args, **kwargs)


class TransformersCausalLM(nn.Module):
    """A transformers model behind the calls that `CausalLM` has.

    Args:
        model: a causal LM built with `attn_implementation=ATTENTION_NAME`, on its device, in eval mode.
        config: its numbers, for those who read them.
        options: where it runs.

    Raises:
        ModelLoadError: the model attends in a way that pages cannot serve.
    """

    def __init__(self, model: nn.Module, config: ModelConfig, options: ModelOptions) -> None:
        super().__init__()
        self.config = config
        self.options = options
        prefix = str(model.base_model_prefix)
        if not hasattr(model, prefix):
            raise ModelLoadError(f"{config.architecture}: transformers' class has no decoder of its own to run")
        self.relay = _Relay(getattr(model, prefix))
        setattr(model, prefix, self.relay)
        self.causal_lm = model
        self.kv_spec = self._probe()
        self.graph_support = _graph_support(model.config)

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig, options: ModelOptions) -> TransformersCausalLM:
        """Load with transformers' own loader.

        Raises:
            ModelLoadError: transformers cannot, in one line.
        """
        _require_dense(options)
        return cls(_from_pretrained(folder, options).to(options.device).eval(), config, options)

    @classmethod
    def with_random_weights(
        cls, folder: Path, config: ModelConfig, options: ModelOptions, seed: int
    ) -> TransformersCausalLM:
        """Build from config.json alone. Raises as `from_folder`."""
        _require_dense(options)
        try:
            hf_config = AutoConfig.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=options.trust_remote_code
            )
            with torch.device(options.device):
                model = AutoModelForCausalLM.from_config(
                    hf_config,
                    dtype=options.dtype,
                    attn_implementation=ATTENTION_NAME,
                    trust_remote_code=options.trust_remote_code,
                )
        except Exception as error:  # as in from_folder
            raise ModelLoadError(f"{folder}: transformers cannot build it: {_first_line(error)}") from error
        for name, weight in model.named_parameters():
            fill_random_(name, weight.data, seed)
        return cls(model.eval(), config, options)

    @torch.no_grad()
    def reload(self, folder: Path, seed: int | None) -> None:
        """Fill the parameters again, in place: random ones from `seed`, or from the folder. Raises as `from_folder`."""
        if seed is not None:
            for name, weight in self._named_parameters():
                fill_random_(name, weight, seed)
            return
        fresh = _from_pretrained(folder, self.options)
        named = dict(fresh.named_parameters())
        for name, weight in self._named_parameters():
            found = named.get(name)
            if found is None or found.shape != weight.shape:
                raise ModelLoadError(f"{folder}: tensor {name} is missing or has another shape than before")
            weight.copy_(found)

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Under the names they have in the checkpoint, without the relay in between."""
        prefix = str(self.causal_lm.base_model_prefix)
        for name, parameter in self.causal_lm.named_parameters():
            if name.startswith(f"{prefix}.decoder."):
                name = prefix + name.removeprefix(f"{prefix}.decoder")  # noqa: PLW2901
            yield name, parameter.data

    def forward(
        self, batch: ForwardBatch, only_logits_rows: bool = False, taps: dict[int, Tensor] | None = None
    ) -> Tensor:
        """As `CausalLM.forward`, except that transformers applies the final norm here and not in `logits`."""
        # Padding of a verify step may stand past the context, where a learned table of positions has no row.
        positions = batch.positions.clamp(max=self.config.max_position - 1)
        out = self.relay(
            input_ids=batch.input_ids.long().unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            output_hidden_states=bool(taps),
        )
        for index in taps or ():
            taps[index] = out.hidden_states[index + 1][0]  # type: ignore[index]
        hidden = out.last_hidden_state[0]
        return hidden[batch.logits_indices] if only_logits_rows else hidden

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """Model dtype [rows, hidden_size] -> float32 [rows, vocab_size], by the model's own head."""
        ids = torch.zeros(1, hidden_rows.shape[0], dtype=torch.int64, device=hidden_rows.device)
        with self.relay.answering(hidden_rows.unsqueeze(0)):
            return self.causal_lm(input_ids=ids, use_cache=False).logits[0].float()

    def greedy_tokens(self, hidden_rows: Tensor) -> Tensor | None:
        """None: the head is the model's own."""
        return None

    def final_norm(self, hidden_rows: Tensor) -> Tensor:
        """The rows as they are: `forward` applied the norm."""
        return hidden_rows

    @torch.inference_mode()
    def _probe(self) -> KVSpec:
        """Run one token and see what each layer attends with."""
        seen: list[_Seen] = []
        token = _probed.set(seen)
        try:
            ids = torch.zeros(1, 1, dtype=torch.int64, device=self.options.device)
            self.relay(input_ids=ids, position_ids=ids, use_cache=False)
        except Exception as error:  # foreign code
            raise ModelLoadError(f"{self.config.architecture}: a trial forward failed: {_first_line(error)}") from error
        finally:
            _probed.reset(token)
        self._check(seen)
        return KVSpec(tuple(one.kv for one in sorted(seen, key=lambda one: one.layer_index)))

    def _check(self, seen: list[_Seen]) -> None:
        name = self.config.architecture
        if sorted(one.layer_index for one in seen) != list(range(self.config.num_layers)):
            raise ModelLoadError(
                f"{name}: {len(seen)} paged attention calls for {self.config.num_layers} layers; models with "
                "recurrent, shared or unusual attention layers are not supported"
            )
        layer_types = getattr(self.causal_lm.config, "layer_types", None) or []
        for one in seen:
            if one.value_dim != one.kv.head_dim:
                raise ModelLoadError(
                    f"{name}: value heads of {one.value_dim} under key heads of {one.kv.head_dim} are not supported"
                )
            if one.has_sinks:
                raise ModelLoadError(f"{name}: attention sinks are not supported")
            kind = layer_types[one.layer_index] if one.layer_index < len(layer_types) else "full_attention"
            if kind == "chunked_attention" or (kind == "sliding_attention" and one.sliding_window is None):
                raise ModelLoadError(f"{name}: layer {one.layer_index} has a mask ({kind}) that is not supported")


def _from_pretrained(folder: Path, options: ModelOptions) -> nn.Module:
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=options.dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=options.trust_remote_code,
        )
    except Exception as error:  # many kinds; each means that this model cannot be had this way
        raise ModelLoadError(f"{folder}: transformers cannot load it: {_first_line(error)}") from error


def _graph_support(hf_config: object) -> GraphSupport:
    """Experts are picked on the host, and some rope scalings look at the positions: neither can be recorded."""
    has_experts = any(getattr(hf_config, name, None) for name in _EXPERT_COUNTS)
    rope = getattr(hf_config, "rope_parameters", None)
    is_synced = any(f"'{name}'" in repr(rope) for name in _ROPE_WITH_SYNC)
    return GraphSupport.NEVER if has_experts or is_synced else GraphSupport.ALWAYS


def _require_dense(options: ModelOptions) -> None:
    if options.quantization is not Quantization.NONE:
        raise ConfigError("quantization", options.quantization.value, "needs an architecture with a native model")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:200]
