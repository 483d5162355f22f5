"""Pages that mkdocs generates: a page for each public name, error codes, sources, and the pages of the root folder.

The package is parsed and not imported, so the site is built without jax and without devices.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from os.path import dirname, normpath, relpath
from pathlib import Path
from typing import Any, NamedTuple

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).parents[1]
MODULES = {
    "": "",
    "hooks": "loop.hooks",
    **{name: name for name in ("models", "data", "optim", "parallel", "pipeline", "moe", "collectives", "interop")},
    **{name: name for name in ("inspect", "planner", "plots", "bench")},
}
"""Public modules: name after `mp.`, and path in the package. `__all__` of a module lists its public names."""
TYPES = (
    "inspect.report.Report",
    "sharding.adapters.model.Model",
    "sharding.types.Decision",
    "sharding.types.Leaf",
    "training.lora.Lora",
    "training.sharding_table.ShardingTable",
    "training.state.TrainState",
)
"""Types that public functions return, and that no public module exports."""
ROOT_PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages outside docs/, and their names in the site."""
TOPICS = (
    "models", "strategies", "losses", "training", "runs", "loop", "huggingface", "explain", "diff", "planning", "pods",
    "pipeline", "moe", "collectives", "performance",
)  # fmt: skip
"""Order of the topic pages. Other pages of docs/ follow."""
EXAMPLES = "The examples of this reference run on eight devices, after these lines:"
ERRORS = """\
A `mp.MeshparError`, a subclass of `ValueError`, is an error caused by user input. Its message has four parts: where,
request, reason and fix. `error.code` is one of the codes below. A command prints the message and ends with exit code 2.
"""


class ExampleSections(griffe.Extension):
    """Read a section `Example:` of a docstring, which the package writes, as griffe's `Examples:`."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)


# ---- Public names ----------------------------------------------------------------------------------------------------


class Name(NamedTuple):
    """A public name."""

    label: str
    page: str
    value: griffe.Object

    @property
    def source(self) -> str:
        return Path(str(self.value.filepath)).relative_to(ROOT).as_posix()


@functools.cache
def package() -> griffe.Module:
    """Return the parsed package."""
    return griffe.load("meshpar", search_paths=[ROOT], allow_inspection=False)  # type: ignore[return-value]


def module_of(below: str) -> griffe.Module:
    """Return the module `mp.<below>`, or the package for an empty name."""
    return package()[MODULES[below]] if below else package()  # type: ignore[return-value]


@functools.cache
def public_names() -> dict[str, list[Name]]:
    """Return the public names of each module. A name that two modules export has a single page."""
    names: dict[str, Name] = {}
    listed: dict[str, list[Name]] = {}
    for below in MODULES:
        module = module_of(below)
        words = [str(word) for word in module.exports or () if word != "__version__"]
        listed[below] = []
        for word in sorted(words, key=str.lower):
            if below or word not in MODULES:
                value = module[word].final_target if module[word].is_alias else module[word]
                path = [*filter(None, (below, word))]
                # `Muon` and `muon` need different file names on systems that ignore case.
                suffix = "-class" if value.is_class and word.lower() in words else ""
                name = Name(f"mp.{'.'.join(path)}", f"reference/{'/'.join(path)}{suffix}.md", value)
                listed[below].append(names.setdefault(value.path, name))
    return listed


def result_types() -> list[Name]:
    """Return the types of results that no public module exports."""
    return [Name(path.split(".")[-1], f"reference/types/{path.split('.')[-1]}.md", package()[path]) for path in TYPES]


def summary_of(value: griffe.Object) -> str:
    """Return the first sentence of a docstring as the text of a table cell."""
    text = value.docstring.value if value.docstring else ""
    return " ".join(re.split(r"\n\s*\n|(?<=\.)\s", text.strip())[0].split()).replace("|", "\\|")


def page_of(name: Name) -> str:
    """Return the page of a public name: signature, docstring and a link to its source."""
    where = relpath(f"source/{name.source}.html", dirname(name.page))
    line = name.value.lineno or 1
    return (
        f"---\ntitle: {name.label}\n---\n\n::: {name.value.path}\n    options:\n      heading: {name.label}\n\n"
        f"Source: [{name.source}, line {line}]({where}#L-{line})\n"
    )


def table(names: Sequence[Name], folder: str) -> str:
    """Return a table of names with links to their pages, for a page in `folder`."""
    rows = [f"| [`{name.label}`]({relpath(name.page, folder)}) | {summary_of(name.value)} |" for name in names]
    return "\n".join(["| name | |", "|---|---|", *rows, ""])


def module_page(below: str) -> str:
    """Return the page of a module: its docstring and its names. The page of the root also lists the modules."""
    names, folder, docstring = public_names()[below], f"reference/{below}", module_of(below).docstring
    if below:
        return f"# mp.{below}\n\n{docstring.value if docstring else ''}\n\n{table(names, folder) if names else ''}"
    modules = [Name(f"mp.{one}", f"reference/{one}/index.md", module_of(one)) for one in MODULES if one]
    prelude = (ROOT / "docs" / "prelude.py").read_text()
    return (
        f"# API reference\n\n{EXAMPLES}\n\n```python\n{prelude}```\n\n## Names of mp\n\n{table(names, folder)}\n\n"
        f"## Modules\n\n{table(modules, folder)}\n\n## Types of results\n\n{table(result_types(), folder)}\n"
    )


# ---- Error codes -----------------------------------------------------------------------------------------------------


def error_codes() -> dict[str, dict[str, str]]:
    """Return cause and fix of each error code."""
    return tomllib.loads((ROOT / "docs" / "error_codes.toml").read_text())


def codes_in(definition: ast.stmt, described: Iterable[str]) -> set[str]:
    """Return the error codes in a function or class: literal codes, and described codes if it creates errors."""
    codes, creates_errors = set(), isinstance(definition, ast.Assign)
    for node in ast.walk(definition):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func).split(".")[-1]
            position = {"problem": 4, "MeshparError": 4, "check_cases": 2}.get(function, 99)
            values = [*node.args[position : position + 1], *(key.value for key in node.keywords if key.arg == "code")]
            creates_errors |= position < 99 or bool(values)
            codes |= {value.value for value in values if isinstance(value, ast.Constant)}
    texts = {node.value for node in ast.walk(definition) if isinstance(node, ast.Constant)}
    return codes | (texts & {*described} if creates_errors else set())


def raised_codes() -> dict[str, set[str]]:
    """Return the error codes in the package, and the files that contain each."""
    described, found = error_codes(), defaultdict(set)
    for path in sorted((ROOT / "meshpar").rglob("*.py")):
        for definition in ast.parse(path.read_text()).body:
            for code in codes_in(definition, described):
                found[code].add(path.relative_to(ROOT).as_posix())
    return found


def error_page() -> str:
    """Return the page of all error codes, with cause, fix and source files."""
    lines, raised = ["# Error codes", "", ERRORS], raised_codes()
    for code, text in sorted(error_codes().items()):
        files = ", ".join(f"[{path}](source/{path}.html)" for path in sorted(raised[code]))
        lines += ["", f"## {code}", "", text["cause"], "", f"**Fix**: {text['fix']}", "", f"Source: {files}"]
    return "\n".join(lines) + "\n"


# ---- The site --------------------------------------------------------------------------------------------------------


def local_links(text: str, folder: str, config: MkDocsConfig, files: Files) -> str:
    """Redirect the links of a page in `folder` to pages of the site and to copies of files outside of docs/."""

    def redirected(match: re.Match[str]) -> str:
        target, heading = match[1], match[2] or ""
        path = normpath(f"{folder}/{target}")
        place = ROOT_PAGES.get(path, path.removeprefix("docs/"))
        if place == path and not files.get_file_from_path(path):
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
        return f"]({place}{heading})"

    return re.sub(r"\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)", redirected, text)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages and the navigation."""
    topics = {Path(file.src_uri).stem: file.src_uri for file in files.documentation_pages()}
    topics.pop("index")

    def add(place: str, content: str) -> str:
        files.append(File.generated(config, place, content=content))
        return place

    for path, place in ROOT_PAGES.items():
        add(place, local_links((ROOT / path).read_text(), ".", config, files))
    reference: list[Any] = [add("reference/index.md", module_page(""))]
    written: set[str] = set()
    for below, names in public_names().items():
        places = [add(f"reference/{below}/index.md", module_page(below))] if below else []
        for name in names:
            if name.page not in written:
                written.add(name.page)
                places.append(add(name.page, page_of(name)))
        reference.append({f"mp.{below}" if below else "mp": places})
    reference.append({"Types of results": [add(name.page, page_of(name)) for name in result_types()]})
    add("errors.md", error_page())

    style = HtmlFormatter(full=True, linenos="inline", lineanchors="L", style="friendly")
    all_names = [*result_types(), *(name for names in public_names().values() for name in names)]
    for source in {name.source for name in all_names}.union(*raised_codes().values()):
        style.title = source
        add(f"source/{source}.html", highlight((ROOT / source).read_text(), PythonLexer(), style))

    ordered = [topics.pop(topic) for topic in TOPICS if topic in topics]
    config.nav = [
        {"Start": ["index.md", "overview.md"]},
        {"Guide": [*ordered, *sorted(topics.values())]},
        {"API reference": reference},
        {"Error codes": "errors.md"},
        {"Project": ["contributing.md", "changelog.md"]},
    ]
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect the links of pages in docs/ to files outside of docs/."""
    return local_links(markdown, "docs", config, files) if page.file.src_dir else markdown
