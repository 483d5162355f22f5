"""Checkpoints of the training state: written asynchronously with orbax, restored onto any mesh.

A checkpoint is a folder named by its step. orbax writes it under a temporary name and renames it when it is complete,
so a process that is killed during a save leaves the earlier checkpoints intact. Buckets have no rename: there, a
checkpoint is complete when it contains the object `commit_success.txt`, which orbax writes last. Each checkpoint has
two items:

    state   all arrays by path, unsharded
    run     JSON with a checksum: format, versions, step, data position; shape, dtype and fingerprint of each array

Fingerprints are computed on the devices before a save and after a restore. They detect flipped bits in data files and
items from different saves, which orbax does not. The step in `run` detects a folder that was renamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import math
import os
import shutil
import threading
import time
import types
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.optim.averages import averages_of, schedule_free_iterate, schedule_free_of
from meshpar.pod import watchdog
from meshpar.pod.coordination import check_shared, this_pod
from meshpar.sharding import remote
from meshpar.sharding.context import apart
from meshpar.sharding.host_resources import is_url
from meshpar.sharding.types import MeshparError, check_positive_int, path_str, problem
from meshpar.training.state import Setup, TrainState

FORMAT = 2
"""Version of the checkpoint format. Increase it if older readers would misread a new checkpoint."""
SET_ASIDE = "set_aside"
"""Subfolder for checkpoints that a run does not continue from: damaged, or later than its restart."""

_TEMPORARY = ".orbax-checkpoint-tmp"
"""Suffix that orbax appends to the name of an incomplete checkpoint."""
_COMMITTED = "commit_success.txt"
"""Name of the object that marks a complete checkpoint in a bucket."""
_SHARE_FROM_BYTES = 1 << 20
"""Minimum bytes per replica for which processes share the write of a replicated array. The slices are computed before
training continues, which costs more than it saves for small arrays. If no dim is divisible by the number of replicas,
a single process writes the array."""
_POLL_S = 0.25
_MAX_POLLS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """The content of a checkpoint."""

    state: TrainState
    data_state: dict[str, Any] | None
    """The data position that was passed to `save`."""
    step: int


class Checkpoints:
    """The checkpoints of a run, in a folder.

    Incomplete checkpoints are ignored. Files are created and deleted in `save` only, so a second process may read the
    folder of a run in progress. With multiple processes, all must call each method, on a shared folder.

    Args:
      folder: a local path or a bucket URL that orbax supports. It is created by the first `save`.
      keep: the number of newest checkpoints to keep.

    Example:
      with mp.Checkpoints("runs/gpt/checkpoints", keep=3) as checkpoints:
          restored = checkpoints.restore(state)
          state = restored.state if restored else state
          checkpoints.save(state)
    """

    def __init__(self, folder: Any, *, keep: int = 3) -> None:
        from etils import epath

        check_positive_int("Checkpoints", "the number of checkpoints to keep", keep=keep)
        _filter_orbax_logs()
        _patch_orbax()
        self._is_local = not is_url(folder)
        self.folder = epath.Path(folder).absolute() if self._is_local else epath.Path(remote.join(folder))
        self._where = f"checkpoints in {self.folder}"
        if not self._is_local:
            self._bucket = remote.filesystem(str(self.folder), self._where)
            if str(self.folder).startswith("s3:"):
                _patch_kvstore()
        self.keep, self._failed, self._is_shared = keep, False, False
        self._manager: Any = None
        self._current: int | None = None

    def check_shared(self) -> None:
        """Check that all processes use the same local folder, and create it. The first `save` calls this method.

        Raises:
          ValueError: on all processes: a process cannot access the folder of process 0.
        """
        pod = this_pod()
        if pod is not None and self._is_local and not self._is_shared:
            check_shared(pod, Path(self.folder))
        self._is_shared = True

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in ascending order. Steps are int32."""
        names: list[str] = []
        if not self._is_local:
            with remote.accessing(str(self.folder), self._where, "list them"):
                names = [path.split("/")[-2] for path in self._bucket.glob(f"{self.folder}/*/{_COMMITTED}")]
        else:  # complete local checkpoints are recognized by their names, which is faster than asking orbax
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(str(self.folder)) as entries:
                names = [entry.name for entry in entries if entry.is_dir()]
        steps = [int(name) for name in names if name.isascii() and name.isdecimal() and name == str(int(name))]
        return sorted(step for step in steps if step <= np.iinfo(np.int32).max)

    @apart()
    def save(self, state: TrainState, *, data_state: Mapping[str, Any] | None = None, wait: bool = False) -> bool:
        """Write a checkpoint of the state's step, in the background.

        Blocks until the step that produces the state is finished and its arrays are copied to the host. The state may
        be donated afterwards. If an earlier save is still in progress, it is finished first.

        Args:
          state: the state to write.
          data_state: JSON values with the data position, as returned by `Batches.get_state()`.
          wait: whether to return only after the checkpoint is on disk.

        Returns:
          False if this object has just written or restored this step, so no save is necessary. If the checkpoint was
          deleted in the meantime, a call with `wait=True` writes it again.

        Raises:
          ValueError: this or the previous checkpoint could not be written. `NoRoomError`: this one was not started.
        """
        self.check_shared()
        step = int(state.step)
        new = step != self._current
        if new or wait:
            self.wait()
            steps = _broadcast(self.steps())
            if self._current not in (None, *steps):
                new = True
                if jax.process_index() == 0:
                    text = f"was removed, renamed or emptied: the checkpoint of step {self._current} is gone"
                    warnings.warn(f"{self.folder} {text}. A new one is written now.", stacklevel=2)
                if self._manager is not None:
                    self._manager.reload()
        if new:
            self._set_aside([later for later in steps if later >= step])
            self._write(step, state, data_state)
            self._current = step
        if wait:
            self.wait()
        return new

    @apart()
    def restore(
        self,
        target: Setup | TrainState,
        step: int | None = None,
        *,
        weights_only: bool | Literal["averaged"] = False,
    ) -> Restored | None:
        """Read a checkpoint into the shardings of a state, regardless of the mesh and strategy that wrote it.

        Args:
          target: a concrete or abstract state, or its setup, with the arrays to read and their shardings.
          step: the step to read; by default the newest intact checkpoint. Newer damaged checkpoints cause a warning.
          weights_only: whether to read only the parameters and the other model variables, and to initialize the
            optimizer state. With "averaged", the parameters are those of `mp.eval_params`.

        Returns:
          The restored state, or None if the folder has no checkpoints.

        Raises:
          ValueError: the checkpoint is missing, damaged or from a different model or optimizer; or all are damaged.
        """
        setup = target if isinstance(target, Setup) else target.setup
        _concrete(setup)
        self.wait()
        steps, damaged = self._available(step, required=step is not None), dict[int, str]()
        for candidate in reversed(steps):
            try:
                restored = self._read(candidate, setup, weights_only)
            except _DamagedError as error:
                damaged[candidate] = error.reason
                continue
            for damaged_step, reason in damaged.items():
                text = f"is damaged and skipped: {reason}. Step {candidate} is used instead."
                warnings.warn(f"{self.folder / str(damaged_step)} {text}", stacklevel=2)
            self._current = candidate
            return restored
        if damaged:
            reason = "; ".join(f"step {damaged_step} is damaged ({text})" for damaged_step, text in damaged.items())
            fix = "restore the files from a backup, or move the folder away to start from step 0"
            raise problem(self._where, "restore a checkpoint", reason, fix, code="damaged-file")
        return None

    def _available(self, step: int | None, *, required: bool) -> list[int]:
        """Return the steps of all checkpoints, or only `step` if it is not None. With `required`, it must exist."""
        steps = _broadcast(self.steps())
        if required and (not steps or step not in (None, *steps)):
            requested = "read a checkpoint" if step is None else f"read step {step}"
            fix = "train first, or choose a listed step or a different folder"
            raise problem(self._where, requested, f"there are steps {steps}", fix, "not-found")
        return steps if step is None else [step]

    def wait(self) -> None:
        """Block until all saves are on disk. Raises `ValueError` if the last save failed."""
        if self._manager is not None:
            with self._writing(f"finish the save of step {self._current}"):
                self._manager.wait_until_finished()
                self._remove_old(self.keep)

    def close(self) -> None:
        """Wait for the last save and stop the background threads. Raises as `wait` does; may be called again."""
        manager, self._manager = self._manager, None
        if manager is not None:
            with self._writing(f"finish the save of step {self._current}"):
                manager.close()
                self._remove_old(self.keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        try:
            self.close()
        except ValueError as save_error:
            if error is None:
                raise
            error.add_note(str(save_error))  # the error that ended the block is more important

    def _write(self, step: int, state: TrainState, data_state: Mapping[str, Any] | None) -> None:
        from flax.traverse_util import unflatten_dict
        from orbax.checkpoint import args

        leaves = _leaves(state)
        arrays = {"leaves": unflatten_dict({path: x for path, x in leaves.items() if x.size}, sep="/")}
        index = _new_index(step, state, leaves, data_state)
        if self._failed:
            self._clear_failed()
        with self._writing(f"save step {step}"):
            manager = self._opened()
        self._check_room(step)  # after incomplete checkpoints have been removed
        items = args.Composite(state=args.PyTreeSave(arrays), run=args.JsonSave(index))
        with self._writing(f"save step {step}"):
            manager.save(step, args=items, force=True)

    def _check_room(self, step: int) -> None:
        """Check that the disk has room for a checkpoint as large as the newest, with the same result on all processes.

        If a write fails on a single process, the remaining processes wait ten minutes for its files.
        """
        steps = _broadcast(self.steps())
        if not steps or not self._is_local:
            return  # the size of the first checkpoint is unknown
        is_full = False
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                is_full = bytes_of(self.folder / str(steps[-1])) > shutil.disk_usage(self.folder).free
        if _broadcast([int(is_full)]) == [1]:
            reason = f"no space left on the disk for a checkpoint as large as that of step {steps[-1]}"
            fix = "free some disk space; earlier checkpoints are intact"
            raise NoRoomError(self._where, f"save step {step}", reason, fix, code="no-space")

    def _clear_failed(self) -> None:
        """Remove the files of a failed save after its remaining writers have finished.

        orbax reports the first write that fails while other writers continue, in the folder that the next save of the
        same step would use.
        """
        if jax.process_index() == 0:
            files: Any = None
            for _ in range(_MAX_POLLS):
                time.sleep(_POLL_S)
                folders = self._incomplete()
                files, previous = [list(folder.walk()) for folder in folders], files
                if files == previous:
                    break
            for folder in folders:
                folder.rmtree(missing_ok=True)
        barrier("meshpar: a failed save cleared")
        self._failed = False

    def _incomplete(self) -> list[Any]:
        """Return the folders of saves that were killed or failed, and of checkpoints whose removal was killed."""
        if self._is_local:
            return list(self.folder.glob(f"*{_TEMPORARY}*"))
        names = {path.split("/")[-1] for path in self._bucket.glob(f"{self.folder}/*")} - {*map(str, self.steps())}
        return [self.folder / name for name in names if name.isdecimal()]

    def _opened(self) -> Any:
        """Return the orbax manager. Creating it removes incomplete checkpoints of killed processes."""
        # Without this check, orbax retries for minutes in a background thread if the folder is not writable.
        if not self._is_local:
            if self._manager is None and jax.process_index() == 0:
                remote.check_access(str(self.folder), self._where)
                for folder in self._incomplete():
                    folder.rmtree()
        elif jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / "writable"
            probe.unlink(missing_ok=True)
            probe.touch(exist_ok=False)  # does not follow links
            probe.unlink()
        if self._manager is None:
            import orbax.checkpoint as ocp

            # The callback runs before the new checkpoint is renamed, so a complete checkpoint must stay.
            remove = functools.partial(self._remove_old, max(self.keep - 1, 1))
            in_background = ocp.options.AsyncOptions(post_finalization_callback=remove)
            more: dict[str, Any] = {}
            if not self._is_local:
                mode = ocp.options.AtomicityMode.COMMIT_FILE
                more = {"atomicity_options": ocp.options.AtomicityOptions(mode=mode)}
            options = ocp.CheckpointManagerOptions(
                create=True,
                cleanup_tmp_directories=self._is_local,  # in a bucket, orbax would remove `SET_ASIDE`, too
                async_options=in_background,
                **more,
            )
            arrays = ocp.type_handlers.ArrayHandler(
                use_replica_parallel=True,
                min_slice_bytes_for_replica_parallel=_SHARE_FROM_BYTES,
                enable_write_sharding_file=False,  # `restore` uses the shardings of its target
            )
            registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
            state = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
            handlers = {"state": state, "run": ocp.JsonCheckpointHandler()}
            self._manager = ocp.CheckpointManager(self.folder, item_handlers=handlers, options=options)
        return self._manager

    def _remove_old(self, keep: int) -> None:
        """Remove all checkpoints except the newest `keep`.

        orbax would delete file by file, so a killed process could leave a partial checkpoint under a valid name. Here
        the folder is hidden first. A partially deleted folder is then removed like an incomplete checkpoint.
        """
        if jax.process_index() == 0:
            for step in self.steps()[:-keep]:
                folder = self.folder / str(step)
                with contextlib.suppress(OSError):
                    self._hide(folder).rmtree()

    def _hide(self, folder: Any) -> Any:
        """Make a checkpoint incomplete in an atomic operation, and return its new path."""
        if self._is_local:
            return folder.rename(f"{folder}{_TEMPORARY}-removed")
        (folder / _COMMITTED).unlink()
        return folder

    def stored(self, step: int | None = None) -> Mapping[str, Any]:
        """Return the shape and dtype of each array in a checkpoint, by path. The default step is the newest."""
        return read_index(self.folder, self._available(step, required=True)[-1])["leaves"]

    def _read(self, step: int, setup: Setup, weights_only: bool | Literal["averaged"]) -> Restored:
        """Read a checkpoint; raise `_DamagedError` if its content changed since the save."""
        run = read_index(self.folder, step)
        where = f"checkpoint {self.folder / str(step)}"
        _check_format(run, where)
        like, stored = _leaves(setup.abstract), run["leaves"]
        if weights_only:
            like, stored = (
                {path: x for path, x in leaves.items() if path.split("/")[0] in ("params", "extra")}
                for leaves in (like, stored)
            )
        _check_fits(stored, like, where)
        _check_alpha(run.get("lora_alpha"), setup, where)
        sources = {path: _eval_sources(run, path) if weights_only == "averaged" else [path] for path in like}
        read = _sources_like(like, sources, run, setup)
        arrays = _read_verified(self.folder / str(step), read, run, _concrete(setup))
        if not weights_only:
            state = jax.tree.unflatten(jax.tree.structure(setup.abstract), arrays.values())
            return Restored(state=state, data_state=run["data_state"], step=step)
        structure = jax.tree.structure((setup.abstract.params, setup.abstract.extra))
        weights = [_combined([arrays[source] for source in sources[path]], x.dtype) for path, x in like.items()]
        params, extra = jax.tree.unflatten(structure, weights)
        return Restored(state=setup.begin(params, extra, 0), data_state=None, step=step)

    def _set_aside(self, steps: Sequence[int]) -> None:
        """Move later checkpoints away from a run that restarted before them, so that they are not taken for its own."""
        if not steps:
            return
        folder = self.folder / SET_ASIDE
        text = f"this run restarted before step {min(steps)}; the checkpoints of steps {steps} are moved to {folder}"
        warnings.warn(f"{self.folder}: {text}", stacklevel=3)
        if jax.process_index() == 0:
            if self._is_local:
                folder.mkdir(parents=True, exist_ok=True)
            for step in steps:
                earlier = folder.iterdir() if folder.exists() else ()
                number = sum(1 for path in earlier if path.name.split(".")[0] == str(step))
                source, target = self.folder / str(step), folder / (f"{step}.{number}" if number else str(step))
                if self._is_local:
                    source.rename(target)
                else:  # copied first, so that a killed process leaves a complete checkpoint in one of the folders
                    self._bucket.copy(f"{source}/", f"{target}/", recursive=True)
                    self._hide(source).rmtree()
        barrier("meshpar: checkpoints set aside")
        if self._manager is not None:
            self._manager.reload()

    @contextlib.contextmanager
    def _writing(self, requested: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._current, self._failed = None, True
            raise _write_problem(requested, error, self._where) from error


class NoRoomError(MeshparError):
    """The disk is too full for a checkpoint, so the save was not started."""


class _DamagedError(MeshparError):
    """The content of a checkpoint differs from the content at the save; `reason` says where."""


def _damaged(checkpoint: Any, reason: str) -> _DamagedError:
    fix = "choose another step, or restore the files from a backup"
    return _DamagedError(f"checkpoint {checkpoint}", "read it, because it is damaged", reason, fix, "damaged-file")


# ---- Reading without a model -----------------------------------------------------------------------------------------


def bytes_of(folder: Any) -> int:
    """Return the total bytes of the files in a folder and its subfolders."""
    if is_url(folder):
        return remote.filesystem(remote.join(folder), f"folder {folder}").du(remote.join(folder))
    return sum(os.lstat(os.path.join(root, name)).st_size for root, _, names in os.walk(folder) for name in names)


def read_index(folder: Any, step: int) -> dict[str, Any]:
    """Return the index of an available step: format, versions, mesh, strategy, arrays by path and data position.

    Raises:
      ValueError: the checkpoint is damaged.
    """
    checkpoint = Checkpoints(folder).folder / str(step)

    def read() -> dict[str, Any]:
        for path in Path(checkpoint).rglob("*") if os.path.isdir(checkpoint) else ():  # otherwise it is in a bucket
            if not path.is_dir() and not (path.is_file() and os.access(path, os.R_OK)):  # a pipe would block
                raise _damaged(checkpoint, f"{path.relative_to(checkpoint)} is not a readable file")
        sealed = json.loads((checkpoint / "run" / "metadata").read_text())
        if zlib.crc32(json.dumps(sealed["document"], sort_keys=True).encode()) != sealed["crc32"]:
            raise _damaged(checkpoint, "the checksum of run/metadata is wrong")
        return sealed["document"]

    index = _agreed(checkpoint, read)
    if index["step"] != step:
        raise _damaged(checkpoint, f"run/metadata belongs to step {index['step']}")
    return index


def damage_of(folder: Any, step: int) -> str | None:
    """Return a description of the damage of a checkpoint, or None if it is intact.

    This needs no model, mesh or recipe. All arrays are read onto the first device.
    """
    try:
        index = read_index(folder, step)
        _read_on_first_device(folder, index, index["leaves"])
    except _DamagedError as error:
        return error.reason
    return None


def read_leaf(folder: Any, index: Mapping[str, Any], path: str) -> np.ndarray:
    """Read an array of a checkpoint, unsharded, and check its fingerprint. Parameters are those of `mp.eval_params`.

    This needs no model, mesh or recipe. `index` is the return value of `read_index`, and `path` a key of
    `index["leaves"]`.
    """
    arrays = _read_on_first_device(folder, index, _eval_sources(index, path))
    return np.asarray(_combined([*arrays.values()], index["leaves"][path]["dtype"]))


def _read_on_first_device(folder: Any, index: Mapping[str, Any], paths: Iterable[str]) -> dict[str, jax.Array]:
    _check_format(index, f"checkpoint {folder}/{index['step']}")
    mesh = Mesh(np.array(jax.devices()[:1]), ("all",))
    sharding, leaves = NamedSharding(mesh, PartitionSpec()), index["leaves"]
    like = {
        path: jax.ShapeDtypeStruct(leaves[path]["shape"], leaves[path]["dtype"], sharding=sharding) for path in paths
    }
    return _read_verified(Checkpoints(folder).folder / str(index["step"]), like, index, mesh)


def _read_verified(folder: Any, like: Mapping[str, Any], index: Mapping[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """Read the arrays with the paths in `like`, and compare them with the fingerprints in the index."""
    arrays = _agreed(folder, lambda: _read_arrays(folder, like))
    saved = [index["leaves"][path]["fingerprint"] for path in like]
    changed = [path for path, a, b in zip(like, _fingerprints(arrays, mesh), saved, strict=True) if a != b]
    if changed:
        raise _damaged(folder, f"the contents of {_shorten(changed)} changed since the save")
    return arrays


def _read_arrays(folder: Any, like: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Read the arrays with the paths in `like`. Arrays without elements are created, as orbax does not store them."""
    # Unlike the manager, the handler has no barriers, so a process that reads a damaged file does not block the rest.
    import orbax.checkpoint as ocp
    from flax.traverse_util import flatten_dict, unflatten_dict

    arrays = {
        path: jax.make_array_from_callback(x.shape, x.sharding, np.zeros(x.shape, x.dtype).__getitem__)
        for path, x in like.items()
        if not x.size
    }
    if stored := {path: x for path, x in like.items() if x.size}:
        target = {"leaves": unflatten_dict(stored, sep="/")}
        handler = ocp.PyTreeCheckpointHandler()
        try:
            restore_args = ocp.checkpoint_utils.construct_restore_args(target)
            args = ocp.args.PyTreeRestore(target, restore_args=restore_args, partial_restore=True)
            tree = handler.restore(folder / "state", args=args)
        finally:
            handler.close()
        # For arrays that are not in its index, orbax returns the leaves of the target.
        if missing := [x for x in jax.tree.leaves(tree, is_leaf=lambda x: x is None) if not isinstance(x, jax.Array)]:
            raise _damaged(folder, f"{len(missing)} arrays are missing from the index of arrays")
        arrays |= flatten_dict(tree["leaves"], sep="/")
    return {path: arrays[path] for path in like}


# ---- Stored arrays and index -----------------------------------------------------------------------------------------


def _leaves(state: TrainState) -> dict[str, Any]:
    """Return the arrays by path, in the order of the state's leaves; "." and "/" in keys are escaped."""
    keys, arrays = zip(*jax.tree_util.tree_leaves_with_path(state), strict=True)
    leaves = dict(zip(map(_path, keys), arrays, strict=True))
    if len(leaves) < len(arrays):
        reason, fix = "two arrays have the same path", "rename a key; the keys 1 and '1' have the same path"
        raise problem("the state", "save its arrays", reason, fix, code="conflict")
    return leaves


def _eval_sources(index: Mapping[str, Any], path: str) -> list[str]:
    """Return the paths of the arrays that determine the parameter of `mp.eval_params`, as inputs of `_combined`."""
    name, leaves = path.removeprefix("params/"), index["leaves"]
    average = f"{index.get('averages')}/{name}"
    if path.startswith("params/") and average in leaves:  # frozen parameters have no averages
        return [average]
    for prefix in index.get("schedule_free", ()):
        if path.startswith("params/") and f"{prefix}/z/{name}" in leaves:
            return [path, f"{prefix}/z/{name}", f"{prefix}/b1"]
    return [path]


def _sources_like(
    like: Mapping[str, Any], sources: Mapping[str, Sequence[str]], index: Mapping[str, Any], setup: Setup
) -> dict[str, Any]:
    """Return the abstract arrays to read. Averages and z are sharded like their parameters."""
    arrays = {}
    for path, x in like.items():
        for source in sources[path]:
            leaf = index["leaves"][source]
            sharding = x.sharding if tuple(leaf["shape"]) == x.shape else setup.replicated_sharding
            dtype = x.dtype if source == path else leaf["dtype"]
            arrays[source] = jax.ShapeDtypeStruct(leaf["shape"], dtype, sharding=sharding)
    return arrays


def _combined(arrays: Sequence[jax.Array], dtype: Any) -> jax.Array:
    return (arrays[0] if len(arrays) == 1 else schedule_free_iterate(*arrays)).astype(dtype)


def _path(keys: Iterable[Any]) -> str:
    # orbax joins keys with ".", so without escapes {"a.b": x} and {"a": {"b": y}} would be written to the same file.
    escapes = {ord("%"): "%25", ord("."): "%2E", ord("/"): "%2F"}
    return "/".join(path_str((key,)).translate(escapes) for key in keys)


def _new_index(
    step: int, state: TrainState, leaves: Mapping[str, Any], data_state: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the JSON item `run` with its checksum. It shares no object with the arguments, as it is written later."""
    import meshpar

    averages = averages_of(state.opt_state)
    fingerprints = _fingerprints(leaves, _concrete(state.setup))
    document = {
        "format": FORMAT,
        "meshpar": meshpar.__version__,
        "jax": jax.__version__,
        "step": step,
        "mesh": state.table.mesh,
        "strategy": state.table.strategy,
        "lora_alpha": None if state.setup.model.lora is None else state.setup.model.lora.alpha,
        "averages": averages and "/".join(filter(None, ("opt_state", _path(averages[0]), "average"))),
        "schedule_free": [
            "/".join(filter(None, ("opt_state", _path(keys)))) for keys, _ in schedule_free_of(state.opt_state)
        ],
        "leaves": {
            path: {"shape": list(x.shape), "dtype": x.dtype.name, "fingerprint": fingerprint}
            for (path, x), fingerprint in zip(leaves.items(), fingerprints, strict=True)
        },
        "data_state": None if data_state is None else dict(data_state),
    }
    text = json.dumps(document, sort_keys=True)
    return {"crc32": zlib.crc32(text.encode()), "document": json.loads(text)}


# ---- Fingerprints ----------------------------------------------------------------------------------------------------


def _fingerprints(leaves: Mapping[str, jax.Array], mesh: Mesh) -> list[int]:
    """Return a 32-bit fingerprint per array. It is independent of the sharding and equal on all processes."""
    return np.asarray(_fingerprint_program(mesh)(list(leaves.values()))).tolist()


@functools.lru_cache(maxsize=8)
def _fingerprint_program(mesh: Mesh) -> Any:
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda arrays: jnp.stack([_fingerprint(x) for x in arrays]), out_shardings=replicated)


def _fingerprint(x: jax.Array) -> jax.Array:
    """Sum the words of an array, each multiplied by an odd number that depends on its position, modulo 2^32.

    Odd factors are invertible, so a change of a single word always changes the sum. Integer sums are independent of
    the order of summation, and therefore of the mesh.
    """
    words = _words(jax.device_put(x, jax.memory.Space.Device))  # offloaded optimizer state is in host memory
    position = jnp.zeros(words.shape, jnp.uint32)
    for dim in range(words.ndim):
        stride = np.uint32(math.prod(words.shape[dim + 1 :]) % 2**32)
        position += lax.broadcasted_iota(jnp.uint32, words.shape, dim) * stride
    factor = (position * np.uint32(2654435761)) | np.uint32(1)
    return jnp.sum(words * factor, dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32; an 8-byte element becomes two words in a new last dim."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(x.real), _words(x.imag)])
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(x, bits).astype(jnp.uint32)


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _check_format(index: Mapping[str, Any], where: str) -> None:
    if index["format"] != FORMAT:
        newer = index["format"] > FORMAT
        fix = f"install meshpar {index['meshpar']} or newer" if newer else "train again: no release wrote this format"
        reason = f"meshpar {index['meshpar']} wrote it in format {index['format']}"
        raise problem(where, f"read it as format {FORMAT}", reason, fix, code="unsupported-version")


def _check_fits(stored: Mapping[str, Any], like: Mapping[str, Any], where: str) -> None:
    """Check that the checkpoint has the same arrays as the state, with the same shapes and dtypes."""
    missing = [path for path in like if path not in stored]
    unexpected = [path for path in stored if path not in like]
    old = {path: f"{stored[path]['dtype']}{stored[path]['shape']}" for path in like if path in stored}
    new = {path: f"{like[path].dtype.name}{list(like[path].shape)}" for path in old}
    different = [path for path in old if old[path] != new[path]]
    if not (missing or unexpected or different):
        return
    reasons = {
        "the checkpoint lacks": missing,
        "only the checkpoint has": unexpected,
        "shapes or dtypes differ:": [f"{x} ({old[x]} in the checkpoint, {new[x]} in the state)" for x in different],
    }
    same_shapes = all(tuple(stored[path]["shape"]) == tuple(like[path].shape) for path in different)
    cause = "use the model"
    if same_shapes and not (missing or unexpected):
        cause = "pass init_state the precision"
    elif all(path.startswith("opt_state/") for path in (*missing, *unexpected, *different)):
        cause = "use the optimizer"
    reason = "; ".join(f"{text} {_shorten(paths)}" for text, paths in reasons.items() if paths)
    fix = f"{cause} that it was trained with, or choose a different checkpoint folder"
    raise problem(where, "restore it into this state", reason, fix, code="wrong-state")


def _check_alpha(stored: float | None, setup: Setup, where: str) -> None:
    """Check the scale of LoRA adapters, which no array contains; older checkpoints do not record it."""
    lora = setup.model.lora
    if stored is not None and lora is not None and lora.alpha != stored:
        reason, fix = f"its adapters were trained with alpha={stored}", f"use lora(alpha={stored})"
        raise problem(where, f"restore it with lora(alpha={lora.alpha})", reason, fix, code="conflict")


def _shorten(paths: Sequence[str], limit: int = 4) -> str:
    text = ", ".join(f"`{path}`" for path in paths[:limit])
    return text if len(paths) <= limit else f"{text} and {len(paths) - limit} more"


def _concrete(setup: Setup) -> Mesh:
    if not isinstance(setup.mesh, Mesh):
        reason = "the mesh is abstract: it has no devices"
        raise problem("checkpoint", "read it onto this mesh", reason, "use MeshSpec.build()", code="abstract-mesh")
    return setup.mesh


# ---- Multiple processes ----------------------------------------------------------------------------------------------


def _agreed(checkpoint: Any, read: Callable[[], Any]) -> Any:
    """Return the result of `read`; if it fails on any process, raise `_DamagedError` on all processes."""
    result, failure = None, None
    try:
        result = read()
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # the files may be intact
    except Exception as error:
        failure = error.reason if isinstance(error, _DamagedError) else _summarize(error)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        if multihost_utils.process_allgather(np.array(failure is not None)).any() and failure is None:
            failure = "a process could not read it"
    if failure is not None:
        raise _damaged(checkpoint, failure)
    return result


def _broadcast(steps: list[int], limit: int = 256) -> list[int]:
    """Return the newest steps that process 0 lists: on network file systems, other processes may see old listings."""
    if jax.process_count() == 1:
        return steps
    from jax.experimental import multihost_utils

    padded = np.full((limit,), -1, np.int32)
    padded[: len(steps[-limit:])] = steps[-limit:]
    return [step for step in multihost_utils.broadcast_one_to_all(padded).tolist() if step >= 0]


def barrier(name: str) -> None:
    """Block until all processes have called this function with the same name."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


# ---- orbax -----------------------------------------------------------------------------------------------------------


def _write_problem(requested: str, error: Exception, where: str = "checkpoints") -> MeshparError:
    fix = "check that the folder is writable and has free space; earlier checkpoints are intact"
    return problem(where, requested, f"writing failed ({_summarize(error)})", fix, code="write-failed")


def _summarize(error: BaseException, limit: int = 200) -> str:
    text = " ".join(str(error).split("[tensorstore_spec")[0].split())
    if "No space left" in text:
        text = "no space left on the disk"
    return f"{type(error).__name__}: {text[:limit]}{'…' if len(text) > limit else ''}" if text else type(error).__name__


@functools.cache
def _filter_orbax_logs() -> None:
    """Drop the log lines of orbax, because its errors are raised. They are kept if absl's verbosity is DEBUG."""
    from absl import logging as absl_logging

    def is_kept(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname or absl_logging.get_verbosity() >= absl_logging.DEBUG

    logging.getLogger("absl").addFilter(is_kept)
    # If multiple writes fail, orbax raises the first error, and asyncio logs a traceback for each remaining error.
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())


@functools.cache
def _patch_kvstore() -> None:
    """Make orbax use TensorStore's `s3` driver for s3:// URLs."""
    # orbax creates TensorStore specifications for local paths and gs:// only, and has no public API for others.
    import orbax.checkpoint as ocp

    module = getattr(getattr(ocp, "_src", None), "serialization", None)
    build = getattr(getattr(module, "tensorstore_utils", None), "build_kvstore_tspec", None)
    if not callable(build) or "directory" not in inspect.signature(build).parameters:
        reason, fix = f"orbax {ocp.__version__} has different internal functions", "install orbax-checkpoint 0.12.8"
        raise problem("checkpoints in a bucket", "use s3://", reason, fix, code="unsupported-version")

    def to_s3(spec: Any) -> Any:
        if not isinstance(spec, dict):
            return [to_s3(item) for item in spec] if isinstance(spec, list) else spec
        if spec.get("driver") == "gcs":
            return remote.kvstore(f"s3://{spec['bucket']}/{spec['path']}")
        return {key: to_s3(value) for key, value in spec.items()}

    @functools.wraps(build)
    def build_kvstore_tspec(directory: Any, *args: Any, **kwargs: Any) -> Any:
        scheme, _, rest = str(directory).partition(":")
        if scheme != "s3":
            return build(directory, *args, **kwargs)
        return to_s3(build(f"gs://{rest.lstrip('/')}", *args, **kwargs))

    module.tensorstore_utils.build_kvstore_tspec = build_kvstore_tspec  # type: ignore[union-attr]


@functools.cache
def _patch_orbax() -> None:
    """Make orbax wait for all writes of a failed save, and report the failure immediately."""
    # orbax has no public API for either. `asyncio_utils.run_sync` closes its event loop after the first failed write,
    # and each remaining write then prints a traceback ("Event loop is closed"). The error itself stays in the
    # background thread until `wait_until_finished`, which first waits for all processes at a barrier.
    import orbax.checkpoint as ocp

    run_sync = getattr(getattr(getattr(ocp, "_src", None), "asyncio_utils", None), "run_sync", None)
    if not callable(run_sync) or list(inspect.signature(run_sync).parameters) != ["coro"]:
        text = f"orbax {ocp.__version__} is not supported: a failed write of a checkpoint may also print tracebacks"
        warnings.warn(text, stacklevel=3)
        return

    async def finish(coro: Any) -> Any:
        previous = asyncio.all_tasks()
        try:
            return await coro
        except Exception as error:
            if threading.current_thread() is not threading.main_thread():  # the main thread reads, and raises itself
                failure = _write_problem("write a checkpoint in the background", error)
                failure.__cause__ = error
                for callback in watchdog.write_failure_callbacks:
                    callback(failure)
            raise
        finally:
            while pending := asyncio.all_tasks() - previous:
                await asyncio.wait(pending)

    ocp._src.asyncio_utils.run_sync = functools.wraps(run_sync)(lambda coro: run_sync(finish(coro)))
