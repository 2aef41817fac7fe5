"""The architecture: every module has a row, and imports point to the same row or down."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "cp_styles"
CONTRIBUTING = PACKAGE.parent / "CONTRIBUTING.md"

# Lowest box first. A new file must be given one here, and in the picture of CONTRIBUTING.md.
LAYERS = (
    (
        "_compat",
        "bounded_cache",
        "checksum",
        "device_copies",
        "introspect",
        "live_storages",
        "subclassing",
        "testing",
        "troubleshooting",
        "unsupported_derivatives",
    ),
    # These do not know each other: kernels know no masks, and masks do not communicate.
    ("comm", "mask", "kernels"),
    ("layout", "batch", "collectives"),
    ("plan", "strategies"),
    ("engine",),
    ("batch_sharder", "decoding", "functions", "joint_layout"),
    ("intercept",),
    ("checks", "explain", "mixers", "styles", "torch_api"),
    ("verify", "integrations"),
    ("__init__", "__main__"),
)
APART = LAYERS[1]
# What an attention goes through from a module's hook to the kernel and back, but for the files that look at models
# and at layers without attention.
CORE = (
    "comm",
    "engine",
    "functions/attention.py",
    "functions/multi_head_attention.py",
    "intercept",
    "kernels",
    "layout.py",
    "mask",
    "plan",
    "strategies",
    "styles",
    "subclassing.py",
)
ROW = {module: row for row, modules in enumerate(LAYERS) for module in modules}


def module_of(path: Path) -> str:
    """The name in the table: a file, or the folder it is in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(source: str, package: list[str]) -> Iterator[str]:
    """Modules of this package that ``source`` imports, wherever in it; ``package`` is where it lives."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # from cp_styles import layout: what counts is layout, if there is such a module.
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == PACKAGE.name:
                is_module = len(parts) > 1 and any(
                    (PACKAGE / f"{parts[1]}{end}").exists() for end in (".py", "/__init__.py")
                )
                yield parts[1] if is_module else "__init__"


@cache
def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports_of_file(path: Path) -> set[str]:
    return set(imports_of(path.read_text(), [PACKAGE.name, *path.relative_to(PACKAGE).parts[:-1]]))


def lines_of(path: Path) -> int:
    return path.read_text().count("\n")


def is_core(path: Path) -> bool:
    file = path.relative_to(PACKAGE).as_posix()
    return any(file == part or file.startswith(f"{part}/") for part in CORE)


@cache
def sizes() -> dict[str, int]:
    return {
        "lines of the package": sum(map(lines_of, package_files())),
        "lines of the core path": sum(lines_of(path) for path in package_files() if is_core(path)),
        "floors": len(LAYERS),
        "entries of state": sum(len(list(state_of(path.read_text()))) for path in package_files()),
    }


# Limits of lines have room, so that no work goes into single lines. Lines within SLACK of their limit are no news.
LIMITS = {"lines of the package": 28_500, "lines of the core path": 12_900, "floors": 10, "entries of state": 42}
SLACK = {"lines of the package": 1_500, "lines of the core path": 1_500, "entries of state": 8}


@pytest.mark.parametrize(("what", "limit"), LIMITS.items())
def test_the_package_does_not_grow(what: str, limit: int):
    size = sizes()[what]
    assert size <= limit, f"{size} {what}, {limit} at most: python tests/benchmarks/steps.py --lines"
    assert size >= limit - SLACK.get(what, 0), f"only {size} {what} are left: lower the limit of {limit}"


@pytest.mark.parametrize("path", package_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path):
    module = module_of(path)
    assert module in ROW, f"{module} is new: give it a row in LAYERS"
    for imported in imports_of_file(path) - {module}:
        assert imported in ROW, f"{imported} is new: give it a row in LAYERS"
        assert ROW[imported] <= ROW[module], f"{module} (row {ROW[module]}) imports {imported} (row {ROW[imported]})"
        assert module not in APART or imported not in APART, f"{module} imports {imported}"
        assert imported != "testing" or module == "verify", f"{module} imports testing, which is for users"


@pytest.mark.parametrize("path", package_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_folder_imports_private_names_of_another(path: Path):
    """Neither a private file nor a private name. Names of ``_compat`` are for all."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE.name}."):
            parts = [*(node.module or "").split(".")[1:], *(alias.name for alias in node.names)]
            private = [part for part in parts if part.startswith("_") and part != "_compat"]
            assert parts[0] == module_of(path) or not private, f"{parts[0]} keeps {private} private"


def test_the_picture_of_contributing_has_these_boxes():
    (picture,) = re.findall(r"### Architecture\n\n```\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    boxes = [re.findall(r"\w+", line) for line in picture.splitlines()]
    for box, modules in zip(boxes[-2::-1], LAYERS[1:-1], strict=True):
        assert set(modules) <= set(box), f"{modules} are one box"


# All that outlives a call. CONTRIBUTING.md says of each kind why it is safe.
STATE = {
    "by process group, weak": {
        "comm/group_state.py": "_states",
    },
    "by an object, weak": {
        "bounded_cache.py": "_about",
    },
    "what a rank does in any thread": {
        "checks/gradient_watch.py": "_stepped follow_optimizers",
        "engine/scope.py": "_open_anywhere",
    },
    "filled at import": {
        "engine/observers.py": "RANK_CHECKS",
    },
    "numbers of live objects, weak": {
        "engine/custom_ops.py": "_resolved_calls",
    },
    "context variables": {
        "bounded_cache.py": "_current",
        "engine/custom_ops.py": "modes_entered",
        "engine/observers.py": "attention_listener",
        "engine/scope.py": "_open",
        "torch_api/context_block.py": "_open",
    },
    "settings of torch's API": {
        "torch_api/context_block.py": "rotation last_cut",
    },
    "caches by value": {
        "explain/dry_run.py": "_kind",
        "kernels/flex_compiled.py": "_compiled",
        "kernels/merge.py": "_runs_triton",
        "kernels/sdpa.py": "names_of _capability",
        "strategies/moving_kv.py": "_have_levels",
        "styles/dtensors.py": "_specs",
    },
    "caches of what grows with the batch": {
        "device_copies.py": "_table_of",
        "layout.py": "_remembered",
        "mask/linear_pieces.py": "_uncut",
        "mixers/convolution.py": "rows_from_end",
        "mixers/doubling.py": "exchanges_of",
        "mixers/fragments.py": "rows_before",
        "mixers/roll.py": "rolled",
        "plan/linear.py": "chunks_of",
        "plan/plan.py": "_make_plan",
        "strategies/schedule.py": "make_schedule",
        "strategies/ulysses.py": "_geometry",
    },
    "one in a process": {
        "_compat.py": "_gloo_on_one_device",
        "kernels/sdpa.py": "_computed_shapes",
    },
    "attributes on objects of others": {
        "comm/point_to_point.py": "_cp_styles_started",
        "decoding.py": "_cp_styles_cache",
        "layout.py": "_cp_styles_cut",
        "styles/attention.py": "_context_parallel_core",
        "styles/module.py": "_context_parallel_calls",
        "styles/on_mesh_axis.py": "_cp_styles_applied",
    },
}
# What stays with torch or transformers for the life of the process.
REGISTERED = {
    "comm/point_to_point.py": "gather_numbers",
    "engine/custom_ops.py": "attention attention_backward",
    "styles/dtensors.py": "sdpa_handlers",
    "checks/gradient_watch.py": "register_optimizer_step_post_hook",
    "integrations/transformers.py": "AttentionInterface AttentionMaskInterface",
}

_TABLES = {
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "WeakSet",
    "WeakIdKeyDictionary",
    "ContextVar",
    "OrderedDict",
    "LatestEntries",
}
_TABLES |= {"count", "dict", "set", "list", "Counter", "defaultdict", "deque"}
_CACHES = {"cache", "lru_cache", "remembered"}
_CHANGES = {"append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "remove", "move_to_end"}
# What the package writes on tensors, modules, classes and meshes.
_ATTRIBUTE = re.compile(r"_(?:cp_styles|context_parallel)_\w+")


def called(node: ast.expr) -> str:
    """The last name of what is called, or decorates."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]


def state_of(source: str) -> Iterator[str]:
    """Names of what outlives a call: tables of modules and classes, caches, ``global``, attributes on other objects."""
    tree = ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    changed = {name for function in functions for name in changed_in(function)}
    for node in [*tree.body, *(each for one in classes for each in one.body)]:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        value, target = node.value, ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        empty = (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
        filled = isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp) and target in changed
        if empty or filled or (isinstance(value, ast.Call) and called(value) in _TABLES):
            yield target
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(called(each) in _CACHES for each in node.decorator_list):
            yield node.name
        if isinstance(node, ast.Global):
            yield from node.names
        name = node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else None
        if isinstance(name, str) and _ATTRIBUTE.fullmatch(name):
            yield name


def changed_in(function: ast.FunctionDef) -> Iterator[str]:
    """Names of the tables whose entries a function changes. (Attributes of objects are not tables of a module.)"""
    for node in ast.walk(function):
        is_set = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
        if is_set or (isinstance(node, ast.Attribute) and node.attr in _CHANGES):
            yield ast.unparse(node.value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("seen = {}", ["seen"]),
        ("seen: WeakSet[int] = WeakSet()", ["seen"]),
        ("known = {1: 2}\ndef f(x):\n    known[x] = 3", ["known"]),
        ("known = {1: 2}\ndef f(x):\n    known.update(x)", ["known"]),
        ("known = {1: 2}\ndef f(x):\n    return known[x]", []),
        ("class A:\n    seen = []", ["seen"]),
        ("class A:\n    @lru_cache(maxsize=3)\n    def f(self): ...", ["f"]),
        ("def f():\n    global n\n    n = 1", ["n"]),
        ("def f(x):\n    x._cp_styles_y = 1", ["_cp_styles_y"]),
        ("def f():\n    seen = {}\n    seen[1] = 2", []),
    ],
)
def test_the_reader_of_state(source: str, expected: list[str]):
    assert list(state_of(source)) == expected


def test_all_state_is_of_a_kind_that_contributing_explains():
    state = {(file, name) for files in STATE.values() for file, names in files.items() for name in names.split()}
    assert state == {
        (path.relative_to(PACKAGE).as_posix(), name) for path in package_files() for name in state_of(path.read_text())
    }
    (text,) = re.findall(r"### State that outlives a call\n(.*?)\n## ", CONTRIBUTING.read_text(), re.DOTALL)
    assert re.findall(r"^\| ([a-z].*?) \|", text, re.MULTILINE)[1:-1] == list(STATE)


# What registers functions of the package with torch or with transformers.
_REGISTERS = re.compile(
    r'torch\.library\.define\(\s*"cp_styles::(\w+)"|\b(register_optimizer_step_post_hook|\w+Interface)\b[\w.]*\('
    r"|\b(sdpa_handlers)\(\)"
)


def test_all_that_is_registered():
    registered: dict[str, str] = {}
    for path in package_files():
        if names := [next(filter(None, groups)) for groups in _REGISTERS.findall(code_of(path))]:
            registered[path.relative_to(PACKAGE).as_posix()] = " ".join(names)
    assert registered == REGISTERED


def refuse_cycles(edges: dict[str, set[str]]) -> None:
    """``edges``: what each imports of the others."""
    while edges:
        free = [module for module, imported in edges.items() if not imported & edges.keys()]
        assert free, f"these import each other: {sorted(edges)}"
        for module in free:
            del edges[module]


def test_no_cycles_within_a_row():
    edges: dict[str, set[str]] = {}
    for path in package_files():
        edges.setdefault(module_of(path), set()).update(imports_of_file(path) - {module_of(path)})
    refuse_cycles(edges)


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def test_no_cycles_between_files():
    """Nor between files of one folder."""
    files = {dotted(path): path for path in package_files()}
    edges: dict[str, set[str]] = {}
    for name, path in files.items():
        nodes = nodes_of(path)
        plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        named = [(n.module or "", alias.name) for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names]
        assert not [n for n in nodes if isinstance(n, ast.ImportFrom) and n.level], f"{name} has a relative import"
        found = plain | {f"{base}.{each}" if f"{base}.{each}" in files else base for base, each in named}
        edges[name] = (found & files.keys()) - {name}
    refuse_cycles(edges)


# What the code of a rule looks like, and the one place where it may stand.
WRITTEN_ONCE = {
    # In explain a strategy runs without data; strategies call each other.
    r"(?:strategy|inner|chosen)\.(?:forward|backward)\(": {"engine/custom_ops.py", "explain/dry_run.py"},
    r"DTensor\.from_local\(": {"styles/dtensors.py"},
    r"\.__class__ = ": {"subclassing.py"},
    r"\btorch\.sigmoid\(": {"kernels/merge.py"},  # gates of layers are methods of their tensors
    r"\b(?:P2POp|batch_isend_irecv|isend|irecv)\(": {"comm/point_to_point.py"},
    r"\b_resolve_process_group\b": {"_compat.py"},
    r"base, extra = divmod\(|joined\[-1\]\[1\] ==": {"layout.py"},
    r"is_inference\(\) else \w+\._version": {"checksum.py"},
}
INSIDE = ("strategies/", "kernels/")  # of a strategy or a kernel around another one


@pytest.mark.parametrize(("pattern", "places"), WRITTEN_ONCE.items())
def test_rules_are_written_in_one_place(pattern: str, places: set[str]):
    found = {path.relative_to(PACKAGE).as_posix() for path in package_files() if code_has(pattern, path)}
    if "strategy" in pattern:
        found = {name for name in found if not name.startswith(INSIDE)}
    assert found == places


def code_has(pattern: str, path: Path) -> bool:
    """Whether a line of a file's code, not of its docstrings and comments, has the pattern."""
    return re.search(pattern, code_of(path)) is not None


def code_of(path: Path) -> str:
    """A file without its docstrings and comments."""
    return re.sub(r'"""(?:.|\n)*?"""|#.*', "", path.read_text())


def test_only_compat_names_what_torch_keeps_private():
    """``torch._x``, ``torch.a._x`` and ``from torch.a import _x``; an attribute of an object is not seen here."""
    for path in package_files():
        if module_of(path) == "_compat":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute):
                parts = ast.unparse(node).split(".")
                if parts[0] not in ("torch", "dist"):
                    continue
            else:
                continue
            private = [part for part in parts if part.startswith("_") and not part.endswith("__")]
            # The first is documented, the second holds the type of torch.ops.aten.*, which has no other name.
            assert not set(private) - {"_python_dispatch", "_ops"}, f"{path.name}: {private} belongs in _compat.py"


@pytest.mark.parametrize(
    ("line", "package", "expected"),
    [
        ("import cp_styles.layout as x", ["cp_styles"], ["layout"]),
        ("from cp_styles.kernels.base import Kernel", ["cp_styles"], ["kernels"]),
        ("from cp_styles import layout, Ring", ["cp_styles"], ["layout", "__init__"]),
        ("from . import layout", ["cp_styles"], ["layout"]),
        ("from ..layout import contiguous", ["cp_styles", "styles"], ["layout"]),
        ("def f():\n    from .base import Kernel", ["cp_styles", "kernels"], ["kernels"]),
        ("import torch.distributed, os", ["cp_styles"], []),
    ],
)
def test_the_reader_of_imports(line: str, package: list[str], expected: list[str]):
    assert list(imports_of(line, package)) == expected


def test_the_engine_knows_no_dtensor():
    """DTensor is the form of a module's inputs and outputs. Strategies, kernels and plans know it as little."""
    for path in package_files():
        if module_of(path) in ("engine", "strategies", "kernels", "plan", "mask"):
            assert not re.search(r"torch\.distributed\.tensor\b|import .*\bDTensor\b", code_of(path)), path.name


def test_the_engine_knows_no_guarantee():
    """What ranks compare, and what observes a model or its forwards, has a file of its own, and one list names it.

    Styles and blocks import that list, ``checks/__init__.py``, and no guarantee.
    """
    for path in package_files():
        if module_of(path) in ("comm", "engine", "functions", "intercept", "strategies"):
            assert "checks" not in imports_of_file(path), path.name
        elif module_of(path) in ("styles", "torch_api"):
            named = [node.module for node in nodes_of(path) if isinstance(node, ast.ImportFrom)]
            assert not [name for name in named if (name or "").startswith("cp_styles.checks.")], path.name


def test_walks_over_frames_are_in_one_place():
    """A generator's frames are the other one: which ``with`` is around a call that runs in a generator."""
    walks = {path.relative_to(PACKAGE).as_posix() for path in package_files() if code_has(r"\.f_back\b", path)}
    assert walks == {"_compat.py", "engine/scope.py"}
    assert code_of(PACKAGE / "_compat.py").count(".f_back") == 1


def test_no_two_classes_have_one_name():
    names = [node.name for path in package_files() for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
