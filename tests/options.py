"""Which option of which public function or style is used by how many tests: python -m tests.options

Read from signatures and from the text of the tests; nothing is run. An option counts for a test where the test, or a
function, class or constant of tests/ that it leads to, passes it: by name, by place, by ``partial``, in a dict behind
``**``, or by way of a function that hands its keywords on. ``--empty`` prints only the options that no test uses.

It is an approximation: a dict whose keys are computed does not count, and what a test leads to need not run in it.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import cp_styles
from cp_styles import batch, collectives, decoding, joint_layout, torch_api

ROOT = Path(__file__).parents[1]
MODULES = (cp_styles, batch, collectives, decoding, joint_layout, torch_api)
# Columns of the table; all else that is public is listed after it.
DOORS = (
    "AttentionContextParallel",
    "ModuleContextParallel",
    "context_parallel",
    "context_attention",
    "context_flex_attention",
    "context_varlen_attention",
    "context_decode",
)

Pair = tuple[str, str]


@cache
def signatures() -> dict[str, inspect.Signature]:
    """Of what is public and can be called, by name."""
    public = {name: getattr(package, name) for package in MODULES for name in package.__all__}
    return {name: inspect.signature(value) for name, value in public.items() if _takes_options(value)}


def _takes_options(value: Any) -> bool:
    return callable(value) and not (isinstance(value, type) and issubclass(value, BaseException | Enum))


@cache
def parameters() -> dict[str, tuple[str, ...]]:
    """The names of all parameters, in their order."""
    return {
        name: tuple(each.name for each in found.parameters.values() if each.kind not in _VARIABLE)
        for name, found in signatures().items()
    }


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@cache
def optional() -> frozenset[Pair]:
    """(callable, parameter) of all parameters with a default."""
    return frozenset(
        (name, each.name)
        for name, found in signatures().items()
        for each in found.parameters.values()
        if each.default is not inspect.Parameter.empty
    )


@dataclass
class Definition:
    """A function, class or constant of a test module: what it passes, hands on, and leads to."""

    name: str
    node: ast.AST
    module: Module
    pairs: set[Pair] = field(default_factory=set)
    leads_to: set[tuple[str, str]] = field(default_factory=set)  # (module, name)
    hands_on: set[tuple[str, str]] = field(default_factory=set)  # callables that get its keywords; ("", public name)


@dataclass
class Module:
    """``names`` are the public callables by the module's name for them; ``others`` are (module, name) of tests/."""

    name: str
    definitions: dict[str, list[Definition]] = field(default_factory=lambda: defaultdict(list))
    names: dict[str, str] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)
    others: dict[str, tuple[str, str]] = field(default_factory=dict)


@cache
def modules() -> dict[str, Module]:
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        module = Module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        tree = ast.parse(path.read_text())
        for node in inside(tree):
            _note_import(node, module)
        for node in tree.body:
            for name in _defined(node):
                module.definitions[name].append(Definition(name, node, module))
        found[module.name] = module
    for module in found.values():
        for each in [each for several in module.definitions.values() for each in several]:
            _read(each)
    _follow_keywords(found)
    return found


@cache
def inside(node: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(node))


def _note_import(node: ast.AST, module: Module) -> None:
    if isinstance(node, ast.Import):
        module.packages |= {each.asname or each.name for each in node.names if each.name.startswith("cp_styles")}
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return
    for each in node.names:
        own = each.asname or each.name
        if node.module.startswith("cp_styles"):
            if each.name in parameters():
                module.names[own] = each.name
            else:
                module.packages.add(own)
        elif node.module.startswith("tests"):
            module.others[own] = (node.module, each.name)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in inside(target) if isinstance(name, ast.Name)]


def _callee(node: ast.expr, module: Module) -> tuple[str, str] | None:
    """("", public name), or (module, name) of a definition in tests/."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        base = node.value.id
        if base in module.packages and node.attr in parameters():
            return "", node.attr
        if base in module.others:  # from tests import fuzz
            return ".".join(module.others[base]), node.attr
    if isinstance(node, ast.Name):
        if node.id in module.names:
            return "", module.names[node.id]
        if node.id in module.others:
            return module.others[node.id]
        if node.id in module.definitions:
            return module.name, node.id
    return None


def _read(definition: Definition) -> None:
    module = definition.module
    functions = [each for each in inside(definition.node) if isinstance(each, ast.FunctionDef)]
    own_keywords = {each.args.kwarg.arg for each in functions if each.args.kwarg is not None}
    for node in inside(definition.node):
        if isinstance(node, ast.Name | ast.Attribute) and (found := _callee(node, module)) and found[0]:
            definition.leads_to.add(found)
        if not isinstance(node, ast.Call):
            continue
        called, args = node.func, node.args
        if isinstance(called, ast.Name) and called.id == "partial" and args:
            called, args = args[0], args[1:]
        targets = _targets(called, definition)
        if not targets:
            continue
        keys = {each.arg for each in node.keywords if each.arg}
        for each in node.keywords:
            if each.arg is None:
                keys |= _keys(each.value, definition)
                if isinstance(each.value, ast.Name) and each.value.id in own_keywords:
                    definition.hands_on |= targets
        for of, name in targets:
            if of == "":
                places = parameters()[name]
                more = set(places[: len(args)]) if not any(isinstance(x, ast.Starred) for x in args) else set()
                definition.pairs |= {(name, key) for key in keys | more}
            else:
                definition.pairs |= {(f"{of}:{name}", key) for key in keys}  # until keywords are followed


def _targets(called: ast.expr, definition: Definition) -> set[tuple[str, str]]:
    """What is called; of a parameter or a name that runs through a loop, all that stands in what it is drawn from."""
    module = definition.module
    target = _callee(called, module)
    if target is not None or not isinstance(called, ast.Name):
        return {target} if target is not None else set()
    if any(isinstance(node, ast.FunctionDef) and node.name == called.id for node in inside(definition.node)):
        return {(module.name, definition.name)}
    sources: list[ast.AST] = []
    for node in inside(definition.node):
        if isinstance(node, ast.For | ast.comprehension):
            held = {each.id for each in inside(node.target) if isinstance(each, ast.Name)}
            sources += [node.iter] if called.id in held else []
        elif isinstance(node, ast.FunctionDef) and called.id in {each.arg for each in node.args.args}:
            sources += node.decorator_list
    names = {each.id for source in sources for each in inside(source) if isinstance(each, ast.Name)}
    sources += [each.node for name in names for each in module.definitions.get(name, ()) if _is_constant(each.node)]
    found = {_callee(each, module) for source in sources for each in inside(source) if isinstance(each, ast.Name)}
    return {each for each in found if each is not None}


def _is_constant(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign)


def _keys(node: ast.expr, definition: Definition, seen: frozenset[str] = frozenset()) -> set[str]:
    """The keys of a dict behind ``**``, as far as they stand in the definition or in the module's constants."""
    names = {each.id for each in inside(node) if isinstance(each, ast.Name)} - seen
    found = _literal_keys(node)
    nodes = [definition.node]
    nodes += [each.node for name in names for each in definition.module.definitions.get(name, ())]
    for each in (inner for outer in nodes for inner in inside(outer)):
        targets = each.targets if isinstance(each, ast.Assign) else []
        targets = [each.target] if isinstance(each, ast.AnnAssign | ast.AugAssign) else targets
        if not targets and isinstance(each, ast.For):
            targets, value = [each.target], each.iter
        else:
            value = getattr(each, "value", None)
        for target in targets:
            held = {name.id for name in inside(target) if isinstance(name, ast.Name)}
            if held & names and isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                found.add(str(target.slice.value))
            elif held & names and isinstance(value, ast.expr):
                found |= _keys(value, definition, seen | names)
    for function in inside(definition.node):
        if isinstance(function, ast.FunctionDef) and names & {each.arg for each in function.args.args}:
            for decorator in function.decorator_list:
                found |= _literal_keys(decorator)
                for name in (each.id for each in inside(decorator) if isinstance(each, ast.Name)):
                    for constant in definition.module.definitions.get(name, ()):
                        found |= _literal_keys(constant.node)
    return found


def _literal_keys(node: ast.AST) -> set[str]:
    """Of all dicts in the text of ``node``."""
    found = set()
    for each in inside(node):
        if isinstance(each, ast.Dict):
            found |= {key.value for key in each.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "dict":
            found |= {keyword.arg for keyword in each.keywords if keyword.arg}
    return found


def _follow_keywords(found: dict[str, Module]) -> None:
    """What is passed to a definition that hands its keywords on is passed to whom it hands them."""
    every = [each for module in found.values() for several in module.definitions.values() for each in several]
    changed = True
    while changed:
        changed = False
        for each in every:
            for callee, key in list(each.pairs):
                name, _, of = callee.partition(":")
                for target in found[name].definitions.get(of, ()) if of and name in found else ():
                    more = {(f"{m}:{n}" if m else n, key) for m, n in target.hands_on} - each.pairs
                    each.pairs |= more
                    changed = changed or bool(more)


def uses() -> dict[Pair, set[str]]:
    """The tests that pass each option."""
    found: dict[Pair, set[str]] = {pair: set() for pair in optional()}
    for module in modules().values():
        for name, several in module.definitions.items():
            if name.startswith("test_"):
                for each in several:
                    for pair in {pair for reached in _reached(each) for pair in reached.pairs} & optional():
                        found[pair].add(f"{module.name}.{name}")
    return found


def _reached(definition: Definition) -> Iterator[Definition]:
    todo, seen = [definition], {id(definition)}
    while todo:
        each = todo.pop()
        yield each
        for module, name in each.leads_to:
            for other in modules()[module].definitions.get(name, ()) if module in modules() else ():
                if id(other) not in seen:
                    seen.add(id(other))
                    todo.append(other)


def main() -> int:
    found = uses()
    empty = sorted(pair for pair, tests in found.items() if not tests)
    if "--empty" not in sys.argv:
        options = list(dict.fromkeys(option for door in DOORS for option in parameters()[door]))
        print(f"| option | {' | '.join(DOORS)} |\n|{'---|' * (len(DOORS) + 1)}")
        for option in options:
            counts = [f"{len(found[door, option])}" if (door, option) in found else "" for door in DOORS]
            if any(counts):
                print(f"| {option} | {' | '.join(counts)} |")
        print()
        for name in sorted(set(parameters()) - set(DOORS)):
            counts = [f"{each} {len(found[name, each])}" for each in parameters()[name] if (name, each) in found]
            if counts:
                print(f"{name}: {', '.join(counts)}")
    print(f"{len(empty)} of {len(found)} options are in no test" + "".join(f"\n  {a}({b})" for a, b in empty))
    return int(bool(empty))


if __name__ == "__main__":
    sys.exit(main())
