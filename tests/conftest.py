"""Set before anything imports triton: without a GPU its kernels run under the interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
