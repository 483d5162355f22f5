"""The saved programs, parsed once, one process that compiles for pods, and what was compiled in it."""

from __future__ import annotations

import hashlib
import os
import pickle

import pytest

from meshpar.inspect.census import census
from meshpar.inspect.hlo import parser as hlo
from meshpar.inspect.program import compile_here
from meshpar.inspect.target import missing_aot
from tests.inspect import planted as mistakes
from tests.inspect import programs as built
from tests.inspect import saved as kept


@pytest.fixture(scope="session")
def programs():
    """The module that builds the test programs and reads the saved ones."""
    return built


@pytest.fixture(scope="session")
def saved(programs):
    """(program, platform, jax version) -> Module, for every saved text."""
    return {
        (name, platform, version): hlo.parse(text)
        for name in programs.PROGRAMS
        for platform in ("cpu", "cuda")
        for version, text in programs.saved(name, platform).items()
    }


@pytest.fixture(scope="session")
def planted():
    """The module that builds programs with a mistake in them, and the reference decoder."""
    return mistakes


@pytest.fixture(scope="session")
def program_of(request, tmp_path_factory):
    """(key, compile) -> Program: compiled once for all workers, which find it in a folder of the test session."""
    session = tmp_path_factory.getbasetemp()
    folder = (session.parent if "PYTEST_XDIST_WORKER" in os.environ else session) / "programs"
    folder.mkdir(exist_ok=True)

    def found(key, compile):
        file = folder / hashlib.sha256(repr(key).encode()).hexdigest()
        if not file.exists():
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(compile()))
            part.replace(file)
        return pickle.loads(file.read_bytes())

    return found


@pytest.fixture(scope="session")
def compiled(planted, program_of, request):
    """(name, target, **options) -> (Plant, Program): a planted mistake, or the reference decoder under a strategy.

    Each is compiled once, for the plant's cluster (`pod`, unless it is kept) or for the CPU devices here (`cpu`).
    """
    known = {}

    def compile_once(name, target="pod", *, again=False, **options):
        key = (name, target, again, repr(sorted(options.items())))
        if key not in known:
            is_plant = name in planted.PLANTS
            plant = planted.PLANTS[name]() if is_plant else planted.reference(name, **options)
            if target == "cpu":
                plant = plant.on_cpu
            if target == "pod" and name in kept.NAMES and not options and not again:
                known[key] = plant, kept.load(name)
                return known[key]
            if target == "pod" and missing_aot():
                pytest.skip(f"compiles for GPUs, which needs `pip install meshpar[aot]`: {missing_aot()}")

            def compile(plant=plant):
                traced = plant.step.trace(plant.state, plant.batch)
                if target == "cpu":
                    return compile_here(traced)
                return request.getfixturevalue("pod").compile(traced, plant.cluster)

            known[key] = plant, program_of(key, compile)
        return known[key]

    return compile_once


@pytest.fixture(scope="session")
def read(compiled, planted):
    """(name, target, **options) -> (setup, options, census, jaxpr) of a planted mistake or a strategy's decoder.

    The jaxpr is None where no kernel sends anything.
    """
    known = {}

    def one(name, target, **options):
        key = (name, target, str(options))
        if key not in known:
            plant, program = compiled(name, target, **options)
            has_kernels = name in planted.KERNELS or name == "sliced_all_reduce"
            jaxpr = plant.step.trace(plant.state, plant.batch).jaxpr if has_kernels else None
            known[key] = plant.state.setup, plant.step.options, census(program.module, plant.mesh), jaxpr
        return known[key]

    return one
