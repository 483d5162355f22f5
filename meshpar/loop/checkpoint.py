"""Checkpoints: a training state on disk, written while training goes on and read back onto any mesh.

A checkpoint is a folder named by its step. orbax writes it in the background under another name and renames it when it
is whole, so a process that is killed leaves the ones before it untouched. It holds two items:

    state   every array, whole and by path, however it was split
    run     JSON under a checksum: format, versions, step; shape, dtype and fingerprint by path; where the data stood

Fingerprints are taken on the devices before writing and again after reading. orbax alone does not see a flipped bit in
a data file, and casts to the dtype of the target; here neither goes unnoticed. Nor do two items that are not of one
save, nor a folder that has another's name: fingerprints bind `run` to the arrays, its step binds both to the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import itertools
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
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.optim.averages import averages_of
from meshpar.sharding.context import apart
from meshpar.sharding.types import MeshparError, PyTree, check_positive_int, path_str, problem
from meshpar.training.state import Setup, TrainState

FORMAT = 2
"""Version of what is written, and of all that is read; raised when an older reader would misread it."""
SET_ASIDE = "set_aside"
"""Folder beside the checkpoints for those a run goes on without: damaged, or later than where it restarted."""

_HALF_WRITTEN = ".orbax-checkpoint-tmp"
"""What orbax puts behind a step's name while it is written."""
_SPREAD_FROM = 1 << 20
"""Bytes of a replica's part from which processes share writing a replicated array. Training waits for the slices, and
small ones cost more than they save. An array of which no dim divides by the replicas is written by one process."""
_WHOLE_BELOW = 1 << 20
"""Bytes below which a process on its own writes an array whole: orbax takes 0.2 ms of processor time for each shard."""
_WAIT_S = 0.25
_MOST_WAITS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint held."""

    state: TrainState
    data_state: dict[str, Any] | None
    """Where the data stood, as it was given to `save`."""
    step: int
    damaged: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Newer checkpoints that could not be read, each with the reason."""


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Only complete checkpoints are seen. Nothing is made, cleaned or deleted before the first `save`, so that another
    process may read the folder of a run that goes on. On several processes all call every method, and see one folder.

    Args:
      folder: where they lie: a local path, or a bucket that orbax knows. Made when it is not there.
      keep: how many of the newest are kept.
    """

    def __init__(self, folder: Any, *, keep: int = 3) -> None:
        from etils import epath

        check_positive_int("Checkpoints", "the number of checkpoints to keep", keep=keep)
        _quiet_orbax()
        _patient_orbax()
        path = epath.Path(folder)
        self.folder = path if "://" in str(folder) else path.absolute()
        self.keep = keep
        self._manager: Any = None
        self._current: int | None = None
        self._failed = False

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints in the folder, oldest first."""
        if "://" not in str(self.folder):
            # A name is complete here, and the listing all there is to ask; every save asks several times.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.folder) as found:
                return _numbers(one.name for one in found if one.is_dir())
            return []
        from orbax.checkpoint import path as ocp_path

        return sorted(found.step for found in ocp_path.step.standard_name_format().find_all(self.folder))

    def _misplaced(self) -> list[int]:
        """Steps of files in the local folder that stand where a checkpoint would."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(str(self.folder)) as found:
            return _numbers(one.name for one in found if not one.is_dir())
        return []

    @apart()
    def save(self, state: TrainState, *, data_state: Mapping[str, Any] | None = None, wait: bool = False) -> bool:
        """Write a checkpoint of the state's step, in the background.

        Returns when the arrays are copied from the devices, and so waits for the step that makes them; the state may be
        donated afterwards. A save that is still being written is waited for first.

        Args:
          state: what to write.
          data_state: JSON values that say where the data stands, as `Batches.get_state()` gives them.
          wait: return when it is on disk.

        Returns:
          False when this object has just written or restored that very step, so that nothing is left to do. If someone
          has removed that checkpoint, a call with `wait` writes it again.

        Raises:
          NoRoomError: the disk has less room than the newest takes; nothing was begun.
          ValueError: it cannot be written, or the one before it could not be.
        """
        step = int(state.step)
        new = step != self._current
        if new or wait:
            self.wait()
            found, misplaced = _as_process_0_sees(self.steps()), _as_process_0_sees(self._misplaced())
            if self._current not in (None, *found):
                new = True
                self._report_lost(found)
        if new:
            self._set_aside(sorted(one for one in {*found, *misplaced} if one >= step))
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
        """Read a checkpoint into the shards of another state, whatever mesh, strategy or device count wrote it.

        Args:
          target: a state, abstract or not, or its setup: says which arrays there are, and how they lie.
          step: which; by default the newest that is sound. Newer ones that are damaged are reported as a warning.
          weights_only: read parameters and what the model keeps beside them, no optimizer: that of the target begins
            anew, whatever the run was trained with. "averaged": parameters are the averages of `mp.ema`, where the
            run kept some.

        Returns:
          None when there is no checkpoint at all.

        Raises:
          ValueError: the checkpoint is of another model or optimizer; it is not there, or damaged; or all are damaged.
        """
        setup = target if isinstance(target, Setup) else target.setup
        _concrete(setup)
        self.wait()
        steps = _as_process_0_sees(self.steps())
        if step is not None and step not in steps:
            where = f"checkpoints in {self.folder}"
            raise problem(where, f"restore step {step}", f"there are steps {steps}", "ask for one of them")
        damaged: dict[int, str] = {}
        if step is None:
            newer = [one for one in _as_process_0_sees(self._misplaced()) if one > max(steps, default=-1)]
            damaged = dict.fromkeys(newer, "it is a file, and a checkpoint is a folder")
        for candidate in [step] if step is not None else reversed(steps):
            try:
                restored = self._read(candidate, setup, weights_only)
            except _DamagedError as error:
                damaged[candidate] = str(error)
                continue
            for bad, reason in damaged.items():
                warnings.warn(
                    f"{self.folder / str(bad)} is damaged and skipped: {reason}. Step {candidate} is used instead.",
                    stacklevel=2,
                )
            self._current = candidate
            return dataclasses.replace(restored, damaged=damaged)
        if damaged:
            raise problem(
                f"checkpoints in {self.folder}",
                "restore " + ("the newest sound one" if step is None else f"step {step}"),
                "; ".join(f"step {bad} is damaged ({reason})" for bad, reason in damaged.items()),
                "bring the files back from a copy, or move the folder away to start anew",
            )
        return None

    def wait(self) -> None:
        """Return when everything is on disk.

        Raises:
          ValueError: what was saved last could not be written.
        """
        if self._manager is not None:
            with self._explained(f"finish the save of step {self._current}"):
                self._manager.wait_until_finished()
                self._remove_old(self.keep)

    def close(self) -> None:
        """Wait, and end the background work; errors as in `wait`. Closing again does nothing."""
        manager, self._manager = self._manager, None
        if manager is not None:
            with self._explained(f"finish the save of step {self._current}"):
                manager.close()
                self._remove_old(self.keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        try:
            self.close()
        except ValueError as late:
            if error is None:
                raise
            error.add_note(str(late))  # what ended the block matters more

    def _write(self, step: int, state: TrainState, data_state: Mapping[str, Any] | None) -> None:
        from orbax.checkpoint import args

        leaves = _leaves(state)
        stored = {"leaves": _nested(_small_ones_whole({path: x for path, x in leaves.items() if x.size}))}
        run = _sealed(_document(step, state, leaves, data_state))
        if self._failed:
            self._clear_failed()
        with self._explained(f"save step {step}"):
            manager = self._opened()
        self._check_room(step)  # now that what was half written is gone
        with self._explained(f"save step {step}"):
            manager.save(step, args=args.Composite(state=args.PyTreeSave(stored), run=args.JsonSave(run)), force=True)

    def _check_room(self, step: int) -> None:
        """In every process alike: where a write fails in one of a pod, the others wait ten minutes for its part."""
        steps = _as_process_0_sees(self.steps())
        if not steps or "://" in str(self.folder):
            return  # nobody knows how much the first takes
        needed = free = 0
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                needed, free = bytes_of(self.folder / str(steps[-1])), shutil.disk_usage(self.folder).free
        if _as_process_0_sees([int(needed > free)]) == [1]:
            raise NoRoomError(
                f"checkpoints in {self.folder}",
                f"save step {step}",
                f"no space left on the disk for one more as large as that of step {steps[-1]}",
                "make room; what was complete before is untouched",
            )

    def _clear_failed(self) -> None:
        """Remove what a save that failed has left, once nothing is added to it any more.

        orbax reports the first write that fails while its others go on, in the very folder that the next save of the
        same step would clear and use.
        """
        if jax.process_index() == 0:
            found: list[str] | None = None
            for _ in range(_MOST_WAITS):
                time.sleep(_WAIT_S)
                below = (self.folder.glob(f"*{_HALF_WRITTEN}*" + "/*" * depth) for depth in range(1, 5))
                found, before = sorted(map(str, itertools.chain.from_iterable(below))), found
                if found == before:
                    break
            for folder in self.folder.glob(f"*{_HALF_WRITTEN}*"):
                folder.rmtree(missing_ok=True)
        barrier("meshpar: a failed save cleared")
        self._failed = False

    def _opened(self) -> Any:
        """orbax's manager; opening it removes what a killed process has left half-written."""
        # If the folder cannot be written, orbax retries in a background thread for minutes.
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / "writable"
            probe.unlink(missing_ok=True)
            probe.touch(exist_ok=False)  # follows no link
            probe.unlink()
        if self._manager is None:
            import orbax.checkpoint as ocp

            # Called when another is written and about to get its name; one whole one is there at any moment.
            remove = functools.partial(self._remove_old, max(self.keep - 1, 1))
            late = ocp.options.AsyncOptions(post_finalization_callback=remove)
            options = ocp.CheckpointManagerOptions(create=True, cleanup_tmp_directories=True, async_options=late)
            handlers = {
                "state": ocp.PyTreeCheckpointHandler(type_handler_registry=array_handlers()),
                "run": ocp.JsonCheckpointHandler(),
            }
            self._manager = ocp.CheckpointManager(self.folder, item_handlers=handlers, options=options)
        return self._manager

    def _remove_old(self, most: int) -> None:
        """Remove all but so many of the newest.

        Not left to orbax, which removes file by file: of a process that is killed meanwhile half a checkpoint would
        stay under its name. Here it loses the name first, and what stays is removed as what was half written is.
        """
        if jax.process_index() == 0:
            for step in self.steps()[:-most]:
                folder = self.folder / str(step)
                if "://" not in str(folder):  # in a bucket nothing has another name at once
                    folder = folder.rename(f"{folder}{_HALF_WRITTEN}-removed")
                with contextlib.suppress(OSError):
                    folder.rmtree()

    def stored(self, step: int | None = None) -> Mapping[str, Any]:
        """Shape and dtype of every array of a checkpoint, the newest by default, by its path in the state.

        Raises:
          ValueError: there is none, or it is damaged.
        """
        steps = _as_process_0_sees(self.steps())
        if not steps or step not in (None, *steps):
            asked = "look at its newest" if step is None else f"look at step {step}"
            fix = "train first, or name another folder"
            raise problem(f"checkpoints in {self.folder}", asked, f"there are steps {steps}", fix)
        try:
            return _index(self.folder, steps[-1] if step is None else step)["leaves"]
        except _DamagedError as error:
            fix = "bring the files back from a copy"
            raise problem(f"checkpoints in {self.folder}", "look at one", f"it is damaged ({error})", fix) from error

    def _read(self, step: int, setup: Setup, weights_only: bool | Literal["averaged"]) -> Restored:
        """One checkpoint; `_DamagedError` when it is not what was written."""
        run = _index(self.folder, step)
        where = f"checkpoint {self.folder / str(step)}"
        _check_format(run, where)
        like, there = _leaves(setup.abstract), run["leaves"]
        if weights_only:
            like, there = (
                {path: x for path, x in leaves.items() if path.split("/")[0] in ("params", "extra")}
                for leaves in (like, there)
            )
        _check_fits(there, like, where)
        _check_alpha(run.get("lora_alpha"), setup, where)
        dtypes = [x.dtype for x in like.values()]
        if weights_only == "averaged" and run.get("averages"):
            like = _of_averages(like, run)
        values = _agreed(lambda: _read_arrays(self.folder / str(step), like))
        written = [run["leaves"][path]["fingerprint"] for path in like]
        wrong = [path for path, a, b in zip(like, _fingerprints(values, setup), written, strict=True) if a != b]
        if wrong:
            raise _DamagedError(f"contents of {_some(wrong)} are not what was written")
        if weights_only:
            narrow = (x.astype(dtype) for x, dtype in zip(values.values(), dtypes, strict=True))
            whole = setup.begin(*_weights(setup, dict(zip(values, narrow, strict=True))), 0)
            return Restored(state=whole, data_state=None, step=step)
        state = jax.tree.unflatten(jax.tree.structure(setup.abstract), values.values())
        return Restored(state=state, data_state=run["data_state"], step=step)

    def _report_lost(self, found: Sequence[int]) -> None:
        """Warn that the newest checkpoint is gone; `found` are the steps of those that are left."""
        if jax.process_index() == 0:
            left = f"those of steps {', '.join(map(str, found))} are left" if found else "none is left"
            warnings.warn(
                f"{self.folder} was removed, renamed or emptied while the run goes on: the checkpoint of step "
                f"{self._current} is gone, {left}. The next one is written now.",
                stacklevel=3,
            )
        if self._manager is not None:
            self._manager.reload()

    def _set_aside(self, steps: Sequence[int]) -> None:
        """Move checkpoints out of the way of a run that restarted before them: they would be taken for its newest."""
        if not steps:
            return
        aside = self.folder / SET_ASIDE
        warnings.warn(
            f"{self.folder}: a run that restarted before step {min(steps)} writes here; the checkpoints of steps "
            f"{', '.join(map(str, steps))} are moved to {aside}.",
            stacklevel=3,
        )
        if jax.process_index() == 0:
            aside.mkdir(parents=True, exist_ok=True)
            for step in steps:
                number = sum(1 for old in aside.iterdir() if old.name.split(".")[0] == str(step))
                (self.folder / str(step)).rename(aside / (f"{step}.{number}" if number else str(step)))
        barrier("meshpar: checkpoints set aside")
        if self._manager is not None:
            self._manager.reload()

    @contextlib.contextmanager
    def _explained(self, asked: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._current, self._failed = None, True
            raise _problem_of(asked, error, f"checkpoints in {self.folder}") from error


class NoRoomError(MeshparError):
    """A checkpoint was not begun, for the disk has no room for it."""


class _DamagedError(Exception):
    """A checkpoint is not what was written."""


# ---- Without a model -------------------------------------------------------------------------------------------------


def bytes_of(folder: Any) -> int:
    """Bytes of all files below a local folder."""
    return sum(os.lstat(os.path.join(root, name)).st_size for root, _, names in os.walk(folder) for name in names)


def read_index(folder: Any, step: int) -> dict[str, Any]:
    """What a checkpoint says about itself: format, versions, mesh, strategy, arrays by path, where the data stood.

    Args:
      folder: of the checkpoints.
      step: which; it is there.

    Raises:
      ValueError: it is damaged.
    """
    try:
        return _index(folder, step)
    except _DamagedError as error:
        fix = "look at another step"
        raise problem(f"checkpoint {folder}/{step}", "read its index", f"it is damaged ({error})", fix) from error


def damage_of(folder: Any, step: int) -> str | None:
    """What is wrong with a checkpoint, None where every array is what was written; needs no model, mesh or recipe.

    The arrays are read onto the first device, all of them at a time.
    """
    try:
        run = _index(folder, step)
        _read_here(folder, run, run["leaves"])
        return None
    except _DamagedError as error:
        return str(error)


def read_leaf(folder: Any, index: Mapping[str, Any], path: str) -> np.ndarray:
    """One array of a checkpoint, whole and held to its fingerprint; needs no model, mesh or recipe.

    Args:
      folder: of the checkpoints.
      index: from `read_index`.
      path: of the array, one of `index["leaves"]`.

    Raises:
      ValueError: it is damaged.
    """
    try:
        return np.asarray(_read_here(folder, index, [path])[path])
    except _DamagedError as error:
        where = f"checkpoint {folder}/{index['step']}"
        raise problem(where, f"read `{path}`", f"it is damaged ({error})", "take another step") from error


def _read_here(folder: Any, run: Mapping[str, Any], paths: Iterable[str]) -> dict[str, jax.Array]:
    """Arrays of a checkpoint on the first device, held to what was written."""
    _check_format(run, f"checkpoint {folder}/{run['step']}")
    mesh = Mesh(np.array(jax.devices()[:1]), ("all",))
    whole, leaves = NamedSharding(mesh, PartitionSpec()), run["leaves"]
    like = {one: jax.ShapeDtypeStruct(leaves[one]["shape"], leaves[one]["dtype"], sharding=whole) for one in paths}
    step = Checkpoints(folder).folder / str(run["step"])
    values = _agreed(lambda: _read_arrays(step, like))
    found = np.asarray(_fingerprint_program(mesh)(list(values.values()))).tolist()
    wrong = [path for path, is_now in zip(like, found, strict=True) if leaves[path]["fingerprint"] != is_now]
    if wrong:
        raise _DamagedError(f"contents of {_some(wrong)} are not what was written")
    return values


def _index(folder: Any, step: int) -> dict[str, Any]:
    at = Checkpoints(folder).folder / str(step)

    def read() -> dict[str, Any]:
        _check_files(at)
        return _unsealed(json.loads((at / "run" / "metadata").read_text()))

    run = _agreed(read)
    if run["step"] != step:
        raise _DamagedError(f"run/metadata is that of step {run['step']}")
    return run


def _check_files(folder: Any) -> None:
    """All that lies below a local folder can be read: a pipe would never end, and a reader in C would name no file."""
    if not os.path.isdir(folder):
        return  # a bucket, or nothing at all

    def unlisted(error: OSError) -> None:
        raise _DamagedError(f"{os.path.relpath(error.filename, folder)} cannot be listed ({error.strerror})")

    for below, _, names in os.walk(folder, onerror=unlisted):
        for name in names:
            path = os.path.join(below, name)
            if not os.path.isfile(path):
                raise _DamagedError(f"{os.path.relpath(path, folder)} is no file")
            if not os.access(path, os.R_OK):
                raise _DamagedError(f"{os.path.relpath(path, folder)} may not be read")


def _read_arrays(folder: Any, like: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Read arrays by path; those without elements are made, because orbax does not store them."""
    empty = {path: _zeros(x) for path, x in like.items() if not x.size}
    stored = _stored_arrays(folder, {path: x for path, x in like.items() if x.size})
    return {path: empty[path] if path in empty else stored[path] for path in like}


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.make_array_from_callback(like.shape, like.sharding, lambda at: np.zeros(like.shape, like.dtype)[at])


def _stored_arrays(folder: Any, like: Mapping[str, Any]) -> dict[str, jax.Array]:
    # The handler and not the manager: reading needs no barrier between processes, so one that meets a damaged file
    # leaves no other waiting.
    import orbax.checkpoint as ocp

    if not like:
        return {}
    target = {"leaves": _nested(like)}
    handler = ocp.PyTreeCheckpointHandler()
    how = ocp.checkpoint_utils.construct_restore_args(target)
    try:
        args = ocp.args.PyTreeRestore(target, restore_args=how, partial_restore=True)
        found = handler.restore(folder / "state", args=args)
    finally:
        handler.close()
    # Of what its index does not name, orbax gives back what was asked for.
    if missing := [x for x in jax.tree.leaves(found, is_leaf=lambda x: x is None) if not isinstance(x, jax.Array)]:
        raise _DamagedError(f"the index of arrays lacks {len(missing)} of them")
    return _flat(found["leaves"], like)


# ---- What is stored --------------------------------------------------------------------------------------------------


def _leaves(state: TrainState) -> dict[str, Any]:
    """Every array by its path, in the order of the state's leaves; "." and "/" in a key are escaped."""
    leaves: dict[str, Any] = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(state):
        path = "/".join(_escaped(path_str((key,))) for key in key_path)
        if path in leaves:
            fix = "rename one: 1 and '1' are the same"
            raise problem(f"`{path}`", "name one array of a checkpoint", "two arrays have this path", fix)
        leaves[path] = leaf
    return leaves


def array_handlers() -> Any:
    """How orbax is to write arrays, on devices and on the host."""
    import orbax.checkpoint as ocp

    split = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=True,
        min_slice_bytes_for_replica_parallel=_SPREAD_FROM,
        enable_write_sharding_file=False,  # what is restored lies as its target says
    )
    whole = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)  # nobody else has them
    return ocp.type_handlers.create_type_handler_registry((jax.Array, split), (np.ndarray, whole))


def _small_ones_whole(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves, small ones put together on the host, where one process has all their shards.

    Of a pod's processes orbax has the first write what lies on the host, whoever holds it: there they stay as they are.
    """
    if jax.process_count() > 1:
        return dict(leaves)
    small = {path: x for path, x in leaves.items() if x.nbytes < _WHOLE_BELOW}
    # Copies: on CPUs what jax hands out may be the array's own memory, which the next step writes over.
    whole = (np.array(x) for x in jax.device_get(list(small.values())))
    return {**leaves, **dict(zip(small, whole, strict=True))}


def _weights(setup: Setup, values: Mapping[str, Any]) -> tuple[PyTree, PyTree]:
    """Parameters and what the model keeps beside them, of arrays in their order."""
    trees = (setup.abstract.params, setup.abstract.extra)
    counts, arrays = [len(jax.tree.leaves(tree)) for tree in trees], list(values.values())
    parts = (arrays[: counts[0]], arrays[counts[0] :])
    params, extra = (
        jax.tree.unflatten(jax.tree.structure(tree), part) for tree, part in zip(trees, parts, strict=True)
    )
    return params, extra


def _of_averages(like: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """What is read where averages are to be the parameters, in their order, laid out alike; frozen ones have none."""
    found = {}
    for path, x in like.items():
        average = f"{run['averages']}/{path.removeprefix('params/')}"
        is_kept = path.startswith("params/") and average in run["leaves"]
        dtype = run["leaves"][average]["dtype"] if is_kept else x.dtype
        found[average if is_kept else path] = jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return found


def _path_of_averages(state: TrainState) -> str | None:
    found = averages_of(state.opt_state)
    return (
        None if found is None else "/".join(["opt_state", *(_escaped(path_str((key,))) for key in found[0]), "average"])
    )


def _escaped(key: str) -> str:
    # orbax joins keys with ".", so that {"a.b": x} and {"a": {"b": y}} would be written over each other.
    return key.replace("%", "%25").replace(".", "%2E").replace("/", "%2F")


def _nested(leaves: Mapping[str, Any]) -> PyTree:
    """Leaves by path as nested dicts: arrays and nothing else, with no empty nodes and no classes of anyone's."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def _flat(tree: PyTree, paths: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of nested dicts, by path, in the order of `paths`."""
    return {path: functools.reduce(lambda node, key: node[key], path.split("/"), tree) for path in paths}


def _document(
    step: int, state: TrainState, leaves: Mapping[str, Any], data_state: Mapping[str, Any] | None
) -> dict[str, Any]:
    import meshpar

    return {
        "format": FORMAT,
        "meshpar": meshpar.__version__,
        "jax": jax.__version__,
        "step": step,
        "mesh": state.table.mesh,
        "strategy": state.table.strategy,
        "lora_alpha": None if state.setup.model.lora is None else state.setup.model.lora.alpha,
        "averages": _path_of_averages(state),
        "leaves": {
            path: {"shape": list(x.shape), "dtype": x.dtype.name, "fingerprint": fingerprint}
            for (path, x), fingerprint in zip(leaves.items(), _fingerprints(leaves, state.setup), strict=True)
        },
        "data_state": None if data_state is None else dict(data_state),
    }


def _sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON document with its checksum; a copy, as it is written later."""
    text = json.dumps(document, sort_keys=True)
    return {"crc32": zlib.crc32(text.encode()), "document": json.loads(text)}


def _unsealed(sealed: Mapping[str, Any]) -> dict[str, Any]:
    document = sealed["document"]
    if zlib.crc32(json.dumps(document, sort_keys=True).encode()) != sealed["crc32"]:
        raise _DamagedError("the checksum of run/metadata does not fit it")
    return document


# ---- Fingerprints ----------------------------------------------------------------------------------------------------


def _fingerprints(leaves: Mapping[str, jax.Array], setup: Setup) -> list[int]:
    """32 bits for each array, the same however it is split, and in every process."""
    return np.asarray(_fingerprint_program(_concrete(setup))(list(leaves.values()))).tolist()


@functools.lru_cache(maxsize=8)
def _fingerprint_program(mesh: Mesh) -> Any:
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda arrays: jnp.stack([_fingerprint(x) for x in arrays]), out_shardings=whole)


def _fingerprint(x: jax.Array) -> jax.Array:
    """Sum over the words of an array, each times an odd number of its place, modulo 2^32.

    An odd factor has an inverse, so that no change of a single word leaves the sum as it was. Integer sums do not
    depend on their order, and so not on the mesh.
    """
    words = _words(jax.device_put(x, jax.memory.Space.Device))  # from the host, where optimizer state is offloaded
    place = jnp.zeros(words.shape, jnp.uint32)
    for dim in range(words.ndim):
        stride = np.uint32(math.prod(words.shape[dim + 1 :]) % 2**32)
        place += lax.broadcasted_iota(jnp.uint32, words.shape, dim) * stride
    factor = (place * np.uint32(2654435761)) | np.uint32(1)
    return jnp.sum(words * factor, dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as uint32; an 8-byte element becomes two words in a new last dim."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(x.real), _words(x.imag)])
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(x, bits).astype(jnp.uint32)


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _check_format(run: Mapping[str, Any], where: str) -> None:
    if run["format"] != FORMAT:
        newer = f"install meshpar {run['meshpar']} or newer"
        fix = newer if run["format"] > FORMAT else "train anew: no release has written it"
        asked = f"be read by a meshpar that knows format {FORMAT}"
        raise problem(where, asked, f"meshpar {run['meshpar']} wrote it in format {run['format']}", fix)


def _check_fits(stored: Mapping[str, Any], like: Mapping[str, Any], where: str) -> None:
    """The checkpoint has the arrays that the state has, in the same shapes and dtypes."""
    missing = [path for path in like if path not in stored]
    unknown = [path for path in stored if path not in like]
    unlike = [
        f"{path} ({_shown(stored[path]['shape'], stored[path]['dtype'])} there, {_shown(x.shape, x.dtype.name)} here)"
        for path, x in like.items()
        if path in stored and (tuple(stored[path]["shape"]), stored[path]["dtype"]) != (tuple(x.shape), x.dtype.name)
    ]
    if not (missing or unknown or unlike):
        return
    found = [
        f"{what} {_some(paths)}"
        for what, paths in (("it lacks", missing), ("only it has", unknown), ("they differ in", unlike))
        if paths
    ]
    parts = {path.split(" ")[0].split("/")[0] for path in (*missing, *unknown, *unlike)}
    fix = "give the optimizer it was trained with" if parts == {"opt_state"} else "give the model it was trained with"
    if (
        unlike
        and not (missing or unknown)
        and all(tuple(stored[p]["shape"]) == tuple(x.shape) for p, x in like.items())
    ):
        fix = "give init_state the precision it was trained with"
    raise problem(where, "be restored into this state", "; ".join(found), f"{fix}, or use another checkpoint folder")


def _check_alpha(stored: float | None, setup: Setup, where: str) -> None:
    """Adapters count as often as when they were trained, which no array tells; older checkpoints do not say it."""
    lora = setup.model.lora
    if stored is not None and lora is not None and lora.alpha != stored:
        asked = f"be restored into a model with lora(alpha={lora.alpha})"
        raise problem(where, asked, f"its adapters were trained with alpha={stored}", f"use lora(alpha={stored})")


def _shown(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _some(paths: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(f"`{path}`" for path in paths[:most])
    return shown if len(paths) <= most else f"{shown} and {len(paths) - most} more"


def _concrete(setup: Setup) -> Mesh:
    if not isinstance(setup.mesh, Mesh):
        raise problem(
            "checkpoint", "be read onto this mesh", "the mesh is abstract: it has no devices", "use MeshSpec.build()"
        )
    return setup.mesh


# ---- Several processes, and orbax's talk -----------------------------------------------------------------------------


def _agreed(read: Any) -> Any:
    """What `read` gives; when it fails in any process, `_DamagedError` in all of them."""
    value, failure = None, None
    try:
        value = read()
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # says nothing about the files
    except Exception as error:
        failure = str(error) if isinstance(error, _DamagedError) else _reason(error)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        if multihost_utils.process_allgather(np.array(failure is not None)).any() and failure is None:
            failure = "another process could not read it"
    if failure is not None:
        raise _DamagedError(failure)
    return value


def _numbers(names: Iterable[str]) -> list[int]:
    """Return the names that are numbers of steps, which are int32, in ascending order."""
    found = (int(name) for name in names if name.isascii() and name.isdecimal() and name == str(int(name)))
    return sorted(number for number in found if number <= np.iinfo(np.int32).max)


def _as_process_0_sees(steps: list[int], most: int = 256) -> list[int]:
    """The newest steps in the folder as one process lists it: file systems may show others an older view."""
    if jax.process_count() == 1:
        return steps
    from jax.experimental import multihost_utils

    padded = np.full((most,), -1, np.int32)
    padded[: len(steps[-most:])] = steps[-most:]
    return [step for step in multihost_utils.broadcast_one_to_all(padded).tolist() if step >= 0]


def barrier(name: str) -> None:
    """Waits until every process has come to the place of this name."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def write_failed(error: MeshparError) -> None:
    """Called in a thread of orbax's where it fails to write; for a pod, whose other processes wait for this one's part.

    orbax keeps the error until somebody asks, and then has all processes meet before it raises it.
    """
    for tell in told_of_failed_writes:
        tell(error)


told_of_failed_writes: list[Callable[[MeshparError], None]] = []


def _problem_of(asked: str, error: Exception, where: str = "checkpoints") -> MeshparError:
    fix = "see that the folder can be written and has room; what was complete before is untouched"
    return problem(where, asked, f"writing failed ({_reason(error)})", fix)


def _reason(error: BaseException, most: int = 200) -> str:
    """An error in one short line."""
    text = " ".join(str(error).split("[tensorstore_spec")[0].split())
    if "No space left" in text:
        text = "no space left on the disk"
    return f"{type(error).__name__}: {text[:most]}{'…' if len(text) > most else ''}" if text else type(error).__name__


@functools.cache
def _quiet_orbax() -> None:
    """Keep orbax's own log lines back: what goes wrong is raised. absl's verbosity at DEBUG lets them through."""
    from absl import logging as absl_logging

    def wanted(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname or absl_logging.get_verbosity() >= absl_logging.DEBUG

    logging.getLogger("absl").addFilter(wanted)
    # Of the writes that fail together orbax raises one, and asyncio prints a traceback for each of the others.
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())


@functools.cache
def _patient_orbax() -> None:
    """Let orbax return or raise when none of its reads and writes is under way any more.

    Without this, once one has failed, on a full disk say, orbax closes its event loop with the others running. Each
    would print a traceback of no use to anyone when it ends, long after the failure was reported. orbax has no option
    for it, so a function of its own is wrapped; where it is another one by now it stays, and that is told.
    """
    import orbax.checkpoint as ocp

    run_sync = getattr(getattr(getattr(ocp, "_src", None), "asyncio_utils", None), "run_sync", None)
    if not callable(run_sync) or list(inspect.signature(run_sync).parameters) != ["coro"]:
        text = (
            f"orbax {ocp.__version__} is not known: when a checkpoint cannot be written, it may print tracebacks, too"
        )
        warnings.warn(text, stacklevel=3)
        return

    async def to_the_end(work: Any) -> Any:
        before = asyncio.all_tasks()
        try:
            return await work
        except Exception as error:
            if threading.current_thread() is not threading.main_thread():  # where what is restored is read
                late = _problem_of("write a checkpoint in the background", error)
                late.__cause__ = error
                write_failed(late)
            raise
        finally:
            while others := asyncio.all_tasks() - before:
                await asyncio.wait(others)

    ocp._src.asyncio_utils.run_sync = functools.wraps(run_sync)(lambda coro: run_sync(to_the_end(coro)))
