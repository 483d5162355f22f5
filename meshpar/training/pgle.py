"""Profile-guided latency estimation (PGLE): jax measures a step on GPUs, and XLA schedules it again by these times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshpar.sharding.types import problem

CACHE_FOLDER = "jax_cache"
"""The compilation cache next to the runs, for processes in which the user has not set another one."""


def check_pgle(mesh: jax.sharding.Mesh, profile: tuple[int, int] | None = None) -> None:
    """Check that jax can measure and recompile a step on this mesh.

    Args:
      mesh: the mesh of the step.
      profile: the steps that `--profile` traces, if any.

    Raises:
      ValueError: the devices are not GPUs, another profiler would run, or jax's own options forbid it.
    """
    platform, config = mesh.devices.flat[0].platform, _config()
    for is_wrong, exists, fix in (
        (platform != "gpu", f"only XLA's GPU compiler uses the profile, and these devices are {platform}s",
         "leave out pgle, or set it to False"),
        (profile is not None, "--profile traces steps, and a process has one profiler at a time",
         "leave out --profile, or set pgle to False: with JAX_COMPILATION_CACHE_DIR and "
         "JAX_COMPILATION_CACHE_EXPECT_PGLE=1 that run loads the program that an earlier one recompiled"),
        (not config.jax_enable_compilation_cache, "jax_enable_compilation_cache is off, and each start would measure "
         "and compile again", "turn it on"),
        (config.jax_pgle_profiling_runs < 1, f"jax_pgle_profiling_runs is {config.jax_pgle_profiling_runs}, so jax "
         "would measure nothing", "set it to 1 or more; jax's default is 3"),
    ):  # fmt: skip
        if is_wrong:
            raise problem("Recipe.pgle=True", "recompile the step with measured latencies", exists, fix)


@contextlib.contextmanager
def pgle_enabled(folder: Path) -> Iterator[None]:
    """Turn jax's PGLE on, with a compilation cache: `jax_compilation_cache_dir` if it is set, else in `folder`.

    All processes of a pod must see the same cache folder: process 0 writes the recompiled program for all.
    """
    config = _config()
    before = config.jax_enable_pgle, config.jax_compilation_cache_dir
    cache = before[1]
    if cache is None:
        cache = str(folder / CACHE_FOLDER)
        (folder / CACHE_FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)  # who writes there runs code here
    try:
        _set(True, cache)
        yield
    finally:
        _set(*before)


def _set(is_on: bool, cache: str | None) -> None:
    jax.config.update("jax_enable_pgle", is_on)
    jax.config.update("jax_compilation_cache_dir", cache)
    compilation_cache.reset_cache()  # jax looks for the cache only once in a process


def _config() -> Any:
    return jax.config  # its options are not typed
