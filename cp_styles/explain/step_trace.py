"""Records a training step of a model on the meta device: the bytes of all tensors that live, and the work.

Tensors there have shapes and no values. In the place of the attention and of a loss from chunks run functions that keep
the same tensors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from cp_styles._lib.compat import graph_task_id, tensors_in, tree_map, without_dispatch_modes
from cp_styles._lib.live_storages import LiveStorages
from cp_styles.batch.losses import chunked_token_losses
from cp_styles.explain.events import Shapes
from cp_styles.integrations.transformers import register_attention
from cp_styles.masks import Causal, Full, Mask

_NAME = "cp_styles_without_data"  # of the attention, in transformers
_CHANGES = "softcap", "position_bias", "indices", "block_indices", "sinks", "cache"  # a dry run has none of them
_MODEL, _BACKWARD = "embeddings, logits, loss", "gradients before sharding"
_aten = torch.ops.aten
# The place of the first factor of a matrix product.
_FACTORS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1, _aten._grouped_mm: 0}


class AttentionKind(NamedTuple):
    """Attentions of a model that are equal: their mask, their shapes, and whether they have sinks."""

    mask: Mask
    shapes: Shapes
    has_sink: bool


class StepOptions(NamedTuple):
    """The form of a step: whether layers are checkpointed, whether the loss is made from chunks of the tokens, and
    whether the strategy keeps the inputs of the attention."""

    checkpoints: bool
    chunked: bool
    reads_inputs: bool


class StepTrace(TorchDispatchMode):
    """Records a step while the mode is on.

    Args:
        kinds: the kinds of attention so far. New ones are appended.
        options: the form of the step.
        device: the device of the run, which decides about kernels.
        watched: the number of the event at which ``parts`` is taken.

    Attributes:
        events: for each moment, the bytes that live; the place inside of an attention, which is 2 k + 1 in the forward
            of kind k, 2 k + 2 in its backward and else 0; and for each kind, how many attentions wait for a backward.
        parts: at one event, the bytes by what made them.
        flops: operations of matrix products, without attention.
        copied: bytes that all other operations read and write.
    """

    def __init__(
        self, kinds: list[AttentionKind], options: StepOptions, device: torch.device, watched: int = -1
    ) -> None:
        super().__init__()
        self.kinds, self.options, self.device, self._watched = kinds, options, device, watched
        self.events: list[list[int]] = []
        self.parts: dict[str, int] = {}
        self.flops = self.copied = 0
        self._unused = dict[nn.Module, int]()
        self._storages, self._waiting, self._labels = LiveStorages(), dict[int, LiveStorages](), list[str]()
        self._storages.peak = sys.maxsize  # record() looks for it
        self._values = WeakTensorKeyDictionary()
        self._joins = self._joined = False
        self._token = None

    def __enter__(self) -> StepTrace:
        self._token = _running.set(self)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _running.reset(self._token)  # pyright: ignore[reportArgumentType]
        for event in self.events:  # before the first attention of a kind, none of it waits
            event += [0] * (2 + len(self.kinds) - len(event))

    @property
    def calls(self) -> list[tuple[int, int]]:
        """For each kind of attention, the number of forwards and of backwards."""
        places = [inside for _, inside, *_ in self.events]
        return [(places.count(2 * kind + 1), places.count(2 * kind + 2)) for kind in range(len(self.kinds))]

    @property
    def unused(self) -> int:
        """The number of parameters of routed experts that a token does not use."""
        return sum(self._unused.values())

    def number_of(self, kind: AttentionKind) -> int:
        """The number of a kind of attention."""
        if kind not in self.kinds:
            self.kinds.append(kind)
        return self.kinds.index(kind)

    def waiting(self, kind: int) -> torch.Tensor:
        """A tensor to save for the backward of an attention, which waits as long as the tensor lives."""
        with without_dispatch_modes():
            token = torch.empty(1, dtype=torch.uint8, device="meta")
        self._waiting.setdefault(kind, LiveStorages()).add([token.untyped_storage()])
        return token

    def label(self, label: str, tensor: torch.Tensor) -> None:
        """Say what the storage of a tensor is."""
        self._storages.label(tensor.untyped_storage(), label)

    def record(self, inside: int = 0) -> None:
        """Record the bytes that live now."""
        live = self._storages.nbytes
        if self._joined and live <= self.events[-1][0]:
            return
        if self._joined:
            self.events.pop()
        waiting = (self._waiting[kind].nbytes if kind in self._waiting else 0 for kind in range(len(self.kinds)))
        self.events.append([live, inside, *waiting])
        self._joined = self._joins
        if len(self.events) - 1 == self._watched:
            self.parts = self._storages.by_label()

    @contextmanager
    def one_event(self) -> Iterator[None]:
        """Record the operations inside, whose number depends on the number of tokens, as one event: the largest."""
        self._joins = True
        try:
            yield
        finally:
            self._joins = self._joined = False

    def hooks(self, model: Any, layers: Sequence[nn.Module]) -> Iterator[Any]:
        """Add hooks to ``model`` that say which module makes a tensor, and note what its experts do not use."""
        parts = [(f"layers: {name}", part) for layer in layers for name, part in layer.named_children()]
        for parent in (model.base_model, model):
            parts += [(name, part) for name, part in parent.named_children() if part is not model.base_model]
        for name, part in parts:
            if not isinstance(part, nn.ModuleList):
                yield part.register_forward_pre_hook(lambda *_, name=name: self._labels.append(name))
                yield part.register_forward_hook(lambda *_: self._labels.pop() and None)
        for part in model.modules():
            names = list(inspect.signature(type(part).forward).parameters)
            chosen = [names.index(name) - 1 for name in ("top_k_index", "router_indices") if name in names]
            if chosen and hasattr(part, "num_experts"):
                yield part.register_forward_pre_hook(partial(self._note_experts, chosen[0]))

    def _note_experts(self, place: int, module: Any, args: tuple[Any, ...]) -> None:
        numel = sum(x.numel() for x in module.parameters())
        self._unused[module] = numel - numel * args[place].shape[-1] // module.num_experts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = kwargs or {}, func.overloadpacket
        if packet is _aten._local_scalar_dense and args[0] in self._values:
            return self._values[args[0]].item()
        result = func(*args, **kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        self._find_values(func, args, kwargs, inputs, result)
        existing = {x.untyped_storage()._cdata for x in inputs}
        created = [x for x in outputs if x.untyped_storage()._cdata not in existing]
        if packet in _FACTORS:
            first, second = inputs[_FACTORS[packet] :][:2]
            self.flops += 2 * first.numel() * second.shape[-1]
        elif (created or func._schema.is_mutable) and "empty" not in packet.__name__:
            self.copied += sum(x.nbytes for x in (*inputs, *created))
        if created:
            label = self._labels[-1] if self._labels else _BACKWARD if graph_task_id() != -1 else _MODEL
            self._storages.add((x.untyped_storage() for x in created), label)
            self.record()
        return result

    def _find_values(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], result: Any) -> None:
        """Compute integers that depend on positions and shapes alone, because code that makes masks reads them."""
        if func._schema.is_mutable:
            for x in inputs:
                self._values.pop(x, None)
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            return
        counts = isinstance(result, torch.Tensor) and not result.is_floating_point() and "empty" not in func.__name__
        if counts and all(x in self._values for x in inputs):
            real = tree_map(lambda x: self._values[x] if isinstance(x, torch.Tensor) else x, (args, kwargs))
            args, kwargs = tree_map(lambda x: torch.device("cpu") if isinstance(x, torch.device) else x, real)
            self._values[result] = func(*args, **kwargs)


_running: ContextVar[StepTrace] = ContextVar("_running")


def register_without_data() -> str:
    """Register ``attn_implementation=`` for models whose steps are recorded; returns its name."""
    masks = import_module("transformers.masking_utils").AttentionMaskInterface
    import_module("transformers").AttentionInterface.register(_NAME, _attend_without_data)
    masks.register(_NAME, masks()[register_attention()])
    return _NAME


def _attend_without_data(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers, as :mod:`cp_styles.integrations.transformers` has it."""
    changes = [name for name in _CHANGES if kwargs.get(name) is not None] + ["dropout"] * (dropout > 0)
    if changes or isinstance(attention_mask, torch.Tensor):
        given = ", ".join(changes) or "a mask of its own"
        raise NotImplementedError(f"{type(module).__name__} attends with {given}, of which no dry run is known")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask = (Causal() if causal else Full()) if attention_mask is None else attention_mask.mask
    trace = _running.get()
    dims = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    shapes = Shapes(*dims, query.dtype, trace.device, query.shape[0])
    kind = trace.number_of(AttentionKind(mask, shapes, s_aux is not None))
    out_BHLE: Any = _Attention.apply(query, key, value, kind, trace)
    return out_BHLE.transpose(1, 2).contiguous(), None


class _Attention(torch.autograd.Function):
    """Keeps the tensors that the attention of this package keeps, and makes its output and its gradients."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: int, trace: StepTrace) -> Any:
        ctx.kind, ctx.trace, ctx.kept = kind, trace, [(x.shape, _has_rows_first(x)) for x in (q, k, v)]
        trace.record(2 * kind + 1)
        kept = trace.options.reads_inputs
        out = _empty((*q.shape[:3], v.shape[3]), _has_rows_first(q) or not kept, q)
        ctx.save_for_backward(trace.waiting(kind), *((q, k, v, out) if kept else ()))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.trace.record(2 * ctx.kind + 2)
        return *(_empty(shape, rows_first, grad) for shape, rows_first in ctx.kept), None, None


def _has_rows_first(x_BHLD: torch.Tensor) -> bool:
    return x_BHLD.transpose(1, 2).is_contiguous()


def _empty(shape: tuple[int, ...], rows_first: bool, like: torch.Tensor) -> torch.Tensor:
    """A tensor [B, H, L, D], whose rows come before its heads in memory if ``rows_first``: outputs and gradients have
    the order of the inputs, but for outputs of strategies that do not keep the inputs."""
    batch, heads, rows, dim = shape
    return like.new_empty(batch, rows, heads, dim).transpose(1, 2) if rows_first else like.new_empty(shape)


class LossFromChunks(torch.autograd.Function):
    """:func:`~cp_styles.batch.chunked_token_losses` of hidden states, weight, bias and labels. Each direction is
    recorded as one event, and ``before`` is called before the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, labels: Any, trace: StepTrace, before: Any) -> Any:
        with trace.one_event(), torch.enable_grad():
            ctx.hidden, ctx.trace, ctx.before = hidden.detach().requires_grad_(), trace, before
            ctx.loss = chunked_token_losses(ctx.hidden, weight, labels, bias_V=bias)
        return ctx.loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.before()
        hidden, loss, ctx.hidden, ctx.loss = ctx.hidden, ctx.loss, None, None
        with ctx.trace.one_event():
            loss.backward()
        return hidden.grad, None, None, None, None, None
