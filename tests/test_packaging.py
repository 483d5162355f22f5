"""Pinned dependencies, their environments, and the exported names."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import meshpar

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ["3.11", "3.12", "3.13"]
LINUX = {"sys_platform": "linux", "platform_machine": "x86_64"}


def pins(python: str) -> dict[str, str]:
    """name -> version of every third-party package on Linux with one version of Python."""
    here = {**LINUX, "python_version": python, "python_full_version": f"{python}.0"}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    wanted = [pin for pin in map(Requirement, lines) if pin.marker is None or pin.marker.evaluate(here)]
    assert len({pin.name for pin in wanted}) == len(wanted), "two pins for one package"
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in wanted}


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == meshpar.__version__
    assert (ROOT / "CHANGELOG.md").read_text().startswith("# Changelog\n\n## Unreleased\n")


@pytest.mark.parametrize("python", PYTHONS)
def test_dependencies_are_pinned_to_matching_versions(python: str) -> None:
    pinned = pins(python)
    for extra in ("", "aot", "recipes", "notebooks", "docs", "dev"):
        for text in PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]:
            requirement = Requirement(text)
            if requirement.name != "meshpar":
                version = pinned.get(canonicalize_name(requirement.name))
                assert version is not None, f"constraints.txt does not pin {requirement.name}: run `make constraints`"
                assert requirement.specifier.contains(version, prereleases=True), f"{text}, pinned to {version}"


DISTRIBUTIONS = {"absl": "absl-py", "google": "google-auth", "orbax": "orbax-checkpoint"}
"""Import names whose distribution on PyPI has another name."""


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the distributions that import statements name, without the standard library and meshpar itself."""
    names = set[str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module))
    roots = {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "meshpar"}
    return {str(canonicalize_name(DISTRIBUTIONS.get(root, root))) for root in roots}


def test_imports_and_declared_dependencies_agree() -> None:
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in (ROOT / "meshpar").rglob("*.py")}
    required = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    optional = (Requirement(text) for extra in PROJECT["optional-dependencies"].values() for text in extra)
    anywhere = set().union(*(imported(ast.walk(tree)) for tree in trees.values()))
    assert anywhere - required <= {canonicalize_name(one.name) for one in optional}
    assert required <= anywhere
    # `Template` imports the renderer of chat templates, and so jinja2, on first use.
    loaded = [tree for name, tree in trees.items() if not name.endswith("template_renderer.py")]
    when_loaded = set().union(*(imported(tree.body) for tree in loaded))
    assert when_loaded <= required, "import what an extra installs inside the function that uses it"


@pytest.mark.parametrize("python", PYTHONS)
def test_jax_and_its_parts_are_of_one_version(python: str) -> None:
    pinned = pins(python)
    parts = {pinned[name] for name in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt")}
    assert len(parts) == 1


def test_pins_contain_no_urls() -> None:
    for name in ("constraints.txt", "pyproject.toml", "Makefile", ".ci/venv", ".ci/pin", ".ci/run", ".ci/find-python"):
        text = (ROOT / name).read_text()
        assert not re.search(r"://|index-url|find-links|--hash", text.replace("--no-emit-index-url", "")), name


def test_public_names_exist_and_are_typed() -> None:
    assert not [name for name in dir(meshpar) if not hasattr(meshpar, name)]
    tree = ast.parse((ROOT / "meshpar" / "__init__.py").read_text())
    blocks = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    # Under --strict, type checkers treat only the names in `__all__` as exported.
    typed = {alias.name for block in blocks for node in block.body for alias in getattr(node, "names", ())}
    assert typed | {"__version__"} == set(dir(meshpar)) == set(meshpar.__all__)
    assert (ROOT / "meshpar" / "py.typed").exists()


def make(*arguments: str) -> str:
    """Return the commands that make would run, without the flags of a make that runs these tests."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", "-n", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def test_each_interpreter_has_a_separate_environment() -> None:
    own = ".venv-{}.{}/bin/python -m pytest".format(*sys.version_info[:2])
    assert own in make("test", f"PYTHON={sys.executable}")
    assert any(line.startswith(".venv/bin/python -m pytest") for line in make("test").splitlines())
    assert "not matrix" in make("test")
    assert "matrix or pod" in make("test-all")


def test_ci_calls_what_the_readme_names() -> None:
    script = ROOT / ".ci/run"
    assert re.search(r"\bmake test\b", script.read_text())
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


def find_python(asked: str, path: Path, pyenv_root: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{path}:/usr/bin:/bin", "PYENV_ROOT": str(pyenv_root)}
    return subprocess.run([ROOT / ".ci/find-python", asked], env=env, capture_output=True, text=True, check=False)


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_failing_shim_falls_back_to_the_real_interpreter(tmp_path: Path) -> None:
    shims, pyenv = tmp_path / "shims", tmp_path / "pyenv"
    executable(shims / "python3.12", "echo 'python3.12: command not found' >&2; exit 127")
    executable(pyenv / "versions/3.12.9/bin/python3.12", f'exec {sys.executable} "$@"')
    done = find_python("python3.12", shims, pyenv)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).exists()


def test_missing_or_old_interpreter_is_a_clear_error(tmp_path: Path) -> None:
    executable(tmp_path / "python3.7", "exit 1")
    for asked in ("python3.99", "python3.7"):
        done = find_python(asked, tmp_path, tmp_path)
        assert done.returncode == 1
        assert done.stdout == ""
        assert all(part in done.stderr for part in (asked, "there is:", "what to do:", "make test PYTHON="))


def test_no_function_has_the_name_of_a_submodule() -> None:
    # Importing the submodule would replace the function in its package.
    packages = [module.name for module in pkgutil.iter_modules(meshpar.__path__) if module.ispkg]
    for package in ("meshpar", *(f"meshpar.{name}" for name in packages)):
        names = getattr(importlib.import_module(package), "__all__", ())
        for name in (name for name in names if importlib.util.find_spec(f"{package}.{name}")):
            assert importlib.import_module(f"{package}.{name}") is getattr(sys.modules[package], name), name
