"""Each test compiles afresh."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _afresh():
    torch.compiler.reset()
