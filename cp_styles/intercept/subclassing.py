"""Changes of a module's class: a subclass with the name of the class, so that torch.compile and isinstance find it.

Such modules are bound to the process groups of a run: they can be copied, and cannot be pickled.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


class BoundToThisRun:
    """Mixin before a module's class, in a subclass with the name of that class."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # What copy.deepcopy does by default. It would use __reduce_ex__, which raises below.
        inherited = getattr(super(), "__deepcopy__", None)
        if inherited is not None:
            return inherited(memo)
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # pyright: ignore[reportAttributeAccessIssue]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} is context parallel, bound to the process groups of this run, and cannot be "
            "pickled: save its state_dict(), load that into a new one and apply the style to it"
        )


# The classes that were made, by what was put before which class. One for all modules of a class: torch.compile guards
# on it. A program has few of them, and they hold no module.
_subclasses: dict[tuple[type, type], type] = {}
_MIXIN = "_cp_styles_mixin"


def put_before_class(
    module: nn.Module, mixin: type[BoundToThisRun], members: Callable[[type], dict[str, Any]] | None = None
) -> None:
    """Give ``module`` a subclass of ``mixin`` and its own class, with the name and signature of its own.

    ``members`` returns more members of the subclass, for a class. A module that has such a class already keeps it.
    """
    cls = type(module)
    if vars(cls).get(_MIXIN) is mixin:
        return
    made = _subclasses.get((mixin, cls))
    if made is None:
        names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, _MIXIN: mixin}
        names["__signature__"] = inspect.signature(cls)
        made = type(cls.__name__, (mixin, cls), {**names, **({} if members is None else members(cls))})
        _subclasses[mixin, cls] = made
    module.__class__ = made
