"""What a run costs beside its steps: saves, restores, input, the watch over other processes, memory that grows."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.bench.figures import Figures, Measure, quartiles, seconds_of
from meshpar.cli.recipe import Recipe, build_model, build_optimizer, build_step
from meshpar.loop import heartbeat as watchdog
from meshpar.loop.checkpoint import Checkpoints
from meshpar.loop.coordination import Pod
from meshpar.loop.fit import Hook, JsonlWriter, Preemption, ProgressBar, Run, Watched, fit
from meshpar.loop.goodput import Goodput
from meshpar.parallel import fsdp
from meshpar.sharding.adapters import from_functions
from meshpar.sharding.host_resources import check_memory
from meshpar.sharding.mesh import MeshSpec
from meshpar.training.state import make_setup
from meshpar.training.step import train_step

SAVE_EVERY = 20
ARRAYS = 16
FLAT_FROM = 0.25
"""Share of the steps after which memory is to be flat: allocators and jax's caches have filled by then."""
CHUNK_BYTES = 1 << 23
PARTS = ("saves", "restore", "input", "memory")


def run(
    recipe: Recipe,
    *,
    parts: Sequence[str] = PARTS,
    pairs: int = 5,
    restored_bytes: float = 2e9,
    steps: int = 2000,
    folder: str | Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Figures:
    """Measure, each against what it is to be small beside, in turn.

    Args:
      recipe: whose steps, batches and saves are measured.
      parts: some of `PARTS`.
      pairs: how often the two sides of each run in turn.
      restored_bytes: of the state whose restore is measured.
      steps: over which memory is watched.
      folder: on the disk that is measured; None: a temporary one.
      progress: is told what is being measured.

    Raises:
      ValueError: a state that the host's memory does not hold.
    """
    found: list[Measure] = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for part in parts:
            progress(f"measuring {part}")
            here = Path(scratch) / part
            if part in ("saves", "input"):
                found += _of_recipe(recipe, here, pairs, part)
            elif part == "restore":
                found.append(_restore(here, restored_bytes, pairs))
            else:
                found.append(_memory(here, steps))
    return Figures(title=f"a run of {recipe.name}", measures=tuple(found))


# ---- Saves and input, of the recipe's own steps ----------------------------------------------------------------------


class _Saves(Hook):
    """One save, in the background of what follows, as `Checkpointer` does it."""

    order = 1

    def __init__(self, checkpoints: Checkpoints, at: int) -> None:
        self._checkpoints, self._at = checkpoints, at

    def on_dispatched(self, run: Run) -> None:
        if run.step == self._at:
            run.drain()
            with run.within("save"):
                self._checkpoints.save(run.state, data_state={})


def _of_recipe(recipe: Recipe, folder: Path, pairs: int, part: str) -> list[Measure]:
    mesh = recipe.mesh.build()
    source = recipe.data.open(batch_size=recipe.batch_size, seed=recipe.seed)
    model = build_model(recipe)
    tx = build_optimizer(recipe, model, mesh)
    setup = make_setup(model, tx, mesh=mesh, strategy=recipe.strategy, precision=recipe.precision)
    step, state = build_step(recipe), setup.init(recipe.seed)
    with source.train(setup.batch_sharding) as batches, Checkpoints(folder, keep=2) as checkpoints:
        iterator = iter(batches)
        batch = next(iterator)

        def train(steps: int, *, saves: bool) -> None:
            nonlocal state
            at = int(state.step) + 1
            hooks = [_Saves(checkpoints, at)] if saves else []
            state = fit(step, state, itertools.repeat(batch), steps=at - 1 + steps, hooks=hooks).state
            jax.block_until_ready(state)

        train(2, saves=False)  # compiles
        if part == "input":
            return [_input(lambda: train(SAVE_EVERY, saves=False), iterator, pairs, recipe)]
        ratios = []
        for index in range(pairs + 1):
            took = {}
            for saves in (True, False) if index % 2 else (False, True):
                took[saves] = seconds_of(functools.partial(train, SAVE_EVERY, saves=saves))
                checkpoints.wait()  # what is still written is no burden of the other side
            ratios += [took[True] / took[False]] if index else []  # the first makes folders and programs
    return [_ratio(f"{SAVE_EVERY} steps with a save, over without", ratios, 1.05, f"{pairs} pairs in turn")]


def _input(train: Callable[[], None], iterator: Iterator[Any], pairs: int, recipe: Recipe) -> Measure:
    """Batches as fast as they come, laid out on the devices, over as many steps."""

    def read(count: int) -> None:
        for _ in range(count):
            jax.block_until_ready(next(iterator))

    ratios = []
    for _ in range(pairs):
        read(int(getattr(recipe.data, "prefetch", 0) or 0) + 1)  # what was prefetched while steps ran costs nothing
        read_s = seconds_of(lambda: read(SAVE_EVERY))
        ratios.append(read_s / seconds_of(train))
    return _ratio("input alone, over steps on as many tokens", ratios, 1 / 20, f"{pairs} pairs in turn")


def _ratio(name: str, ratios: Sequence[float], limit: float, detail: str) -> Measure:
    low, median, high = quartiles(ratios)
    return Measure(name=name, value=median, unit="×", limit=limit, low=low, high=high, detail=detail)


# ---- Restore against the disk ----------------------------------------------------------------------------------------


def _restore(folder: Path, nbytes: float, pairs: int) -> Measure:
    """A state read onto the devices and verified, over reading the same files in turn; both not from memory."""
    rows = max(round(nbytes / (ARRAYS * 4 * 1024)) // 8 * 8, 8)
    check_memory("the measured state", f"restore {nbytes / 1e9:g} GB", 3 * nbytes, "measure fewer: --restored-bytes")

    def init(key: jax.Array) -> dict[str, jax.Array]:
        # Bits that no compression makes smaller.
        return {f"w{n}": jax.random.normal(jax.random.fold_in(key, n), (rows, 1024)) for n in range(ARRAYS)}

    names = {f"w{n}": ("embed", "mlp") for n in range(ARRAYS)}
    model = from_functions(init, lambda params, batch: batch, names=names)
    setup = make_setup(model, optax.identity(), mesh=MeshSpec(fsdp=-1).build(), strategy=fsdp())
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(setup.init(0), wait=True)
    files = [path for path in folder.rglob("*") if path.is_file()]
    os.sync()  # only what is on the disk leaves the memory

    def restore() -> None:
        with Checkpoints(folder) as checkpoints:
            restored = checkpoints.restore(setup)
            assert restored is not None
            jax.block_until_ready(restored.state)

    restore()  # compiles the fingerprints
    ratios, rates = [], []
    for _ in range(pairs):
        _evict(files)
        read_s = seconds_of(lambda: _read_all(files))
        rates.append(sum(path.stat().st_size for path in files) / read_s)
        _evict(files)
        ratios.append(seconds_of(restore) / read_s)
    rate = statistics.median(rates)
    detail = f"{nbytes / 1e9:g} GB in {len(files)} files, read in turn at {rate / 1e9:.2f} GB/s"
    return _ratio("restore, over reading its files", ratios, 2.0, detail)


def _evict(files: Sequence[Path]) -> None:
    """Have the system forget what it keeps of files in memory, where it can be asked to."""
    for path in files:
        with contextlib.suppress(AttributeError, OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_all(files: Sequence[Path]) -> None:
    buffer = bytearray(CHUNK_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


# ---- The watch over other processes ----------------------------------------------------------------------------------


class _Timed(Watched):
    """How long each step is held up by what it asks."""

    def __init__(self, dog: watchdog.Watchdog, pod: Pod) -> None:
        super().__init__(dog, pod)
        self.ms: list[float] = []

    def on_dispatched(self, run: Run) -> None:
        self.ms.append(1e3 * seconds_of(lambda: super(_Timed, self).on_dispatched(run)))

    def on_record(self, run: Run, record: Any) -> None:
        self.ms[record.step - run.first_step - 1] += 1e3 * seconds_of(
            lambda: super(_Timed, self).on_record(run, record)
        )


def watch(pod: Pod, *, pairs: int = 5, steps: int = 200) -> Figures:
    """Measure what watchdog and agreement on signals add to a step, by steps that do nothing else.

    Args:
      pod: this process's; every process of it calls this.
      pairs: how often steps with and without them run in turn.
      steps: of each.
    """
    step, state, batch = _small_step()
    dog, timed = watchdog.Watchdog(pod), []
    dog.start()

    def train(*, watched: bool) -> None:
        nonlocal state
        hooks = [_Timed(dog, pod)] if watched else []
        timed.extend(hooks)
        state = fit(step, state, itertools.repeat(batch), steps=int(state.step) + steps, hooks=hooks).state

    train(watched=True)
    train(watched=False)
    ratios = []
    for index in range(pairs):
        order = (True, False) if index % 2 else (False, True)
        took = {watched: seconds_of(functools.partial(train, watched=watched)) for watched in order}
        ratios.append(took[True] / took[False])
    dog.done()
    held = [ms for hook in timed[1:] for ms in hook.ms]
    low, median, high = quartiles(held)
    mean = statistics.mean(held)
    measure = Measure(
        name="agreement and watchdog, a step", value=mean, unit="ms", limit=1.0, low=low, high=high,
        detail=f"mean of {len(held)} steps of {pod.num_processes} processes, median {median:.2g}; with over without "
        f"{statistics.median(ratios):.2f} ×",
    )  # fmt: skip
    return Figures(title="the watch over other processes", measures=(measure,))


def _small_step() -> tuple[Any, Any, Any]:
    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jax.random.normal(key, (64, 64))}

    model = from_functions(init, lambda params, x: x @ params["w"], names={"w": ("embed", "mlp")})
    setup = make_setup(model, optax.sgd(1e-3), mesh=MeshSpec(fsdp=-1).build(), strategy=fsdp())
    step = train_step(lambda model, batch, key: (jnp.mean(model(batch["x"]) ** 2), {}))
    batch = jax.device_put({"x": np.ones((8 * len(jax.devices()), 64), np.float32)}, setup.batch_sharding)
    return step, setup.init(0), batch


# ---- Memory ----------------------------------------------------------------------------------------------------------


class _Resident(Hook):
    """The process's resident bytes, step by step."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_record(self, run: Run, record: Any) -> None:
        self.sizes.append(resident_bytes())


def resident_bytes() -> int:
    """What this process holds in memory (Linux)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _memory(folder: Path, steps: int) -> Measure:
    """Resident memory of the last tenth of a run's steps over that of a tenth behind the first quarter."""
    step, state, batch = _small_step()
    resident, metrics = _Resident(), folder / "metrics.jsonl"
    goodput = Goodput(folder / "goodput.json", metrics=metrics, began_s=time.time())
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        hooks = [goodput, JsonlWriter(metrics, also=goodput.line), ProgressBar(stream=nowhere), Preemption(), resident]
        fit(step, state, itertools.repeat(batch), steps=steps, hooks=hooks)
    tenth, first = max(steps // 10, 1), int(FLAT_FROM * steps)
    early = statistics.median(resident.sizes[first : first + tenth])
    late = statistics.median(resident.sizes[-tenth:])
    detail = f"{early / 1e6:,.0f} MB behind step {first}, {late / 1e6:,.0f} MB at step {steps}"
    name = f"memory at step {steps:,}, over step {first:,}"
    return Measure(name=name, value=late / early, unit="×", limit=1.01, detail=detail)
