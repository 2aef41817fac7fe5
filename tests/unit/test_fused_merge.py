"""The merge in one kernel of Triton, against float64.

Without a GPU Triton's interpreter runs the kernel. It must be switched on before Triton is imported, so one test here
starts a process of its own, in which the others run. Where there is a GPU, they run on it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from cp_styles import Causal, Ring, context_attention, head_tail
from cp_styles.kernels.merge import EMPTY_LSE, FusedMerge, OnlineSoftmax
from cp_styles.kernels.sdpa import CPU_FLASH
from cp_styles.testing import run_ranks
from tests.covering import at_night, sampled
from tests.oracle import attention_inputs, error

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda", None if INTERPRETED else 0)
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason='needs Triton: pip install -e ".[fused]"')
runs = pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED, reason="runs in test_by_the_interpreter")
ROUNDING = 2.0**-24  # of float32, relative
INF = float("inf")


@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
@pytest.mark.parametrize("rows", ["not nightly", *at_night("nightly")])
def test_by_the_interpreter(rows: str):
    command = [sys.executable, "-m", "pytest", "-o", "addopts=-q", "-m", rows, "-p", "no:cacheprovider", __file__]
    found = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]


@pytest.mark.skipif(INTERPRETED, reason="in the other process")
def test_importing_the_package_does_not_import_triton():
    """torch may import Triton itself, where it is installed."""
    command = "import cp_styles.kernels, sys; sys.exit('cp_styles.kernels.fused_merge' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command]).returncode == 0


def weights(lse: torch.Tensor, new_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both weights and the merged logsumexp, in float64. Equal infinities weigh the same."""
    lse, new_lse = lse.double(), new_lse.double()
    difference = torch.where(lse == new_lse, 0.0, new_lse - lse)
    return torch.sigmoid(-difference), torch.sigmoid(difference), torch.logaddexp(lse, new_lse)


def compare(before, after, tile) -> None:
    """``before`` and ``after`` are (out, lse), and ``tile`` what was merged.

    With u for ROUNDING: the difference d of the logsumexps is rounded, which changes the ratio exp(-|d|) by |d| u of
    itself, at most 0.4 u; a GPU's exp has 4 u, its division 4 u, each sum 1 u. So a weight has 10 u at most, the two
    products and their sum 2 u more, and the logsumexp 5 u from the ratio, 2 u from its logarithm and 1 u of itself.
    """
    weight, new_weight, expected_lse = weights(before[1], tile[1])
    out, new_out = before[0].double(), tile[0].double()
    expected = out * weight[..., None] + new_out * new_weight[..., None]
    most = 16 * ROUNDING * (out.abs() + new_out.abs())
    assert bool(((after[0].double() - expected).abs() <= most).all())
    wrong = (after[1].double() - expected_lse).abs() > (expected_lse.abs() + 8) * ROUNDING
    assert not bool((wrong & (after[1].double() != expected_lse)).any())  # infinities have no difference
    assert not bool(after[1].isnan().any())


def in_memory(order: str, *shape: int) -> torch.Tensor:
    """Random numbers [B, H, L, D] with their dims in this order in memory."""
    places = ["BHLD".index(letter) for letter in order]
    x = torch.randn([shape[place] for place in places], device=DEVICE)
    return x.permute([places.index(dim) for dim in range(4)])


@runs
@sampled(
    2,
    orders=[("BHLD", "BLHD"), ("BLHD", "BHLD"), ("BLDH", "DHLB"), ("LBHD", "BLHD")],
    dim=[1, 5, 80, 128, 300],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
)
def test_rows_and_heads_of_a_tensor(orders: tuple[str, str], dim: int, dtype: torch.dtype):
    """A tile is merged into a slice, and nothing else changes."""
    order, tile_order = orders
    torch.manual_seed(dim)
    batch, heads, rows = 2, 3, 37
    memory, lse_memory = in_memory(order, batch, heads + 3, rows + 9, dim), torch.randn(batch, heads + 3, rows + 9) * 5
    lse_memory = lse_memory.to(DEVICE)
    place = (slice(None), slice(2, 2 + heads), slice(4, 4 + rows))
    # As efficient attention leaves it: rows of a longer logsumexp.
    tile = in_memory(tile_order, batch, heads, rows, dim).to(dtype), (torch.randn(batch, heads, 64) * 5)[..., :rows]
    tile = tile[0], tile[1].to(DEVICE)
    before = memory.clone(), lse_memory.clone()
    FusedMerge()(memory[place], lse_memory[place], *tile)
    compare([x[place] for x in before], (memory[place], lse_memory[place]), tile)
    for x, old in zip((memory, lse_memory), before, strict=True):
        assert not torch.equal(x[place], old[place])
        x[place] = old[place]
        assert torch.equal(x, old)


@runs
@pytest.mark.parametrize("order", ["BHLD", "BLHD"])
def test_rows_by_an_index(order: str):
    """Rows of a pack are not neighbours. All remaining rows are left as they are."""
    torch.manual_seed(0)
    out, lse, index = in_memory(order, 2, 3, 40, 16), torch.randn(2, 3, 40).to(DEVICE), torch.randperm(40)[:23]
    index, rest = index.repeat_interleave(2).to(DEVICE)[::2], sorted({*range(40)} - {*index.tolist()})
    tile = in_memory("BLHD", 2, 3, 23, 16).bfloat16(), torch.randn(2, 3, 23).to(DEVICE)
    before = out.clone(), lse.clone()
    FusedMerge()(out, lse, *tile, index)
    compare([x[:, :, index] for x in before], (out[:, :, index], lse[:, :, index]), tile)
    assert torch.equal(out[:, :, rest], before[0][:, :, rest])
    assert torch.equal(lse[:, :, rest], before[1][:, :, rest])


@runs
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_beyond_32_bits(dim: int):
    """Entries of the batch, heads or rows that are 2^30 numbers apart. Memory that nobody writes is not taken."""
    shape, strides = [1, 1, 1, 4], [4, 4, 4, 1]
    shape[dim], strides[dim] = 3, 2**30
    try:
        memory = torch.empty(2**31 + 4, dtype=torch.bfloat16, device=DEVICE)
    except RuntimeError:
        pytest.skip("no room for 4 GiB")
    tile = memory.as_strided(shape, strides).copy_(torch.randn(shape)), torch.randn(shape[:3]).to(DEVICE)
    out, lse = torch.randn(shape).to(DEVICE), torch.randn(shape[:3]).to(DEVICE)
    before = out.clone(), lse.clone()
    FusedMerge()(out, lse, *tile)
    compare(before, (out, lse), tile)


@runs
def test_any_two_logsumexps():
    """Rows that see nothing, equal ones, and differences whose exponential overflows, or is infinite."""
    values = [0.0, 1.0, -1.0, 15.0, 17.5, -88.0, 89.0, 104.0, 200.0, EMPTY_LSE, -EMPTY_LSE, 3e38, -3e38, INF, -INF]
    pairs = torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).to(DEVICE)
    lse, new_lse = (x.contiguous().view(1, 1, -1) for x in pairs.unbind(-1))
    out, new_out = torch.randn(2, 1, 1, len(pairs), 8).to(DEVICE)
    before = out.clone(), lse.clone()
    FusedMerge()(out, lse, new_out, new_lse)
    compare(before, (out, lse), (new_out, new_lse))
    far = (before[1] - new_lse).abs() > 200
    assert int(far.sum()) > 100
    larger = torch.where((before[1] > new_lse)[..., None], before[0], new_out)
    assert torch.allclose(out[far], larger[far], rtol=8 * ROUNDING, atol=0)


@runs
@pytest.mark.parametrize("which", range(4))
def test_nan_stays(which: int):
    tensors = [torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1), torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)]
    tensors[which].fill_(torch.nan)
    tensors = [x.to(DEVICE) for x in tensors]
    FusedMerge()(*tensors)
    assert bool(tensors[0].isnan().all())
    assert bool(tensors[1].isnan().all()) == (which % 2 == 1)


@runs
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4)], ids=str)
def test_nothing_to_merge(shape: tuple[int, ...]):
    out, lse = torch.zeros(shape, device=DEVICE), torch.zeros(shape[:3], device=DEVICE)
    FusedMerge()(out, lse, out.clone(), lse.clone())


class Anywhere(FusedMerge):
    """On the CPU too. The interpreter has one program at a time in a process, and ranks are threads."""

    LOCK = threading.Lock()

    def takes(self, out_BHLE, new_out_BHLE):
        return True

    def __call__(self, *tensors):
        with self.LOCK:
            super().__call__(*tensors)


@runs
def test_many_tiles():
    """Tiles of some rows and heads, in bfloat16, against the sum of their weights: 4 u for each of 24 merges."""
    torch.manual_seed(0)
    softmax = OnlineSoftmax((1, 4, 20, 8), torch.bfloat16, DEVICE, merge=Anywhere())
    total, weight = torch.zeros(1, 4, 20, 8, dtype=torch.float64), torch.zeros(1, 4, 20, 1, dtype=torch.float64)
    for _ in range(24):
        head, row = torch.randint(0, 3, ()).item(), torch.randint(0, 15, ()).item()
        heads, rows = (head, head + 2), (row, row + 5)
        out, lse = torch.randn(1, 2, 5, 8).bfloat16(), torch.randn(1, 2, 5)
        p, place = lse.double().exp()[..., None], (slice(None), slice(*heads), slice(*rows))
        total[place] += p * out
        weight[place] += p
        softmax.add(heads, rows, out.to(DEVICE), lse.to(DEVICE))
    out, lse = (x.cpu() for x in softmax.result())
    seen = weight[..., 0] > 0
    assert error(out[seen], (total / weight)[seen]) < 24 * 4 * ROUNDING
    assert float((lse[seen] - weight[..., 0].log()[seen]).abs().max()) < 24 * 8 * ROUNDING
    assert bool((lse[~seen] == EMPTY_LSE).all())


@pytest.mark.skipif(not INTERPRETED, reason="runs in test_by_the_interpreter")
def test_an_attention():
    """A ring whose merges are made so: its output, and gradients from the merged output and logsumexp."""
    inputs, cotangent = attention_inputs(length=16)
    inputs, cotangent = [x.float() for x in inputs], cotangent.float()
    layout = head_tail(16, 2)

    def step(rank: int, kernel):
        leaves = [layout.part(x, 2, rank).detach().requires_grad_() for x in inputs]
        options = {"mask": Causal(), "layout": layout, "strategy": Ring(), "kernel": kernel}
        out = context_attention(*leaves, dist.group.WORLD, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, layout.part(cotangent, 2, rank))]

    fused, plain = (
        run_ranks(lambda rank, kernel=kernel: step(rank, kernel), 2)
        for kernel in (replace(CPU_FLASH, merge=Anywhere()), CPU_FLASH)
    )
    for ours, theirs in zip(fused, plain, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert error(x, y) < 16 * ROUNDING  # one merge, and what a backward makes of it


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("dtype", "capability"), [("fp16", 90), ("fp32", 90), ("bf16", 80), ("bf16", 90), ("bf16", 100)]
)
def test_it_compiles_without_a_gpu(dtype: str, capability: int, tmp_path, monkeypatch):
    """For rows of whole 16 bytes, which it loads and stores in pieces of 16 bytes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

    from cp_styles.kernels.fused_merge import _merge

    types = {"out": "*fp32", "lse": "*fp32", "new_out": f"*{dtype}", "new_lse": "*fp32"}
    constants = {"index": None, "out_e": 1, "new_out_e": 1, "lse_l": 1, "new_lse_l": 1}
    constants |= {"DIM": 128, "HEADS_FIRST": False, "BLOCK": 16, "COLUMNS": 128}
    names = _merge.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {"out", "new_out", *(f"{x}out_{dim}" for x in ("", "new_") for dim in "bhl")}
    attributes = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in aligned}
    source = triton.compiler.ASTSource(_merge, signature, constants, attributes)
    text = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert "ld.global.v4.b32" in text
    assert "st.global.v4.b32" in text
