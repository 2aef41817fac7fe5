"""All private torch names that this package uses, with the versions of torch in which they were seen."""

from __future__ import annotations

import contextlib
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar
from weakref import finalize

import torch
import torch.distributed as dist
from torch import overrides
from torch._dynamo import eval_frame
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.types import FrameAction, FrameExecStrategy  # pyright: ignore[reportPrivateImportUsage]
from torch._library import opaque_object
from torch._library.fake_impl import allocate_size
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import flex_attention as flex_module
from torch.utils import _device, _python_dispatch, checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves as tree_leaves  # seen: 2.11 to 2.15
from torch.utils._pytree import tree_map as tree_map  # seen: 2.11 to 2.15
from torch.utils._pytree import tree_map_only as tree_map_only  # seen: 2.11 to 2.15

F = TypeVar("F", bound=Callable[..., Any])


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested structures."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# These names have no function of ours around torch's, because every attention calls them.
#
# sdpa_handlers() is the dict of handlers for ops that DTensor reads at each dispatch. Seen: 2.11 to 2.15.
sdpa_handlers: Callable[[], dict[Any, Callable[..., Any]]] = partial(
    getattr,
    DTensor._op_dispatcher,  # pyright: ignore[reportAttributeAccessIssue]
    "_custom_op_handlers",
)
# Whether a profiler of torch runs in this process. Seen: 2.11 to 2.15 (a variable of the profiler's module).
is_profiling: Callable[[], bool] = partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")
# The level of forward-mode differentiation in the process; below 0 no tensor has a tangent. Seen: 2.11 to 2.15 (a
# variable of the module, which ``unpack_dual`` reads first).
forward_mode_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")
# The transform of torch.func (grad, vjp, jvp, vmap, ...) that runs in this thread, or None. Seen: 2.11 to 2.15.
torch_func_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # pyright: ignore
# A context in which ops do not take part in transforms of torch.func. Seen: 2.11 to 2.15.
without_torch_func: Callable[[], contextlib.AbstractContextManager[None]] = torch._C._DisableFuncTorch  # pyright: ignore
# Whether a tensor was computed from an argument of a function that torch.func transforms. Seen: 2.11 to 2.15.
is_in_torch_func: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore
# The process group of this (thread's) world with the name ``ProcessGroup.group_name``. Seen: 2.11 to 2.15.
resolve_group: Callable[[str], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group  # pyright: ignore
# Whether autocast is on for some device. Seen: 2.11 to 2.15.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
# The id of the backward that runs in this thread; below 0 there is none. Seen: 2.11 to 2.15.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
# The TorchFunctionModes that are entered in this thread, outermost first. Seen: 2.11 to 2.15.
function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack  # pyright: ignore
# Set whether profilers record the operations that this thread starts from now on. The default is True. A recorded
# transfer must end before the profiler does, or the process ends with a segmentation fault. Seen: 2.11 to 2.15.
let_profilers_record: Callable[[bool], None] = torch.autograd._enable_record_function  # pyright: ignore
# The number of TorchDispatchModes that are entered in this thread. Seen: 2.11 to 2.15.
dispatch_modes_entered: Callable[[], int] = torch._C._len_torch_dispatch_stack  # pyright: ignore
# The innermost (pack, unpack) of ``torch.autograd.graph.saved_tensors_hooks`` in this thread, or None. Seen: 2.11 to
# 2.15.
saved_tensors_hooks_on_top: Callable[[], tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None] = (
    partial(torch._C._autograd._top_saved_tensors_default_hooks, False)  # pyright: ignore
)


def default_dispatch(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op like DTensor's dispatcher without a handler. Seen: 2.11 to 2.15 (the slow path of the dispatcher)."""
    dispatcher = DTensor._op_dispatcher  # pyright: ignore[reportAttributeAccessIssue]
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    results = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    return dispatcher.wrap(results, info.output_sharding.output_spec)  # pyright: ignore[reportOptionalMemberAccess]


# Make a DTensor from a local tensor and a spec (:func:`dtensor_spec`), without autograd and checks, in a tenth of the
# time of ``DTensor.from_local``. Without __init__, which is for torch.export. Seen: 2.11 to 2.15 (the constructor).
new_dtensor: Callable[[torch.Tensor, Any], DTensor] = partial(DTensor.__new__, DTensor, requires_grad=False)


def dtensor_spec(
    mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Any:
    """The description of a DTensor without its local tensor; ``shape`` and ``stride`` are global. Seen: 2.11 to 2.15
    (DTensorSpec and TensorMeta)."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


@cache
def _gloo_on_one_device() -> type:
    """A replacement for ProcessGroupGloo that creates all groups on one device. Seen: 2.11 to 2.15 (its options)."""
    # A call returns an object of ProcessGroupGloo itself, because an object of a subclass would never be destroyed.
    gloo = dist.ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]
    device = gloo.create_default_device()

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, gloo)

    class OnOneDevice(metaclass=Kind):
        def __new__(cls, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> Any:
            options = gloo._Options()  # pyright: ignore[reportAttributeAccessIssue] - not in the stubs
            options._devices, options._threads, options._timeout = [device], 2, timeout
            group = gloo(store, rank, size, options)
            # A rank that ends at once must not close connections that other ranks are still making.
            if store.add("cp_styles.connected", 1) == size:
                store.set("cp_styles.all", "")
            store.wait(["cp_styles.all"], max(timeout, timedelta(minutes=5)))
            return group

    return OnOneDevice


@contextlib.contextmanager
def thread_local_world() -> Iterator[None]:
    """A context in which every thread has its own torch.distributed world, so that threads can be ranks.

    Names seen in 2.11, 2.12, 2.13, 2.14, 2.15 (the flag and the count: 2.13, 2.14, and ignored where there is none).
    Only for tests and notebooks.
    """
    from torch._C._distributed_c10d import _set_thread_isolation_mode  # pyright: ignore
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal.distributed import multi_threaded_pg as threads

    # All groups of gloo share one device, because its destruction takes up to 10 ms, in which no thread runs Python.
    excepthook, gloo = sys.excepthook, c10d.ProcessGroupGloo
    c10d.ProcessGroupGloo = _gloo_on_one_device()
    world = threads._install_threaded_pg()
    if not hasattr(world, "comms"):  # 2.11: destroy_process_group reads it, the threads' world lacks it
        world.comms = []  # pyright: ignore[reportAttributeAccessIssue]
    _set_thread_isolation_mode(True)
    # On CUDA builds without a GPU, the first fake mode of a process sets a device guard. Two threads that do so at once
    # crash the process (seen on 2.11), so it is set before there are threads.
    with FakeTensorMode():
        pass
    # Threads that enter and leave in turns leave values of the process set, so these are restored. torch.compile guards
    # the default device and the flag of dispatch modes, and would compile again. A higher-order operator sets the count
    # of compiled frames for its own graph: as long as it is set, torch.compile compiles nothing behind a graph break.
    flag = "_is_in_any_mode_without_ignore_compile_internals"
    set_flag = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
    in_mode, default_device = getattr(_python_dispatch, flag, None), _device.CURRENT_DEVICE
    set_count = getattr(eval_frame, "set_fullgraph_compiled_frame_count", lambda count: count)
    set_count(count := set_count(-1))  # it is only told when it is set
    try:
        yield
    finally:
        if in_mode is not None and set_flag is not None:
            setattr(_python_dispatch, flag, in_mode)
            set_flag(in_mode)
        set_count(count)
        _device.CURRENT_DEVICE = default_device
        _set_thread_isolation_mode(False)
        threads._uninstall_threaded_pg()
        c10d.ProcessGroupGloo = gloo
        # Each init_process_group adds one more "[rank0]:" to the output of an uncaught exception.
        sys.excepthook = excepthook


def clear_caches_of_thread() -> None:
    """Clear what DTensor caches for the thread that calls. Seen: 2.13, 2.14 (ignored where there is none)."""
    # torch clears it when Python's table of the thread ends. If something else holds the table then, as a list of
    # gc.get_objects() does, the objects are destroyed without Python's lock, and the process is aborted.
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def group_of_op(args: Sequence[Any]) -> dist.ProcessGroup | None:
    """The group in the arguments of a communication op. None for ops that send nothing, such as wait_tensor.

    Seen: 2.11 to 2.15 (``ProcessGroup.unbox``; functional collectives have its name, last or nearly last).
    """
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):
                return dist.ProcessGroup.unbox(argument)
    names = [x for x in args if isinstance(x, str) and x not in ("sum", "avg", "max", "min", "product")]
    return resolve_group(names[-1]) if names else None


def connect_gloo(group: dist.ProcessGroup, name: str, timeout: timedelta | None = None) -> Any:
    """A gloo backend between the ranks of a group without gloo, for small host tensors. All ranks must call it.

    ``timeout``: default the group's timeout."""
    gloo = dist.distributed_c10d.ProcessGroupGloo  # pyright: ignore[reportAttributeAccessIssue]
    return gloo(_store_of(group, name), group.rank(), group.size(), timeout or _timeout_of(group))


def exchange_texts(group: dist.ProcessGroup, name: str, text: str, timeout: timedelta | None = None) -> list[str]:
    """The texts of all ranks of a group, through its store. All ranks must call it equally often."""
    store = _store_of(group, name)
    call = (store.add("calls", 1) - 1) // group.size()
    keys = [f"{call}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], text)
    store.wait(keys, timeout or _timeout_of(group))
    return [store.get(key).decode() for key in keys]


def _store_of(group: dist.ProcessGroup, name: str) -> Any:
    """Seen: 2.11 to 2.15 (the store of a group)."""
    store = dist.distributed_c10d._get_process_group_store(group)  # pyright: ignore[reportAttributeAccessIssue]
    return dist.PrefixStore(f"{name}/{group.group_name}", store)  # pyright: ignore[reportPrivateImportUsage]


def cpu_backend_of(group: dist.ProcessGroup, name: str) -> Any:
    """The backend of a group for host tensors, if it has this name, else None. Seen: 2.11 to 2.15."""
    if f"cpu:{name}" not in dist.get_backend_config(group):
        return None
    return group._get_backend(torch.device("cpu"))  # pyright: ignore[reportAttributeAccessIssue]


def make_part_of_group(group: dist.ProcessGroup, ranks: list[int], name: str) -> dist.ProcessGroup:
    """A new group of some ranks of a group, with the group's backends and timeout. All of ``ranks`` must call it.

    ``name`` must be new, and equal on all ranks. Seen: 2.11 to 2.15 (``_new_process_group_helper``, and the tables of
    ``_world``)."""
    # dist.new_group names a group by the number of groups of a rank (2.15: that it has made). Ranks with different
    # numbers would have different names for one group, and would wait for each other.
    c10d: Any = dist.distributed_c10d
    backend, store = c10d._world.pg_map[group]
    size_and_rank = len(ranks), ranks.index(dist.get_rank())
    options = {"timeout": _timeout_of(group), "device_id": group.bound_device_id, "group_desc": name}
    part, _ = c10d._new_process_group_helper(*size_and_rank, ranks, backend, store, name, **options)
    c10d._world.pg_group_ranks[part] = {rank: index for index, rank in enumerate(ranks)}
    return part


# The type of torch.compile(module). Seen: 2.11 to 2.15.
OptimizedModule = eval_frame.OptimizedModule
# The attribute that a call of a module runs in place of its hooks and forward, if it is not None. Seen: 2.11 to 2.15.
WHOLE_CALL = "_compiled_call_impl"


def store_of(group: dist.ProcessGroup) -> Any:
    """The store of a group. Seen: 2.11 to 2.15 (``_world.pg_map``)."""
    return dist.distributed_c10d._world.pg_map[group][1]  # pyright: ignore[reportAttributeAccessIssue]


def call_when_destroyed(group: dist.ProcessGroup, act: Callable[[], object]) -> None:
    """Call ``act`` when ``destroy_process_group`` has ended the group. Seen: 2.11 to 2.15 (``_world.pg_map``)."""
    # Only torch's table holds the Python object of the group's store, and drops it at this time.
    world: Any = dist.distributed_c10d._world  # pyright: ignore[reportAttributeAccessIssue]
    finalize(world.pg_map[group][1], act).atexit = False


def meshes_of_fsdp(module: FSDPModule) -> list[DeviceMesh]:
    """The meshes over which FSDP2 averages the gradients of the parameters that ``module`` manages."""
    # Not from the parameters: after a forward the parameters of a root are whole tensors without a mesh.
    return [group.mesh_info.mesh for group in _groups_of_fsdp(module)]


def replaces_mean_of_fsdp(module: FSDPModule) -> bool:
    """Whether ``set_gradient_divide_factor`` was called for ``module``. Seen: 2.11 to 2.15."""
    return any(group.gradient_divide_factor is not None for group in _groups_of_fsdp(module))


def sharded_parameters(module: FSDPModule) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that FSDP2 has sharded for ``module``, with their names in it. An optimizer has these, and during
    a forward the modules do not. Seen: 2.11 to 2.14 (``fsdp_params`` of a group, their ``_module_info``)."""
    paths = {id(inner): f"{path}." if path else "" for path, inner in module.named_modules()}  # pyright: ignore
    found = []
    for parameter in (parameter for group in _groups_of_fsdp(module) for parameter in group.fsdp_params):
        info = parameter._module_info
        found.append((paths.get(id(info.module), "") + info.param_name, parameter.sharded_param))
    return found


def _groups_of_fsdp(module: FSDPModule) -> list[Any]:
    """Seen: 2.11 (one group of parameters), 2.13 (a list)."""
    state: Any = module._get_fsdp_state()
    groups = vars(state).get("_fsdp_param_groups", [vars(state).get("_fsdp_param_group")])
    return [group for group in groups if group is not None]


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Seen: 2.11 to 2.15 (the options of a backend)."""
    backend = group._get_backend(group._device_types[0])  # pyright: ignore[reportAttributeAccessIssue]
    return getattr(getattr(backend, "options", None), "_timeout", None) or timedelta(minutes=30)


# The functional collectives as ops. torch.compile traces them, they are not deprecated, and they return plain tensors.
# (The functions of torch.distributed._functional_collectives return a lazily waiting subclass in eager mode.) Each
# result must pass wait_tensor before it is read. Schemas seen: 2.11, 2.13, 2.15.
#
# (wire, received, sent, group name): the numbers of elements of a flat tensor from each rank, and to each rank.
start_all_to_all: Callable[..., torch.Tensor] = torch.ops._c10d_functional.all_to_all_single
# (wire, ranks, group name): the flat tensors of all ranks, of equal lengths, one after another.
start_all_gather: Callable[..., torch.Tensor] = torch.ops._c10d_functional.all_gather_into_tensor
wait_tensor: Callable[[torch.Tensor], torch.Tensor] = torch.ops._c10d_functional.wait_tensor
# A store for ranks that are threads of one process. Seen: 2.11 to 2.15 (not exported, though documented).
in_process_store: Callable[[], Any] = dist.HashStore  # pyright: ignore[reportPrivateImportUsage]


def calling_frames() -> list[types.FrameType]:
    """The frames around the present call, innermost first. Keep none of them: frames hold their locals."""
    frame, frames = sys._getframe(1), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def running_modules() -> list[tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """The modules whose calls run in this thread, innermost first, with the arguments of each.

    Seen: 2.11 to 2.15 (``Module._call_impl`` and its variables)."""
    modules = []
    for frame in calling_frames():
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            modules.append(tuple(map(frame.f_locals.get, ("self", "args", "kwargs"))))
    return modules


def scripted_attention(function: Any) -> bool:
    """Whether a function or module is TorchScript with attention in it. Seen: 2.11 to 2.15."""
    if not isinstance(function, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
        return False
    with contextlib.suppress(AttributeError, RuntimeError):  # a module without a forward
        return "scaled_dot_product_attention" in str(function.inlined_graph)
    return False


def fast_path_attention() -> tuple[Any, ...]:
    """The fused inference paths of nn.MultiheadAttention and nn.TransformerEncoderLayer. Seen: 2.11 to 2.15."""
    return torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd  # pyright: ignore


# The function by which nn.TransformerEncoder decides whether to use nested tensors. Seen: 2.11 to 2.15.
ASKS_FOR_NESTED_TENSORS = torch._nested_tensor_from_mask_left_aligned  # pyright: ignore


def module_of_plan() -> torch.nn.Module | None:
    """The module in the outermost running call of ``parallelize_module``.

    Seen: 2.11 to 2.15 (a function that calls itself for each part of a path, and the name of its argument)."""
    # torch passes to a style only the module to which it is applied.
    root = None
    for frame in calling_frames():
        if frame.f_code is parallelize_module.__code__:
            root = frame.f_locals.get("module")
        elif root is not None:
            break
    return root


def torch_balances_load() -> bool:
    """Whether torch's ``context_parallel`` would cut head-tail: its switch ``_cp_options.enable_load_balance``.

    Seen: 2.11 to 2.15."""
    # A program that has set the switch has imported its module.
    name = "torch.distributed.tensor.experimental._context_parallel._attention"
    options = getattr(sys.modules.get(name), "_cp_options", None)
    return getattr(options, "enable_load_balance", True)


def ranks_along(mesh: DeviceMesh) -> list[list[int]]:
    """The ranks of each line along the axis of a 1-D mesh in its root mesh, equal on all ranks.

    For a root mesh, or for a flattened axis, the ranks of the mesh itself. Seen: 2.11 to 2.15.
    """
    root, (name,) = mesh._get_root_mesh(), mesh.mesh_dim_names or ("",)
    names = root.mesh_dim_names or ()
    if root is mesh or name not in names:
        return [mesh.mesh.tolist()]
    return root.mesh.movedim(names.index(name), -1).flatten(0, -2).tolist()


def without_communication(mesh: DeviceMesh, reason: str) -> DeviceMesh:
    """Make each collective over a 1-D mesh fail on every rank, with ``reason`` in the error. Seen: 2.11 to 2.15."""
    mesh._dim_group_names = [reason]  # pyright: ignore[reportAttributeAccessIssue]
    # DTensor's caches keep every mesh, so the threads of its groups would outlive destroy_process_group.
    return without_groups(mesh)


def without_groups(mesh: DeviceMesh) -> DeviceMesh:
    """Make a mesh not keep its groups alive. It still finds them by name while they exist. Seen: 2.11 to 2.15."""
    # Meshes keep their groups only for the compilation of code.
    mesh._pg_registry.clear()  # pyright: ignore[reportAttributeAccessIssue]
    return mesh


# The op that torch.autograd.detect_anomaly calls for each gradient, after isnan. Seen: 2.11 to 2.15.
IS_ANY_TRUE = torch.ops.aten._is_any_true.default


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, or a tensor that torch.func has wrapped in it, is a dual tensor of forward-mode
    differentiation. Seen: 2.11 to 2.15."""
    functorch = torch._C._functorch  # pyright: ignore
    while functorch.is_batchedtensor(tensor) or forward_ad.unpack_dual(tensor).tangent is None:
        if not functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = functorch.get_unwrapped(tensor)
    return True


# Other autograd.Functions of torch, including compiled graphs, do not recompute a user's function.
_TORCH_FILES = torch.__path__[0]


def running_reruns() -> list[tuple[Any, str | None]]:
    """The activation checkpoints around the present call, which will recompute a function in a backward.

    Each is (object, name of its attribute that holds the function), innermost first. The name is None for an
    autograd.Function that is not torch's: its backward may recompute the call.

    Seen: 2.11 to 2.15 (``run_function`` of CheckpointFunction; the frame object of non-reentrant checkpoints, in
    ``checkpoint``'s generator and in the hooks that it opens).
    """
    reruns: list[tuple[Any, str | None]] = []
    for frame in calling_frames():
        code = frame.f_code
        if code.co_name == "checkpoint" and code.co_filename == checkpoint.__file__:
            generator = getattr(frame.f_locals.get("gen"), "gi_frame", None)
            if generator is not None and "new_frame" in generator.f_locals:
                reruns.append((generator.f_locals["new_frame"], "recompute_fn"))
        elif code.co_name == "forward" and code.co_argcount:
            ctx = frame.f_locals.get(code.co_varnames[0])
            if code is checkpoint.CheckpointFunction.forward.__code__:
                if hasattr(ctx, "run_function"):  # not set yet while the function checks its inputs
                    reruns.append((ctx, "run_function"))
            elif isinstance(ctx, torch.autograd.function.FunctionCtx) and not code.co_filename.startswith(_TORCH_FILES):
                reruns.append((ctx, None))
    # torch.distributed._composable.checkpoint opens the hooks without the function.
    pack = (saved_tensors_hooks_on_top() or (None,))[0]
    if getattr(pack, "__qualname__", "").startswith("_checkpoint_hook."):
        cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=False))  # pyright: ignore
        if "frame" in cells and all(owner is not cells["frame"].cell_contents for owner, _ in reruns):
            reruns.insert(0, (cells["frame"].cell_contents, "recompute_fn"))
    return reruns


# A decorator: torch.compile calls the function while it traces, and uses the result as a constant. Only for functions
# whose arguments are guarded by identity, such as classes and functions.
constant_under_compile: Callable[..., Any] = torch.compiler.assume_constant_result


# From 2.14 on opaque values are called custom classes, and the earlier names warn. Seen: 2.11 to 2.14.
_OF_CUSTOM_CLASSES = hasattr(opaque_object, "register_custom_class")
# The base of opaque values, which only 2.11 needs.
OpaqueValue: Any = getattr(opaque_object, "CustomClassBase" if _OF_CUSTOM_CLASSES else "OpaqueBase")


def register_opaque_value(cls: type) -> None:
    """Let custom ops and traced functions take objects of ``cls``, which torch.compile guards by ``==``.

    On 2.11 subclasses are not accepted, and a graph cannot read fields of such objects.
    """
    if _OF_CUSTOM_CLASSES:
        opaque_object.register_custom_class(cls, typ="constant")  # pyright: ignore[reportAttributeAccessIssue]
    else:
        opaque_object.register_opaque_type(cls, typ="value")


def makes_batches(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend of a device starts several messages at once, as NCCL does. Seen: 2.11 to 2.14."""
    return device.type != "meta" and getattr(group._get_backend(device), "supports_coalescing", False)


def start_batch(group: dist.ProcessGroup, device: torch.device) -> Callable[[], dist.Work]:
    """Begin a batch of sends and receives. The result starts them. Seen: 2.11 to 2.14."""
    group._start_coalescing(device)
    return partial(group._end_coalescing, device)


ASYNC_ALL_TO_ALL = dist.distributed_c10d.AllToAllOptions()
"""The options of ``ProcessGroup.alltoall_base`` that return a work. Seen: 2.11 to 2.14."""
ASYNC_ALL_TO_ALL.asyncOp = True


def new_size(context: Any) -> Any:
    """A size that is known only when an op runs, for its fake implementation.

    Seen: 2.11 to 2.15 (the context's ``_shape_env``; torch's device_mesh ops do the same).
    """
    # ``torch.library.get_ctx().new_dynamic_size()`` raises outside of fullgraph=True, so torch.compile would break the
    # graph. There is no need for it, because the residual of an attention leaves a graph only for its own backward.
    shapes = context._shape_env
    return context.new_dynamic_size() if shapes is None else allocate_size(shapes)


def is_traced() -> bool:
    """Whether torch.compile or torch.export traces the calling code. Seen: 2.11 to 2.15."""
    # ``torch.compiler.is_compiling()`` is also true while another thread compiles.
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def graph_tracer() -> str | None:
    """The name of the tracer that records the operators of this thread, if it is not torch.compile. None without one.

    Seen: 2.11 to 2.15 (``torch._C._get_dispatch_mode``, the mode of make_fx, which torch.export uses too).
    """
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    proxies = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)  # pyright: ignore
    return None if proxies is None else "make_fx"


def run_kernel(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the kernel of an op for the device of its tensors, without modes and autograd. Seen: 2.11 to 2.15."""
    device = next(value.device.type for value in args if isinstance(value, torch.Tensor))
    key = torch._C._dispatch_key_parse(device.upper())  # pyright: ignore
    return op.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)  # pyright: ignore


# flex_attention and its operator. Seen: 2.11 to 2.15.
FLEX_FUNCTION: Callable[..., Any] = flex_module.flex_attention
FLEX_OPERATOR: Any = torch.ops.higher_order.flex_attention


def passes_flex_attention(error: BaseException, *, but: Callable[..., Any]) -> bool:
    """Whether torch's flex_attention ran or was traced when ``error`` was raised, outside of calls of ``but``.

    Seen: 2.11 to 2.15 (``real_stack`` of torch.compile's errors: the code that was traced).
    """
    ours, torchs = but.__code__, FLEX_FUNCTION.__code__
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in (ours, torchs):
            return frame.f_code is torchs
    traced = getattr(error, "real_stack", None) or ()
    return (torchs.co_filename, torchs.co_name) in [(each.filename, each.name) for each in traced]


# Raised by a function compiled as one graph if torch's limit of recompilations is reached. Seen: 2.11 to 2.15.
RecompileLimitHit: type[Exception] = FailOnRecompileLimitHit


def never_compile_alone(function: Callable[..., Any], *, nor_what_it_calls: bool = False) -> None:
    """Make torch.compile trace ``function`` inside its callers, but not compile it by itself.

    With ``nor_what_it_calls``, functions that it calls are then not compiled either. Seen: 2.11 to 2.15.
    """
    # For example, a ``__torch_function__`` that is compiled by itself is guarded by the identity of its function
    # argument. Getters of properties are created for each call, so their identity changes.
    strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP if nor_what_it_calls else FrameAction.DEFAULT)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)  # pyright: ignore


def never_compiled(function: F) -> F:
    """A decorator: torch.compile compiles neither the function nor its callees. For functions that are never traced."""
    # Not :func:`uncompiled`, whose wrapper takes longer than a small function.
    never_compile_alone(function, nor_what_it_calls=True)
    return function


def leave_function_mode(mode: Any) -> None:
    """End a TorchFunctionMode of this thread, also below later modes. Seen: 2.11 to 2.15."""
    above = []
    while overrides._len_torch_function_stack() and (last := overrides._pop_mode()) is not mode:  # pyright: ignore
        above.append(last)
    for each in reversed(above):
        overrides._push_mode(each)


def without_function_modes() -> contextlib.AbstractContextManager[Any]:
    """A context without the TorchFunctionModes that were entered before it. Seen: 2.11 to 2.15."""
    entered = overrides._len_torch_function_stack()  # pyright: ignore
    return _without_function_modes(entered) if entered else _NOTHING


@contextlib.contextmanager
def _without_function_modes(entered: int) -> Iterator[None]:
    modes = [overrides._pop_mode() for _ in range(entered)]
    try:
        yield
    finally:
        for mode in reversed(modes):
            overrides._push_mode(mode)


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """A context without the TorchDispatchModes that were entered before it, in this thread. Seen: 2.11 to 2.15."""
    # A selective checkpoint requires equal ops in a forward and its recomputation. Cached results have no ops.
    return _disable_current_modes() if dispatch_modes_entered() else _NOTHING


_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def dispatch_modes() -> list[TorchDispatchMode]:
    """The TorchDispatchModes that are entered in this thread, innermost last. Seen: 2.11 to 2.15."""
    return _get_current_dispatch_mode_stack() if dispatch_modes_entered() else []


def with_derivatives() -> contextlib.AbstractContextManager[Any]:
    """A context in which autograd and vmap work in the kernel of an op. Seen: 2.11 to 2.15."""
    # In an op that a TorchDispatchMode has handled, torch excludes their dispatch keys.
    excluded, keys = torch._C._dispatch_tls_local_exclude_set(), torch._C.DispatchKey  # pyright: ignore
    if not excluded.has(keys.FuncTorchBatched):
        return contextlib.nullcontext()
    for key in (
        keys.ADInplaceOrView,
        keys.AutogradFunctionality,
        keys.AutogradOther,
        keys.AutogradNestedTensor,
        keys.FuncTorchBatched,
        keys.FuncTorchVmapMode,
        keys.FuncTorchDynamicLayerFrontMode,
        keys.FuncTorchDynamicLayerBackMode,
    ):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)  # pyright: ignore


def uncompiled(function: F, reason: str | None = None) -> F:
    """torch.compiler.disable, with types: neither the function nor its callees are compiled.

    ``reason`` is part of torch.compile's error if the graph may not break.
    """
    return torch.compiler.disable(function, reason=reason)  # pyright: ignore[reportReturnType]


def hooks_in_order(module: torch.nn.Module, *ours: Any) -> None:
    """Sort the hooks in a module's dicts by the order of their calls. Names seen: 2.11 to 2.15.

    ``ours`` are handles of hooks that get equal numbers in all modules.
    """
    # torch.compile on 2.11 confuses hooks if some were registered with ``prepend``. And it guards the numbers of hooks
    # that are always called or take kwargs. With torch's own numbers it would compile each layer separately.
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


def resolve_operators() -> None:
    """Make the Python objects of torch's ops, before threads use them. Seen: 2.11 to 2.15 (the list of names)."""
    # torch makes the object of an op at its first use under a dispatch mode. If two threads use it at once, torch 2.13
    # makes two objects, keeps one, and calls the second one after it was freed: a segmentation fault.
    for qualified in torch._C._dispatch_get_all_op_names():  # pyright: ignore[reportAttributeAccessIssue]
        namespace, _, name = qualified.partition("::")
        packet, _, overload = name.partition(".")
        getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)


def stops_recomputation(error: BaseException) -> bool:
    """Whether a checkpoint has raised ``error`` to end a recomputation. Seen: 2.11 to 2.15."""
    return isinstance(error, checkpoint._StopRecomputationError)


def named_range(*words: object) -> contextlib.AbstractContextManager[object]:
    """A range with this name in the trace of the running profiler. Without a profiler, a context without effect."""
    return torch.profiler.record_function(" ".join(map(str, words))) if is_profiling() else _NOTHING
