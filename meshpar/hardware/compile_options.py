"""XLA's compile options: the one set by which `train` and `explain` compile a step, and its fingerprint."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from meshpar.sharding.types import AnyMesh, problem

Value = bool | int | float | str
Options = Mapping[str, Value]
"""Names of XLA's flags without their dashes, and their values."""

GPU_OPTIONS: Options = MappingProxyType({"xla_gpu_enable_latency_hiding_scheduler": True})
"""For GPUs, unless the user says otherwise. Newer XLA has the scheduler on by itself, jax 0.10's has not."""


IN_PLACE: Options = MappingProxyType(
    {f"xla_{platform}_copy_insertion_use_region_analysis": True for platform in ("cpu", "gpu")}
)
"""For pipelines: XLA looks closer at what a branch in a loop may overwrite, or every tick copies all buffers."""


OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
"""The option that says how many collectives may run at a time; XLA gives each its stream."""

APART: Options = MappingProxyType({OVERLAP_LIMIT: 4, "xla_disable_hlo_passes": "multi_output_fusion"})
"""For slices of the rows: messages of several at a time, and kernels of their own. XLA makes one of what slices do by
the same weights, norms say, and one slice would wait there for the other's messages."""


LATENCIES = "xla_gpu_pgle_profile_file_or_directory_path"
"""The option that names a file of what kernels and collectives were measured to take, by which XLA's scheduler hides
them. Left to its own estimate it gives all collectives one latency."""


def overlap_limit(options: Options) -> int:
    """Collectives that run at a time under these options."""
    return int(options.get(OVERLAP_LIMIT, 1))


def pipelined(kind: str) -> dict[str, Value]:
    """The option by which XLA lets a collective of a loop (`all_gather`, ...) run into its next iteration."""
    if jax.__version_info__ >= (0, 12):
        return {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON"}  # in XLA_FLAGS the word is "on"
    return {f"xla_gpu_enable_pipelined_{kind}": True}


def options_for(mesh: AnyMesh, given: Options, strategys: Options = MappingProxyType({})) -> dict[str, Value]:
    """The options for the devices of a mesh: on CPUs those given, which on GPUs join and override GPUs' own.

    Args:
      mesh: of the step.
      given: the user's.
      strategys: what the strategy needs, on CPUs and on GPUs.

    A mesh without devices stands for a pod's.
    """
    on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    own = {name: value for name, value in strategys.items() if name.startswith("xla_cpu_") == on_cpu}
    return {**({} if on_cpu else GPU_OPTIONS), **own, **given}


def check_kind(options: object) -> None:
    """Raises `ValueError` for what is no dict from names of XLA's options to their values, whichever XLA knows."""
    if not isinstance(options, Mapping):
        exists = "it is a dict of XLA's options by name"
        raise problem(f"xla={options!r}", "compile by it", exists, "write xla={'xla_...': value}")
    for name, value in options.items():
        if not isinstance(name, str) or not name.startswith("xla_") or not isinstance(value, Value):
            fix = "write it without dashes, as xla_gpu_all_gather_combine_threshold_bytes=1073741824"
            exists = "the names of XLA's options begin with xla_"
            if isinstance(name, str) and name.startswith("xla_"):
                exists = f"values are Python's numbers, bools or words, no {type(value).__name__}"
            raise problem(_in_words(options), f"set {name!r} to {value!r}", exists, fix)


def _in_words(options: Mapping[Any, Any]) -> str:
    return "xla={" + ", ".join(f"{name!r}: {value!r}" for name, value in options.items()) + "}"


def check_options(options: Options) -> Options:
    """The options, if XLA takes them.

    Raises:
      ValueError: a name that is none of XLA's, or a value that is not of its type.
    """
    check_kind(options)
    where = _in_words(options)
    for name, value in options.items():
        if name == LATENCIES:
            _check_latencies(where, str(value))
        # Made anew each time: jax's cache takes 1 for an option that it knows as True.
        nothing = jax.jit(lambda: 0, compiler_options={name: value})
        try:  # XLA alone knows its options, and looks at them before it compiles
            nothing.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            said = str(error).partition(": ")[2].partition("\n")[0].rstrip(".")
            near = difflib.get_close_matches(name, GPU_OPTIONS, 1)
            fix = (
                f"did you mean {near[0]}?"
                if near and name not in near
                else (
                    "see XLA's flags for this version of jax: some have new names; what is on or off is True or False"
                )
            )
            raise problem(where, f"set {name} to {value!r}", said, fix) from error
    return options


def fingerprint(lowered: jax.stages.Lowered, options: Options) -> str:
    """Return twelve hexadecimal digits that are equal for equal lowered programs and compile options.

    A file of latencies counts by its content. Devices count by their number, kind and order: their numbers are part
    of the lowered program.
    """
    if LATENCIES in options:
        held = Path(str(options[LATENCIES])).read_bytes()
        options = {**options, LATENCIES: hashlib.sha256(held).hexdigest()}
    words = json.dumps([jax.__version__, sorted(options.items()), lowered.as_text()])
    return hashlib.sha256(words.encode()).hexdigest()[:12]


def _check_latencies(where: str, path: str) -> None:
    """Raises `ValueError` for a file that XLA would leave out without a word."""
    asked, fix = f"schedule by {path}", "name one that a profiler wrote"
    if not path.endswith(".pbtxt"):
        raise problem(where, asked, "XLA reads its text from *.pbtxt only", "name it FILE.pbtxt")
    if not Path(path).is_file():
        raise problem(where, asked, "there is no such file", fix)
    if not Path(path).read_text(encoding="utf-8", errors="replace").startswith("costs {"):
        raise problem(where, asked, "it does not begin with `costs {`, as latencies do", fix)
