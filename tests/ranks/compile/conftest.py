"""Each test compiles afresh."""

import pytest
import torch

from cp_styles.comm import agreement


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch):
    torch.compiler.reset()
    # Where ranks are threads, the hook of one that fails may be lost with another thread's trace. The rest then wait as
    # long as they have patience.
    monkeypatch.setattr(agreement, "_PATIENCE_SECONDS", 2.0)
