"""What mkdocs does beside the pages of tutorials/: the README, the notebooks, the API reference and links to sources.

Nothing is written to the checkout. The sources stay as they are read elsewhere: links in them are those of the
repository, and are changed to links of the site here.
"""

from __future__ import annotations

import ast
import base64
import json
import posixpath
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from notebooks import one_kernel  # beside this file

log = get_plugin_logger(__name__)

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "tutorials"
# Pages from elsewhere in the repository, by their path in it.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# The modules whose names are not all exported from cp_styles, with a page for each.
MODULES = ("torch_api", "collectives", "explain", "verify", "testing", "kernels", "plan", "mixers")
MODULES += ("batch", "functions.decode", "functions.joint_layout", "strategies")
MODULES += ("integrations.transformers", "integrations.trainers")
TITLES = {
    "batch": "Batches: a training step, labels, loss, gradients",
    "comm": "Agreement of ranks",
    "engine": "Scopes and checks",
    "functions.decode": "Decoding",
    "functions.joint_layout": "Joint layouts",
    "layouts": "Layouts",
    "masks": "Masks",
    "mixers": "Linear attention, state spaces, convolutions",
    "plan": "Plans",
    "strategies": "Strategies",
    "torch_api": "torch's context_parallel",
    "integrations.transformers": "transformers",
    "integrations.trainers": "Trainers",
}
# What the docstrings take from reStructuredText, where docstrings.py has left it.
_LEFT = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>|::</p>|={5}")
_LINK = re.compile(r'\]\((?P<path>[^)#:" ]*)(?P<anchor>#[^)" ]+)?\)')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the pages of the API reference to the navigation."""
    for entry in config.nav or []:
        if "API reference" in entry:
            entry["API reference"] = ["api/index.md", *(f"api/{group}.md" for group in sorted(reference()))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made here."""

    def add(path: str, content: str | bytes, *, in_nav: bool = True) -> None:
        inclusion = InclusionLevel.INCLUDED if in_nav else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, path, content=content, inclusion=inclusion))

    for source, path in PAGES.items():
        add(path, (ROOT / source).read_text())
    for path, notebook in notebooks(run=config.extra["run_notebooks"]):
        text, pictures = notebook_page(path, notebook)
        add(f"{path.stem}.md", text)
        for name, picture in pictures.items():
            add(name, picture)
    add("api/index.md", "# API reference\n\n" + "\n".join(overview()))
    for group, names in reference().items():
        add(f"api/{group}.md", api_page(group, names))
    texts = {TUTORIALS / file.src_uri: file.content_string for file in files.documentation_pages()}
    texts |= {ROOT / source: (ROOT / source).read_text() for source in PAGES}
    for path in sorted({target for page, text in texts.items() for target in sources_linked(page, text)}):
        add(f"source/{path}.md", source_page(path), in_nav=False)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Changes links of the repository to links of the site. All pages with such links are at its top. In a search the
    guides come before the reference."""
    page.meta.setdefault("search", {"boost": 0.5 if page.file.src_uri.startswith(("api/", "source/")) else 2})
    origin = {path: source for source, path in PAGES.items()}.get(page.file.src_uri, f"tutorials/{page.file.src_uri}")
    if page.file.src_uri.startswith(("api/", "source/")):
        return markdown
    return _LINK.sub(lambda link: f"]({of_the_site(link, ROOT / origin)})", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warns, and so fails a strict build, where a page of the reference shows markup."""
    shown = re.sub(r'<details class="mkdocstrings-source">.*?</details>', "", html, flags=re.DOTALL)
    if page.file.src_uri.startswith("api/") and (left := _LEFT.search(shown)):
        log.warning(f"{page.file.src_uri} shows markup: {shown[max(0, left.start() - 100) : left.end() + 60]}")
    return html


def of_the_site(link: re.Match[str], page: Path) -> str:
    """Where ``link``, on the ``page`` of the repository, points to on the site."""
    path, anchor = link["path"], link["anchor"] or ""
    if not path:
        return anchor
    target = in_repository(page, path)
    if target in PAGES:
        return PAGES[target] + anchor
    if target.startswith("tutorials/") and target.endswith(".ipynb"):
        return target.removeprefix("tutorials/").replace(".ipynb", ".md")
    if target.startswith("tutorials/") and not target.endswith(".py"):
        return target.removeprefix("tutorials/") + anchor
    return f"source/{target}.md{anchor}"


def in_repository(page: Path, path: str) -> str:
    return posixpath.normpath((page.parent.relative_to(ROOT) / path).as_posix())


def sources_linked(page: Path, text: str) -> Iterator[str]:
    """The files of the repository that ``text`` links to and that are no pages."""
    for link in _LINK.finditer(text):
        if link["path"] and (place := of_the_site(link, page)).startswith("source/"):
            yield place.removeprefix("source/").split(".md#")[0].removesuffix(".md")


def source_page(path: str) -> str:
    """A file of the repository; Markdown as a page, anything else as code."""
    head, text = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n", (ROOT / path).read_text()
    if path.endswith(".md"):
        return head + text
    language = "python" if path.endswith(".py") else "bash"
    return f'{head}# {path}\n\n`````{language} linenums="1"\n{text.rstrip()}\n`````\n'


def notebooks(*, run: bool) -> Iterator[tuple[Path, Any]]:
    """Each notebook with its path; with its outputs if they are ``run``, and else without."""
    paths = sorted(TUTORIALS.glob("*.ipynb"))
    if not run:
        yield from ((path, json.loads(path.read_text())) for path in paths)
        return
    with tempfile.TemporaryDirectory() as folder, one_kernel(lambda name: Path(tempfile.mkdtemp(dir=folder))) as kernel:
        for path in paths:
            yield path, kernel.executed(path)[0]


def notebook_page(path: Path, notebook: Any) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by name."""
    note = f"This page is a notebook: [{path.name}]({path.name})."
    lines: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [source, ""]
            if note:
                lines, note = [*lines, f"*{note}*", ""], ""
            continue
        lines += ["````python", source, "````", ""]
        printed = ""
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                lines += [*shown(printed), f"![What the cell above draws]({name})", ""]
                printed = ""
            else:
                printed += "".join(output.get("text", data.get("text/plain", "")))
        lines += shown(printed)
    return "\n".join(lines), pictures


def shown(printed: str) -> list[str]:
    return ['````text title="Output"', printed.rstrip(), "````", ""] if printed.strip() else []


def reference() -> dict[str, dict[str, str]]:
    """The pages of the API reference: for each part of the package, {name: dotted path by which users import it}."""
    pages: dict[str, dict[str, str]] = {}
    tree = ast.parse((ROOT / "cp_styles/__init__.py").read_text())
    exported = set(names_of(tree))
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("cp_styles."):
            group = statement.module.split(".")[1]
            for name in (alias.name for alias in statement.names if alias.name in exported):
                pages.setdefault(group, {})[name] = f"cp_styles.{name}"
    for module in MODULES:
        path = ROOT / "cp_styles" / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for name in names_of(ast.parse(file.read_text())):
            # A function that is named like the file it is in: the name alone would be the file's.
            inside = f"{name}.{name}" if (path / f"{name}.py").exists() else name
            pages.setdefault(module, {}).setdefault(name, f"cp_styles.{module}.{inside}")
    missing = exported - {name for names in pages.values() for name in names}
    if missing:
        raise ValueError(f"cp_styles exports what no page of the reference shows: {sorted(missing)}")
    return pages


def names_of(tree: ast.Module) -> list[str]:
    """``__all__``, or the public functions and classes that a module defines."""
    defined = []
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return ast.literal_eval(statement.value)
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and not statement.name.startswith("_"):
            defined.append(statement.name)
    return defined


def title_of(group: str) -> str:
    return TITLES.get(group, group.capitalize())


def api_page(group: str, names: dict[str, str]) -> str:
    """The docstring of the part of the package, then each name."""
    module = f"::: cp_styles.{group}\n    options:\n      members: false\n      show_root_heading: false\n"
    module += "      show_root_toc_entry: false\n"
    order = sorted(names, key=str.lower)
    return "\n\n".join([f"# {title_of(group)}", module, *(f"::: {names[name]}" for name in order)]) + "\n"


def overview() -> Iterator[str]:
    """Lines of a list: each page and the names on it."""
    for group, names in sorted(reference().items()):
        order = sorted(names, key=str.lower)
        links = ", ".join(f"[`{name}`]({group}.md#{names[name]})" for name in order)
        yield f"- [{title_of(group)}]({group}.md) (`cp_styles.{group}`): {links}"
