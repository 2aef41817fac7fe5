"""Runs a step with one rank in place of the ranks of the sequence, or with all ranks, and returns its results."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import sys
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.checksum import checksum, fingerprint
from cp_styles._lib.compat import (
    WHOLE_CALL,
    OptimizedModule,
    make_part_of_group,
    store_of,
    tensors_in,
    tree_leaves,
    without_groups,
)
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import Role, shares_ranks, world_group
from cp_styles.comm.point_to_point import TransferError, abort_group, collective
from cp_styles.engine.observers import attention_listener, mixer_listener
from cp_styles.functions.joint_layout import JointLayout
from cp_styles.layouts import SequenceLayout
from cp_styles.testing import clear_frames
from cp_styles.verify.compare import Gather
from cp_styles.verify.planted import PlantedCut
from cp_styles.verify.record import Hooks, OutsideParameters, UnhandledAttention, plain_name

StepFunction: TypeAlias = Callable[[nn.Module, Any, DeviceMesh], torch.Tensor | float | None]
"""``step(model, batch, mesh)``: a forward, a loss, a backward, and whatever reduces the gradients; returns the loss."""


WEIGHTS = "the model's "


class OtherRankError(RuntimeError):
    """Another rank has raised an error outside of the step."""


@dataclass(frozen=True)
class _FailedMarker:
    """Gathered in place of a value by a rank that has raised, in its last gather."""

    text: str


def gather_over(mesh: DeviceMesh) -> Gather:
    """A function that gathers an object from all ranks of ``mesh``, in the order of the mesh. It raises on every rank
    if one rank has failed, see :func:`broadcast_errors`."""

    def gather(value: Any) -> list[Any]:
        values = [value]
        for axis in reversed(range(mesh.ndim)):
            group = mesh.get_group(axis)
            ranks: list[Any] = [None] * group.size()
            with collective(group, f"verify (mesh axis {(mesh.mesh_dim_names or ('cp',))[axis]!r})"):
                dist.all_gather_object(ranks, values, group=group)
            values = [x for rank in ranks for x in rank]
        failed = next((at for at, x in enumerate(values) if isinstance(x, _FailedMarker)), None)
        if failed is not None and not isinstance(value, _FailedMarker):
            axes, rank = mesh.mesh_dim_names or ("cp",), int(mesh.mesh.flatten()[failed])
            raise OtherRankError(f"verify (mesh axes {axes}): rank {rank} has raised {values[failed].text}")
        return values

    return gather


@contextlib.contextmanager
def broadcast_errors(gather: Gather, *common: type[BaseException]) -> Iterator[None]:
    """Send an error of this rank to the remaining ranks, at their next gather. Errors of the types ``common`` are
    raised by every rank, and not sent."""
    try:
        yield
    except (OtherRankError, *common):
        raise
    except Exception as error:
        with contextlib.suppress(TransferError):  # if connections have ended, the remaining ranks have an error already
            gather(_FailedMarker(f"{type(error).__name__}: {error}"))
        raise


@contextlib.contextmanager
def abort_on_interrupt(mesh: DeviceMesh) -> Iterator[None]:
    """Abort this rank's groups on an interrupt, so that the remaining ranks fail instead of waiting."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        for axis in range(mesh.ndim):
            abort_group(mesh.get_group(axis), error)
        raise


class _GroupOfOne:
    """The group of this rank alone. One per process: DTensor's caches keep every mesh over it, and so the group."""

    def __init__(self) -> None:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)  # this rank is in it
        self.group = group


class _MeshOfOne(DeviceMesh):
    """A mesh of several axes, one of which has this rank alone.

    torch creates the group of a flattened mesh on all ranks of the world together, but here each rank has another mesh.
    Flattening an axis of one rank with another axis needs no new group: it is the group of the other axis.
    """

    @staticmethod
    def of(mesh: DeviceMesh) -> _MeshOfOne:
        """``mesh`` with the methods of this class. torch's functions that make meshes return plain ones."""
        copied = object.__new__(_MeshOfOne)
        vars(copied).update(vars(mesh))
        return copied

    def __getitem__(self, mesh_dim_names: Any) -> Any:
        mesh = super().__getitem__(mesh_dim_names)
        return mesh if mesh.ndim == 1 else _MeshOfOne.of(mesh)

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> DeviceMesh:
        names = self.mesh_dim_names or ()
        groups = [self.get_group(at) for at in range(self.ndim)]
        larger = [group for group in groups if group.size() > 1]
        if len(larger) > 1:
            raise NotImplementedError(
                f"verify: the step flattens the axes {names} of its mesh, of which several have more than one rank: "
                "flatten the remaining axes before, and reduce over that mesh and the axis of the sequence in turn"
            )
        name = mesh_dim_name or "_".join(names)
        return DeviceMesh.from_group([*larger, groups[0]][0], self.device_type, mesh_dim_names=(name,))


@contextlib.contextmanager
def as_one_rank(
    mesh: DeviceMesh, axis: DeviceMesh, planted: PlantedCut | None = None, *, is_off: bool = False
) -> Iterator[DeviceMesh]:
    """This rank alone replaces the group of ``axis`` in the ``with``. Yields ``mesh`` with this rank alone on ``axis``.

    ``planted``: a mistake in all attentions and mixers over the axis. ``is_off``: modules over the axis run as without
    their style, also inside of a step that is verified. No communication.
    """
    one = state_of(world_group()).get_or_create(_GroupOfOne).group
    if mesh.ndim == 1:
        alone = DeviceMesh.from_group(one, mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)
    else:
        dim = (mesh.mesh_dim_names or ()).index((axis.mesh_dim_names or ("",))[0])
        groups = [one if at == dim else mesh.get_group(at) for at in range(mesh.ndim)]
        ranks = mesh.mesh.select(dim, axis.get_local_rank()).unsqueeze(dim)
        alone = DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=mesh.mesh_dim_names)
        alone = _MeshOfOne.of(alone)
    try:
        with _replace_group(axis.get_group(), one, alone, planted, is_off=is_off):
            yield alone
    finally:
        without_groups(alone)


class TemporaryGroups:
    """State of the ranks in :func:`over_temporary_groups`, shared through a store instead of messages."""

    def __init__(self, mesh: DeviceMesh, name: str) -> None:
        self._store, self._name = store_of(world_group()), f"cp_styles.verify/{name}"
        self._ranks = mesh.mesh.flatten().tolist()

    def leave(self) -> None:
        """Record that this rank has ended its step, with or without an error."""
        self._store.set(f"{self._name}/{dist.get_rank()}", "left")

    def all_have_left(self) -> bool:
        """Whether all ranks end their steps within ten seconds."""
        try:
            self._store.wait([f"{self._name}/{rank}" for rank in self._ranks], timedelta(seconds=10))
        except RuntimeError:
            return False
        return True


@contextlib.contextmanager
def over_temporary_groups(mesh: DeviceMesh, gather: Gather, *notes: object) -> Iterator[TemporaryGroups]:
    """Replace the groups of ``mesh`` by new groups of the same ranks, which are destroyed after the ``with``.

    If a rank fails in the middle of a step, other ranks may wait for it in any communication of the step. Aborting the
    new groups gives these ranks an error. The groups of the user continue to work, and their state does not change.
    ``notes`` are in the state of the group of all ranks, by their classes.
    """
    name, groups = gather(uuid.uuid4().hex)[0], list[dist.ProcessGroup]()
    temporary, objects = TemporaryGroups(mesh, name), state_of(world_group()).objects
    try:
        with contextlib.ExitStack() as stack:
            # Axes of one rank may share a group.
            for original in dict.fromkeys(mesh.get_group(at) for at in range(mesh.ndim)):
                ranks = dist.get_process_group_ranks(original)
                groups.append(make_part_of_group(original, ranks, f"{original.group_name}/{name}"))
                stack.enter_context(_replace_group(original, groups[-1]))
            objects.update((type(each), each) for each in notes)
            yield temporary
    except BaseException as error:
        for group in groups:
            abort_group(group, error)
        raise
    finally:
        for each in notes:
            objects.pop(type(each), None)
        for group in groups:
            dist.destroy_process_group(group)
            del group
        groups.clear()
        gc.collect()  # a connection closes when no reference to its group is left


def recovery_note(model: nn.Module) -> str:
    """A sentence for errors in the step of a model with FSDP2, which stays in the state of its forward."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return ""
    return ". FSDP2 does not recover from an error inside of its forward: make the model again before you train it"


def communicates(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Whether FSDP2 or DDP in ``model`` may communicate over the groups of ``mesh``."""
    groups = [mesh.get_group(at) for at in range(mesh.ndim)]
    sharded = {x.device_mesh for x in model.parameters() if isinstance(x, DTensor)}
    reduced = any(isinstance(x, DistributedDataParallel) for x in model.modules())
    return reduced or any(shares_ranks(of_parameter, group) for of_parameter in sharded for group in groups)


@contextlib.contextmanager
def _replace_group(
    group: dist.ProcessGroup,
    by: dist.ProcessGroup,
    mesh: DeviceMesh | None = None,
    planted: PlantedCut | None = None,
    *,
    is_off: bool = False,
) -> Iterator[None]:
    role, replacing = (state_of(each).get_or_create(Role) for each in (group, by))
    if role.stand_in is not None and not is_off:
        raise RuntimeError("verify: the step calls verify itself: let it run the model once, with its backward")
    state_of(by).operations.axis = state_of(group).operations.axis
    before, planted_before = dict(vars(role)), replacing.planted
    role.stand_in, role.mesh, role.is_off, role.objects = by, mesh, is_off, {}
    replacing.alone, replacing.planted = mesh is not None, planted
    try:
        yield
    finally:
        vars(role).update(before)
        replacing.planted = planted_before


@dataclass(frozen=True)
class AttentionRun:
    """An attention or a mixer that has run over ``ranks``, with the layouts of queries, of keys, and of the tokens that
    a JointLayout cuts."""

    layouts: tuple[SequenceLayout, ...]
    ranks: list[int]


@dataclass(frozen=True)
class StepFailure:
    """The error of a step on this rank, with the module. ``of_transfer``: another rank may be the cause."""

    text: str
    of_transfer: bool


@dataclass(frozen=True)
class StepRun:
    """The results of a step.

    Attributes:
        gradients: this rank's shard of each parameter's gradient; None for parameters without one.
        outside: the gradients of parameters that the model does not have.
        removed: the parameters that had a gradient during the step, and have none at its end.
        attentions: an entry for each attention, in order: AttentionRun, or None if no style or block handled it.
    """

    gradients: Mapping[str, torch.Tensor | None]
    outside: Mapping[nn.Parameter, torch.Tensor]
    loss: float | None
    removed: tuple[str, ...]
    attentions: list[AttentionRun | None]


@contextlib.contextmanager
def record_attentions() -> Iterator[list[Any]]:
    """Yields a list that gets an entry for each attention and mixer in this context: see :class:`StepRun`."""
    noted: list[Any] = []

    def note(group: dist.ProcessGroup | None, *layouts: SequenceLayout) -> None:
        ranks = [] if group is None else dist.get_process_group_ranks(group)
        noted.append(AttentionRun(layouts, ranks))

    def note_attention(strategy: Any, attention: Any, *tensors: Any) -> None:
        rest = facts_about(attention.q_layout).get(JointLayout)
        note(attention.group, attention.q_layout, attention.kv_layout, *([] if rest is None else [rest]))

    tokens = attention_listener.set(note_attention), mixer_listener.set(note)
    try:
        with UnhandledAttention(noted):
            yield noted
    finally:
        attention_listener.reset(tokens[0])
        mixer_listener.reset(tokens[1])


def run_step(
    model: nn.Module,
    batch: Any,
    mesh: DeviceMesh,
    step: StepFunction,
    recording: Callable[[list[Any]], Hooks],
) -> tuple[StepRun, Hooks]:
    """Run one step of ``model`` under the hooks that ``recording`` makes from the list of attentions. Afterwards the
    parameters have no gradients: the result has them.

    Communication: the messages of the step.
    """
    with_gradient: dict[str, Any] = {}  # placements of the gradients that are not 0 on this rank

    def note(name: str, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and bool(_local_tensor(parameter.grad).any()):
            with_gradient[name] = getattr(parameter.grad, "placements", None)

    named = {plain_name(name): x for name, x in model.named_parameters()}
    outside = OutsideParameters(model)
    handles = [
        x.register_post_accumulate_grad_hook(partial(note, name)) for name, x in named.items() if x.requires_grad
    ]
    try:
        with record_attentions() as attentions, _uncompiled(model):
            hooks = recording(attentions)
            try:
                with hooks, outside:
                    loss = step(model, copy.deepcopy(batch), mesh)
            except Exception as error:
                if hooks.open:
                    name = hooks.open[-1][0]
                    error.add_note(f"{_NOTE}in {name or 'the model'} ({_class_name(model, name)})")
                raise
        gradients = {name: None if x.grad is None else _local_tensor(x.grad).detach() for name, x in named.items()}
        removed = [
            name
            for name, placements in sorted(with_gradient.items())
            # A gradient that a style has sharded since may be 0 on this rank.
            if (grad := gradients[name]) is None
            or (placements == getattr(named[name].grad, "placements", None) and not bool(grad.any()))
        ]
    finally:
        for handle in handles:
            handle.remove()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a step without a backward leaves gathered parameters
        for x in named.values():
            x.grad = None
    if not (loss is None or isinstance(loss, int | float) or (isinstance(loss, torch.Tensor) and loss.numel() == 1)):
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise TypeError(f"verify: the step returns {type(loss).__name__}{shape}: let it return the loss, or None")
    number = float(_full_tensor(loss)) if isinstance(loss, torch.Tensor) else loss
    shares = {parameter: _local_tensor(x) for parameter, x in outside.gradients.items()}
    return StepRun(gradients, shares, number, tuple(removed), attentions), hooks


def run_or_failure(run: Callable[[], Any], after: str) -> Any:
    """The result of ``run()``, or a StepFailure with a text that ends with ``after``."""
    try:
        return run()
    except Exception as error:
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)]
        where = f"{notes[0].removeprefix(_NOTE)}: " if notes else ""
        failure = StepFailure(f"{where}{type(error).__name__}: {error}{after}", _is_transfer_error(error))
        clear_frames(error)  # frames of the step hold its groups, whose connections must close
        return failure


_NOTE = "verify: "


def _class_name(model: nn.Module, name: str) -> str:
    return next((type(x).__name__ for path, x in model.named_modules() if plain_name(path) == name), "")


def _is_transfer_error(error: BaseException) -> bool:
    """Whether communication has raised the error, and not a comparison of the ranks' calls."""
    if isinstance(error, TransferError) or isinstance(error.__cause__, TransferError):
        return True
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
    return isinstance(error, RuntimeError) and module in ("torch.distributed.distributed_c10d", "torch._ops")


@contextlib.contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Run compiled modules without their graphs, which were traced for all ranks of the sequence."""
    # torch.compiler.set_stance would act on all ranks that are threads of this process, and replace the user's stance.
    changed = [
        (vars(module), {name: vars(module)[name] for name in eager}, eager)
        for module in model.modules()
        if (eager := _eager_attributes(module))
    ]
    for attributes, _, eager in changed:
        attributes.update(eager)
    try:
        yield
    finally:
        for attributes, before, _ in changed:
            attributes.update(before)


def _eager_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes with which a module runs uncompiled after torch.compile(module) or module.compile()."""
    if isinstance(module, OptimizedModule):
        return {"forward": module._orig_mod}
    return {WHOLE_CALL: None} if vars(module).get(WHOLE_CALL) is not None else {}


class ModelState:
    """State that a step changes in a model and in the process: buffers, plain attributes of modules, also in dicts,
    lists and sets, hooks that the model registers on itself, training flags, and the states of random generators.

    Attributes:
        drawn_from: a checksum of the state of the generator that the model uses.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._training = [(module, module.training) for module in model.modules()]
        self._modules = [(module, dict(module._buffers), _plain_attributes(module)) for module in model.modules()]
        # A module of torch may be a wrapper, such as DDP, whose own containers are not to be touched.
        tables = [attributes for module, _, attributes in self._modules if not _is_of_torch(module)]
        containers = [each for table in tables for x in table.values() for each in _containers(x)]
        self._contents = [(container, list(_items(container))) for container in containers]
        self._hooks = [(table, set(table)) for module in model.modules() for table in _hook_tables(module)]
        tensors = {
            id(x): x
            for _, *tables in self._modules
            for table in tables
            for x in table.values()
            if isinstance(x, torch.Tensor)
        } | {id(x): x for _, items in self._contents for x in tensors_in(items)}
        self._values = [(x, x.detach().clone()) for x in tensors.values()]
        self._random = _random_states()
        on_gpu = any(x.is_cuda for x in model.parameters())
        self.drawn_from = checksum(dict(self._random)[torch.cuda.set_rng_state if on_gpu else torch.set_rng_state])

    def values(self) -> dict[str, list[Any]]:
        """The values in buffers and plain attributes now. A tensor that is as it was is None."""
        before = {id(x): _local_tensor(value) for x, value in self._values}

        def copied(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            local, value = _local_tensor(x).detach(), before.get(id(x))
            same = local.is_meta or (value is not None and value.shape == local.shape and torch.equal(value, local))
            return None if same else local.clone()

        return {
            f"{plain_name(path)}.{name}".removeprefix("."): list(map(copied, tree_leaves(value)))
            for path, module in self._model.named_modules()
            for name, value in (module._buffers | ({} if _is_of_torch(module) else _plain_attributes(module))).items()
        }

    def restore(self) -> None:
        """Restore the state at the construction of this object. No communication."""
        for module, training in self._training:
            module.training = training
        for module, buffers, attributes in self._modules:
            if {name: id(x) for name, x in module._buffers.items()} != {name: id(x) for name, x in buffers.items()}:
                module._buffers.clear()
                module._buffers.update(buffers)
            if _is_of_torch(module):  # wrappers such as DDP count their forwards
                continue
            for name in _plain_attributes(module).keys() - attributes.keys():
                del module.__dict__[name]
            vars(module).update({name: x for name, x in attributes.items() if vars(module).get(name) is not x})
        for container, items in self._contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(items)
        for table, before in self._hooks:
            for key in [key for key, hook in table.items() if key not in before and _is_foreign(hook)]:
                del table[key]
        with torch.no_grad():
            for tensor, value in self._values:
                if tensor.shape == value.shape:
                    tensor.copy_(value)
        for put, state in self._random:
            put(state)


def _hook_tables(module: nn.Module) -> list[dict[int, Any]]:
    return [module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks]


def _is_foreign(hook: Any) -> bool:
    """Whether a hook belongs neither to torch nor to this package."""
    # Models of transformers register hooks in a forward, and set an attribute. The attribute is restored, so the hooks
    # must go. torch and this package keep references to their hooks in objects that are not restored.
    module = getattr(hook.func if isinstance(hook, partial) else hook, "__module__", None) or "torch."
    return not module.startswith(("torch.", "cp_styles."))


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


_OF_EACH_MODULE = frozenset(vars(nn.Module()))  # its tables of parameters, modules and hooks


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that hold nothing but numbers, texts and tensors, also in dicts, lists and sets."""
    named = vars(module).items()
    return {name: x for name, x in named if _is_plain(x) or (name not in _OF_EACH_MODULE and _is_plain_container(x))}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


def _is_plain_container(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain_container, value.values()))
    return all(map(_is_plain_container, value)) if type(value) in (list, set, tuple) else _is_plain(value)


def _items(container: Any) -> Iterable[Any]:
    return container.items() if isinstance(container, dict) else container


def _containers(value: Any) -> Iterator[Any]:
    """The dicts, lists and sets in a plain value, itself included."""
    if type(value) in (dict, list, set):
        yield value
    for each in value.values() if type(value) is dict else value if type(value) in (list, tuple) else ():
        yield from _containers(each)


def _random_states() -> list[tuple[Callable[[Any], Any], Any]]:
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append((torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    return states


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def checksums(batch: Any, model: nn.Module) -> dict[str, int]:
    """Checksums of the entries of the batch, and of the parameters and buffers of the model, by name.

    Parameters that are DTensors are left out: their shards may differ between ranks.
    """
    entries = batch.items() if isinstance(batch, Mapping) else [("", batch)]
    entries = [(f"batch[{name!r}]" if isinstance(batch, Mapping) else "the batch", value) for name, value in entries]
    return {name: fingerprint([*map(_summarize, tensors_in(value))] or [value]) for name, value in entries} | weights(
        model
    )


def weights(model: nn.Module, *, sharded: bool = False) -> dict[str, int]:
    """Checksums of the parameters and buffers of the model. ``sharded``: parameters alone, with shards of DTensors."""
    tensors = [*model.named_parameters(), *(() if sharded else model.named_buffers())]
    tensors = [(name, x) for name, x in tensors if sharded or not isinstance(x, DTensor)]
    return {WEIGHTS + plain_name(name): fingerprint([_summarize(_local_tensor(x))]) for name, x in tensors}


def _summarize(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, None if tensor.device.type == "meta" else checksum(tensor)
