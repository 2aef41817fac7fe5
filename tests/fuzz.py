"""Random attentions against the oracle: each is exact, or every rank refuses it.

    python tests/fuzz.py --cases 10000             seeds 0 to 9999; in every second case one rank differs in one thing
    python tests/fuzz.py --cases 10000 --no-odd    of these, those in which no rank differs
    python tests/fuzz.py --seconds 30              as many as fit
    python tests/fuzz.py --case "Case(seed=7)"     one, as a failure prints it
    python tests/fuzz.py --record runs/fuzz.jsonl  a line a case; seeds that stand there are not run again

A seed draws a :class:`Case`: door, strategy, layout, mask and so on. Its ranks are threads. Where they return results,
output and gradients are compared with dense attention in float64. Where they raise, all must raise, and each an error
of this package: one of LIMITS, if all ranks do the same. A failure is reduced to a case with as many defaults as it
still fails with.

What one rank does otherwise (``odd``) may change nothing that counts, such as strides. Then the result must be exact.
Otherwise the ranks do not do one attention, and all must raise.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.utils.checkpoint import checkpoint

import cp_styles
from cp_styles import (
    AttentionContextParallel,
    Checks,
    ModuleContextParallel,
    PerRow,
    SequenceScope,
    context_attention,
    context_flex_attention,
    context_varlen_attention,
    flex_attention,
    parallelize_module,
    save_attention,
    sum_gradients,
)
from cp_styles._compat import cpu_backend_of
from cp_styles.comm.point_to_point import TransferError, end_connections
from cp_styles.kernels import ReferenceKernel
from cp_styles.layout import SequenceLayout, by_work, contiguous, head_tail, striped
from cp_styles.mask import Mask
from cp_styles.testing import RankTimeout, run_ranks
from cp_styles.torch_api import context_parallel
from tests.oracle import allowed, dense_attention, error, mask_cases, randn
from tests.ranks import parity_grid
from tests.seeds import ACTS, OddRank, Seeds, Verdict, shortened, with_defaults

ROOT = Path(__file__).parents[1]
# Seconds until a rank that waits for another counts as a failure: many times what a case takes. One that compiles holds
# torch's lock for all of them.
WAIT, WAIT_COMPILED = 8.0, 120.0
PLANTED = "planted by the fuzzer"

STRATEGIES = parity_grid.STRATEGIES
AGREEMENTS = {"every call": Checks(), "none": Checks(agreement=False)}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
DOORS = ("function", "module", "style", "style, [B, S, H, D]", "block", "flex", "flex in module", "varlen")
# What is refused although all ranks do the same, but for strides.
LIMITS = re.compile(
    "does not divide the|needs the lengths of all ranks|positions of the two sequences do not correspond|"
    "define it at the top level of a module|the mask of a scope cannot hold tensors"
)


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
    sink: bool = False
    lse: bool = False
    block: int = 1
    key_layout: str = "the queries'"
    then: tuple[str, Any] | None = None
    odd: tuple[int, str, Any] | None = None

    def last(self) -> Case:
        """The attention of the last call."""
        return self if self.then is None else replace(self, then=None, **{self.then[0]: self.then[1]})

    @property
    def computed(self) -> torch.dtype:
        """That of the results. torch's varlen_attn takes no part in autocast."""
        return torch.bfloat16 if self.autocast and self.door != "varlen" else DTYPES[self.dtype]


CHOICES: dict[str, tuple[Any, ...]] = {
    "door": DOORS,
    "ranks": (2, 2, 3, 4, 4, 5),
    "strategy": tuple(STRATEGIES),
    "layout": ("contiguous", "head_tail", "striped", "by_work", "dealt"),
    "balancer": (False, True),
    "mask": ("full", "causal", "is_causal", *(name for name in mask_cases(5) if name not in ("full", "causal")),
             "bool", "bool of heads", "bool & causal", "float", "float of rows", "float & causal",
             "another in each row"),
    "masked_by": ("style", "call", "scope"),
    "length": (5, 6, 8, 9, 13, 16, 23, 24, 40),
    "batch": (1, 2, 3),
    "heads": ((1, 1), (2, 2), (4, 2), (6, 1), (3, 3), (6, 3), (4, 4)),
    "dim": (4, 1, 7, 8, 65),
    "dtype": ("float64", "float64", "float64", "float32", "bfloat16"),
    "scale": (None, None, None, 0.3, -0.5, 0.0),
    "gradients": ("qkv", "qkv", "qkv", "q", "k", "v", "qk", "kv", "qv"),
    "strides": ("plain", "plain", "heads inside", "padded rows", "numbers apart"),
    "autocast": (False, False, False, True),
    "checkpoint": ("no", "no", "no", "around", "around, reentrant"),
    "scope": (False, False, True),
    "compiled": ("no",) * 30 + ("eager",),
    "agreement": ("every call", "every call", "every call", "none"),
    "calls": (1, 1, 1, 2),
    "backward": ("once", "once", "once", "twice", "grad", "never", "no_grad"),
    "keys": (None,) * 6 + (5, 14, 32),
    "value_dim": (None, None, None, 3, 12),
    "kernel": ("default", "default", "reference"),
    "sink": (False, False, True),
    "lse": (False, True),
    "block": (2, 1),
    "key_layout": ("the queries'", "contiguous"),
}  # fmt: skip
# The fields in which a second call may differ from the first.
THEN_FIELDS = ("mask", "layout", "length", "batch", "heads", "dim", "dtype", "scale", "strategy", "gradients", "kernel")
# The fields in which one rank can differ from the others while each alone makes sense.
ODD_FIELDS = ("strategy", "layout", "mask", "batch", "heads", "dim", "dtype", "scale", "gradients", "strides",
              "autocast", "checkpoint", "calls", "backward", "compiled")  # fmt: skip


def draw(seed: int) -> Case:
    """The case of a seed. What makes no sense together is drawn again, field by field."""
    dice = random.Random(seed)
    values = {name: dice.choice(choices) for name, choices in CHOICES.items()}
    if values["checkpoint"] == "around" and seed % 4 < 2:
        values["checkpoint"] = "around, selective"
    case = sensible(Case(seed=seed, **values))
    if dice.random() < 0.2 and not seed % 2:
        name = dice.choice(THEN_FIELDS)
        other = replace(case, then=(name, dice.choice(CHOICES[name])))
        case = other if sensible(other) == other else case
    if seed % 2:
        # A balancer may deal one token less in just this way, and then the sequence is one token shorter.
        cut_by_all = case.door == "block" or case.balancer
        can_lack = [length > 0 and not cut_by_all for length in layout_of(case).lengths]
        case = case.with_odd_rank(dice, CHOICES, ODD_FIELDS, sensible, can_lack)
    return case


def sensible(case: Case) -> Case:
    """``case`` with other values where its values contradict each other, or what the pages say."""
    explicit = case.mask.startswith(("bool", "float"))
    takes_scope = case.door in ("module", "style", "style, [B, S, H, D]")
    calls_sdpa = takes_scope or case.door == "block"
    if case.door.startswith("flex"):
        # torch's flex_attention takes no part in autocast.
        case = replace(case, autocast=False, mask="bool" if case.mask.startswith("float") else case.mask)
    if case.door == "varlen":
        known = not explicit and case.mask not in ("prefix", "prefix documents", "another in each row")
        case = replace(case, batch=1, mask=case.mask if known else "causal documents")
    if case.mask == "is_causal" and not calls_sdpa:
        case = replace(case, mask="causal")
    if case.mask == "another in each row" and (case.door == "flex in module" or case.masked_by == "call"):
        case = replace(case, mask="documents")
    in_scope = takes_scope and case.scope and case.masked_by == "scope"
    by_call = case.mask == "is_causal" or (explicit and not in_scope)
    if case.door == "flex in module" or (calls_sdpa and by_call):
        case = replace(case, masked_by="call")
    elif case.masked_by == "call" or (case.masked_by == "scope" and not in_scope):
        case = replace(case, masked_by="style")
    case = replace(case, scope=case.scope and takes_scope)
    if case.strategy == "Ulysses x ring" and case.ranks % 2:
        case = replace(case, strategy="ring")
    if case.layout == "dealt" or case.scope or case.agreement != "every call":
        case = replace(case, balancer=False)
    if case.autocast:
        case = replace(case, dtype="float32")
    if case.backward == "no_grad":
        case = replace(case, checkpoint="no")
    if case.checkpoint == "around, selective" and case.backward == "twice":  # which torch refuses there
        case = replace(case, backward="once")
    if case.checkpoint == "around, reentrant":  # torch refuses autograd.grad and a second backward there
        case = replace(case, compiled="no", backward="never" if case.backward == "never" else "once")
    if case.compiled != "no":
        case = replace(case, checkpoint="no", backward="once" if case.backward == "twice" else case.backward)
    if case.compiled != "no" or case.door not in ("function", "module"):
        case = replace(case, sink=False)
    if case.compiled != "no" or case.door not in ("flex", "varlen"):
        case = replace(case, lse=False)
    if case.sink or case.lse:  # one device's attention, the measure of low precision, has none
        case = replace(case, dtype="float64", autocast=False)
    if case.door.startswith("flex") or case.door == "varlen":
        case = replace(case, kernel="default")
    square = case.mask.endswith("& causal") or not (explicit or case.mask == "full")
    if case.keys is not None and (case.scope or case.door == "varlen" or square):
        case = replace(case, keys=None)
    if case.keys is not None:
        case = replace(case, balancer=True, agreement="every call")
        case = replace(case, layout="striped") if case.layout in ("dealt", "by_work") else case
    if case.layout != "striped":
        case = replace(case, block=1)
    if case.keys is None:
        case = replace(case, key_layout="the queries'")
    if case.then is not None:
        last = case.last()
        case = (
            replace(case, calls=1)
            if last not in (case, replace(case, then=None)) and sensible(last) == last
            else replace(case, then=None)
        )
    return case


class Attend(nn.Module):
    """The user's attention: called with what a door leaves to the call."""

    def __init__(self, case: Case, attn_mask: Any, sinks: nn.Parameter | None) -> None:
        super().__init__()
        self.case, self.attn_mask, self.sinks = case, attn_mask, sinks

    def forward(self, query, key, value):
        case = self.case
        transposed = case.door == "style, [B, S, H, D]"
        if transposed:
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        if case.door == "flex in module":
            out = flex_attention(
                query, key, value, block_mask=self.attn_mask, scale=case.scale, enable_gqa=grouped
            )  # fmt: skip
        else:
            causal = case.mask == "is_causal"
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=self.attn_mask, is_causal=causal, scale=case.scale, enable_gqa=grouped
            )
        return out.transpose(1, 2) if transposed else out


@dataclass(frozen=True)
class MaskOfCase:
    """A mask of the package beside what the oracle is told. Of a call's tensor, ``band`` is the mask beside it."""

    mask: Mask | None = None
    band: Mask | None = None
    tensor: torch.Tensor | None = None
    sees: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def mask_of(case: Case) -> MaskOfCase:
    length, keys, seed = case.length, case.keys or case.length, 1000 + case.seed
    both = case.mask.endswith("& causal")
    band = cp_styles.Causal() if both else None
    inside = torch.ones(length, keys, dtype=torch.bool).tril() if both else torch.tensor(True)
    if case.mask.startswith("bool"):
        heads = case.heads[0] if case.mask == "bool of heads" else 1
        sees = randn(seed, 1, heads, length, keys) > -0.5
        return MaskOfCase(with_band(cp_styles.Dense(sees), band), band, sees, sees=sees & inside)
    if case.mask.startswith("float"):
        rows = case.batch if case.mask == "float of rows" else 1
        bias, other = (randn(seed + i, rows, 1, length, keys) for i in range(2))
        bias = bias.masked_fill(other > 1, -torch.inf)
        bias = bias.to(torch.bfloat16 if case.autocast else DTYPES[case.dtype])
        seen = bias.double().masked_fill(~inside, -torch.inf)
        return MaskOfCase(with_band(cp_styles.Dense(bias), band), band, bias, bias=seen)
    if case.mask == "full":
        return MaskOfCase(cp_styles.Full(), sees=torch.ones(length, keys, dtype=torch.bool))
    if case.mask == "another in each row":
        names = random.Random(seed).choices(sorted(mask_cases(length)), k=case.batch)
        rows = [mask_of(replace(case, mask=name, keys=None)) for name in names]
        return MaskOfCase(
            PerRow(tuple(row.mask for row in rows)), sees=torch.stack([row.sees for row in rows])[:, None]
        )
    pairs = mask_cases(length)["causal" if case.mask == "is_causal" else case.mask]
    sees = allowed(pairs.sees, length, length)
    return MaskOfCase(None if case.mask == "is_causal" else pairs.mask, sees=sees)


def with_band(dense: Mask, band: Mask | None) -> Mask:
    return dense if band is None else dense & band


def dealt(length: int, ranks: int, seed: int) -> SequenceLayout:
    """Chunks at random places for random ranks; some ranks may have none."""
    dice = random.Random(seed)
    cuts = sorted({0, length, *(dice.randrange(length + 1) for _ in range(2 * ranks))})
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start, stop in pairwise(cuts):
        chunks[dice.randrange(ranks)].append((start, stop))
    return SequenceLayout.from_chunks(chunks)


def balancer_of(case: Case, mask: Mask | None) -> Callable[[int, int], SequenceLayout]:
    """The layout of queries by their number and that of ranks, and that of keys by theirs."""
    same = {
        "contiguous": contiguous,
        "head_tail": head_tail,
        "striped": partial(striped, block=case.block),
        "by_work": partial(by_work, mask=mask or cp_styles.Causal()),
        "dealt": partial(dealt, seed=case.seed),
    }[case.layout]
    if case.key_layout == "the queries'":
        return same
    return lambda length, ranks: same(length, ranks) if length == case.length else contiguous(length, ranks)


def layout_of(case: Case) -> SequenceLayout:
    return balancer_of(case, mask_of(case).mask)(case.length, case.ranks)


def layouts_of(case: Case) -> tuple[SequenceLayout, ...]:
    """Of query, key, value and output."""
    queries = layout_of(case)
    keys = balancer_of(case, mask_of(case).mask)(case.keys or case.length, case.ranks)
    return queries, keys, keys, queries


@cache
def whole_tensors(case: Case) -> tuple[torch.Tensor, ...]:
    """Query, key, value and cotangent, which has one more column for the logsumexp."""
    (heads, kv_heads), keys, value_dim = case.heads, case.keys or case.length, case.value_dim or case.dim
    shapes = ((heads, case.length, case.dim), (kv_heads, keys, case.dim), (kv_heads, keys, value_dim),
              (heads, case.length, value_dim + case.lse))  # fmt: skip
    dtype = DTYPES[case.dtype]
    return tuple(randn(10 * case.seed + i, case.batch, *shape, dtype=dtype) for i, shape in enumerate(shapes))


def sinks_of(case: Case) -> torch.Tensor | None:
    return randn(10 * case.seed + 4, case.heads[0]) if case.sink else None


def with_strides(x: torch.Tensor, strides: str) -> torch.Tensor:
    """The values of ``x`` [B, H, S, D] in another order of memory."""
    if strides == "heads inside":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if strides == "numbers apart":
        return x.repeat_interleave(2, -1)[..., ::2]
    return F.pad(x, (0, 3))[..., : x.shape[-1]] if strides == "padded rows" else x


def attention_of(case: Case, mesh: Any, sinks: nn.Parameter | None) -> Callable[..., torch.Tensor]:
    """The case's door, as a function of this rank's query, key and value [B, H, S, D]."""
    mask = mask_of(case)
    cut: Any = balancer_of(case, mask.mask)
    layout = cut(case.length, case.ranks)
    given: Any = cut if case.balancer else layout
    options: dict[str, Any] = {"strategy": STRATEGIES[case.strategy], "checks": AGREEMENTS[case.agreement]}
    if case.kernel == "reference":
        options["kernel"] = ReferenceKernel()
    style = options | {"layout": None if case.scope else given}
    if case.masked_by == "style" or mask.band is not None:
        style["mask"] = mask.mask if case.masked_by == "style" else mask.band
    if case.door == "function":
        return lambda *qkv: context_attention(
            *qkv, mesh, mask=mask.mask, layout=given, scale=case.scale, sink_H=sinks, **options
        )  # fmt: skip
    if case.door == "varlen":
        return partial(varlen, case, mask, mesh, given, options)
    if case.door == "flex":
        options |= {"layout": given, "scale": case.scale, "enable_gqa": case.heads[0] != case.heads[1]}
        blocks = block_mask_of(case, mask) if mask.tensor is not None else None
        options |= {"block_mask": blocks, "mask": None if blocks is not None else mask.mask}
        return partial(flex, case, mesh, options)
    tensor = block_mask_of(case, mask) if case.door == "flex in module" else mask.tensor
    core = Attend(case, tensor if case.masked_by == "call" else None, sinks)
    if case.sink:
        style["sink"] = "sinks"
    if case.door == "block":
        options |= {"layout": cut, "mask": style.get("mask")}
        return partial(in_block, core, mesh, options)
    transposed = case.door == "style, [B, S, H, D]"
    plan = AttentionContextParallel(**style, seq_dim=1 if transposed else 2) if case.door.startswith("style") else None
    styled = parallelize_module(core, mesh, plan or ModuleContextParallel(**style))
    call = styled if not transposed else lambda *qkv: styled(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2)
    if not case.scope:
        return call
    scope = SequenceScope(layout, mask=mask.mask if case.masked_by == "scope" else None)
    return partial(in_scope, scope, call)


def in_scope(scope: SequenceScope, call: Callable[..., torch.Tensor], *qkv: torch.Tensor) -> torch.Tensor:
    with scope:
        return call(*qkv)


def in_block(core: nn.Module, mesh: Any, options: dict[str, Any], *qkv: torch.Tensor) -> torch.Tensor:
    with context_parallel(mesh, **options):
        return core(*qkv)


def block_mask_of(case: Case, mask: MaskOfCase) -> Any:
    """The mask as a BlockMask of the whole sequence, whose mask_mod reads a table."""
    if mask.sees is None or case.mask == "full":
        return None
    sees = mask.sees.reshape(-1, *mask.sees.shape[-2:])  # heads, or one for all
    several = len(sees) > 1

    def mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return sees[h if several else torch.zeros_like(h), q, kv]

    sizes = (None, len(sees) if several else None, case.length, case.keys or case.length)
    return create_block_mask(mod, *sizes, device="cpu", BLOCK_SIZE=16)


def varlen(case: Case, mask: MaskOfCase, mesh: Any, layout: Any, options: Any, *qkv: torch.Tensor) -> torch.Tensor:
    """A pack of one document; the case's mask beside it."""
    packs = (x[0].transpose(0, 1) for x in qkv)
    out = context_varlen_attention(
        *packs, mesh, [0, case.length], mask=mask.mask, layout=layout, scale=case.scale, return_lse=case.lse, **options
    )  # fmt: skip
    return out.transpose(0, 1)[None] if not case.lse else with_column(out[0].transpose(0, 1)[None], out[1][None])


def flex(case: Case, mesh: Any, options: Any, *qkv: torch.Tensor) -> torch.Tensor:
    if not case.lse:
        return context_flex_attention(*qkv, mesh, **options)
    out, more = context_flex_attention(*qkv, mesh, return_aux=AuxRequest(lse=True), **options)
    return with_column(out, more.lse)


def with_column(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """As the oracle returns them: the logsumexp as a last column, 0 for rows without keys."""
    return torch.cat([out, lse.masked_fill(lse == -torch.inf, 0.0)[..., None]], -1)


def run_rank(rank: int, case: Case) -> list[torch.Tensor | None]:
    """:func:`results_of_rank`. A rank that fails ends its connections, as a process does that ends."""
    try:
        return results_of_rank(rank, case)
    except ValueError as problem:
        end_if_planted(problem)
        raise


def end_if_planted(problem: ValueError) -> None:
    if PLANTED in str(problem):
        # Not by forgetting the group: it lives on in what torch.compile keeps of the model.
        end_connections(cpu_backend_of(torch.distributed.group.WORLD, "gloo"))


def results_of_rank(rank: int, whole_case: Case) -> list[torch.Tensor | None]:
    """This rank's output and the gradients of its query, key, value and sinks, of the last call."""
    case, act = whole_case.of_rank(rank), whole_case.act_of(rank)
    mesh = torch.distributed.init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("cp",))
    result: list[torch.Tensor | None] = [None] * 5
    for each in (case,) if case.then is None else (replace(case, then=None), case.last()):
        sinks = sinks_of(each)
        sinks = None if sinks is None else nn.Parameter(sinks)
        call = attention_of(each, mesh, sinks)
        if each.compiled != "no":
            # Threads share what torch.compile knows of sizes: a rank with others would make them dynamic for all, in
            # the middle of a trace. Processes do not.
            alike = whole_case.odd is None and all(len(set(layout.lengths)) == 1 for layout in layouts_of(each))
            call = torch.compile(call, backend=each.compiled, dynamic=None if alike else False)
        if each.checkpoint != "no":
            selective = {"context_fn": save_attention()} if each.checkpoint == "around, selective" else {}
            call = partial(checkpoint, call, use_reentrant=each.checkpoint == "around, reentrant", **selective)
        for _ in range(each.calls + (act == "a call more") - (act == "no call")):
            if act == "an error before":
                raise ValueError(PLANTED)
            result = one_call(rank, each, act, sinks, call)
            if act == "an error after":
                raise ValueError(PLANTED)
    # The end of a step, where ranks that called another number of times meet.
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    sum_gradients([weight], mesh)
    return result


def one_call(
    rank: int, case: Case, act: str, sinks: nn.Parameter | None, call: Callable[..., torch.Tensor]
) -> list[torch.Tensor | None]:
    tensors = zip(layouts_of(case), whole_tensors(replace(case, odd=None)), strict=True)
    *whole, cotangent = (layout.shard(x, 2, rank).clone() for layout, x in tensors)
    if act == "a token less":
        whole, cotangent = [x[:, :, 1:].clone() for x in whole], cotangent[:, :, 1:]
    without = case.backward == "no_grad"
    leaves = [x.requires_grad_(not without and name in case.gradients) for name, x in zip("qkv", whole, strict=True)]
    parameters = leaves if sinks is None else [*leaves, sinks.requires_grad_(not without)]
    wanted = [leaf for leaf in parameters if leaf.requires_grad]
    for leaf in wanted:
        leaf.grad = None
    cast = torch.autocast("cpu", torch.bfloat16) if case.autocast else contextlib.nullcontext()
    with torch.no_grad() if without else contextlib.nullcontext(), cast:
        out = call(*(with_strides(x, case.strides) for x in leaves))
    gradients: list[torch.Tensor | None] = [None] * 4
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
    return [out.detach(), *gradients, *[None] * (4 - len(gradients))]


def expected_of(case: Case) -> tuple[list[torch.Tensor], list[float]]:
    """Output and gradients on one process, and how far from them each may be.

    float64 rounds to 1e-15 here, and a key too many or too few shows at 1e-2. In low precision, one device's own
    attention is the measure. Small results vary, so the measure is twice its error and four roundings of the norm.
    """
    mask = mask_of(case)
    *inputs, cotangent = whole_tensors(case)
    sinks = sinks_of(case)
    inputs += [] if sinks is None else [sinks]

    def differentiate(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]

    def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sink_H: Any = None) -> torch.Tensor:
        options = {"bias": mask.bias, "scale": case.scale, "sink_H": sink_H, "with_lse": case.lse}
        return dense_attention(query, key, value, mask.sees, **options)

    wide = differentiate(dense, torch.float64)
    computed = case.computed
    if computed == torch.float64:
        return wide, [1e-12] * 5
    attn_mask = mask.sees if mask.bias is None else mask.bias.to(computed)
    narrow = partial(
        F.scaled_dot_product_attention, attn_mask=attn_mask, scale=case.scale, enable_gqa=case.heads[0] != case.heads[1]
    )
    alone = differentiate(narrow, computed)
    rounding = 4 * torch.finfo(computed).eps
    return wide, [2 * error(torch.nan_to_num(a), w) + rounding for a, w in zip(alone, wide, strict=True)]


def judge(case: Case) -> Verdict:
    if case.door.startswith("flex"):
        # The first flex_attention of a process imports it. That takes seconds on a busy machine: as long as WAIT.
        importlib.import_module("torch._inductor.compile_fx")
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
    "kind": "call|dim|shape|fill",
    "width": "width|shifts",
    "states": "state",
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
    shares = [result[4] for result in results]
    added = sum(shares) if last.sink and all(share is not None for share in shares) else None
    if added is not None and (off := error(added, whole[4])) > tolerances[4]:
        return Verdict("wrong", f"the sinks' gradient off by {off:.1e}, at most {tolerances[4]:.1e}")
    if case.act_of(case.odd[0] if case.odd else 0):
        return Verdict("wrong", f"no rank heard of: {case.odd}")
    return Verdict("exact")


def simpler(case: Case) -> Iterator[Case]:
    yield from map(sensible, with_defaults(case, "seed", "odd"))
    if case.odd is not None:
        yield replace(case, odd=None)


if __name__ == "__main__":
    Seeds(Case, __file__, draw, judge, simpler).main(__doc__)
