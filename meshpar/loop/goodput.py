"""Goodput: the fraction of a run's wall time, including restarts, that contributes to its result.

    wall time = steps + start + compile + data + save + validate + restart + redone + other

The definition follows Google's ml-goodput-measurement: each step counts as productive once. Steps lost with a failed
process and the time until its replacement starts are unproductive.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import jax

from meshpar.loop.fit import Hook, Record, Run, Validation
from meshpar.loop.metrics_file import read_lines
from meshpar.sharding.errors import MeshparError
from meshpar.sharding.host_resources import read_json, replace_file

WRITE_EVERY_S = 10.0
"""Seconds between two writes of the file. If a run is killed, at most this time is counted as `restart`."""


class Goodput(Hook):
    """Hook that adds up the wall time by phase, on process 0, in a file that a resumed run continues.

    Steps in `metrics` (metrics.jsonl) after the restored checkpoint are counted as redone. The `MetricsFile` removes
    their lines, so pass this hook to `fit` before the writer. `began_s` is the start of this process.
    """

    def __init__(self, path: str | os.PathLike[str], *, metrics: str | os.PathLike[str], began_s: float) -> None:
        self._path, self._metrics, self._began_s = Path(path), Path(metrics), began_s
        self._before: dict[str, float] = {}
        self._run: Run | None = None
        self._written_s = 0.0

    def on_start(self, run: Run) -> None:
        if jax.process_index() != 0:
            return
        self._run, self._before, account = run, {}, self._read()
        if account is not None:
            repeated = range(run.first_step + 1, account["step"] + 1)
            lines = [line for line in read_lines(self._metrics) if line["step"] in repeated and "loss" in line]
            lost_s = sum(x for line in lines if isinstance(x := line.get("seconds"), int | float))
            lost_s = min(lost_s, account["seconds"].get("steps", 0.0))
            self._before = _sum(account["seconds"], {"steps": -lost_s, "redone": lost_s})
        resumed = account is not None and account["reason"] != "done"
        since_s = account["seen_s"] if account is not None and resumed else self._began_s
        self._before = _sum(self._before, {"restart" if resumed else "start": max(time.time() - since_s, 0.0)})

    def on_record(self, run: Run, record: Record) -> None:
        if time.time() - self._written_s > WRITE_EVERY_S:
            self._write(None)

    def on_validation(self, run: Run, validation: Validation) -> None:
        self._write(None)

    def on_end(self, run: Run, reason: str) -> None:
        self._write(reason)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the first start of the run; empty on processes other than 0."""
        if self._run is None:
            return {}
        phases = {"steps": self._run.steps_s, **self._run.lost_s}
        phases["other"] = max(self._run.elapsed_s - sum(phases.values()), 0.0)
        return _sum(self._before, phases)

    @property
    def share(self) -> float | None:
        """Fraction of the wall time in productive steps; None before the run starts."""
        seconds = self.seconds
        total = sum(seconds.values())
        return seconds["steps"] / total if total else None

    def line(self, record: Record) -> dict[str, float]:
        """Return the goodput, for a line of metrics.jsonl."""
        share = self.share
        return {} if share is None else {"goodput": round(share, 4)}

    def _read(self) -> dict[str, Any] | None:
        """Return the content of the file, or None if it is missing or damaged: training does not depend on it."""
        if not self._path.exists():
            return None
        with contextlib.suppress(MeshparError, KeyError, TypeError, ValueError, AttributeError):
            saved = read_json(self._path, str(self._path), "remove it")
            seconds = {str(name): float(value) for name, value in saved["seconds"].items()}
            times = {"seconds": seconds, "seen_s": float(saved["seen_s"])}
            return {**times, "step": int(saved["step"]), "reason": saved["reason"]}
        return None

    def _write(self, reason: str | None) -> None:
        if self._run is None:
            return
        self._written_s = time.time()
        step = self._run.first_step if self._run.last is None else self._run.last.step
        seconds = {name: round(seconds, 3) for name, seconds in self.seconds.items()}
        account = {"seconds": seconds, "step": step, "seen_s": round(self._written_s, 3), "reason": reason}
        with contextlib.suppress(OSError):  # if the disk is full, `MetricsFile` warns
            replace_file(self._path, json.dumps(account) + "\n")


def words(seconds: Mapping[str, float]) -> str:
    """Summarize the seconds by phase in a line: `93% of 812 s in steps; compile 4%, save 2%`."""
    total = sum(seconds.values())
    lost = sorted(((s, name) for name, s in seconds.items() if name != "steps" and s >= 0.005 * total), reverse=True)
    phases = ", ".join(f"{name} {s / total:.0%}" for s, name in lost)
    return f"{seconds['steps'] / total:.0%} of {total:,.0f} s in steps" + f"; {phases}" * bool(phases)


def _sum(*accounts: Mapping[str, float]) -> dict[str, float]:
    return {name: sum(account.get(name, 0.0) for account in accounts) for name in dict.fromkeys(chain(*accounts))}
