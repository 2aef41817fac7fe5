"""The examples of README.md and of its pages run and do what the text says; links point at what there is."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import avg_pool1d, conv1d, cross_entropy, pad, silu
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AttentionContextParallel,
    BatchSharder,
    TransferError,
    contiguous,
    global_loss,
    global_token_count,
    head_tail,
    next_token_labels,
    save_attention,
    striped,
    sum_gradients,
)
from cp_styles.__main__ import main
from cp_styles.testing import run_ranks
from cp_styles.torch_api import context_parallel
from tests import pages
from tests.conftest import QUICK
from tests.first_hours import nanogpt
from tests.oracle import dense_attention, document_of, error, randn
from tests.pages import PAGES, README, ROOT, SHOWN
from tests.ranks.attention_case import EXACT, Core, Problem, cp_mesh, on_every_rank, run_attention
from tutorials.llama import Llama, LlamaConfig

NOTEBOOKS = {
    path: "\n".join(
        "".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "markdown"
    )
    for path in sorted((ROOT / "tutorials").glob("*.ipynb"))
}
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
RECORDS = {ROOT / "tests/records/README.md": (ROOT / "tests/records/README.md").read_text()}
TEXTS = {ROOT / "README.md": README, ROOT / "CONTRIBUTING.md": CONTRIBUTING, **PAGES, **NOTEBOOKS, **RECORDS}
DOCUMENTS = (300, 10, 690)


def example(name: str) -> str:
    return re.sub(r"(torch\.randn\(.*), 64\b", r"\1, 8", pages.example(name))  # an eighth of the work


def examples(*names: str) -> dict[str, Any]:
    """The variables of these examples, which run one after the other."""
    scope: dict[str, Any] = {}
    for name in names:
        exec(example(name), scope)
    return scope


def run_example(*names: str, wanted: str) -> list[torch.Tensor]:
    """What the variables in ``wanted`` and their gradients are, whole, after these examples, one after the other."""

    def on(rank):
        scope = examples(*names)
        leaves = [scope[name] for name in wanted.split()]
        layout = scope.get("layout", head_tail(1000, 2))
        return layout, [x.detach() for x in leaves], [x.grad for x in leaves if x.is_leaf]

    (layout, *first), (_, *second) = run_ranks(on, 2)
    return [
        layout.unshard(parts, 2) if parts[0].ndim == 4 else sum(parts)
        for mine, others in zip(first, second, strict=True)
        for parts in zip(mine, others, strict=True)
    ]


def check(found: list[torch.Tensor], attend) -> None:
    """``found``: inputs, output, gradients. float32: a few 1e-7 from the order of summation; a row of a wrong mask
    would be off by its own size."""
    inputs = [x.double().requires_grad_() for x in found[: (len(found) - 1) // 2]]
    expected = attend(*inputs)
    expected.sum().backward()
    for mine, wanted in zip(found[len(inputs) :], [expected, *(x.grad for x in inputs)], strict=True):
        assert error(mine, wanted) < 1e-5


CAUSAL = torch.ones(1000, 1000, dtype=torch.bool).tril()


def test_the_example_of_choosing():
    names = examples("choosing")
    assert len(names["reports"]) == 3
    assert isinstance(names["best"].strategy, names["Ulysses"])  # 8 ranks of one machine


def test_the_example_of_a_convolution():
    def on(rank):
        scope = examples("attention", "convolution")
        return [scope[name].detach() for name in ("x_BCL", "y_BCL")]

    x, y = (head_tail(1000, 2).unshard(parts, 2) for parts in zip(*run_ranks(on, 2), strict=True))
    whole = silu(conv1d(pad(x.double(), (3, 0)), torch.ones(8, 1, 4, dtype=torch.float64), groups=8))
    assert error(y, whole) < 1e-6  # float32; a row that is not sent would be off by its own size


def test_the_examples_of_a_halo_and_of_blocks():
    def on(rank):
        scope = examples("attention", "halo", "blocks")
        names = ("features_BLC", "pooled_BNC")
        return [scope[name].detach() for name in names], scope["numbers"]

    ((features, pooled), numbers), ((others, other_pooled), other_numbers) = run_ranks(on, 2)
    ids = torch.arange(1000)[None] % 13
    rows = torch.arange(800.0).view(100, 8).sin().double()[(ids * 7 + pad(ids, (1, 0))[:, :-1]) % 100]
    whole = avg_pool1d(rows.mT, 5, 1, 2).mT
    assert error(head_tail(1000, 2).unshard([features, others], 1), whole) < 1e-6  # float32
    wanted = pad(whole, (0, 0, 8, 0)).unfold(1, 72, 64).mean(-1)
    blocks = torch.cat((pooled, other_pooled), 1)[:, torch.cat((numbers, other_numbers)).argsort()]
    assert blocks.shape == (1, 15, 8)
    assert error(blocks, wanted) < 1e-6


def test_the_example_of_keys_of_another_sequence():
    found = run_example("attention", "halo", "blocks", "other keys", wanted="q k v out")[:4]
    q, k, v = (x.double() for x in found[:3])
    means = [x.unfold(2, 64, 64).mean(-1) for x in (k, v)]
    near = CAUSAL & ~CAUSAL.tril(-128)
    far = torch.arange(1, 1001)[:, None] // 64 > torch.arange(15)
    keys, values = (torch.cat(both, 2) for both in zip((k, v), means, strict=True))
    assert error(found[3], dense_attention(q, keys, values, torch.cat((near, far), 1))) < 1e-5


def test_the_example_is_the_attention_of_all_tokens():
    found = run_example("attention", wanted="q k v out")
    check(found, lambda q, k, v: dense_attention(q, k, v, CAUSAL))


@pytest.mark.parametrize("size", ["0.9", "0.3"])
def test_the_example_of_qk_clip(size: str):
    """With the new weights the largest score of a head is at the threshold, or smaller weights are as they were."""

    def on(rank):
        scope = examples("attention")
        exec(example("clip").replace("0.9", size), scope)
        return scope["hidden"], scope["max_H"], [scope[name].weight.detach() for name in ("to_q", "to_k")]

    parts, (max_H, _), (weights, others) = zip(*run_ranks(on, 2), strict=True)
    assert all(map(torch.equal, weights, others))
    hidden = head_tail(1000, 2).unshard(parts, 1).double()
    q, k = ((hidden @ x.double().mT).unflatten(2, (8, 16)).transpose(1, 2) for x in weights)
    largest = (q @ k.mT * 16**-0.5).masked_fill(~CAUSAL, -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(largest, max_H.clamp(max=100).double(), rtol=1e-5, atol=0)  # float32
    assert (max_H > 100).all() == (size == "0.9")


def test_packed_documents_in_a_window_layer():
    found = run_example("attention", "packed", wanted="q k v out")
    document, positions = torch.tensor([document_of(DOCUMENTS)(p) for p in range(1000)]), torch.arange(1000)
    near = positions[:, None] - positions[None, :] < 100
    mask = CAUSAL & near & (document[:, None] == document[None, :])
    check(found, lambda q, k, v: dense_attention(q, k, v, mask))


def test_sinks():
    """A key of its own with value 0; the sum of the ranks' shares is the gradient of its logit."""

    def on(rank):
        scope = examples("attention")
        for leaf in (scope["q"], scope["k"], scope["v"]):
            leaf.grad = None
        exec(example("sinks"), scope)
        scope["out"].sum().backward()
        q, k, v, sink = (scope[name] for name in ("q", "k", "v", "sink"))
        return [x.detach() for x in (q, k, v, scope["out"])], [q.grad, k.grad, v.grad], sink.grad

    (first, first_grads, one), (second, second_grads, other) = run_ranks(on, 2)
    parts = zip(first + first_grads, second + second_grads, strict=True)
    q, k, v, out, *grads = (head_tail(1000, 2).unshard(both, 2) for both in parts)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    sink = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    more = [torch.cat((torch.zeros_like(x[:, :, :1]), x), 2) for x in inputs[1:]]
    bias = torch.cat((sink[:, None, None].expand(8, 1000, 1), torch.zeros(8, 1000, 1000)), 2)
    mask = torch.cat((torch.ones(1000, 1, dtype=torch.bool), CAUSAL), 1)
    expected = dense_attention(inputs[0], *more, mask, bias=bias)
    expected.sum().backward()
    for found, wanted in zip([out, *grads, one + other], [expected, *(x.grad for x in [*inputs, sink])], strict=True):
        assert error(found, wanted) < 1e-5


def test_keys_that_an_indexer_selects():
    """The attention to 64 keys, and the gradient of the indexer's loss."""

    def on(rank):
        scope = examples("attention", "flex", "selected")
        tensors = [scope[name] for name in ("q", "k", "v", "out", "index_q", "index_k", "index_weights")]
        return [x.detach() for x in tensors] + [scope["index_q"].grad], scope["layout"]

    (first, layout), (second, _) = run_ranks(on, 2)
    dims = (2, 2, 2, 2, 2, 1, 2, 2)
    q, k, v, out, index_q, index_k, weights, grad = (
        layout.unshard(both, dim).double() for *both, dim in zip(first, second, dims, strict=True)
    )
    index_q.requires_grad_()
    scores = ((index_q @ index_k[:, None].mT / 4).relu() * weights[..., None]).sum(1)
    scores, positions = scores.masked_fill(~CAUSAL, -torch.inf).topk(64)
    mask = torch.zeros(1, 1000, 1000, dtype=torch.bool).scatter_(-1, positions, True) & CAUSAL
    logits = (q @ k.mT / 8**0.5).masked_fill(~mask[:, None], -torch.inf)
    # A score that float32 rounds may select another key than one in float64.
    assert error(out, logits.softmax(-1) @ v) < 2e-2
    target, log_p = logits.softmax(-1).mean(1).gather(-1, positions), scores.log_softmax(-1)
    torch.where(target > 0, target * (target.log() - log_p), 0).sum().div(1000).backward()
    assert error(grad, index_q.grad) < 2e-2


def moba_on_one(q, k, v, block: int, top: int) -> torch.Tensor:
    length, at = q.shape[2], torch.arange(q.shape[2])
    complete, of_head = length // block, q.shape[1] // k.shape[1]
    means = k[:, :, : complete * block].unflatten(2, (complete, block)).mean(3).repeat_interleave(of_head, 1)
    own = at[:, None] // block
    scores = (q @ means.mT).masked_fill(torch.arange(complete) >= own, -torch.inf).detach()
    best, blocks = scores.topk(min(top, complete))
    chosen = (blocks[..., None] == at // block) & (best > -torch.inf)[..., None]
    return dense_attention(q, k, v, (chosen.any(-2) | (own == at // block)) & (at[:, None] >= at))


def nsa_on_one(q, k, v, gates, block: int, top: int, window: int) -> torch.Tensor:
    length, at = q.shape[2], torch.arange(q.shape[2])
    complete, of_head = length // block, q.shape[1] // k.shape[1]
    far = [x[:, :, : complete * block].unflatten(2, (complete, block)).mean(3) for x in (k, v)]
    ended = torch.arange(complete) < (at[:, None] + 1) // block
    logits = (q @ far[0].repeat_interleave(of_head, 1).mT * q.shape[3] ** -0.5).detach()
    weights = logits.masked_fill(~ended, -torch.inf).softmax(-1).nan_to_num().unflatten(1, (k.shape[1], -1)).sum(2)
    best, blocks = weights.topk(min(top, complete))
    chosen = ((blocks[..., None] == at // block) & (best > 0)[..., None]).any(-2).repeat_interleave(of_head, 1)
    before = at[:, None] - at
    masks = ended, chosen & (before >= 0), (before >= 0) & (before < window)
    keys = far, (k, v), (k, v)
    return sum(gate * dense_attention(q, *pair, mask) for gate, pair, mask in zip(gates, keys, masks, strict=True))


@pytest.mark.parametrize("name", ["moba", "nsa"])
def test_blocks_of_keys_for_each_head(name: str):
    """The page's programs in float64, for blocks that cross parts and an incomplete last one, and many to gather."""
    cases = [(47, 5, layout) for layout in (head_tail, contiguous, striped)] + [(600, 4, head_tail)]
    inputs = {length: [randn(at, 2, heads, length, 8) for at, heads in enumerate((4, 2, 2))] for length in (47, 600)}
    gates = {length: randn(5, 3, 2, 4, length, 1) for length in inputs}

    def on(rank: int):
        scope = examples("attention", "moba", *(["nsa"] if name == "nsa" else []))
        found = []
        for length, block, make in cases:
            layout = make(length, 2)
            leaves = [layout.shard(x, 2, rank).clone().requires_grad_() for x in inputs[length]]
            own = layout.shard(gates[length], 3, rank).clone().requires_grad_()
            options = {"mesh": scope["mesh"], "layout": layout, "block": block, "top": 2}
            if name == "nsa":
                out = scope["nsa"](*leaves, own, **options, window=7)
            else:
                out = scope["moba"](*leaves, **options)
            out.backward(layout.shard(randn(9, *inputs[length][0].shape), 2, rank))
            found.append([out.detach(), *(x.grad for x in leaves), *([own.grad] if name == "nsa" else [])])
        return found

    for (length, block, make), *parts in zip(cases, *run_ranks(on, 2), strict=True):
        leaves = [x.clone().requires_grad_() for x in inputs[length]]
        whole = gates[length].clone().requires_grad_()
        out = nsa_on_one(*leaves, whole, block, 2, 7) if name == "nsa" else moba_on_one(*leaves, block, 2)
        out.backward(randn(9, *out.shape))
        wanted = [out.detach(), *(x.grad for x in leaves), *([whole.grad] if name == "nsa" else [])]
        for dim, expected, *both in zip((2, 2, 2, 2, 3), wanted, *parts, strict=False):
            assert error(make(length, 2).unshard(both, dim), expected) < EXACT


def test_ulysses_by_hand():
    found = run_example("attention", "collectives", wanted="q k v out")[:4]
    assert error(found[3], dense_attention(*(x.double() for x in found[:3]), CAUSAL)) < 1e-5


def small_llama() -> tuple[Llama, torch.Tensor]:
    """Drawn before there are threads, which would share the generator."""
    torch.manual_seed(0)
    config = LlamaConfig(vocabulary=11, width=16, layers=2, heads=4, kv_heads=2, hidden=24)
    return Llama(config).double(), torch.randint(0, 11, (2, 29))


def one_process(model: Llama, tokens: torch.Tensor) -> list[torch.Tensor]:
    logits = model(tokens, torch.arange(29))
    loss = cross_entropy(logits.flatten(0, 1), next_token_labels(tokens).flatten())
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.filterwarnings("error::cp_styles.UnverifiedModelWarning")
def test_a_model_whose_code_stays_as_it_is():
    model, tokens = small_llama()
    expected = one_process(model, tokens)

    def on(rank):
        names = {"model": copy.deepcopy(model), "tokens": tokens, "mesh": cp_mesh(3)}
        exec(example("five lines"), names)
        found = [names["loss"].detach(), *(parameter.grad for parameter in names["model"].parameters())]
        return max(error(*pair) for pair in zip(found, expected, strict=True))

    assert max(run_ranks(on, 3)) < EXACT


def plain_loop(model: nn.Module, batches, validation, prompt, steps: int):
    """The page's loop on one device: (parameters, the last loss of an evaluation, a sample)."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number in range(steps):
        for x, y in batches(number):
            loss = cross_entropy(model(x)[0].flatten(0, 1), y.flatten())
            (loss / len(batches(number))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (number + 1) % 2 == 0:
            with torch.no_grad():
                losses = [cross_entropy(model(x)[0].flatten(0, 1), y.flatten()) for x, y in validation]
    return [x.detach() for x in model.parameters()], torch.stack(losses).mean(), model.generate(prompt, 5)


@pytest.mark.filterwarnings("error::cp_styles.UnverifiedModelWarning")
def test_a_whole_loop(tmp_path: Path):
    """Four steps; and two, a checkpoint, and two more of a new model. The gradients are longer than what clips them."""
    torch.manual_seed(0)
    tokens, model = torch.randint(0, 11, (5, 2, 14)), nanogpt.GPTWithPositions().double()
    with torch.no_grad():
        model.head.weight.mul_(20)
    pairs = [(x[:, :-1], x[:, 1:]) for x in tokens]

    def batches(number: int):
        return pairs[number % 3 : number % 3 + 2]

    data = {"batches": batches, "validation": pairs[3:], "prompt": pairs[4][0]}
    expected, loss, text = plain_loop(copy.deepcopy(model), **data, steps=4)
    first = copy.deepcopy(model)
    cross_entropy(first(pairs[0][0])[0].flatten(0, 1), pairs[0][1].flatten()).backward()
    assert nn.utils.get_total_norm([x.grad for x in first.parameters()]) > 2

    def on(rank: int) -> None:
        for steps, parts in ((4, (4,)), (4, (2, 4))):
            names = data | {"mesh": cp_mesh(2), "every": 2, "path": tmp_path / f"{len(parts)}.pt"}
            for until in parts:
                torch.distributed.barrier()  # rank 0 has written
                # Each part is a new process: a new model, of other values if there is something to resume.
                names |= {"model": copy.deepcopy(model), "steps": until}
                if until != parts[0]:
                    nn.init.zeros_(names["model"].head.weight)
                exec(example("a whole loop"), names)
            assert names["number"] + 1 == steps
            found = [x.detach() for x in names["model"].parameters()]
            # AdamW divides by the square root of the mean square of gradients, rounded apart by 1e-16 of their norm.
            assert max(error(*pair) for pair in zip(found, expected, strict=True)) < 1e-10
            assert error(names["loss"], loss) < 1e-10
            assert torch.equal(names["text"], text)

    run_ranks(on, 2)


def test_gradients_that_fsdp_averages():
    """Two sequences over dp, each cut over cp, in parts of different lengths."""
    model, tokens = small_llama()
    expected = one_process(model, tokens)[1:]
    layout = head_tail(29, 2)

    def on(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        row, part = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()
        mine = parallelize_module(copy.deepcopy(model), mesh, parallel_plan_of_attention(layout))
        names = {"torch": torch, "mesh": mesh, "model": mine, "positions": layout.positions(part)}
        names["mine"] = layout.shard(tokens[row : row + 1], 1, part)
        names["labels"] = layout.shard(next_token_labels(tokens[row : row + 1]), 1, part)
        exec(example("fsdp"), names)
        found = [parameter.grad.full_tensor() for parameter in mine.parameters()]
        return max(error(*pair) for pair in zip(found, expected, strict=True))

    assert max(run_ranks(on, 4)) < EXACT


def test_a_tensor_parallel_plan_and_the_style_on_the_whole_model():
    """Two lines, as the README's table says, for a model without a module that takes query, key and value."""
    model, tokens = small_llama()
    expected = one_process(model, tokens)

    def on(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        names = {"model": copy.deepcopy(model), "mesh": mesh}
        exec(example("tensor-parallel plan"), names)
        sharder = BatchSharder(mesh["cp"])
        batch = sharder(tokens)
        loss = batch.loss(names["model"](batch.tokens, batch.positions))
        loss.backward()
        sharder.sum_gradients(names["model"])
        grads = [parameter.grad for parameter in names["model"].parameters()]
        found = [loss.detach(), *(x.full_tensor() if isinstance(x, DTensor) else x for x in grads)]
        return max(error(*pair) for pair in zip(found, expected, strict=True))

    assert max(run_ranks(on, 4)) < EXACT


def parallel_plan_of_attention(layout) -> dict[str, AttentionContextParallel]:
    return {"layers.*.attention.core": AttentionContextParallel(layout=layout)}


class WithTable(nn.Module):
    def __init__(self, model: nn.Module, table: torch.Tensor) -> None:
        super().__init__()
        self.model, self.table = model, table

    def forward(self, tokens):
        return self.model(tokens, self.table).flatten(0, 1)


def test_code_written_for_torch_s_context_parallel():
    """With a length that the ranks do not divide, and labels of which some ranks have more than others."""
    model, tokens = small_llama()
    tokens, positions = tokens[:, :23], torch.arange(23)
    labels = tokens.roll(-1, 1)
    labels[:, :9] = -100
    expected_loss = cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten())
    expected_loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]

    def on(rank):
        mine, table = copy.deepcopy(model), positions.clone()
        mine.zero_grad()
        names = {"mesh": cp_mesh(3), "tokens": tokens.clone(), "labels": labels.clone(), "table": table}
        names["model"] = WithTable(mine, table)
        names["loss_fn"] = lambda logits, wanted, **options: cross_entropy(logits, wanted.flatten(), **options)
        exec(example("torch api"), names)
        assert torch.equal(names["tokens"], tokens)
        assert torch.equal(table, positions)
        assert error(names["loss"], expected_loss) < EXACT
        return max(error(parameter.grad, wanted) for parameter, wanted in zip(mine.parameters(), expected, strict=True))

    assert max(run_ranks(on, 3)) < EXACT


class WithLongTable(nn.Module):
    """Positions from the first rows of a table that is longer than any sequence, as rotary tables are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)
        self.table = torch.randn(40, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def forward(self, tokens):
        x = self.embed(tokens) + self.table[: tokens.shape[1]]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


def test_a_table_that_is_longer_than_the_sequence():
    """The error's line, as the page has it, is exact; the view table[:length] leaves the model its own table."""
    torch.manual_seed(0)
    model, tokens = WithLongTable().double(), torch.randint(0, 11, (2, 23))
    labels = next_token_labels(tokens)
    cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    expected = [parameter.grad for parameter in model.parameters()]

    def on(rank: int) -> float:
        mesh, mine = cp_mesh(2), copy.deepcopy(model)
        mine.zero_grad()
        names = {"mesh": mesh, "model": mine, "tokens": tokens.clone(), "labels": labels.clone()}
        names |= {"context_parallel": context_parallel, "sum_gradients": sum_gradients}
        names |= {"global_loss": global_loss, "global_token_count": global_token_count}
        names["loss_fn"] = lambda logits, wanted: cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        line, block = example("a longer table").split("\n", 1)
        with pytest.raises(ValueError, match=r"\[23, 23, 40\] positions .* write model.table = model.table\[:length\]"):
            exec(block, names)
        exec(f"{line}\n{block}", names)
        return max(error(parameter.grad, wanted) for parameter, wanted in zip(mine.parameters(), expected, strict=True))

    assert max(run_ranks(on, 2)) < EXACT


@on_every_rank(3)
def test_a_selective_checkpoint(mesh, rank: int):
    problem = Problem(length=12)
    core = parallelize_module(Core(), mesh, AttentionContextParallel())

    def attend(*qkv):
        names = {"save_attention": save_attention, "checkpoint": checkpoint}
        names |= {"layer": lambda qkv: core(*qkv), "x": qkv}
        exec(example("selective"), names)
        return names["x"]

    return max(run_attention(attend, problem, rank, 3))


def test_biases_that_each_query_computes():
    """Each rank has weights of its own, and is compared with them for its queries."""

    def on(rank):
        scope = examples("attention", "flex", "biases")
        linear, layout = scope["to_bias"], scope["layout"]
        return [scope[name].detach() for name in ("q", "k", "v", "out")], linear, layout.positions(rank, "cpu"), layout

    found = run_ranks(on, 2)
    layout = found[0][3]
    k, v = (layout.unshard([tensors[index] for tensors, *_ in found], 2) for index in (1, 2))
    for (q, _, _, out), linear, at, _ in found:
        distance = at[:, None] - torch.arange(1000)
        near = (distance >= 0) & (distance < 32)
        bias = linear(q).detach().gather(-1, distance.clamp(0, 31).expand(1, 8, -1, -1)) * near
        scores = (q @ k.mT * q.shape[-1] ** -0.5 + bias).masked_fill(distance < 0, float("-inf"))
        assert error(out, scores.softmax(-1) @ v) < 1e-5


def test_flex_attention_with_sinks_in_a_window_and_softcap():
    found = run_example("attention", "flex", wanted="q k v out")
    behind = torch.arange(1000)[:, None] - torch.arange(1000)[None, :]
    mask = (behind >= 0) & ((behind < 64) | (torch.arange(1000) < 4))

    def attend(q, k, v):
        logits = 30 * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / 30)
        return torch.softmax(logits.masked_fill(~mask, float("-inf")), -1) @ v

    check(found, attend)


@on_every_rank(3)
def test_dtensors_on_the_axis(mesh, rank: int):
    problem = Problem(length=12)
    core = parallelize_module(Core(), mesh, AttentionContextParallel())

    def attend(*local):
        return core(*(DTensor.from_local(x, mesh, [Shard(2)]) for x in local))

    return max(run_attention(attend, problem, rank, 3))


def test_a_users_own_step_is_verified(tmp_path: Path, capsys):
    """As a test of his, and by the command."""
    code = "\n".join([example("verify"), example("verify in a test"), example("verify by the command")])
    file = tmp_path / "context_parallel_case.py"
    file.write_text(code)
    names = {}
    exec(code, names)
    names["test_context_parallel"]()
    main(["verify", f"{file}:case", "--mesh", "cp=3"])
    said = capsys.readouterr().out
    assert "Llama on 2 ranks, mesh axes ('cp',): equal to one device" in said
    assert "Llama on 3 ranks, mesh axes ('cp',): equal to one device" in said


def test_the_two_commands_are_there_for_ci_to_take():
    commands = dict(re.findall(r"<!-- command: (.*?) -->\n```bash\n(.*?)\n```", README, re.DOTALL))
    assert commands["main job"].endswith("torchrun --nproc-per-node 4 tutorials/train_llama.py")
    assert commands["tests"].endswith("pytest")
    assert [name for name in QUICK if not (ROOT / "tests" / name).exists()] == []


def test_lines_of_code_are_as_wide_as_the_site_shows_them():
    """A column of a page of 1280 pixels has some 92 characters."""
    wide = [
        f"{page.name}: {line}"
        for page, text in {ROOT / "README.md": README, **PAGES}.items()
        for code in re.findall(r"^```(?:python|bash|diff)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for line in code.splitlines()
        if len(line) > 88
    ]
    assert wide == []


def test_latents_that_travel():
    """The shares of the weight's gradient add up."""

    def on(rank):
        scope = examples("attention", "latents")
        up = scope["up"].weight
        return [scope[name].detach() for name in ("queries", "latent", "rot", "out")], up.detach(), up.grad

    (*first, share), (*second, other) = run_ranks(on, 2)
    assert torch.equal(first[1], second[1])
    pairs = zip(zip(first[0], second[0], strict=True), (2, 1, 1, 2), strict=True)
    q, latent, rot, out = (head_tail(1000, 2).unshard(list(parts), dim).double() for parts, dim in pairs)
    weight = first[1].double().requires_grad_()
    k, v = (latent @ weight.mT).unflatten(-1, (8, 64)).transpose(1, 2).split((32, 32), -1)
    k = torch.cat((k, rot[:, None].expand(-1, 8, -1, -1)), -1)
    whole = dense_attention(q, k, v, CAUSAL)
    whole.sum().backward()
    assert error(out, whole.detach()) < 1e-5
    assert error(share + other, weight.grad) < 1e-5


def test_the_example_of_latents_or_heads():
    names = examples("choosing", "latents or heads")
    assert names["as_heads"].sent() * 576 == names["as_latents"].sent() * 40960


def test_text_beside_an_image():
    def on(rank):
        scope = examples("attention", "joint")
        return scope["text"], [scope[name].detach() for name in ("q", "k", "v")], scope["out"]

    (text, first, out), (_, second, other) = run_ranks(on, 2)
    layout = head_tail(1000, 2)
    whole = [torch.cat((text, layout.unshard(list(parts), 2)), 2) for parts in zip(first, second, strict=True)]
    assert torch.equal(out[:, :, :20], other[:, :, :20])
    found = torch.cat((out[:, :, :20], layout.unshard([x[:, :, 20:] for x in (out, other)], 2)), 2)
    assert error(found, dense_attention(*(x.double() for x in whole))) < 1e-5


def test_decoding():
    """The one with transformers is run in tests/clients."""

    def on(rank):
        scope = examples("attention")
        parts = [scope[name].detach() for name in ("k", "v")]
        exec(example("decode"), scope)
        cache = scope["cache"]
        return parts, scope["q_new"], scope["out"], (cache.positions(), cache.keys, cache.values)

    first, second = run_ranks(on, 2)
    assert torch.equal(first[2], second[2])
    k, v = (torch.zeros(1, 8, 1003, 8) for _ in range(2))
    for positions, keys, values in (first[3], second[3]):
        k[:, :, positions], v[:, :, positions] = keys, values
    for whole, mine, theirs in zip((k, v), first[0], second[0], strict=True):
        assert torch.equal(whole[:, :, :1000], head_tail(1000, 2).unshard([mine, theirs], 2))
    assert error(first[2], dense_attention(first[1].double(), k.double(), v.double())) < 1e-5


def test_a_profiler_writes_a_trace_of_some_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = torch.ones(4, 4)
    exec(example("profiler"), {"rank": 1, "batches": range(4), "train_step": lambda batch: x @ x})
    names = [event.get("name") for event in json.loads((tmp_path / "trace_1.json").read_text())["traceEvents"]]
    assert names.count("aten::mm") == 2


def test_the_flight_recorder_is_read_as_the_page_says():
    """With no buffer it is empty; what it holds on gloo is said on the page."""
    scope = examples("flight recorder")
    if hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"):
        assert isinstance(scope["last_collectives"](), list)


def test_every_example_is_run():
    code = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    marked = re.findall(r"<!-- example: (.*?) -->\n```python", SHOWN)
    assert [each for each in marked if not re.search(rf'example[^)\n]*\([^)]*"{re.escape(each)}"', code)] == []
    # And the plan, which is compared with the tutorial's; that of replicated keys, which test_tp_refusals.py runs; the
    # switch to FlashAttention 3, which needs its package and a GPU.
    assert SHOWN.count("```python") == len(marked) + 3


def test_a_fault_that_is_caught():
    kept = []

    def train_step(batch: None) -> None:
        raise TransferError("a peer has ended")

    names = {
        "train_step": train_step,
        "batch": None,
        "save_what_is_needed": kept.append,
        "TransferError": TransferError,
    }
    with pytest.raises(TransferError):
        exec(example("faults"), names)
    assert len(kept) == 1


def anchors(text: str) -> set[str]:
    """The names by which a link can point at the headings of ``text``, formed as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_links_pictures_and_files_exist(page):
    for target, anchor in re.findall(r'\]\(([^)#:" ]*)(?:#([^)]+))?\)', TEXTS[page]):
        pointed_at = (page.parent / target).resolve() if target else page
        assert pointed_at.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(pointed_at.read_text()), f"{page.name}: {target} has no #{anchor}"
    for path in re.findall(r"`((?:cp_styles|tests|tutorials)/[\w/.]+)", TEXTS[page]):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_each_page_and_picture_is_linked():
    """From the README; a picture or a notebook from anywhere."""
    assert [page.name for page in PAGES if f"](tutorials/{page.name}" not in README] == []
    pictures = (ROOT / "tutorials").glob("*.png")
    assert [path.name for path in (*pictures, *NOTEBOOKS) if f"{path.name})" not in SHOWN] == []
