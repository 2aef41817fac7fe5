"""Attention as two custom ops, forward and backward. They are opaque to torch.compile and visible to checkpoint
policies.

Shapes: B batch, H query heads, G key/value heads, L local queries, M local keys, D head dim, E value head dim.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from cp_styles._lib.checksum import digest
from cp_styles._lib.compat import (
    any_autocast,
    dispatch_modes_entered,
    forward_mode_level,
    named_range,
    never_compiled,
    new_size,
    torch_func_transform,
)
from cp_styles._lib.troubleshooting import see
from cp_styles._lib.unsupported_derivatives import first_derivatives_only, refuse_transforms
from cp_styles.comm.agreement import begin_backward
from cp_styles.comm.checks import Checks
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import mesh_of
from cp_styles.comm.point_to_point import Operation, destroyed_error, group_of_name
from cp_styles.engine.binding import Binding, BindingsInGraphs, Resolved, get_bindings
from cp_styles.engine.call import Call
from cp_styles.engine.checkpoint import results_are_kept
from cp_styles.engine.config import AttentionConfig, ConfigInGraph, rebuild, take_apart
from cp_styles.engine.observers import attention_listener
from cp_styles.engine.scope import ScopeHistory, SequenceScope
from cp_styles.kernels.autocast import attention_dtypes, cast_for_attention
from cp_styles.kernels.base import LseGradient
from cp_styles.layouts.balancers import may_vary
from cp_styles.masks import Dense, Full
from cp_styles.strategies import Attention

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe)
_CONFIG = f"{AttentionConfig.__module__}.{AttentionConfig.__qualname__}"
_LABELS = ("query", "key", "value")
_DENSE = torch.strided

# The configurations, with layouts, of eager calls whose backward may follow, by the number in ``call``. A recomputation
# whose results a checkpoint has kept finds it by this number alone. Weak: it lives as long as a node of autograd.
_resolved: WeakValueDictionary[int, Resolved] = WeakValueDictionary()

# The function modes of styles and blocks that are entered in this context, innermost last. While compiled code runs,
# torch's own list is empty.
modes_entered: ContextVar[tuple[Any, ...]] = ContextVar("modes_entered", default=())


def find_binding(config: AttentionConfig, dense: torch.Tensor | None = None) -> Binding:
    """This rank's binding with this configuration. Raises the problem of a configuration without parts."""
    if config.problem:
        raise TypeError(config.problem)
    group = group_of_name(config.group_name)
    bindings = get_bindings(group)
    binding = bindings.pop(config, None)
    if config.has_owner:
        binding = binding or state_of(group).get_or_create(BindingsInGraphs).get(config)
        if binding is None:
            raise destroyed_error()
        if dense is not None:  # equal configurations may have different Dense tensors: make a binding for each call
            bindings[config] = binding
            return replace(binding.unscoped, mask=rebuild(config.parts, dense)[2])
    elif binding is None or dense is not None:
        where, parts = (config.name, config.axis, group), rebuild(config.parts, dense)
        scopes = {} if config.has_layout else {"history": state_of(group).get_or_create(ScopeHistory)}
        checks = Checks(config.agreement, config.only_warn)
        binding = Binding(*where, *parts, checks=checks, has_layout=config.has_layout, **scopes)
    return bindings.put(config, binding)


def _pickle_scope(scope: SequenceScope, name: str) -> bytes:
    """Layout and mask of a scope, for the backward of a compiled graph."""
    if scope.mask.pattern != scope.mask:
        raise NotImplementedError(
            f"{name}: the mask of the SequenceScope is {scope.mask!r}, but under torch.compile the mask of a scope "
            "cannot hold tensors: pass it as the call's attn_mask, or give it to the style"
            f"{see('Tensors in the mask of a scope')}"
        )
    take_apart((scope.layout, scope.mask), [])  # raises for functions that are not found by name
    return pickle.dumps((scope.layout, scope.mask))


def check_local(
    name: str,
    tensors: tuple[torch.Tensor, ...],
    *,
    sink_H: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
) -> None:
    """Raise unless the inputs are plain 4-D tensors of one floating-point dtype on one device."""
    q, k, v = tensors
    # A fast test of the usual case. check_plain finds the reason for an error.
    plain = type(q) is type(k) is type(v) is torch.Tensor and q.layout is k.layout is v.layout is _DENSE
    plain = plain and not (q.is_nested or k.is_nested or v.is_nested)
    plain = plain and sink_H is None and attn_mask is None
    if not plain or forward_mode_level() >= 0 or torch_func_transform() is not None:
        check_plain(name, tensors, sink_H=sink_H, attn_mask=attn_mask)
    for label, tensor in zip(_LABELS, tensors, strict=True):
        if tensor.ndim != 4:
            raise ValueError(
                f"{name}: {label} must have 4 dims (batch, heads, sequence, head dim), got {tuple(tensor.shape)}"
            )
    equal = q.device == k.device == v.device and (
        q.dtype == k.dtype == v.dtype or len(set(attention_dtypes(tensors))) == 1
    )
    if not (equal and q.is_floating_point()):
        raise ValueError(
            f"{name}: query, key and value must share one floating-point dtype and one device, got "
            f"{[(str(x.dtype), str(x.device)) for x in tensors]}"
        )


def check_plain(
    name: str,
    tensors: tuple[torch.Tensor, ...],
    labels: Sequence[str] = _LABELS,
    *,
    sink_H: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
) -> None:
    """Raise unless the inputs are dense local tensors, outside of forward-mode AD and of torch.func."""
    for label, tensor in zip(labels, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: {label} must be a tensor, got {type(tensor).__name__}")
        if mesh_of(tensor) is not None:
            raise TypeError(
                f"{name}: {label} is a DTensor; pass this rank's part, tensor.to_local(). torch's own context_parallel "
                "makes DTensors: leave that block out, or take context_parallel of cp_styles.torch_api"
            )
        refuse_nested(name, label, tensor)
        if tensor.layout is not _DENSE:
            raise NotImplementedError(f"{name}: {label} has the layout {tensor.layout}: pass {label}.to_dense()")
    refuse_transforms(name, tensors if sink_H is None else (*tensors, sink_H))
    if attn_mask is not None and (attn_mask.requires_grad or type(attn_mask) is not torch.Tensor):
        Dense(attn_mask)  # raises. The op cannot check it, because requires_grad and subclasses are lost there


def refuse_nested(name: str, label: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise NotImplementedError(
            f"{name}: {label} is a nested tensor: pack the documents into one sequence, tensors [1, H, S, D]. Give a "
            "function layout= and mask=Documents(lengths), and open a SequenceScope(layout, mask=Documents(lengths)) "
            "around a module"
        )


def attend(
    source: Binding | ConfigInGraph,
    tensors: tuple[torch.Tensor, ...],
    *,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    sink_H: torch.Tensor | None = None,
    wants_lse: bool = False,
    learned: torch.Tensor | None = None,
    casts: bool = True,
    problem: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run one attention. Every function and style of the package calls this function, after it has checked the
    arguments: see :func:`check_local`, and in a graph :func:`check_plain`.

    Args:
        source: the binding; under torch.compile, and only there, a ``ConfigInGraph``.
        tensors: local query [B, H, L, D], key [B, G, M, D] and value [B, G, M, E].
        is_causal, attn_mask, scale, sink_H: as in :func:`~cp_styles.context_attention`.
        wants_lse: return the logsumexp.
        learned: the flat tensor that the kernel learns.
        casts: whether autocast casts the tensors.
        problem: in a graph, the error that was found while tracing: see :func:`tell_of_call`.

    Returns the output, the logsumexp (empty unless ``wants_lse``), and the argument of :func:`resolved_of`.
    """
    in_graph = isinstance(source, ConfigInGraph)
    if casts and not problem and (in_graph or any_autocast()):
        tensors = cast_for_attention(tensors)
    q, k, v = tensors
    trained = q.requires_grad or k.requires_grad or v.requires_grad or (sink_H is not None and sink_H.requires_grad)
    trained = trained or (learned is not None and learned.requires_grad)
    config, dense = (source.config, source.dense) if in_graph else (source, None)
    lean = not in_graph and dispatch_modes_entered() and results_are_kept()
    keep = torch.is_grad_enabled() and trained
    out, _, call, lse = torch.ops.cp_styles.attention.default(
        *tensors, sink_H, attn_mask, dense, config, is_causal, scale, keep, problem, learned, wants_lse, lean
    )
    return out, lse, call


def tell_of_call(source: Binding | ConfigInGraph, error: Exception) -> str:
    """Tell the other ranks of an error in the arguments of a call. In a graph, return its text for the op."""
    # A graph cannot tell them: the op raises the text on every rank. torch.compile cannot trace str(error).
    if isinstance(source, ConfigInGraph):
        return error.args[0]
    source.now()[0].tell_peers(error)
    return ""


# [Note: configuration] Each attention is one custom op. Its argument ``config`` has everything that is not a tensor. An
# eager call passes a binding, the live object. A compiled graph has an AttentionConfig, a value. So graphs, and caches
# keyed by graphs, depend on the configuration: another layout or mask recompiles, other lengths or documents in a scope
# do not. Lengths and the open SequenceScope are known only when the graph runs. The forward returns both in ``call``, a
# small tensor of bytes on the host, which the backward reads.

# -- forward --

torch.library.define(
    "cp_styles::attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? attn_mask, Tensor? dense, {_CONFIG} config, bool is_causal, "
    "float? scale, bool keep, str problem, Tensor? learned=None, bool wants_lse=False, bool lean=False) "
    "-> (Tensor out, Tensor residual, Tensor call, Tensor lse)",
    tags=_TAGS,
)


@torch.library.impl("cp_styles::attention", "CompositeExplicitAutograd")
@never_compiled
def _attention(
    q, k, v, sink, attn_mask, dense, config, is_causal, scale, keep, problem, learned=None, wants_lse=False, lean=False
):
    """``keep``: a backward may follow. ``problem``: the error that this rank found while tracing, or empty.
    ``learned``: the flat tensors that the kernel learns. ``lean``: no received keys are kept."""
    in_graph = isinstance(config, AttentionConfig)
    if in_graph:
        for mode in modes_entered.get():  # modes do not intercept calls in compiled code
            if mode.encloses_call():
                mode.wrap_checkpoints()
        config = find_binding(config, dense)
        config.group_state.turn.begin()  # a call of a function begins here; an eager one began with its binding
    binding, scope = config.now()
    binding = binding.without_kept_keys() if lean else binding
    cut = b""
    try:
        if problem:
            raise NotImplementedError(problem)
        if in_graph:
            cut = _pickle_scope(scope, binding.name) if scope is not None and keep else b""
            check_local(binding.name, (q, k, v))
        if attn_mask is not None:
            Dense(attn_mask)  # raises for a tensor that is not a mask
        if sink is not None and tuple(sink.shape) != (q.shape[1],):
            raise ValueError(
                f"{binding.name}: sink_H must be one logit for each of {q.shape[1]} query heads, got "
                f"{tuple(sink.shape)}"
            )
    except Exception as error:
        binding.tell_peers(error)
        raise
    arguments = {"is_causal": is_causal, "scale": scale, "logsumexp": wants_lse}
    # On a GPU the host would wait for the values. There UnreducedGradients compares sinks with the other parameters.
    arguments["sink"] = None if sink is None else digest(sink) if sink.device.type == "cpu" else 0
    where, model = (binding.name, binding.axis, binding.group), binding.model or binding.forward_state.model
    of_call = {"binding": binding, "attn_mask": attn_mask, "arguments": arguments}
    with Operation(binding.group, binding.group_state, meets=True):
        resolved = Call(where, binding.checks, (q, k, v), model, keep, **of_call).meet()
        try:
            attention = resolved.attention((q, k, v), is_causal=is_causal, attn_mask=attn_mask, scale=scale)
        except (ValueError, TypeError, NotImplementedError) as error:  # on every rank
            binding.group_state.turn.note_known(error)
            raise
        options = {"keep": keep, "wants_lse": wants_lse, "learned": learned}
        out, lse, residual = run_forward(binding, attention, q, k, v, sink, **options)
    data = bytearray()
    if in_graph:
        out = _copy_to_strides(out, _empty_like_query(q.to("meta"), out.shape[3]))
        if keep and any(map(may_vary, binding.layouts)):  # a balancer may return other layouts in the backward
            cut = pickle.dumps((resolved.cuts, Full() if scope is None else scope.mask))
        data = bytearray(pickle.dumps((*resolved.lengths, cut))) if keep else data
    else:
        _resolved[resolved.serial] = resolved
        data += resolved.serial.to_bytes(_NUMBER, "little")
    if data:
        data[:0] = binding.group_state.operations.forwards.to_bytes(_NUMBER, "little")
    record = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
    return out, residual, record, lse


@torch.library.register_fake("cp_styles::attention")
def _attention_fake(q, k, v, sink, attn_mask, dense, config, is_causal, scale, keep, *_):
    sizes = [new_size(torch.library.get_ctx()) if keep else 0 for _ in range(2)]
    residual = q.new_empty(sizes[0], dtype=torch.uint8)
    call = torch.empty(sizes[1], dtype=torch.uint8, device="cpu")
    kernel = rebuild(config.parts[4]) if isinstance(config, AttentionConfig) and config.parts else None
    # The op refuses integers when it runs. Until then the code behind it is traced, and must not fail on this rank.
    q = q if q.is_floating_point() else q.to(torch.get_default_dtype())
    dim = v.shape[-1] if kernel is None else kernel.dims(k, v)[1]
    return _empty_like_query(q, dim), residual, call, q.new_empty(0)


@never_compiled
def _save(ctx, inputs, output) -> None:
    q, k, v, sink, attn_mask, dense, config, is_causal, scale, keep, _, learned, wants_lse, _ = inputs
    out, residual, call, lse = output
    ctx.set_materialize_grads(False)
    ctx.config, ctx.is_causal, ctx.scale, ctx.keep, ctx.wants_lse = config, is_causal, scale, keep, wants_lse
    reads_inputs = True
    if keep and not isinstance(config, AttentionConfig):
        ctx.call = call
        ctx.resolved = resolved_of(call)  # keeps the call alive for as long as its backward may follow
        reads_inputs = ctx.resolved.binding.strategy.reads_inputs
    elif keep and not config.problem:
        with contextlib.suppress(ValueError):  # a strategy that cannot run raises on every rank when the graph runs
            reads_inputs = rebuild(config.parts[1]).on(group_of_name(config.group_name).size()).reads_inputs
    # If the backward needs shapes only, it makes tensors without values. So the inputs are freed in the forward.
    ctx.shapes = () if reads_inputs else tuple([(x.shape, (x.dtype, x.device)) for x in (q, k, v, out)])
    inputs = (q, k, v, out) if reads_inputs else (None,) * 4
    # ``lse`` is saved even if it is empty: first_derivatives_only looks for a saved tensor that requires grad.
    ctx.save_for_backward(*inputs, residual, sink, attn_mask, dense, call, learned, lse)


@never_compiled
@first_derivatives_only
def _differentiate(ctx, grad, _residual, _call, grad_lse):
    q, k, v, out, residual, sink, attn_mask, dense, call, learned, _ = ctx.saved_tensors
    grad_lse = grad_lse if ctx.wants_lse else None  # without lse the gradient has no elements
    if grad is None and grad_lse is None:
        return (None,) * 14
    if ctx.shapes:
        empty = {kind: torch.empty(1, dtype=kind[0], device=kind[1]) for kind in {kind for _, kind in ctx.shapes}}
        q, k, v, out = [empty[kind].expand(size) for size, kind in ctx.shapes]
    grad = torch.zeros_like(out) if grad is None else grad
    if not ctx.keep:
        raise RuntimeError("cp_styles::attention was called with keep=False, so it has no backward")
    config = ctx.config
    if not isinstance(config, AttentionConfig):
        # The call and the record of this forward. The saved record may come from a recomputation, which has another
        # number, and whose binding may be gone.
        config, call = ctx.resolved, ctx.call
    dq, dk, dv, dsink, shares = torch.ops.cp_styles.attention_backward.default(
        grad, q, k, v, out, residual, sink, attn_mask, dense, call, config, ctx.is_causal, ctx.scale, grad_lse, learned
    )
    dsink, shares = None if sink is None else dsink, None if learned is None else shares
    return dq, dk, dv, dsink, *(None,) * 7, shares, None, None


torch.library.register_autograd("cp_styles::attention", _differentiate, setup_context=_save)

# -- backward --

torch.library.define(
    "cp_styles::attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor residual, Tensor? sink, Tensor? attn_mask, "
    f"Tensor? dense, Tensor call, {_CONFIG} config, bool is_causal, float? scale, Tensor? grad_lse=None, "
    "Tensor? learned=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


@torch.library.impl("cp_styles::attention_backward", "CompositeExplicitAutograd")
@never_compiled
def _attention_backward(
    grad, q, k, v, out, residual, sink, attn_mask, dense, call, config, is_causal, scale, grad_lse=None, learned=None
):
    in_graph = isinstance(config, AttentionConfig)
    resolved = _resolve_in_graph(config, dense, call) if in_graph else config
    attention = resolved.attention((q, k, v), is_causal=is_causal, attn_mask=attn_mask, scale=scale)
    number = int.from_bytes(_read_bytes(call)[:_NUMBER], "little")
    after, options = (out, residual, sink), {"forward": number, "grad_lse_BHL": grad_lse, "learned": learned}
    *grads, dsink, shares = run_backward(resolved.binding, attention, grad, q, k, v, *after, **options)
    if in_graph:
        pairs = zip(grads, (q, k, v), strict=True)
        grads = [_copy_to_strides(grad, _empty_rows_first(x.to("meta"))) for grad, x in pairs]
    empty = q.new_empty(0)
    share = flatten(shares, q.device).to(learned.dtype) if shares and learned is not None else empty.clone()
    return *grads, empty if dsink is None else dsink, share


@torch.library.register_fake("cp_styles::attention_backward")
def _attention_backward_fake(
    grad, q, k, v, out, residual, sink, attn_mask, dense, call, config, is_causal, scale, grad_lse=None, learned=None
):
    shares = (q.new_empty(0) if x is None else torch.empty_like(x) for x in (sink, learned))
    return *(_empty_rows_first(x) for x in (q, k, v)), *shares


# -- the only calls of Strategy.forward and backward --


def run_forward(
    binding: Binding,
    attention: Attention,
    q_BHLD: torch.Tensor,
    k_BGMD: torch.Tensor,
    v_BGME: torch.Tensor,
    sink_H: torch.Tensor | None = None,
    *,
    keep: bool,
    wants_lse: bool = False,
    learned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(out_BHLE, lse_BHL, residual)`` of an attention after the agreement of the ranks, in their Operation.

    lse is empty unless ``wants_lse``. The residual is empty unless ``keep`` or ``wants_lse``. Communication: the
    strategy's.
    """
    strategy, tensors, filled = binding.strategy, (q_BHLD, k_BGMD, v_BGME), keep or wants_lse
    if (listens := attention_listener.get()) is not None:
        listens(strategy, attention, *tensors, sink_H)
    if learned is not None:
        attention = replace(attention, kernel=attention.kernel.with_learned(learned, backward=False)[0])
    with named_range("attention forward:", binding.name):
        shape, dtype = (0,), torch.uint8
        if filled:
            places = attention.known.get("residual")  # an attention fixes the shapes of its tensors
            if places is None:
                places = attention.known["residual"] = strategy.residual_places(attention, *tensors)
            shape, dtype = places.spec
        residual = torch.empty(shape, dtype=dtype, device=q_BHLD.device)
        out = strategy.forward(attention, *tensors, sink_H, residual if filled else None)
        lse = strategy.logsumexp(attention, *tensors, residual) if wants_lse else q_BHLD.new_empty(0)
    return out, lse, residual


def run_backward(
    binding: Binding,
    attention: Attention,
    grad_BHLE: torch.Tensor,
    q_BHLD: torch.Tensor,
    k_BGMD: torch.Tensor,
    v_BGME: torch.Tensor,
    out_BHLE: torch.Tensor,
    residual: torch.Tensor,
    sink_H: torch.Tensor | None = None,
    *,
    forward: int,
    grad_lse_BHL: torch.Tensor | None = None,
    learned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Sequence[torch.Tensor]]:
    """``(dq, dk, dv, dsink, shares)``. ``shares`` are the gradients of the tensors that the kernel learns.

    dsink and ``shares`` are this rank's share of a sum over the group. ``forward`` is the number of the forward: see
    :class:`~cp_styles.comm.group_state.Operations`. Communication:
    :func:`~cp_styles.comm.agreement.begin_backward`'s, then the strategy's.
    """
    kernel, shares = attention.kernel.with_learned(learned, backward=True)
    attention = attention if kernel is attention.kernel else replace(attention, kernel=kernel)
    strategy, state, agrees = binding.strategy, binding.group_state, binding.checks.agreement
    if binding.model is not None and binding.group.size() > 1:
        binding.model.backward_begins(binding.forwards)
    with named_range("attention backward:", binding.name), Operation(binding.group, state, forward, meets=agrees):
        begin_backward(binding.group, forward, agrees)
        binding.forwards.open &= not agrees
        if grad_lse_BHL is not None:
            attention = replace(attention, kernel=LseGradient(attention.kernel))
            grad_BHLE = torch.cat((grad_BHLE, grad_lse_BHL.unsqueeze(-1).to(grad_BHLE.dtype)), -1)
        grads = strategy.backward(attention, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, residual, sink_H)
    return *grads, shares


def flatten(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """All elements of the tensors in one 1-D tensor."""
    # An op with an argument for a list of tensors would make every call slower.
    flat = [tensor.reshape(-1).to(device) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


# -- sizes and strides of results, as declared to the graph --


def _empty_like_query(q_BHLD: torch.Tensor, dim: int) -> torch.Tensor:
    """An output [B, H, L, E] in the query's stride order, like an output of torch's own attention."""
    if q_BHLD.shape[-1] == dim:
        return torch.empty_like(q_BHLD)
    return q_BHLD.new_empty((*q_BHLD.shape[:-1], dim))


def _empty_rows_first(x_BHLD: torch.Tensor) -> torch.Tensor:
    """A gradient [B, H, L, D] in the memory order of the kernels, [B, L, H, D]."""
    batch, heads, rows, dim = x_BHLD.shape
    return x_BHLD.new_empty((batch, rows, heads, dim)).transpose(1, 2)


def _copy_to_strides(result: torch.Tensor, declared: torch.Tensor) -> torch.Tensor:
    """``result`` with the strides of ``declared`` and a storage of its own; copied only if needed."""
    if result.stride() == declared.stride() and result.untyped_storage().nbytes() == result.nbytes:
        return result
    copy = torch.empty_strided(declared.shape, declared.stride(), dtype=result.dtype, device=result.device)
    return copy.copy_(result)


# -- the record of a forward for its backward --

_NUMBER = 8  # bytes of the number of the forward. The serial number of the call follows, or in a graph a pickle.


def resolved_of(call: torch.Tensor) -> Resolved:
    """The eager call of the op that returned ``call``, also in a recomputation whose results were kept."""
    return _resolved[int.from_bytes(_read_bytes(call)[_NUMBER:], "little")]


def _resolve_in_graph(config: AttentionConfig, dense: torch.Tensor | None, call: torch.Tensor) -> Resolved:
    """The call of a compiled graph, for its backward."""
    *lengths, pickled = pickle.loads(_read_bytes(call)[_NUMBER:])  # layout or layouts, and mask of the scope, if needed
    binding = find_binding(config, dense).unscoped
    cut, mask = pickle.loads(pickled) if pickled else (None, Full())
    if isinstance(cut, tuple):  # the layouts of a balancer
        return (binding.bind_scope(cut[0], mask) if mask.parts else binding).with_layouts(cut)
    if cut is not None:
        binding = binding.bind_scope(cut, mask)
    return binding.with_layouts(binding.cuts((lengths[0], lengths[1])))


def _read_bytes(call: torch.Tensor) -> bytes:
    call = call.contiguous()
    return ctypes.string_at(call.data_ptr(), call.numel())
