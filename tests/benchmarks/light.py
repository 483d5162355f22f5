"""Times of meshpar next to plain flax, optax and orbax: the table in docs/performance.md.

    python -m tests.benchmarks.light                  # all rows
    python -m tests.benchmarks.light loop             # the training loop only; also: commands, checkpoints

Both sides train the decoder of `recipes/gpt_stdlib.py` on 8 host devices. They alternate, so that other load of the
machine affects both. Values are medians. "CPU" is processor time: of the calling thread in the loop, and of all threads
elsewhere.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import io
import itertools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import meshpar as mp
from meshpar.models import next_token_loss
from meshpar.runs.recipe import build_setup
from meshpar.runs.recipe_file import load_recipe
from tests.benchmarks import by_hand

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "gpt_stdlib.py"
WARM_UP = 5
"""Calls at the start of each block that are not counted, because the other side has filled the caches."""
Seconds = tuple[float, float]
"""Wall-clock time and processor time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table."""

    name: str
    ours: list[Seconds]
    by_hand: list[Seconds]
    goal: float
    """Ratio of the processor times to reach."""

    def cells(self) -> list[str]:
        ours, other = (
            [statistics.median(values) for values in zip(*x, strict=True)] for x in (self.ours, self.by_hand)
        )
        ratios = [f"{x / y:.2f}" for x, y in zip(ours, other, strict=True)]
        return [self.name, *map("; ".join, (map(_text, ours), map(_text, other), ratios)), f"{self.goal}"]


def _text(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.01 else f"{seconds:.2f} s"


def print_table(rows: list[Row]) -> None:
    """Print the rows as Markdown. Each cell has wall-clock and processor time."""
    for cells in (["wall; CPU", "meshpar", "by hand", "ratio", "goal"], ["---"] * 5, *(row.cells() for row in rows)):
        print("|", " | ".join(cells), "|", flush=True)


# ---- The training loop -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class Loop:
    """The same decoder as a training step of meshpar and as a jitted function."""

    seq_len: int
    state: Any = None
    params_and_opt_state: Any = None

    def __post_init__(self) -> None:
        recipe = load_recipe(RECIPE, devices=8)
        self.mesh = by_hand.make_mesh()
        setup = build_setup(recipe, recipe.mesh.build())
        self.state, self.step = setup.init(0), mp.train_step(next_token_loss)
        tokens = np.random.default_rng(0).integers(0, by_hand.VOCAB, (by_hand.BATCH, self.seq_len + 1)).astype(np.int32)
        self.host = {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}, tokens
        sharding = NamedSharding(self.mesh, PartitionSpec("fsdp"))
        self.devices = jax.device_put(self.host[0], setup.batch_sharding), jax.device_put(tokens, sharding)
        with jax.set_mesh(self.mesh):
            *state, self.jitted, _ = by_hand.make_step(self.mesh)
        self.params_and_opt_state = tuple(state)

    def call(self, batch: Any) -> Any:
        self.state, metrics = self.step(self.state, batch)
        return metrics

    def call_by_hand(self, batch: Any) -> Any:
        *state, metrics = self.jitted(*self.params_and_opt_state, batch)
        self.params_and_opt_state = tuple(state)
        return metrics

    def fit(self, steps: int, hooks: list[Any]) -> list[Seconds]:
        clock = _Clock()
        batches, last_step = itertools.repeat(self.devices[0]), int(self.state.step) + steps
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*it lacks steps")  # of earlier blocks
            result = mp.fit(self.step, self.state, batches, steps=last_step, hooks=[*hooks, clock])
        self.state = result.state
        return clock.steps()

    def fit_by_hand(self, steps: int) -> list[Seconds]:
        """Train, and read the loss of each step after two more steps were dispatched."""
        clock, in_flight = _Clock(), collections.deque[Any]()
        for _ in range(steps):
            in_flight.append(self.call_by_hand(self.devices[1]))
            clock.times.append((time.perf_counter(), time.thread_time()))
            if len(in_flight) > 2:
                float(in_flight.popleft()["loss"])
        jax.block_until_ready(in_flight)
        return clock.steps()


class _Clock(mp.hooks.Hook):
    """Hook that measures the time from the dispatch of a step to that of the next."""

    def __init__(self) -> None:
        self.times: list[Seconds] = []

    def on_dispatched(self, run: Any) -> None:
        self.times.append((time.perf_counter(), time.thread_time()))

    def steps(self) -> list[Seconds]:
        pairs = itertools.pairwise(self.times[WARM_UP:])
        return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]


def _calls(call: Callable[[Any], Any], batch: Any, count: int) -> list[Seconds]:
    """Return the times of calls. The devices are idle at each call, so they do not block it."""
    times = []
    for _ in range(count + WARM_UP):
        began, began_cpu = time.perf_counter(), time.thread_time()
        metrics = call(batch)
        times.append((time.perf_counter() - began, time.thread_time() - began_cpu))
        jax.block_until_ready(metrics)
    return times[WARM_UP:]


def loop_rows(*, rounds: int, steps: int, seq_len: int = 16) -> list[Row]:
    """Measure the time of the calling thread for a step, and for a step of `fit`."""
    loop = Loop(seq_len=seq_len)
    measured = collections.defaultdict[str, list[Seconds]](list)
    with tempfile.TemporaryDirectory() as folder:
        for index in range(rounds + 1):  # the first round compiles
            new = {}
            for name in ("devices", "host"):
                ours, other = getattr(loop, name)
                new[name] = _calls(loop.call, ours, steps)
                with jax.set_mesh(loop.mesh):
                    new[f"{name} by hand"] = _calls(loop.call_by_hand, other, steps)
            with jax.set_mesh(loop.mesh):
                new["fit by hand"] = loop.fit_by_hand(steps + WARM_UP)
            new["fit"] = loop.fit(steps + WARM_UP, [])
            file = mp.hooks.MetricsFile(Path(folder, f"{index}.jsonl"))
            hooks = [file, mp.hooks.ProgressBar(stream=io.StringIO()), mp.hooks.Preemption()]
            new["fit with hooks"] = loop.fit(steps + WARM_UP, hooks)
            for name, times in new.items() if index else ():
                measured[name] += times

    def row(name: str, ours: str, other: str, goal: float) -> Row:
        return Row(name=name, ours=measured[ours], by_hand=measured[other], goal=goal)

    return [
        row("`step(state, batch)`, batch on the devices", "devices", "devices by hand", 1.3),
        row("`step(state, batch)`, NumPy batch", "host", "host by hand", 1.3),
        row("`fit` per step, without hooks", "fit", "fit by hand", 1.3),
        row("`fit` per step, with MetricsFile, ProgressBar, Preemption", "fit with hooks", "fit by hand", 1.6),
    ]


# ---- Commands --------------------------------------------------------------------------------------------------------


def command_rows(*, rounds: int, recipe: Path = RECIPE) -> list[Row]:
    """Measure commands of three training steps: until the line of the first step, and until the end.

    The recipe also validates, samples text and draws plots. A second script by hand validates with as many batches.
    """
    names = "until the line of the first step", "whole command", "whole command; validation by hand"
    ours, other = ([[] for _ in names] for _ in range(2))
    valid_batches = str(load_recipe(recipe, devices=8).data.valid_batches)  # type: ignore[attr-defined]
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            train = [sys.executable, "-m", "meshpar", "train", str(recipe), "--steps", "3", "--out", folder]
            script = [sys.executable, str(Path(by_hand.__file__)), "--steps", "3", "--out"]
            first, whole = _command(train)
            first_by_hand, whole_by_hand = _command([*script, f"{folder}/plain"])
            _, validated_by_hand = _command([*script, f"{folder}/validated", "--valid-batches", valid_batches])
        for values, value in zip(ours, (first, whole, whole), strict=True):
            values.append(value)
        for values, value in zip(other, (first_by_hand, whole_by_hand, validated_by_hand), strict=True):
            values.append(value)
    goals = 1.2, 1.3, 1.3
    rows = zip(names, ours, other, goals, strict=True)
    return [Row(name=name, ours=x, by_hand=y, goal=goal) for name, x, y, goal in rows]


def _command(command: list[str]) -> tuple[Seconds, Seconds]:
    """Run a command, and return the times until its first line "step 1/..." and until its end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    began, before = time.perf_counter(), _children_s()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines, first = [], None
        for line in process.stdout:
            lines.append(line)
            if first is None and line.startswith("step 1/"):
                first = time.perf_counter() - began, _process_s(process.pid)
    if process.returncode or first is None:
        raise SystemExit(f"{' '.join(command)} failed:\n{''.join(lines)}")
    return first, (time.perf_counter() - began, _children_s() - before)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _process_s(pid: int) -> float:
    """Return the processor time of a running process, from Linux's /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint_rows(*, rounds: int, nbytes: float = 0.9e9) -> list[Row]:
    """Measure saving and restoring a state of about `nbytes`."""
    dim = max(int((nbytes / 8 / 3 / 4) ** 0.5) // 8 * 8, 8)  # parameters and two moments in float32, 8 weights
    mesh = mp.MeshSpec(fsdp=8).build()

    def init(key: jax.Array) -> Mapping[str, jax.Array]:
        return {f"w{i}": jax.random.normal(k, (dim, dim)) for i, k in enumerate(jax.random.split(key, 8))}

    import optax

    model = mp.from_functions(init, lambda params, x: x, names={f"w{i}": ("embed", "mlp") for i in range(8)})
    state = jax.block_until_ready(mp.init_state(model, optax.adam(1e-3), mesh=mesh, strategy=mp.fsdp(), key=0))
    # Moments of trained models are not zero. orbax compresses zeros to almost nothing.
    state = state.replace(opt_state=jax.tree.map(lambda x: state.params["w0"] if x.ndim else x, state.opt_state))
    like = {"params": state.params, "opt_state": jax.tree.leaves(state.opt_state)}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    measured = collections.defaultdict[str, list[Seconds]](list)
    for index in range(rounds + 1):  # the first round imports modules
        with tempfile.TemporaryDirectory() as folder:
            new = {}
            with _timed(new, "save"), mp.Checkpoints(f"{folder}/ours") as checkpoints:
                checkpoints.save(state, wait=True)
            with _timed(new, "save by hand"):
                by_hand.save(f"{folder}/by_hand", like)
            with _timed(new, "restore"), mp.Checkpoints(f"{folder}/ours") as checkpoints:
                restored = checkpoints.restore(state.setup)
                assert restored is not None
                jax.block_until_ready(restored.state)
            del restored
            with _timed(new, "restore by hand"):
                by_hand.restore(f"{folder}/by_hand", abstract)
            for name, value in new.items() if index else ():
                measured[name].append(value)
    size = sum(x.nbytes for x in jax.tree.leaves(like))
    return [
        Row(name=f"{name} of {size / 1e9:.2g} GB", ours=measured[name], by_hand=measured[f"{name} by hand"], goal=goal)
        for name, goal in (("save", 1.3), ("restore", 1.2))
    ]


@contextlib.contextmanager
def _timed(times: dict[str, Seconds], name: str) -> Iterator[None]:
    began, began_cpu = time.perf_counter(), time.process_time()
    yield
    times[name] = time.perf_counter() - began, time.process_time() - began_cpu


GROUPS: dict[str, Callable[[], list[Row]]] = {
    "commands": lambda: command_rows(rounds=3),
    "checkpoints": lambda: checkpoint_rows(rounds=3),
    "loop": lambda: loop_rows(rounds=10, steps=40),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; all by default")
    groups = parser.parse_args().groups or list(GROUPS)
    print_table([row for group in groups for row in GROUPS[group]()])
