"""Random training programs, on one process and on ranks: equal in every number and side effect, or refused.

    python tests/programs.py --cases 200             seeds 0 to 199; in every fourth, one rank differs in one thing
    python tests/programs.py --case "Program(seed=7)"       one, as a failure prints it
    python tests/programs.py --record runs/programs.jsonl    a line a program; seeds that stand there are not run again

A seed draws a :class:`Program`: a small language model of one to three attentions, in a fifth of the seeds of several
doors, and a training as people write it. It has hooks, attributes, counters, changes in place, tables made at first
use, random factors, shared layers, packed documents, checkpoints, accumulation, clipping, two losses whose backwards
run in either order, an evaluation, a caught exception, layers that are left out, gradients that nobody sums, and tokens
decoded with a cache. The same code runs on one process, and on ranks that are threads. Compared are losses, gradients,
parameters, what hooks and attributes hold, and the states of random generators. Failures are reduced to a program with
as many defaults as it still fails with.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AttentionContextParallel,
    Causal,
    Documents,
    Mask,
    ModuleContextParallel,
    SequenceScope,
    UnreducedGradientsError,
    context_attention,
    flex_attention,
    global_loss,
    global_token_count,
    next_token_labels,
    parallelize_module,
    sum_gradients,
)
from cp_styles.batch import document_positions
from cp_styles.functions.decode import KVCache, context_decode
from cp_styles.layouts import SequenceLayout, contiguous, head_tail, striped
from cp_styles.testing import RankTimeout, run_ranks
from cp_styles.torch_api import context_parallel
from tests.cases import of_the_package
from tests.oracle import error, randn
from tests.seeds import Seeds, Verdict, with_defaults
from tests.tables import STRATEGIES, divides

WORDS, WIDTH, HEADS, LENGTHS = 17, 12, 2, (12, 9)
# float64; sums of some hundred terms in another order, through three layers and two steps of an optimizer.
EXACT = 1e-10
WAIT = 60.0


class Planted(Exception):
    """An error of the program itself, which it catches."""


@dataclass(frozen=True)
class Program:
    """A training. The defaults are the simplest; ``odd`` is (rank, what only this rank does)."""

    seed: int = 0
    door: str = "module"
    ranks: int = 2
    strategy: str = "ring"
    layout: str = "contiguous"
    attentions: tuple[str, ...] = ("sdpa",)
    effects: tuple[str, ...] = ()
    shared: bool = False
    parallel: bool = False
    checkpoint: str = "no"
    accumulation: int = 1
    losses: str = "one"
    clip: bool = False
    evaluate: bool = False
    caught: str = "no"
    dropped: bool = False
    changing_lengths: bool = False
    documents: bool = False
    decodes: bool = False
    unsummed: bool = False
    buffers: bool = False  # the block cuts the batch, in place
    copied: bool = False  # a deepcopy of the model with its styles is trained, and the model has ended
    odd: tuple[int, str] | None = None

    def act_of(self, rank: int) -> str:
        return self.odd[1] if self.odd is not None and self.odd[0] == rank else ""


LAYOUTS = {"contiguous": contiguous, "head_tail": head_tail, "striped": striped}
# The attentions that each door takes.
DOORS = {
    "module": ("sdpa", "flex", "core"),
    "scope": ("sdpa", "flex", "core"),
    "style": ("core", "function"),
    "block": ("sdpa", "flex", "core"),
    "function": ("function",),
    "several": ("sdpa", "flex", "core", "function"),  # a module, a style or a function, each its own
}
EFFECTS = ("hook", "backward hook", "attribute", "counter", "list", "in place", "tensor hook", "table", "generator")
CHOICES: dict[str, tuple[Any, ...]] = {
    "ranks": (2, 2, 3, 4),
    "strategy": tuple(STRATEGIES),
    "layout": tuple(LAYOUTS),
    "shared": (False, False, True),
    "parallel": (False, False, True),
    "checkpoint": ("no", "no", "layers", "layers, reentrant", "function"),
    "accumulation": (1, 1, 2),
    "losses": ("one", "one", "sum", "two", "two, last first"),
    "clip": (False, True),
    "evaluate": (False, False, True),
    "caught": ("no", "no", "before", "in a layer", "in the backward"),
    "dropped": (False, False, True),
    "changing_lengths": (False, True),
    "documents": (False, True),
    "decodes": (False, False, True),
    "unsummed": (False,) * 12 + (True,),
}
# Not another batch, cut by hand: that nobody notices ("What is not detected" in tutorials/troubleshooting.md).
ODD = ("a layer less", "a backward more", "losses in another order", "its own error", "a step more")


def draw(seed: int) -> Program:
    dice = random.Random(seed)
    door = dice.choice([name for name in DOORS if name != "several"])
    door = "several" if seed % 5 == 1 else door
    attentions = tuple(dice.choice(DOORS[door]) for _ in range(dice.randint(1, 3)))
    effects = tuple(effect for effect in EFFECTS if dice.random() < 0.3)
    values = {name: dice.choice(choices) for name, choices in CHOICES.items()}
    values["buffers"], values["copied"] = seed % 2 == 0, seed % 3 == 0
    program = sensible(Program(seed=seed, door=door, attentions=attentions, effects=effects, **values))
    if seed % 4 == 3:
        act = dice.choice(ODD)
        # Two backwards through one graph add up in any order, unless their recomputations draw random factors.
        drawn_again = "generator" in effects and program.checkpoint != "no"
        if act == "losses in another order" and (drawn_again or not program.losses.startswith("two")):
            act = "its own error"
        if act == "a layer less" and len(program.attentions) == 1:
            act = "a backward more"
        program = replace(program, odd=(dice.randrange(program.ranks), act))
    return program


def sensible(program: Program) -> Program:
    if program.checkpoint == "layers, reentrant" and program.losses.startswith("two"):
        program = replace(program, losses="sum")  # torch refuses a second backward through it
    if program.checkpoint == "layers, reentrant" and program.door == "scope":
        program = replace(program, checkpoint="layers")  # refused: its recomputation does not know the scope
    if program.checkpoint == "function" and program.door == "several":
        program = replace(program, checkpoint="layers")  # a part of a layer that runs outside of it is in no module
    if not divides(program.strategy, program.ranks):
        program = replace(program, strategy="Ulysses")
    if program.door not in ("scope", "function", "block"):  # a style has one mask for all batches
        program = replace(program, documents=False)
    return program if program.door == "block" else replace(program, buffers=False)


def documents(length: int, seed: int) -> tuple[int, ...]:
    """Those of a batch, of other lengths in the next one."""
    first = 1 + seed % 3
    return first, 4, length - first - 4


def document_ids(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


class Core(nn.Module):
    """The attention of one process, in the documents of the batch if it has some; on ranks they are the scope's or
    block's."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def forward(self, query, key, value):
        lengths = self.ranks.documents
        if not lengths or self.ranks.mesh is not None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        ids = document_ids(lengths)
        return F.scaled_dot_product_attention(query, key, value, (ids[:, None] == ids).tril())


class Layer(nn.Module):
    """An attention with its projections, and the program's side effects."""

    def __init__(self, index: int, program: Program, ranks: Ranks) -> None:
        super().__init__()
        self.kind, self.effects, self.parallel = program.attentions[index], program.effects, program.parallel
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.core = Core(ranks)
        self.attend = ranks.attend
        self.raises = False
        self.last: torch.Tensor | None = None
        self.calls, self.norms = 0, []
        self.generator = torch.Generator().manual_seed(index)
        self.register_buffer("count", torch.zeros(()))

    def attention(self, x: torch.Tensor, blocks: Any) -> torch.Tensor:
        query, key, value = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.kind == "sdpa" or (self.kind == "flex" and blocks is None):  # torch's has no backward on CPU
            out = self.core.forward(query, key, value)  # not as a module of its own
        elif self.kind == "flex":
            out = flex_attention(query, key, value, block_mask=blocks)
        else:
            out = (self.core if self.kind == "core" else self.attend)(query, key, value)
        return self.out(out.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor, blocks: Any) -> torch.Tensor:
        self.calls += "counter" in self.effects
        if "counter" in self.effects:
            self.count += 1
        y = self.attention(x, blocks)
        if "generator" in self.effects:
            y = y * torch.rand((), generator=self.generator, dtype=x.dtype)
        if self.raises:
            raise Planted
        if self.parallel:
            y = y + self.attention(x * 0.5, blocks)
        if "in place" in self.effects:
            y.mul_(0.5).add_(x)
        else:
            y = x + 0.5 * y
        if "attribute" in self.effects:
            self.last = y
        if "list" in self.effects:
            self.norms.append(y.detach())
        return y


class Model(nn.Module):
    """``forward(tokens, positions)`` returns two heads' logits."""

    def __init__(self, program: Program, ranks: Ranks) -> None:
        super().__init__()
        self.checkpoint = program.checkpoint
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(max(LENGTHS), WIDTH)
        layers = [Layer(index, program, ranks) for index in range(len(program.attentions))]
        if program.shared:
            layers.append(layers[0])
        self.layers = nn.ModuleList(layers)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, WORDS)])
        self.has_table, self.table, self.fills = "table" in program.effects, torch.zeros(0), 0
        self.dropped: int | None = None
        self.kept: dict[str, Any] = {}  # arguments of checkpoints

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, blocks: Any) -> list[torch.Tensor]:
        x = self.words(tokens) + self.places(positions)
        if self.has_table:  # as of rotary embeddings, made where it is first needed
            if self.table.numel() == 0:
                self.table, self.fills = torch.arange(max(LENGTHS))[:, None] * torch.linspace(0, 0.5, WIDTH).cos(), 1
            x = x + self.table[positions]
        for index, layer in enumerate(self.layers):
            if index == self.dropped:
                continue
            if self.checkpoint == "no" or not torch.is_grad_enabled():
                x = layer(x, blocks)
            elif self.checkpoint == "function":
                x = x + checkpoint(layer.attention, x, blocks, use_reentrant=False, **self.kept)
            else:
                x = checkpoint(layer, x, blocks, use_reentrant="reentrant" in self.checkpoint, **self.kept)
        return [head(x) for head in self.heads]


@dataclass
class Record:
    """What a training leaves, by name. Tensors with a sequence dim hold this rank's tokens."""

    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    per_token: dict[str, tuple[torch.Tensor, SequenceLayout]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class Ranks:
    """How this rank of a mesh runs the program; ``mesh`` None is one process."""

    def __init__(self, program: Program, mesh: DeviceMesh | None) -> None:
        self.program, self.mesh = program, mesh
        self.size, self.rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        self.options = {"strategy": STRATEGIES[program.strategy]}
        self.documents: tuple[int, ...] = ()  # of the batch

    def layout(self, length: int) -> SequenceLayout:
        return LAYOUTS[self.program.layout](length, self.size)

    def mask(self) -> Mask:
        return Causal() & Documents(self.documents) if self.documents else Causal()

    def attend(self, *qkv: torch.Tensor) -> torch.Tensor:
        """The causal attention of the function, whose mask is that of the batch."""
        if self.mesh is None:
            return Core(self)(*qkv)
        layout = self.layout(self.length)
        return context_attention(*qkv, self.mesh, mask=self.mask(), layout=layout, **self.options)

    def apply(self, model: Model) -> None:
        if self.mesh is None or self.program.door in ("function", "block"):
            return
        balancer = LAYOUTS[self.program.layout]
        style = AttentionContextParallel(layout=balancer, **self.options)
        module = ModuleContextParallel(layout=None if self.program.door == "scope" else balancer, **self.options)
        if self.program.door in ("module", "scope"):
            parallelize_module(model, self.mesh, module)
            return
        plan = {}
        for index, kind in enumerate(self.program.attentions):
            if self.program.door == "style" or kind == "core":
                plan[f"layers.{index}.core"] = style
            elif kind != "function":
                plan[f"layers.{index}"] = module
        parallelize_module(model, self.mesh, plan)

    def around(self, model: Model, layout: SequenceLayout, batch: tuple[torch.Tensor, ...]) -> Any:
        self.length = layout.length
        documents = {"mask": self.mask()} if self.documents else {}
        if self.mesh is not None and self.program.door == "scope":
            scope = SequenceScope(layout, **documents)
            model.kept = {"context_fn": scope.for_checkpoint}
            return scope
        if self.mesh is not None and self.program.door == "block":
            buffers = {"buffers": batch, "buffer_seq_dims": [1] * len(batch)} if self.program.buffers else {}
            balancer = LAYOUTS[self.program.layout]
            return context_parallel(self.mesh, layout=balancer, **buffers, **documents, **self.options)
        return contextlib.nullcontext()

    def mean(self, losses: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return losses.sum() / (labels != -100).sum()
        return global_loss(losses, global_token_count(labels, self.mesh), self.mesh)

    def sum(self, model: Model) -> None:
        if self.mesh is not None and not self.program.unsummed:
            sum_gradients(model.parameters(), self.mesh)


def train(program: Program, mesh: DeviceMesh | None) -> Record:
    ranks = Ranks(program, mesh)
    act = program.act_of(ranks.rank) if mesh is not None else ""
    with torch.device("meta"):  # draws nothing from the generator, which ranks that are threads share
        model = Model(program, ranks)
    model.to_empty(device="cpu")
    for index, parameter in enumerate(model.parameters()):
        parameter.data = randn(50 + index, *parameter.shape) * 0.3
    for buffer in model.buffers():
        buffer.zero_()
    record = Record()
    _add_hooks(model, program, record)
    ranks.apply(model)
    if program.copied:
        kept = [ranks, *(layer.generator for layer in model.layers)]
        model = copy.deepcopy(model, {id(each): each for each in kept})
    # Not Adam: it makes steps of full size of the gradients of key biases, which are zero but for rounding.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2 + (act == "a step more")):
        model.dropped = 0 if program.dropped and step == 1 and len(model.layers) > 1 else None
        if act == "a layer less":
            model.dropped = 1 if model.dropped == 0 else 0
        length = LENGTHS[step % 2] if program.changing_lengths else LENGTHS[0]
        for part in range(program.accumulation):
            seed = 1000 * program.seed + 10 * step + part
            one_batch(program, ranks, model, length, seed, act, record, f"step {step}, part {part}")
        ranks.sum(model)
        if program.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                record.numbers[f"step {step}, gradient of {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        record.numbers[f"{name} at the end"] = parameter.detach().clone()
    if program.decodes:
        decode(ranks, model, record)
    record.counts["fills of the table"] = model.fills
    for index, layer in enumerate(model.layers):
        record.numbers[f"generator of layer {index}"] = layer.generator.get_state().double()
        record.counts[f"counter of layer {index}"] = layer.calls
        record.counts[f"buffer of layer {index}"] = int(layer.count)
        record.counts[f"list of layer {index}"] = len(layer.norms)
        last = ranks.layout(length)
        if layer.last is not None and layer.last.shape[1] == last.lengths[ranks.rank]:
            record.per_token[f"attribute of layer {index}"] = layer.last.detach(), last
    return record


def one_batch(
    program: Program, ranks: Ranks, model: Model, length: int, seed: int, act: str, record: Record, where: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (2, length), generator=generator)
    ranks.documents = documents(length, seed) if program.documents else ()
    ids = document_ids(ranks.documents or (length,))[None]
    labels, layout = next_token_labels(tokens, document_ids=ids), ranks.layout(length)
    if ranks.mesh is None:  # not by the function that the ranks call
        labels = F.pad(tokens[:, 1:].masked_fill(ids[:, 1:] != ids[:, :-1], -100), (0, 1), value=-100)
    labels, positions, blocks = layout.shard(labels, 1, ranks.rank), document_positions(ids).expand(2, -1), None
    if ranks.mesh is None or not program.buffers:
        tokens, positions = (layout.shard(x, 1, ranks.rank) for x in (tokens, positions))
    if "flex" in program.attentions and ranks.mesh is not None:
        own = ids[0]
        blocks = create_block_mask(
            lambda b, h, q, k: (q >= k) & (own[q] == own[k]), None, None, length, length, device="cpu", BLOCK_SIZE=16
        )
    around, inputs = partial(ranks.around, model, layout, (tokens, positions)), (tokens, positions, blocks)
    if program.caught != "no":
        with contextlib.suppress(Planted):
            fail(program.caught, model, around, inputs)
        for parameter in model.parameters():
            parameter.grad = None if where.endswith("part 0") else parameter.grad
    if act == "its own error":
        with contextlib.suppress(Planted):
            fail("in a layer", model, around, inputs)
    if program.evaluate:
        with torch.no_grad(), around():
            record.per_token[f"{where}, evaluation"] = model(*inputs)[0], layout
    with around():
        outputs = model(*inputs)
    each = [F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels) for x in outputs]
    means = [ranks.mean(losses, labels) for losses in each]
    for index, loss in enumerate(means):
        record.numbers[f"{where}, loss {index}"] = loss.detach()
    order = means[::-1] if program.losses == "two, last first" else means
    if act == "losses in another order":
        order = order[::-1]
    if program.losses == "one":
        order = means[:1]
    elif program.losses == "sum":
        order = [means[0] + means[1]]
    for index, loss in enumerate(order):
        loss.backward(retain_graph=index < len(order) - 1 or act == "a backward more")
    if act == "a backward more":
        order[-1].backward()


@torch.no_grad()
def decode(ranks: Ranks, model: Model, record: Record) -> None:
    """Three new tokens after a prompt whose keys are cut, by the first layer's projections."""
    length, new = LENGTHS[0], 3
    qkv = model.layers[0].qkv(randn(7, 2, length + new, WIDTH).to(model.heads[0].weight.dtype))
    query, key, value = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))
    if ranks.mesh is not None:
        layout = ranks.layout(length)
        prompt = (layout.shard(x[:, :, :length].contiguous(), 2, ranks.rank) for x in (key, value))
        cache = KVCache(ranks.mesh, layout, *prompt)
    for token in range(length, length + new):
        one = (query[:, :, token : token + 1], key[:, :, token : token + 1], value[:, :, token : token + 1])
        if ranks.mesh is None:
            out = F.scaled_dot_product_attention(one[0], key[:, :, : token + 1], value[:, :, : token + 1])
        else:
            cache.append(*one[1:])
            out = context_decode(one[0], cache, mask=Causal())
        record.numbers[f"decoded token {token}"] = out


def fail(where: str, model: Model, around: Callable[[], Any], inputs: tuple[Any, ...]) -> None:
    """The same failure on every rank."""
    if where == "before":
        raise Planted
    if where == "in a layer":
        model.layers[-1].raises = True
    try:
        with around():
            outputs = model(*inputs)
    finally:
        model.layers[-1].raises = False
    if where == "in the backward":

        def hook(grad: torch.Tensor) -> None:
            raise Planted

        outputs[0].register_hook(hook)
        outputs[0].sum().backward()


def _add_hooks(model: Model, program: Program, record: Record) -> None:
    counts = record.counts

    def count(name: str, *_: Any) -> None:
        counts[name] = counts.get(name, 0) + 1

    def on_output(name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        count(f"forward hook of {name}")
        if "tensor hook" in program.effects and output.requires_grad:
            output.register_hook(partial(_counted, counts, f"tensor hook of {name}"))

    for index, layer in enumerate(dict.fromkeys(model.layers)):
        if "hook" in program.effects or "tensor hook" in program.effects:
            layer.register_forward_hook(partial(on_output, f"layer {index}"))
        if "backward hook" in program.effects and "in place" not in program.effects:
            layer.register_full_backward_hook(partial(count, f"backward hook of layer {index}"))


def _counted(counts: dict[str, int], name: str, grad: torch.Tensor) -> None:
    counts[name] = counts.get(name, 0) + 1


def judge(program: Program) -> str:
    """What is wrong; empty if nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = torch.get_rng_state()
        expected = train(replace(program, odd=None), None)

        def on(rank: int) -> Record:
            try:
                mesh = torch.distributed.init_device_mesh("cpu", (program.ranks,), mesh_dim_names=("cp",))
                return train(program, mesh)
            except Exception as problem:
                traceback.clear_frames(problem.__traceback__)
                raise
            finally:
                gc.collect()  # cycles keep a group; its connections must close with the rank, as with a process

        try:
            results = run_ranks(on, program.ranks, timeout_seconds=WAIT, return_errors=True)
        except RankTimeout as waited:
            errors = getattr(waited.__cause__, "errors", {})
            others = [errors.get(rank) for rank in range(program.ranks) if not program.act_of(rank)]
            # A rank that went on after its own error waits for the others, which have refused and ended. Processes
            # that end close their connections; threads may not.
            if program.odd and all(isinstance(other, ValueError) and of_the_package(other) for other in others):
                return ""
            return f"waited: {waited}"
    if not torch.equal(state, torch.get_rng_state()):
        return "the state of the random generator has changed"
    errors = {rank: result for rank, result in enumerate(results) if isinstance(result, BaseException)}
    for rank, problem in errors.items():
        if not of_the_package(problem):
            frame = traceback.extract_tb(problem.__traceback__)[-1]
            words = f"{type(problem).__name__}: {problem} ({Path(frame.filename).name}:{frame.lineno})"
            return f"a raw error on rank {rank}: {words}"
    if program.unsummed and program.odd is None:
        heard = sum(isinstance(problem, UnreducedGradientsError) for problem in errors.values())
        return "" if heard == program.ranks else f"gradients that nobody sums: {heard} ranks raised"
    if errors:
        rank, problem = next(iter(errors.items()))
        if len(errors) == program.ranks or (program.act_of(rank) == "a step more" and len(errors) == 1):
            return "" if program.odd is not None else f"refused: {problem}"
        return f"only ranks {list(errors)} raised: {problem}"
    return differences(program, expected, results)


def differences(program: Program, expected: Record, results: list[Record]) -> str:
    for rank, record in enumerate(results):
        for name, value in expected.numbers.items():
            if name not in record.numbers:
                return f"rank {rank}: {name} is not there"
            if (off := error(record.numbers[name], value)) > EXACT:
                return f"rank {rank}: {name} is off by {off:.1e}"
        for name, (value, _) in expected.per_token.items():
            mine, layout = record.per_token[name]
            if (off := error(mine, layout.shard(value, 1, rank), whole=value)) > EXACT:
                return f"rank {rank}: {name} is off by {off:.1e}"
        if record.counts != expected.counts:
            names = [name for name in expected.counts | record.counts
                     if expected.counts.get(name) != record.counts.get(name)]  # fmt: skip
            return f"rank {rank}: {names[0]} is {record.counts.get(names[0])}, not {expected.counts.get(names[0])}"
    return ""


def simpler(program: Program) -> Iterator[Program]:
    yield from map(sensible, with_defaults(program, "seed", "odd", "door", "attentions"))
    for index in range(len(program.attentions)):
        if len(program.attentions) > 1:
            yield replace(program, attentions=program.attentions[:index] + program.attentions[index + 1 :])
    for effect in program.effects:
        yield replace(program, effects=tuple(other for other in program.effects if other != effect))


def verdict_of(program: Program) -> Verdict:
    problem = judge(program)
    return Verdict("wrong", problem) if problem else Verdict("exact")


if __name__ == "__main__":
    Seeds(Program, __file__, draw, verdict_of, simpler).main(__doc__)
