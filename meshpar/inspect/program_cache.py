"""Files with the results of earlier compilations.

FOLDER/KEY.json.gz    a `Program`; the key is a hash of the lowered program, the target and the versions of XLA
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshpar.hardware.clusters import Cluster
from meshpar.hardware.compile_options import LATENCIES
from meshpar.inspect.program import Program
from meshpar.inspect.target import target_config

COMPILERS = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
"""Packages whose versions may change a compiled program."""


class ProgramCache:
    """A folder with programs that were compiled for clusters. Processes may share it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def get(
        self, module: bytes, cluster: Cluster, options: Mapping[str, Any], compiled: Callable[[], Program]
    ) -> Program:
        """Read the program of an earlier compilation, or compile it and write the file.

        Damaged files and files of other versions of meshpar are replaced.

        Args:
          module: the lowered program with its source lines, from `stablehlo_of`.
          cluster: the target.
          options: compile options of the step.
          compiled: function that compiles the program.
        """
        path = self._path(module, cluster, options)
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError, KeyError):
            fields = json.loads(gzip.decompress(path.read_bytes()))
            program = Program(**{**fields, "warnings": tuple(fields["warnings"])})
            os.utime(path)
            return program
        program = compiled()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = gzip.compress(json.dumps(dataclasses.asdict(program)).encode(), compresslevel=3)
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
            file.write(data)
        Path(file.name).replace(path)  # other processes see the complete file or none
        return program

    def _path(self, module: bytes, cluster: Cluster, options: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(module)
        if LATENCIES in options:
            digest.update(Path(str(options[LATENCIES])).read_bytes())
        content = [target_config(cluster.gpu), cluster.name, sorted(options.items()), *map(_version, COMPILERS)]
        digest.update(json.dumps(content).encode())
        return self.folder / f"{digest.hexdigest()[:32]}.json.gz"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
