"""What is trained: an EAGLE-3 draft and multi-token-prediction heads, unrolled as they will run.

Both predict, from the target's hidden states at token s and the tokens after it, token s + 2 (step 0), s + 3 (step 1)
and so on. In step j a row is the chain that starts at token s ("anchor" s): it reads token s + 1 + j, and its rotary
position is s + j. Parameter names are those of public checkpoints.
Source: Li et al., EAGLE-3, 2025; DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 2.2.

Letters: B rows, L length, C hidden size, T taps, W draft vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from target import Target, rms_norm, rotate
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of one draft layer."""

    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention whose later steps also see their own chain: step j reads the keys of step 0 up to its anchor,
    and one key of each step from 1 to j, at its own anchor."""

    def __init__(self, shape: Shape, num_inputs: int) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(num_inputs, shape.num_q_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(num_inputs, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(num_inputs, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_q_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x: [B, L, num_inputs]; `chain` holds keys and values of the steps before, and gets this step's."""
        batch, length, size = *x.shape[:2], self.shape.head_dim
        q, k, v = (
            proj(x).view(batch, length, -1, size).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeats = self.shape.num_q_heads // self.shape.num_kv_heads
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        chain.append((k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)))
        base_k, base_v = chain[0]
        if len(chain) == 1:
            out = functional.scaled_dot_product_attention(q, base_k, base_v, is_causal=True)
        else:
            out = _attend_chain(q, base_k, base_v, chain[1:])
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Feedforward(nn.Module):
    """Gated SiLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Draft(nn.Module):
    """Something that can be unrolled.

    Args:
        target: whose embeddings and rotary tables are used; frozen.
        draft_ids: int64 [W], rising; the target's id of each draft id.
    """

    tap_layers: tuple[int, ...]
    num_steps: int

    def __init__(self, target: Target, draft_ids: Tensor) -> None:
        super().__init__()
        self._target = (target,)  # in a tuple, so that its tensors are not parameters of this module
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    @property
    def target(self) -> Target:
        """The frozen model."""
        return self._target[0]

    @abstractmethod
    def forward(self, tokens: Tensor, taps: Tensor) -> list[Tensor]:
        """Hidden states of each step before the draft's head: `num_steps` of [B, L, C].

        Args:
            tokens: int64 [B, L]; taps: [B, L, T, C] of `tap_layers`.
        """

    @abstractmethod
    def draft_logits(self, hidden: Tensor, step: int) -> Tensor:
        """[..., C] -> [..., W]."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """What is shipped, under public names."""

    def embedded(self, tokens: Tensor, shift: int) -> Tensor:
        """Embeddings of the tokens `shift` places later; zeros past the end."""
        later = functional.pad(tokens[:, shift:], (0, shift))
        return functional.embedding(later, self.target.embedding).float()

    def angles(self, length: int, shift: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions shift, shift + 1, ..."""
        return self.target.cos[shift : shift + length], self.target.sin[shift : shift + length]


class Eagle(Draft):
    """One layer over the fused hidden states of several target layers; later steps are fed its own output."""

    def __init__(
        self, target: Target, shape: Shape, tap_layers: tuple[int, ...], draft_ids: Tensor, num_steps: int
    ) -> None:
        super().__init__(target, draft_ids)
        self.tap_layers, self.num_steps = tap_layers, num_steps
        width, eps = shape.hidden_size, shape.norm_eps
        self.fc = nn.Linear(len(tap_layers) * width, width, bias=False)
        self.input_layernorm, self.hidden_norm = Norm(width, eps), Norm(width, eps)
        self.self_attn = Attention(shape, 2 * width)
        self.post_attention_layernorm = Norm(width, eps)
        self.mlp = Feedforward(shape)
        self.norm = Norm(width, eps)
        self.lm_head = nn.Linear(width, len(draft_ids), bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.head[draft_ids.to(target.head.device)])
            self.norm.weight.copy_(target.norm_weight)

    def forward(self, tokens: Tensor, taps: Tensor) -> list[Tensor]:
        hidden, chain, outputs = self.fc(taps.flatten(2)), [], []
        for step in range(self.num_steps):
            embedded = self.embedded(tokens, 1 + step)
            x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)
            hidden = hidden + self.self_attn(x, *self.angles(tokens.shape[1], step), chain)
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
            outputs.append(hidden)
        return outputs

    def draft_logits(self, hidden: Tensor, step: int) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def state(self) -> dict[str, Tensor]:
        outside = ("fc.", "norm.", "lm_head.")
        named = self.state_dict().items()
        return {name if name.startswith(outside) else f"midlayer.{name}": tensor for name, tensor in named}


class MTPHead(nn.Module):
    """One multi-token-prediction layer: joins a hidden state and the next token's embedding, then one block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.norm_eps
        self.enorm, self.hnorm = Norm(width, eps), Norm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm = Norm(width, eps)
        self.self_attn = Attention(shape, width)
        self.post_attention_layernorm = Norm(width, eps)
        self.mlp = Feedforward(shape)
        self.final_norm = Norm(width, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, [])
        return x + self.mlp(self.post_attention_layernorm(x))


class MTP(Draft):
    """Heads in a row: head i reads the output of head i - 1 (head 0: the target's normed last hidden state).

    The head over the vocabulary is the target's own, cut to the draft vocabulary, and stays frozen.
    """

    def __init__(self, target: Target, shape: Shape, draft_ids: Tensor, num_heads: int) -> None:
        super().__init__(target, draft_ids)
        self.tap_layers, self.num_steps = (target.config.num_layers,), num_heads
        self.heads = nn.ModuleList(MTPHead(shape) for _ in range(num_heads))
        self.register_buffer("frozen_head", target.head[draft_ids.to(target.head.device)].float(), persistent=False)
        with torch.no_grad():
            for head in self.heads:
                head.final_norm.weight.copy_(target.norm_weight)

    def forward(self, tokens: Tensor, taps: Tensor) -> list[Tensor]:
        hidden, outputs = self.target.normed(taps[:, :, 0].float()), []
        for step, head in enumerate(self.heads):
            hidden = head(self.embedded(tokens, 1 + step), hidden, *self.angles(tokens.shape[1], 0))
            outputs.append(hidden)
        return outputs

    def draft_logits(self, hidden: Tensor, step: int) -> Tensor:
        return functional.linear(self.heads[step].final_norm(hidden), self.frozen_head)

    def state(self) -> dict[str, Tensor]:
        first = self.target.config.num_layers
        renamed = {}
        for name, tensor in self.state_dict().items():
            _, index, rest = name.split(".", 2)
            rest = rest.replace("final_norm", "shared_head.norm")
            renamed[f"model.layers.{first + int(index)}.{rest}"] = tensor
        return renamed


def _attend_chain(q: Tensor, base_k: Tensor, base_v: Tensor, links: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[B, H, L, D]: step 0's keys up to each anchor, and the anchor's own key of each later step."""
    length, scale = q.shape[2], 1 / math.sqrt(q.shape[-1])
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    base = (q @ base_k.transpose(-1, -2) * scale).masked_fill(mask, -math.inf)
    own = torch.stack([(q * k).sum(-1) * scale for k, _ in links], -1)
    weights = torch.cat((base, own), -1).float().softmax(-1).to(q.dtype)
    out = weights[..., :length] @ base_v
    for index, (_, v) in enumerate(links):
        out = out + weights[..., length + index, None] * v
    return out
