"""The command ``python -m cp_styles verify``: compares a step of a user's model on ranks with the step on one rank.

    python -m cp_styles verify tests/cp_case.py:case --mesh cp=2

``case`` is a function without arguments that returns a dict with verify's arguments except the mesh (model, batch, step
and options), and ``plan``, as for parallelize_module, or a function of model and mesh that applies styles. The ranks
are threads of this process, on CPU, each with a copy of the model. The command prints the report; the exit status is 1
if the step is wrong.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle

from cp_styles.styles import parallelize_module
from cp_styles.testing import RankError, run_ranks
from cp_styles.verify import VerificationError, verify


def parse_axes(text: str) -> dict[str, int]:
    """The axes of a mesh and their sizes, from cp=2 or cp=2,tp=2."""
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in sizes:
            raise argparse.ArgumentTypeError(f"{text!r}: give axes and their sizes, such as cp=2 or cp=2,tp=2")
        sizes[name] = int(size)
    return sizes


def parse_case(text: str) -> tuple[str, str]:
    """File or module, and name, from path/to/file.py:name or package.module:name."""
    module, _, name = text.rpartition(":")
    if not module or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}: give a file or module and a function in it, tests/cp_case.py:case")
    if module.endswith(".py") and not Path(module).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {module}")
    return module, name


def load_function(path: str, name: str) -> Callable[[], Mapping[str, Any]] | None:
    """The function ``name`` of a file or module. Like a script, a file may import files of its folder."""
    if path.endswith(".py"):
        sys.path.insert(0, str(Path(path).resolve().parent))
        spec = spec_from_file_location(Path(path).stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = import_module(path)
    return getattr(module, name, None)


def main(arguments: Sequence[str]) -> None:
    """Run the command. The first argument is its name."""
    options = argparse.ArgumentParser(
        prog="python -m cp_styles verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("case", type=parse_case, metavar="FILE.py:FUNCTION", help="returns the arguments of verify")
    options.add_argument(
        "--mesh", type=parse_axes, default={"cp": 2}, metavar="cp=2,...", help="its axes; default cp=2"
    )
    args = options.parse_args(arguments[1:])
    try:
        make_case = load_function(*args.case)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{args.case[0]}.".startswith(f"{error.name}."):
            raise  # the case itself imports a module that is missing
        options.error(
            f"argument case: there is no module {error.name}; a file is given with .py, tests/cp_case.py:case"
        )
    if make_case is None:
        options.error(f"argument case: {args.case[0]} has no function {args.case[1]}")
    case = make_case()
    if missing := [name for name in ("model", "batch", "step") if name not in case]:
        options.error(f"argument case: its dict has no {', '.join(missing)}")
    names, sizes = tuple(args.mesh), tuple(args.mesh.values())
    plan, model = case.get("plan"), case["model"]
    options = {name: value for name, value in case.items() if name not in ("plan", "model")}

    def verify_on_rank(rank: int) -> str:
        mesh, copied = init_device_mesh("cpu", sizes, mesh_dim_names=names), copy.deepcopy(model)
        if isinstance(plan, ParallelStyle | Mapping):
            copied = parallelize_module(copied, mesh, plan)
        elif plan is not None:
            copied = plan(copied, mesh)
        return str(verify(copied, mesh, **options))

    try:
        _, *rest = run_ranks(verify_on_rank, math.prod(sizes))[0].splitlines()  # verify has printed the first line
        print("\n".join(rest))
    except RankError as error:
        first = error.errors[min(error.errors)]
        if not isinstance(first, VerificationError):
            raise
        print(first)
        raise SystemExit(1) from None
