"""Sequence-parallel collectives for plain local tensors. They are differentiable, with exact adjoints.

It imports _lib, comm and layouts. Begin with `split_gather.py`.

::

    all_to_all(x, scatter_dim, gather_dim, mesh)    S(gather) -> S(scatter)     any two dims, any sizes
    seq_to_heads((q, k, v), mesh)                   S(seq) -> S(heads)          one message, grouped queries
    heads_to_seq(out, mesh)                         S(heads) -> S(seq)
    split(x, dim, mesh)                             R -> S(dim)                 nothing is sent forward
    gather(x, dim, mesh, reduce_gradients=...)      S(dim) -> R
    reduce_scatter(x, dim, mesh)                    P(sum) -> S(dim)
    sync_inputs(sample, mesh)                       the samples of all ranks, on every rank

R: the tensor is the same on every rank. S(dim): each rank has its part of ``dim``. P(sum): each rank has a summand.
Every backward is the adjoint and communicates, so all ranks must run it.

Arguments of all functions:

    mesh: a 1-D DeviceMesh, (mesh, axis name), a ProcessGroup, or None. With None, or in a group of one rank, each
        function is the identity.
    layout: how a dim is cut. None: contiguous parts that are as equal as possible; the first ranks get the remainder.
        Otherwise the sizes, :class:`Padded`, or a :class:`~cp_styles.layouts.SequenceLayout` (head_tail, striped,
        :func:`nested_layout` for ring x Ulysses, per_document_head_tail for packed documents). A function that gathers
        takes None for the sizes that the ranks have; without agreement, and under torch.compile, every rank must then
        have the size of this rank.
    checks: by default the ranks first compare their calls, so that every rank raises if one is wrong: one agreement of
        the ranks (:class:`~cp_styles.Checks`). Pass ``Checks(agreement=False)`` only if the ranks are known to agree.
        Otherwise they may hang, crash or exchange wrong data. The other fields concern attention. Under torch.compile
        there is no comparison.
    async_op: return a :class:`Pending` at once; its ``.wait()`` gives the result. The backward overlaps too.

Errors of all functions: ValueError for a bad dim, a layout for another length or number of ranks, ranks that disagree
(on every rank, with the agreement); TypeError for a DTensor (pass its ``to_local()``), and for a ``mesh`` or ``layout``
of a wrong type. All functions but sync_inputs compile with fullgraph.

The page Migration has the names of other projects.
"""

from cp_styles.collectives.all_to_all import all_to_all
from cp_styles.collectives.autograd import Pending
from cp_styles.collectives.heads import heads_to_seq, seq_to_heads
from cp_styles.collectives.peers import Group
from cp_styles.collectives.rows import Layout, Padded
from cp_styles.collectives.split_gather import GradScale, gather, reduce_scatter, split
from cp_styles.collectives.sync import sync_inputs
from cp_styles.layouts import nested_layout

__all__ = [
    "GradScale",
    "Group",
    "Layout",
    "Padded",
    "Pending",
    "all_to_all",
    "gather",
    "heads_to_seq",
    "nested_layout",
    "reduce_scatter",
    "seq_to_heads",
    "split",
    "sync_inputs",
]
