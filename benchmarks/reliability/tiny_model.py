"""A model of two small layers with random weights, and a tokenizer whose tokens are bytes: for large counts."""

from pathlib import Path

NUM_BYTES = 256
VOCAB_SIZE = 260
MAX_LEN = 256


def write_tiny_model(folder: Path) -> Path:
    """A Hugging Face folder that `graphrunner serve --model` takes."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_LEN, tie_word_embeddings=False,
        initializer_range=0.5, bos_token_id=257, eos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    printable = [*range(33, 127), *range(161, 173), *range(174, NUM_BYTES)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(NUM_BYTES + i) for i, byte in enumerate(others)}
    fast = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(NUM_BYTES)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<bos>", special=True)])
    whole = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>", bos_token="<bos>")
    whole.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    whole.save_pretrained(folder)
    return folder
