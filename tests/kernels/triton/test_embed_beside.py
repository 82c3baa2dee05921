"""What an EAGLE-3 layer reads, in one launch, against the four operations it stands for."""

import pytest
import torch

from graphrunner.kernels import reference
from graphrunner.kernels.triton.norms import Norm, embed_beside


@pytest.mark.parametrize("width", [40, 576])
@pytest.mark.parametrize("has_normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_and_hidden_rows_are_normed(device, width: int, has_normed: bool, dtype: torch.dtype) -> None:
    table, hidden = (torch.randn(7, width, device=device).to(dtype) for _ in range(2))
    ids = torch.tensor([3, -1, 6, 7, 0, 1, 1], dtype=torch.int32, device=device)
    norms = [Norm(torch.rand(width, device=device) + 0.5, eps) for eps in (1e-5, 1e-3)]
    out, normed = embed_beside(ids, table, 1.5, hidden, (norms[0], norms[1]), has_normed=has_normed)
    rows = (table[ids.clamp(min=0).remainder(7).long()].float() * 1.5).to(dtype)
    wanted = [
        reference.rms_norm(x, norm.weight, norm.eps) for x, norm in zip((rows, hidden), norms, strict=True)
    ]  # fmt: skip
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out, torch.cat(wanted, 1), **close)
    assert (normed is not None) == has_normed
    if normed is not None:
        assert normed.equal(out[:, width:])
