"""Imports run down the house's list only, importing meshpar stays light, and functions stay short.

A new module is added to `HOUSE` with what it may import. What it names brings along whatever that stands on, so `step`,
which names `state`, may use `rules` too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.faults import FAULTS

PACKAGE = Path(__file__).parents[1] / "meshpar"
ABOVE = "everything above"

HOUSE: dict[str, list[str] | str] = {
    "sharding.lazy": [],
    "sharding.printing": [],
    "training.interrupts": [],
    "sharding.errors": [],
    "commands.roll": ["sharding.errors"],
    "commands.launch": ["commands.roll"],
    "sharding.host": ["sharding.errors"],
    "sharding.types": ["sharding.host"],
    "sharding.mesh": ["sharding.types"],
    "sharding.rules": ["sharding.types", "sharding.mesh"],
    "sharding.lay": ["sharding.mesh"],
    "sharding.context": ["sharding.rules", "sharding.lay"],
    "sharding.regions": ["sharding.context"],
    "sharding.activations": ["sharding.context"],
    "sharding.adapters": ["sharding.activations"],
    "training.reports": ["sharding.context"],
    "training.losses": ["training.reports"],
    "training.products": ["sharding.types"],
    "training.precision": ["sharding.context", "sharding.regions", "training.products"],
    "training.interleaved": ["sharding.activations", "training.reports"],
    "training.slice_sums": ["sharding.lay"],
    "training.layers": ["training.precision", "training.interleaved"],
    "pipeline.schedules": ["sharding.types"],
    "parallel": ["sharding.rules", "pipeline.schedules"],
    "training.moments": ["sharding.types"],
    "training.muon": ["sharding.context"],
    "sharding.table": [
        "sharding.printing",
        "parallel",
        "sharding.context",
        "sharding.adapters",
        "training.precision",
        "training.moments",
    ],
    "training.batch": ["parallel", "sharding.context"],
    "training.state": ["sharding.table", "training.batch", "training.muon"],
    "training.ema": ["training.state"],
    "training.lora": ["sharding.regions", "training.layers", "training.state"],
    "training.xla": ["sharding.types"],
    "training.options": ["training.layers", "training.losses", "training.xla"],
    # Arithmetic that kernels use, too: algorithm="auto" asks it, while a program is traced, what a message would take.
    "planner.catalogue": [],
    "planner.units": ["sharding.types"],
    "planner.hardware": ["sharding.types", "planner.catalogue"],
    "planner.cost": ["planner.hardware"],
    "planner.accounts": ["sharding.printing", "planner.cost", "planner.units"],
    "planner.choice": ["planner.accounts"],
    "planner.calculators": ["planner.accounts"],
    "collectives": ["sharding.lazy", "sharding.types", "sharding.lay", "planner.choice"],
    "training.sums": ["training.state", "training.options", "training.losses"],
    "pipeline": ["collectives", "training.layers", "training.sums", "pipeline.schedules"],
    "training.engines": ["training.sums", "training.slice_sums", "collectives", "pipeline"],
    "training.step": ["training.sums", "training.reports"],
    "data": ["sharding.lazy", "sharding.types"],
    "training.coordination": ["sharding.types"],
    "training.watchdog": ["training.coordination"],
    "training.checkpoint": ["training.ema"],
    "training.verify": ["training.step", "training.checkpoint", "pipeline.schedules"],
    "training.loop": ["training.step", "training.interrupts", "training.watchdog", "data", "training.checkpoint"],
    "training.goodput": ["training.loop"],
    "training.writers": ["training.loop"],
    "training.profile": ["training.loop"],
    "moe": ["collectives", "sharding.regions", "training.layers", "training.reports", "training.state"],
    "training.expert_load": ["training.loop", "moe"],
    "models": ["parallel", "sharding.adapters", "training.layers", "training.losses", "moe"],
    "interop": ["training.interrupts", "models", "training.checkpoint", "training.lora"],
    "planner": ["parallel", "planner.choice"],
    "compiled": ABOVE,
    "planner.workload": ABOVE,
    "planner.layout": ["planner.workload"],
    "planner.memory": ["planner.layout"],
    "planner.update": ["planner.layout"],
    "planner.steptime": ["planner.memory", "planner.update"],
    "planner.search": ["planner.steptime"],
    "planner.advice": ["planner.workload"],
    "planner.growth": ["planner.search"],
    "planner.plan": ["planner.search", "planner.advice"],
    "bench": ABOVE,
    "commands.plots": ABOVE,
    "commands.recipe": ["training.loop", "training.lora"],
    "bench.run": ABOVE,
    "commands": ABOVE,
    "__main__": ABOVE,
    "sharding": [],
    "training": [],
}
MOST_LINES = 60
SPINE = ["sharding", "parallel", "training", "data", "commands.recipe"]


@cache
def modules() -> list[str]:
    """Every module below meshpar, dotted; a package goes by its own name."""
    dotted = (path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".") for path in PACKAGE.rglob("*.py"))
    return sorted(name.removesuffix(".__init__") for name in dotted if name != "__init__")


def entry_of(module: str) -> str | None:
    """The line of `HOUSE` that speaks for a module: the longest one that it lies in."""
    lines = [line for line in HOUSE if module == line or module.startswith(line + ".")]
    return max(lines, key=len, default=None)


@cache
def allowed(entry: str) -> frozenset[str]:
    """The lines of `HOUSE` that modules of this line may import, themselves included."""
    named = HOUSE[entry]
    if named == ABOVE:
        return frozenset([*list(HOUSE)[: list(HOUSE).index(entry)], entry])
    return frozenset([entry]).union(*(allowed(line) for line in named))


@cache
def source_of(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(), str(path))


@cache
def imports(tree: ast.Module) -> tuple[tuple[int, str], ...]:
    """(line, absolute name) of every import, wherever in the file it stands; `from a import b` gives `a.b`."""
    return tuple(_imports(tree))


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports from the top, `from meshpar.x import y`"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_the_list_itself_runs_one_way() -> None:
    order = list(HOUSE)
    for line, named in HOUSE.items():
        if named != ABOVE:
            late = [name for name in named if order.index(name) >= order.index(line)]
            assert not late, f"`{line}` names {late}, which stand below it"


def test_every_module_is_on_the_list() -> None:
    unlisted = [module for module in modules() if entry_of(module) is None]
    assert not unlisted, f"{unlisted}: add each to HOUSE in {Path(__file__).name}, with what it may import from meshpar"


def test_imports_run_down_the_list() -> None:
    wrong = []
    for module in modules():
        entry = entry_of(module)
        assert entry is not None
        for line, name in imports(source_of(module)):
            if name == "meshpar" or name == "meshpar.__version__" or not name.startswith("meshpar."):
                continue
            target = entry_of(name.removeprefix("meshpar."))
            assert target is not None, f"{module}, line {line}: `{name}` comes from no module; import it from its own"
            if target not in allowed(entry):
                may = sorted(allowed(entry) - {entry})
                wrong.append(f"{module}, line {line} imports `{name}`: `{entry}` may import {may} only")
    assert not wrong, "\n".join(wrong)


def test_the_package_itself_is_asked_for_nothing_but_its_version() -> None:
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


def test_flax_enters_the_spine_through_the_adapters() -> None:
    knowing = ("sharding.adapters", "training.lora")
    spine = [module for module in modules() if module.startswith(tuple(SPINE)) and module not in knowing]
    lines = [(module, line) for module in spine for line, name in imports(source_of(module)) if is_of(name, "flax")]
    assert not lines, f"{lines}: only adapters.py, lora.py and models/ know flax"


def is_of(name: str, *packages: str) -> bool:
    return name.split(".")[0] in packages


def test_the_tables_of_schedules_need_no_jax() -> None:
    for module in modules():
        if entry_of(module) == "pipeline.schedules":
            lines = [line for line, name in imports(source_of(module)) if is_of(name, "jax", "flax")]
            assert not lines, f"{module}, line {lines[0]}: plain NumPy is enough here"


def in_circles(parts: Callable[[ast.Module], list[ast.stmt]]) -> set[str]:
    """Modules that need themselves, by the imports in these parts of each."""
    names = {f"meshpar.{module}" for module in modules()}
    needs: dict[str, set[str]] = {}
    for module in modules():
        found = {
            name if name in names else name.rpartition(".")[0]
            for _, name in imports(ast.Module(parts(source_of(module)), []))
        }
        needs[f"meshpar.{module}"] = (found & names) - {f"meshpar.{module}"}
    for _ in needs:
        further = {module: over.union(*(needs[one] for one in over)) for module, over in needs.items()}
        if further == needs:
            break
        needs = further
    return {module.removeprefix("meshpar.") for module, over in needs.items() if module in over}


def test_no_module_needs_itself_to_be_imported() -> None:
    """What modules import when they are loaded goes round in no circle."""
    assert not in_circles(lambda tree: [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)])


def test_no_module_needs_itself_when_it_runs() -> None:
    """Nor does what functions import, but for methods that lead to what is made of the object: a schedule read from a
    file, a report as text, the model of a config."""
    round_about = in_circles(lambda tree: [node for node in tree.body if ast.unparse(node)[:16] != "if TYPE_CHECKING"])
    models = {f"models.{name}" for name in ("annotated", "config", "latent", "layers", "overlap", "transformer")}
    files = {"pipeline.schedules.csv", "pipeline.schedules.schedule"}
    assert round_about <= {"compiled.render", "compiled.report"} | files | models, sorted(round_about)


def test_a_function_fits_on_a_screen() -> None:
    long = {}
    for module in modules():
        for node in ast.walk(source_of(module)):
            if not isinstance(node, ast.FunctionDef):
                continue
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            documented = 0 if docstring is None else (docstring.end_lineno or 0) - docstring.lineno + 1
            if (lines := (node.end_lineno or 0) - node.lineno + 1 - documented) > MOST_LINES:
                long[f"{module}.{node.name}"] = lines
    assert not long, f"{long} lines without docstrings; split functions of more than {MOST_LINES} lines"


def test_two_classes_have_two_names() -> None:
    """Public ones; `bench.plain` is the decoder again, in plain Flax, and `executor` and `planner` each make a plan."""
    homes: dict[str, list[str]] = {}
    for module in modules():
        for node in source_of(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert twice.keys() == {"Attention", "Block", "Plan"}, twice


HEAVY = ["flax", "optax", "grain", "orbax", "tensorstore", "matplotlib", "rich", "tokenizers", "pyarrow", "sklearn"]


@pytest.mark.parametrize(
    ("statement", "without"),
    [
        ("import meshpar, meshpar.cli.main, meshpar.data", ["jax", *HEAVY]),
        (
            "import meshpar.cli.launch, meshpar as mp, meshpar.models as models; models.llama3_8b().num_params\n"
            "mp.MeshSpec, mp.Rules, mp.Precision, mp.constrain, [getattr(mp.data, name) for name in mp.data.__all__]",
            HEAVY,
        ),
    ],
)
def test_importing_costs_no_more_than_it_must(statement: str, without: list[str]) -> None:
    code = f"{statement}\nimport sys\nprint(*[name for name in {without!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_a_plain_step_loads_nothing_of_pipelines_experts_or_compiled_programs() -> None:
    """And the packages that the README names are attributes all the same."""
    code = (
        "import sys, meshpar as mp; mp.ddp(); mp.train_step(lambda model, batch, key: (0, {})); print(*sys.modules)\n"
        "mp.collectives.all_reduce; assert 'meshpar.pipeline' not in sys.modules\n"
        "mp.pipeline.scan_layers; assert 'meshpar.moe' not in sys.modules; mp.moe.MoE"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    packages = {".".join(name.split(".")[:2]) for name in done.stdout.split() if name.startswith("meshpar.")}
    assert packages == {"meshpar.sharding", "meshpar.parallel", "meshpar.training"}


def test_every_planted_fault_is_a_line_of_the_source() -> None:
    for fault in FAULTS:
        assert (PACKAGE / fault.file).read_text().count(fault.old) == 1, fault.name
