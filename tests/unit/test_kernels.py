"""One tile at a time: the kernels that run here against the oracle, the CUDA ones against the schemas of their ops."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cp_styles import Causal, Ring, head_tail
from cp_styles.explain.dry_run import dry_run
from cp_styles.explain.events import Shapes
from cp_styles.kernels import Kernel, ReferenceKernel, SdpaKernel, sdpa
from cp_styles.kernels.base import OtherBackward
from cp_styles.kernels.choice_by_tile import ByTile, kernel_for_tiles
from cp_styles.kernels.merge import EMPTY_LSE
from cp_styles.kernels.sdpa import (
    CPU_FLASH,
    CUDA_CUDNN,
    CUDA_CUDNN_PREFERRED,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    SDPA_KERNELS,
    names_of,
)
from tests import tables
from tests.oracle import attention_inputs, error, expected_attention, randn

# Kernels that run here. Stand-ins of CUDA's kernels have tests of their own.
KERNELS = [kernel for name, kernel in tables.KERNELS.items() if name not in ("default", "CUDA's")]
CUDA_KERNELS = [kernel for kernel in SDPA_KERNELS if kernel.device_type == "cuda"]
SHAPES = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1, "batch": 1},
    "odd head dim": {"dim": 5},
    "many keys": {"kv_length": 70},
    "one query": {"length": 1, "kv_length": 9},
}
# float64 sums of at most 70 terms, each a few 1e-16 from exact.
EXACT = 1e-14


def name_of(kernel: Kernel) -> str:
    return getattr(kernel, "name", type(kernel).__name__)


def run(kernel: Kernel, inputs, cotangent, **options) -> list[torch.Tensor]:
    options = {"causal": False, "bias": None, "scale": inputs[0].shape[-1] ** -0.5} | options
    out, lse = kernel.forward(*inputs, **options)
    return [out, *kernel.backward(cotangent, *inputs, out, lse, **options)]


@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [0.35355, -2.0])
def test_a_tile_is_attention(kernel: Kernel, shape: dict, causal: bool, scale: float):
    shape = {"length": 12} | shape
    if causal and shape.get("kv_length", shape["length"]) != shape["length"]:
        pytest.skip("causal tiles are square")
    inputs, cotangent = attention_inputs(**shape)
    mask = torch.ones(shape["length"], inputs[1].shape[2], dtype=torch.bool)
    mask = mask.tril() if causal else mask
    expected = expected_attention(inputs, cotangent, mask, scale=scale)
    for found, wanted in zip(run(kernel, inputs, cotangent, causal=causal, scale=scale), expected, strict=True):
        assert error(found, wanted) < EXACT


class OpCount(TorchDispatchMode):
    """Counts the calls of an op, and of its backward."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += self.name in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("rows", "dtype", "ranges"),
    [
        (383, torch.float64, 1),
        (384, torch.float64, 4),
        (501, torch.float64, 4),
        (640, torch.float64, 4),
        (641, torch.float64, 1),
        (512, torch.float32, 4),
        (512, torch.bfloat16, 1),
    ],
)
@pytest.mark.parametrize(("kv_heads", "value_dim", "scale"), [(4, 8, 0.3), (2, 3, -2.0)])
def test_the_backward_of_a_causal_tile_of_some_hundred_rows_is_in_ranges(
    rows: int, dtype: torch.dtype, ranges: int, kv_heads: int, value_dim: int, scale: float
):
    inputs, cotangent = attention_inputs(length=rows, batch=1, kv_heads=kv_heads)
    inputs[2], cotangent = inputs[2][..., :value_dim], cotangent[..., :value_dim]
    expected = expected_attention(inputs, cotangent, torch.ones(rows, rows, dtype=torch.bool).tril(), scale=scale)
    inputs, cotangent = [x.to(dtype) for x in inputs], cotangent.to(dtype)
    with OpCount(CPU_FLASH.name) as calls:
        results = run(CPU_FLASH, inputs, cotangent, causal=True, scale=scale)
    assert all(x.stride(1) < x.stride(2) for x in results[-3:])  # gradients are [B, L, H, D] in memory
    assert calls.count == 1 + ranges
    # Roundings of sums of as many terms as there are rows grow like the root of their number. In 16 bits the sums are
    # wider, and inputs, output, its gradient and the results are rounded once each.
    roundings = 4 if dtype == torch.bfloat16 else rows**0.5
    assert max(map(error, results, expected)) < roundings * torch.finfo(dtype).eps


@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_rows_that_see_nothing_are_zero_with_finite_gradients(kernel: Kernel):
    inputs, cotangent = attention_inputs(length=5)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[[0, 3]] = False
    bias = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    out, lse = kernel.forward(*inputs, causal=False, bias=bias, scale=8**-0.5)
    assert not out[:, :, [0, 3]].any()
    assert bool((lse[:, :, [0, 3]] == EMPTY_LSE).all())
    expected = expected_attention(inputs, cotangent, mask)
    for found, wanted in zip(run(kernel, inputs, cotangent, bias=bias), expected, strict=True):
        assert error(found, wanted) < EXACT


def test_a_kernel_that_has_run_is_pickled():
    """For processes that are spawned with it."""
    assert pickle.loads(pickle.dumps(CPU_FLASH)) == CPU_FLASH


def test_kernels_say_what_they_cannot_do():
    inputs, _ = attention_inputs(length=4, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match=r"on cuda, got torch.float32 on cpu; pass kernel=ReferenceKernel"):
        CUDA_FLASH.check(*inputs, biased=False)
    low = [x.bfloat16() for x in inputs]
    with pytest.raises(NotImplementedError, match="takes no mask; choose another SDPA backend"):
        replace(CUDA_FLASH, device_type="cpu").check(*low, biased=True)
    CPU_FLASH.check(*inputs, biased=True)
    long = [Like(torch.bfloat16, torch.device("cuda"), (1, 1, 4, 257))] * 3
    with pytest.raises(NotImplementedError, match="takes head dims up to 256, got 257 and 257; leave kernel= out"):
        CUDA_FLASH.check(*long, biased=False)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(NotImplementedError, match=r"needs torch\.use_deterministic_algorithms to be off"):
            CUDA_CUDNN.check(*[x._replace(shape=(1, 1, 4, 64)) for x in long], biased=False)
    finally:
        torch.use_deterministic_algorithms(deterministic)


class Like(NamedTuple):
    """What of a tensor a kernel may be chosen by."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]


REFERENCE = ReferenceKernel()


CUDNN_NAMED = {"named": CUDA_CUDNN}
LOW, HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("device", "dtype", "options", "dims", "rows", "plain", "masked"),
    [
        ("cpu", LOW, {}, (8, 8), (10, 7), CPU_FLASH, CPU_FLASH),
        ("cpu", DOUBLE, {}, (8, 8), (10, 7), CPU_FLASH, CPU_FLASH),
        ("cpu", DOUBLE, {}, (8, 4), (10, 7), CPU_FLASH, CPU_FLASH),
        ("cpu", SINGLE, {"named": REFERENCE}, (8, 8), (10, 7), REFERENCE, REFERENCE),
        ("mps", SINGLE, {}, (8, 8), (10, 7), REFERENCE, REFERENCE),
        # dtypes
        ("cuda", LOW, {}, (8, 8), (10, 7), CUDA_FLASH, CUDA_EFFICIENT),
        ("cuda", HALF, {}, (8, 8), (10, 7), CUDA_FLASH, CUDA_EFFICIENT),
        ("cuda", LOW, {"named": CUDA_EFFICIENT}, (8, 8), (10, 7), CUDA_EFFICIENT, CUDA_EFFICIENT),
        ("cuda", SINGLE, {}, (8, 8), (10, 7), CUDA_EFFICIENT, CUDA_EFFICIENT),
        ("cuda", DOUBLE, {}, (8, 8), (10, 7), REFERENCE, REFERENCE),
        ("cuda", LOW, {"named": CUDA_FLASH}, (64, 64), (128, 128), CUDA_FLASH, CUDA_EFFICIENT),
        # head dims
        ("cuda", LOW, {}, (5, 5), (10, 7), CUDA_FLASH, CUDA_EFFICIENT),
        ("cuda", LOW, {}, (192, 128), (10, 7), CUDA_FLASH, CUDA_EFFICIENT),
        ("cuda", LOW, {}, (256, 256), (10, 7), CUDA_FLASH, CUDA_EFFICIENT),
        ("cuda", LOW, {}, (257, 257), (10, 7), CUDA_EFFICIENT, CUDA_EFFICIENT),
        ("cuda", LOW, {}, (64, 264), (10, 7), CUDA_EFFICIENT, CUDA_EFFICIENT),
        ("cuda", SINGLE, {}, (5, 4), (10, 7), CUDA_EFFICIENT, CUDA_EFFICIENT),
        # cuDNN, named: its tiles, and those that are not
        ("cuda", LOW, CUDNN_NAMED, (64, 64), (128, 256), CUDA_CUDNN, CUDA_CUDNN),
        ("cuda", LOW, CUDNN_NAMED, (128, 64), (128, 128), CUDA_CUDNN, CUDA_CUDNN),
        ("cuda", LOW, CUDNN_NAMED, (64, 64), (128, 192), CUDA_FLASH, CUDA_EFFICIENT),
        ("cuda", LOW, CUDNN_NAMED, (64, 64), (1, 128), CUDA_FLASH, CUDA_EFFICIENT),
        ("cuda", LOW, CUDNN_NAMED, (64, 64), (128, 1), CUDA_FLASH, CUDA_EFFICIENT),
        ("cuda", LOW, CUDNN_NAMED, (64, 64), (100, 100), CUDA_FLASH, CUDA_EFFICIENT),
    ],
    ids=str,
)
def test_which_kernel_computes_which_tile(device, dtype, options, dims, rows, plain: Kernel, masked: Kernel):
    def tensors(*rows: int) -> Any:
        sizes = zip((rows[0], rows[1], rows[1]), (dims[0], *dims), strict=True)
        return [Like(dtype, torch.device(device), (2, 4, *size)) for size in sizes]

    found = kernel_for_tiles(tensors(33, 33), **options)
    for biased, wanted in ((False, plain), (True, masked)):
        kernel = found
        if isinstance(found, ByTile):
            kernel = chosen(found, tensors(*rows), biased)
        assert kernel_of(kernel) == kernel_of(wanted)
    assert found.small_tiles == (options.get("named", plain)).small_tiles


@pytest.mark.parametrize("dim", [249, 256])
def test_a_backward_with_wider_tensors_has_a_kernel_that_takes_them(dim: int):
    """A logsumexp's gradient adds columns: see LseGradient."""
    found = kernel_for_tiles([Like(LOW, torch.device("cuda"), (2, 4, 10, dim))] * 3)
    assert isinstance(found, ByTile)
    wider = [Like(LOW, torch.device("cuda"), (2, 4, 10, dim + 8))] * 3
    assert chosen(found, wider, False) == CUDA_EFFICIENT


@pytest.mark.parametrize(
    ("capability", "dtype", "plain", "masked"),
    [
        ((9, 0), LOW, CUDA_FLASH, CUDA_EFFICIENT),
        ((8, 0), HALF, CUDA_FLASH, CUDA_EFFICIENT),
        ((7, 5), HALF, CUDA_EFFICIENT, CUDA_EFFICIENT),
        ((7, 5), SINGLE, CUDA_EFFICIENT, CUDA_EFFICIENT),
        ((7, 5), LOW, REFERENCE, REFERENCE),
    ],
)
def test_what_a_gpu_can_do(capability, dtype, plain: Kernel, masked: Kernel, monkeypatch):
    monkeypatch.setattr(sdpa, "_capability", lambda device: capability)
    tensors = [Like(dtype, torch.device("cuda"), (2, 4, 10, 64))] * 3
    found = kernel_for_tiles(tensors)
    line = found if isinstance(found, ByTile) else ByTile((found,), (found,))
    for biased, wanted in ((False, plain), (True, masked)):
        assert kernel_of(chosen(line, tensors, biased)) == kernel_of(wanted)


LONG = 1152
NEW_GPU = {"capability": (9, 0), "cudnn": 91900, "enabled": True, "deterministic": False, "recompile": None}


def on_gpu(gpu, monkeypatch) -> None:
    monkeypatch.setattr(sdpa, "_capability", lambda device: gpu["capability"])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: gpu["deterministic"])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: gpu["cudnn"])
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: gpu["enabled"])
    if gpu["recompile"]:
        monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", gpu["recompile"])


@pytest.mark.parametrize(
    ("gpu", "dtype", "dims", "rows", "plain"),
    [
        # cuDNN where torch itself prefers it
        ({}, LOW, (128, 128), (LONG, LONG), CUDA_CUDNN_PREFERRED),
        ({}, HALF, (64, 128), (LONG, 128), CUDA_CUDNN_PREFERRED),
        ({"capability": (10, 0)}, LOW, (64, 64), (LONG, LONG), CUDA_CUDNN_PREFERRED),
        ({"capability": (10, 3)}, LOW, (5, 5), (LONG, LONG), CUDA_CUDNN_PREFERRED),
        ({"cudnn": 91501}, LOW, (64, 64), (LONG, LONG), CUDA_CUDNN_PREFERRED),
        # each gate
        ({"capability": (8, 0)}, LOW, (64, 64), (LONG, LONG), CUDA_FLASH),
        ({"capability": (8, 9)}, LOW, (64, 64), (LONG, LONG), CUDA_FLASH),
        ({"capability": (12, 0)}, LOW, (64, 64), (LONG, LONG), CUDA_FLASH),
        ({"cudnn": 91500}, LOW, (64, 64), (LONG, LONG), CUDA_FLASH),
        ({"cudnn": None}, LOW, (64, 64), (LONG, LONG), CUDA_FLASH),
        ({"enabled": False}, LOW, (64, 64), (LONG, LONG), CUDA_FLASH),
        ({"deterministic": True}, LOW, (64, 64), (LONG, LONG), CUDA_FLASH),
        ({"recompile": "1"}, LOW, (64, 64), (LONG, LONG), CUDA_FLASH),
        ({}, SINGLE, (64, 64), (LONG, LONG), CUDA_EFFICIENT),
        ({}, LOW, (129, 64), (LONG, LONG), CUDA_FLASH),
        ({}, LOW, (192, 128), (LONG, LONG), CUDA_FLASH),
        ({}, LOW, (64, 64), (LONG + 64, LONG), CUDA_FLASH),
        ({}, LOW, (64, 64), (LONG, LONG + 1), CUDA_FLASH),
        ({}, LOW, (64, 64), (512, LONG), CUDA_FLASH),  # of two rows of the batch: such tiles are packed
        # flash's own
        ({"capability": (8, 6)}, LOW, (200, 200), (10, 7), CUDA_EFFICIENT),
        ({"capability": (12, 1)}, LOW, (64, 217), (10, 7), CUDA_EFFICIENT),
        ({"capability": (8, 9)}, LOW, (192, 192), (10, 7), CUDA_FLASH),
        ({"capability": (8, 9)}, LOW, (225, 225), (10, 7), CUDA_FLASH),
        ({}, LOW, (200, 200), (10, 7), CUDA_FLASH),
    ],
    ids=str,
)
def test_gates_of_a_gpu(gpu, dtype, dims, rows, plain: Kernel, monkeypatch):
    """The rows of torch's sdp_utils.cpp that decide between its kernels, and ours on the shape of a tile."""
    on_gpu(NEW_GPU | gpu, monkeypatch)
    tensors: Any = [Like(dtype, torch.device("cuda"), (2, 4, n, d)) for n, d in zip(rows, dims, strict=True)]
    tensors = [tensors[0], tensors[1]._replace(shape=(2, 4, rows[1], dims[0])), tensors[1]]
    found = kernel_for_tiles(tensors)
    found = found if isinstance(found, ByTile) else ByTile((found,), (found,))
    assert [chosen(found, tensors, biased) for biased in (False, True)] == [plain, CUDA_EFFICIENT]
    if plain == CUDA_CUDNN_PREFERRED:  # has no windows and takes no packs
        for what in ({"window": (7, 0)}, {"pack": object()}):
            assert found.choose_for_tile(tensors, causal=False, biased=False, **what) == CUDA_FLASH
        assert (found.small_tiles, found.windows) == (True, True)


@pytest.fixture
def few_shapes(monkeypatch):
    """On a GPU on which no shape has been computed, kernels return themselves."""
    on_gpu(NEW_GPU, monkeypatch)
    monkeypatch.setattr(sdpa, "_computed_shapes", {})
    monkeypatch.setattr(SdpaKernel, "bind", lambda self, *specs, **options: self)


def make_tiles(
    length: int, *, batch: int = 1, dim: int = 64, value_dim: int = 64, dtype=LOW, device: str = "cuda:0"
) -> Iterator[Any]:
    """Query, key and value of the tiles of one call, with ``length`` rows, as an all-gather with a head-tail layout has
    them. In a backward they have a part of the heads."""
    half = length // 2
    shapes = (length, length), (length, half), (half, length), (length, 3 * half), (half, 4 * length)
    for q_rows, kv_rows in shapes:
        for heads in (8, 2):
            yield [
                Like(dtype, torch.device(device), (batch, heads // share, rows, size))
                for rows, share, size in ((q_rows, 1, dim), (kv_rows, 2, dim), (kv_rows, 2, value_dim))
            ]


def kernels_of(length: int, *, named: Kernel | None = None, phase: str = "forward", **options) -> set[Kernel]:
    """Which kernels compute the tiles of a call. A new kernel is chosen for each call, as for a mask of the call."""
    found = set()
    for tensors in make_tiles(length, **options):
        kernel = kernel_for_tiles(tensors, named=named)
        found.add(kernel.bind(phase, tensors, biased=False, causal=False, scale=1.0))
    return found


LENGTHS = [2048 + 256 * index + 256 for index in range(20)]


def test_cudnn_computes_sixteen_lengths(few_shapes):
    """The 17th and later ones are computed by flash, now and in a backward, and the first ones by cuDNN, for good."""
    for length in LENGTHS[:16]:
        for phase in ("forward", "forward", "backward"):
            assert kernels_of(length, phase=phase) == {CUDA_CUDNN_PREFERRED}
    for length in LENGTHS[16:]:
        for phase in ("forward", "forward", "backward"):
            with pytest.warns(
                UserWarning, match="80 shapes of tiles on cuda:0.*few lengths, or pass kernel=CUDA_CUDNN"
            ):
                assert kernels_of(length, phase=phase) == {CUDA_FLASH}
    for length in LENGTHS[:16]:
        assert kernels_of(length) == kernels_of(length, phase="backward") == {CUDA_CUDNN_PREFERRED}
    for length in LENGTHS:
        assert kernels_of(length, named=CUDA_CUDNN) == {CUDA_CUDNN}
    assert kernels_of(LENGTHS[-1], device="cuda:1") == {CUDA_CUDNN_PREFERRED}


@pytest.mark.parametrize("other", [{"batch": 2}, {"dim": 32}, {"value_dim": 32}, {"dtype": HALF}], ids=str)
def test_what_else_has_a_plan_of_its_own(few_shapes, other):
    for length in LENGTHS[:8]:
        assert kernels_of(length) == kernels_of(length, **other) == {CUDA_CUDNN_PREFERRED}
    with pytest.warns(UserWarning, match="80 shapes"):
        assert kernels_of(LENGTHS[8]) == {CUDA_FLASH}


def test_a_backward_alone_makes_plans(few_shapes):
    for length in LENGTHS[:16]:
        assert kernels_of(length, phase="backward") == {CUDA_CUDNN_PREFERRED}
    with pytest.warns(UserWarning, match="80 shapes"):
        assert kernels_of(LENGTHS[16]) == {CUDA_FLASH}


@pytest.mark.parametrize("computed", [0, 80])
def test_a_dry_run_makes_no_plan(computed: int, monkeypatch):
    """It does not count, and says what the first lengths get, whatever has been computed."""
    on_gpu(NEW_GPU, monkeypatch)
    layout, device, tables = head_tail(8192, 2), torch.device("cuda", 0), {}
    if computed:
        tables[device] = {(index,) for index in range(computed)}
    monkeypatch.setattr(sdpa, "_computed_shapes", tables)
    shapes = Shapes(heads=2, kv_heads=1, head_dim=64, value_dim=64, dtype=LOW, device=device)
    kernel: Any = kernel_for_tiles(shapes.specs())  # pyright: ignore[reportArgumentType]
    run = dry_run(Ring(), (layout, layout), Causal(), kernel, shapes, 0)
    assert {call.kernel for call in run.forward.calls} == {CUDA_CUDNN.name}
    assert {call.kernel for call in run.backward.calls} == {f"{CUDA_CUDNN.name}_backward"}
    assert sum(map(len, tables.values())) == computed


def chosen(line: ByTile, tensors: Any, biased: bool) -> Any:
    """The kernel of a tile."""
    return line.choose_for_tile(tensors, causal=False, biased=biased)


def kernel_of(kernel: Kernel) -> Any:
    return type(kernel) if isinstance(kernel, ReferenceKernel) else kernel


def test_a_named_kernel_is_never_left_out():
    """What it does not take at all it refuses. One that is told where its tiles are may compute more than attention."""
    inputs, _ = attention_inputs(length=4)
    with pytest.raises(NotImplementedError, match="on cuda, got"):
        kernel_for_tiles(inputs, named=CUDA_FLASH)

    class Placed(ReferenceKernel):
        positional: ClassVar[bool] = True

        def check(self, q, k, v, *, biased):
            if biased:
                raise NotImplementedError("Placed takes no mask")

    with pytest.raises(NotImplementedError, match="Placed takes no mask"):
        kernel_for_tiles(inputs, named=Placed())


def test_a_kernel_around_another_one_takes_the_same_tiles():
    """And computes by its own methods, whichever of them it defines."""

    class Louder(OtherBackward):
        def forward(self, *tensors, **options):
            out, lse = super().forward(*tensors, **options)
            return 2 * out, lse

        def backward(self, *tensors, **options):
            return self.inner.backward(*tensors, **options)

    (q, k, v), _ = attention_inputs(length=4)
    options = {"causal": True, "bias": None, "scale": 0.3}
    assert torch.equal(Louder(REFERENCE).forward(q, k, v, **options)[0], 2 * REFERENCE.forward(q, k, v, **options)[0])
    around = Louder(CUDA_CUDNN)
    assert not around.takes_all
    for rows in (128, 100):
        tensors: Any = [Like(LOW, torch.device("cuda"), (2, 4, rows, 64))] * 3
        given = {"causal": False, "biased": False}
        assert around.takes(*tensors, **given) == CUDA_CUDNN.takes(*tensors, **given) == (rows == 128)


class Wide(ReferenceKernel):
    """Prefers float32 tiles, as the reference does, and says what it was called with."""

    def __init__(self) -> None:
        self.biased: list[bool] = []

    def forward(self, *tensors, bias, **options):
        self.biased.append(bias is not None)
        return super().forward(*tensors, bias=bias, **options)


def test_tiles_of_two_kernels():
    plain, masked = Wide(), Wide()
    both = ByTile((plain,), (masked,))
    for index, biased in enumerate([True, False, False, True, False]):
        inputs, _ = attention_inputs(seed=10 * index, length=5)
        options = {"causal": False, "bias": randn(index, 5, 5) if biased else None, "scale": 0.3}
        assert torch.equal(both.forward(*inputs, **options)[0], REFERENCE.forward(*inputs, **options)[0])
    assert (plain.biased, masked.biased) == ([False] * 3, [True] * 2)
    # The dtype of tiles is one that both were checked for, or prefer.
    assert both.tile_dtype(torch.bfloat16) == torch.float32
    assert ByTile((CUDA_FLASH,), (masked,)).tile_dtype(torch.bfloat16) == torch.bfloat16
    assert ByTile((CUDA_FLASH,), (CUDA_EFFICIENT,)).tile_dtype(torch.float16) == torch.float16


class Calls(TorchDispatchMode):
    """The arguments with which attention ops were called, by their common names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, dict] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func.name():
            common = names_of(func).arguments
            values = dict(zip(common, args, strict=False)) | (kwargs or {})
            self.seen[func.name()] = {common[name]: value for name, value in values.items()}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=name_of)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("biased", [False, True])
def test_cuda_kernels_fit_the_schemas_of_this_torch(kernel, kv_heads: int, biased: bool):
    """Shapes and dtypes of both directions without a GPU. On a torch built for CPU, fake tensors must be meta's."""
    if biased and not kernel.takes_bias:
        pytest.skip("takes no mask")
    device = "cuda" if torch.backends.cuda.is_built() else "meta"
    calls = Calls()
    with FakeTensorMode(), calls:
        q, grad = (torch.empty(2, 4, 100, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
        k, v = (torch.empty(2, kv_heads, 77, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
        bias = torch.empty(100, 77, device=device) if biased else None
        options = {"causal": False, "bias": bias, "scale": 0.125}
        out, lse = kernel.forward(q, k, v, **options)
        assert (tuple(out.shape), out.dtype) == ((2, 4, 100, 64), torch.bfloat16)
        assert (tuple(lse.shape), lse.dtype) == ((2, 4, 100), torch.float32)
        # Rows of a longer logsumexp, as the plan's tiles are.
        merged = torch.empty(2, 4, 164, dtype=torch.float32, device=device)[:, :, 64:]
        # What tiles merge into is [B, H, L, D] in memory, and a gradient may have any strides.
        out = out.clone(memory_format=torch.contiguous_format)
        grads = kernel.backward(grad.mT.contiguous().mT, q.mT.contiguous().mT, k, v, out, merged, **options)
    assert [tuple(x.shape) for x in grads] == [tuple(x.shape) for x in (q, k, v)]
    assert {x.dtype for x in grads} == {torch.bfloat16}
    forward, backward = calls.seen[kernel.forward_op.name()], calls.seen[f"{kernel.forward_op.name()}_backward"]
    assert forward.get("compute_log_sumexp", True)  # efficient attention leaves it out unless asked
    assert (forward["scale"], backward["scale"]) == (0.125, 0.125)
    # The CUDA kernels take the pointer and assume the strides.
    assert backward["logsumexp"].is_contiguous()
    assert {backward[name].stride(-1) for name in ("query", "key", "value", "grad_out", "out")} == {1}
    if backward["out"].dtype == torch.bfloat16 and kernel.takes_bias and not kernel.lse_column:
        assert backward["out"].stride(2) == 4 * 64  # efficient attention steps over all heads from row to row
    if biased:
        assert (tuple(forward["attn_mask"].shape), forward["attn_mask"].dtype) == ((2, 4, 100, 77), torch.bfloat16)
        assert forward["attn_mask"].stride(2) % 8 == 0  # pieces of 16 bytes
