"""The least time that a step can take: each operation's bytes or arithmetic, whichever is longer, summed."""

from collections.abc import Iterator, Sequence

from ceilings import Ceilings
from shapes import num_kv_bytes_per_token


def _linear_sizes(config: dict) -> list[int]:
    """Weights of one layer's products: qkv, o, gate and up, down."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    return [hidden * (q + 2 * kv), q * hidden, 2 * hidden * ffn, ffn * hidden]


def forward_floor_s(
    config: dict, ceilings: Ceilings, *, num_tokens: int, num_pairs: int, kv_tokens: int, num_logit_rows: int,
    bytes_per_value: int,
) -> float:  # fmt: skip
    """Seconds of one forward.

    Args:
        num_tokens: query tokens.
        num_pairs: pairs of a query token and a key it looks at, over all requests.
        kv_tokens: tokens whose keys and values are read.
        num_logit_rows: tokens whose logits are computed.
        bytes_per_value: of weights and KV.
    """
    layers = config["num_hidden_layers"]
    products_s = sum(
        ceilings.seconds(bytes_per_value * size, 2 * size * num_tokens) for size in _linear_sizes(config)
    )  # fmt: skip
    attention_flops = 4 * num_pairs * config["num_attention_heads"] * config["head_dim"]
    kv_bytes = kv_tokens * num_kv_bytes_per_token(config, bytes_per_value) / layers
    head = config["vocab_size"] * config["hidden_size"]
    head_s = ceilings.seconds(bytes_per_value * head, 2 * head * num_logit_rows)
    return layers * (products_s + ceilings.seconds(kv_bytes, attention_flops)) + head_s


def decode_floor_s(config: dict, ceilings: Ceilings, num_reqs: int, context_tokens: int, bytes_per_value: int) -> float:
    """One decode step of `num_reqs` requests that hold `context_tokens` tokens together."""
    return forward_floor_s(
        config, ceilings, num_tokens=num_reqs, num_pairs=context_tokens, kv_tokens=context_tokens,
        num_logit_rows=num_reqs, bytes_per_value=bytes_per_value,
    )  # fmt: skip


def prefill_floor_s(config: dict, ceilings: Ceilings, prompt_lens: Sequence[int], bytes_per_value: int) -> float:
    """All prompts in one forward."""
    return forward_floor_s(
        config, ceilings, num_tokens=sum(prompt_lens), num_pairs=sum(n * (n + 1) // 2 for n in prompt_lens),
        kv_tokens=sum(prompt_lens), num_logit_rows=len(prompt_lens), bytes_per_value=bytes_per_value,
    )  # fmt: skip


def whole_floor_s(
    config: dict, ceilings: Ceilings, prompt_lens: Sequence[int], output_lens: Sequence[int], bytes_per_value: int
) -> float:
    """Requests that are all there at the start: their prompts, then one step for each further token of the longest."""
    total_s = prefill_floor_s(config, ceilings, prompt_lens, bytes_per_value)
    for context in decode_contexts(prompt_lens, output_lens):
        total_s += decode_floor_s(config, ceilings, len(context), sum(context), bytes_per_value)
    return total_s


def decode_contexts(prompt_lens: Sequence[int], output_lens: Sequence[int]) -> Iterator[list[int]]:
    """Tokens that each request holds, in one decode step after another, where all prompts come first."""
    for step in range(1, max(output_lens)):
        yield [prompt + step for prompt, output in zip(prompt_lens, output_lens, strict=True) if output > step]
