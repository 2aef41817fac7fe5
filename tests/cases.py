"""Attentions of a generator: each is exact against the oracle, or every rank refuses it.

A :class:`Case` says everything about an attention: door, strategy, layout, mask and so on. :func:`judge` runs it, with
ranks that are threads. Where they return results, output and gradients are compared with dense attention in float64.
Where they raise, all must raise, and each an error of this package: one of LIMITS, if all ranks do the same.

``python -m tests.cases`` prints what the default run covers.

:func:`draw` makes the case of a seed, of values in DIMENSIONS. :func:`covering` makes few cases in which any two values
of any two dimensions meet. In a case with ``odd``, one rank has one thing different. A difference that changes nothing,
such as strides, must leave the result exact. Otherwise the ranks do not do one attention, and all must raise.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import accumulate, combinations
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from cp_styles import Checks, SequenceScope, save_attention, sum_gradients
from cp_styles._lib.compat import cpu_backend_of
from cp_styles.comm.point_to_point import TransferError, end_connections
from cp_styles.layouts import SequenceLayout
from cp_styles.mixers.selection import selected_keys
from cp_styles.testing import RankTimeout
from tests import gpu_record
from tests.cuda_ops import cuda_ops_on_cpu
from tests.device import DEVICE, ON_GPU, here, run_ranks, there
from tests.doors import DOORS, FlexCore, PackedCore, door
from tests.oracle import MASKS, VANISHING, MaskValue, Sizes, dense_attention, document_lengths, error, randn
from tests.ranks import flex_case
from tests.seeds import ACTS, OddRank, Verdict, shortened
from tests.tables import DTYPES, KERNELS, LAYOUTS, STRATEGIES, Cut, cut_by, divides

# Seconds until a rank that waits for another counts as a failure: many times what a case takes on a machine that is as
# busy as it may be. A rank that compiles holds torch's lock for all of them.
WAIT, WAIT_COMPILED = 60.0, 300.0
AVERAGED = 160  # rows, whose error in low precision is an average
PLANTED = "planted by the fuzzer"

AGREEMENTS = {"every call": Checks(), "none": Checks(agreement=False)}
# What is refused although all ranks do the same, but for strides.
LIMITS = re.compile(
    "does not divide the|needs the lengths of all ranks|positions of the two sequences do not correspond|"
    "define it at the top level of a module|the mask of a scope cannot hold tensors|"
    "2 Dense masks under torch.compile"
)
# Score functions of FlexAttention, and what they learn for so many heads and positions.
SCORES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int, int], list[torch.Tensor]]]] = {
    "alibi": (flex_case.alibi, lambda heads, length: []),
    "relative bias": (flex_case.relative_bias, lambda heads, length: [randn(20, heads, 2 * length)]),
    "softcap": (flex_case.softcap, lambda heads, length: []),
    "learned": (flex_case.learned_softcap, lambda heads, length: [randn(21) ** 2 + 1, randn(22, heads) * 0.1]),
    "masking": (flex_case.own_mask, lambda heads, length: []),
}
STRIDES = ("plain", "heads inside", "padded rows", "numbers apart")
# Keys and values with strides of 0, as ``expand`` makes them: of one row, of one head ...
EXPANDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of one row": lambda x: x[:1].expand_as(x),
    "of one head": lambda x: x[:, :1].expand_as(x),
    "of one position": lambda x: x[:, :, :1].expand_as(x),
    "of one number": lambda x: x[..., :1].expand_as(x),
    "of one number in all": lambda x: x[:1, :1, :1, :1].expand_as(x),
}
EQUAL_KEYS = ("of one position", "of one number in all")
# The call of varlen_attn that is a mask: whether of documents, and its window.
PACKS = {
    "full": (False, (-1, -1)),
    "causal": (False, (-1, 0)),
    "window": (False, (3, 0)),
    "window both sides": (False, (2, 4)),
    "window ahead": (False, (-1, 2)),
    "documents": (True, (-1, -1)),
    "causal documents": (True, (-1, 0)),
    "windowed documents": (True, (2, 1)),
}


@dataclass(frozen=True)
class Case(OddRank):
    """One attention, which may be called twice. The defaults are the simplest values.

    ``then`` is (field, its value) of a second call, which is the one that is compared; ``odd`` is (rank, field or act,
    its value).
    """

    seed: int = 0
    door: str = "function"
    ranks: int = 2
    strategy: str = "ring"
    layout: str = "contiguous"
    balancer: bool = False
    mask: str = "full"
    masked_by: str = "style"
    length: int = 8
    batch: int = 1
    heads: tuple[int, int] = (1, 1)
    dim: int = 4
    dtype: str = "float64"
    scale: float | None = None
    gradients: str = "qkv"
    strides: str = "plain"
    autocast: bool = False
    checkpoint: str = "no"
    scope: bool = False
    compiled: str = "no"
    agreement: str = "every call"
    calls: int = 1
    backward: str = "once"
    keys: int | None = None
    value_dim: int | None = None
    kernel: str = "default"
    sink: float | None = None
    lse: bool = False
    score: str = "no"
    key_layout: str = "the queries'"
    then: tuple[str, Any] | None = None
    odd: tuple[int, str, Any] | None = None

    def last(self) -> Case:
        """The attention of the last call."""
        return self if self.then is None else replace(self, then=None, **{self.then[0]: self.then[1]})

    @property
    def takes(self) -> frozenset[str]:
        return DOORS[self.door].takes

    @property
    def computed(self) -> torch.dtype:
        """That of the results. torch's varlen_attn takes no part in autocast."""
        return torch.bfloat16 if self.autocast and "packs" not in self.takes else DTYPES[self.dtype]


# How often each value is drawn.
DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "door": tuple(name for name in DOORS if name not in ("score_mod", "scope")),
    "ranks": (2, 2, 2, 2, 3, 3, 4, 4, 4, 5, 1, 8),
    "strategy": tuple(STRATEGIES),
    "layout": tuple(LAYOUTS),
    "balancer": (False, True),
    "mask": ("is_causal", *MASKS),
    "masked_by": ("style", "call", "scope"),
    "length": (5, 8, 13, 24) * 4 + (137,),  # more than the plan's block of 128
    "batch": (1, 2, 3),
    "heads": ((1, 1), (2, 2), (4, 2), (6, 1), (3, 3), (6, 3), (4, 4)),
    "dim": (4, 1, 7, 8, 65),
    "dtype": ("float64", "float64", "float64", "float32", "bfloat16"),
    "scale": (None, None, None, 0.3, -0.5, 0.0),
    "gradients": ("qkv", "qkv", "qkv", "q", "k", "v", "qk", "kv", "qv"),
    "strides": ("plain",) * 4 + (*STRIDES[1:], *EXPANDED),
    "autocast": (False, False, False, True),
    "checkpoint": ("no",) * 5 + ("around", "around, selective", "around, reentrant", "saved elsewhere"),
    "scope": (False, False, True),
    "compiled": ("no",) * 30 + ("eager",),
    "agreement": ("every call", "every call", "every call", "none"),
    "calls": (1, 1, 1, 1, 1, 2),
    "backward": ("once", "once", "once", "twice", "grad", "never", "no_grad"),
    "keys": (None,) * 6 + (5, 14, 32),
    "value_dim": (None, None, None, 3, 12),
    "kernel": ("default", *(name for name in KERNELS if name != "flash")),  # the default on CPU
    "sink": (None, None, 1.0, -torch.inf),
    "lse": (False, True),
    "score": ("no", *SCORES),
    "key_layout": ("the queries'", "contiguous"),
}
# The fields in which a second call may differ from the first.
THEN_FIELDS = ("mask", "layout", "length", "batch", "heads", "dim", "dtype", "scale", "strategy", "gradients", "kernel")
# The fields in which one rank can differ from the others while each alone makes sense.
ODD_FIELDS = ("strategy", "layout", "mask", "batch", "heads", "dim", "dtype", "scale", "gradients", "strides",
              "autocast", "checkpoint", "calls", "backward", "compiled", "score")  # fmt: skip


def drawn(dice: random.Random, seed: int, **fixed: Any) -> Case:
    """A case with these values, if they make sense together, and others at random."""
    values = {name: dice.choice(choices) for name, choices in DIMENSIONS.items()} | fixed
    return sensible(Case(seed=seed, **values))


def draw(seed: int) -> Case:
    """The case of a seed; in every second one a rank differs."""
    dice = random.Random(seed)
    case = drawn(dice, seed)
    if dice.random() < 0.2 and not seed % 2:
        name = dice.choice(THEN_FIELDS)
        other = replace(case, then=(name, dice.choice(DIMENSIONS[name])))
        case = other if sensible(other) == other else case
    if seed % 2 and case.ranks > 1:
        if case.strides in EXPANDED:  # which are other values
            case = replace(case, strides="plain")
        # A balancer may deal one token less in just this way, and then the sequence is one token shorter.
        cut_by_all = case.door == "block" or case.balancer
        can_lack = [length > 0 and not cut_by_all for length in layout_of(case).lengths]
        case = case.with_odd_rank(dice, DIMENSIONS | {"strides": STRIDES}, ODD_FIELDS, sensible, can_lack)
    return case


def pairs_of(case: Case, names: Sequence[str]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """The cover of a case: its values in every two dimensions."""
    return set(combinations([(name, getattr(case, name)) for name in names], 2))


def _work_of(case: Case) -> int:
    return case.ranks * case.calls * (1 + (case.then is not None)) * (1 + case.length // 100)


@cache
def covering(names: tuple[str, ...], tries: int = 30, **fixed: Any) -> tuple[Case, ...]:
    """Few cases, always the same, in which any two values of any two dimensions in ``names`` meet that make sense.

    For each pair of values that no earlier case has, the largest dimensions first, it draws ``tries`` cases with the
    pair and keeps the case that has most new pairs, and of these the one with the fewest ranks and calls.
    """
    dice, cases = random.Random(0), list[Case]()
    values = {name: tuple(dict.fromkeys(DIMENSIONS[name])) for name in names}
    both = sorted(combinations(names, 2), key=lambda two: -len(values[two[0]]) * len(values[two[1]]))
    pairs = [((a, x), (b, y)) for a, b in both for x in values[a] for y in values[b]]
    left = set(pairs)
    for pair in pairs:
        if pair not in left:
            continue
        draws = [drawn(dice, len(cases), **(fixed | dict(pair))) for _ in range(tries)]
        # A draw with contradicting values was changed, and may have lost the pair.
        case = max(draws, key=lambda case: (pair in (own := pairs_of(case, names)), len(own & left), -_work_of(case)))
        if new := pairs_of(case, names) & left:
            cases.append(case)
            left -= new
    return tuple(cases)


# Rows of the default run: any two of these values meet. Options that are compiled have tests of their own, and several
# calls are among the random cases.
GRID = ("door", "strategy", "mask", "layout", "kernel", "heads", "dtype", "ranks", "length")
grid = partial(covering, GRID, compiled="no", calls=1)


def coverage() -> str:
    """What the grid covers: its values, and how many rows have each."""
    lines = [f"{len(grid())} rows:", "", "| dimension | values, and the rows that have each |", "|---|---|"]
    for name in GRID:
        counts = Counter(getattr(case, name) for case in grid())
        shown = "; ".join(f"{value}: {counts[value]}" for value in dict.fromkeys(DIMENSIONS[name]))
        lines.append(f"| {name} | {shown} |")
    return "\n".join(lines)


def sensible(case: Case) -> Case:
    """``case`` with other values where its values contradict each other, or what the pages say."""
    if ON_GPU:  # FlexAttention compiles a kernel for each case there
        door = "function" if case.door.startswith(("flex", "score")) else case.door
        case = replace(case, kernel="default", compiled="no", door=door)
    new, takes = SimpleNamespace(**vars(case)), case.takes
    sdpa, flex, packs = "sdpa" in takes, case.door.startswith("flex"), "packs" in takes
    new.scope = case.scope and "scope" in takes
    if case.mask == "is_causal" and not sdpa:
        new.mask = "causal"
    if packs and (new.mask not in PACKS and new.mask not in ("chunked", "causal chunks", "documents of one")):
        new.mask = "causal documents"
    tensor, by_rows = new.mask.startswith(("bool", "float")), "another" in new.mask
    in_scope = new.scope and case.masked_by == "scope"
    can_call = (sdpa and tensor) or (packs and new.mask in PACKS) or (flex and not by_rows and "float" not in new.mask)
    if new.mask == "is_causal" or (sdpa and tensor and not in_scope):
        new.masked_by = "call"
    elif (case.masked_by == "call" and not can_call) or (case.masked_by == "scope" and not in_scope):
        new.masked_by = "style"
    if new.mask == "selected & causal":
        new.masked_by, new.compiled = "style", "no"
    if not divides(case.strategy, case.ranks) or (new.mask == "selected & causal" and "Ulysses" in case.strategy):
        new.strategy = "ring"
    new.sink = case.sink if "sink" in takes and case.compiled == "no" else None
    new.lse = case.lse and "lse" in takes and new.sink is None and case.compiled == "no"
    new.score = case.score if "scores" in takes and not by_rows and case.compiled == "no" else "no"
    new.autocast = case.autocast and "autocast" in takes
    # One device's attention, the measure of low precision, has none of these.
    if new.sink is not None or new.lse or new.score != "no":
        new.dtype, new.autocast = "float64", False
    if new.autocast:
        new.dtype = "float32"
    # The stand-ins for CUDA's kernels are ops that autocast changes, and that no compiler knows.
    if "kernel" not in takes or (case.kernel == "CUDA's" and (new.autocast or case.compiled != "no")):
        new.kernel = "default"
    if packs or new.mask.startswith("BlockMask"):  # compiled code takes no FlexMask
        new.compiled = "no"
    if case.backward == "no_grad" or new.compiled != "no":
        new.checkpoint = "no"
    if new.compiled != "no" and case.backward == "twice":
        new.backward = "once"
    if new.checkpoint == "around, selective" and case.backward == "twice":  # which torch refuses there
        new.backward = "once"
    if (
        new.checkpoint == "around, reentrant" and case.backward != "never"
    ):  # it takes neither grad() nor a second backward
        new.backward = "once"
    square = new.mask.endswith("& causal") or not (tensor or new.mask == "full")
    if new.scope or "keys" not in takes or square or case.strides in EQUAL_KEYS:
        new.keys = None
    if new.keys is None:
        new.key_layout = "the queries'"
        if case.layout in ("dealt", "uneven") or new.scope or case.agreement != "every call":
            new.balancer = False
    else:
        new.balancer, new.agreement = True, "every call"
        if case.layout in ("dealt", "uneven", "by_work"):
            new.layout = "striped in twos"
    case = Case(**vars(new))
    if case.then is not None:
        last = case.last()
        sound = last not in (case, replace(case, then=None)) and sensible(last) == last
        case = replace(case, calls=1) if sound else replace(case, then=None)
    return case


class Attend(nn.Module):
    """The user's attention: called with what a door leaves to the call."""

    def __init__(self, case: Case, attn_mask: Any, sinks: nn.Parameter | None) -> None:
        super().__init__()
        self.case, self.attn_mask, self.sinks = case, attn_mask, sinks

    def forward(self, query, key, value):
        transposed = self.case.door == "style, [B, S, H, D]"
        if transposed:
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        options = {"is_causal": self.case.mask == "is_causal", "enable_gqa": query.shape[1] != key.shape[1]}
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=self.attn_mask, scale=self.case.scale, **options
        )
        return out.transpose(1, 2) if transposed else out


@lru_cache(64)
def _mask_of(name: str, sizes: Sizes) -> MaskValue:
    return MASKS[name](sizes)


def mask_of(case: Case) -> MaskValue:
    dtype = torch.bfloat16 if case.autocast else DTYPES[case.dtype]
    sizes = Sizes(case.length, case.keys or case.length, case.heads[0], case.batch, dtype, 1000 + case.seed)
    return _mask_of("causal" if case.mask == "is_causal" else case.mask, sizes)


def balancer_of(case: Case) -> Cut:
    """The layout of queries by their number and that of ranks, and that of keys by theirs."""
    mask = None if case.mask == "is_causal" or case.layout != "by_work" else mask_of(case).mask
    same = cut_by(case.layout, mask, case.seed)
    if case.key_layout == "the queries'":
        return same
    return lambda length, ranks: (same if length == case.length else cut_by("contiguous"))(length, ranks)


def layouts_of(case: Case) -> tuple[SequenceLayout, ...]:
    """Of query, key, value and output."""
    cut = balancer_of(case)
    queries, keys = (cut(length, case.ranks) for length in (case.length, case.keys or case.length))
    return queries, keys, keys, queries


def layout_of(case: Case) -> SequenceLayout:
    return layouts_of(case)[0]


@lru_cache(64)
def whole_tensors(case: Case) -> tuple[torch.Tensor, ...]:
    """Query, key, value and cotangent, which has one more column for the logsumexp."""
    (heads, kv_heads), keys, value_dim = case.heads, case.keys or case.length, case.value_dim or case.dim
    shapes = ((heads, case.length, case.dim), (kv_heads, keys, case.dim), (kv_heads, keys, value_dim),
              (heads, case.length, value_dim + case.lse))  # fmt: skip
    dtype = DTYPES[case.dtype]
    tensors = [randn(10 * case.seed + i, case.batch, *shape, dtype=dtype) for i, shape in enumerate(shapes)]
    if case.strides in EXPANDED:
        tensors[1:3] = [EXPANDED[case.strides](x) for x in tensors[1:3]]
    return tuple(tensors)


def learned_by(case: Case) -> list[torch.Tensor]:
    """The sinks, or what a score function learns."""
    if case.sink is not None:
        return [
            randn(10 * case.seed + 4, case.heads[0])
            if case.sink == 1.0
            else torch.full((case.heads[0],), case.sink).double()
        ]
    return SCORES[case.score][1](case.heads[0], max(case.length, case.keys or 0)) if case.score != "no" else []


def score_of(case: Case, learned: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor]:
    function = SCORES[case.score][0]
    return lambda score, b, h, q, kv: function(learned, score, b, h, q, kv)


def with_strides(x: torch.Tensor, strides: str) -> torch.Tensor:
    """The values of ``x`` [B, H, S, D] in another order of memory."""
    if strides == "heads inside":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if strides == "numbers apart":
        return x.repeat_interleave(2, -1)[..., ::2]
    return F.pad(x, (0, 3))[..., : x.shape[-1]] if strides == "padded rows" else x


def attention_of(case: Case, mesh: Any, learned: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The case's door, as a function of this rank's query, key and value [B, H, S, D]."""
    mask, cut = mask_of(case), balancer_of(case)
    layout = cut(case.length, case.ranks)
    options: dict[str, Any] = {"strategy": STRATEGIES[case.strategy], "checks": AGREEMENTS[case.agreement]}
    options |= {"layout": cut if case.balancer or case.door == "block" else layout}
    if case.kernel != "default":
        options["kernel"] = KERNELS[case.kernel]
    by_style, of_call = mask.mask if case.masked_by == "style" else None, case.masked_by == "call"
    if mask.selected is not None:
        own, same = there(layout.shard(mask.selected, 2, mesh.get_local_rank())), AGREEMENTS[case.agreement]
        by_style = mask.mask & selected_keys(own, mesh, block=mask.block, layout=options["layout"], checks=same)
    call: dict[str, Any] = {} if case.scale is None else {"scale": case.scale}
    if case.lse:
        call["lse"] = True
    if case.score != "no":
        call["score_mod"] = score_of(case, learned)
    if case.door.startswith("flex") and of_call:
        call["block_mask"] = block_mask_of(case, mask)
    if case.door.startswith("varlen"):
        documents, window = PACKS[case.mask] if of_call else (False, (-1, -1))
        bounds = [0, *accumulate(document_lengths(case.length))] if documents else [0, case.length]
        call |= {"cu_seqlens": bounds} | ({"window_size": window} if of_call else {})
    if "sdpa" in case.takes:
        given = there(mask.tensor) if of_call else None
        options["core"] = Attend(case, given, learned[0] if case.sink is not None else None)  # pyright: ignore
        by_style = mask.band if given is not None else by_style
        if case.sink is not None:
            options["sink_name"] = "sinks"
    elif case.door.endswith("in module"):
        options["core"] = (FlexCore if case.door.startswith("flex") else PackedCore)(**call)
    else:
        options |= call
        if case.sink is not None:
            options["sink_H"] = learned[0]
    if case.scope:
        options["scope"] = SequenceScope(layout, mask=mask.mask if case.masked_by == "scope" else None)
        options["layout"] = None
    return door(case.door, mesh, causal=False, mask=by_style, length=case.length, **options)


def block_mask_of(case: Case, mask: MaskValue) -> Any:
    """The mask as a BlockMask of the whole sequence, whose mask_mod reads a table."""
    if mask.blocks is not None or mask.sees is None or case.mask == "full":
        return mask.blocks
    sees = mask.sees.expand(*mask.sees.shape[:-2], case.length, case.keys or case.length)
    sees = sees.reshape(-1, *sees.shape[-2:]) if len(sees) == 1 or sees.ndim < 4 else sees
    rows, heads = (len(sees) if sees.ndim == 4 else 1), sees.shape[-3]
    sees = sees.reshape(rows, heads, *sees.shape[-2:])

    def mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return sees[b if rows > 1 else torch.zeros_like(b), h if heads > 1 else torch.zeros_like(h), q, kv]

    sizes = (rows if rows > 1 else None, heads if heads > 1 else None, case.length, case.keys or case.length)
    return create_block_mask(mod, *sizes, device="cpu", BLOCK_SIZE=16)


def ending_as_a_process(results_of_rank: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
    """A rank that fails by what it is told to do ends its connections, as a process does that ends."""

    def run_rank(rank: int, case: Any) -> Any:
        try:
            return results_of_rank(rank, case)
        except ValueError as problem:
            if PLANTED in str(problem):
                # Not by forgetting the group: it lives on in what torch.compile keeps of the model.
                end_connections(cpu_backend_of(torch.distributed.group.WORLD, "gloo"))
            raise

    return run_rank


def last_result(calls: int, act: str, once: Callable[[], Any]) -> Any:
    """The number of the call, among so many, that a rank with an act makes otherwise; None if there is none."""
    result = None
    for _ in range(calls + (act == "a call more") - (act == "no call")):
        if act == "an error before":
            raise ValueError(PLANTED)
        result = once()
        if act == "an error after":
            raise ValueError(PLANTED)
    return result


def end_step(mesh: Any) -> None:
    """Where ranks that called another number of times meet."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    sum_gradients([weight], mesh)


@ending_as_a_process
def run_rank(rank: int, whole_case: Case) -> list[torch.Tensor | None]:
    """This rank's output and the gradients of its query, key, value and what is learned, of the last call."""
    case, act = whole_case.of_rank(rank), whole_case.act_of(rank)
    mesh = torch.distributed.init_device_mesh(DEVICE.type, (case.ranks,), mesh_dim_names=("cp",))
    result: list[torch.Tensor | None] = [None] * 6
    for each in (case,) if case.then is None else (replace(case, then=None), case.last()):
        learned = [nn.Parameter(there(x)) for x in learned_by(each)]
        call = attention_of(each, mesh, learned)
        if each.compiled != "no":
            # Threads share what torch.compile knows of sizes: a rank with others would make them dynamic for all, in
            # the middle of a trace. Processes do not.
            alike = whole_case.odd is None and all(len(set(layout.lengths)) == 1 for layout in layouts_of(each))
            call = torch.compile(call, backend=each.compiled, dynamic=None if alike else False)
        if each.checkpoint.startswith("around"):
            selective = {"context_fn": save_attention()} if each.checkpoint == "around, selective" else {}
            call = partial(checkpoint, call, use_reentrant=each.checkpoint == "around, reentrant", **selective)
        result = last_result(each.calls, act, partial(one_call, rank, each, act, learned, call)) or result
    end_step(mesh)
    return result


def one_call(
    rank: int, case: Case, act: str, learned: Sequence[nn.Parameter], call: Callable[..., torch.Tensor]
) -> list[torch.Tensor | None]:
    tensors = zip(layouts_of(case), whole_tensors(replace(case, odd=None)), strict=True)
    *whole, cotangent = (there(layout.shard(x, 2, rank).clone()) for layout, x in tensors)
    if act == "a token less":
        whole, cotangent = [x[:, :, 1:].clone() for x in whole], cotangent[:, :, 1:]
    if case.strides in EXPANDED:
        whole[1:] = [EXPANDED[case.strides](x) for x in whole[1:]]
    without = case.backward == "no_grad"
    leaves = [x.requires_grad_(not without and name in case.gradients) for name, x in zip("qkv", whole, strict=True)]
    parameters = [*leaves, *(x.requires_grad_(not without) for x in learned)]
    wanted = [leaf for leaf in parameters if leaf.requires_grad]
    for leaf in wanted:
        leaf.grad = None
    cast = torch.autocast(DEVICE.type, torch.bfloat16) if case.autocast else contextlib.nullcontext()
    saved = torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)
    elsewhere = saved if case.checkpoint == "saved elsewhere" else contextlib.nullcontext()
    with torch.no_grad() if without else contextlib.nullcontext(), cast, elsewhere:
        out = call(*(with_strides(x, case.strides) for x in leaves))
    gradients: list[torch.Tensor | None] = [None] * 5
    cotangent = with_strides(cotangent.to(out.dtype), case.strides)
    if case.backward in ("once", "twice"):
        out.backward(cotangent, retain_graph=case.backward == "twice")
        if case.backward == "twice":
            for leaf in wanted:
                leaf.grad = None
            out.backward(cotangent)
        gradients = [leaf.grad for leaf in parameters]
    elif case.backward == "grad":
        grads = dict(zip(map(id, wanted), torch.autograd.grad(out, wanted, cotangent), strict=True))
        gradients = [grads.get(id(leaf)) for leaf in parameters]
    return [here(out.detach()), *map(here, gradients), *[None] * (5 - len(gradients))]


def expected_of(case: Case) -> tuple[list[torch.Tensor], list[float]]:
    """Output and gradients on one process, and how far from them each may be.

    float64 rounds to 1e-15 here, and a key too many or too few shows at 1e-2. In low precision, one device's own
    attention is the measure: an average of some hundred rows may have 1.5 times its error and a quarter of a rounding,
    as a merge rounds once more than one device does. Small results vary: twice the error and four roundings. With one
    key for each query, or equal keys, gradients vanish: their error is the rounding of terms that cancel, so the bound
    grows with the terms.
    """
    mask = mask_of(case)
    *inputs, cotangent = whole_tensors(case)
    inputs += learned_by(case)

    def differentiate(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        on_one = there if dtype != torch.float64 else lambda x: x
        leaves = [on_one(x.to(dtype, copy=True).requires_grad_()) for x in inputs]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, on_one(cotangent.to(out.dtype)))]

    def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *learned: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"bias": None if mask.bias is None else mask.bias.double(), "scale": case.scale}
        if case.sink is not None:
            options["sink_H"] = learned[0]
        if case.score != "no":
            options["score"] = score_of(case, learned)
        return dense_attention(query, key, value, mask.sees, with_lse=case.lse, **options)

    wide = differentiate(dense, torch.float64)
    computed = case.computed
    if computed == torch.float64:
        return wide, [1e-12] * len(wide)
    attn_mask = mask.sees
    if mask.bias is not None:
        attn_mask = mask.bias if mask.sees is None else mask.bias.masked_fill(~mask.sees, -torch.inf)
        attn_mask = attn_mask.to(computed)
    narrow = partial(
        F.scaled_dot_product_attention,
        attn_mask=there(attn_mask if attn_mask is None or attn_mask.ndim != 3 else attn_mask[None]),
        scale=case.scale,
        enable_gqa=case.heads[0] != case.heads[1],
    )
    alone = [error(torch.nan_to_num(here(a)), w) for a, w in zip(differentiate(narrow, computed), wide, strict=True)]
    if ON_GPU and computed == torch.float32:  # torch may choose another kernel, whose products are more precise
        alone = [max(own, gpu_record.tolerance(computed)) for own in alone]
    epsilon = torch.finfo(computed).eps
    averaged = case.batch * case.length >= AVERAGED and case.kernel != "CUDA's" and not ON_GPU
    bounds = [1.5 * own + epsilon / 4 if averaged else 2 * own + 4 * epsilon for own in alone]
    for index in (1, 2):  # query and key: P (dP - sum(P dP)) times rows of keys or queries
        if float(wide[index].norm()) <= VANISHING:
            query, key, value = (x.double() for x in inputs[:3])
            terms = (dense(query, key, value.abs()) * cotangent.double().abs()).sum(-1).norm()
            rows = max(float(x.norm(dim=-1).max()) for x in (query, key))
            scale = abs(case.dim**-0.5 if case.scale is None else case.scale)
            bounds[index] *= max(1.0, float(terms) * rows * scale)
    return wide, bounds


def judge(case: Case) -> Verdict:
    if case.door.startswith("flex"):
        # The first flex_attention of a process imports it. That takes seconds on a busy machine: as long as WAIT.
        importlib.import_module("torch._inductor.compile_fx")
    with cuda_ops_on_cpu() if "CUDA's" in (case.kernel, case.last().kernel) else contextlib.nullcontext():
        return _judge(case)


def _judge(case: Case) -> Verdict:
    compiled = "compiled" in (case.odd or ()) or case.compiled != "no"
    try:
        return judged(case, run_rank, compared, WAIT_COMPILED if compiled else WAIT)
    finally:
        if case.compiled != "no":
            torch._dynamo.reset()


def judged(case: Any, run: Callable[..., Any], compare: Callable[[Any, list[Any]], Verdict], wait: float) -> Verdict:
    """The verdict of ``compare`` if all ranks return from ``run``, else that of their errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            results = run_ranks(run, case.ranks, case, timeout_seconds=wait, return_errors=True)
        except RankTimeout as waited:
            return Verdict("waited", str(waited))
        errors = {rank: result for rank, result in enumerate(results) if isinstance(result, BaseException)}
        if not errors:
            return compare(case, results)
    raw = {rank: e for rank, e in errors.items() if not of_the_package(e) and PLANTED not in str(e)}
    if raw:
        rank, problem = next(iter(raw.items()))
        return Verdict("a raw error", f"rank {rank}: {type(problem).__name__}: {problem}")
    if len(errors) < case.ranks:
        rank, problem = next(iter(errors.items()))
        return Verdict("not all ranks raised", f"rank {rank}: {type(problem).__name__}: {problem}")
    without_cause = [str(problem) for problem in errors.values() if not LIMITS.search(str(problem))]
    if without_cause and (case.odd is None or case.odd[1] == "strides"):
        return Verdict("refused without a cause", without_cause[0])
    if words := misnamed(case, [str(problem) for problem in errors.values()]):
        return Verdict("another thing is named", words)
    return Verdict("refused", kind_of(next((e for e in errors.values() if PLANTED not in str(e)), errors[0])))


# What an odd field is called in messages. by_work goes by the mask, and one of several rows has a strategy that keeps
# nothing, as one under save_attention.
NAMED_AS = {
    **dict.fromkeys(("batch", "heads", "dim", "keys", "values"), "shape"),
    "autocast": "dtype",
    "gradients": "backward|requires_grad|state",
    "checkpoint": "backward|strategy|requires_grad",
    "mask": "mask|layout|strategy",
    "backward": "backward|requires_grad",
    "kind": "call|dim|shape|fill|state",
    "width": "width|shifts",
    "score": "kernel",
    "states": "state|requires_grad",
}


def misnamed(case: Any, texts: list[str]) -> str:
    """What an error says that is not so: which ranks differ from rank 0, or in what."""
    if case.odd is None:
        return ""
    rank, what, _ = case.odd
    apart = str([rank] if rank else [*range(1, case.ranks)])
    named = NAMED_AS.get(what, what)
    for text in texts:
        found = re.search(r"disagree on (.*?): ranks (\[[\d, ]*\]) differ from rank 0", text)
        if found is not None and (found[2] != apart or (what not in ACTS and not re.search(named, found[1]))):
            return found[0]
    return ""


def of_the_package(problem: BaseException) -> bool:
    frames = traceback.extract_tb(problem.__traceback__)
    if isinstance(problem, TransferError):  # a rank that has ended
        return True
    return isinstance(problem, ValueError | TypeError | NotImplementedError) and "cp_styles" in frames[-1].filename


def kind_of(problem: BaseException) -> str:
    """The first words of a refusal, without the name in front."""
    return shortened(str(problem).partition(": ")[2] or str(problem))


def compared(case: Case, results: list[Any]) -> Verdict:
    last = case.last()
    whole, tolerances = expected_of(replace(last, odd=None))
    names = ("output", "query's gradient", "key's gradient", "value's gradient")
    for rank, result in enumerate(results):
        own = last.of_rank(rank)
        if own.act_of(rank) or last.act_of(rank) == "no call":
            continue
        queries, keys, values, outputs = layouts_of(own)
        layouts = outputs, queries, keys, values
        compare = zip(names, layouts, result[:4], whole[:4], tolerances[:4], strict=True)
        if (dtype := result[0].dtype) != (wanted := own.computed):
            return Verdict("wrong", f"rank {rank}: the output is {dtype} instead of {wanted}")
        for name, layout, mine, expected, tolerance in compare:
            if mine is None:
                continue
            part = layout.shard(expected, 2, rank)
            if mine.shape != part.shape:
                return Verdict("wrong", f"rank {rank}: {name} is {tuple(mine.shape)} instead of {tuple(part.shape)}")
            if (off := error(mine, part, whole=expected)) > tolerance:
                return Verdict("wrong", f"rank {rank}: {name} off by {off:.1e}, at most {tolerance:.1e}")
    if case.odd is None:
        together = layouts_of(last)[3].unshard([result[0] for result in results], 2)
        if (off := error(together, whole[0])) > tolerances[0]:
            return Verdict("wrong", f"all ranks' outputs, put together, off by {off:.1e}, at most {tolerances[0]:.1e}")
    for index in range(4, len(whole)):
        shares = [result[index] for result in results]
        added = sum(shares) if all(share is not None for share in shares) else None
        if added is not None and (off := error(added, whole[index])) > tolerances[index]:
            return Verdict("wrong", f"what is learned: its gradient off by {off:.1e}, at most {tolerances[index]:.1e}")
    if case.act_of(case.odd[0] if case.odd else 0):
        return Verdict("wrong", f"no rank heard of: {case.odd}")
    return Verdict("exact")


if __name__ == "__main__":
    print(coverage())
