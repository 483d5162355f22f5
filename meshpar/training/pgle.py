"""Profile-guided latency estimation (PGLE): XLA recompiles a step with latencies measured on GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshpar.sharding.errors import check_cases

CACHE_FOLDER = "jax_cache"
"""Name of the default folder for the compilation cache, next to the runs."""
_CONFIG: Any = jax.config  # The options of PGLE have no static types.


def check_pgle(mesh: jax.sharding.Mesh, profile: tuple[int, int] | None = None) -> None:
    """Check that JAX can profile and recompile a step on this mesh. `profile` is the option `--profile`."""
    platform, requested = mesh.devices.flat[0].platform, "recompile the step with measured latencies"
    runs, has_cache = _CONFIG.jax_pgle_profiling_runs, _CONFIG.jax_enable_compilation_cache
    reason = f"only the GPU compiler of XLA uses the profile, and these devices are {platform}s"
    case = platform != "gpu", reason, "remove pgle, or set it to False"
    check_cases("Recipe.pgle=True", requested, "unsupported-feature", case)
    check_cases(
        "Recipe.pgle=True", requested, "conflict",
        (profile is not None, "--profile traces steps, and a process can run only a single profiler",
         "remove --profile, or set pgle to False: with JAX_COMPILATION_CACHE_DIR and "
         "JAX_COMPILATION_CACHE_EXPECT_PGLE=1 the run loads a program that an earlier run has recompiled"),
        (not has_cache, "jax_enable_compilation_cache is off, so each start would profile and compile again",
         "turn it on"),
    )  # fmt: skip
    case = runs < 1, f"jax_pgle_profiling_runs is {runs}, so JAX would not profile", "set it to 1 or more"
    check_cases("Recipe.pgle=True", requested, "out-of-range", case)


@contextlib.contextmanager
def pgle_enabled(folder: Path) -> Iterator[None]:
    """Turn on the PGLE of JAX within a block, with a compilation cache.

    All processes must share the cache folder, because only process 0 writes the recompiled program.

    Args:
      folder: parent of the cache folder, unless `jax_compilation_cache_dir` is set.
    """
    before = _CONFIG.jax_enable_pgle, _CONFIG.jax_compilation_cache_dir
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
