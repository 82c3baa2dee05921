"""The model whose text is the training data, and sampling from it: many rows at once, one token a step.

Plain torch, independent of the engine: what is trained must not depend on what will serve it.

Letters: B rows, L length, C hidden size, T taps, H query heads, G KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from prompts import Prompt
from torch import Tensor
from torch.nn import functional

from graphrunner.config.model_config import ModelConfig
from graphrunner.layers.rotary import rotary_table
from graphrunner.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from graphrunner.tokenizer.hf_tokenizer import tokenizer_from_hf
from graphrunner.tokenizer.tokenizer import Tokenizer
from graphrunner.weights.checkpoint import Rounding, iterate_weights
from graphrunner.weights.gguf_reader import GGUFFile
from graphrunner.weights.source import load_model_config, resolve_source

SAMPLE_HERE = -1
"""In a row's script: the model chooses tokens until it ends its turn; then the next entry follows."""
_KV_STEP = 64
_MARK = "@@answer@@"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Rows of text with what the target computed on the way. All on the device.

    Attributes:
        tokens: int64 [B, L].
        best: int64 [B, L]; the target's argmax after each token.
        is_chosen: bool [B, L]; whether the model chose the token (False: it was in the script).
        taps: bf16 [B, L, T, C]; the residual stream after the layers `tap_layers`.
        tap_layers: numbers of layers that had run, so the last layer of the model is `num_layers`.
    """

    tokens: Tensor
    best: Tensor
    is_chosen: Tensor
    taps: Tensor
    tap_layers: tuple[int, ...]

    def tap(self, rows: Tensor, layers: Sequence[int]) -> Tensor:
        """bf16 [rows, L, len(layers), C]."""
        places = [self.tap_layers.index(layer) for layer in layers]
        return self.taps[rows][:, :, places]


class Target:
    """A Llama-like model, one token a step over a KV cache of fixed length.

    Args:
        model: GGUF file, checkpoint folder, or None for the embedded model.
        dtype: bfloat16 on a GPU, float32 on a CPU.
    """

    def __init__(self, model: str | None, device: torch.device, dtype: torch.dtype) -> None:
        source = resolve_source(model)
        self.config = load_model_config(source)
        self.device, self.dtype = device, dtype
        stream = iterate_weights(source, self.config, dtype=dtype, device=device, rounding=Rounding.BF16)
        self.weights = {name: tensor.clone() for name, tensor in stream}
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.embedding if self.config.tie_embeddings else self.weights["lm_head.weight"]
        self.norm_weight = self.weights["model.norm.weight"]
        self._path = source.path
        table = rotary_table(
            self.config.rope, self.config.head_dim, self.config.max_position, self.config.max_position, device
        )
        self.cos, self.sin = table.cos, table.sin

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The one that comes with the weights."""
        if self._path.is_file():
            return tokenizer_from_gguf(GGUFFile(self._path).metadata, self._path.name)
        return tokenizer_from_hf(self._path)

    def logits(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """float32 logits of hidden states before the final norm: of every token, or of `token_ids` alone.

        In bfloat16 the best two are often equal, and a draft cannot learn which of them a tie happens to be.
        """
        head = self.head if token_ids is None else self.head[token_ids]
        with torch.autocast(self.device.type, enabled=False):
            return functional.linear(self.normed(hidden.to(self.dtype)).float(), head.float())

    def normed(self, hidden: Tensor) -> Tensor:
        """The model's final norm."""
        return rms_norm(hidden, self.norm_weight, self.config.norm_eps)

    @torch.no_grad()
    def generate(self, scripts: Tensor, temperatures: Tensor, length: int, tap_layers: Sequence[int]) -> Corpus:
        """Fill `length` columns, obeying each row's script.

        Args:
            scripts: int64 [B, S] of token ids and SAMPLE_HERE, whose last column is SAMPLE_HERE.
            temperatures: float [B]; 0 is greedy.
        """
        config, num_rows = self.config, scripts.shape[0]
        shape = (config.num_layers, num_rows, config.num_kv_heads, -(-length // _KV_STEP) * _KV_STEP, config.head_dim)
        keys = torch.zeros(shape, dtype=self.dtype, device=self.device)
        values = torch.zeros_like(keys)
        tokens = torch.zeros(num_rows, length, dtype=torch.int64, device=self.device)
        best, is_chosen = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
        taps = torch.zeros(
            num_rows, length, len(tap_layers), config.hidden_size, dtype=torch.bfloat16, device=self.device
        )
        ends = torch.tensor(config.eos_token_ids, device=self.device)
        place = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        chosen = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        for position in range(length):
            scripted = scripts.gather(1, place.unsqueeze(1)).squeeze(1)
            is_free = scripted == SAMPLE_HERE
            token = torch.where(is_free, chosen, scripted)
            is_over = is_free & torch.isin(token, ends)
            place = (place + (~is_free | is_over)).clamp_max(scripts.shape[1] - 1)
            tokens[:, position], is_chosen[:, position] = token, is_free
            hidden = self._step(token, position, keys, values, taps[:, position], tap_layers)
            logits = self.logits(hidden)
            best[:, position] = logits.argmax(-1)
            chosen = torch.where(temperatures > 0, _sample(logits, temperatures), best[:, position])
        return Corpus(tokens, best, is_chosen, taps, tuple(tap_layers))

    def _step(
        self, token: Tensor, position: int, keys: Tensor, values: Tensor, taps: Tensor, tap_layers: Sequence[int]
    ) -> Tensor:
        hidden = functional.embedding(token, self.embedding)
        for index in range(self.config.num_layers):
            hidden = self._block(index, hidden, position, keys[index], values[index])
            if index + 1 in tap_layers:
                taps[:, tap_layers.index(index + 1)] = hidden
        return hidden

    def _block(self, index: int, hidden: Tensor, position: int, keys: Tensor, values: Tensor) -> Tensor:
        config, weights, prefix = self.config, self.weights, f"model.layers.{index}."
        groups, size, rows = config.num_kv_heads, config.head_dim, hidden.shape[0]
        x = rms_norm(hidden, weights[prefix + "input_layernorm.weight"], config.norm_eps)
        q, k, v = (functional.linear(x, weights[f"{prefix}self_attn.{name}_proj.weight"]) for name in "qkv")
        cos, sin = self.cos[position], self.sin[position]
        keys[:, :, position] = rotate(k.view(rows, groups, size), cos, sin)
        values[:, :, position] = v.view(rows, groups, size)
        reach = (position // _KV_STEP + 1) * _KV_STEP
        q = rotate(q.view(rows, groups, -1, size), cos, sin)
        scores = (q @ keys[:, :, :reach].transpose(-1, -2)).float() / math.sqrt(size)
        scores[..., position + 1 :] = -math.inf
        attended = scores.softmax(-1).to(self.dtype) @ values[:, :, :reach]
        hidden = hidden + functional.linear(attended.reshape(rows, -1), weights[prefix + "self_attn.o_proj.weight"])
        x = rms_norm(hidden, weights[prefix + "post_attention_layernorm.weight"], config.norm_eps)
        gate, up = (functional.linear(x, weights[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return hidden + functional.linear(functional.silu(gate) * up, weights[prefix + "mlp.down_proj.weight"])


def scripts_of(prompts: Sequence[Prompt], tokenizer: Tokenizer, config: ModelConfig, length: int) -> Tensor:
    """int64 [B, S]: each prompt's turns as token ids with SAMPLE_HERE between them."""
    cache: dict[tuple[str, bool], list[int]] = {}
    before, after = _between_turns(tokenizer, config) if any(p.is_chat for p in prompts) else ("", "")
    rows = []
    for prompt in prompts:
        row: list[int] = []
        for index, turn in enumerate(prompt.turns):
            key = (turn, prompt.is_chat and index > 0)
            if key not in cache:
                cache[key] = _turn_ids(turn, prompt.is_chat, index, before, after, tokenizer)
            row += [*cache[key], SAMPLE_HERE]
        rows.append(row[: length - 1] + [SAMPLE_HERE])
    width = max(len(row) for row in rows)
    return torch.tensor([row + [SAMPLE_HERE] * (width - len(row)) for row in rows])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32, in x's dtype."""
    return functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, split halves: x [..., D], cos and sin [..., D / 2] broadcast against its leading dimensions."""
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


def _sample(logits: Tensor, temperatures: Tensor) -> Tensor:
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log_().neg_()
    return (logits.float() / temperatures.clamp_min(1e-3).unsqueeze(1) + noise).argmax(-1)


def _turn_ids(turn: str, is_chat: bool, index: int, before: str, after: str, tokenizer: Tokenizer) -> list[int]:
    if not is_chat:
        return tokenizer.encode(turn)
    if index == 0:
        return tokenizer.apply_chat_template([{"role": "user", "content": turn}])
    return tokenizer.encode(before + turn + after, add_special_tokens=False)


def _between_turns(tokenizer: Tokenizer, config: ModelConfig) -> tuple[str, str]:
    """What the chat template puts between the end of an answer and the next question, and after that question."""
    said = [("user", "a"), ("assistant", _MARK), ("user", _MARK)]
    text = tokenizer.chat_template.render([{"role": role, "content": content} for role, content in said])
    _, between, after = text.split(_MARK)
    for end in config.eos_token_ids:
        between = between.removeprefix(tokenizer.decode([end], skip_special_tokens=False))
    return between, after
