"""FlexAttention under context parallelism: BlockMasks and score_mods of the whole sequence, forward and backward.

torch has no backward for FlexAttention on CPU. Here all devices have one. A BlockMask becomes a mask of the plan, and
its tiles run on the fused kernels. A score_mod runs on :class:`~cp_styles.kernels.FlexKernel`, or on
:class:`~cp_styles.kernels.CompiledFlexKernel` if the call is compiled.

Shapes: B batch, H query heads, G key/value heads, L local queries, M local keys, D head dim, E value head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from cp_styles._lib.checksum import version_of
from cp_styles._lib.compat import never_compiled, without_dispatch_modes
from cp_styles._lib.introspect import captured_tensors
from cp_styles._lib.unsupported_derivatives import refuse_transforms
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup
from cp_styles.engine.binding import Binding, binding_of_call, refuse_grouped, refuse_unknown
from cp_styles.engine.custom_ops import attend, check_local, flatten
from cp_styles.functions.max_scores import max_scores
from cp_styles.kernels import CompiledFlexKernel, FlexKernel, Kernel
from cp_styles.kernels.flex import ScoreMod
from cp_styles.kernels.flex_compiled import compiled_takes
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.masks import Full, Mask
from cp_styles.masks.block_mask import FlexMask
from cp_styles.strategies import Ring, Strategy


@dataclass(frozen=True)
class FlexCall:
    """The arguments of a call of flex_attention, except the tensors. The names are torch's.

    ``others``: arguments that this package does not know.
    ``compiled``: flex_attention or its caller was compiled by torch.compile.
    """

    block_mask: BlockMask | None = None
    score_mod: ScoreMod | None = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: Mapping[str, Any] | None = None
    return_aux: AuxRequest | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False

    @property
    def wants(self) -> AuxRequest:
        return self.return_aux or AuxRequest(lse=self.return_lse)

    def check(self, name: str, q_BHLD: torch.Tensor, k_BGMD: torch.Tensor) -> None:
        """Raise for arguments that are not supported."""
        refuse_unknown(name, "flex_attention", self.others)
        if self.return_lse and self.return_aux is not None:
            raise ValueError(f"{name}: return_lse and return_aux both ask for the logsumexp: pass return_aux alone")
        backend = (self.kernel_options or {}).get("BACKEND", "AUTO")
        if backend not in ("AUTO", "TRITON"):  # the remaining options tune torch's own kernel and change no result
            raise NotImplementedError(
                f"{name}: kernel_options BACKEND={backend!r} asks for a kernel that is not supported under context "
                "parallelism; leave it out"
            )
        if q_BHLD.shape[1] != k_BGMD.shape[1]:
            refuse_grouped(name, q_BHLD.shape[1], k_BGMD.shape[1], self.enable_gqa)

    def result(self, out_BHLE: torch.Tensor, aux: AuxOutput) -> Any:
        """The result in the form in which torch's function returns it."""
        if self.return_aux is not None:
            return out_BHLE, aux
        return (out_BHLE, aux.lse) if self.return_lse else out_BHLE


def context_flex_attention(
    q_BHLD: torch.Tensor,
    k_BGMD: torch.Tensor,
    v_BGME: torch.Tensor,
    mesh: MeshOrGroup,
    *,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_aux: AuxRequest | None = None,
    mask: Mask | None = None,
    layout: SequenceLayout | Balancer | None = None,
    kv_layout: SequenceLayout | Balancer | None = None,
    strategy: Strategy | None = None,
    kernel: Kernel | None = None,
    checks: Checks = CHECKS,
) -> Any:
    """torch's flex_attention over a sequence of which this rank holds a part. The result equals the result on one
    device.

    Shapes: B batch, H query heads, G key/value heads, L local queries, M local keys, D head dim, E value head dim.
    Query, key and value share one floating-point dtype and one device, CPU or CUDA.

    Args:
        q_BHLD: local query, cut by ``layout``.
        k_BGMD: local key, cut by ``kv_layout``, or in the same way. Only the G heads are sent.
        v_BGME: local value.
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, with positions of the whole sequence. Tensors that it
            reads may require grad. Their gradient is this rank's share: sum it over the group, as for any
            parameter.
        block_mask: a BlockMask of the *whole* sequence: ``create_block_mask(mask_mod, B, H, S, S)``. Rows of keys that
            it does not need are not sent.
        scale: factor of the logits; default 1/sqrt(D).
        enable_gqa: allow H to be a multiple of G.
        return_aux: ``AuxRequest(lse=True)`` for the logsumexp (natural logarithm, -inf for queries without keys), which
            is differentiable. ``AuxRequest(max_scores=True)`` for the largest score of each query, scaled and after
            ``score_mod``, in float32, or in float64 for float64; -inf for queries without keys. It has no gradient.
        mask: a mask of this package, in addition to ``block_mask``.
        layout: the layout, or the balancer that makes it. Default: the layout of the :class:`~cp_styles.SequenceScope`
            around the call, whose mask then applies too; without a scope ``head_tail``.
        kv_layout: the layout of keys of another sequence than the queries, or the balancer that makes it. Positions of
            keys then number that sequence. Default: ``layout`` cuts both.
        strategy: how keys and values get to the queries; default ``Ring()``.
        kernel: computes the tiles; default the fastest of torch's kernels that can. Not with a score_mod.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        ``out_BHLE``, or ``(out_BHLE, AuxOutput)`` with ``return_aux``.

    Communication: one agreement of the ranks (:class:`~cp_styles.Checks`), then the strategy's.
    :class:`~cp_styles.Ulysses` also sends the logsumexp back if it is requested. ``max_scores`` take a second pass:
    the communication of :func:`~cp_styles.context_max_scores`, and the scores once more, in plain operations.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank, if the input of one is bad or the ranks differ.

    Example::

        block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1000, 1000, device="cpu")
        layout = head_tail(1000, mesh.size())
        q, k, v = (layout.shard(whole, 2, mesh.get_local_rank()) for whole in qkv)  # each [1, 8, 1000, 64]
        out = context_flex_attention(q, k, v, mesh, block_mask=block_mask, layout=layout)
    """
    name = "context_flex_attention"
    how = strategy or Ring(), layout, mask or Full(), kernel, kv_layout
    binding = binding_of_call(name, mesh, *how, checks=checks)
    call = FlexCall(block_mask, score_mod, scale, enable_gqa, return_aux=return_aux)
    return call.result(*flex_attend(binding, (q_BHLD, k_BGMD, v_BGME), call))


@never_compiled
def flex_attend(
    binding: Binding,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    call: FlexCall,
) -> tuple[torch.Tensor, AuxOutput]:
    """The output of a call, for a binding, and what the call wants in addition."""
    with binding.telling():
        with without_dispatch_modes():
            check_local(binding.name, tensors)
            call.check(binding.name, *tensors[:2])
            binding, read = _bind_call(binding, call, tensors)
        learned = flatten(read, tensors[0].device) if read else None
    wants, options = call.wants, {"scale": call.scale, "casts": False}
    largest = None
    if wants.max_scores:  # first, so that the ranks compare whether all ask for them
        modified = binding.kernel if isinstance(binding.kernel, FlexKernel) else None
        largest = max_scores(binding, *tensors[:2], **options, modified=modified)
    out, lse, _ = attend(binding, tensors, **options, wants_lse=wants.lse, learned=learned)
    return out, AuxOutput(lse if wants.lse else None, largest)


def _bind_call(
    binding: Binding, call: FlexCall, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[Binding, tuple[torch.Tensor, ...]]:
    """The binding of one call, and the tensors of its score_mod that require grad."""
    if call.block_mask is not None:
        binding = binding.with_mask(call.block_mask, FlexMask if call.score_mod else FlexMask.per_row)
    if call.score_mod is None:
        return binding, ()
    if binding.kernel is not None:
        raise NotImplementedError(
            f"{binding.name}: {binding.kernel!r} cannot compute a score_mod: leave kernel= out of this call or style"
        )
    if binding.mask.rows != (binding.mask,):
        raise NotImplementedError(
            f"{binding.name}: a score_mod cannot be combined with a mask for each row of the batch (PerRow): put "
            "the masks of the rows into the block_mask"
        )
    read = captured_tensors(call.score_mod, (0.0, 0, 0, 0, 0), tensors[0].device)
    refuse_transforms(binding.name, read)
    learned = tuple(tensor for tensor in read if tensor.requires_grad)
    read = tuple((tensor, version_of(tensor)) for tensor in read)
    compiled = call.compiled and compiled_takes(tensors[0], tensors[2])
    kernel = (CompiledFlexKernel if compiled else FlexKernel)(call.score_mod, learned, read)
    return replace(binding, kernel=kernel), learned
