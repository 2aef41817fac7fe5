"""The function mode of AttentionContextParallel: attention on DTensors of a private mesh runs on the engine.

It is the dispatcher of context parallelism, on for the forward of one module and off after it. A call is intercepted
before it is an operator: this rank's parts go to the op of custom_ops.py, whose backward needs no mode, and its output
becomes a DTensor again. All else in the module are DTensor's own ops, which cannot gather the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cp_styles._compat import never_compile_alone
from cp_styles.engine.binding import Binding, refuse_dropout, refuse_grouped
from cp_styles.engine.custom_ops import Source, resolved_call
from cp_styles.functions.attention import attend
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.layout import SequenceLayout
from cp_styles.mask import causal_bias
from cp_styles.styles.boundary import InputForm
from cp_styles.styles.dtensor_io import local_tensors, placed_as, placed_in_graph, spec_of
from cp_styles.styles.private_mesh import is_private
from cp_styles.troubleshooting import see

_LABELS = ("query", "key", "value")
_SEQ_DIM, _HEAD_DIM = 2, 1  # of what reaches the attention: [B, H, S, D]
_ALONG = (Shard(_SEQ_DIM),)


class CoreCalls(AttentionCalls):
    """Runs attention calls on DTensors of a private mesh on the engine, and returns DTensors.

    Attention on other tensors, which were not made from the module's inputs, is not changed.
    """

    # Of the module's inputs, if other axes cut their heads or batch. It stays until the next inputs, because a
    # checkpoint in the module runs its attention again without the hooks.
    form: InputForm | None = None
    # While torch.compile traces, in place of ``form``: whether there is one.
    is_cut = False

    def refuse_inside(self) -> None:
        """Raise inside a module or block that takes all attention."""
        around = self.entered()
        if around is not None and not isinstance(around, CoreCalls):
            raise ValueError(
                f"{around._name}: a module inside has AttentionContextParallel, and this style takes all attention "
                "inside: apply one of the two"
            )

    @property
    def latest_layout(self) -> SequenceLayout:
        """The layout of the queries of the latest call."""
        return resolved_call(self._latest).cuts[0]

    _latest: torch.Tensor

    def _attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        tensors = query, key, value
        private = next(filter(is_private, tensors), None)
        if private is None:
            options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return F.scaled_dot_product_attention(*tensors, attn_mask, **options)
        self.forward_state.calls += 1
        if attn_mask is not None:
            attn_mask, is_causal = causal_bias(attn_mask, is_causal)
        heads, kv_heads = query.shape[_HEAD_DIM], key.shape[_HEAD_DIM]

        def refuse() -> None:
            refuse_dropout(self._name, dropout_p)
            refuse_grouped(self._name, heads, kv_heads, enable_gqa)

        options: dict[str, Any] = {"is_causal": is_causal, "attn_mask": attn_mask, "scale": scale}
        options["refuse"] = refuse if dropout_p or heads != kv_heads else None
        if torch.compiler.is_dynamo_compiling():
            self._refuse_core_call(tensors, private.device_mesh, attn_mask)
            out, *_ = attend(self._in_graph, tuple([tensor.to_local() for tensor in tensors]), **options)
            return placed_in_graph(out, query.device_mesh, query.placements)
        binding: Source = self._scoped if self.form is None else self._scoped.resolve()[0]
        try:
            self._refuse_core_call(tensors, private.device_mesh, attn_mask)
            self.remember()
            if self.form is not None and isinstance(binding, Binding):
                binding = self._of_own_heads(binding, self.form, query, attn_mask)
        except Exception as error:  # of any kind: the other ranks must raise too
            self.unscoped.refuse(error)
        out, _, self._latest = attend(binding, local_tensors(*tensors), **options)
        spec = spec_of(out, query.device_mesh, query.placements, (*query.shape[:3], out.shape[3]))
        return placed_as((spec,), out)[0]

    def _of_own_heads(
        self, binding: Binding, form: InputForm, query: DTensor, attn_mask: torch.Tensor | None
    ) -> Binding:
        """The binding for this rank's heads, so that a mask of all heads is cut as the heads are."""
        if query.shape[:2] == form.own:
            # The rows of a mask are not cut: where other axes cut the batch, only one for all rows will do.
            whole = 1 if form.cuts(0) else form.whole[0], form.whole[1]
            return binding.of_heads(form.heads, whole)
        if binding.mask.varies_by_head_or_row or _by_head(attn_mask):
            raise ValueError(
                f"{self._name}: query has {query.shape[0]} rows of the batch and {query.shape[1]} heads at the "
                f"attention, not {form.own[0]} and {form.own[1]} as the inputs on this rank: which heads of the mask "
                "they are is not known. Give one mask for all, or reshape query, key and value before the module"
            )
        return binding

    def _attend_flex(self, *call: Any) -> Any:
        raise NotImplementedError(f"{self._name}: flex_attention {_NOT_ON_DTENSORS.format('context_flex_attention')}")

    def _attend_varlen(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name}: varlen_attn {_NOT_ON_DTENSORS.format('context_varlen_attention')}")

    def _refuse_core_call(self, tensors: tuple[Any, ...], mesh: DeviceMesh, attn_mask: torch.Tensor | None) -> None:
        """Raise for a call that is not an attention over this module's sequence, which the private ``mesh`` cuts."""
        for label, tensor in zip(_LABELS, tensors, strict=True):
            if not isinstance(tensor, DTensor) or tensor.device_mesh != mesh:
                raise ValueError(
                    f"{self._name}: {label} was not made inside this module: it is not a DTensor on the module's "
                    "sequence axis; compute it from the module's inputs, or pass it to the module"
                )
            if tensor.ndim != 4:
                raise ValueError(
                    f"{self._name}: scaled_dot_product_attention was called with a {label} of {tensor.ndim} dims, "
                    f"{tuple(tensor.shape)}. The attention over all ranks needs 4 (batch, heads, sequence, head dim): "
                    "give query, key and value the missing ones, such as query.unsqueeze(0)"
                )
        for label, tensor in zip(_LABELS, tensors, strict=True):
            if tensor.placements != _ALONG:
                raise ValueError(
                    f"{self._name}: {label} has the placements {tensor.placements} and the shape {tuple(tensor.shape)} "
                    f"at the attention, not Shard({_SEQ_DIM}) on the sequence axis: the module moved or gathered the "
                    f"sequence dim; check seq_dim (1 for [B, S, H, D]){see('The sequence dim has moved')}"
                )
        if isinstance(attn_mask, DTensor):
            raise NotImplementedError(
                f"{self._name}: attn_mask is a DTensor; pass the mask of the whole sequence as a plain tensor, the "
                "same on all ranks"
            )
        if self.is_cut and attn_mask is not None and _by_head(attn_mask):
            raise NotImplementedError(f"{self._name}: attn_mask {tuple(attn_mask.shape)}: {SINGLED_OUT}")


never_compile_alone(CoreCalls._attend, nor_what_it_calls=True)


def _by_head(attn_mask: torch.Tensor | None) -> bool:
    """Whether a mask may differ by head or by row of the batch."""
    return attn_mask is not None and any(size != 1 for size in attn_mask.shape[:-2])


_NOT_ON_DTENSORS = (
    "is not supported inside a module with AttentionContextParallel, whose tensors are DTensors: use "
    "ModuleContextParallel, or call {} in place of the module"
)
SINGLED_OUT = (
    "under torch.compile, with query, key and value as DTensors on other axes, it is not known which heads or rows of "
    "the batch a rank has: give one mask for all, pass local tensors, or keep this module out of the compiled region"
)
