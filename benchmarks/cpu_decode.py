"""Decode speed on the CPU, side by side in one run: same weights, same prompts, same dtype, greedy.

    python benchmarks/cpu_decode.py [--models 24m,smollm2] [--peers] [--rounds 3] [--json FILE]

Each contender lives in a process of its own; the parent asks them in turn, round by round, so that a drift of the
machine's speed hits all alike, and keeps each figure's best round. Prints a table and one JSON line.
"""

import argparse
import importlib.util
import json
import multiprocessing as mp
import tempfile
import time
from pathlib import Path

from shapes import LLAMA_24M

NUM_NEW_TOKENS = 128
PROMPT_LEN = 32
LONG_PROMPT_LEN = 512
BATCHES = (1, 8)


def prompt(length: int, index: int) -> list[int]:
    return [(7919 * (index + 1) + 31 * position) % 30000 + 10 for position in range(length)]


def timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Graphrunner:
    """`LLM.generate`, host included."""

    def __init__(self, folder: str, **options: object) -> None:
        from graphrunner import LLM

        model = None if folder == "smollm2" else folder
        base = {"max_num_seqs": 8, "max_model_len": 1024, "dtype": "float32", "enable_prefix_caching": False,
                "skip_tokenizer_init": True}  # fmt: skip
        self.llm = LLM(model, **(base | options))

    def generate(self, prompts: list[list[int]], num_new: int) -> None:
        from graphrunner import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == num_new for output in outputs)


class GraphrunnerEager(Graphrunner):
    def __init__(self, folder: str) -> None:
        super().__init__(folder, enforce_eager=True)


class GraphrunnerInductor(Graphrunner):
    """Decode steps compiled ahead, one key a batch size; artefacts stay in the cache between runs."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, decode_graph="inductor", decode_sizes=list(BATCHES))


class GraphrunnerInt8(Graphrunner):
    def __init__(self, folder: str) -> None:
        super().__init__(folder, quantization="int8")


class Transformers:
    """`generate` of transformers in fp32, eager."""

    options: dict = {}

    def __init__(self, folder: str) -> None:
        self.model = load_transformers(folder)

    def generate(self, prompts: list[list[int]], num_new: int) -> None:
        import torch

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new,
                min_new_tokens=num_new, pad_token_id=0, **self.options,
            )  # fmt: skip
        assert out.shape[1] == ids.shape[1] + num_new


class TransformersCompiled(Transformers):
    options = {"cache_implementation": "static"}


class CTranslate2(Transformers):
    """ctranslate2's Generator on the same weights, converted on the spot."""

    def __init__(self, folder: str) -> None:
        import ctranslate2
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        model = load_transformers(folder)
        vocabulary = {f"t{index}": index for index in range(model.config.vocab_size)}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
        with tempfile.TemporaryDirectory() as place:
            model.save_pretrained(place)
            # The converter wants a tokenizer for its vocabulary file; any spelling of the ids will do.
            names = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2"}
            PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(place)
            converted = f"{place}/ctranslate2"
            ctranslate2.converters.TransformersConverter(place).convert(converted)
            self.generator = ctranslate2.Generator(
                converted, device="cpu", intra_threads=num_cores(), compute_type="float32"
            )

    def generate(self, prompts: list[list[int]], num_new: int) -> None:
        named = [[f"t{token}" for token in ids] for ids in prompts]
        results = self.generator.generate_batch(
            named, max_length=num_new, min_length=num_new, include_prompt_in_result=False, sampling_topk=1
        )
        assert all(len(result.sequences_ids[0]) == num_new for result in results)


CONTENDERS = {
    "graphrunner graph": Graphrunner,
    "graphrunner inductor": GraphrunnerInductor,
    "graphrunner eager": GraphrunnerEager,
    "graphrunner int8": GraphrunnerInt8,
    "transformers eager": Transformers,
    "transformers static + compile": TransformersCompiled,
}
PEERS = {"ctranslate2": ("ctranslate2", CTranslate2)}


def num_cores() -> int:
    import psutil

    return psutil.cpu_count(logical=False) or 1


def load_transformers(folder: str):
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(num_cores())
    if folder != "smollm2":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    from graphrunner.weights.checkpoint import iterate_weights
    from graphrunner.weights.source import load_model_config, resolve_source

    source = resolve_source(None)
    weights = iterate_weights(source, load_model_config(source), dtype=torch.float32)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192, rope_theta=100000.0, tie_word_embeddings=True,
        rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().float()
    missing = model.load_state_dict(dict(weights), strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys
    model.tie_weights()
    return model


def serve(pipe, contender: type, folder: str) -> None:
    """Child process: load, then answer (batch, prompt_len, num_new) with seconds."""
    try:
        load_s = time.perf_counter()
        subject = contender(folder)
        pipe.send(("ready", time.perf_counter() - load_s))
        while (job := pipe.recv()) is not None:
            batch, prompt_len, num_new = job
            prompts = [prompt(prompt_len, index) for index in range(batch)]
            pipe.send(("ok", timed(lambda p=prompts, n=num_new: subject.generate(p, n))))
    except Exception as error:  # a contender that cannot run is a row with its reason, not the end of the table
        pipe.send(("failed", f"{type(error).__name__}: {error}"[:200]))


class Child:
    def __init__(self, contender: type, folder: str) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, contender, folder), daemon=True)
        self.process.start()
        self.error: str | None = None
        self.load_s = self._receive()

    def _receive(self) -> float:
        kind, value = self.pipe.recv()
        if kind == "failed":
            self.error = value
            return float("nan")
        return value

    def ask(self, batch: int, prompt_len: int, num_new: int) -> float:
        if self.error:
            return float("nan")
        self.pipe.send((batch, prompt_len, num_new))
        return self._receive()

    def close(self) -> None:
        if not self.error:
            self.pipe.send(None)
        self.process.join(10)


def measure(folder: str, contenders: dict[str, type], rounds: int) -> dict[str, dict[str, float | str]]:
    """Every contender's figures on one model: tokens/s by batch (prefill excluded) and time to first token."""
    children = {name: Child(contender, folder) for name, contender in contenders.items()}
    rows: dict[str, dict[str, float | str]] = {name: {"load_s": child.load_s} for name, child in children.items()}
    for batch in BATCHES:
        for child in children.values():  # warm up: compile, touch every page
            child.ask(batch, PROMPT_LEN, 8)
        best: dict[str, float] = {}
        for _ in range(rounds):
            for name, child in children.items():
                first_s = min(child.ask(batch, PROMPT_LEN, 1) for _ in range(2))
                decode_s = child.ask(batch, PROMPT_LEN, NUM_NEW_TOKENS) - first_s
                rate = batch * (NUM_NEW_TOKENS - 1) / decode_s
                best[name] = max(rate, best.get(name, 0.0))
        for name, rate in best.items():
            rows[name][f"tokens/s batch {batch}"] = rate
    for name, child in children.items():
        child.ask(1, LONG_PROMPT_LEN, 1)
        rows[name]["ttft ms"] = 1e3 * min(child.ask(1, LONG_PROMPT_LEN, 1) for _ in range(rounds))
        if child.error:
            rows[name] = {"error": child.error}
        child.close()
    return rows


def make_24m(folder: Path) -> str:
    """Random weights from one seed, saved once, read by every contender."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {key: value for key, value in LLAMA_24M.items() if key != "architectures"}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    return str(folder)


def show(title: str, rows: dict[str, dict[str, float | str]]) -> None:
    base = rows.get("transformers eager", {})
    print(f"\n{title}, {num_cores()} cores, best of the rounds\n")
    print("| engine | tokens/s batch 1 | x transformers | tokens/s batch 8 | x transformers | first token of 512, ms |")
    print("|---|---|---|---|---|---|")
    for name, row in rows.items():
        if "error" in row:
            print(f"| {name} | failed: {row['error']} | | | | |")
            continue
        cells = []
        for batch in BATCHES:
            rate = float(row[f"tokens/s batch {batch}"])
            cells += [f"{rate:.1f}", f"{rate / float(base.get(f'tokens/s batch {batch}', rate)):.2f}"]
        print(f"| {name} | {' | '.join(cells)} | {float(row['ttft ms']):.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="24m,smollm2")
    parser.add_argument("--peers", action="store_true", help="also every peer engine that is installed")
    parser.add_argument("--only", help="comma-separated contenders")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    contenders = dict(CONTENDERS)
    if args.peers:
        contenders |= {name: kind for module, (name, kind) in PEERS.items() if importlib.util.find_spec(module)}
    if args.only:
        contenders = {name: contenders[name] for name in args.only.split(",")}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models.split(","):
            where = "smollm2" if model == "smollm2" else make_24m(Path(folder) / "24m")
            results[model] = measure(where, contenders, args.rounds)
            show({"24m": "24M random Llama, fp32", "smollm2": "SmolLM2-135M, fp32"}[model], results[model])
    print("\n" + json.dumps(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
