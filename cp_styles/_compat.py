"""Every private torch name this package touches, renamed once, with the versions in which it was seen."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import overrides
from torch._dynamo import eval_frame
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.types import FrameAction, FrameExecStrategy  # pyright: ignore[reportPrivateImportUsage]
from torch._guards import _TLS, TracingContext
from torch._library.fake_impl import allocate_size
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention as flex_module
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves as tree_leaves  # seen: 2.11 to 2.15
from torch.utils._pytree import tree_map_only as tree_map_only  # seen: 2.11 to 2.15

F = TypeVar("F", bound=Callable[..., Any])

# DTensor knows no aten.detach_: seen in 2.11 and 2.12; has a rule from 2.13.
DETACH_IN_PLACE_HAS_NO_RULE = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


def sdpa_handlers() -> dict[Any, Callable[..., Any]]:
    """The dict of per-op handlers DTensor reads at every dispatch. Seen: 2.11 to 2.15."""
    return DTensor._op_dispatcher._custom_op_handlers  # pyright: ignore[reportAttributeAccessIssue]


def default_dispatch(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What DTensor does with an op that has no handler. Seen: 2.11 to 2.15 (the slow path of its dispatcher)."""
    dispatcher = DTensor._op_dispatcher  # pyright: ignore[reportAttributeAccessIssue]
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    results = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    return dispatcher.wrap(results, info.output_sharding.output_spec)  # pyright: ignore[reportOptionalMemberAccess]


def dtensor_without_grad(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """``DTensor.from_local`` for a tensor that needs no autograd and no checks: a tenth of the time. Seen: 2.11 to
    2.15 (the constructor, DTensorSpec and TensorMeta)."""
    local = local.detach() if local.requires_grad else local
    spec = _dtensor_spec(mesh, placements, shape, stride, local.dtype)
    if spec.mesh is not mesh:  # an equal one, maybe of a world that is no more
        spec = _dtensor_spec.__wrapped__(mesh, placements, shape, stride, local.dtype)
    return DTensor(local, spec, requires_grad=False)  # pyright: ignore[reportAbstractUsage]


@lru_cache(maxsize=256)  # one is shared by many tensors, as those that DTensor's own sharding rules return are
def _dtensor_spec(
    mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


@contextlib.contextmanager
def thread_local_world() -> Iterator[None]:
    """Give every thread its own torch.distributed world while inside, so that threads can be ranks.

    Names seen in 2.11, 2.12, 2.13, 2.14, 2.15. Only for tests and notebooks.
    """
    from torch._C._distributed_c10d import _set_thread_isolation_mode  # pyright: ignore
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed import multi_threaded_pg as threads

    excepthook = sys.excepthook
    world = threads._install_threaded_pg()
    if not hasattr(world, "comms"):  # 2.11: destroy_process_group reads it, the threads' world lacks it
        world.comms = []  # pyright: ignore[reportAttributeAccessIssue]
    _set_thread_isolation_mode(True)
    # The first fake mode of a process sets a device guard, on CUDA builds without a GPU; two threads doing so at once
    # crash it (seen on 2.11), so it is done before there are any.
    with FakeTensorMode():
        pass
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        threads._uninstall_threaded_pg()
        # init_process_group puts "[rank0]:" before what an uncaught exception prints, once more every time.
        sys.excepthook = excepthook


def process_group_of(op_argument: Any) -> dist.ProcessGroup | None:
    """The process group inside an argument of a c10d op, or None. Seen: 2.11 to 2.15 (``ProcessGroup.unbox``)."""
    if isinstance(op_argument, torch.ScriptObject):
        with contextlib.suppress(RuntimeError):
            return dist.ProcessGroup.unbox(op_argument)
    return None


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of this (thread's) world with the name ``ProcessGroup.group_name``. Seen: 2.11 to 2.15."""
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore


def gloo_beside(group: dist.ProcessGroup, name: str, timeout: timedelta | None = None) -> Any:
    """Gloo between the ranks of a group that has none, for small host tensors; all of the ranks must call it.

    Over the group's store, with its timeout or another one. It is a backend and no group, because a new group is named
    by how many groups a rank has made, and ranks may differ in that. Seen: 2.11 to 2.15 (the store of a group, the
    options of a backend)."""
    store = dist.distributed_c10d._get_process_group_store(group)  # pyright: ignore[reportAttributeAccessIssue]
    backend = group._get_backend(group._device_types[0])  # pyright: ignore[reportAttributeAccessIssue]
    own: timedelta = getattr(getattr(backend, "options", None), "_timeout", None) or timedelta(minutes=30)
    made = dist.distributed_c10d.ProcessGroupGloo  # pyright: ignore[reportAttributeAccessIssue]
    return made(dist.PrefixStore(f"{name}/{group.group_name}", store), group.rank(), group.size(), timeout or own)


# The functional collectives as ops: compile traces them, nothing deprecates them, and unlike the functions of
# torch.distributed._functional_collectives they return plain tensors (those return a lazily waiting subclass in
# eager mode). Each result must pass wait_tensor before it is read. Schemas seen: 2.11, 2.13, 2.15.


def start_all_to_all(wire: torch.Tensor, received: list[int], sent: list[int], group_name: str) -> torch.Tensor:
    """Send ``sent[j]`` elements of the flat ``wire`` to each rank j and get ``received[i]`` from each rank i."""
    return torch.ops._c10d_functional.all_to_all_single(wire, received, sent, group_name)


def start_all_gather(wire: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """The equally long flat ``wire`` of all ranks, one after another."""
    return torch.ops._c10d_functional.all_gather_into_tensor(wire, ranks, group_name)


def wait_tensor(started: torch.Tensor) -> torch.Tensor:
    """The result of a started functional collective, ready to be read."""
    return torch.ops._c10d_functional.wait_tensor(started)


def in_process_store() -> Any:
    """A store for ranks that are threads of one process. Seen: 2.11 to 2.15 (not exported, though documented)."""
    return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]


def current_graph_task() -> int | None:
    """A number for the backward that runs now in this thread, None outside of any. Seen: 2.11 to 2.15."""
    task = torch._C._current_graph_task_id()
    return None if task < 0 else task


def current_autograd_node() -> Any:
    """The node whose backward runs now in this thread, None outside of any; a compiled graph is one node. Seen: 2.11
    to 2.15."""
    return torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue]


def first_node() -> int:
    """A number that the autograd nodes which this thread makes from now on are not below. Seen: 2.11 to 2.15."""
    with torch.enable_grad():
        return torch.ones((), requires_grad=True).neg().grad_fn._sequence_nr() + 1  # pyright: ignore


def local_attention_since(first: int, nodes: Iterable[Any]) -> bool:
    """Whether torch's own attention is among these autograd nodes and what they lead to, down to those before ``first``
    (see :func:`first_node`). Seen: 2.11 to 2.15 (names and numbers of nodes; each thread has numbers of its own)."""
    waiting = list(nodes)
    met = set(waiting)
    while waiting:
        node = waiting.pop()
        if node._sequence_nr() < first:
            continue
        name = node.name()
        if "Attention" in name and name.startswith(("ScaledDotProduct", "Flash", "Efficient", "Cudnn")):
            return True
        fresh = {each for each, _ in node.next_functions if each is not None} - met
        met |= fresh
        waiting += fresh
    return False


def scripted_attention(function: Any) -> bool:
    """Whether TorchScript has compiled attention into a function or module. Seen: 2.11 to 2.15."""
    if not isinstance(function, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
        return False
    with contextlib.suppress(AttributeError, RuntimeError):  # a module without a forward
        return "scaled_dot_product_attention" in str(function.inlined_graph)
    return False


def fast_path_attention() -> tuple[Any, ...]:
    """The fused inference paths of nn.MultiheadAttention and nn.TransformerEncoderLayer. Seen: 2.11 to 2.15."""
    return torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd  # pyright: ignore


def flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The 1-D mesh of several axes of a mesh, the last one varying fastest; the same one every time. Seen: 2.11 to
    2.15."""
    return mesh[names]._flatten("_".join(names))


def without_communication(mesh: DeviceMesh, reason: str) -> DeviceMesh:
    """Make every collective over the mesh's first axis fail, on every rank alike, with ``reason`` in the error. Seen:
    2.11 to 2.15."""
    others = mesh._dim_group_names[1:]  # pyright: ignore[reportAttributeAccessIssue]
    mesh._dim_group_names = [reason, *others]  # pyright: ignore[reportAttributeAccessIssue]
    # DTensor's caches keep every mesh: its groups' threads would outlive destroy_process_group.
    return without_groups(mesh)


def without_groups(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh that does not keep its groups alive, as meshes do for code that is being compiled: by name it finds them
    as long as they exist. Seen: 2.11 to 2.15."""
    mesh._pg_registry.clear()  # pyright: ignore[reportAttributeAccessIssue]
    return mesh


# What torch.autograd.detect_anomaly asks of every gradient, after isnan. Seen: 2.11 to 2.15.
IS_ANY_TRUE = torch.ops.aten._is_any_true.default


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode differentiation looks at ``tensor``: it, or what transforms of torch.func have wrapped, is a
    dual tensor. Seen: 2.11 to 2.15."""
    functorch = torch._C._functorch  # pyright: ignore
    while functorch.is_batchedtensor(tensor) or forward_ad.unpack_dual(tensor).tangent is None:
        if not functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = functorch.get_unwrapped(tensor)
    return True


def saved_tensors_hooks_on_top() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The innermost (pack, unpack) of ``torch.autograd.graph.saved_tensors_hooks`` in this thread, or None. Seen: 2.11
    to 2.15."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore


# Its other autograd.Functions, compiled graphs among them, run nothing again that they were given as a function.
_TORCH_FILES = torch.__path__[0]


def running_reruns() -> list[tuple[Any, str | None]]:
    """Who will call a function again in a backward that is running now in this thread: activation checkpoints.

    Each as (object, name of its attribute that holds the function), innermost first. The name is None for an
    autograd.Function that is not torch's: what its backward will do, nobody knows.

    Seen: 2.11 to 2.15 (``run_function`` of CheckpointFunction; the frame object of the other kind, in
    ``checkpoint``'s generator and in the hooks that it opens).
    """
    found: list[tuple[Any, str | None]] = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "checkpoint" and code.co_filename == checkpoint.__file__:
            generator = getattr(frame.f_locals.get("gen"), "gi_frame", None)
            if generator is not None and "new_frame" in generator.f_locals:
                found.append((generator.f_locals["new_frame"], "recompute_fn"))
        elif code.co_name == "forward" and code.co_argcount:
            ctx = frame.f_locals.get(code.co_varnames[0])
            if code is checkpoint.CheckpointFunction.forward.__code__:
                if hasattr(ctx, "run_function"):  # it looks at its inputs before it sets it
                    found.append((ctx, "run_function"))
            elif isinstance(ctx, torch.autograd.function.FunctionCtx) and not code.co_filename.startswith(_TORCH_FILES):
                found.append((ctx, None))
        frame = frame.f_back
    # torch.distributed._composable.checkpoint opens the hooks without the function.
    pack = (saved_tensors_hooks_on_top() or (None,))[0]
    if getattr(pack, "__qualname__", "").startswith("_checkpoint_hook."):
        cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=False))  # pyright: ignore
        if "frame" in cells and all(owner is not cells["frame"].cell_contents for owner, _ in found):
            found.insert(0, (cells["frame"].cell_contents, "recompute_fn"))
    return found


def constant_under_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.compile call ``function`` while it traces and take the result for a constant. Only for functions of
    arguments that it guards by identity, as classes and functions. Documented as torch.compiler.assume_constant_result.
    """
    return torch.compiler.assume_constant_result(function)


def new_size(context: Any) -> Any:
    """A size that only the run of an op knows, for its fake: ``torch.library.get_ctx().new_dynamic_size()``, which
    refuses outside of fullgraph=True, so that torch.compile breaks the graph there. The attention's residual never
    leaves a graph but for its own backward, so nothing is lost by having it in one. Seen: 2.11 to 2.15 (the context's
    ``_shape_env``; torch's device_mesh ops do the same)."""
    shapes = context._shape_env
    return context.new_dynamic_size() if shapes is None else allocate_size(shapes)


def is_traced() -> bool:
    """Whether torch.compile or torch.export traces the code that asks. ``torch.compiler.is_compiling()`` says so too
    where another thread compiles. Seen: 2.11 to 2.15."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def run_kernel(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The kernel of an op for the device of its tensors, past all that dispatches to it: modes, autograd. Seen: 2.11 to
    2.15."""
    device = next(value.device.type for value in args if isinstance(value, torch.Tensor))
    key = torch._C._dispatch_key_parse(device.upper())  # pyright: ignore
    return op.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)  # pyright: ignore


# What flex_attention comes down to: its module, its operator, and what stands there for no score_mod and for no
# BlockMask. Seen: 2.11 to 2.15.
FLEX_FUNCTION: Any = flex_module.flex_attention
FLEX_GLOBALS: Any = vars(flex_module)
FLEX_OPERATOR: Any = torch.ops.higher_order.flex_attention
FLEX_IDENTITY: Any = flex_module._identity
FLEX_UNBLOCKED: int = flex_module._LARGE_SPARSE_BLOCK_SIZE  # pyright: ignore


class FlexAsWritten:
    """From now until :meth:`end`, what torch.compile made of flex_attention runs in this thread as it was written, and
    so does what flex_attention itself compiles. Everything else is compiled as ever.

    torch.compile's wrapper runs a function as it was written where it finds itself inside a kernel of a fake tensor, by
    a thread's own variable. So nothing is traced, and torch remembers nothing about the code: a trace that fails would
    leave flex_attention uncompiled in all of the process. Seen: 2.11 to 2.15 (the wrapper, its ``fn``).
    """

    def __init__(self) -> None:
        self._context = _AskedByWrapper() if TracingContext.try_get() is None else None
        if self._context is not None:
            _TLS.tracing_context = self._context

    def end(self) -> None:
        if self._context is not None and TracingContext.try_get() is self._context:
            _TLS.tracing_context = None


class _AskedByWrapper(TracingContext):
    """Has a fake mode for torch.compile's wrapper around flex_attention, and none for anybody else who asks."""

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def fake_mode(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        frame = sys._getframe(1)
        asked_for = frame.f_locals.get("fn") if frame.f_code.co_name == _WRAPPER else None
        return _IN_KERNEL if asked_for is not None and _is_flex(inspect.unwrap(asked_for)) else None

    @fake_mode.setter
    def fake_mode(self, value: Any) -> None:
        pass


# What a function compiled as one graph raises where torch has compiled it as often as it will. Seen: 2.11 to 2.15.
RecompileLimitHit: type[Exception] = FailOnRecompileLimitHit


def within_compiled(frame: types.FrameType | None) -> bool:
    """Whether ``frame`` runs because of a call of something that torch.compile made, and nothing was disabled since.
    Seen: 2.11 to 2.15 (torch.compile's wrapper; that of torch.compiler.disable has another name there)."""
    while frame is not None and frame.f_code.co_filename != eval_frame.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == _WRAPPER


_WRAPPER = "compile_wrapper"


def _is_flex(function: Any) -> bool:
    local = f"{FLEX_FUNCTION.__qualname__}.<locals>."
    return function is FLEX_FUNCTION or (
        getattr(function, "__globals__", None) is FLEX_GLOBALS and function.__qualname__.startswith(local)
    )


# What torch.compile calls the rest of a function after a break of its graph: this, "_", the name. Seen: 2.11 to 2.15.
RESUMED = "torch_dynamo_resume_in"


def traced_functions() -> list[tuple[str, str]]:
    """(file, name) of the functions that torch.compile is just tracing in this thread, outermost first. Seen: 2.11 to
    2.15."""
    return [(frame.filename, frame.name) for frame in TracingContext.extract_stack()]


_IN_KERNEL = types.SimpleNamespace(in_kernel_invocation=True, shape_env=None)


def never_compile_alone(function: Callable[..., Any], *, nor_what_it_calls: bool = False) -> None:
    """Have torch.compile trace ``function`` as part of what calls it, but never by itself; nor what it calls then.

    A mode's ``__torch_function__`` that was compiled by itself is looked up by the identity of the function it is
    given, and getters of properties are made anew for every call, where others were before. Seen: 2.11 to 2.15.
    """
    strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP if nor_what_it_calls else FrameAction.DEFAULT)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)  # pyright: ignore


def function_modes() -> list[Any]:
    """The TorchFunctionModes that are entered in this thread, outermost first. Seen: 2.11 to 2.15."""
    return overrides._get_current_function_mode_stack()  # pyright: ignore


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """No TorchFunctionMode but those entered inside. Seen: 2.11 to 2.15."""
    taken = [overrides._pop_mode() for _ in range(overrides._len_torch_function_stack())]  # pyright: ignore
    try:
        yield
    finally:
        for mode in reversed(taken):
            overrides._push_mode(mode)


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """No TorchDispatchMode but those entered inside, in this thread. Seen: 2.11 to 2.15.

    For what a mode has no use for, and could be misled by: a selective checkpoint counts ops, and wants those of a
    recomputation to be the forward's, however much is remembered by then, or looked at now and then.
    """
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()  # pyright: ignore


def dispatch_modes() -> list[TorchDispatchMode]:
    """Those entered now, in this thread, the innermost last. Seen: 2.11 to 2.15."""
    return _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []  # pyright: ignore


def with_vmap() -> contextlib.AbstractContextManager[Any]:
    """vmap works inside, also in the kernel of an op that a TorchDispatchMode was told of: there torch has excluded the
    dispatch keys that vmap goes by. Seen: 2.11 to 2.15."""
    excluded, keys = torch._C._dispatch_tls_local_exclude_set(), torch._C.DispatchKey  # pyright: ignore
    if not excluded.has(keys.FuncTorchBatched):
        return contextlib.nullcontext()
    for key in (
        keys.FuncTorchBatched,
        keys.FuncTorchVmapMode,
        keys.FuncTorchDynamicLayerFrontMode,
        keys.FuncTorchDynamicLayerBackMode,
    ):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)  # pyright: ignore


def uncompiled(function: F, reason: str | None = None) -> F:
    """torch.compiler.disable, which says no types: neither the function nor what it calls is compiled. ``reason``: what
    torch.compile says of it where it may not break the graph."""
    return torch.compiler.disable(function, reason=reason)  # pyright: ignore[reportReturnType]


def hooks_in_order(module: torch.nn.Module, *ours: Any) -> None:
    """Let a module's hooks stand in its dicts in the order in which they run. Where some were put first
    (``prepend``), torch.compile on 2.11 takes one for another.

    ``ours``, the handles of some of them, get numbers that are the same in every module: torch.compile guards the
    numbers of hooks that are always called or take kwargs, so that by torch's own numbers, which are not negative, it
    would compile every layer of a model for itself. Names seen: 2.11 to 2.15.
    """
    free = min((0, *module._forward_pre_hooks, *module._forward_hooks)) - 1
    numbers = {handle.id: free - index for index, handle in enumerate(ours)}
    tables: tuple[Any, ...] = (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_always_called,
    )
    for table in tables:
        ordered = [(numbers.get(number, number), hook) for number, hook in table.items()]
        table.clear()
        table.update(ordered)
