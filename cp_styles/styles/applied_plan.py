"""Notices modules that are put into a model after a plan was applied to it, where the plan would have meant them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from cp_styles._compat import graph_task_id, never_compile_alone
from cp_styles.engine.binding import Binding
from cp_styles.intercept.subclassing import BoundToThisRun, refuse_pickling
from cp_styles.styles.parallelize import matches
from cp_styles.troubleshooting import see


class AppliedPlan:
    """A hook on the module that a plan was applied to. At each forward it looks at the modules inside.

    What replaced a module with a style, or is a further module of its class, would attend to this rank's part alone.
    """

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._patterns: set[str] = set()
        # By class of the modules with a style: how many others there were without one when the plan was applied.
        self._plain: dict[type[nn.Module], int] = {}
        self._structure = 0  # of the latest forward

    def __deepcopy__(self, memo: dict[int, Any]) -> AppliedPlan:
        twin = memo[id(self)] = AppliedPlan(self._binding)
        twin._patterns, twin._plain = set(self._patterns), dict(self._plain)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_pickling(self._binding.name)

    @staticmethod
    def note(root: nn.Module, patterns: list[str], module: nn.Module, binding: Binding) -> None:
        """Called when a style of a plan for ``root`` is applied to ``module``, before the module changes."""
        hooks = (getattr(hook, "__self__", None) for hook in root._forward_pre_hooks.values())
        plan = next((owner for owner in hooks if isinstance(owner, AppliedPlan)), None)
        if plan is None:
            plan = AppliedPlan(binding)
            root.register_forward_pre_hook(plan.check)
        plan._patterns.update(patterns)
        others = (other for _, other in _without_style(root) if other is not module)
        plan._plain[type(module)] = sum(type(other) is type(module) for other in others)

    def check(self, root: nn.Module, args: Any) -> None:
        """A forward pre-hook. No communication, unless it raises: then all ranks do."""
        if torch.compiler.is_dynamo_compiling() or graph_task_id() >= 0 or self._binding.group.size() == 1:
            return
        modules = list(_without_style(root))
        structure = hash(tuple([id(module) for _, module in modules]))
        if structure != self._structure:
            self._compare(root, modules)
            self._structure = structure

    def _compare(self, root: nn.Module, modules: list[tuple[str, nn.Module]]) -> None:
        plain: dict[type[nn.Module], list[str]] = {cls: [] for cls in self._plain}
        for path, module in modules:
            if type(module) in plain:
                plain[type(module)].append(path)
            planned = any(matches(path, pattern) for pattern in self._patterns)
            if planned and not any(isinstance(child, BoundToThisRun) for child in module.modules()):
                self._refuse(root, path, module)
        for cls, paths in plain.items():
            if len(paths) > self._plain[cls]:
                self._refuse(root, paths[-1], root.get_submodule(paths[-1]))

    def _refuse(self, root: nn.Module, path: str, module: nn.Module) -> None:
        self._binding.refuse(
            ValueError(
                f"{self._binding.name}: {path} ({type(module).__name__}) was put into {type(root).__name__} after the "
                "style was applied, and has none: its attention would see this rank's part of the sequence alone. "
                "Change the model first and apply the plan then, or apply the style to this module too: "
                f"parallelize_module(model.get_submodule({path!r}), mesh, style)"
                f"{see('A module that was put in later')}"
            )
        )


# Hooks are traced with the module's call or not compiled at all.
never_compile_alone(AppliedPlan.check, nor_what_it_calls=True)


def _without_style(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules under ``root``, by path, that have no style, and are not in one that has."""
    waiting = [("", root)]
    while waiting:
        prefix, module = waiting.pop()
        for name, child in module._modules.items():
            if child is not None and not isinstance(child, BoundToThisRun):
                path = f"{prefix}{name}"
                yield path, child
                waiting.append((f"{path}.", child))
