"""BackboneContextParallel: for models that take whole inputs and return whole outputs, as classifiers and encoders."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from types import CellType, ModuleType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.checksum import device_checksum, on_host
from cp_styles._lib.compat import (
    graph_task_id,
    hooks_in_order,
    module_of_plan,
    replaces_mean_of_fsdp,
    running_reruns,
    saved_tensors_hooks_on_top,
    tree_leaves,
    tree_map_only,
    uncompiled,
)
from cp_styles._lib.contents import Contents
from cp_styles._lib.device_copies import tensor_on
from cp_styles._lib.introspect import input_names, matches
from cp_styles._lib.troubleshooting import see
from cp_styles.batch.averages import find_average
from cp_styles.batch.sharder import describe_content
from cp_styles.checks import observers_of, proof_of, running_ddp
from cp_styles.collectives.autograd import note_gather, walk_graph
from cp_styles.collectives.peers import get_peers
from cp_styles.collectives.split_gather import gather_parts
from cp_styles.comm.agreement import Meeting, StatusRow, agree_on_facts, start_status, tell_peers, telling
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import axis_and_group
from cp_styles.engine.binding import Binding
from cp_styles.functions.decode import find_cache
from cp_styles.mixers.randomness import DropoutByPosition
from cp_styles.styles.module import ModuleContextParallel, calls_in
from cp_styles.styles.on_mesh_axis import take_axis

# The sequence dim of arguments of blocks in transformers, timm and torch. None: every rank needs the whole argument.
# Arguments of an encoder's sequence may have a length of their own.
_SEQ_DIMS: dict[str, int | None] = {
    **dict.fromkeys(("attention_mask", "attn_mask", "encoder_attention_mask", "mask", "causal_mask")),
    **dict.fromkeys(("src_mask", "src_key_padding_mask", "layer_head_mask", "head_mask")),
    **dict.fromkeys(("position_bias", "encoder_decoder_position_bias")),  # T5 makes it in its first block
    **dict.fromkeys(("hidden_states", "encoder_hidden_states", "inputs_embeds"), 1),
    **dict.fromkeys(("position_ids", "cache_position"), -1),
    **dict.fromkeys(("position_embeddings", "rotary_pos_emb", "rope", "freqs_cis"), -2),
}


class BackboneContextParallel(ParallelStyle):
    """Context parallelism for the blocks of a model whose inputs and outputs are whole on every rank.

    For models that pool tokens behind their blocks (heads for classes, answers, rewards, embeddings), and for models
    that make tokens in front of them (encoders of pictures). Apply it to the model with its head. Hidden states are cut
    in front of the first block of a list and gathered behind the last one. All code in front of the first block and
    behind the last one runs on the whole sequence on every rank: embeddings, positions, masks, pooling, the head, a
    loss from ``labels``. Code between two blocks sees a part, as the blocks do.

    Every rank is given the same whole batch, and returns the same outputs. The loss is taken as on one device, by the
    model or from its outputs, equal on all ranks and without a factor. Gradients of parameters, and of inputs, are each
    rank's share: ``sum_gradients(model, mesh)`` sums them, or FSDP2 or DDP over the axis, whose mean the style takes
    into account.

    Args:
        style: how the attention in the blocks runs; default ``ModuleContextParallel()``. It also names the mesh axis.
        blocks: paths of lists of blocks (``nn.ModuleList``, ``nn.Sequential``) or of single modules below the model,
            patterns as in a plan. Default: the outermost lists of modules with attention.
        seq_dims: for arguments of the blocks, by name, the dim that holds the sequence; None for an argument that stays
            whole. Default: the names of transformers and timm, and 1 for the first argument, the hidden states.

    The blocks take hidden states [B, S, ...] of any floating-point dtype as their first argument, and return them
    first. They run in the order of the list. Any S of at least two tokens for each rank is allowed.

    Communication: in a forward, one agreement of the ranks on a checksum of all inputs, the messages of the attention,
    and one all-gather of the hidden states for each list: a rank sends B S D / P numbers P - 1 times. In the backward
    one reduce-scatter of the same size. In the backwards number 1, 2, 4, ... one all-gather of two numbers.

    Memory: the hidden states of the whole sequence on each rank, in front of the blocks and behind them.

    Raises:
        ValueError: when applied, if no list of blocks is found, or a path matches no module. At a call, on every rank,
            if inputs differ between ranks, for arguments of other lengths, for arguments that are made between the
            blocks for a part, and if FSDP2 or DDP averages the gradients of a part of the parameters alone.
        NotImplementedError: on every rank, for other arguments of blocks that are tensors, a cache, blocks that are
            left out, and gradients of the outputs that differ between ranks.
        TypeError: when applied, for a ``style`` that is no ModuleContextParallel. On every rank, for blocks that do not
            take and return hidden states first, and for outputs whose tensors are attributes of an object.

    Example::

        parallelize_module(model, mesh, BackboneContextParallel(seq_dims={"table": -2}))  # of rotary angles
        hidden = model(tokens, torch.arange(1000))  # whole on every rank, as tokens [B, 1000]
        hidden.mean(1).square().sum().backward()
        sum_gradients(model, mesh)
    """

    def __init__(
        self,
        style: ModuleContextParallel | None = None,
        *,
        blocks: str | Sequence[str] = (),
        seq_dims: Mapping[str, int | None] | None = None,
    ) -> None:
        super().__init__()
        style = ModuleContextParallel() if style is None else style
        if not isinstance(style, ModuleContextParallel) or style.joint is not None:
            raise TypeError(
                f"BackboneContextParallel: style is a ModuleContextParallel without a JointLayout, got {style!r}: "
                "BackboneContextParallel(ModuleContextParallel(layout=contiguous)), for example"
            )
        self.style = copy.copy(style)
        # The arguments of a block are made from the whole sequence.
        self.style.checks = replace(style.checks, inputs=False)
        self.blocks = (blocks,) if isinstance(blocks, str) else tuple(blocks)
        self.seq_dims = _SEQ_DIMS | dict(seq_dims or {})

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = f"{type(module).__name__} (BackboneContextParallel)"
        regions = self._find_regions(module, name)
        axis = take_axis(device_mesh, self.style.mesh_axis, name)
        for blocks in regions.values():
            for block in blocks:
                self.style._apply(block, device_mesh)
        root = module_of_plan()
        backbone = Backbone(
            name, axis, self.seq_dims, module if root is None else root, agrees=self.style.checks.agreement
        )
        backbone.regions = [_Region(backbone, path, blocks) for path, blocks in regions.items()]
        setattr(module, _STATE, backbone)
        before = module.register_forward_pre_hook(backbone.begin, with_kwargs=True, prepend=True)
        hooks_in_order(module, before, module.register_forward_hook(backbone.end, always_call=True))
        return module

    def _find_regions(self, module: nn.Module, name: str) -> dict[str, list[nn.Module]]:
        """The distinct blocks of each list, by the path of the list."""
        if not self.blocks:
            found = dict(_lists_with_attention(module, ""))
        else:
            paths = dict(module.named_modules())
            for pattern in self.blocks:
                if not any(matches(path, pattern) for path in paths):
                    raise ValueError(
                        f"{name}: blocks={pattern!r} names no module of it: print the names with named_modules()"
                        f"{see('A path that matches no module')}"
                    )
            found = {path: x for path, x in paths.items() if any(matches(path, pattern) for pattern in self.blocks)}
        if not found:
            lists = [path for path, child in module.named_modules() if isinstance(child, _LISTS)]
            raise ValueError(
                f"{name}: no list of blocks with attention was found among its lists {lists}. Name the list of its "
                f'blocks, BackboneContextParallel(blocks="layers"){see("Blocks that are not found")}'
            )
        return {path: list(dict.fromkeys(x)) if isinstance(x, _LISTS) else [x] for path, x in found.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.style}, blocks={self.blocks})"


_NOT_IN_GRAPHS = (
    "BackboneContextParallel compares inputs, cuts and gathers between torch.compile's graphs: compile without "
    "fullgraph=True, or compile the blocks"
)
_PLAIN_OPERATIONS = (
    "the error was raised in the blocks of {}, where hidden states are this rank's part and masks are whole. Attention "
    "in plain operations cannot be context parallel: let it call scaled_dot_product_attention"
)
_STATE = "_context_parallel_backbone"
_LISTS = (nn.ModuleList, nn.Sequential)


def backbone_of(model: nn.Module) -> Backbone | None:
    """The state of the BackboneContextParallel on ``model`` or a module in it. None if there is none."""
    return next((getattr(child, _STATE) for child in model.modules() if hasattr(child, _STATE)), None)


def _lists_with_attention(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost lists below a module whose entries are blocks of one class, or all have attention."""
    for name, child in module.named_children():
        below, entries = f"{path}.{name}" if path else name, list(child.children())
        attends = [_has_attention(entry) for entry in entries]
        if isinstance(child, _LISTS) and any(attends) and (all(attends) or len(set(map(type, entries))) == 1):
            yield below, child
        else:
            yield from _lists_with_attention(child, below)


def _has_attention(module: nn.Module) -> bool:
    names = [f"{name.rsplit('.', 1)[-1]} {type(child).__name__}".lower() for name, child in module.named_modules()]
    return any("attn" in name or "attention" in name for name in names)


class Backbone:
    """One model with the style: compares its inputs, and makes the gradients of its parameters each rank's share.

    Attributes:
        seq_dims: the sequence dims of the blocks' arguments, by name.
        agrees: the ranks compare inputs and gradients.
        running: a forward of the model runs.
        regions: the lists of blocks.
    """

    # [Note: shares] Outside of the blocks all ranks compute the same, so each has whole gradients. The gradient of an
    # output is divided by P. Then each rank has 1/P of the gradients behind the blocks, the reduce-scatter behind the
    # last block adds P equal gradients, and the rows that are cut in front of the first block get the gradients of this
    # rank's tokens. So the sum over the ranks is the gradient of every parameter, also of one with uses on both sides.
    # If the ranks drop other features of the head, it is the gradient of the mean of their losses.
    def __init__(
        self, name: str, axis: DeviceMesh, seq_dims: dict[str, int | None], root: nn.Module, *, agrees: bool
    ) -> None:
        self.name, self.axis, self.seq_dims = name, axis, seq_dims
        self.agrees, self.running, self.regions = agrees, False, list[_Region]()
        self._proof, self._averaged, self._backwards = proof_of(root), 1, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Backbone:
        copied = memo[id(self)] = copy.copy(self)
        copied._proof, copied.running, copied._backwards = copy.deepcopy(self._proof, memo), False, 0
        copied.regions = copy.deepcopy(self.regions, memo)
        return copied

    @partial(uncompiled, reason=_NOT_IN_GRAPHS)
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: compare its inputs. Communication: one agreement of the ranks."""
        self.running = True
        for region in self.regions:
            region.begin()
        axis, group = axis_and_group(self.name, self.axis)
        if group.size() == 1 or graph_task_id() >= 0:
            return
        state_of(group).turn.begin()
        inputs: dict[str, Any] = dict(zip(input_names(module), args, strict=False)) | kwargs
        inputs |= {f"argument {at}": x for at, x in enumerate(args[len(inputs) - len(kwargs) :])}

        def describe() -> tuple[dict[str, Any], StatusRow]:
            self._refuse_inputs(module, inputs)
            return {f"the input {name}": describe_content(x) for name, x in inputs.items()}, StatusRow()

        advice = (
            ". Every rank of the axis is given the same whole batch, which nothing cuts: neither BatchSharder nor a "
            f"sampler over these ranks{see('Ranks with other samples')}"
        )
        if self.agrees:
            agree_on_facts(describe, Meeting.BATCH, (self.name, axis, group), advice)
        else:
            self._refuse_inputs(module, inputs)

    def _refuse_inputs(self, module: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Raise for inputs of the model, and for modules outside of the blocks, that are not supported."""
        if find_cache(inputs) is not None:
            raise NotImplementedError(
                f"{self.name}: the model is given a cache, whose keys would be parts. Decode without this style: "
                "for generation of long prompts see prefill, on the page tutorials/hugging_face.md"
            )
        outside = self._find_dropouts_outside(module)
        if outside and module.training:
            raise ValueError(
                f"{self.name}: {outside[:3]} draw by position (replace_dropout) outside of the blocks, where "
                "tokens are whole and would be taken for a part: name the dropouts of the blocks alone, "
                f'replace_dropout(model, mesh, names=["{self.regions[0].path}.*..."])'
                f"{see('Dropout by position outside of the blocks')}"
            )
        leaves = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.grad_fn is not None]
        if any(type(node).__name__ == "_ShareBackward" for leaf in leaves for node in walk_graph(leaf.grad_fn)):
            raise NotImplementedError(
                f"{self.name}: an input was computed from an output of a model with this style, and its gradients "
                "would be divided by the ranks twice: put both calls into one module, and apply the style to that"
            )

    def _find_dropouts_outside(self, module: nn.Module) -> list[str]:
        """The names of dropouts by position that no block has."""
        within = {id(x) for region in self.regions for block in region.blocks for x in block.modules()}
        dropouts = [(name, x) for name, x in module.named_modules() if isinstance(x, DropoutByPosition) and x.p > 0]
        return [name for name, x in dropouts if id(x) not in within]

    @partial(uncompiled, reason=_NOT_IN_GRAPHS)
    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of the model: gather the parts in its outputs, and divide their gradients."""
        with telling(self.name, axis_and_group(self.name, self.axis)[1]):
            return self._end(module, output)

    def _end(self, module: nn.Module, output: Any) -> Any:
        self.running = False
        opened = [region.path for region in self.regions if region.open]
        whole_parts: dict[int, Callable[[], torch.Tensor]] = {}
        for region in self.regions:
            whole_parts |= region.end()
        _, group = axis_and_group(self.name, self.axis)
        error = sys.exc_info()[1]
        if output is None and error is not None:
            if opened and isinstance(error, RuntimeError):
                error.add_note(f"{self.name}: {_PLAIN_OPERATIONS.format(opened)}")
            tell_peers(self.name, group, error)
            return None
        if group.size() == 1:
            return output
        if opened or not any(region.ran for region in self.regions):
            raise NotImplementedError(
                f"{self.name}: the model has not run the last block of {opened or [x.path for x in self.regions]}, so "
                f'nothing was gathered. Name the list whose blocks all run in turn, blocks="..."'
                f"{see('Blocks that do not run in turn')}"
            )
        for observer in observers_of(module):
            calls = calls_in(module)
            assert calls is not None
            observer.forward_ends(calls, module, output)
        if whole_parts:  # hidden states of single layers
            output = tree_map_only(torch.Tensor, lambda x: whole_parts[id(x)]() if id(x) in whole_parts else x, output)
        if graph_task_id() < 0 and (module.training or torch.is_grad_enabled()):
            # Not in a recomputation, which runs outside of the DDP module. Its first run may have no gradients.
            self._averaged = self._count_averaged(module, group)
        if not torch.is_grad_enabled():
            return output
        others = [x for x in tree_leaves(output) if not isinstance(x, torch.Tensor) and _holds_gradients(x)]
        if others:
            raise TypeError(
                f"{self.name}: the model returns a {type(others[0]).__name__}, whose tensors would get whole "
                "gradients: return tensors, plain tuples, lists or dicts, or an output of transformers"
            )
        share = partial(self._share, group=group, factor=self._averaged / group.size())
        return tree_map_only(torch.Tensor, share, output)

    def _count_averaged(self, module: nn.Module, group: dist.ProcessGroup) -> int:
        """The number of ranks over which FSDP2 or DDP averages the gradients of all parameters; 1 if neither does."""
        ranks = set(dist.get_process_group_ranks(group))
        reducer, over, averaged = find_average(self._proof.model() or module, running_ddp(), ranks)
        missing = [name for name, x in module.named_parameters() if x.requires_grad and id(x) not in averaged]
        replaced = any(isinstance(x, FSDPModule) and replaces_mean_of_fsdp(x) for x in module.modules())
        if over > 1 and (missing or replaced):
            problem = (
                f"but not the gradients of {missing[:3]}: give the whole model to it, fully_shard(model, mesh=mesh)"
            )
            if replaced:
                problem = "and set_gradient_divide_factor replaces the mean: leave it out"
            raise ValueError(f"{self.name}: {reducer} averages gradients over {over} ranks of a sequence, {problem}")
        return max(over, 1)

    def _share(self, x: torch.Tensor, group: dist.ProcessGroup, factor: float) -> torch.Tensor:
        if not x.requires_grad:
            return x
        shared = _Share.apply(x, factor, partial(self._compare, group, device_checksum(_local(x))))
        note_gather(shared, x, get_peers(group), reduced=factor == 1)
        return shared

    def _compare(self, group: dist.ProcessGroup, checksum: torch.Tensor, grad: torch.Tensor) -> None:
        """In the backwards number 1, 2, 4, ...: compare the gradients of an output on all ranks."""
        self._backwards += 1
        if self._backwards & (self._backwards - 1) or not self.agrees:
            return
        wide = _local(grad).detach().double()
        facts = torch.stack([wide.norm(), wide.sum() / max(1, wide.numel()) ** 0.5]).view(torch.int64)
        norm, mean, output = on_host([*facts, checksum])
        axis, _ = axis_and_group(self.name, self.axis)
        where = Meeting.COLLECTIVE_BACKWARD, self.name, axis, group
        columns = start_status(lambda: StatusRow(q_length=output, numbers=(norm, mean)), *where)().columns
        ranks = torch.tensor(columns.numbers, device="cpu").view(torch.float64).T
        # Outputs of a head with dropout differ, and so do their gradients.
        if len(set(columns.q_length)) == 1 and bool(((ranks - ranks[0]).abs() > 1e-2 * ranks[0, 0]).any()):
            raise NotImplementedError(
                f"{self.name}: the gradients of an output differ between the ranks, with norms "
                f"{[f'{float(norm):.4g}' for norm in ranks[:, 0]]}. All ranks must take the same loss of the whole "
                f"outputs, and no part of it{see('Gradients of an output that differ')}"
            )


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _holds_gradients(value: Any) -> bool:
    """Whether an object that torch takes for a leaf may hold tensors with gradients: in its attributes, as a container
    of a class of its own, or in what it calls. An iterator is not read, nor what is behind _MOST_OBJECTS."""
    seen, waiting = set[int](), [value]
    while waiting and len(seen) < _MOST_OBJECTS:
        held = waiting.pop()
        if isinstance(held, torch.Tensor):
            if held.requires_grad:
                return True
            continue
        if id(held) in seen or isinstance(held, (nn.Module, type, ModuleType, str, bytes)):
            continue
        if isinstance(held, Iterator):
            return True
        seen.add(id(held))
        slots = [getattr(kind, "__slots__", ()) for kind in type(held).__mro__]
        names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
        waiting += [*getattr(held, "__dict__", {}).values(), *(getattr(held, name, None) for name in names)]
        if isinstance(held, Mapping):
            waiting.extend(held.values())
        elif isinstance(held, Iterable) and isinstance(held, Sized):
            waiting.extend(held)
        if isinstance(held, partial):
            waiting += [held.func, *held.args, *held.keywords.values()]
        if callable(held):
            waiting.append(getattr(held, "__self__", None))
            cells = getattr(held, "__closure__", None) or ()
            waiting += [cell.cell_contents for cell in cells if cell != CellType()]
    return bool(waiting)


_MOST_OBJECTS = 10_000


class _Share(torch.autograd.Function):
    """forward: x, and not a view of it: programs change hidden states and losses in place. backward: the gradient times
    ``factor``, after ``compare``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, factor: float, compare: Callable[[torch.Tensor], None] | None
    ) -> torch.Tensor:
        ctx.factor, ctx.compare = factor, compare
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.compare is not None:
            ctx.compare(grad)
        return grad if ctx.factor == 1 else grad * ctx.factor, None, None


class _Region:
    """The blocks of one list, between which the hidden states are this rank's part.

    Attributes:
        path: the path of the list.
        ran, open: in this forward the last block has run; the first block has run, and the last one has not.
        length: the length of the whole sequence in the latest forward; while a checkpoint recomputes, in its forward.
    """

    def __init__(self, backbone: Backbone, path: str, blocks: Sequence[nn.Module]) -> None:
        self.path, self._backbone, self.blocks = path, backbone, list(blocks)
        self.ran = self.open = False
        self.length: int | None = None
        self._parts: list[tuple[ref[torch.Tensor], int]] = []
        self._nodes: set[Any] = set()  # the grad_fn of hidden states between the blocks
        self._tables: dict[Any, tuple[torch.Tensor, Contents, torch.Tensor]] = {}
        # Hooks that run in front of the hooks of the style, and behind them.
        for block in blocks:
            before = block.register_forward_pre_hook(self._cut, with_kwargs=True, prepend=True)
            hooks_in_order(block, before, block.register_forward_hook(self._join))

    def begin(self) -> None:
        """Begin a forward of the model."""
        self.ran = self.open = False
        self._parts, self._nodes, self._tables = [], set(), {}

    def end(self) -> dict[int, Callable[[], torch.Tensor]]:
        """End a forward. For each hidden state between the blocks that is still alive, by its id: how to gather it."""
        alive = [(part, dim) for part, dim in ((part(), dim) for part, dim in self._parts) if part is not None]
        self.open, self._parts, self._nodes, self._tables = False, [], set(), {}
        return {id(part): partial(self._gather, part, dim) for part, dim in alive}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Region:
        copied = memo[id(self)] = copy.copy(self)
        copied.begin()
        copied._backbone = copy.deepcopy(self._backbone, memo)
        copied.blocks = copy.deepcopy(self.blocks, memo)
        return copied

    @partial(uncompiled, reason=_NOT_IN_GRAPHS)
    def _cut(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook: cut the arguments that are whole, and in front of the first block the hidden states."""
        binding, backbone = self._binding, self._backbone
        if binding.group.size() == 1:
            return None
        names = [*input_names(block), *(f"argument {at}" for at in range(len(args)))]
        inputs: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        dims: dict[str, int | None] = {names[0]: 1, **backbone.seq_dims}
        hidden, dim, rank, first = inputs.get(names[0]), dims[names[0]], binding.group.rank(), block is self.blocks[0]
        if not isinstance(hidden, torch.Tensor) or dim is None or hidden.ndim <= dim:
            raise TypeError(
                f"{backbone.name}: the first argument of {self.path}, {names[0]}, must be hidden states with the "
                f"sequence in dim {dim}: name other modules in blocks=, or the dim in seq_dims="
            )
        recomputed = graph_task_id() >= 0
        if not (recomputed or backbone.running) and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{backbone.name}: {self.path} runs outside of a call of the model, whose outputs alone get the right "
                "gradients: call the model, model(...), or apply the style to the module that is called"
            )
        latest = hidden.shape[dim] if first else self.length
        layout = None if latest is None else binding.layout_for(latest)
        is_part = layout is not None and hidden.shape[dim] == layout.lengths[rank] and (recomputed or self.open)
        if layout is None or not (first or is_part):
            raise NotImplementedError(
                f"{backbone.name}: {self.path} runs a block on {hidden.shape[dim]} tokens, which are no part that its "
                "first block was given. Name lists of blocks that all run in turn and keep the number of tokens, "
                f'blocks=("stages.0.blocks", "stages.1.blocks"){see("Blocks that do not run in turn")}'
            )
        length = layout.length
        if min(layout.lengths) < 2:  # models of transformers take a single query for a new token, without a causal mask
            raise ValueError(
                f"{backbone.name}: {length} tokens are too few for {layout.ranks} ranks, each of which needs two: take "
                "fewer ranks, or longer sequences"
            )
        if not (first or recomputed):  # behind a reentrant checkpoint, whose inside has no nodes
            self._nodes |= {hidden.grad_fn} - {None}
        if first:
            self.length, self.open = length, not recomputed
        if not recomputed:
            self._wrap_checkpoints()

        def cut(name: str, x: torch.Tensor) -> torch.Tensor:
            if x.numel() == 1:
                return x
            if name not in dims:
                raise NotImplementedError(
                    f"{backbone.name}: {self.path} is given {name} of shape {tuple(x.shape)}, whose sequence dim is "
                    f'not known: give seq_dims={{"{name}": {_likely_dim(x, length)}}}, or None for an argument that '
                    f"stays whole{see('An argument of a block whose sequence dim is not known')}"
                )
            dim = dims[name]
            if dim is not None and not -x.ndim <= dim < x.ndim:
                raise ValueError(
                    f"{backbone.name}: {self.path} is given {name} of shape {tuple(x.shape)}, which has no dim {dim}: "
                    f'give seq_dims={{"{name}": {_likely_dim(x, length)}}}, or None for an argument that stays whole'
                    f"{see('An argument of a block whose sequence dim is not known')}"
                )
            size = None if dim is None else x.shape[dim]
            if size is not None and size < length and name == "position_embeddings" and _rotates_last_tokens(block):
                at = layout.positions(rank, "cpu") - (length - size)
                return x.index_select(dim or 0, tensor_on(x.device, at[at >= 0]))
            if dim is None or size == 1 or (size != length and _IS_PART in facts_about(x)):
                return x
            if not first and size == layout.lengths[rank] and not name.startswith("encoder_"):
                if not recomputed and name != names[0]:
                    self._refuse_other_parts(name, x, length, dim)
                return x
            if size != length and not name.startswith("encoder_"):
                raise ValueError(
                    f"{backbone.name}: {self.path} is given {name} with {size} rows for {length} tokens, as rotary "
                    "embeddings of patches without registers: rows and tokens must be of one number. Run this model "
                    "without context parallelism"
                )
            own = layout if size == length else binding.layout_for(x.shape[dim])
            if recomputed or name == names[0] or x.requires_grad:
                return own.shard(x, dim, rank)
            key, what = (id(x), own, dim), f"{name} of {self.path}, of shape {tuple(x.shape)},"
            table = self._tables.get(key)  # of positions, which all blocks get
            if table is None or not table[1].are_in(x, what):
                table = self._tables[key] = x, Contents(x), own.shard(x, dim, rank)
            return table[2]

        args = tuple(_map_tensors(partial(cut, name), x) for name, x in zip(names, args, strict=False))
        kwargs = {name: _map_tensors(partial(cut, name), x) for name, x in kwargs.items()}
        if first:
            self._keep_part(args[0] if args else kwargs[names[0]], dim)
        return args, kwargs

    @partial(uncompiled, reason=_NOT_IN_GRAPHS)
    def _join(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook: behind the last block gather the hidden states."""
        if self._binding.group.size() == 1:
            return None
        first, *rest = output if isinstance(output, tuple) else (output,)
        dim = self._backbone.seq_dims.get(next(iter(input_names(block)), ""), 1) or 0
        own = 0 if self.length is None else self._binding.layout_for(self.length).lengths[self._binding.group.rank()]
        if not isinstance(first, torch.Tensor) or first.ndim <= dim or first.shape[dim] != own:
            raise TypeError(
                f"{self._backbone.name}: a block of {self.path} returns {type(output).__name__}, and must return "
                "hidden states of as many tokens as it is given, alone or first in a tuple: name other modules in "
                "blocks="
            )
        for x in tree_leaves(output):
            if isinstance(x, torch.Tensor):
                facts_about(x)[_IS_PART] = True
        if block is not self.blocks[-1]:
            self._keep_part(first, dim)
            return None
        self.ran, self.open = True, False
        whole = _Share.apply(self._gather(first, dim), 1.0, None)
        return (whole, *rest) if isinstance(output, tuple) else whole

    def _gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole tensor of the ranks' parts. The gradients of the ranks are summed."""
        assert self.length is not None
        layout = self._binding.layout_for(self.length)
        options: Any = {"layout": layout, "checks": self._binding.checks}
        return gather_parts(part, dim, self._backbone.axis, reduce_gradients=True, **options)[0]

    def _wrap_checkpoints(self) -> None:
        """Make the checkpoints around the present call recompute with the length of this forward."""
        # Another forward may come before the backward, and its sequence may give this rank as many tokens.
        if saved_tensors_hooks_on_top() is None and torch.is_grad_enabled():  # in no checkpoint
            return
        for owner, attribute in running_reruns():
            if attribute is None:
                continue
            fn: Any = getattr(owner, attribute)
            if not (isinstance(fn, _WithLength) and fn.region is self):
                setattr(owner, attribute, _WithLength(fn, self, self.length))

    def _keep_part(self, part: torch.Tensor, dim: int) -> None:
        if graph_task_id() < 0:
            self._parts.append((ref(part), dim))
            self._nodes |= {part.grad_fn} - {None}

    def _refuse_other_parts(self, name: str, x: torch.Tensor, length: int, dim: int) -> None:
        """Raise for an argument of a later block that has the rows of a part, and that no block has made."""
        if x.grad_fn is not None and not self._nodes.isdisjoint(walk_graph(x.grad_fn)):
            return  # computed from hidden states
        if any(_share_memory(x, part) for reference, _ in self._parts if (part := reference()) is not None):
            return  # detached hidden states
        # Without gradients nothing says from what a number was computed.
        if x.dtype == torch.bool or (not self._nodes and (x.is_floating_point() or x.is_complex())):
            return
        raise ValueError(
            f"{self._backbone.name}: {self.path} is given {name} of shape {tuple(x.shape)}, which was made between the "
            f"blocks, for this rank's part of {length} tokens. Make it once, before the first block, from the whole "
            f'sequence, and give seq_dims={{"{name}": {dim}}}. If it is computed from detached hidden states, hand '
            f"these to the block, which computes it{see('Positions that are made between the blocks')}"
        )

    @property
    def _binding(self) -> Binding:
        calls = calls_in(self.blocks[0])
        assert calls is not None
        return calls.binding


def _share_memory(x: torch.Tensor, other: torch.Tensor) -> bool:
    return x.device == other.device and x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0


@dataclass(frozen=True)
class _WithLength:
    """A function that a checkpoint recomputes, with the ``length`` that its region had in its forward."""

    fn: Callable[..., Any]
    region: _Region
    length: int | None

    def __call__(self, *args: Any) -> Any:
        latest, self.region.length = self.region.length, self.length
        binding = self.region._binding
        binding.group_state.turn.begin()
        try:
            with binding.telling():
                return self.fn(*args)
        finally:
            self.region.length = latest


_IS_PART = "is a part"  # a fact about a tensor: a block has returned it


def _rotates_last_tokens(block: nn.Module) -> bool:
    """Whether the rotary function of the block's file gives a table with too few rows to the last tokens, as DINOv3's:
    the first tokens, class tokens and registers, have no rows."""
    rotate: Any = getattr(sys.modules[type(block).__module__], "apply_rotary_pos_emb", None)
    x_BHLD, table_LD = torch.ones(1, 1, 3, 2, device="cpu"), torch.zeros(2, 2, device="cpu")
    with contextlib.suppress(Exception):  # other functions take other arguments, or tables of as many rows
        return rotate(x_BHLD, x_BHLD, table_LD, table_LD)[0][0, 0, :, 0].tolist() == [1, 0, 0]
    return False


def _likely_dim(x: torch.Tensor, length: int) -> int:
    """The first dim of ``length`` rows; else dim 1, if there is one."""
    return next((dim for dim, size in enumerate(x.shape) if size == length), min(1, x.ndim - 1))


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``function`` applied to its tensors, in plain tuples, lists and dicts. Caches are no such."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(_map_tensors(function, item) for item in value)
    if type(value) is dict:
        return {key: _map_tensors(function, item) for key, item in value.items()}
    return value
