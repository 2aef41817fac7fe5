"""Changes the class of a module to a subclass with the same name, which torch.compile and isinstance accept.

Such modules are bound to the process groups of a run: they can be copied, but not pickled.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, cast

from torch import nn
from torch.nn.utils import parametrize

from cp_styles._lib.troubleshooting import see


class UnpicklableMixin:
    """Mixin before a module's class, in a subclass with the name of that class."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The default of copy.deepcopy, which would call __reduce_ex__, which raises below.
        inherited = getattr(super(), "__deepcopy__", None)
        if inherited is not None:
            return inherited(memo)
        twin = memo[id(self)] = type(self).__new__(type(self))
        # torch's classes of parametrized modules refuse __getstate__, which pickling would use too.
        parametrized = parametrize.is_parametrized(self)  # pyright: ignore[reportArgumentType]
        state = self.__dict__ if parametrized else self.__getstate__()
        twin.__setstate__(copy.deepcopy(state, memo))  # pyright: ignore[reportAttributeAccessIssue]
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_pickling(type(self).__name__)


def refuse_pickling(name: str) -> NoReturn:
    raise TypeError(
        f"{name} is context parallel, bound to the process groups of this run, and cannot be pickled: save its "
        "state_dict(), load it into a new module and apply the style to the new module"
        f"{see('A module that cannot be pickled')}"
    )


def insert_mixin(
    module: nn.Module, mixin: type[UnpicklableMixin], members: Callable[[type], dict[str, Any]] | None = None
) -> None:
    """Change the class of ``module`` to a subclass of ``mixin`` and its class, with the same name and signature.

    ``members(cls)`` returns further members of the subclass. A module that has such a class already keeps it.
    """
    # A parametrized module (torch.nn.utils.parametrize) has a class of its own, before the user's class. That class
    # stays the first: remove_parametrizations takes the properties out of it, and replaces it by its first base.
    cls = outermost = type(module)
    properties = cast(nn.ModuleDict, module.parametrizations) if parametrize.is_parametrized(module) else ()
    parametrized = any(name in vars(cls) for name in properties)
    if parametrized:
        cls = cls.__bases__[0]
    if cls.__bases__[0] is mixin:
        return
    # All modules of a class share one subclass, because torch.compile guards the class.
    subclass = next((other for other in cls.__subclasses__() if other.__bases__ == (mixin, cls)), None)
    if subclass is None:
        names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        names["__signature__"] = inspect.signature(cls)
        names |= {} if members is None else members(cls)
        for member in filter(inspect.isfunction, names.values()):  # torch.compile makes few graphs of one code object
            member.__code__ = member.__code__.replace()
        subclass = type(cls.__name__, (mixin, cls), names)
    if parametrized:
        inner, members_of = subclass, dict(vars(outermost))
        subclass = type(outermost.__name__, (inner,), members_of)
    module.__class__ = subclass
