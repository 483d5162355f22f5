"""Checkpoints of the training state: written asynchronously with orbax, restored onto any mesh.

A checkpoint is a folder named by its step. orbax writes it under a temporary name and renames it when it is complete,
so a process that is killed during a save leaves the earlier checkpoints intact. Buckets have no rename: there, a
checkpoint is complete when it contains the object `commit_success.txt`, which orbax writes last. Each checkpoint has
two items:

    state   all arrays by path, unsharded
    run     the index, JSON with a checksum; see `meshpar.loop.checkpoint_index`
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import jax
import numpy as np

from meshpar.loop.checkpoint_index import (
    DamagedError,
    barrier,
    broadcast_steps,
    check_format,
    checkpoint_folder,
    combined,
    concrete_mesh,
    eval_sources,
    leaves_of,
    new_index,
    read_index,
    read_verified,
    shorten,
)
from meshpar.loop.orbax_workarounds import write_problem
from meshpar.pod.coordination import check_shared, this_pod
from meshpar.sharding import remote
from meshpar.sharding.context import clear_context_mesh
from meshpar.sharding.errors import MeshparError, check_positive_int, problem
from meshpar.sharding.host_resources import is_url
from meshpar.training.state import Setup, TrainState

if TYPE_CHECKING:
    from etils import epath

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
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder, mp.Checkpoints(folder, keep=3) as checkpoints:
      ...     is_saved = checkpoints.save(state)
      ...     restored = checkpoints.restore(state)
      >>> int(restored.state.step)
      0
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3) -> None:
        check_positive_int("Checkpoints", "the number of checkpoints to keep", keep=keep)
        self._is_local, self.folder = not is_url(folder), checkpoint_folder(folder)
        self._where = f"checkpoints in {self.folder}"
        if not self._is_local:
            self._bucket = remote.filesystem(str(self.folder), self._where)
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

    @clear_context_mesh()
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
            steps = broadcast_steps(self.steps())
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

    @clear_context_mesh()
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
        concrete_mesh(setup)
        self.wait()
        steps, damaged = self._available(step, required=step is not None), dict[int, str]()
        for candidate in reversed(steps):
            try:
                restored = self._read(candidate, setup, weights_only)
            except DamagedError as error:
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
        steps = broadcast_steps(self.steps())
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

        leaves = leaves_of(state)
        arrays = {"leaves": unflatten_dict({path: x for path, x in leaves.items() if x.size}, sep="/")}
        index = new_index(step, state, leaves, data_state)
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
        steps = broadcast_steps(self.steps())
        if not steps or not self._is_local:
            return  # the size of the first checkpoint is unknown
        is_full = False
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                is_full = bytes_of(self.folder / str(steps[-1])) > shutil.disk_usage(self.folder).free
        if broadcast_steps([int(is_full)]) == [1]:
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

        The preservation policies of orbax 0.12 delete file by file, so a killed process could leave a partial
        checkpoint under a valid name. Here the folder is hidden first. A partially deleted folder is then removed like
        an incomplete checkpoint.
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
        """Read a checkpoint; raise `DamagedError` if its content changed since the save."""
        run = read_index(self.folder, step)
        where = f"checkpoint {self.folder / str(step)}"
        check_format(run, where)
        like, stored = leaves_of(setup.abstract), run["leaves"]
        if weights_only:
            like, stored = (
                {path: x for path, x in leaves.items() if path.split("/")[0] in ("params", "extra")}
                for leaves in (like, stored)
            )
        _check_fits(stored, like, where)
        _check_alpha(run.get("lora_alpha"), setup, where)
        sources = {path: eval_sources(run, path) if weights_only == "averaged" else [path] for path in like}
        read = _sources_like(like, sources, run, setup)
        arrays = read_verified(self.folder / str(step), read, run, concrete_mesh(setup))
        if not weights_only:
            state = jax.tree.unflatten(jax.tree.structure(setup.abstract), arrays.values())
            return Restored(state=state, data_state=run["data_state"], step=step)
        structure = jax.tree.structure((setup.abstract.params, setup.abstract.extra))
        weights = [combined([arrays[source] for source in sources[path]], x.dtype) for path, x in like.items()]
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
            raise write_problem(requested, error, self._where) from error


class NoRoomError(MeshparError):
    """The disk is too full for a checkpoint, so the save was not started."""


def bytes_of(folder: epath.Path) -> int:
    """Return the total bytes of the files in a folder and its subfolders."""
    if is_url(folder):
        return remote.filesystem(remote.join(folder), f"folder {folder}").du(remote.join(folder))
    return sum(os.lstat(os.path.join(root, name)).st_size for root, _, names in os.walk(folder) for name in names)


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
    reason = "; ".join(f"{text} {shorten(paths)}" for text, paths in reasons.items() if paths)
    fix = f"{cause} that it was trained with, or choose a different checkpoint folder"
    raise problem(where, "restore it into this state", reason, fix, code="wrong-state")


def _check_alpha(stored: float | None, setup: Setup, where: str) -> None:
    """Check the scale of LoRA adapters, which no array contains; older checkpoints do not record it."""
    lora = setup.model.lora
    if stored is not None and lora is not None and lora.alpha != stored:
        reason, fix = f"its adapters were trained with alpha={stored}", f"use lora(alpha={stored})"
        raise problem(where, f"restore it with lora(alpha={lora.alpha})", reason, fix, code="conflict")
