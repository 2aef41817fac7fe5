"""Random recurrences, convolutions and rolls against one process: each is exact, or every rank refuses it.

    python tests/mixers.py --cases 1000               seeds 0 to 999; in every second case one rank differs in one thing
    python tests/mixers.py --case "Mixing(seed=7)"    one, as a failure prints it
    python tests/mixers.py --record runs/mixers.jsonl a line a case; seeds that stand there are not run again

A seed draws a :class:`Mixing`: the kernel, what cuts the sequence and what says its documents, sizes, states, dtype and
the inputs that need gradients. The rest is as in tests/fuzz.py. The kernels are those of tests/ranks/mixers/kernels.py;
on one process they are called for each document, in float64.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn
from torch.nn.functional import normalize, softplus
from torch.utils.checkpoint import checkpoint

from cp_styles import Documents, ModuleContextParallel, SequenceScope, parallelize_module
from cp_styles.layouts import SequenceLayout
from cp_styles.mixers import context_causal_conv1d, context_recurrence, context_roll
from tests import cases
from tests.device import DEVICE, here, there
from tests.oracle import error, randn
from tests.ranks.mixers.kernels import (
    causal_conv1d,
    causal_conv1d_fn,
    chunk_gated_delta_rule,
    chunk_gla,
    mamba_chunk_scan_combined,
    selective_scan_fn,
)
from tests.seeds import OddRank, Seeds, Verdict, simpler
from tests.tables import DTYPES, cut_by


@dataclass(frozen=True)
class Mixing(OddRank):
    """A call of a mixer, which may be made twice. The defaults are the simplest; ``odd`` is as in cases.Case."""

    seed: int = 0
    kind: str = "conv"
    door: str = "function"
    ranks: int = 2
    layout: str = "contiguous"
    balancer: bool = False
    documents: int = 1
    said_by: str = "argument"
    length: int = 8
    batch: int = 1
    heads: tuple[int, int] = (1, 1)
    keys: int = 2
    values: int = 3
    width: int = 2
    states: str = "none"
    dtype: str = "float64"
    gradients: str = "all"
    apart: bool = False
    checkpoint: str = "no"
    agreement: str = "every call"
    calls: int = 1
    backward: str = "once"
    odd: tuple[int, str, Any] | None = None


KINDS = ("conv", "conv, [B, L, C]", "roll", "roll, filled", "delta", "delta, values first", "kda", "gla", "ssd", "scan")
CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": KINDS,
    "door": ("function", "function", "by name"),
    "ranks": (2, 2, 3, 4, 5),
    "layout": ("contiguous", "contiguous", "head_tail", "striped", "by_work", "dealt", "dealt"),
    "balancer": (False, False, True),
    "documents": (1, 1, 2, 3, 5),
    "said_by": ("argument", "scope", "cu_seqlens", "seq_idx"),
    "length": (1, 2, 5, 8, 13, 16, 21),
    "batch": (1, 2, 3),
    "heads": ((1, 1), (2, 1), (4, 2), (3, 3)),
    "keys": (2, 1, 3, 5),
    "values": (3, 1, 2, 4),
    "width": (2, 1, 3, 4, 9, 30),
    "states": ("none", "none", "first", "last", "both"),
    "dtype": ("float64", "float64", "float64", "float32", "bfloat16"),
    "gradients": ("all", "all", "all", "tokens", "weights", "first", "last", "none"),
    "apart": (False, True),
    "checkpoint": ("no", "no", "around", "around, reentrant"),
    "agreement": ("every call", "every call", "every call", "none"),
    "calls": (1, 1, 2),
    "backward": ("once", "once", "once", "twice", "never", "no_grad"),
}
ODD_FIELDS = ("kind", "layout", "documents", "said_by", "batch", "heads", "keys", "values", "width", "states", "dtype",
              "gradients", "apart", "checkpoint", "calls", "backward")  # fmt: skip


def draw(seed: int) -> Mixing:
    """The case of a seed. What makes no sense together is drawn again, field by field."""
    dice = random.Random(seed)
    case = sensible(Mixing(seed=seed, **{name: dice.choice(choices) for name, choices in CHOICES.items()}))
    if seed % 2:
        can_lack = [length > 0 and not case.balancer for length in layout_of(case).lengths]
        case = case.with_odd_rank(dice, CHOICES, ODD_FIELDS, sensible, can_lack)
    return case


def sensible(case: Mixing) -> Mixing:
    """``case`` with other values where its values contradict each other, or would not be used."""
    rows = case.kind.startswith(("conv", "roll"))
    if case.kind in ("roll", "roll, filled", "delta, values first"):
        case = replace(case, door="function")
    if not case.kind.startswith("conv") and not case.kind.startswith("roll"):
        case = replace(case, width=2)
    if rows or (case.kind == "scan" and case.states in ("first", "both")):
        case = replace(case, states="none")
    if case.kind in ("kda", "gla", "scan") or rows:
        case = replace(case, heads=(case.heads[0], case.heads[0]))
    if rows:
        case = replace(case, keys=2)
    takes = {"cu_seqlens": KINDS[4:9], "seq_idx": ("delta", "kda", "ssd", "scan")}
    if case.door == "by name":
        takes = {"cu_seqlens": ("conv, [B, L, C]", *KINDS[4:9]), "seq_idx": ("conv", "delta", "kda", "ssd")}
    if case.documents == 1 or case.kind not in takes.get(case.said_by, KINDS):
        case = replace(case, said_by="argument")
    if case.layout == "dealt" or case.agreement != "every call" or case.said_by == "scope":
        case = replace(case, balancer=False)
    if case.kind.startswith("roll") and case.gradients == "weights":
        case = replace(case, gradients="all")
    if case.backward == "no_grad":
        case = replace(case, checkpoint="no")
    if case.checkpoint == "around, reentrant":  # torch refuses a second backward there
        case = replace(case, backward="never" if case.backward == "never" else "once", gradients="all")
    return case


def documents_of(case: Mixing) -> tuple[int, ...]:
    dice = random.Random(case.documents)
    cuts = {0, case.length, *(dice.randrange(case.length + 1) for _ in range(case.documents - 1))}
    return tuple(high - low for low, high in pairwise(sorted(cuts)))


def balancer_of(case: Mixing) -> Callable[[int, int], SequenceLayout]:
    return cut_by(case.layout, seed=case.seed)


def layout_of(case: Mixing) -> SequenceLayout:
    return balancer_of(case)(case.length, case.ranks)


class Inputs(dict[str, torch.Tensor]):
    """Tensors by the names of a kernel's arguments."""


def dim_of(case: Mixing) -> int:
    return 2 if case.kind in ("conv", "scan") else 1


def drawn(case: Mixing) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors of the whole sequence, and others, by the names of the kernel's arguments."""
    batch, length, (heads, groups), keys, values = case.batch, case.length, case.heads, case.keys, case.values
    channels, kind = heads * values, case.kind.partition(",")[0]
    seeds = iter(range(100 * case.seed, 100 * case.seed + 100))

    def new(*shape: int) -> torch.Tensor:
        return randn(next(seeds), *shape)

    def of_tokens(*shape: int) -> torch.Tensor:
        return new(batch, length, *shape)

    weights: dict[str, torch.Tensor] = {}
    if kind in ("conv", "roll"):
        tokens = {"x": of_tokens(channels)}
        weights = {"weight": new(channels, case.width), "bias": new(channels)} if kind == "conv" else {}
    elif kind in ("delta", "kda"):
        q, k = (normalize(of_tokens(groups, keys), dim=-1) for _ in range(2))
        g = -softplus(of_tokens(heads, keys) if kind == "kda" else of_tokens(heads))
        tokens = {"q": q, "k": k, "v": of_tokens(heads, values), "g": g, "beta": of_tokens(heads).sigmoid()}
    elif kind == "gla":
        tokens = {name: of_tokens(heads, keys) for name in "qkg"} | {"v": of_tokens(heads, values)}
        tokens["g"] = -softplus(tokens["g"])
    elif kind == "ssd":
        tokens = {name: of_tokens(heads, values) for name in "xz"} | {"dt": of_tokens(heads)}
        tokens |= {name: of_tokens(groups, keys) for name in "BC"}
        weights = {"A": -new(heads).exp(), "D": new(heads), "dt_bias": new(heads)}
    else:
        tokens = {name: of_tokens(channels) for name in ("u", "delta", "z")} | {name: of_tokens(keys) for name in "BC"}
        weights = {"A": -new(channels, keys).exp(), "D": new(channels), "delta_bias": new(channels)}
    if case.states in ("first", "both"):
        first = new(batch, heads, keys, values)
        turned = kind == "ssd" or case.kind == "delta, values first"
        weights["initial_states" if kind == "ssd" else "initial_state"] = first.mT.contiguous() if turned else first
    if dim_of(case) == 2:
        tokens = {name: x.mT.contiguous() for name, x in tokens.items()}
    if case.kind == "conv, [B, L, C]":
        del weights["bias"]
    return tokens, weights


def flags_of(case: Mixing) -> dict[str, Any]:
    """What the kernel is told beside its tensors."""
    flags: dict[str, dict[str, Any]] = {
        "delta, values first": {"state_v_first": True},
        "ssd": {"chunk_size": 4, "dt_softplus": True},
        "scan": {"delta_softplus": True},
        "conv": {"activation": "silu"},
    }
    wants = {"ssd": "return_final_states", "scan": "return_last_state"}.get(case.kind, "output_final_state")
    return flags.get(case.kind, {}) | ({wants: True} if case.states in ("last", "both") else {})


class Kernels(nn.Module):
    """A layer that calls the case's kernel by its name."""

    def __init__(self, case: Mixing, flags: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.flags = case.kind.partition(",")[0] if case.kind != "conv, [B, L, C]" else case.kind, flags

    def forward(self, **given: torch.Tensor) -> Any:
        if self.kind in ("delta", "kda"):
            return chunk_gated_delta_rule(**given, **self.flags)
        if self.kind == "gla":
            return chunk_gla(**given, **self.flags)
        if self.kind == "ssd":
            return mamba_chunk_scan_combined(**given, **self.flags)
        if self.kind == "scan":
            return selective_scan_fn(**given, **self.flags)
        return causal_conv1d_fn(**given, **self.flags) if self.kind == "conv" else causal_conv1d(**given, **self.flags)


def rolled(x: torch.Tensor, case: Mixing) -> torch.Tensor:
    """On one process, of one document."""
    out, size, shifts = x.roll(-case.width, 1), x.shape[1], -case.width
    if case.kind == "roll":
        return out
    source = torch.arange(size) - shifts
    return out.masked_fill(((source < 0) | (source >= size))[:, None], 0.5)


def on_one(case: Mixing, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Output and last state of one process, document by document, and all gradients."""
    tokens, weights = drawn(case)
    leaves = {name: x.to(dtype).requires_grad_() for name, x in (tokens | weights).items()}
    runs, dim = [], dim_of(case)
    for low, high in pairwise(accumulate(documents_of(case), initial=0)):
        given = {name: x.narrow(dim, low, high - low) if name in tokens else x for name, x in leaves.items()}
        if low > 0:
            given = {name: x for name, x in given.items() if not name.startswith("initial")}
        runs.append(rolled(given["x"], case) if "roll" in case.kind else Kernels(case, flags_of(case))(**given))
    outs = [run[0] if isinstance(run, tuple) else run for run in runs]
    results = {"the output": torch.cat(outs, dim)}
    if case.states in ("last", "both"):
        results["the last state"] = runs[-1][1]
    grads = torch.autograd.grad(
        list(results.values()),
        list(leaves.values()),
        [cotangent_of(case, name, x) for name, x in results.items()],
        materialize_grads=True,
    )
    return {name: x.detach() for name, x in results.items()}, dict(zip(leaves, grads, strict=True))


def cotangent_of(case: Mixing, name: str, like: torch.Tensor) -> torch.Tensor:
    return randn(100 * case.seed + 90 + (name == "the output"), *like.shape).to(like.dtype)


def mixing_of(case: Mixing, mesh: Any, flags: dict[str, Any]) -> Callable[..., Any]:
    """The case's door, as a function of this rank's tensors by name."""
    layout, lengths = layout_of(case), documents_of(case)
    given: Any = balancer_of(case) if case.balancer else layout
    scoped, documents = case.said_by == "scope", lengths if case.said_by == "argument" and case.documents > 1 else None
    options: dict[str, Any] = {
        "layout": None if scoped else given,
        "checks": cases.AGREEMENTS[case.agreement],
    }
    edges = (0, *accumulate(lengths))
    if case.said_by == "cu_seqlens":
        flags = flags | {"cu_seqlens": there(torch.tensor(edges))}
    elif case.said_by == "seq_idx":
        flags = flags | {"seq_idx": there(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None])}
    if case.door == "by name":
        mask = None if documents is None else Documents(documents)
        call: Any = parallelize_module(Kernels(case, flags), mesh, ModuleContextParallel(**options, mask=mask))
    elif case.kind.startswith("roll"):
        fill = 0.5 if case.kind == "roll, filled" else None
        options |= {"documents": documents, "fill": fill}
        call = lambda x: context_roll(x, -case.width, 1, mesh, **options)  # noqa: E731
    elif case.kind.startswith("conv"):
        options |= {"documents": documents, "width": case.width, "seq_dim": dim_of(case)}

        def call(x: torch.Tensor, **weights: torch.Tensor) -> Any:
            def conv(x: torch.Tensor) -> torch.Tensor:
                out = Kernels(case, flags)(x=x, **weights)
                return out[0] if isinstance(out, tuple) else out

            return context_causal_conv1d(conv, x, mesh, **options)
    else:
        kernels = {"gla": chunk_gla, "ssd": mamba_chunk_scan_combined, "scan": selective_scan_fn}
        scan = context_recurrence(
            kernels.get(case.kind, chunk_gated_delta_rule), mesh, documents=documents, **options
        )  # fmt: skip
        call = partial(scan, **flags)
    if not scoped:
        return call

    def in_scope(**tensors: torch.Tensor) -> Any:
        with SequenceScope(layout, mask=Documents(lengths)):
            return call(**tensors)

    return in_scope


@cases.ending_as_a_process
def run_rank(rank: int, whole_case: Mixing) -> dict[str, torch.Tensor]:
    """This rank's results, and the gradients of its tensors, of the last call."""
    case, act = whole_case.of_rank(rank), whole_case.act_of(rank)
    mesh = torch.distributed.init_device_mesh(DEVICE.type, (case.ranks,), mesh_dim_names=("cp",))
    call = mixing_of(case, mesh, flags_of(case))
    result = cases.last_result(case.calls, act, partial(one_call, rank, case, act, call)) or {}
    cases.end_step(mesh)
    return result


def trained(case: Mixing, tokens: dict[str, Any], weights: dict[str, Any]) -> list[str]:
    """The names of what needs gradients."""
    if case.backward == "no_grad" or case.gradients == "none":
        return []
    chosen = {"all": [*tokens, *weights], "tokens": list(tokens), "weights": list(weights)}
    return chosen.get(case.gradients, [list(tokens)[0 if case.gradients == "first" else -1]])


def one_call(rank: int, case: Mixing, act: str, call: Callable[..., Any]) -> dict[str, torch.Tensor]:
    dtype, dim, layout = DTYPES[case.dtype], dim_of(case), layout_of(case)
    tokens, weights = drawn(case)
    mine = {name: layout.shard(x, dim, rank).to(dtype, copy=True) for name, x in tokens.items()}
    if act == "a token less":
        mine = {name: x.narrow(dim, 1, x.shape[dim] - 1).clone() for name, x in mine.items()}
    # Of float32 beside tensors of 16 bits, as parameters and states of such kernels are.
    wide = torch.promote_types(dtype, torch.float32)
    mine |= {name: x.to(wide if not case.kind.startswith("conv") else dtype, copy=True) for name, x in weights.items()}
    names = trained(case, tokens, weights)
    leaves = {name: there(x.requires_grad_(name in names)) for name, x in mine.items()}
    run = call
    if case.checkpoint != "no":

        def run(**tensors: torch.Tensor) -> Any:
            def positional(*values: torch.Tensor) -> Any:
                return call(**dict(zip(tensors, values, strict=True)))

            return checkpoint(positional, *tensors.values(), use_reentrant=case.checkpoint == "around, reentrant")

    with torch.set_grad_enabled(case.backward != "no_grad"):
        given = {name: cases.with_strides(x, "numbers apart" if case.apart else "") for name, x in leaves.items()}
        found = run(**given)
    found = found if isinstance(found, tuple) else (found,)
    results = {"the output": found[0]} | ({"the last state": found[1]} if case.states in ("last", "both") else {})
    if case.backward in ("once", "twice") and names:
        grads = {}
        for name, x in results.items():
            whole = list(x.shape)
            if name == "the output":
                whole[dim] = case.length
            cotangent = there(cotangent_of(case, name, x.new_empty(whole)))
            if name == "the output":
                cotangent = layout.shard(cotangent, dim, rank)
                cotangent = cotangent.narrow(dim, 0, x.shape[dim])
            else:  # the same on all ranks, and each uses it for a share of the loss
                cotangent = cotangent * (rank + 1) / sum(range(case.ranks + 1))
            grads[name] = cotangent
        needed = {name: x for name, x in results.items() if x.requires_grad}
        for again in [True, False] if case.backward == "twice" else [False]:
            for leaf in leaves.values():
                leaf.grad = None
            torch.autograd.backward(list(needed.values()), [grads[name] for name in needed], retain_graph=again)
        results |= {f"the gradient of {name}": leaves[name].grad for name in names}
    return {name: here(x.detach()) for name, x in results.items() if x is not None}


def compared(case: Mixing, found: list[dict[str, torch.Tensor]]) -> Verdict:
    plain, dim, dtype = replace(case, odd=None), dim_of(case), DTYPES[case.dtype]
    tokens, weights = drawn(plain)
    outs, grads = on_one(plain, torch.float64)
    whole = outs | {f"the gradient of {name}": x for name, x in grads.items()}
    tolerance = dict.fromkeys(whole, 1e-11)
    if dtype != torch.float64:
        near_outs, near_grads = on_one(plain, dtype)
        near = near_outs | {f"the gradient of {name}": x for name, x in near_grads.items()}
        rounding = 8 * torch.finfo(dtype).eps
        tolerance = {name: 2 * error(near[name].double(), x) + rounding for name, x in whole.items()}
    layout = layout_of(plain)
    for rank, of_rank in enumerate(found):
        own = case.of_rank(rank)
        act = case.act_of(rank)
        if act:
            continue
        expects = [*outs]
        if own.backward in ("once", "twice"):
            expects += [f"the gradient of {name}" for name in trained(own, tokens, weights)]
        for name in expects:
            if name not in of_rank:
                if own.gradients == "all" or name in outs:
                    return Verdict("wrong", f"rank {rank}: there is no {name}")
                continue
            of_tokens = name == "the output" or name.removeprefix("the gradient of ") in tokens
            if not of_tokens and name != "the last state":
                continue
            part = layout.shard(whole[name], dim, rank) if of_tokens else whole[name]
            if of_rank[name].shape != part.shape:
                return Verdict("wrong", f"rank {rank}: {name} is {tuple(of_rank[name].shape)}, not {tuple(part.shape)}")
            off = error(of_rank[name], part, whole=whole[name])
            if off > tolerance[name]:
                return Verdict("wrong", f"rank {rank}: {name} off by {off:.1e}, at most {tolerance[name]:.1e}")
    for name in weights:
        shares = [of_rank.get(f"the gradient of {name}") for of_rank in found]
        if all(share is not None for share in shares) and case.odd is None:
            at = f"the gradient of {name}"
            if (off := error(sum(shares), whole[at])) > tolerance[at]:
                return Verdict("wrong", f"{at} off by {off:.1e}, at most {tolerance[at]:.1e}")
    if case.act_of(case.odd[0] if case.odd else 0):
        return Verdict("wrong", f"no rank heard of: {case.odd}")
    return Verdict("exact")


def judge(case: Mixing) -> Verdict:
    verdict = cases.judged(case, run_rank, compared, cases.WAIT)
    return replace(verdict, kind="refused by all") if verdict.kind == "refused" and case.odd is None else verdict


if __name__ == "__main__":
    Seeds(Mixing, __file__, draw, judge, partial(simpler, sensible)).main(__doc__)
