"""Profile-guided latency estimation (PGLE): XLA recompiles a step with latencies measured on GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from meshpar.sharding.errors import check_cases

_CONFIG: Any = jax.config  # The options of PGLE have no static types.


def check_pgle(mesh: jax.sharding.Mesh, profile: tuple[int, int] | None = None, *, keeps_programs: bool) -> None:
    """Check that JAX can profile and recompile a step on this mesh.

    Args:
      mesh: the mesh of the step.
      profile: the option `--profile`.
      keeps_programs: whether compiled programs are kept. All processes must read the same folder, because only
        process 0 writes the recompiled program.
    """
    platform, requested = mesh.devices.flat[0].platform, "recompile the step with measured latencies"
    runs = _CONFIG.jax_pgle_profiling_runs
    reason = f"only the GPU compiler of XLA uses the profile, and these devices are {platform}s"
    case = platform != "gpu", reason, "remove pgle, or set it to False"
    check_cases("Recipe.pgle=True", requested, "unsupported-feature", case)
    check_cases(
        "Recipe.pgle=True", requested, "conflict",
        (profile is not None, "--profile traces steps, and a process can run only a single profiler",
         "remove --profile, or set pgle to False: with JAX_COMPILATION_CACHE_EXPECT_PGLE=1 the run loads the program "
         "that an earlier run has recompiled"),
        (not keeps_programs, "compiled programs are not kept, so each start would profile and compile again",
         "pass a folder: --compile-cache DIR"),
    )  # fmt: skip
    case = runs < 1, f"jax_pgle_profiling_runs is {runs}, so JAX would not profile", "set it to 1 or more"
    check_cases("Recipe.pgle=True", requested, "out-of-range", case)


@contextlib.contextmanager
def pgle_enabled() -> Iterator[None]:
    """Turn on the PGLE of JAX within a block."""
    before = _CONFIG.jax_enable_pgle
    try:
        jax.config.update("jax_enable_pgle", True)
        yield
    finally:
        jax.config.update("jax_enable_pgle", before)
