"""Kills processes of a local pod at random moments, restarts it each time, and holds the end to a run left alone.

    python -m tests.measure.kills                       # 20 kills of a run of 2 processes that saves every step
    python -m tests.measure.kills --kills 100 --seed 3

Killed are, at random, one of the processes or the one that started them, early, between steps and during saves. After
each, all processes have to be gone and every checkpoint whole. At the end arrays have the fingerprints, and the log the
losses, of an uninterrupted run. The figures go to standard output as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STEPS = 160
GONE_S = 120.0
"""Seconds in which everybody has to be gone."""


def start(folder: Path) -> subprocess.Popen:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    args = ["train", "recipe.py", "--processes", "2", "--devices", "2", "--stall-limit", "10"]
    args += ["--set", f"steps={STEPS}", "--set", "checkpoint_every=1"]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "meshpar.cli.main", *args], cwd=folder, env=env, stdout=log, stderr=log
        )


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(one) for one in listed.read_text().split()] if listed.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def lines_of(folder: Path) -> int:
    path = folder / "runs" / "pod" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_one(folder: Path, draw: random.Random) -> dict[str, Any] | None:
    """Start, wait for a random moment, kill one with signal 9; None where the run came to its end first."""
    process = start(folder)
    begun, more = lines_of(folder), draw.choice([0, 0, 1, 2, 5, 10])
    if more == 0:
        time.sleep(draw.uniform(0.5, 6.0))  # while it starts, restores or compiles
    while more and process.poll() is None and lines_of(folder) < begun + more:
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.05))
    those = {"parent": process.pid, **{f"process {at}": pid for at, pid in enumerate(children(process.pid))}}
    if process.poll() is not None:
        return None
    name = draw.choice(sorted(those))
    writing = bool(list((folder / "runs" / "pod" / "checkpoints").glob("*orbax-checkpoint-tmp*")))
    os.kill(those[name], signal.SIGKILL)
    began = time.monotonic()
    while any(alive(pid) for pid in those.values()) and time.monotonic() - began < GONE_S:
        process.poll()
        time.sleep(0.05)
    left = [name for name, pid in those.items() if alive(pid)]
    return {
        "killed": name,
        "at": lines_of(folder),
        "writing": writing,
        "gone_s": time.monotonic() - began,
        "left": left,
    }


def main() -> None:
    from meshpar.loop.checkpoint import Checkpoints, damage_of, read_index
    from tests.cli.test_multihost import RECIPE, losses

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw, found = random.Random(asked.seed), []
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, name) for name in ("whole", "killed")]
        for folder in folders:
            folder.mkdir()
            (folder / "recipe.py").write_text(RECIPE)
        assert start(folders[0]).wait() == 0, (folders[0] / "log").read_text()
        run = folders[1] / "runs" / "pod"
        while len(found) < asked.kills and (one := kill_one(folders[1], draw)) is not None:
            kept = Checkpoints(run / "checkpoints").steps() if run.exists() else []
            one["damaged"] = {step: why for step in kept if (why := damage_of(run / "checkpoints", step))}
            found.append(one)
            print(one, file=sys.stderr, flush=True)
        code = start(folders[1]).wait()
        ends = [read_index(folder / "runs" / "pod" / "checkpoints", STEPS)["leaves"] for folder in folders]
        figures = {
            "kills": len(found),
            "while a checkpoint was written": sum(one["writing"] for one in found),
            "processes left behind": sum(len(one["left"]) for one in found),
            "half checkpoints taken for whole": sum(len(one["damaged"]) for one in found),
            "slowest to be gone, s": round(max(one["gone_s"] for one in found), 1),
            "last restart": code,
            "arrays as of the run left alone": ends[0] == ends[1],
            "losses as of the run left alone": losses(folders[0]) == losses(folders[1]),
        }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
