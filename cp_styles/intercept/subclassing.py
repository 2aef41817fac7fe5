"""A mixin for modules that are bound to the process groups of a run: they can be copied, but not pickled."""

from __future__ import annotations

import copy
from typing import Any


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
