"""The CUDA kernels, tile by tile, on stand-ins of their ops that read memory as they do: see tests/cuda_ops.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from cp_styles.kernels import Kernel
from cp_styles.kernels.base import LseGradient, bind_tile
from cp_styles.kernels.bias_levels import SplitQueries
from cp_styles.kernels.merge import EMPTY_LSE
from tests.covering import sampled
from tests.cuda_ops import CUDNN, DEFAULT, EFFICIENT, FLASH, NAMED_CUDNN, KernelError, cuda_ops_on_cpu
from tests.oracle import attention_inputs, dense_attention, error, expected_attention, randn

LINES = {"default": DEFAULT, "efficient": EFFICIENT, "cuDNN": NAMED_CUDNN}
# float64 sums of some hundred terms, each a few 1e-16 from exact.
EXACT = 1e-13
SHAPES = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "head dim 5": {"dim": 5},
    "head dim 256": {"dim": 256, "batch": 1, "heads": 2},
    "head dim 257": {"dim": 257, "batch": 1, "heads": 2},
    "many keys": {"kv_length": 192},
    "one query": {"length": 1, "kv_length": 64},
    "one key": {"kv_length": 1},
    "blocks": {"length": 128, "kv_length": 256, "batch": 1},
}


@pytest.fixture
def ops():
    with cuda_ops_on_cpu() as seen:
        yield seen


def in_memory(order: str, x: torch.Tensor) -> torch.Tensor:
    """[B, H, L, D] with its dims in this order in memory, rows of something longer."""
    places = ["BHLD".index(letter) for letter in order]
    longer = torch.full([size + 3 * (dim == 2) for dim, size in enumerate(x.shape)], torch.nan, dtype=x.dtype)
    longer = longer.permute(places).contiguous().permute([places.index(dim) for dim in range(4)])
    return longer[:, :, 1 : 1 + x.shape[2]].copy_(x)


def run(kernel: Kernel, inputs, cotangent, *, order: str = "BHLD", **options) -> list[torch.Tensor]:
    """``[out, dq, dk, dv]``; the backward is given tensors in other orders of memory than the forward."""
    options = {"causal": False, "bias": None, "scale": inputs[0].shape[-1] ** -0.5} | options
    inputs = [in_memory(order, x) for x in inputs]
    out, lse = kernel.forward(*inputs, **options)
    # What tiles merge into is dense, and a tile's logsumexp is some rows of it.
    whole = torch.full((*lse.shape[:2], lse.shape[2] + 5), torch.nan, dtype=lse.dtype)
    whole[:, :, 2:-3] = lse
    out = in_memory("BHLD", out)
    return [out, *kernel.backward(in_memory("BLHD", cotangent), *inputs, out, whole[:, :, 2:-3], **options)]


def compare(found: list[torch.Tensor], expected: list[torch.Tensor], most: float = EXACT) -> None:
    for what, mine, wanted in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert error(mine, wanted) < most, what


@sampled(2, kernel=list(LINES), shape=list(SHAPES), order=["BHLD", "BLHD", "BHDL"])
def test_a_tile_is_attention(kernel: str, shape: str, order: str, ops):
    inputs, cotangent = attention_inputs(**{"length": 12} | SHAPES[shape])
    compare(run(LINES[kernel], inputs, cotangent, order=order), expected_attention(inputs, cotangent))


@pytest.mark.parametrize("kernel", LINES.values(), ids=LINES)
@pytest.mark.parametrize(
    ("expanded", "dims"), [*product([(0,), (1, 2), (2,)], [(0,), (1,), (0, 1)]), ((0,), (2,))], ids=str
)
def test_expanded_tensors(kernel: Kernel, expanded: tuple[int, ...], dims: tuple[int, ...], ops):
    """Of query, key and value those of these indices have stride 0 in these dims. cuDNN is given none."""
    inputs, cotangent = attention_inputs(length=128)
    for index in expanded:
        x = inputs[index]
        for dim in dims:
            x = x.narrow(dim, 0, 1)
        inputs[index] = x.expand(inputs[index].shape)
        assert 0 in inputs[index].stride()
    options = {"causal": False, "bias": None, "scale": inputs[0].shape[-1] ** -0.5}
    out, lse = kernel.forward(*inputs, **options)
    found = [out, *kernel.backward(cotangent, *inputs, out, lse, **options)]
    compare(found, expected_attention(inputs, cotangent))


@pytest.mark.parametrize("kernel", LINES.values(), ids=LINES)
@pytest.mark.parametrize("length", [1, 12, 32, 128])
@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_a_causal_tile(kernel: Kernel, length: int, scale: float, ops):
    inputs, cotangent = attention_inputs(length=length, kv_heads=2)
    expected = expected_attention(inputs, cotangent, torch.ones(length, length).tril().bool(), scale=scale)
    compare(run(kernel, inputs, cotangent, causal=True, scale=scale), expected)


def seen_by(window: tuple[int, int], queries: int, keys: int) -> torch.Tensor:
    """[L, M]: own is the last key for the last query; as many before and after, all for -1."""
    before, after = (size if size >= 0 else keys for size in window)
    ahead = torch.arange(keys) - (torch.arange(queries) + keys - queries)[:, None]
    return (ahead >= -before) & (ahead <= after)


@sampled(2, dim=[8, 5, 249, 256], window=[(-1, 0), (7, -1), (7, 0), (3, 0), (2, 1)], order=["BHLD", "BLHD"])
def test_a_band(dim: int, window: tuple[int, int], order: str, ops):
    """By flash, and where a gradient of the logsumexp makes the tensors too wide for it, with an explicit mask."""
    inputs, cotangent = attention_inputs(length=12, kv_length=19, batch=2, kv_heads=2, dim=dim)
    mask = seen_by(window, 12, 19)
    compare(run(DEFAULT, inputs, cotangent, order=order, window=window), expected_attention(inputs, cotangent, mask))
    assert ops.calls == {"_flash_attention_forward": 1, "_flash_attention_backward": 1}
    options = {"causal": False, "bias": None, "scale": dim**-0.5, "window": window}
    grad = torch.cat((cotangent, torch.zeros_like(cotangent[..., :1])), -1)
    out, lse = DEFAULT.forward(*inputs, **options)
    gradients = LseGradient(DEFAULT).backward(grad, *inputs, out, lse, **options)
    compare([out, *gradients], expected_attention(inputs, cotangent, mask))
    assert ops.calls["_scaled_dot_product_efficient_attention_backward"] == (dim > 248)


@sampled(
    2,
    kernel=list(LINES),
    sizes=[(12, 7), (40, 33), (128, 128)],
    shape=["LM", "HLM", "BHLM", "1M", "L1"],
    dim=[8, 6],
)
def test_a_bias_and_rows_that_see_nothing(kernel: str, sizes: tuple[int, int], shape: str, dim: int, ops):
    inputs, cotangent = attention_inputs(length=sizes[0], kv_length=sizes[1], kv_heads=2, dim=dim)
    lengths = {"B": 2, "H": 4, "L": sizes[0], "M": sizes[1], "1": 1}
    bias = randn(9, *(lengths[letter] for letter in shape))
    bias = bias.masked_fill(bias > 1.5, float("-inf"))
    if "L" in shape:
        bias[..., 3, :] = float("-inf")
    compare(run(LINES[kernel], inputs, cotangent, bias=bias), expected_attention(inputs, cotangent, bias=bias))


@pytest.mark.parametrize("kernel", LINES.values(), ids=LINES)
@pytest.mark.parametrize("dims", [(12, 8), (8, 16), (6, 5)], ids=str)
def test_a_value_head_dim_of_its_own(kernel: Kernel, dims: tuple[int, int], ops):
    (q, k, _), _ = attention_inputs(length=16, kv_heads=2, dim=dims[0])
    v, cotangent = randn(5, 2, 2, 16, dims[1]), randn(6, 2, 4, 16, dims[1])
    compare(run(kernel, [q, k, v], cotangent), expected_attention([q, k, v], cotangent))


@pytest.mark.parametrize("kernel", LINES.values(), ids=LINES)
@pytest.mark.parametrize("dim", [8, 128, 252, 256])
@pytest.mark.parametrize("biased", [False, True])
def test_a_gradient_of_the_logsumexp(kernel: Kernel, dim: int, biased: bool, ops):
    """The tensors of its backward are wider than those that the kernel was chosen for."""
    (q, k, v), cotangent = attention_inputs(length=128, batch=1, heads=2, dim=dim)
    bias = randn(9, 128, 128) if biased else None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    logits = leaves[0] @ leaves[1].mT * 0.1 + (0.0 if bias is None else bias)
    out, lse = torch.softmax(logits, -1) @ leaves[2], torch.logsumexp(logits, -1)
    grad_lse = randn(7, *lse.shape)
    expected = torch.autograd.grad((out, lse), leaves, (cotangent, grad_lse))
    grad = torch.cat((cotangent, grad_lse.unsqueeze(-1)), -1)
    options = {"causal": False, "bias": bias, "scale": 0.1}
    out, lse = kernel.forward(q, k, v, **options)
    for found, wanted in zip(LseGradient(kernel).backward(grad, q, k, v, out, lse, **options), expected, strict=True):
        assert error(found, wanted) < EXACT


def test_tiles_with_drowned_rows_are_twice_as_wide(ops):
    (q, k, v), cotangent = attention_inputs(length=128, batch=1, heads=2, dim=128)
    none = torch.zeros_like(q)
    bias = torch.zeros(128, 128, dtype=torch.float64)
    options = {"causal": False, "bias": bias, "scale": 0.1}
    out, lse = NAMED_CUDNN.forward(q, k, v, **options)
    found = SplitQueries(NAMED_CUDNN).backward(cotangent, torch.cat((q, none), -1), k, v, out, lse, **options)
    for mine, wanted in zip(found, expected_attention([q, k, v], cotangent, scale=0.1)[1:], strict=True):
        assert error(mine[..., :128], wanted) < EXACT


@pytest.mark.parametrize("kernel", LINES.values(), ids=LINES)
def test_rows_that_start_anywhere(kernel: Kernel, ops):
    """Columns of something wider: neither the first row nor any other starts at a multiple of 16 bytes."""
    inputs, cotangent = attention_inputs(length=128, kv_heads=2)
    expected = expected_attention(inputs, cotangent)
    given = [torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in inputs]
    options = {"causal": False, "bias": None, "scale": 8**-0.5}
    out, lse = kernel.forward(*given, **options)
    compare([out, *kernel.backward(cotangent, *given, out, lse, **options)], expected)


# What each rule is for: without it, or with what a kernel would otherwise be given, a stand-in must fail.
def _wrong_or_refused(kernel: Kernel, **case) -> bool:
    options = {key: case.pop(key) for key in ("bias", "causal", "scale", "order") if key in case}
    inputs, cotangent = attention_inputs(**{"length": 12, "kv_heads": 2} | case)
    keys = inputs[1].shape[2]
    mask = torch.ones(inputs[0].shape[2], keys).tril().bool() if options.get("causal") else None
    expected = expected_attention(inputs, cotangent, mask, bias=options.get("bias"), scale=options.get("scale"))
    try:
        compare(run(kernel, inputs, cotangent, **options), expected)
    except (KernelError, AssertionError):
        return True
    return False


LOW_LOGITS = {"length": 64, "kv_length": 64, "bias": torch.full((64, 64), -120.0, dtype=torch.float64)}
BROKEN: dict[str, tuple[Kernel, Kernel, dict]] = {
    "efficient's backward steps over all heads of out": (EFFICIENT, replace(EFFICIENT, out_by_rows=False), {}),
    "efficient takes as many key heads as query heads": (EFFICIENT, replace(EFFICIENT, grouped=True), {}),
    "efficient's logsumexp is padded": (EFFICIENT, replace(EFFICIENT, lse_multiple=1), {}),
    "efficient's head dims are multiples of 16 bytes": (EFFICIENT, replace(EFFICIENT, row_bytes=1), {"dim": 5}),
    "efficient's bias has rows of 16 bytes": (
        EFFICIENT,
        replace(EFFICIENT, row_bytes=1),
        {"bias": randn(3, 12, 7), "kv_length": 7},
    ),
    "flash has one head dim of at most 256": (DEFAULT, FLASH, {"dim": 257, "heads": 2}),
    "flash's rows are next to each other": (FLASH, replace(FLASH, row_bytes=1), {"dim": 5, "order": "BHDL"}),
    "cuDNN takes no tile with one key": (NAMED_CUDNN, CUDNN, {"kv_length": 1}),
    "cuDNN takes no tile with one query": (
        NAMED_CUDNN,
        CUDNN,
        {"length": 1, "kv_length": 128, "bias": torch.full((1, 128), -120.0, dtype=torch.float64)},
    ),
    "cuDNN takes no half block of keys": (NAMED_CUDNN, CUDNN, LOW_LOGITS),
    "cuDNN has head dims of at most 128": (NAMED_CUDNN, CUDNN, {"dim": 136, "length": 128, "batch": 1}),
}


@pytest.mark.parametrize(("right", "broken", "case"), BROKEN.values(), ids=BROKEN)
def test_each_rule_is_needed(right: Kernel, broken: Kernel, case: dict, ops):
    assert not _wrong_or_refused(right, **case)
    assert _wrong_or_refused(broken, **case)


def test_a_dead_row_in_a_tile_of_cudnn(ops):
    """-1e30 for its logsumexp makes infinity of what a block of keys is padded with, and 0 times that is no number."""
    inputs, cotangent = attention_inputs(length=64)
    bias = torch.zeros(64, 64, dtype=torch.float64)
    bias[5] = float("-inf")
    out, lse = EFFICIENT.forward(*inputs, causal=False, bias=bias, scale=0.3)
    assert bool((lse[:, :, 5] == EMPTY_LSE).all())
    options = {"causal": False, "bias": bias, "scale": 0.3}
    expected = expected_attention(inputs, cotangent, bias=bias, scale=0.3)
    # Given to it against its own gate: the gate and the infinity are one each.
    compare([out, *CUDNN.backward(cotangent, *inputs, out, lse, **options)], expected)


@pytest.mark.parametrize("orders", [("BHLD", "BLHD"), ("BLHD", "BHLD")])
def test_cudnns_plans_do_not_know_the_strides_of_out(orders: tuple[str, str], ops):
    """Two backwards of one query's shape and strides, of which the second finds out and its gradient laid out in
    another way."""
    (q, k, v), cotangent = attention_inputs(length=128)
    expected = expected_attention([q, k, v], cotangent)
    for kernel, right in ((CUDNN, True), (replace(CUDNN, out_like_query=False), False)):
        ops.plans.clear()
        out, lse = kernel.forward(q, k, v, causal=False, bias=None, scale=8**-0.5)
        errors = []
        for order in orders:
            tensors = in_memory(order, cotangent).contiguous(), q, k, v, out
            tensors = [
                x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) if order == "BLHD" else x for x in tensors
            ]
            grad, *_, out = tensors
            found = kernel.backward(grad, q, k, v, out, lse, causal=False, bias=None, scale=8**-0.5)
            errors += [error(*pair) for pair in zip(found, expected[1:], strict=True)]
        assert (max(errors) < EXACT) == right
        assert len(ops.plans) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", LINES.values(), ids=LINES)
def test_low_precision_in_another_order_of_memory(kernel: Kernel, dtype: torch.dtype, ops):
    """float16 and bfloat16, which are what the rules are for: no more error than with everything in order."""
    inputs, cotangent = attention_inputs(length=128, kv_heads=2, dtype=dtype)
    expected = expected_attention(inputs, cotangent)
    for found, wanted, alone in zip(
        run(kernel, inputs, cotangent, order="BLHD"), expected, run(kernel, inputs, cotangent), strict=True
    ):
        assert found.dtype == dtype
        assert error(found, wanted) <= 1.1 * error(alone, wanted) + 1e-7


def whole(kernel: Kernel, tiles: list[slice], inputs, cotangent, attend: Callable = dense_attention) -> list:
    q, k, v = inputs
    out = attend(*inputs)
    lse = torch.logsumexp(q @ k.mT * 8**-0.5, -1)
    parts = [
        kernel.backward(cotangent, q, k[:, :, rows], v[:, :, rows], out, lse, causal=False, bias=None, scale=8**-0.5)
        for rows in tiles
    ]
    dq, dk, dv = zip(*parts, strict=True)
    return [out, sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)]


@pytest.mark.parametrize("kernel", LINES.values(), ids=LINES)
def test_gradients_of_tiles_add_up(kernel: Kernel, ops):
    """Of lengths for which the kernels of a line differ."""
    inputs, cotangent = attention_inputs(length=128, kv_length=128 + 64 + 1 + 7)
    tiles = [slice(0, 128), slice(128, 192), slice(192, 193), slice(193, 200)]
    compare(whole(kernel, tiles, inputs, cotangent), expected_attention(inputs, cotangent))


PHASES = "forward", "backward"


def python_calls(run: Callable[[], object]) -> int:
    """How many functions of cp_styles.kernels it calls, resumptions of generators included."""
    files: list[str] = []
    sys.setprofile(lambda frame, event, _: files.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return sum(Path(file).parts[-3:-1] == ("cp_styles", "kernels") for file in files)


@pytest.mark.parametrize("kernel", [DEFAULT, NAMED_CUDNN], ids=["flash", "cuDNN"])
def test_python_calls_of_a_tile(kernel: Kernel, ops):
    """A bound kernel, forward and backward, with keys that are not in a message. With 42 to 65 calls, the host took
    longer than an H200 for short tiles."""
    (q, k, v), grad = attention_inputs(length=128, heads=4, kv_heads=2, dim=16, batch=1, dtype=torch.bfloat16)
    forward, backward = (bind_tile(kernel, phase, (q, k, v), causal=False, scale=0.25) for phase in PHASES)
    out, lse = forward.run(forward.queries((q,)), k, v)
    backward.run(backward.queries((grad, q, out, lse)), k, v)  # reads the schema of the op
    assert 2 < python_calls(lambda: forward.run(forward.queries((q,)), k, v)) <= 6
    assert 4 < python_calls(lambda: backward.run(backward.queries((grad, q, out, lse)), k, v)) <= 9
