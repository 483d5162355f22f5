"""Writers of a run's numbers to TensorBoard and Weights & Biases, beside metrics.jsonl, which stays what counts."""

from __future__ import annotations

import abc
import importlib.util
import json
import math
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from meshpar.loop.fit import Hook, Record, Run, Validation
from meshpar.sharding.host_resources import replace_file
from meshpar.sharding.types import near, problem

Also = Callable[[Record], Mapping[str, Any]]


class Writer(Hook, abc.ABC):
    """Numbers to a library's writer, by process 0.

    What goes wrong in the library after `check_writers` ends no run: a warning tells it once, the run goes on without
    this writer, and metrics.jsonl has every number. Derive from it: `_open`, `_log`, `_close`.

    Args:
      folder: of the run.
      config: what the run is made of, to be shown beside its numbers.
      also: record -> more of its numbers, by name.
    """

    name = ""
    package = ""
    """What is imported; the extra of this package has the name of the writer."""

    def __init__(self, folder: str | Path, *, config: Mapping[str, Any], also: Also | None = None) -> None:
        self._folder, self._config, self._also = Path(folder), config, also
        self._library: Any = None

    def on_start(self, run: Run) -> None:
        if jax.process_index() == 0:
            self._library = self._tried("open", lambda: self._open(run.first_step))

    def on_record(self, run: Run, record: Record) -> None:
        also = {} if self._also is None else self._also(record)
        own = {"tokens_per_s": record.tokens_per_s, "mfu": record.mfu, "seconds": record.seconds}
        self._write(record.step, "train", {"loss": record.loss, **own, **record.metrics, **also})

    def on_validation(self, run: Run, validation: Validation) -> None:
        self._write(validation.step, "valid", validation.metrics)

    def on_end(self, run: Run, reason: str) -> None:
        if self._library is not None:
            self._tried("close", lambda: self._close(failed=reason in ("error", "nonfinite")))
            self._library = None

    def _write(self, step: int, side: str, values: Mapping[str, Any]) -> None:
        if self._library is not None:
            found = {f"{side}/{name}": float(x) for name, x in values.items() if isinstance(x, int | float)}
            self._tried("write", lambda: self._log(step, found))

    def _tried(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # whatever a library or a network has for us
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            told = f"{self.name} could not {what} ({said}): the run goes on without it, metrics.jsonl has every number"
            warnings.warn(told, stacklevel=3)
            self._library = None

    @abc.abstractmethod
    def _open(self, first_step: int) -> Any:
        """The library's writer, for a run that has taken so many steps."""

    @abc.abstractmethod
    def _log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers of a step by name, as `train/loss`."""

    @abc.abstractmethod
    def _close(self, *, failed: bool) -> None:
        """Writes what is left, and whether the run ended by an error."""


class TensorBoard(Writer):
    """Event files in `tensorboard/` of the run's folder, by tensorboardX: `tensorboard --logdir runs`."""

    name, package = "tensorboard", "tensorboardX"

    def _open(self, first_step: int) -> Any:
        from tensorboardX import SummaryWriter

        # What a process that died wrote of later steps is taken back, as in metrics.jsonl.
        purge = first_step + 1 if first_step else None
        library = SummaryWriter(str(self._folder / "tensorboard"), purge_step=purge, flush_secs=10)
        library.add_text("recipe", f"```json\n{json.dumps(self._config, indent=2, default=str)}\n```", first_step)
        return library

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._library.add_scalar(name, value, step)

    def _close(self, *, failed: bool) -> None:
        self._library.close()


class WandB(Writer):
    """A run of Weights & Biases of the recipe's name; WANDB_MODE=offline, WANDB_PROJECT and so on count as everywhere.

    Its id is kept in the run's folder, so that a run that goes on is the same there, too.
    """

    name, package = "wandb", "wandb"

    def _open(self, first_step: int) -> Any:
        import wandb

        kept = self._folder / "wandb.id"
        if not kept.exists():
            replace_file(kept, secrets.token_hex(8))
        library = wandb.init(
            id=kept.read_text(encoding="ascii").strip(),
            name=self._folder.name,
            dir=str(self._folder),
            config=dict(self._config),
            resume="allow",
            settings=wandb.Settings(console="off"),  # standard output is the report's
        )
        library.define_metric("*", step_metric="step")
        return library

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        # Not `step=`: a validation comes after its step's own line, and a run that goes on takes steps again.
        self._library.log({"step": step, **{name: x for name, x in values.items() if math.isfinite(x)}})

    def _close(self, *, failed: bool) -> None:
        self._library.finish(exit_code=int(failed))


WRITERS: dict[str, type[Writer]] = {one.name: one for one in (TensorBoard, WandB)}


def check_writers(names: Sequence[str]) -> None:
    """Raises `ValueError` for a writer that does not exist, or whose library is not installed."""
    for name in names:
        where = f"writer `{name}`"
        if name not in WRITERS:
            raise problem(where, "write with it", f"there are {', '.join(WRITERS)}", near(name, WRITERS))
        if importlib.util.find_spec(WRITERS[name].package) is None:
            exists = f"the package {WRITERS[name].package} is not installed"
            raise problem(where, "write numbers with it", exists, f"pip install 'meshpar[{name}]', or leave it out")


def writers(names: Sequence[str], folder: str | Path, *, config: Mapping[str, Any], also: Also | None) -> list[Hook]:
    """The hooks of these names, for a run's folder; arguments as of `Writer`."""
    return [WRITERS[name](folder, config=config, also=also) for name in names]
