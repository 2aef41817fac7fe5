"""Compiled flex_attention with a score_mod: tiles in torch's compiled kernel, which CPU runs here in plain ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module

from cp_styles import flex_attention
from cp_styles.functions import flex as engine
from cp_styles.kernels import CompiledFlexKernel, flex, flex_compiled
from cp_styles.kernels.base import TilePositions
from cp_styles.kernels.merge import EMPTY_LSE
from cp_styles.layouts import contiguous
from tests.oracle import randn
from tests.ranks import flex_case as case
from tests.ranks.compiling import RANKS, cannot_compile_on_threads, run_ranks
from tests.ranks.flex.test_flex_compiled import Model, behind, check
from tests.ranks.flex_case import FlexProblem

pytestmark = cannot_compile_on_threads

LENGTH = 96
LAYOUT = contiguous(LENGTH, RANKS)  # few shapes of tiles, of which each is compiled


@pytest.fixture(autouse=True)
def _afresh():
    torch.compiler.reset()
    yield
    flex_compiled._compile_variant.cache_clear()


def compile_with(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_compiled, "_compile", partial(torch.compile, fullgraph=True, backend=backend))
    flex_compiled._compile_variant.cache_clear()


def _in_plain_ops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of keys of the logits that will be made in plain ops."""
    keys: list[int] = []
    logits = flex._Tile.logits

    def noted(tile: Any, rows: slice) -> torch.Tensor:
        keys.append(tile.k.shape[2])
        return logits(tile, rows)

    monkeypatch.setattr(flex._Tile, "logits", noted)
    return keys


@pytest.mark.parametrize(
    ("mask", "score"),
    [
        pytest.param(case.causal, case.biased_softcap, marks=pytest.mark.nightly),
        pytest.param(case.sinks_and_window, case.own_mask, marks=pytest.mark.nightly),
        pytest.param(case.of_documents((31, 65)), case.learned_softcap, marks=pytest.mark.nightly),
    ],
    ids=["biased", "own mask", "learned"],
)
def test_the_backward_of_other_devices(mask: Callable[..., torch.Tensor], score: Callable[..., Any], monkeypatch):
    """torch's own gradients of tiles, with its backward in plain ops, which it has for CPU too and refuses to run."""
    tiles = []
    gradients = flex_compiled.tile_gradients
    # The cap is a scalar, for whose gradient torch's kernel is not used: that one has no backward to trace.
    compile_with("eager" if score is case.learned_softcap else "aot_eager", monkeypatch)
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)  # which refuses a backward on CPU
    monkeypatch.setattr(engine, "compiled_takes", lambda *tensors: True)
    monkeypatch.setattr(flex_compiled, "tile_gradients", lambda *args: tiles.append(args) or gradients(*args))
    learned = {
        case.biased_softcap: (randn(20, 4, 2 * LENGTH), randn(22, 4) * 0.1),
        case.learned_softcap: (randn(21) ** 2 + 1, randn(22, 4) * 0.1),
    }.get(score, ())
    whole = FlexProblem(mask, score, learned, length=LENGTH)

    def on(rank: int):
        model = behind("module", Model(torch.compile(flex_attention)), LAYOUT)
        check(whole, partial(model, return_lse=True), LAYOUT, rank)

    run_ranks(on, RANKS)
    assert bool(tiles) == (score is not case.learned_softcap)


def sloped(score, b, h, q, kv):
    return score - SLOPES[h] * (q - kv).abs()


SLOPES = torch.tensor([0.5, -0.25, 0.125, 1.0, 2.0, 0.1])
TILE = {"q_L": torch.arange(40, 71, 2), "kv_M": torch.arange(5, 21), "head": 2}
BIASES = {
    "none": None,
    "one for all": randn(30, 16, 16).masked_fill(randn(31, 16, 16) > 0.3, float("-inf")),
    "of the keys": randn(30, 1, 16),
    "a head": randn(30, 4, 16, 16).masked_fill(randn(31, 4, 16, 1) > 0.3, float("-inf")),
    "a row of the batch": randn(30, 2, 1, 16, 16).masked_fill(randn(31, 2, 1, 16, 16) > 0.9, float("-inf")),
}


def a_tile(mod: Callable[..., Any], causal: bool = False, bias: torch.Tensor | None = None) -> bool:
    """Whether the compiled kernel finds what the plain one does; queries that see nothing have EMPTY_LSE in both."""
    q, k, v = randn(0, 2, 4, 16, 8).float(), randn(1, 2, 2, 16, 8).float(), randn(2, 2, 2, 16, 5).float()
    options: dict[str, Any] = {"causal": causal, "bias": None if bias is None else bias.float(), "scale": 0.3}
    plain, fused = (
        kernel.forward(q, k, v, **options, where=TilePositions(**TILE))
        for kernel in (flex.FlexKernel(mod), CompiledFlexKernel(mod))
    )
    dead = plain[1] == EMPTY_LSE
    assert torch.equal(fused[1] == EMPTY_LSE, dead)
    assert not fused[0][dead].any()
    # Float32 rounds logits that are scores of up to 10 and positions; a wrong place of one of them is not 1e-4.
    return all(torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4) for mine, theirs in zip(fused, plain, strict=True))


@pytest.mark.nightly  # by day on a stand-in of the kernel: test_flex_on_cuda.py
@pytest.mark.parametrize("bias", BIASES)
def test_a_tile_in_its_place(bias: str, monkeypatch):
    """Positions, heads and masks of a tile; traced only, so that it is quick."""
    compile_with("eager", monkeypatch)
    seen = _in_plain_ops(monkeypatch)
    assert a_tile(sloped, bias=BIASES[bias])
    assert a_tile(sloped, causal=True)
    assert seen.count(16) == 2  # the plain kernel's own


def test_one_shape_more_than_torch_compiles(monkeypatch):
    compile_with("eager", monkeypatch)
    with torch._dynamo.config.patch(recompile_limit=1):
        assert a_tile(sloped)
        seen = _in_plain_ops(monkeypatch)
        kernel = CompiledFlexKernel(sloped)
        q = randn(3, 1, 2, 12, 8).float()
        where = TilePositions(torch.arange(12), torch.arange(12), 0)
        out, _ = kernel.forward(q, q, q, causal=False, bias=None, scale=1.0, where=where)
        assert 12 in seen
        wanted, _ = flex.FlexKernel(sloped).forward(q, q, q, causal=False, bias=None, scale=1.0, where=where)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("dtype", "device", "dim", "takes"),
    [
        (torch.float64, "cuda", 64, False),
        (torch.float32, "cpu", 64, False),
        (torch.float32, "meta", 64, False),
        (torch.bfloat16, "cuda", 16, True),
        (torch.bfloat16, "cuda", 8, False),
    ],
)
def test_what_the_compiled_kernel_takes(dtype: torch.dtype, device: str, dim: int, takes: bool):
    like = SimpleNamespace(dtype=dtype, device=torch.device(device), shape=(1, 2, 3, dim))
    assert flex_compiled.compiled_takes(like, like) == takes  # pyright: ignore[reportArgumentType]
