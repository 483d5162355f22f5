"""SIGTERM to a pod at any moment: both processes save and exit with the same code, and a restart is bit-identical.

Signals are sent when functions are called, independent of time; see `signal_at`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshpar.loop.checkpoint import Checkpoints
from meshpar.loop.checkpoint_index import read_index
from tests.pod.pods import METRICS, free_port, losses
from tests.pod.test_multihost import RECIPE
from tests.training_process import Runs

STEPS = 40
TERM = 128 + signal.SIGTERM
STEP, SAVE = "meshpar.loop.fit:Run.advance", "meshpar.loop.checkpoint:Checkpoints._write"
COMPILES = "jax._src.compiler:compile_or_get_cached"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("compiled"))
    yield runs
    runs.close()


def train(runs: Runs, folder: Path, *, victims: tuple[int, ...] = (), moment=()) -> list[int]:
    """Run two processes, send signals at the given moments, and return the exit codes."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.py").write_text(RECIPE)
    address = f"127.0.0.1:{free_port()}"
    args = ["train", "recipe.py", "--steps", str(STEPS), "--set", "checkpoint_every=4", "--set", "validate_every=6"]
    pids = []
    for number in (0, 1):
        place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(number)}
        env = {**place, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        signals = [[signal.SIGTERM, moment]] if number in victims else []
        pids.append(runs.start(folder, args=args, pod=env, signals=signals, log=f"log{number}"))
    return [runs.exit_of(pid) for pid in pids]


def said(folder: Path) -> str:
    return "".join((folder / f"log{number}").read_text() for number in (0, 1))


def end(folder: Path) -> tuple[list[float], dict]:
    """Return all losses, and the fingerprints of the arrays at the last step."""
    return losses(folder / METRICS), read_index(folder / "runs" / "pod" / "checkpoints", STEPS)["leaves"]


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory) -> tuple[list[float], dict]:
    """Return the results of a run without signals."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(runs, folder) == [0, 0], said(folder)
    found = end(folder)
    assert len(found[0]) == STEPS
    return found


MOMENTS = {  # first and last step that may be the newest saved step; 0 if no step is saved
    # The other process trains until it receives the request.
    "data is read": ([["meshpar.data.source:RowSource.__init__", 1]], 0, STEPS - 1),
    "a checkpoint is looked for": ([["meshpar.loop.checkpoint:Checkpoints.restore", 1]], 0, STEPS - 1),
    "the first step is compiled": ([[STEP, 1], [COMPILES, 1]], 1, STEPS - 1),
    "between steps": ([[STEP, 6]], 4, STEPS - 1),
    "a save begins": ([[SAVE, 1]], 4, STEPS - 1),
    "a save is written": ([[SAVE, 1], ["orbax.checkpoint.type_handlers:ArrayHandler.serialize", 1]], 4, STEPS - 1),
    "the validation is compiled": ([["meshpar.loop.fit:Validator._means", 1], [COMPILES, 1]], 6, STEPS - 1),
    "the last save": ([["meshpar.loop.fit:Checkpointer.on_end", 1]], STEPS, STEPS),
    "the report": ([["meshpar.runs.training_run:report", 1]], STEPS, STEPS),
}


@pytest.mark.matrix
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)], ids=["process 0", "process 1", "both"])
@pytest.mark.parametrize(("moment", "first", "last"), MOMENTS.values(), ids=MOMENTS)
def test_all_save_and_end_and_a_restart_is_exact(runs, whole, tmp_path, victims, moment, first, last):
    assert train(runs, tmp_path, victims=victims, moment=moment) == [TERM, TERM], said(tmp_path)
    assert "interrupted" in said(tmp_path)
    assert "Traceback" not in said(tmp_path)
    assert "most recent call first" not in said(tmp_path)
    folder = tmp_path / "runs" / "pod" / "checkpoints"
    assert first <= max([0, *(Checkpoints(folder).steps() if folder.exists() else ())]) <= last
    assert train(runs, tmp_path) == [0, 0], said(tmp_path)
    assert end(tmp_path) == whole


@pytest.mark.matrix
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)], ids=["process 0", "process 1", "both"])
@pytest.mark.parametrize(
    "moment",
    [[["meshpar.loop.checkpoint_index:_read_arrays", 1]], [[STEP, 1], [COMPILES, 1]]],
    ids=["arrays are read", "the first step is compiled"],
)
def test_a_restart_that_is_stopped_loses_nothing(runs, whole, tmp_path, victims, moment):
    assert train(runs, tmp_path, victims=(0, 1), moment=MOMENTS["between steps"][0]) == [TERM, TERM], said(tmp_path)
    before = Checkpoints(tmp_path / "runs" / "pod" / "checkpoints").steps()[-1]
    assert train(runs, tmp_path, victims=victims, moment=moment) == [TERM, TERM], said(tmp_path)
    assert Checkpoints(tmp_path / "runs" / "pod" / "checkpoints").steps()[-1] >= before
    assert train(runs, tmp_path) == [0, 0], said(tmp_path)
    assert end(tmp_path) == whole
