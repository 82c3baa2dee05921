"""The kernels of a start: all of them are known before one runs, and other processes compile them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import draft_making
import pytest
import torch

from graphrunner.kernels.triton import compile_ahead
from graphrunner.kernels.triton.compile_ahead import KernelCompiler, start_kernel_compiler

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
OFFLINE = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a card compiles for itself")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def run(code: list[str], **environment: str) -> str:
    """What a process that compiles, and does not interpret, prints."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, *code], env=inherited | {"PYTHONPATH": str(ROOT)} | environment, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


@OFFLINE
def test_a_rehearsal_names_all_that_recordings_launch(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    told = json.loads(run([str(HERE / "rehearsal.py"), str(tmp_path), "48", "256"]))
    assert set(told["rehearsed"]) >= set(told["captured"])
    kernels = Counter(json.loads(order)["name"].rpartition(".")[2] for order in told["captured"])
    assert kernels["decode_attention_kernel"] and kernels["skinny_linear_kernel"]
    # What only counts requests compiles once, whatever their number.
    assert kernels["_gather_kernel"] == kernels["_advance_kernel"] == 1


def sizes(hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, **more: object) -> dict[str, object]:
    return CONFIG | {
        "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, **more,
    }  # fmt: skip


ODD_SHAPES = [
    pytest.param(sizes(576, 1536, 9, 3, 64, vocab_size=49152), id="as the embedded model"),
    pytest.param(sizes(896, 4864, 14, 2, 64, model_type="qwen2"), id="groups of 7", marks=pytest.mark.slow),
    pytest.param(sizes(960, 2560, 15, 5, 64), id="15 heads", marks=pytest.mark.slow),
    pytest.param(sizes(3072, 8192, 32, 32, 96), id="heads of 96", marks=pytest.mark.slow),
    pytest.param(sizes(200, 600, 5, 1, 40, vocab_size=1001), id="nothing even", marks=pytest.mark.slow),
    pytest.param(
        sizes(2304, 9216, 8, 4, 256, model_type="gemma2", sliding_window=4096, attn_logit_softcapping=50.0),
        id="gemma2", marks=pytest.mark.slow,
    ),
]  # fmt: skip
NAMES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "gemma2": "Gemma2ForCausalLM"}


@OFFLINE
@pytest.mark.parametrize("config", ODD_SHAPES)
def test_every_kernel_of_a_start_compiles(config: dict[str, object], tmp_path) -> None:
    named = config | {"architectures": [NAMES[str(config["model_type"])]]}
    (tmp_path / "config.json").write_text(json.dumps(named))
    told = json.loads(run([str(HERE / "rehearsal.py"), str(tmp_path), "1", "64"]))
    (tmp_path / "orders.json").write_text(json.dumps(told["captured"]))
    failed = run([str(HERE / "compile_orders.py"), str(tmp_path / "orders.json")], TRITON_CACHE_DIR=str(tmp_path))
    assert len(told["captured"]) > 10 and json.loads(failed) == {}


SHIPPED: dict[str, dict[str, object]] = {
    "eagle": {"method": "eagle"},
    "eagle tree": {"method": "eagle", "speculative_eagle_topk": 2},
    "mtp": {"method": "mtp"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
}
MADE: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "draft_model": ("draft_model", lambda folder: write_config(folder, CONFIG | {"num_attention_heads": 2})),
    "frozen_kv": ("frozen_kv_mtp", draft_making.frozen_kv),
    "reduced vocabulary": ("eagle", draft_making.eagle3),
}


def write_config(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@OFFLINE
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("eagle tree", "draft_model", "frozen_kv") else pytest.mark.slow)
        for name in (*SHIPPED, *MADE)
    ],
)
def test_a_rehearsal_names_all_that_drafts_launch(name: str, tmp_path) -> None:
    """Whatever kernels that did not run leave behind, nothing is looked up out of range."""
    target, config = "", SHIPPED.get(name)
    if config is None:
        method, make = MADE[name]
        sizes = CONFIG if method == "draft_model" else draft_making.CONFIG | {"architectures": ["LlamaForCausalLM"]}
        target = str(write_config(tmp_path / "target", sizes))
        config = {"method": method, "num_speculative_tokens": 4, "model": str(make(tmp_path / "draft"))}
    told = json.loads(run([str(HERE / "rehearsal.py"), target, "20", "128", json.dumps(config)]))
    assert len(told["captured"]) > 20 and set(told["rehearsed"]) >= set(told["captured"])


@OFFLINE
@pytest.mark.parametrize(
    "name", ["eagle tree", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eagle", "mtp", "ngram"))]
)
def test_drafts_launch_kernels_that_compile(name: str, tmp_path) -> None:
    plain, told = (
        json.loads(run([str(HERE / "rehearsal.py"), "", "1", "64", json.dumps(config)]))["captured"]
        for config in (None, SHIPPED[name])
    )
    (tmp_path / "orders.json").write_text(json.dumps(sorted(set(told) - set(plain))))
    failed = run([str(HERE / "compile_orders.py"), str(tmp_path / "orders.json")], TRITON_CACHE_DIR=str(tmp_path))
    assert len(told) > 10 and json.loads(failed) == {}


@OFFLINE
def test_other_processes_fill_the_cache(tmp_path) -> None:
    """And find there what they compiled, under names that do not depend on what a process hashed before."""
    first, second = (
        json.loads(run([str(HERE / "compile_elsewhere.py"), order], TRITON_CACHE_DIR=str(tmp_path)))
        for order in ("forwards", "backwards")
    )
    assert first == {"ordered": 3, "found": 3, "was_touched": False}
    assert second == {"ordered": 0, "found": 3, "was_touched": False}


FORKS = """
import os, signal, sys, time
from graphrunner.kernels.triton.compile_server import run_forked
def note(name): open(os.path.join(sys.argv[1], name), "w").close()
def broken(): raise RuntimeError("no")
def killed(): os.kill(os.getpid(), signal.SIGKILL)
def slow(): note(str(os.getpid())); time.sleep(1)
run_forked([broken, killed, lambda: sys.exit(3), lambda: note("done")], 2)
start = time.monotonic()
run_forked([slow] * 4, 4)
print(time.monotonic() - start < 3, len(os.listdir(sys.argv[1])))
"""


def test_a_worker_that_breaks_hurts_nobody(tmp_path) -> None:
    assert run(["-c", FORKS, str(tmp_path)]).split() == ["True", "5"]


ORPHAN = """
import os, sys, time
from graphrunner.kernels.triton.compile_server import run_forked
if os.fork():
    time.sleep(0.5)
    os._exit(0)
def task(): open(os.path.join(sys.argv[1], str(time.monotonic())), "w").close(); time.sleep(0.2)
sys.stdout.close()
run_forked([task] * 100, 1)
open(os.path.join(sys.argv[1], "end"), "w").close()
"""


def test_a_server_without_a_parent_starts_nothing_more(tmp_path) -> None:
    run(["-c", ORPHAN, str(tmp_path)])
    until = time.monotonic() + 20
    while not (tmp_path / "end").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert (tmp_path / "end").exists()
    assert len(list(tmp_path.iterdir())) < 20


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        ("raise SystemExit(1)", "ended with 1"),
        ("import sys; sys.stdin.read(10); sys.exit(3)", "ended with 3"),
        ("import sys; sys.stdin.close(); import time; time.sleep(60)", "timed out"),
    ],
    ids=["dies", "stops reading", "never ends"],
)
def test_a_server_that_fails_is_left_alone(server: str, problem: str, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(compile_ahead, "_LONGEST_WAIT_S", 1.0)
    monkeypatch.setattr(compile_ahead.log, "warning", lambda text, *words: said.append(text % words))
    compiler = KernelCompiler(2, python(server))
    with compiler.rehearsal():
        compiler._orders.update(dict.fromkeys("x" * 1000 + str(number) for number in range(1000)))
    assert compiler._process.returncode is not None
    assert len(said) == 1 and problem in said[0]
    compiler.close()


def test_an_error_in_a_rehearsal_comes_out_and_close_ends_all(tmp_path) -> None:
    """The server's workers too."""
    note = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    compiler = KernelCompiler(2, python(f"import os, time; os.fork() or {note}; time.sleep(60)"))
    with pytest.raises(KeyboardInterrupt), compiler.rehearsal():
        raise KeyboardInterrupt
    until = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    worker = int((tmp_path / "pid").read_text())
    compiler.close()
    until = time.monotonic() + 5
    while time.monotonic() < until and is_running(worker):
        time.sleep(0.05)
    assert not is_running(worker)


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_one_core_compiles_for_itself(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert start_kernel_compiler() is None


def test_a_process_that_cannot_be_started_is_no_error(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(compile_ahead, "server_command", lambda num_workers: ["/no/such/program"])
    assert start_kernel_compiler() is None


def test_our_server_ends_when_there_is_nothing_to_do() -> None:
    compiler = KernelCompiler(2)
    with compiler.rehearsal():
        pass
    assert compiler._process.returncode in (0, -signal.SIGKILL)
