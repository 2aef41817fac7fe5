"""Under torch.set_default_device, tensors that the package makes for the host stay on the host.

The default device is "meta" here, in scripts mostly "cuda". A host tensor that lands on it has no values, and so an
error or a wrong result shows it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

from cp_styles import (
    AttentionContextParallel,
    Causal,
    Documents,
    Ring,
    SequenceScope,
    SlidingWindow,
    Ulysses,
    by_work,
    context_attention,
    context_flex_attention,
    contiguous,
    global_loss,
    global_token_count,
    head_tail,
    imbalance,
    next_token_labels,
    per_document_head_tail,
    striped,
    sum_gradients,
)
from cp_styles.batch import document_positions
from cp_styles.collectives import gather, heads_to_seq, seq_to_heads, split
from cp_styles.decoding import KVCache, context_decode
from cp_styles.explain import explain
from cp_styles.testing import run_ranks
from cp_styles.verify import verify
from tests.oracle import dense_attention, error, randn
from tests.ranks.each_door import DOORS, LENGTH
from tutorials.llama import Llama, LlamaConfig, parallel_plan

PACKAGE = Path(__file__).parents[3] / "cp_styles"
# The functions of torch that make a tensor on the default device, or by default there.
_FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "hann_window"),
    *("linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor"),
    *("sparse_coo_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}


def without_device(source: str) -> list[int]:
    """The lines that make a tensor, or positions of a layout, without saying where."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of_torch = ast.unparse(node.func.value) == "torch" and node.func.attr in _FACTORIES
        of_layout = node.func.attr == "positions" and "layout" in ast.unparse(node.func.value) and len(node.args) < 2
        if (of_torch or of_layout) and not any(keyword.arg in ("device", None) for keyword in node.keywords):
            found.append(node.lineno)
    return found


def test_what_the_search_finds():
    assert without_device("torch.zeros(3)\ntorch.arange(2, device='cpu')\nx.new_zeros(1)\ntorch.full((), 1)") == [1, 4]
    assert without_device("q_layout.positions(0)\nlayout.positions(0, 'cpu')\nlayout.positions(rank=0)") == [1, 3]


def test_each_tensor_of_the_package_says_where_it_is():
    found = {str(path.relative_to(PACKAGE)): without_device(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}, "lines that make a tensor without device="


def elsewhere(act: Callable[..., Any], ranks: int = 2) -> list[Any]:
    """``act(mesh)`` on ranks whose default device is not that of their tensors."""

    def on(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        torch.set_default_device("meta")
        try:
            assert torch.zeros(()).is_meta
            return act(mesh)
        finally:
            torch.set_default_device("cpu")

    return run_ranks(on, ranks)


def whole(length: int = LENGTH) -> list[torch.Tensor]:
    return [randn(seed, 1, 4, length, 8) for seed in range(3)]


@pytest.mark.parametrize("door", DOORS)
def test_doors(door: str):
    q, k, v = whole()
    expected = dense_attention(q, k, v, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    layout = contiguous(LENGTH, 2)

    def act(mesh: Any) -> torch.Tensor:
        parts = [layout.shard(x, 2, mesh.get_local_rank()).clone().requires_grad_() for x in (q, k, v)]
        out = DOORS[door](mesh, *parts)
        out.sum().backward()
        assert all(x.grad is not None and x.grad.device.type == "cpu" for x in parts)
        return out

    assert error(layout.unshard(elsewhere(act), 2), expected) < 1e-12


@pytest.mark.parametrize(
    ("strategy", "mask"),
    [
        (Ring(), SlidingWindow(3)),
        (Ring(keep=0), Documents((5, 8)) & Causal()),
        (Ulysses(), Documents((5, 8)) & Causal()),
    ],
    ids=["ring", "ring of documents", "ulysses"],
)
def test_masks_and_layouts(strategy: Any, mask: Any):
    q, k, v = whole()
    sees = mask.allowed(torch.arange(LENGTH), torch.arange(LENGTH))
    expected = dense_attention(q, k, v, sees)

    def act(mesh: Any, balancer: Callable[..., Any]) -> torch.Tensor:
        layout = balancer(LENGTH, 2)
        parts = [layout.shard(x, 2, mesh.get_local_rank()).clone().requires_grad_() for x in (q, k, v)]
        out = context_attention(*parts, mesh, mask=mask, layout=layout, strategy=strategy)
        out.sum().backward()
        return layout.unshard([x.cpu() for x in gathered(out, mesh)], 2)

    for balancer in (head_tail, striped, lambda length, ranks: by_work(length, ranks, mask=mask)):
        for found in elsewhere(lambda mesh, balancer=balancer: act(mesh, balancer)):
            assert error(found, expected) < 1e-12


def gathered(part: torch.Tensor, mesh: Any) -> list[torch.Tensor]:
    parts: list[Any] = [None, None]
    torch.distributed.all_gather_object(parts, part.detach(), group=mesh.get_group())
    return parts


def test_flex_block_masks():
    q, k, v = whole(16)
    tokens = torch.arange(16) // 5

    def documents(b: Any, h: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (tokens[key] == tokens[query])

    block_mask = create_block_mask(documents, None, None, 16, 16, device="cpu", BLOCK_SIZE=4)
    expected = dense_attention(q, k, v, documents(0, 0, torch.arange(16)[:, None], torch.arange(16)[None]))
    layout = head_tail(16, 2)

    def act(mesh: Any) -> torch.Tensor:
        parts = [layout.shard(x, 2, mesh.get_local_rank()) for x in (q, k, v)]
        return context_flex_attention(*parts, mesh, block_mask=block_mask, layout=layout)

    assert error(layout.unshard(elsewhere(act), 2), expected) < 1e-12


def test_decode_collectives_and_helpers():
    q, k, v = whole()
    layout = head_tail(LENGTH, 2)
    expected = dense_attention(q[:, :, :1], torch.cat([k, k[:, :, :1]], 2), torch.cat([v, v[:, :, :1]], 2))

    def act(mesh: Any) -> None:
        rank, group = mesh.get_local_rank(), mesh.get_group()
        cache = KVCache(mesh, layout, layout.shard(k, 2, rank), layout.shard(v, 2, rank))
        cache.append(k[:, :, :1], v[:, :, :1])
        assert error(context_decode(q[:, :, :1], cache), expected) < 1e-12
        cache.crop(LENGTH)
        part = split(q, 2, group, layout=layout)
        heads = seq_to_heads(part, group, seq_dim=2, head_dim=1, layout=layout)
        assert torch.equal(heads_to_seq(heads, group, seq_dim=2, head_dim=1, layout=layout), part)
        assert torch.equal(gather(part, 2, group, layout=layout, reduce_gradients=False), q)
        ids = torch.tensor([0] * 6 + [1] * 7, device="cpu")
        tokens = torch.arange(LENGTH, device="cpu")[None]
        labels = layout.shard(next_token_labels(tokens, document_ids=ids), 1, rank)
        weight = torch.ones((), device="cpu", requires_grad=True)
        loss = global_loss(weight * labels.clamp(min=0).sum(), global_token_count(labels, mesh), mesh)
        loss.backward()
        sum_gradients([weight], mesh)
        assert document_positions(ids).tolist() == [*range(6), *range(7)]
        assert Documents.from_ids(ids) == Documents.from_cu_seqlens([0, 6, 13]) == Documents((6, 7))
        assert imbalance(layout, Causal()) >= 1
        per_document_head_tail(LENGTH, 2, documents=(6, 7)).describe()
        with SequenceScope(layout, mask=Documents((6, 7))):
            pass
        str(explain(64, ranks=2, heads=4, head_dim=8, mask=Causal()))

    elsewhere(act)


def test_a_training_step():
    """With tensor parallelism, a balancer and verify, which compares it with one process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Llama(LlamaConfig(vocabulary=16, width=16, layers=1, heads=4, kv_heads=2, hidden=24)).double()
    tokens = torch.randint(16, (1, 20), generator=torch.Generator().manual_seed(0))

    def step(model: nn.Module, batch: torch.Tensor, mesh: Any) -> torch.Tensor:
        cp = mesh["cp"]
        layout, rank = head_tail(20, cp.size()), cp.get_local_rank()
        labels = layout.shard(next_token_labels(batch), 1, rank)
        logits = model(layout.shard(batch, 1, rank), layout.positions(rank, "cpu"))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = global_loss(losses, global_token_count(labels, cp), cp)
        loss.backward()
        sum_gradients(model, cp)
        return loss

    def on(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        torch.set_default_device("meta")
        try:
            return verify(model, parallel_plan(AttentionContextParallel()), mesh, tokens, step, tolerance=1e-10)
        finally:
            torch.set_default_device("cpu")

    assert not run_ranks(on, 4)[0].findings
