"""Order of imports between folders, cost of `import meshpar`, and length of functions."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from meshpar.training.options import StepOptions
from tests.faults import FAULTS

PACKAGE = Path(__file__).parents[1] / "meshpar"
FOLDERS = (
    "sharding", "schedules", "parallel", "hardware", "data", "collectives", "layers", "pipeline", "moe", "optim",
    "training", "models", "pod", "loop", "inspect", "interop", "planner", "plots", "runs", "bench", "cli",
)  # fmt: skip
"""Folders from bottom to top. A folder may import from the folders before it."""
MAX_FUNCTION_LINES = 100
WITHOUT_FLAX = ("sharding", "parallel", "layers", "optim", "training", "data", "runs.recipe")


@cache
def modules() -> list[str]:
    """Return the dotted names of all modules, without `meshpar`. A package has the name of its folder."""
    dotted = (path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".") for path in PACKAGE.rglob("*.py"))
    return sorted(name.removesuffix(".__init__") for name in dotted if name != "__init__")


@cache
def source_of(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(), str(path))


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of each import in a file; `from a import b` has the name `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports from the top, `from meshpar.x import y`"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def referenced(module: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each module that a module imports, also in functions, for types only and by string."""
    for node in ast.walk(source_of(module)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from (found for found in imports(ast.Module([node], [])) if found[1].startswith("meshpar."))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"meshpar(\.\w+)+", str(node.value)):
            yield node.lineno, str(node.value)


def test_folders_are_listed() -> None:
    assert {module.split(".")[0] for module in modules()} == {*FOLDERS, "__main__"}


def test_imports_follow_the_order_of_folders() -> None:
    wrong = []
    for module in modules():
        folder = module.split(".")[0].replace("__main__", "cli")
        for line, name in referenced(module):
            target = name.split(".")[1]
            if target in FOLDERS and FOLDERS.index(target) > FOLDERS.index(folder):
                wrong.append(f"{module}, line {line}: `{folder}` is below `{target}` and must not import `{name}`")
    assert not wrong, "\n".join(wrong)


def test_only_the_version_is_imported_from_the_package_root() -> None:
    wrong = {}
    for module in modules():
        tree = source_of(module)
        taken = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "meshpar"
        }
        submodules = {name.split(".")[1] for _, name in imports(tree) if name.startswith("meshpar.")}
        if through_the_package := taken - submodules - {"__version__"}:
            wrong[module] = sorted(through_the_package)
    assert not wrong, f"these of `meshpar` go around the list: import their modules: {wrong}"


@pytest.mark.parametrize(
    ("folders", "packages", "exceptions"),
    [
        (WITHOUT_FLAX, {"flax"}, ("sharding.adapters.linen", "sharding.adapters.nnx", "training.lora")),
        (("schedules",), {"jax", "flax"}, ()),
    ],
)
def test_folders_do_not_import_some_packages(folders, packages, exceptions) -> None:
    others = [module for module in modules() if module.startswith(folders) and module not in exceptions]
    assert not [
        (module, line, name)
        for module in others
        for line, name in imports(source_of(module))
        if name.split(".")[0] in packages
    ]


def cyclic_modules() -> set[str]:
    """Return the modules that import themselves indirectly, including imports inside functions and for types only."""
    names = {f"meshpar.{module}" for module in modules()}
    imported: dict[str, set[str]] = {}
    for module in modules():
        targets = {name if name in names else name.rpartition(".")[0] for _, name in imports(source_of(module))}
        # Packages import the modules of their public names only when a name is used.
        is_package = (PACKAGE.joinpath(*module.split(".")) / "__init__.py").exists()
        imported[f"meshpar.{module}"] = set() if is_package else (targets & names) - {f"meshpar.{module}"}
    while True:
        further = {module: over.union(*(imported[name] for name in over)) for module, over in imported.items()}
        if further == imported:
            return {module.removeprefix("meshpar.") for module, over in imported.items() if module in over}
        imported = further


def test_step_options_are_read_only_in_training() -> None:
    """Other folders read the `Execution` that an engine resolves from the options."""
    fields = [field.name for field in dataclasses.fields(StepOptions)]
    readers = {
        module
        for module in modules()
        for node in ast.walk(source_of(module))
        if isinstance(node, ast.Attribute) and node.attr in fields and ast.unparse(node.value).endswith("options")
    }
    assert {module for module in readers if not module.startswith("training.")} == set()
    assert "training.execution" in readers


def test_import_graph_has_no_cycles() -> None:
    assert cyclic_modules() == set()


def test_functions_are_short() -> None:
    """Docstrings do not count."""
    lengths = {}
    for module in modules():
        for node in ast.walk(source_of(module)):
            if isinstance(node, ast.FunctionDef):
                docstring = node.body[0] if ast.get_docstring(node) is not None else None
                documented = 0 if docstring is None else (docstring.end_lineno or 0) - docstring.lineno + 1
                lengths[module, node.lineno] = (node.end_lineno or 0) - node.lineno + 1 - documented
    assert max(lengths.values()) <= MAX_FUNCTION_LINES, max(lengths, key=lengths.__getitem__)
    assert sum(length <= 40 for length in lengths.values()) >= 0.9 * len(lengths)


def test_class_names_are_unique() -> None:
    """Public classes only."""
    homes: dict[str, list[str]] = {}
    for module in modules():
        for node in source_of(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert not twice, twice


HEAVY = ["flax", "optax", "grain", "orbax", "tensorstore", "matplotlib", "rich", "tokenizers", "pyarrow", "sklearn"]


@pytest.mark.parametrize(
    ("statement", "without"),
    [
        ("import meshpar, meshpar.cli.main, meshpar.data", ["jax", *HEAVY]),
        (
            "import meshpar.pod.launch, meshpar as mp, meshpar.models as models; models.llama3_8b().num_params\n"
            "mp.MeshSpec, mp.Rules, mp.Precision, mp.constrain, [getattr(mp.data, name) for name in mp.data.__all__]",
            HEAVY,
        ),
    ],
)
def test_import_loads_only_required_packages(statement: str, without: list[str]) -> None:
    code = f"{statement}\nimport sys\nprint(*[name for name in {without!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_plain_step_loads_no_optional_modules() -> None:
    """The packages that the README names are attributes of meshpar."""
    code = (
        "import sys, meshpar as mp; mp.ddp(); mp.train_step(lambda model, batch, key: (0, {})); print(*sys.modules)\n"
        "mp.collectives.all_reduce; assert 'meshpar.pipeline' not in sys.modules\n"
        "mp.pipeline.scan_layers; assert 'meshpar.moe' not in sys.modules; mp.moe.MoE"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    packages = {".".join(name.split(".")[:2]) for name in done.stdout.split() if name.startswith("meshpar.")}
    loaded = ("sharding", "parallel", "hardware", "layers", "optim", "training")
    assert packages == {f"meshpar.{folder}" for folder in loaded}


def test_planted_faults_match_source_lines() -> None:
    for fault in FAULTS:
        assert (PACKAGE / fault.file).read_text().count(fault.old) == 1, fault.name
