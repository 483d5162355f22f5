"""The saved programs, parsed once, one process that compiles for pods, and what was compiled in it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from meshpar.ledger import hlo
from meshpar.ledger.pod import PodProcess
from meshpar.ledger.program import compile_here
from meshpar.ledger.target import missing_aot


def _neighbour(name):
    """A module of this folder, under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"ledger_{name}", Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def programs():
    """The module that builds the test programs and reads the saved ones."""
    return sys.modules.get("ledger_programs") or _neighbour("programs")


@pytest.fixture(scope="session")
def saved(programs):
    """(program, platform, jax version) -> Module, for every saved text."""
    return {
        (name, platform, version): hlo.parse(text)
        for name in programs.PROGRAMS
        for platform in ("cpu", "cuda", "lowered")
        for version, text in programs.saved(name, platform).items()
    }


@pytest.fixture(scope="session")
def pod():
    """A process that compiles for GPUs; tests that use it are skipped where the `aot` extra is not installed."""
    if missing_aot():
        pytest.skip(missing_aot())
    with PodProcess() as process:
        yield process


@pytest.fixture(scope="session")
def planted():
    """The module that builds programs with a mistake in them, and the reference decoder."""
    return sys.modules.get("ledger_planted") or _neighbour("planted")


@pytest.fixture(scope="session")
def compiled(planted, request):
    """(name, target, **options) -> (Plant, Program): a planted mistake, or the reference decoder under a strategy.

    Each is compiled once, for the plant's cluster (`pod`) or for the CPU devices here (`cpu`).
    """
    known = {}

    def compile_once(name, target="pod", **options):
        key = (name, target, repr(sorted(options.items())))
        if key not in known:
            is_plant = name in planted.PLANTS
            plant = planted.PLANTS[name]() if is_plant else planted.reference(name, **options)
            if target == "cpu":
                plant = plant.on_cpu
            traced = plant.step.trace(plant.state, plant.batch)
            program = (
                compile_here(traced)
                if target == "cpu"
                else request.getfixturevalue("pod").compile(traced, plant.cluster)
            )
            known[key] = plant, program
        return known[key]

    return compile_once
