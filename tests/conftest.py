"""What all tests share: one thread, no network, and a known random state before each test."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():  # kernels run in Triton's interpreter: to be said before anything imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _known_random_state():
    torch.manual_seed(0)
