"""Goodput: the share of a run's wall time, over all its restarts, in steps that its result is made of.

    wall time = steps + start + compile + data + save + validate + restart + redone + other

As Google's ml-goodput-measurement has it: time is productive in steps that count, each once; what was trained and then
lost with a process that died is not, nor is the time until another takes its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from meshpar.loop.fit import Hook, Record, Run, Validation, read_lines
from meshpar.sharding.host_resources import read_json, replace_file
from meshpar.sharding.types import MeshparError

EVERY_S = 10.0
"""Seconds between two writings of the account: so much of a killed run's time counts as `restart`."""


class Goodput(Hook):
    """Keeps account in a file, so that a run that goes on knows what went before. Process 0 does.

    Args:
      path: the account, JSON.
      metrics: the run's metrics.jsonl: lines of steps that are to be taken again are time lost. To be given to `fit`
        before the `JsonlWriter`, which drops them.
      began_s: when this process began to work for the run, by `time.time`.
    """

    def __init__(self, path: str | os.PathLike[str], *, metrics: str | os.PathLike[str], began_s: float) -> None:
        self._path, self._metrics, self._began_s = Path(path), Path(metrics), began_s
        self._before: dict[str, float] = {}
        self._run: Run | None = None
        self._written_s = 0.0

    def on_start(self, run: Run) -> None:
        if jax.process_index() != 0:
            return
        self._run, self._before = run, {}
        now, account = time.time(), self._read()
        if account is not None:
            self._before = {name: float(seconds) for name, seconds in account["seconds"].items()}
            counted = range(run.first_step + 1, int(account["step"]) + 1)
            lost_s = sum(_seconds(line) for line in read_lines(self._metrics) if line["step"] in counted)
            lost_s = min(lost_s, self._before.get("steps", 0.0))
            _add(self._before, "steps", -lost_s)
            _add(self._before, "redone", lost_s)
        resumed = account is not None and account["reason"] != "done"
        since_s = account["seen_s"] if account is not None and resumed else self._began_s
        _add(self._before, "restart" if resumed else "start", max(now - since_s, 0.0))

    def on_record(self, run: Run, record: Record) -> None:
        if time.time() - self._written_s > EVERY_S:
            self._write(None)

    def on_validation(self, run: Run, validation: Validation) -> None:
        self._write(None)

    def on_end(self, run: Run, reason: str) -> None:
        self._write(reason)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by what they went into, since the run's first start; empty on other processes than 0."""
        run, found = self._run, dict(self._before)
        if run is None:
            return {}
        here = {"steps": run.steps_s, **run.lost_s}
        here["other"] = max(run.elapsed_s - sum(here.values()), 0.0)
        for name, seconds in here.items():
            _add(found, name, seconds)
        return found

    @property
    def share(self) -> float | None:
        """Of the wall time, what went into steps that count; None before any."""
        seconds = self.seconds
        whole = sum(seconds.values())
        return seconds["steps"] / whole if whole else None

    def line(self, record: Record) -> dict[str, float]:
        """For a step's line of metrics.jsonl."""
        share = self.share
        return {} if share is None else {"goodput": round(share, 4)}

    def _read(self) -> dict[str, Any] | None:
        """The account of the run so far; one that is damaged is none, for no step depends on it."""
        if not self._path.exists():
            return None
        with contextlib.suppress(MeshparError, KeyError, TypeError, ValueError, AttributeError):
            found = read_json(self._path, str(self._path), "remove it")
            wanted = {"seconds": {str(k): float(v) for k, v in found["seconds"].items()}}
            return {**wanted, "step": int(found["step"]), "seen_s": float(found["seen_s"]), "reason": found["reason"]}
        return None

    def _write(self, reason: str | None) -> None:
        if self._run is None:
            return
        self._written_s = time.time()
        step = 0 if self._run.last is None else self._run.last.step
        account = {
            "seconds": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "step": max(step, self._run.first_step),
            "seen_s": round(self._written_s, 3),
            "reason": reason,
        }
        with contextlib.suppress(OSError):  # a full disk, of which metrics.jsonl tells
            replace_file(self._path, json.dumps(account) + "\n")


def words(seconds: Mapping[str, float]) -> str:
    """An account in a line: `93% of 812 s in steps; compile 4%, save 2%`."""
    whole = sum(seconds.values())
    lost = sorted(((s, name) for name, s in seconds.items() if name != "steps" and s >= 0.005 * whole), reverse=True)
    rest = ", ".join(f"{name} {s / whole:.0%}" for s, name in lost)
    return f"{seconds['steps'] / whole:.0%} of {whole:,.0f} s in steps" + f"; {rest}" * bool(rest)


def _add(account: dict[str, float], name: str, seconds: float) -> None:
    account[name] = account.get(name, 0.0) + seconds


def _seconds(line: Mapping[str, Any]) -> float:
    seconds = line.get("seconds")
    return float(seconds) if "loss" in line and isinstance(seconds, int | float) else 0.0
