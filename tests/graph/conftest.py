import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
torch.set_num_threads(1)

_CUDA = pytest.param(torch.device("cuda"), id="cuda", marks=pytest.mark.cuda)


@pytest.fixture(params=[pytest.param(torch.device("cpu"), id="cpu"), _CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    return request.param
