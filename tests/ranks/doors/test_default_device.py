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
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import (
    Causal,
    Documents,
    SequenceScope,
    contiguous,
    global_loss,
    global_token_count,
    head_tail,
    imbalance,
    next_token_labels,
    per_document_head_tail,
    sum_gradients,
)
from cp_styles.batch import document_positions
from cp_styles.collectives import gather, heads_to_seq, seq_to_heads, split
from cp_styles.explain import explain
from cp_styles.functions.decode import KVCache, context_decode
from cp_styles.testing import run_ranks
from tests.doors import EACH, LENGTH, cut_contiguously
from tests.oracle import dense_attention, error, randn

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


@pytest.mark.parametrize("door", EACH)
def test_doors(door: str):
    q, k, v = whole()
    expected = dense_attention(q, k, v, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    layout = contiguous(LENGTH, 2)

    def act(mesh: Any) -> torch.Tensor:
        parts = [layout.shard(x, 2, mesh.get_local_rank()).clone().requires_grad_() for x in (q, k, v)]
        out = cut_contiguously(door, mesh, *parts)
        out.sum().backward()
        assert all(x.grad is not None and x.grad.device.type == "cpu" for x in parts)
        return out

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
        heads = seq_to_heads(part, group, seq_dim=2, heads_dim=1, layout=layout)
        assert torch.equal(heads_to_seq(heads, group, seq_dim=2, heads_dim=1, layout=layout), part)
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
