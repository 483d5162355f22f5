"""Recipe files: import a file and call its function that returns a recipe."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from meshpar.runs.recipe import Recipe
from meshpar.sharding.errors import MeshparError, near, problem

# Not for type checkers only: overrides read the annotations at run time.
from meshpar.sharding.host_resources import check_file


def load_recipe(path: str | Path, *, devices: int | None = None) -> Recipe:
    """Return the result of the function `recipe` of a file. The path `file.py:name` calls the function `name` instead.

    A name without folder and suffix is a recipe of the package, unless there is a file with this name: `gpt_stdlib`.
    If the function has a parameter `devices`, it receives the number of devices. None keeps the parameter's default.
    """
    file, name = _file_of(str(path)), str(path).partition(":")[2] or "recipe"
    with explain_recipe_errors([str(path)], "call it"):
        module = imported(file)
        make = getattr(module, name, None)
        if not callable(make):
            names = [other for other, value in vars(module).items() if inspect.isfunction(value)]
            requested, fix = f"call its function `{name}`", f"define `def {name}() -> mp.Recipe` ({near(name, names)})"
            raise problem(f"recipe file `{file}`", requested, "the file has no such function", fix, code="not-found")
        takes_devices = "devices" in inspect.signature(make).parameters
        recipe = make(devices=devices) if takes_devices and devices is not None else make()
    if not isinstance(recipe, Recipe):
        requested, reason = f"use the result of `{name}`", f"it returned {type(recipe).__name__}"
        raise problem(f"recipe file `{file}`", requested, reason, "return mp.Recipe(...)", code="wrong-type")
    return recipe


@contextlib.contextmanager
def explain_recipe_errors(recipes: Sequence[str], requested: str) -> Iterator[None]:
    """Convert an exception of a recipe file to an error with its line. Errors of meshpar are not changed.

    `recipes` are paths as in `load_recipe`, and `requested` is the failed action in the error. If the traceback
    contains no recipe, the error names the first recipe.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, click.ClickException | MeshparError | KeyboardInterrupt):
            raise
        names = {os.path.realpath(_file_of(recipe)): recipe for recipe in recipes}
        if isinstance(error, SyntaxError) and error.filename:
            file, line = error.filename, error.lineno or 0
        else:  # the last line of a recipe, or the line that raised the exception
            frames = traceback.walk_tb(error.__traceback__)
            lines = [(os.path.realpath(frame.f_code.co_filename), line) for frame, line in frames]
            file, line = next((line_of_file for line_of_file in reversed(lines) if line_of_file[0] in names), lines[-1])
        message = next(iter(str(error).strip().split("\n")), "") or "no message"
        reason = f"it raised {type(error).__name__} ({message[:300]}) at {os.path.basename(file)}:{line}"
        where, fix = f"recipe `{names.get(file, recipes[0])[:200]}`", "correct that line; --traceback shows the calls"
        if isinstance(error, ModuleNotFoundError):
            fix = "install the package, or set PYTHONPATH to the folder of the module"
        raise problem(where, requested, reason, fix, code="error-in-recipe") from error


def _packaged_recipes() -> dict[str, Path]:
    """Return the files of the recipes that are installed with meshpar, by name."""
    package = Path(__file__).parents[1]
    # A wheel has the recipes inside the package, a checkout next to it.
    folder = next((folder for folder in (package / "recipes", package.parent / "recipes") if folder.is_dir()), package)
    return {file.stem: file for file in sorted(folder.glob("*.py"))} if folder != package else {}


def is_recipe_path(text: str) -> bool:
    """Return whether a text is a path as in `load_recipe`, which may not exist: `file.py:name`, or a packaged name."""
    file = text.partition(":")[0]
    return file.endswith(".py") or file in _packaged_recipes()


def _file_of(path: str) -> Path:
    """Return the file of a recipe's path or name; see `load_recipe`."""
    name = path.partition(":")[0]
    is_packaged = name.isidentifier() and not os.path.isfile(name)
    return _packaged_recipes().get(name, Path(name)) if is_packaged else Path(name)


def imported(file: Path) -> types.ModuleType:
    """Import a Python file under a name of its own."""
    if not os.path.exists(file):
        folders, packaged = {file.parent if file.parent.is_dir() else Path(), Path("recipes")}, _packaged_recipes()
        files = [path for folder in folders if folder.is_dir() for path in folder.glob("*.py")]
        same_name = next((f"did you mean `{path}`?" for path in files if path.stem == file.stem), None)
        if same_name is None and file.stem in packaged:
            same_name = f"did you mean the installed recipe `{file.stem}`?"
        where, fix = f"recipe `{str(file)[:200]}`", same_name or near(str(file), [*files, *packaged])
        raise problem(where, "read it", "there is no such file", fix, code="missing-file")
    check_file(file, f"recipe `{file}`", "name a .py file")
    main = sys.modules.get("__main__")
    if main is not None and getattr(main, "__file__", None) and Path(main.__file__ or "").resolve() == file.resolve():
        return main  # a recipe that runs itself
    spec = importlib.util.spec_from_file_location(f"meshpar_recipe_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise problem(f"recipe `{file}`", "import it", "it is not a Python file", "name a .py file", code="wrong-type")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up annotations there
    # Python's bytecode cache compares sizes and times in seconds, so it could miss a quick edit of a number.
    exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
    return module
