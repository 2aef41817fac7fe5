"""Sequence-parallel collectives for plain local tensors. They are differentiable, with exact adjoints.

::

    all_to_all(x, scatter_dim, gather_dim, group)    S(gather) -> S(scatter)     any two dims, any sizes
    seq_to_heads((q, k, v), group)                   S(seq) -> S(heads)          one message, grouped queries
    heads_to_seq(out, group)                         S(heads) -> S(seq)
    split(x, dim, group)                             R -> S(dim)                 nothing is sent forward
    gather(x, dim, group, reduce_gradients=...)      S(dim) -> R
    reduce_scatter(x, dim, group)                    P(sum) -> S(dim)
    sync_inputs(sample, group)                       the samples of all ranks, on every rank

R: the tensor is the same on every rank. S(dim): each rank has its part of ``dim``. P(sum): each rank has a summand.
Every backward is the adjoint and communicates, so all ranks must run it.

``group`` is a ProcessGroup, a 1-D DeviceMesh, (mesh, axis name), or None. With None, or in a group of one rank, each
function is the identity.

``layout`` says how a dim is cut. None cuts it into contiguous parts that are as equal as possible; the first ranks get
the remainder. Otherwise pass the sizes, :class:`Padded`, or a :class:`~cp_styles.layout.SequenceLayout` (head_tail,
striped, :func:`nested_layout` for ring x Ulysses, per_document_head_tail for packed documents).

With ``check=True`` (the default) the ranks first compare their calls, in one all-gather of integers. A mistake on one
rank then raises on all ranks. Under torch.compile there is no check; where sizes are not given, all ranks must have
equal sizes. All functions but sync_inputs compile with fullgraph.

The page Migration has the names of other projects.
"""

from cp_styles.collectives.all_to_all import all_to_all
from cp_styles.collectives.autograd import Pending
from cp_styles.collectives.heads import head_ranges, heads_to_seq, seq_to_heads
from cp_styles.collectives.peers import Group
from cp_styles.collectives.rows import Layout, Padded
from cp_styles.collectives.split_gather import GradScale, gather, reduce_scatter, split
from cp_styles.collectives.sync import sync_inputs
from cp_styles.layout import nested_layout

__all__ = [
    "GradScale",
    "Group",
    "Layout",
    "Padded",
    "Pending",
    "all_to_all",
    "gather",
    "head_ranges",
    "heads_to_seq",
    "nested_layout",
    "reduce_scatter",
    "seq_to_heads",
    "split",
    "sync_inputs",
]
