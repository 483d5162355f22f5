"""The persistent compilation cache of a run.

FOLDER/*-cache                                   programs, written by process 0
FOLDER/xla_gpu_per_fusion_autotune_cache_dir/    measurements for the choice of GPU kernels
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshpar.pod.coordination import check_shared, this_pod
from meshpar.runs.folder import RunFolder
from meshpar.sharding import remote
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import is_url

NONE = "none"
"""Value of `compile_cache` with which programs are not kept."""
SHARED_FOLDER = "jax_cache"
"""Name of a pod's default folder, next to its run folders."""
UNUSED_S = 90 * 86_400.0
"""Age at which unread files are removed from the user's cache folder."""
_CONFIG: Any = jax.config  # These options have no static types.


def cache_location(
    option: str | os.PathLike[str] | None, *, platform: str, folder: RunFolder | None, warn: Callable[[str], None]
) -> str | None:
    """Create the folder in which a run keeps its compiled programs. All processes must call it.

    The default is the folder that is set in JAX (`JAX_COMPILATION_CACHE_DIR`). If none is set:

        devices         programs are kept in
        CPUs            no folder: a program has instructions of the CPU that compiled it, which can crash a different
                        CPU (https://github.com/openxla/xla/issues/44565)
        accelerators    the user's cache folder
        a pod           a folder next to the run folders, shared by all processes: XLA distributes the measurements of
                        GPU kernels over the processes, so either all processes compile a program or none does

    Args:
      option: a folder, a URL, "none", or None for the default.
      platform: platform of the devices, such as "gpu".
      folder: the run folder; None for a single process without a run.
      warn: receives the reason if the default folder cannot be used.

    Returns:
      The folder or URL, or None if programs are not kept.

    Raises:
      ValueError: if a process cannot write to the folder of the `option`.
    """
    if option is not None:
        return None if str(option) == NONE else _checked(os.fspath(option))
    if _CONFIG.jax_compilation_cache_dir is not None:
        return _CONFIG.jax_compilation_cache_dir if _CONFIG.jax_enable_compilation_cache else None
    if platform == "cpu":
        return None
    if folder is not None and this_pod() is not None:
        if folder.url is not None:
            return remote.join(folder.url.rpartition("/")[0], SHARED_FOLDER)
        return _checked(str(folder.local.parent / SHARED_FOLDER))
    default = remote.cache_folder() / "programs"
    if reason := _create(default):
        warn(f"compiled programs are not kept in {default}: {reason}")
        return None
    _remove_unused(default)
    return str(default)


def _checked(location: str) -> str:
    where = f"the compilation cache {location!r:.200}"
    if is_url(location):
        location = remote.join(location)
        remote.check_access(location, where)
    elif (pod := this_pod()) is not None:
        if pod.process_id == 0:
            _create(Path(location))
        check_shared(pod, Path(location))
    elif reason := _create(Path(location)):
        fix = "pass a folder that you can write to, or 'none': --compile-cache none"
        raise problem(where, "keep compiled programs", reason, fix, code="not-writable")
    return location


def _create(folder: Path) -> str:
    """Create a folder that only the user can write to, because JAX runs its programs. Return the reason if it fails."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"the folder cannot be created ({error.strerror or error})"
    return "" if os.access(folder, os.W_OK | os.X_OK) else "you cannot write to this folder"


def _remove_unused(folder: Path) -> None:
    oldest_s = time.time() - UNUSED_S
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # removed by a concurrent run
            state = path.stat()
            if path.is_file() and max(state.st_atime, state.st_mtime) < oldest_s:
                path.unlink()


@contextlib.contextmanager
def keeping_programs(location: str | None, *, is_profiled: bool = False) -> Iterator[None]:
    """Read and write the compilation cache at `location` within a block, or none if it is None.

    Programs with short compile times are written, too. Otherwise XLA may choose other kernels for them at each start.
    A profile shows the scopes of a program, so profiled runs load no program that was compiled with other scopes.
    """
    names = (
        "jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_enable_xla_caches", "jax_compilation_cache_include_metadata_in_key",
    )  # fmt: skip
    before = {name: getattr(_CONFIG, name) for name in names}
    if location is None:
        values: dict[str, Any] = {names[0]: False}
    elif location == before[names[1]]:  # the user has configured JAX
        values = {}
    else:
        # XLA writes its measurements to local files only.
        xla_caches = None if is_url(location) else before[names[3]]
        values = dict(zip(names, (True, location, 0.0, xla_caches, is_profiled or before[names[4]]), strict=True))
    try:
        _set(values)
        yield
    finally:
        _set(before)


def _set(values: dict[str, Any]) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX reads the options of its cache only once
