"""Programs compiled for GPUs, stored so that `make test` does not compile them.

`make test-rest` compiles them again and compares the collectives.

    make programs          # after a change of collectives or of planted.py; needs the `aot` extra
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "data" / "pod"
HERE = "{root}/"

REFERENCE = ("ddp", "zero1", "hsdp", "fsdp_tensor", "fsdp_sequence", "context_fsdp", "overlapped", "int8")
"""Programs saved in addition to all planted mistakes."""


@dataclasses.dataclass
class Compiled:
    """A fake compiler process that returns a compiled program."""

    program: object

    def compile(self, traced, cluster, options=None):
        return self.program


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.json.xz"


NAMES = tuple(sorted(file.name.removesuffix(".json.xz") for file in FOLDER.glob("*.json.xz")))


def pods(names, *rest):
    """Return (name, *rest) cases for `parametrize`. Cases without a saved program are marked as compiled."""
    return [pytest.param(name, *rest, marks=() if name in NAMES else pytest.mark.pod) for name in names]


def load(name: str):
    """Return the saved program with the source paths of this checkout."""
    from meshpar.inspect.program import Program

    found = json.loads(lzma.decompress(file_of(name).read_bytes()))
    text = found["text"].replace(HERE, f"{ROOT}{os.sep}")
    return Program(**{**found, "text": text, "warnings": tuple(found["warnings"])})


def save(name: str, program) -> None:
    text = program.text.replace(f"{ROOT}{os.sep}", HERE)
    text = re.sub(r"\"/[^\"\n]*?/(?=site-packages/|lib/python)", '"', text)
    fields = {**dataclasses.asdict(program), "text": text, "compile_s": 0.0}
    file_of(name).write_bytes(lzma.compress(json.dumps(fields).encode(), preset=9 | lzma.PRESET_EXTREME))


def _renew() -> None:
    from meshpar.inspect.pod import PodProcess
    from tests.inspect import planted

    FOLDER.mkdir(exist_ok=True)
    asked = sys.argv[1:] or [*planted.PLANTS, *REFERENCE]
    with PodProcess() as pod:
        for name in asked:
            plant = planted.PLANTS[name]() if name in planted.PLANTS else planted.reference(name)
            save(name, pod.compile(plant.step.trace(plant.state, plant.batch), plant.cluster))
            print(name, file_of(name).stat().st_size, flush=True)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    _renew()
