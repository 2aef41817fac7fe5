"""What an editor shows of a public name is all that a user needs: complete signatures, and docstrings that fit them.

Public is what the site's API reference shows: the names that ``cp_styles`` exports, and those of the modules that
``tutorials/site/hooks.py`` lists, with their public methods.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import cp_styles

ROOT = Path(__file__).parents[2]
(LISTED,) = re.findall(r"^(MODULES = .*?\n)(?=TITLES)", (ROOT / "tutorials/site/hooks.py").read_text(), re.M | re.S)
MODULES = ["cp_styles", *(f"cp_styles.{name}" for name in re.findall(r'"([\w.]+)"', LISTED))]

# Their callers choose the arguments: other libraries hand on what their versions have, and a rank's function its own.
OPEN = {
    "run_ranks",
    "ContextParallelTrainer.evaluation_loop",
    "flex_attention",
}


class Public(NamedTuple):
    """A function, a class or a method that users call; ``doc`` is what an editor shows of it."""

    name: str
    function: Callable[..., Any]
    doc: str
    overrides: bool = False  # a method of a base class of this package, which says the rest


def is_ours(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").startswith("cp_styles")


def exported() -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name in MODULES:
        module = importlib.import_module(name)
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", None) == name]
        for each in getattr(module, "__all__", [each for each in own if not each.startswith("_")]):
            value = getattr(module, each)
            if id(value) not in seen and is_ours(value) and (inspect.isclass(value) or inspect.isfunction(value)):
                seen.add(id(value))
                yield each, value


def members(name: str, cls: type) -> Iterator[Public]:
    """The constructor of a class, and its public methods and properties that this package defines."""
    init = cls.__init__
    if is_ours(init) and not issubclass(cls, Exception):
        docs = [inspect.getdoc(base) or "" for base in cls.__mro__ if is_ours(base)]  # fields of a base are said there
        yield Public(name, init, "\n".join([*docs, init.__doc__ or ""]))
    for key, value in vars(cls).items():
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        plain = plain.fget if isinstance(value, property) else plain
        plain = plain.func if isinstance(value, functools.cached_property) else plain
        if key.startswith("_") or not inspect.isfunction(plain):
            continue
        above = [base for base in cls.__mro__[1:] if is_ours(base) and key in vars(base)]
        yield Public(f"{name}.{key}", plain, inspect.getdoc(getattr(cls, key)) or "", bool(above))


def public() -> Iterator[Public]:
    for name, value in exported():
        if inspect.isclass(value):
            yield from members(name, value)
        else:
            yield Public(name, value, inspect.getdoc(value) or "")


PUBLIC = list(public())
NAMES = [each.name for each in PUBLIC]


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [each for each in inspect.signature(function).parameters.values() if each.name not in ("self", "cls")]


def test_all_of_the_reference_is_looked_at():
    assert {"context_attention", "Ulysses", "KVCache.append", "seq_to_heads", "explain", "prefill"} <= set(NAMES)
    assert len(NAMES) > 200
    assert set(NAMES) >= OPEN


def test_a_docstring_for_each():
    undocumented = [name for name, value in exported() if not inspect.getdoc(value)]
    assert not undocumented, "without a docstring"
    inherited = [name for name, value in exported() if inspect.isclass(value) and not vars(value).get("__doc__")]
    assert not inherited, "with the docstring of a base class"


def test_the_signature_is_complete():
    wrong = []
    for each in PUBLIC:
        known, signature = parameters(each.function), inspect.signature(each.function)
        kinds = {parameter.kind for parameter in known}
        if each.name not in OPEN and kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}:
            wrong.append(f"{each.name}{signature} hides arguments")
        if each.overrides:  # editors take the types of the base class
            continue
        bare = [parameter.name for parameter in known if parameter.annotation is parameter.empty]
        if bare:
            wrong.append(f"{each.name}: no type of {bare}")
        if signature.return_annotation is signature.empty:
            wrong.append(f"{each.name}: no type of the result")
    assert not wrong


def raised(function: Callable[..., Any]) -> set[str]:
    """Errors of users that a function raises itself, not in what it calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    thrown = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    errors = {ast.unparse(error.func) for error in thrown if isinstance(error, ast.Call)}
    return errors & {"ValueError", "TypeError", "NotImplementedError", "RuntimeError"}


def test_the_docstring_names_errors():
    known, wrong, looked_at = dict(exported()), [], 0
    for each in PUBLIC:
        checks = getattr(known.get(each.name), "__post_init__", each.function)  # a dataclass' own check
        try:
            errors = raised(checks)
        except OSError:  # the constructor of a dataclass without a check
            continue
        looked_at += 1
        left_out = sorted(error for error in errors if error not in each.doc)
        if left_out and not each.overrides:
            wrong.append(f"{each.name} raises {left_out}, and its docstring does not say when")
    assert looked_at > len(PUBLIC) - 20  # the rest are constructors of dataclasses without a check
    assert not wrong


def examples() -> Iterator[tuple[str, str]]:
    """The blocks of code in docstrings: of public names, and of the modules they are in."""
    docs = {name: inspect.getdoc(value) or "" for name, value in exported()} | {each.name: each.doc for each in PUBLIC}
    docs |= {name: importlib.import_module(name).__doc__ or "" for name in MODULES}
    for name, doc in docs.items():
        for block in re.findall(r"::\n\n((?:(?: {4}.*)?\n?)+)", doc + "\n"):
            yield name, textwrap.dedent(block).strip("\n")


CODE = [(name, code) for name, code in examples() if re.search(r"\w\(", code) and "->" not in code and "$" not in code]


def test_examples_call_what_there_is():
    """Names that the examples call exist, and take these arguments."""
    known, wrong = dict(exported()), []
    for name, code in CODE:
        for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
            owner, _, called = ast.unparse(call.func).rpartition(".")
            function = None if owner == "sharder" else known.get(called)  # a method of that name
            spread = any(isinstance(part, ast.Starred) for part in call.args) or any(
                key.arg is None for key in call.keywords
            )
            omitted = any(isinstance(part, ast.Constant) and part.value is ... for part in call.args)
            if function is not None and not spread and not omitted:
                try:
                    inspect.signature(function).bind(*call.args, **{key.arg: key.value for key in call.keywords})
                except TypeError as error:
                    wrong.append(f"{name}: {ast.unparse(call)}: {error}")
    assert len(CODE) > 25
    assert not wrong


def test_the_package_exports_what_it_says():
    assert cp_styles.__all__ == sorted(cp_styles.__all__)
    assert all(hasattr(cp_styles, name) for name in cp_styles.__all__)


def imports_of_package(path: Path) -> Iterator[tuple[str, str]]:
    """Modules of this package, and names in them, that the imports of a file or notebook name."""
    source = path.read_text()
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(source)["cells"] if cell["cell_type"] == "code"]
        source = "".join(line for cell in cells for line in [*cell["source"], "\n"] if not line.startswith(("%", "!")))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cp_styles"):
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_tests_and_tutorials_import_what_there_is():
    """No type checker reads notebooks and tests."""
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tutorials").glob("*.py"), *(ROOT / "tutorials").glob("*.ipynb")]
    imports = sorted({each for path in files for each in imports_of_package(path)})
    assert ("cp_styles.mixers.fragments", "split_fragments") in imports  # of a notebook
    optional = ("cp_styles.kernels.fused_merge",)  # Triton
    for module, name in imports:
        if module not in optional:
            found = hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")
            assert found, f"{module} has no {name}"


def test_old_names_are_gone_and_the_page_has_them():
    """As of any module: hasattr is False, and importing all names does not touch them."""
    page = (ROOT / "tutorials/migration.md").read_text().split("## From an earlier release")[1]
    lines = re.findall(r"^\| (.*?) \|", page, re.M)
    imports = [name for line in lines for name in re.findall(r"`(\w+)`", line.replace("from cp_styles import ", ""))]
    old = [name for name in imports if name not in cp_styles.__all__]
    assert {"KVCache", "context_parallel", "JointLayout", "HeadTailLoadBalancer"} <= set(old)
    for name in old:
        assert not hasattr(cp_styles, name)
        with pytest.raises(AttributeError, match=f"cp_styles has no '{name}'. The page Migration lists"):
            getattr(cp_styles, name)
    names: dict[str, Any] = {}
    exec("from cp_styles import *", names)
    assert set(cp_styles.__all__) <= names.keys()


def test_old_modules_are_gone_and_the_page_has_the_new_ones():
    page = (ROOT / "tutorials/migration.md").read_text().split("## From an earlier release")[1]
    modules = dict(re.findall(r"^\| `(cp_styles[\w.]+)` \| `(cp_styles[\w.]+)` \|$", page, re.M))
    assert {"cp_styles.mask", "cp_styles.layout", "cp_styles.decoding", "cp_styles.mixers.by_name"} <= modules.keys()
    for old, new in modules.items():
        path = ROOT / old.replace(".", "/")  # and not find_spec, which looks into other installations too
        assert not path.with_suffix(".py").exists()
        assert not (path / "__init__.py").exists()
        importlib.import_module(new)


@pytest.mark.nightly  # with each version of torch; a process takes four seconds to import it
def test_the_import_prints_nothing():
    """A name that one of torch's versions calls deprecated prints a line when it is imported or called."""
    code = "import sys, torch.distributed.tensor.parallel; sys.stderr.write('|'); import cp_styles"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert printed.partition("|")[1:] == ("|", "")
