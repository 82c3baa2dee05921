"""benchmarks/quantized.py on a tiny model: every row there, the table last, what cannot be is said at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import quantized
import torch
from packed_products import BATCHES, call_of, meta_weight, products
from shapes import ALL_SHAPES

from graphrunner.config.quantization import Quantization

ROOT = Path(__file__).resolve().parents[2]


def test_rows_and_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/quantized.py", "--device", "cpu", "--json", str(path)]
    command += ["--variants", "bf16,int4,bf16 kv8"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr[-1000:]
    names = {row["name"] for row in json.loads(path.read_text())}
    assert names == {
        f"quantized/tiny/{variant}/batch{batch}" for variant in ("bf16", "int4", "bf16 kv8") for batch in (1, 4)
    }
    header, *lines = ran.stdout.rstrip().splitlines()[-3:]
    assert header.split()[-4:] == ["bf16", "int4", "bf16", "kv8"]
    assert [line.split()[:2] for line in lines] == [["tiny", "batch1"], ["tiny", "batch4"]]
    assert all(line.count("x)") == 3 for line in lines)


def test_unknown_names_and_a_spent_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["quantized.py", "--device", "cpu", "--variants", "int3"])
    with pytest.raises(SystemExit):
        quantized.main()
    assert "unknown: int3" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["quantized.py", "--device", "cpu", "--variants", "bf16", "--limit-s", "0"])
    quantized.main()
    assert "tiny bf16: left out" in capsys.readouterr().out


@pytest.mark.parametrize("packing", [one for one in Quantization if one is not Quantization.NONE])
def test_every_product_can_be_compiled_ahead(packing: Quantization) -> None:
    """Launches are made of shapes alone, on a machine without a card."""
    quantized_linear = pytest.importorskip("graphrunner.kernels.triton.quantized_linear")
    from graphrunner.kernels.triton.quantized_config import PackedKind, select_packed_config

    for batch in BATCHES:
        for product in products(ALL_SHAPES["8B"], packing, batch):
            weight = meta_weight(product)
            assert weight.shape == (product.num_rows, product.width)
            config = select_packed_config(weight, batch, torch.bfloat16, product.mode == "GATED")
            assert config.kind is not PackedKind.WIDEN
            call = call_of(product, weight, torch.device("meta"))
            if config.kind is PackedKind.TILE:
                call = type(call)(call.mode, call.x, None, call.eps, weight, None, call.residual, call.out)
            assert quantized_linear.prepare(call, config, torch.device("cpu"))
