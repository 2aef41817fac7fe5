"""Sequence-parallel collectives for plain local tensors. They are differentiable, with exact adjoints.

::

    all_to_all(x, scatter_dim, gather_dim, group)    S(gather) -> S(scatter)     any two dims, any sizes
    seq_to_heads((q, k, v), group)                   S(seq) -> S(heads)          one message, grouped queries
    heads_to_seq(out, group)                         S(heads) -> S(seq)
    split(x, dim, group)                             R -> S(dim)                 nothing is sent forward
    gather(x, dim, group, reduce_gradients=...)      S(dim) -> R
    reduce_scatter(x, dim, group)                    P(sum) -> S(dim)
    slice_inputs / gather_outputs                    split / gather over nested inputs and outputs
    sync_inputs / sync_object                        send samples or objects of one rank to all ranks

R: the tensor is the same on every rank. S(dim): each rank has its part of ``dim``. P(sum): each rank has a summand.
Every backward is the adjoint and communicates, so all ranks must run it.

``group`` is a ProcessGroup, a 1-D DeviceMesh, (mesh, axis name), or None. With None, or in a group of one rank, each
function is the identity.

``layout`` says how a dim is cut. None cuts it into contiguous parts that are as equal as possible; the first ranks get
the remainder. Otherwise pass the sizes, :class:`Padded`, or a :class:`~cp_styles.layout.SequenceLayout` (head_tail,
striped, :func:`nested_layout` for ring x Ulysses, :func:`per_document_layout` for packed documents).

With ``check=True`` (the default) the ranks first compare their calls, in one all-gather of integers. A mistake on one
rank then raises on all ranks. Under torch.compile there is no check; where sizes are not given, all ranks must have
equal sizes. All functions but sync_inputs and sync_object compile with fullgraph.

The same functions under the names that other projects use:

| elsewhere | here |
|---|---|
| DeepSpeed ``single_all_to_all``, ``_SeqAllToAll`` | ``all_to_all(x, scatter_idx, gather_idx, group)`` |
| yunchang ``all_to_all_4D``, ``SeqAllToAll4D``; xDiT through it | ``all_to_all(x, scatter_idx, gather_idx, group)`` |
| yunchang ``all_to_all_5D``, ``SeqAllToAll5D`` (packed q, k, v) | ``seq_to_heads(qkv.unbind(2), group, ...)`` |
| Open-Sora, VideoSys, Wan ``all_to_all``, ``all_to_all_comm`` | ``all_to_all(x, scatter_dim, gather_dim, group)`` |
| VideoSys ``all_to_all_with_pad``, ``set_pad``, ``get_pad`` | ``all_to_all``: sizes need not divide |
| MindSpeed ``all_to_all(..., gather_size=)`` (unaligned) | ``all_to_all``: as it is, or with ``gather_sizes`` |
| VeOmni, verl ``gather_seq_scatter_heads`` | ``seq_to_heads(x, group, seq_dim=, head_dim=)`` |
| VeOmni, verl ``gather_heads_scatter_seq`` | ``heads_to_seq(x, group, seq_dim=, head_dim=)`` |
| VeOmni, SeedVR ``gather_seq_scatter_heads_qkv`` | ``seq_to_heads((q, k, v), group, ...)`` |
| their ``unpadded_dim_size=`` | ``layout=Padded(unpadded_dim_size)`` |
| repeating KV heads up to the number of ranks, by hand | ``seq_to_heads((q, k, v), group)`` |
| Open-Sora ``split_forward_gather_backward(..., grad_scale=)`` | ``split(..., grad_scale=GradScale.DOWN)`` |
| Open-Sora ``gather_forward_split_backward(..., grad_scale=)`` | ``gather(..., reduce_gradients=False, ...UP)`` |
| VideoSys ``split_sequence``, ``gather_sequence`` | ``split``, ``gather`` with ``layout=Padded(n)`` |
| Megatron ``scatter_to_sequence_parallel_region`` | ``split(x, 0, group)`` |
| Megatron ``gather_from_sequence_parallel_region`` | ``gather(x, 0, group, reduce_gradients=True)`` |
| Megatron ``reduce_scatter_to_sequence_parallel_region`` | ``reduce_scatter(x, 0, group)`` |
| Megatron ``get_batch_on_this_cp_rank`` (two chunks a rank) | ``slice_inputs(..., layout=head_tail(n, ranks))`` |
| VeOmni, SeedVR ``slice_input_tensor``, ``slice_inputs`` | ``slice_inputs(x, dim, group, layout=Padded(n))`` |
| VeOmni ``gather_outputs``, verl ``gather_outputs_and_unpad`` | ``gather_outputs(..., layout=Padded(n))`` |
| verl ``ulysses_pad_and_slice_inputs`` | ``slice_inputs(..., fill={...})`` |
| SeedVR ``sync_data``, Open-Sora ``broadcast`` of inputs | ``sync_inputs``, ``sync_object`` |
"""

from cp_styles.collectives.all_to_all import all_to_all
from cp_styles.collectives.autograd import Pending
from cp_styles.collectives.heads import head_ranges, heads_to_seq, seq_to_heads
from cp_styles.collectives.inputs import gather_outputs, slice_inputs
from cp_styles.collectives.layouts import nested_layout, per_document_layout
from cp_styles.collectives.peers import Group
from cp_styles.collectives.rows import Layout, Padded
from cp_styles.collectives.split_gather import GradScale, gather, reduce_scatter, split
from cp_styles.collectives.sync import sync_inputs, sync_object

__all__ = [
    "GradScale",
    "Group",
    "Layout",
    "Padded",
    "Pending",
    "all_to_all",
    "gather",
    "gather_outputs",
    "head_ranges",
    "heads_to_seq",
    "nested_layout",
    "per_document_layout",
    "reduce_scatter",
    "seq_to_heads",
    "slice_inputs",
    "split",
    "sync_inputs",
    "sync_object",
]
