"""Profile-guided latency estimation (PGLE): XLA recompiles a step with latencies measured on GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshpar.sharding.types import problem

CACHE_FOLDER = "jax_cache"
"""Name of the default folder for the compilation cache, next to the runs."""


def check_pgle(mesh: jax.sharding.Mesh, profile: tuple[int, int] | None = None) -> None:
    """Check that JAX can profile and recompile a step on this mesh. `profile` is the option `--profile`."""
    platform, config = mesh.devices.flat[0].platform, _config()
    for is_wrong, code, reason, fix in (
        (platform != "gpu", "unsupported-feature", "only the GPU compiler of XLA uses the profile, and these devices "
         f"are {platform}s", "remove pgle, or set it to False"),
        (profile is not None, "conflict", "--profile traces steps, and a process can run only a single profiler",
         "remove --profile, or set pgle to False: with JAX_COMPILATION_CACHE_DIR and "
         "JAX_COMPILATION_CACHE_EXPECT_PGLE=1 the run loads a program that an earlier run has recompiled"),
        (not config.jax_enable_compilation_cache, "conflict", "jax_enable_compilation_cache is off, so each start "
         "would profile and compile again", "turn it on"),
        (config.jax_pgle_profiling_runs < 1, "out-of-range", "jax_pgle_profiling_runs is "
         f"{config.jax_pgle_profiling_runs}, so JAX would not profile", "set it to 1 or more; the default is 3"),
    ):  # fmt: skip
        if is_wrong:
            requested = "recompile the step with measured latencies"
            raise problem("Recipe.pgle=True", requested, reason, fix, code=code)


@contextlib.contextmanager
def pgle_enabled(folder: Path) -> Iterator[None]:
    """Turn on the PGLE of JAX within a block, with a compilation cache.

    All processes must share the cache folder, because only process 0 writes the recompiled program.

    Args:
      folder: parent of the cache folder, unless `jax_compilation_cache_dir` is set.
    """
    config = _config()
    before = config.jax_enable_pgle, config.jax_compilation_cache_dir
    cache = before[1]
    if cache is None:
        cache = str(folder / CACHE_FOLDER)
        # JAX runs the programs in the cache, so only the user may write to it.
        (folder / CACHE_FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        _set(True, cache)
        yield
    finally:
        _set(*before)


def _set(is_enabled: bool, cache: str | None) -> None:
    jax.config.update("jax_enable_pgle", is_enabled)
    jax.config.update("jax_compilation_cache_dir", cache)
    compilation_cache.reset_cache()  # otherwise JAX keeps the cache of the first compilation


def _config() -> Any:
    return jax.config  # the options have no static types
