"""Hooks that log a run to TensorBoard or Weights & Biases, in addition to metrics.jsonl."""

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
from meshpar.sharding.errors import check_choice, problem
from meshpar.sharding.host_resources import replace_file

Also = Callable[[Record], Mapping[str, Any]]


class Writer(Hook, abc.ABC):
    """Base class of hooks that log metrics to a logging library, on process 0.

    If the library raises during the run, a warning is printed once and logging to it stops. The run continues, and
    metrics.jsonl stays complete. `config` is the recipe, and `also` returns additional metrics of a record.
    """

    name = ""
    package = ""
    """The package to import. The extra of meshpar that installs it has the name of the writer."""

    def __init__(self, folder: str | Path, *, config: Mapping[str, Any], also: Also | None = None) -> None:
        self._folder, self._config, self._also = Path(folder), config, also
        self._library: Any = None

    def on_start(self, run: Run) -> None:
        if jax.process_index() == 0:
            self._library = self._attempt("open", lambda: self._open(run.first_step))

    def on_record(self, run: Run, record: Record) -> None:
        also = {} if self._also is None else self._also(record)
        self._write(record.step, "train", {**record.scalars, **also})

    def on_validation(self, run: Run, validation: Validation) -> None:
        self._write(validation.step, "valid", validation.metrics)

    def on_end(self, run: Run, reason: str) -> None:
        if self._library is not None:
            self._attempt("close", lambda: self._close(failed=reason in ("error", "nonfinite")))
            self._library = None

    def _write(self, step: int, prefix: str, values: Mapping[str, Any]) -> None:
        if self._library is not None:
            scalars = {f"{prefix}/{name}": float(x) for name, x in values.items() if isinstance(x, int | float)}
            self._attempt("write", lambda: self._log(step, scalars))

    def _attempt(self, action: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # the libraries do not document which exceptions they raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            text = "The run continues without it; metrics.jsonl has all metrics."
            warnings.warn(f"{self.name} could not {action} ({reason}). {text}", stacklevel=3)
            self._library = None

    @abc.abstractmethod
    def _open(self, first_step: int) -> Any:
        """Return the library's writer for a run that starts after `first_step` steps."""

    @abc.abstractmethod
    def _log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step; names look like `train/loss`."""

    @abc.abstractmethod
    def _close(self, *, failed: bool) -> None:
        """Flush the metrics and record whether the run failed."""


class TensorBoard(Writer):
    """Writer of event files in `tensorboard/` of the run's folder: `tensorboard --logdir runs`."""

    name, package = "tensorboard", "tensorboardX"

    def _open(self, first_step: int) -> Any:
        from tensorboardX import SummaryWriter

        # A resumed run repeats the steps after its checkpoint, so their earlier values are purged, as in metrics.jsonl.
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
    """Writer to Weights & Biases. Variables such as WANDB_MODE=offline and WANDB_PROJECT work as usual.

    The run id is saved in the run's folder, so a resumed run continues the same W&B run.
    """

    name, package = "wandb", "wandb"

    def _open(self, first_step: int) -> Any:
        import wandb

        id_file = self._folder / "wandb.id"
        if not id_file.exists():
            replace_file(id_file, secrets.token_hex(8))
        library = wandb.init(
            id=id_file.read_text(encoding="ascii").strip(),
            name=self._folder.name,
            dir=str(self._folder),
            config=dict(self._config),
            resume="allow",
            settings=wandb.Settings(console="off"),  # standard output is used for the report
        )
        library.define_metric("*", step_metric="step")
        return library

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        # W&B drops values whose `step=` is not increasing. A validation has the step of the previous record, and a
        # resumed run repeats steps, so the step is logged as a metric.
        self._library.log({"step": step, **{name: x for name, x in values.items() if math.isfinite(x)}})

    def _close(self, *, failed: bool) -> None:
        self._library.finish(exit_code=int(failed))


WRITERS: dict[str, type[Writer]] = {writer.name: writer for writer in (TensorBoard, WandB)}


def check_writers(names: Sequence[str]) -> None:
    """Check that the writers exist and that their packages are installed."""
    for name in names:
        check_choice("writers", "the name of a metric writer", tuple(WRITERS), name=name)
        if importlib.util.find_spec(WRITERS[name].package) is None:
            reason = f"the package {WRITERS[name].package} is not installed"
            fix = f"pip install 'meshpar[{name}]', or remove this writer"
            raise problem(f"writer `{name}`", "log metrics", reason, fix, code="missing-package")


def writers(names: Sequence[str], folder: str | Path, *, config: Mapping[str, Any], also: Also | None) -> list[Hook]:
    """Create the hooks with these names. See `Writer` for the arguments."""
    return [WRITERS[name](folder, config=config, also=also) for name in names]
