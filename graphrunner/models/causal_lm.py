"""What runners call: a decoder that maps a batch to hidden states, and rows of those to logits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from graphrunner.attention.backend import GraphSupport
from graphrunner.config.model_config import ModelConfig
from graphrunner.core.forward_batch import ForwardBatch
from graphrunner.core.shape_key import ForwardMode
from graphrunner.kernels.packed_weight import Weight
from graphrunner.kvcache.pool import KVLayerSpec, KVSpec
from graphrunner.layers.block import BlockBuilder, rotary_tables
from graphrunner.layers.embedding import Embedding, LMHead
from graphrunner.layers.loading import WeightSlot, fill_slots, prefixed
from graphrunner.layers.norm import RMSNorm
from graphrunner.models.options import ModelOptions, layer_options_of


class DecoderLayer(nn.Module):
    """One block: attention and feed-forward around a residual stream. Architectures differ in `forward`."""

    @abstractmethod
    def forward(self, hidden: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        """Run the block.

        Args:
            hidden: model dtype [T, hidden_size]; may be overwritten.
            rows: int64 [R]; when given, only these rows are continued after attention and returned.

        Returns:
            model dtype [T, hidden_size], or [R, hidden_size].
        """

    @abstractmethod
    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor of the block, named as in the checkpoint after `model.layers.N.`."""


class CausalLM(nn.Module):
    """Embedding, blocks, head. An architecture is a subclass that says what its block is.

    Args:
        config: what the model is.
        options: where and in which numbers it runs.

    Attributes:
        kv_spec: what it keeps for a token.
    """

    norm_offset = 0.0
    """Added to the checkpoint's norm weights."""
    graph_support = GraphSupport.ALWAYS
    """What the model's own code can do inside a graph; its attention backend may allow less."""

    def __init__(self, config: ModelConfig, options: ModelOptions) -> None:
        super().__init__()
        self.config = config
        self.options = options
        self.kv_spec = KVSpec((KVLayerSpec(config.num_kv_heads, config.head_dim),) * config.num_layers)
        layer_options = layer_options_of(options)
        tables = rotary_tables(config, options.num_positions or config.max_position, options.device)
        self.embed_tokens = Embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size, config.embedding_scale, layer_options
        )
        self.layers = nn.ModuleList(
            self.build_layer(BlockBuilder(config, layer_options, tables, index, self.norm_offset))
            for index in range(config.num_layers)
        )
        norm = RMSNorm("model.norm", config.hidden_size, config.norm_eps, options.device, self.norm_offset)
        tied = self.embed_tokens if config.tie_embeddings else None
        self.head = LMHead(
            norm,
            config.vocab_size,
            config.hidden_size,
            embedding=tied,
            soft_cap=config.final_soft_cap,
            options=layer_options,
        )

    @abstractmethod
    def build_layer(self, block: BlockBuilder) -> DecoderLayer:
        """The block at `block.index`."""

    def forward(
        self, batch: ForwardBatch, only_logits_rows: bool = False, taps: dict[int, Tensor] | None = None
    ) -> Tensor:
        """Run every block.

        Args:
            batch: the step; its KV is written.
            only_logits_rows: continue only the rows of `batch.logits_indices` after the last attention.
            taps: filled with copies of the outputs of the layers that are its keys, model dtype [T, hidden_size].

        Returns:
            model dtype [T, hidden_size] before the final norm; [R, hidden_size] when only_logits_rows.

        In graph: yes, as far as the attention backend is. Sync: none.
        """
        # In decode, token i belongs to request i, and of a verify step all rows are wanted: gathering would copy the
        # rows onto themselves.
        is_gathered = only_logits_rows and batch.mode not in (ForwardMode.DECODE, ForwardMode.VERIFY)
        hidden = self.embed_tokens(batch.input_ids)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, batch, batch.logits_indices if is_gathered and index == last else None)
            if taps is not None and index in taps:
                taps[index] = hidden.clone()  # the next layer may overwrite it
        return hidden

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """Final norm, head and soft cap: model dtype [rows, hidden_size] -> float32 [rows, vocab_size]."""
        return self.head(hidden_rows)

    def greedy_tokens(self, hidden_rows: Tensor) -> Tensor | None:
        """The likeliest tokens, int32 [rows], where a kernel finds them without float32 logits, else None."""
        return self.head.greedy_tokens(hidden_rows)

    def final_norm(self, hidden_rows: Tensor) -> Tensor:
        """What the head sees: model dtype [rows, hidden_size] -> the same."""
        return self.head.normed(hidden_rows)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor the checkpoint must have."""
        yield from self.embed_tokens.weight_slots()
        for index, layer in enumerate(self.layers):
            yield from prefixed(f"model.layers.{index}.", layer)
        yield from self.head.weight_slots()

    def load_weights(self, weights: Iterable[tuple[str, Tensor | Weight]]) -> None:
        """Fill the model from (Hugging Face name, tensor) in any order; may be called again to replace the weights.

        Raises:
            ModelLoadError: a tensor is missing, unknown, doubled or misshapen; the message names it.

        Aliasing: tensors are copied. After the first call, addresses stay, so captured graphs stay valid.
        """
        fill_slots(self.weight_slots(), weights)
        self.head.finish_load()
