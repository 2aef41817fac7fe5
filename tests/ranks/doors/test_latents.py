"""Multi-head latent attention: latents travel in place of heads, exactly, and in the bytes of latents."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AllGather,
    Causal,
    Documents,
    Full,
    Mask,
    PerRow,
    Ring,
    SequenceLayout,
    SlidingWindow,
    Ulysses,
    context_attention,
    context_latent_attention,
    contiguous,
    head_tail,
)
from cp_styles.explain import H100, explain, explain_calls
from cp_styles.explain.events import MemoryOp
from cp_styles.kernels import FlexKernel, ReferenceKernel
from cp_styles.kernels.base import TilePositions
from cp_styles.kernels.latent import LatentKernel
from cp_styles.strategies.packs import PackedTiles
from cp_styles.testing import CommunicationTrace, MemoryTrace, RankError, run_ranks
from tests.covering import at_night, sampled
from tests.oracle import allowed, dense_attention, error, randn
from tests.ranks.attention_case import cp_mesh
from tests.tables import uneven
from tests.varlen_op import STAND_IN, varlen_ops_on_cpu

# float64 sums in another order give 1e-15; a latent that is counted twice gives 1e-1.
EXACT = 1e-12
BATCH, HEADS, LENGTH, LATENT, ROTARY, NOPE, VALUE = 2, 4, 23, 10, 4, 6, 5
DIMS = (2, 1, 1)  # the sequence dims of query, latent and rotary key
DOCUMENTS = (9, 1, 13)


def causal(query: int, key: int) -> bool:
    return key <= query


def in_document(query: int, key: int) -> bool:
    return causal(query, key) and (query < 9) == (key < 9) and (query < 10) == (key < 10)


MASKS: dict[str, tuple[Mask, list[Callable[[int, int], bool]]]] = {
    "full": (Full(), [lambda query, key: True]),
    "causal": (Causal(), [causal]),
    "window": (SlidingWindow(4, 0), [lambda query, key: 0 <= query - key <= 4]),
    "documents": (Documents(DOCUMENTS) & Causal(), [in_document]),
    "another in each row": (PerRow((Causal(), Documents(DOCUMENTS) & Causal())), [causal, in_document]),
}


def expand(latent: torch.Tensor, rot: torch.Tensor, weight: torch.Tensor, heads: int = HEADS) -> list[torch.Tensor]:
    """Keys and values of all heads, as the papers have them."""
    kv = F.linear(latent, weight).unflatten(-1, (heads, -1)).transpose(1, 2)
    nope = kv.shape[-1] - VALUE
    return [torch.cat((kv[..., :nope], rot[:, None].expand(-1, heads, -1, -1)), -1), kv[..., nope:]]


@cache
def inputs(length: int = LENGTH, heads: int = HEADS) -> list[torch.Tensor]:
    """Query, latent, rotary key and weight of the whole sequence, and the gradient of the output."""
    rows = heads * (NOPE + VALUE)
    shapes = (BATCH, heads, length, NOPE + ROTARY), (BATCH, length, LATENT), (BATCH, length, ROTARY), (rows, LATENT)
    return [randn(seed, *shape) for seed, shape in enumerate((*shapes, (BATCH, heads, length, VALUE)))]


@cache
def expected(mask: str = "causal", length: int = LENGTH, heads: int = HEADS) -> list[torch.Tensor]:
    """The output and the gradients of all inputs, of one process."""
    *tensors, cotangent = inputs(length, heads)
    leaves = [x.clone().requires_grad_() for x in tensors]
    sees = torch.stack([allowed(each, length, length) for each in MASKS[mask][1]])[:, None]
    out = dense_attention(leaves[0], *expand(*leaves[1:], heads), sees)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def attend(mesh: Any, tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
    q, latent, rot, weight = tensors
    return context_latent_attention(q, latent, rot, weight, mesh, **options)


def leaves_of(layout: SequenceLayout, rank: int, heads: int = HEADS) -> list[torch.Tensor]:
    q, latent, rot, weight, _ = inputs(layout.length, heads)
    parts = [layout.shard(x, dim, rank) for x, dim in zip((q, latent, rot), DIMS, strict=True)]
    return [x.clone().requires_grad_() for x in (*parts, weight)]


def errors(
    run: Callable[[Any, list[torch.Tensor], SequenceLayout], torch.Tensor],
    ranks: int,
    *,
    layout: Callable[[int, int], SequenceLayout] = head_tail,
    mask: str = "causal",
    length: int = LENGTH,
    heads: int = HEADS,
) -> list[float]:
    """Of the output, and of the gradients of query, latent, rotary key and weight, summed over the ranks."""
    whole, cut = expected(mask, length, heads), layout(length, ranks)

    def on(rank: int) -> tuple[list[float], torch.Tensor]:
        leaves = leaves_of(cut, rank, heads)
        out = run(cp_mesh(ranks), leaves, cut)
        out.backward(cut.shard(inputs(length, heads)[4], 2, rank))
        found = [out.detach(), *(leaf.grad for leaf in leaves)]
        pairs = zip(found[:4], whole[:4], (2, *DIMS), strict=True)
        assert leaves[3].grad is not None
        return [error(x, cut.shard(y, dim, rank), whole=y) for x, y, dim in pairs], leaves[3].grad  # pyright: ignore

    found = run_ranks(on, ranks)
    parts = [max(column) for column in zip(*(part for part, _ in found), strict=True)]
    return [*parts, error(sum(share for _, share in found), whole[4])]  # pyright: ignore


STRATEGIES = [Ring(), Ring(keep=0), AllGather(), AllGather(keep=9), Ulysses(), Ulysses(size=2), Ulysses(inner=Ring(0))]


@sampled(
    2,
    lambda ranks, strategy, **_: getattr(strategy, "size", None) is None or ranks % 2 == 0,
    ranks=[1, 2, 3, 4, 8],
    strategy=STRATEGIES,
    layout=[head_tail, contiguous, uneven],
    mask=list(MASKS),
)
def test_output_and_gradients_are_exact(ranks: int, strategy: Any, layout: Any, mask: str):
    """More ranks than heads, and ranks without tokens, included."""

    def run(mesh: Any, leaves: list[torch.Tensor], cut: SequenceLayout) -> torch.Tensor:
        return attend(mesh, leaves, layout=cut, mask=MASKS[mask][0], strategy=strategy)

    assert max(errors(run, ranks, layout=layout, mask=mask)) < EXACT


def checkpointed(reentrant: bool, mesh: Any, leaves: list[torch.Tensor], cut: SequenceLayout) -> torch.Tensor:
    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return attend(mesh, list(tensors), layout=cut, mask=Causal())

    return checkpoint(run, *leaves, use_reentrant=reentrant)  # pyright: ignore


def transposed(mesh: Any, leaves: list[torch.Tensor], cut: SequenceLayout) -> torch.Tensor:
    """Strides as projections and unusual weights leave them."""
    q, latent, rot, weight = leaves
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.cat((latent, rot), -1)
    latent, rot = both.split((LATENT, ROTARY), -1)
    return attend(mesh, [q, latent, rot, weight.mT.contiguous().mT], layout=cut, mask=Causal())


@pytest.mark.parametrize("run", [partial(checkpointed, False), partial(checkpointed, True), transposed])
def test_as_it_is_called_in_a_model(run: Any):
    assert max(errors(run, 2)) < EXACT


@pytest.mark.parametrize("whole_graph", [True, *at_night(False)])
def test_compiled(whole_graph: bool):
    """The weight is an input of the op in the graph, so its gradient comes out of it."""
    torch._dynamo.reset()

    def run(mesh: Any, leaves: list[torch.Tensor], cut: SequenceLayout) -> torch.Tensor:
        mask = Causal()

        def call(q: torch.Tensor, latent: torch.Tensor, rot: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return context_latent_attention(q, latent, rot, weight, mesh, mask=mask, layout=cut)

        options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True} if whole_graph else {}
        return torch.compile(call, **options)(*leaves)

    assert max(errors(run, 2)) < EXACT


def test_compiled_once_for_all_lengths():
    torch._dynamo.reset()
    lengths = (23, 40, 17)

    def on(rank: int) -> list[float]:
        mesh, mask, found = cp_mesh(2), Causal(), []

        def call(q: torch.Tensor, latent: torch.Tensor, rot: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return context_latent_attention(q, latent, rot, weight, mesh, mask=mask, layout=head_tail)

        compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
        for length in lengths:
            cut, whole = head_tail(length, 2), expected("causal", length)
            leaves = leaves_of(cut, rank)
            out = compiled(*leaves)
            out.backward(cut.shard(inputs(length)[4], 2, rank))
            pairs = zip([out.detach(), *(x.grad for x in leaves[:3])], whole, (2, *DIMS), strict=False)
            found += [error(x, cut.shard(y, dim, rank), whole=y) for x, y, dim in pairs]  # pyright: ignore
        return found

    assert max(map(max, run_ranks(on, 2))) < EXACT


def test_compiled_in_bfloat16():
    """A graph reads the gradient of the weight, which is summed in float32, in the dtype that it declares."""
    torch._dynamo.reset()
    cut = head_tail(LENGTH, 2)

    def on(rank: int) -> list[torch.Tensor]:
        found = []
        for how in (lambda call: call, torch.compile):
            leaves = [x.detach().bfloat16().requires_grad_() for x in leaves_of(cut, rank)]
            mesh, mask = cp_mesh(2), Causal()

            def call(*tensors: torch.Tensor) -> torch.Tensor:
                # A view would not do: autograd casts what leaves the graph.
                scaled = [*tensors[:3], tensors[3] * 2]
                return attend(mesh, scaled, layout=cut, mask=mask)  # noqa: B023

            out = how(call)(*leaves)
            found.append(torch.autograd.grad(out.square().sum() + leaves[3].sum(), leaves))
        return [error(x.double(), y.double()) for x, y in zip(*found, strict=True)]  # pyright: ignore

    assert max(map(max, run_ranks(on, 2))) == 0


@pytest.mark.parametrize("which", range(4))
def test_only_one_input_requires_grad(which: int):
    """As with a frozen model: the query, the latent, the rotary key, or the weight alone."""
    cut, whole = head_tail(LENGTH, 2), expected()[1 + which]

    def on(rank: int) -> torch.Tensor:
        leaves = [x.requires_grad_(index == which) for index, x in enumerate(leaves_of(cut, rank))]
        out = attend(cp_mesh(2), leaves, layout=cut, mask=Causal())
        out.backward(cut.shard(inputs()[4], 2, rank))
        assert [leaf.grad is not None for leaf in leaves] == [index == which for index in range(4)]
        return leaves[which].grad  # pyright: ignore

    parts = run_ranks(on, 2)
    assert error(sum(parts) if which == 3 else cut.unshard(parts, DIMS[which]), whole) < EXACT  # pyright: ignore


def test_many_heads_are_expanded_in_ranges():
    """640 heads of 64 rows in a batch of 2 are 81,920 rows, of which a tile expands 2^16 at once."""
    calls: list[int] = []

    class Counted(ReferenceKernel):
        def forward(self, q, k, v, **options):
            calls.append(k.shape[1])
            return super().forward(q, k, v, **options)

    def run(mesh: Any, leaves: list[torch.Tensor], cut: SequenceLayout) -> torch.Tensor:
        return attend(mesh, leaves, layout=cut, mask=Causal(), kernel=Counted())

    assert max(errors(run, 1, length=64, heads=640)) < EXACT
    assert calls == [512, 128]


@pytest.mark.parametrize("heads_at_once", [1, 3, 8])
@pytest.mark.parametrize("options", ["causal", "a bias for each head", "one bias", "positions"])
def test_a_tile(heads_at_once: int, options: str):
    """The kernel alone, in ranges of heads, against the same kernel for expanded keys."""
    q, latent, rot, weight, grad = inputs()
    bias = {"a bias for each head": randn(8, 1, HEADS, LENGTH, LENGTH), "one bias": randn(9, LENGTH, LENGTH)}
    given: dict[str, Any] = {"causal": options == "causal", "bias": bias.get(options), "scale": 0.3}
    inner: Any = ReferenceKernel()
    if options == "positions":
        inner = FlexKernel(lambda score, b, h, q, k: score + 0.1 * h * (q - k))
        given["where"] = TilePositions(torch.arange(LENGTH), torch.arange(LENGTH), 0)
    k, v = (x.requires_grad_() for x in expand(latent, rot, weight))
    out, lse = inner.forward(q, k.detach(), v.detach(), **given)
    dq, dk, dv = inner.backward(grad, q, k.detach(), v.detach(), out, lse, **given)
    leaves = [x.clone().requires_grad_() for x in (latent, rot, weight)]
    whole = torch.autograd.grad(expand(*leaves), leaves, [dk, dv])
    kernel = LatentKernel(LATENT, NOPE, VALUE, inner, head_rows=heads_at_once * BATCH * LENGTH)
    kernel, (share,) = kernel.with_learned(weight.reshape(-1), backward=True)
    found = kernel.forward(q, latent[:, None], rot[:, None], **given)
    assert max(error(x, y) for x, y in zip(found, (out, lse), strict=True)) < EXACT
    found = kernel.backward(grad, q, latent[:, None], rot[:, None], out, lse, **given)
    grads = zip(found, (dq, whole[0][:, None], whole[1][:, None]), strict=True)
    assert max(error(x, y) for x, y in grads) < EXACT
    assert error(share.flatten(0, 1), whole[2]) < EXACT


PACKED = (40, 3, 70, 1, 35, 5, 33, 64)  # on both sides of the plan's shortest run, 32 rows


def packed(query: int, key: int) -> bool:
    ends = list(accumulate(PACKED))
    return causal(query, key) and bisect_right(ends, query) == bisect_right(ends, key)


MASKS["packed documents"] = Documents(PACKED) & Causal(), [packed]
MASKS["a wide window"] = SlidingWindow(40, 0), [lambda query, key: 0 <= query - key <= 40]


@pytest.mark.parametrize("mask", ["packed documents", "a wide window"])
@pytest.mark.parametrize("strategy", [Ring(), Ulysses()])
def test_documents_and_windows_in_one_call_of_a_kernel(strategy: Any, mask: str, monkeypatch: pytest.MonkeyPatch):
    """By a stand-in for CUDA's kernel. Each call has a kernel with its own weight. Indices of documents stay."""
    made: list[PackedTiles] = []
    make = PackedTiles.on

    def counted(self: PackedTiles, *where: Any) -> Any:
        made.append(self)
        return make(self, *where)

    monkeypatch.setattr(PackedTiles, "on", counted)

    def run(mesh: Any, leaves: list[torch.Tensor], cut: SequenceLayout) -> torch.Tensor:
        options: dict[str, Any] = {"layout": cut, "mask": MASKS[mask][0], "kernel": STAND_IN, "strategy": strategy}
        attend(mesh, leaves, **options)
        return attend(mesh, leaves, **options)

    with varlen_ops_on_cpu():
        assert max(errors(run, 2, mask=mask, length=sum(PACKED), layout=contiguous)) < EXACT
    if strategy == Ring():
        assert len(made) == len({*made}) == (2 if mask == "packed documents" else 0)  # one a rank


def bytes_sent(ranks: int, strategy: Any, *, latents: bool, dtype: torch.dtype = torch.float32, trains: bool = True):
    """Of all ranks, forward and backward, without the agreement."""
    cut = head_tail(24, ranks)

    def on(rank: int) -> tuple[int, int]:
        q, latent, rot, weight = (x.detach().to(dtype).requires_grad_(trains) for x in leaves_of(cut, rank))
        sent = []
        options: dict[str, Any] = {"layout": cut, "mask": Causal(), "strategy": strategy}
        with CommunicationTrace() as trace:
            if latents:
                out = context_latent_attention(q, latent, rot, weight, cp_mesh(ranks), **options)
            else:
                out = context_attention(q, *expand(latent, rot, weight), cp_mesh(ranks), **options)
        sent.append(sum(size for name, size in trace.events if name in ("send", "all_to_all")))
        with CommunicationTrace() as trace:
            if trains:
                out.sum().backward()
        sent.append(sum(size for name, size in trace.events if name in ("send", "all_to_all")))
        return sent[0], sent[1]

    return tuple(map(sum, zip(*run_ranks(on, ranks), strict=True)))


@pytest.mark.parametrize("strategy", [Ring(), AllGather()])
def test_the_bytes_of_latents(strategy: Any):
    """Of 4 ranks, half of the 12 pairs need all 6 rows of each other and half of them 3: 54 rows. Forward: a row is a
    latent and a rotary key. Backward: their gradients, in float32, and again the rows that are
    not kept: kept are 6 rows on rank 0 and 3 on the remaining ranks, 15. Heads travel in the same rows.
    """
    row, heads_row = BATCH * (LATENT + ROTARY), BATCH * HEADS * (NOPE + ROTARY + VALUE)
    for dtype in (torch.float32, torch.bfloat16):
        rows = [54 * dtype.itemsize, 54 * 4 + (54 - 15) * dtype.itemsize]
        assert bytes_sent(4, strategy, latents=True, dtype=dtype) == tuple(row * number for number in rows)
        assert bytes_sent(4, strategy, latents=False, dtype=dtype) == tuple(heads_row * number for number in rows)
    assert bytes_sent(4, strategy, latents=True, trains=False) == (54 * row * 4, 0)


def test_what_explain_predicts_is_sent():
    """And for DeepSeek-V3's dims a row of latents is 71 times smaller than a row of heads."""
    options: dict[str, Any] = {"heads": HEADS, "head_dim": NOPE + ROTARY, "value_dim": VALUE, "batch": BATCH}
    options |= {"ranks": 4, "dtype": torch.float32, "device": "cpu"}
    for strategy in (Ring(), AllGather(keep=0), Ulysses()):
        for latent in ({"latent_dim": LATENT, "rotary_dim": ROTARY}, {}):
            runs = explain(24, strategy=strategy, **options, **latent).runs.values()
            predicted = tuple(
                sum(sum(getattr(run, phase).sent.values()) for run in runs) for phase in ("forward", "backward")
            )
            assert predicted == bytes_sent(4, strategy, latents=bool(latent))
    large: dict[str, Any] = {"ranks": 8, "heads": 128, "head_dim": 192, "value_dim": 128, "hardware": H100, "rank": 0}
    latents, heads = (explain(2**14, **large, **given) for given in ({"latent_dim": 512, "rotary_dim": 64}, {}))
    assert heads.sent() * 576 == latents.sent() * 40960
    assert heads.kept_memory > 2 * latents.kept_memory
    assert "latents of 512 + 64 numbers travel: 1.1 KiB a row, 80.0 KiB as heads" in str(latents)
    assert "latents" not in str(heads)
    # The receiver expands every row once: rank 0, which has the last positions, all of them.
    operations = [event for event in latents.runs[0].forward.events if isinstance(event, MemoryOp)]
    products = sum(operation.flops for operation in operations)
    assert products == 2**14 * 2 * 512 * 128 * (128 + 128)
    hardware = replace(H100, op_floor=0.0, copy_bandwidth=1e30)
    forward, _ = explain(2**14, **large | {"hardware": hardware, "latent_dim": 512, "rotary_dim": 64}).seconds
    assert forward.copies == pytest.approx(products / (H100.flops * H100.cudnn_rate))
    with pytest.raises(ValueError, match="latents are expanded to all query heads"):
        explain(64, ranks=2, heads=4, kv_heads=2, head_dim=8, latent_dim=16)


@pytest.mark.nightly
def test_the_table_of_the_page():
    page = (Path(__file__).parents[3] / "tutorials/performance.md").read_text()
    rows = re.findall(r"^\| `(.+)` \| (heads|latents) \| (.+) \| (\d+) ms \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    large: dict[str, Any] = {"ranks": 64, "heads": 128, "head_dim": 192, "value_dim": 128, "hardware": H100, "rank": 0}
    for strategy, kind, sent, time, peak in rows:
        given = {"latent_dim": 512, "rotary_dim": 64} if kind == "latents" else {}
        found = explain(2**17, strategy=eval(strategy), **large, **given)
        sizes = found.sent() + found.sent("backward"), found.peak_memory
        for size, shown in zip(sizes, (sent, peak), strict=True):
            number, unit = shown.split()
            assert float(number) == pytest.approx(size / {"MiB": 2**20, "GiB": 2**30}[unit], rel=0.01, abs=0.05)
        assert int(time) == round(1e3 * sum(phase.total for phase in found.seconds))


def test_a_call_is_explained():
    def on(rank: int) -> Any:
        cut = head_tail(24, 2)
        with explain_calls() as calls:
            attend(cp_mesh(2), leaves_of(cut, rank), layout=cut, mask=Causal())
        (call,) = calls
        return call.shapes.latent, call.sent()

    shapes = {"ranks": 2, "heads": HEADS, "head_dim": NOPE + ROTARY, "value_dim": VALUE, "batch": BATCH}
    same = explain(24, **shapes, dtype=torch.float64, device="cpu", latent_dim=LATENT, rotary_dim=ROTARY)
    assert run_ranks(on, 2) == [((LATENT, ROTARY), same.sent())] * 2


@pytest.mark.usefixtures("large_blocks")
@sampled(1, dtype=[torch.float32, torch.bfloat16], strategy=[Ring(), Ring(keep=0), AllGather(), Ulysses()])
def test_the_memory_is_as_explained(strategy: Any, dtype: torch.dtype):
    """Latents are kept, and no heads. The peaks include expanded heads, their gradients and the weight's."""
    heads, latent_dim, rotary_dim, dim, rows = 8, 64, 16, 64, 128
    cut = head_tail(4 * rows, 4)
    shapes = (1, rows, heads, dim), (1, rows, latent_dim), (1, rows, rotary_dim), (heads * (48 + dim), latent_dim)

    def on(rank: int) -> tuple[int, ...]:
        q, *others = (randn(seed, *shape).to(dtype) for seed, shape in enumerate(shapes))
        leaves = [x.requires_grad_() for x in (q.transpose(1, 2), *others)]
        grad, mesh = torch.ones(1, rows, heads, dim, dtype=dtype).transpose(1, 2), cp_mesh(4)
        options: dict[str, Any] = {"layout": cut, "mask": Causal(), "strategy": strategy}
        attend(mesh, leaves, **options).backward(grad)  # tables of plans
        for leaf in leaves:
            leaf.grad = None
        with MemoryTrace() as trace:
            out = attend(mesh, leaves, **options)
            kept, forward = trace.live, trace.peak
            trace.reset()
            out.backward(grad)
        return kept, forward, trace.peak

    explained = explain(
        4 * rows,
        ranks=4,
        heads=heads,
        head_dim=dim,
        latent_dim=latent_dim,
        rotary_dim=rotary_dim,
        dtype=dtype,
        device="cpu",
        strategy=strategy,
    )
    for rank, measured in enumerate(run_ranks(on, 4)):
        run = explained.runs[rank]
        predicted = sum(run.forward.live_at_end.values()), run.forward.peak, run.backward.peak
        assert max(abs(x - y) for x, y in zip(measured, predicted, strict=True)) < 1024  # the agreement of the ranks


@pytest.mark.parametrize("strategy", [Ring(), Ulysses()])
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_as_good_as_one_device(strategy: Any, autocast: bool):
    """At most 1.1 times the error of torch's attention for expanded keys, of the output and of each gradient."""
    length, ranks, heads = 256, 4, 8
    cut, whole = head_tail(length, ranks), expected("causal", length, heads)
    cotangent = inputs(length, heads)[4].bfloat16()

    def as_parameters(x: torch.Tensor) -> torch.Tensor:
        return x.detach().bfloat16().to(torch.float32 if autocast else torch.bfloat16).requires_grad_()

    def ratio_of(found: list[torch.Tensor], alone: list[torch.Tensor]) -> float:
        pairs = zip(found, alone, whole, strict=True)
        return max(error(x.double(), z) / error(y.double(), z) for x, y, z in pairs)

    leaves = [as_parameters(x) for x in inputs(length, heads)[:4]]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = F.scaled_dot_product_attention(leaves[0], *expand(*leaves[1:], heads), is_causal=True)
    out.backward(cotangent)
    alone = [out.detach(), *(x.grad for x in leaves)]

    def on(rank: int) -> list[torch.Tensor]:
        own = [as_parameters(x) for x in leaves_of(cut, rank, heads)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = attend(cp_mesh(ranks), own, layout=cut, mask=Causal(), strategy=strategy)
        assert out.dtype == torch.bfloat16
        out.backward(cut.shard(cotangent, 2, rank))
        return [out.detach(), *(x.grad for x in own)]  # pyright: ignore

    parts = list(zip(*run_ranks(on, ranks), strict=True))
    found = [cut.unshard(column, dim) for column, dim in zip(parts[:4], (2, *DIMS), strict=True)]
    assert ratio_of([*found, sum(x.float() for x in parts[4])], alone) <= 1.1  # pyright: ignore


class LatentModule(nn.Module):
    """A user's attention with latents, in plain torch; with a mesh, over its ranks."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.q = nn.Linear(width, HEADS * (NOPE + ROTARY), bias=False)
        self.down = nn.Linear(width, LATENT + ROTARY, bias=False)
        self.norm = nn.RMSNorm(LATENT)
        self.up = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.out = nn.Linear(HEADS * VALUE, width, bias=False)
        self.double()
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = randn(40 + seed, *parameter.shape) * parameter.shape[-1] ** -0.5

    def forward(self, x: torch.Tensor, mesh: Any = None, layout: SequenceLayout | None = None) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        latent, rot = self.down(x).split((LATENT, ROTARY), -1)
        latent = self.norm(latent)
        if mesh is None:
            out = F.scaled_dot_product_attention(q, *expand(latent, rot, self.up.weight), is_causal=True)
        else:
            out = context_latent_attention(q, latent, rot, self.up.weight, mesh, mask=Causal(), layout=layout)
        return self.out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("wrap", ["FSDP2", "DDP", "compiled"])
def test_in_a_module_of_ones_own(wrap: str):
    """The gradient of the expansion's weight is reduced with the gradients of the remaining parameters."""
    torch._dynamo.reset()
    x, cotangent = randn(1, BATCH, LENGTH, 12), randn(2, BATCH, LENGTH, 12)
    alone = LatentModule()
    out = alone(x)
    out.backward(cotangent)
    cut = head_tail(LENGTH, 2)

    def on(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model: Any = LatentModule()
        wrapped = model
        if wrap == "FSDP2":
            fully_shard(model, mesh=mesh)
        elif wrap == "DDP":
            wrapped = DistributedDataParallel(model, process_group=mesh.get_group())
        else:
            wrapped = torch.compile(model)
        found = wrapped(cut.shard(x, 1, rank), mesh, cut)
        found.backward(cut.shard(cotangent, 1, rank))
        errors = [error(found.detach(), cut.shard(out.detach(), 1, rank), whole=out.detach())]
        for own, whole in zip(model.parameters(), alone.parameters(), strict=True):
            grad = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
            factor = 1 if wrap == "compiled" else 2  # FSDP2 and DDP average
            if wrap == "compiled":
                torch.distributed.all_reduce(grad)
            errors.append(error(grad * factor, whole.grad))
        return errors

    assert max(map(max, run_ranks(on, 2))) < EXACT


def test_heads_that_are_cut_over_another_axis():
    """Each rank of tp expands its heads. The gradients of latents, which are whole there, are added over tp."""
    whole, cut = expected(), head_tail(LENGTH, 2)

    def on(rank: int) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        cp, tp = mesh["cp"].get_local_rank(), mesh["tp"].get_local_rank()
        q, latent, rot, weight = leaves_of(cut, cp)
        heads, rows = (slice(tp * size // 2, (tp + 1) * size // 2) for size in (HEADS, len(weight)))
        out = attend(mesh["cp"], [q[:, heads], latent, rot, weight[rows]], layout=cut, mask=Causal())
        out.backward(cut.shard(inputs()[4], 2, cp)[:, heads])
        found = [out.detach(), q.grad, latent.grad, rot.grad, weight.grad]
        for grad in found[1:]:
            torch.distributed.all_reduce(grad, group=mesh["tp"].get_group())
        return found  # pyright: ignore

    parts = list(zip(*run_ranks(on, 4), strict=True))  # by quantity, then by rank: (cp, tp) = 00, 01, 10, 11
    outs = [torch.cat(parts[0][first : first + 2], 1) for first in (0, 2)]
    assert error(cut.unshard(outs, 2), whole[0]) < EXACT
    for found, dim, wanted in zip(parts[1:4], DIMS, whole[1:4], strict=True):
        assert error(cut.unshard(list(found[::2]), dim), wanted) < EXACT
    assert error(sum(parts[4][::2]), whole[4]) < EXACT  # pyright: ignore


Wrong = Callable[[list[torch.Tensor]], list[Any]]
MISTAKES: dict[str, tuple[Wrong, str]] = {
    "rows of the weight": (
        lambda x: [*x[:3], x[3][:-1]],
        r"weight of shape \(43, 10\) does not expand latents of 10 numbers to 4 heads",
    ),
    "columns of the weight": (
        lambda x: [*x[:3], x[3][:, :-1]],
        r"weight of shape \(44, 9\) does not expand latents of 10 numbers",
    ),
    "tokens of the rotary key": (lambda x: [*x[:2], x[2][:, 1:], x[3]], "latent and rot are of different tokens"),
    "dims of the latent": (lambda x: [x[0], x[1][:, None], *x[2:]], r"pass q \[B, H, L, D\], latent \[B, M, R\]"),
    "a dtype": (lambda x: [*x[:3], x[3].float()], r"pass weight.to\(latent.dtype\)"),
    "a dtype of queries": (lambda x: [x[0].float(), *x[1:]], "must share one floating-point dtype"),
    "a DTensor": (
        lambda x: [*x[:3], DTensor.from_local(x[3], cp_mesh(2), [Replicate()], run_check=False)],
        "weight is a DTensor",
    ),
    "no values": (lambda x: [*x[:3], x[3][: HEADS * NOPE]], "does not expand latents"),
    "an object": (lambda x: [*x[:3], None], "weight must be a tensor, got NoneType"),
}


@pytest.mark.parametrize("which", [*MISTAKES, "another dim of values"])
@pytest.mark.parametrize("compiled", [False, *at_night(True)])
def test_a_mistake_on_one_rank_is_an_error_on_both(which: str, compiled: bool):
    """Another dim of values alone makes sense, and not together with the remaining ranks."""
    cut = head_tail(LENGTH, 2)
    make, words = MISTAKES.get(which) or (lambda x: [*x[:3], x[3][: HEADS * (NOPE + 1)]], "value_dim=1")

    def on(rank: int) -> None:
        mesh, tensors = cp_mesh(2), [x.detach() for x in leaves_of(cut, rank)]

        def call(*tensors: torch.Tensor) -> torch.Tensor:
            return attend(mesh, list(tensors), layout=cut)

        (torch.compile(call, backend="eager") if compiled else call)(*(make(tensors) if rank == 0 else tensors))

    if compiled:
        torch._dynamo.reset()
    with pytest.raises(RankError) as found:
        run_ranks(on, 2)
    assert found.value.errors.keys() == {0, 1}
    assert all("context_latent_attention" in str(problem) for problem in found.value.errors.values())
    assert re.search(words, str(found.value.errors[0]))
