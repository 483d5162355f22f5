"""The index of a checkpoint, which proves that its arrays are unchanged, and reading without a model.

The item `run` of a checkpoint is JSON with a checksum: format, versions, step, data position; shape, dtype and
fingerprint of each array. Fingerprints are computed before a save and after a restore. They detect flipped bits in data
files and items from different saves, which orbax does not. The step in `run` detects a folder that was renamed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.loop import orbax_workarounds
from meshpar.loop.fingerprints import fingerprints_of
from meshpar.optim.averages import averages_of, schedule_free_iterate, schedule_free_of
from meshpar.sharding import remote
from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.host_resources import is_url
from meshpar.sharding.types import path_str
from meshpar.training.state import Setup, TrainState

if TYPE_CHECKING:
    from etils import epath

FORMAT = 2
"""Version of the checkpoint format. Increase it if older readers would misread a new checkpoint."""


def checkpoint_folder(folder: str | os.PathLike[str]) -> epath.Path:
    """Return the folder of checkpoints as an absolute `epath.Path`, and prepare orbax to use it."""
    from etils import epath

    orbax_workarounds.filter_logs()
    orbax_workarounds.wait_for_failed_writes()
    if not is_url(folder):
        return epath.Path(folder).absolute()
    path = epath.Path(remote.join(folder))
    if str(path).startswith("s3:"):
        orbax_workarounds.support_s3()
    return path


class DamagedError(MeshparError):
    """The content of a checkpoint differs from the content at the save; `reason` says where."""


def damaged(checkpoint: object, reason: str) -> DamagedError:
    """Return the error for a damaged checkpoint."""
    fix = "choose another step, or restore the files from a backup"
    return DamagedError(f"checkpoint {checkpoint}", "read it, because it is damaged", reason, fix, "damaged-file")


def read_index(folder: epath.Path, step: int) -> dict[str, Any]:
    """Return the index of an available step: format, versions, mesh, strategy, arrays by path and data position.

    Raises:
      ValueError: the checkpoint is damaged.
    """
    checkpoint = checkpoint_folder(folder) / str(step)

    def read() -> dict[str, Any]:
        for path in Path(checkpoint).rglob("*") if os.path.isdir(checkpoint) else ():  # otherwise it is in a bucket
            if not path.is_dir() and not (path.is_file() and os.access(path, os.R_OK)):  # a pipe would block
                raise damaged(checkpoint, f"{path.relative_to(checkpoint)} is not a readable file")
        sealed = json.loads((checkpoint / "run" / "metadata").read_text())
        if zlib.crc32(json.dumps(sealed["document"], sort_keys=True).encode()) != sealed["crc32"]:
            raise damaged(checkpoint, "the checksum of run/metadata is wrong")
        return sealed["document"]

    index = agreed(checkpoint, read)
    if index["step"] != step:
        raise damaged(checkpoint, f"run/metadata belongs to step {index['step']}")
    return index


def damage_of(folder: epath.Path, step: int) -> str | None:
    """Return a description of the damage of a checkpoint, or None if it is intact.

    This needs no model, mesh or recipe. All arrays are read onto the first device.
    """
    try:
        index = read_index(folder, step)
        _read_on_first_device(folder, index, index["leaves"])
    except DamagedError as error:
        return error.reason
    return None


def read_leaf(folder: epath.Path, index: Mapping[str, Any], path: str) -> np.ndarray:
    """Read an array of a checkpoint, unsharded, and check its fingerprint. Parameters are those of `mp.eval_params`.

    This needs no model, mesh or recipe. `index` is the return value of `read_index`, and `path` a key of
    `index["leaves"]`.
    """
    arrays = _read_on_first_device(folder, index, eval_sources(index, path))
    return np.asarray(combined([*arrays.values()], index["leaves"][path]["dtype"]))


def _read_on_first_device(folder: Any, index: Mapping[str, Any], paths: Iterable[str]) -> dict[str, jax.Array]:
    check_format(index, f"checkpoint {folder}/{index['step']}")
    mesh = Mesh(np.array(jax.devices()[:1]), ("all",))
    sharding, leaves = NamedSharding(mesh, PartitionSpec()), index["leaves"]
    like = {
        path: jax.ShapeDtypeStruct(leaves[path]["shape"], leaves[path]["dtype"], sharding=sharding) for path in paths
    }
    return read_verified(checkpoint_folder(folder) / str(index["step"]), like, index, mesh)


def read_verified(
    folder: epath.Path, like: Mapping[str, Any], index: Mapping[str, Any], mesh: Mesh
) -> dict[str, jax.Array]:
    """Read the arrays with the paths in `like`, and compare them with the fingerprints in the index."""
    arrays = agreed(folder, lambda: _read_arrays(folder, like))
    saved = [index["leaves"][path]["fingerprint"] for path in like]
    changed = [path for path, a, b in zip(like, fingerprints_of(arrays, mesh), saved, strict=True) if a != b]
    if changed:
        raise damaged(folder, f"the contents of {shorten(changed)} changed since the save")
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
            raise damaged(folder, f"{len(missing)} arrays are missing from the index of arrays")
        arrays |= flatten_dict(tree["leaves"], sep="/")
    return {path: arrays[path] for path in like}


def leaves_of(state: TrainState) -> dict[str, Any]:
    """Return the arrays by path, in the order of the state's leaves; "." and "/" in keys are escaped."""
    keys, arrays = zip(*jax.tree_util.tree_leaves_with_path(state), strict=True)
    leaves = dict(zip(map(_path, keys), arrays, strict=True))
    if len(leaves) < len(arrays):
        reason, fix = "two arrays have the same path", "rename a key; the keys 1 and '1' have the same path"
        raise problem("the state", "save its arrays", reason, fix, code="conflict")
    return leaves


def eval_sources(index: Mapping[str, Any], path: str) -> list[str]:
    """Return the paths of the arrays that determine the parameter of `mp.eval_params`, as inputs of `combined`."""
    name, leaves = path.removeprefix("params/"), index["leaves"]
    average = f"{index.get('averages')}/{name}"
    if path.startswith("params/") and average in leaves:  # frozen parameters have no averages
        return [average]
    for prefix in index.get("schedule_free", ()):
        if path.startswith("params/") and f"{prefix}/z/{name}" in leaves:
            return [path, f"{prefix}/z/{name}", f"{prefix}/b1"]
    return [path]


def combined(arrays: Sequence[jax.Array], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return a parameter from the arrays of its `eval_sources`."""
    return (arrays[0] if len(arrays) == 1 else schedule_free_iterate(*arrays)).astype(dtype)


def _path(keys: Iterable[Any]) -> str:
    # orbax joins keys with ".", so without escapes {"a.b": x} and {"a": {"b": y}} would be written to the same file.
    escapes = {ord("%"): "%25", ord("."): "%2E", ord("/"): "%2F"}
    return "/".join(path_str((key,)).translate(escapes) for key in keys)


def new_index(
    step: int, state: TrainState, leaves: Mapping[str, Any], data_state: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the JSON item `run` with its checksum. It shares no object with the arguments, as it is written later."""
    import meshpar

    averages = averages_of(state.opt_state)
    fingerprints = fingerprints_of(leaves, concrete_mesh(state.setup))
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


def check_format(index: Mapping[str, Any], where: str) -> None:
    """Check that the checkpoint has the format that this version reads."""
    if index["format"] != FORMAT:
        newer = index["format"] > FORMAT
        fix = f"install meshpar {index['meshpar']} or newer" if newer else "train again: no release wrote this format"
        reason = f"meshpar {index['meshpar']} wrote it in format {index['format']}"
        raise problem(where, f"read it as format {FORMAT}", reason, fix, code="unsupported-version")


def shorten(paths: Sequence[str], limit: int = 4) -> str:
    """Return the first paths as text, with the number of the others."""
    text = ", ".join(f"`{path}`" for path in paths[:limit])
    return text if len(paths) <= limit else f"{text} and {len(paths) - limit} more"


def concrete_mesh(setup: Setup) -> Mesh:
    """Return the mesh of a setup, which must have devices."""
    if not isinstance(setup.mesh, Mesh):
        reason = "the mesh is abstract: it has no devices"
        raise problem("checkpoint", "read it onto this mesh", reason, "use MeshSpec.build()", code="abstract-mesh")
    return setup.mesh


# ---- Multiple processes ----------------------------------------------------------------------------------------------


def agreed(checkpoint: object, read: Callable[[], Any]) -> Any:
    """Return the result of `read`; if it fails on any process, raise `DamagedError` on all processes."""
    result, failure = None, None
    try:
        result = read()
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # the files may be intact
    except Exception as error:
        failure = error.reason if isinstance(error, DamagedError) else orbax_workarounds.summarize(error)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        if multihost_utils.process_allgather(np.array(failure is not None)).any() and failure is None:
            failure = "a process could not read it"
    if failure is not None:
        raise damaged(checkpoint, failure)
    return result


def broadcast_steps(steps: list[int], limit: int = 256) -> list[int]:
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
