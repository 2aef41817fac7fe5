"""The base of the context-parallel styles: their options, and how a style binds an attention to a mesh."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from cp_styles._lib.compat import module_of_plan
from cp_styles.checks import proof_of
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.group_state import Forwards, state_of
from cp_styles.comm.groups import axis_and_group
from cp_styles.engine.binding import Binding, ForwardState
from cp_styles.kernels import Kernel
from cp_styles.layouts import Balancer, SequenceLayout, head_tail
from cp_styles.masks import Full, Mask
from cp_styles.strategies import Ring, Strategy
from cp_styles.styles.on_mesh_axis import take_axis


class ContextParallelStyle(ParallelStyle):
    """Base of the context-parallel styles; their docstrings explain the options."""

    kv_layout: SequenceLayout | Balancer | None = None

    def __init__(
        self,
        *,
        mesh_axis: str = "cp",
        strategy: Strategy | None = None,
        layout: SequenceLayout | Balancer | None = None,
        mask: Mask | None = None,
        kernel: Kernel | None = None,
        checks: Checks = CHECKS,
        verified: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(mesh_axis, str):
            raise TypeError(
                f"{type(self).__name__}: mesh_axis is the name of one axis, got {mesh_axis!r}. For heads over "
                "neighbours and keys among them, make one axis of both in the mesh and give the size of the inner one: "
                'init_device_mesh("cuda", (outer * inner,), mesh_dim_names=("cp",)), strategy=Ulysses(size=inner). See '
                "the page Migration"
            )
        self.mesh_axis = mesh_axis
        self.strategy = Ring() if strategy is None else strategy
        self.layout = layout
        self.mask = Full() if mask is None else mask
        self.kernel = kernel
        self.checks = checks
        self.verified = verified

    def bind(self, module: nn.Module, device_mesh: DeviceMesh) -> tuple[DeviceMesh, Binding]:
        """The 1-D mesh of the sequence, and the binding of the module's attention on it."""
        axis = take_axis(device_mesh, self.mesh_axis, f"{type(self).__name__} on {type(module).__name__}")
        name, group = axis_and_group(type(self).__name__, axis)
        who = f"{type(module).__name__} ({type(self).__name__} over mesh axis {name!r})"
        layout = head_tail if self.layout is None else self.layout
        # The count is in the state of the group and not in the style: ranks that are threads may share the style.
        numbers = state_of(group).get_or_create(Forwards).modules
        numbers[self] = site = numbers.get(self, 0) + 1
        options = self.strategy, layout, self.mask, self.kernel, self.kv_layout
        state = ForwardState()
        scopes = {"has_layout": self.layout is not None, "forward_state": state, "history": state}
        binding = Binding(who, name, group, *options, checks=self.checks, site=site, **scopes)
        # Last, because module_of_plan reads the locals of frames. After an error these locals would keep the group.
        root = module_of_plan()
        proof = proof_of(module if root is None else root)
        proof.verified = proof.verified or self.verified
        return axis, replace(binding, model=proof)

    def __repr__(self) -> str:
        layout = getattr(self.layout, "__name__", repr(self.layout))
        options = f"mesh_axis={self.mesh_axis!r}, strategy={self.strategy}, layout={layout}, mask={self.mask}"
        return f"{type(self).__name__}({options})"
