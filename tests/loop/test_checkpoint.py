"""Checkpoints restore bit-identical arrays onto any mesh, detect damage, and reject states that do not match."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.loop import checkpoint, checkpoint_index, orbax_workarounds
from meshpar.loop.checkpoint import SET_ASIDE, Checkpoints
from meshpar.pod import coordination
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.types import tree_leaves_with_paths
from meshpar.training.state import Setup, TrainState, make_setup
from tests.errors import raises
from tests.grid import cases
from tests.pod.test_coordination import run_processes

EMBED, MLP = 16, 64
NAMES = {"up/kernel": ("embed", "mlp"), "down/kernel": ("mlp", "embed"), "scale": ("embed",)}


def make_model(mlp: int = MLP, **more: tuple[int, ...]) -> Model:
    def init(key):
        up, down = jax.random.split(key)
        return {
            "up": {"kernel": jax.random.normal(up, (EMBED, mlp))},
            "down": {"kernel": jax.random.normal(down, (mlp, EMBED))},
            "scale": jnp.ones((EMBED,)),
            **{name: jnp.ones(shape) for name, shape in more.items()},
        }

    def apply(params, x):
        return jnp.tanh(x * params["scale"] @ params["up"]["kernel"]) @ params["down"]["kernel"]

    return mp.from_functions(init, apply, names=NAMES)


def loss(model, batch, key):
    x = batch["x"] + 0.1 * jax.random.normal(key, batch["x"].shape)
    return jnp.mean((model(x) - jnp.sin(batch["x"])) ** 2), {}


STEP = mp.train_step(loss)
BATCH = {"x": np.random.default_rng(0).normal(size=(16, EMBED)).astype(np.float32)}


def make(num_devices: int = 8, strategy=None, *, model=None, tx=None, precision=None, **axes: int) -> Setup:
    mesh = mp.MeshSpec(**axes or {"fsdp": num_devices}).build(jax.devices()[:num_devices])
    return make_setup(
        model or make_model(), tx or optax.adamw(1e-2), mesh=mesh, strategy=strategy or mp.fsdp(), precision=precision
    )


@pytest.fixture(scope="module")
def setup() -> Setup:
    return make()


def trained(setup: Setup, steps: int) -> TrainState:
    state = setup.init(0)
    for _ in range(steps):
        state, _ = STEP(state, BATCH)
    return state


def on_host(state) -> list[np.ndarray]:
    # On CPU, np.asarray may return a view of the buffer, which the next step overwrites.
    return [np.array(x) for x in jax.tree.leaves(state)]


def assert_same(state, values: list[np.ndarray]) -> None:
    for (path, x), expected in zip(tree_leaves_with_paths(state), values, strict=True):
        assert x.dtype == expected.dtype, path
        np.testing.assert_array_equal(np.asarray(x), expected, err_msg=path)


def assert_same_shardings(state, setup: Setup) -> None:
    for x, like in zip(jax.tree.leaves(state), jax.tree.leaves(setup.abstract), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)


def round_trip(folder: Path, setup: Setup, state: TrainState | None = None) -> TrainState:
    """Save a state, restore it, check that the arrays are identical, and return it."""
    state = setup.init(0) if state is None else state
    values = on_host(state)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(state)
        restored = checkpoints.restore(setup).state
    assert_same(restored, values)
    return restored


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory, setup) -> tuple[Path, dict[int, list[np.ndarray]]]:
    """A folder with checkpoints of steps 1 and 2, and their arrays."""
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    values = {}
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            state = trained(setup, step)
            values[step] = on_host(state)
            checkpoints.save(state, data_state={"step": step})
    return folder, values


@pytest.fixture
def folder(two_steps, tmp_path) -> Path:
    """A copy of `two_steps` that a test may damage."""
    shutil.copytree(two_steps[0], tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


class Twins:
    """A pytree node with two children that have the same key."""

    def __init__(self, *children):
        self.children = children


jax.tree_util.register_pytree_with_keys(
    Twins,
    lambda node: ([(jax.tree_util.GetAttrKey("twin"), child) for child in node.children], None),
    lambda _, children: Twins(*children),
)


# ---- Save and restore ------------------------------------------------------------------------------------------------


def test_restore_returns_identical_arrays_and_shardings(setup, two_steps):
    folder, values = two_steps
    restored = Checkpoints(folder).restore(setup)
    assert (restored.step, restored.data_state) == (2, {"step": 2})
    assert_same(restored.state, values[2])
    assert_same_shardings(restored.state, setup)
    assert_same(Checkpoints(folder).restore(setup.abstract).state, values[2])
    assert_same(Checkpoints(folder).restore(trained(setup, 0)).state, values[2])


def test_restore_of_an_older_and_of_a_missing_step(setup, two_steps):
    folder, values = two_steps
    assert Checkpoints(folder).steps() == [1, 2]
    assert_same(Checkpoints(folder).restore(setup, 1).state, values[1])
    with raises("not-found"):
        Checkpoints(folder).restore(setup, 3)


SETUPS = {
    "ddp on 2": lambda: make(2, mp.ddp(), data=2),
    "fsdp=2, tensor=2 on 4": lambda: make(4, mp.fsdp() | mp.tensor_parallel(), fsdp=2, tensor=2),
    "one device": lambda: make(1, mp.ddp(), data=1),
    "zero1 on 8": lambda: make(8, mp.zero1(), fsdp=8),
    "hsdp on 8": lambda: make(8, mp.hsdp(), data=2, fsdp=4),
}


@pytest.mark.parametrize("other", cases("fsdp=2, tensor=2 on 4", grid=SETUPS))
def test_restore_onto_another_mesh_and_strategy(two_steps, other):
    folder, values = two_steps
    other = SETUPS[other]()
    state = Checkpoints(folder).restore(other).state
    assert_same(state, values[2])
    assert_same_shardings(state, other)
    after, metrics = STEP(state, BATCH)
    assert int(after.step) == 3
    assert np.isfinite(metrics["loss"])


def test_training_during_a_save_does_not_change_it(tmp_path):
    model = make_model(mlp=4096)  # large, so that steps run during the write
    setup = make(model=model)
    state = setup.init(0)
    values = {}
    with Checkpoints(tmp_path, keep=10) as checkpoints:
        for step in range(4):
            values[step] = on_host(state)
            checkpoints.save(state)
            for _ in range(3):
                last = state
                state, _ = STEP(state, BATCH)
            assert last.params["up"]["kernel"].is_deleted()  # donated
            state = state.replace(step=jax.device_put(np.int32(step + 1), state.step.sharding))
    for step, expected in values.items():
        assert_same(Checkpoints(tmp_path).restore(setup, step).state, expected)


def test_keep_removes_older_checkpoints(tmp_path, setup):
    state = setup.init(0)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for _ in range(4):
            assert checkpoints.save(state) is True
            assert checkpoints.save(state) is False  # just written
            state, _ = STEP(state, BATCH)
    assert Checkpoints(tmp_path).steps() == [2, 3]


@pytest.mark.parametrize(
    ("how", "last_step"),
    [("removed", 3), ("renamed", 3), ("emptied", 3), ("removed", 2)],
)
def test_lost_folder_is_reported_at_the_next_save(tmp_path, setup, how, last_step):
    """With `last_step` 2, the folder is lost after the last save of a run, which then writes the checkpoint again."""
    folder, last = tmp_path / "checkpoints", trained(setup, last_step)
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(trained(setup, step), wait=True)
        if how == "renamed":
            folder.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(folder)
        if how == "emptied":
            folder.mkdir()
        with pytest.warns(UserWarning, match="checkpoints was removed, .* of step 2 is gone") as warned:
            checkpoints.save(last, wait=True)
        assert len(warned) == 1
        assert not checkpoints.save(last, wait=True)
        assert checkpoints.steps() == [last_step]
        assert_same(checkpoints.restore(setup).state, on_host(last))


def test_file_in_place_of_the_folder_fails_the_save(tmp_path, setup):
    """If the save started, orbax would retry for minutes in the background."""
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(trained(setup, 1), wait=True)
        shutil.rmtree(folder)
        folder.touch()
        with pytest.warns(UserWarning, match="of step 1 is gone"), raises("write-failed"):
            checkpoints.save(trained(setup, 2))
        folder.unlink()
        assert checkpoints.save(trained(setup, 2), wait=True)
        assert checkpoints.steps() == [2]


def test_interrupted_removal_leaves_no_checkpoint(tmp_path, setup, monkeypatch):
    state = setup.init(0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state)
        monkeypatch.setattr(type(checkpoints.folder), "rmtree", lambda path: shutil.rmtree(path / "state"))
        state, _ = STEP(state, BATCH)
        checkpoints.save(state)
    monkeypatch.undo()
    assert Checkpoints(tmp_path).steps() == [1]
    assert len(list(tmp_path.iterdir())) == 2
    state, _ = STEP(state, BATCH)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state)
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_restore_of_an_nnx_model_with_batch_statistics(tmp_path):
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)])
            self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.layers[1](self.layers[0](x))))

    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.masked(optax.adam(1e-2), lambda p: jax.tree.map(jnp.ndim, p))
    )
    setup = make(2, mp.ddp(), model=mp.from_nnx(lambda rngs: Net(rngs)), tx=tx, data=2)
    step = mp.train_step(lambda model, batch, key: (jnp.mean(model(batch["x"]) ** 2), {}))
    state, _ = step(setup.init(0), {"x": np.ones((4, 8), np.float32)})
    structure = jax.tree.structure(state)
    restored = round_trip(tmp_path, setup, state)
    assert len(jax.tree.leaves(restored.extra)) > 0
    assert jax.tree.structure(restored) == structure
    with Checkpoints(tmp_path) as checkpoints:
        weights = checkpoints.restore(setup, weights_only=True).state
    started = jax.tree.leaves(setup.init(0).extra)
    assert any(np.any(np.asarray(a) != b) for a, b in zip(started, jax.tree.leaves(weights.extra), strict=True))
    jax.tree.map(np.testing.assert_array_equal, (weights.params, weights.extra), (state.params, state.extra))


def test_restore_of_each_dtype(tmp_path):
    with jax.enable_x64(True):
        kinds = (
            "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "int32", "uint8", "bool",
            "complex64",
        )  # fmt: skip

        def init(key):
            return {kind: jnp.arange(24).reshape(8, 3).astype(kind) for kind in kinds}

        model = mp.from_functions(init, lambda p, x: x)
        round_trip(tmp_path, make(2, model=model, tx=optax.identity(), strategy=mp.Rules()))


def test_processes_share_the_write_of_large_arrays(tmp_path):
    import tensorstore as ts

    large, small = (2, checkpoint._SHARE_FROM_BYTES // 4), (2, checkpoint._SHARE_FROM_BYTES // 4 - 1)
    init = lambda key: {"large": jnp.ones(large), "small": jnp.ones(small)}  # noqa: E731
    setup = make(2, data=2, model=mp.from_functions(init, lambda p, x: x), tx=optax.identity(), strategy=mp.ddp())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(setup.init(0))
    parts = {}
    for name in ("large", "small"):
        store = {"driver": "ocdbt", "base": f"file://{tmp_path / '0' / 'state'}", "path": f"leaves.params.{name}"}
        read = ts.open({"driver": "zarr", "kvstore": store}, open=True).result()
        parts[name] = read.chunk_layout.write_chunk.shape
    assert parts == {"large": (1, large[1]), "small": small}


def test_keys_with_dots_and_slashes_stay_separate(tmp_path):
    def init(key):
        return {"a.b": jnp.zeros(8), "a": {"b": jnp.ones(8), "c/d": jnp.full(8, 2.0), "c": {"d": jnp.full(8, 3.0)}}}

    model = mp.from_functions(init, lambda p, x: x)
    round_trip(tmp_path, make(2, model=model, tx=optax.identity(), strategy=mp.Rules()))


def test_save_rejects_two_arrays_with_the_same_path(tmp_path, setup):
    state = setup.init(0).replace(extra=[{"x": jnp.zeros(8)}, {"y": jnp.zeros(8)}])
    assert checkpoint_index.leaves_of(state).keys() >= {"extra/0/x", "extra/1/y"}
    with raises("conflict"):
        Checkpoints(tmp_path).save(state.replace(extra=Twins(jnp.zeros(8), jnp.zeros(8))))


# ---- Damage ----------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path: Path, every: int = 256) -> None:
    """Flip a bit per 256 bytes, because some bytes are never read and their positions vary between runs."""
    content = bytearray(path.read_bytes())
    for index in range(every // 2, len(content), every):
        content[index] ^= 1 << 4
    path.write_bytes(bytes(content))


def files(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


def data_files(step: Path) -> list[Path]:
    return sorted(files(step / "state"), key=lambda path: path.stat().st_size)[-3:]


def change_json(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_text(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(f'"{old}"', f'"{new}"', 1))


def replace_folder(source: Path, target: Path) -> None:
    shutil.rmtree(target)
    shutil.copytree(source, target)


def replace(path: Path, make) -> None:
    path.unlink()
    make(path)


DAMAGES = {
    "data files truncated": lambda step: [truncate(path) for path in data_files(step)],
    "data files deleted": lambda step: [path.unlink() for path in data_files(step)],
    "bits flipped": lambda step: [garble(path) for path in files(step / "state") if path.parent.name == "d"],
    "a name changed in the index of arrays": lambda step: change_text(step / "state" / "_METADATA", "params", "tarams"),
    "run deleted": lambda step: shutil.rmtree(step / "run"),
    "run truncated": lambda step: truncate(step / "run" / "metadata"),
    "shape changed": lambda step: change_json(
        step / "run" / "metadata", lambda run: run["document"]["leaves"]["params/scale"].update(shape=[3])
    ),
    "data position changed": lambda step: change_json(
        step / "run" / "metadata", lambda run: run["document"]["data_state"].update(step=0)
    ),
    "run of the step before": lambda step: shutil.copy(step.parent / "1/run/metadata", step / "run/metadata"),
    "arrays of the step before": lambda step: replace_folder(step.parent / "1/state", step / "state"),
    "all of the step before": lambda step: replace_folder(step.parent / "1", step),
    "a pipe in place of the index": lambda step: replace(step / "run/metadata", os.mkfifo),
    "a folder in place of a file": lambda step: replace(step / "state/_METADATA", os.mkdir),
    "a link to itself": lambda step: replace(data_files(step)[-1], lambda path: os.symlink(path, path)),
    "folder emptied": lambda step: [shutil.rmtree(path) if path.is_dir() else path.unlink() for path in step.iterdir()],
}


QUICK = (
    "data files deleted", "bits flipped", "run truncated", "run of the step before", "arrays of the step before",
    "a pipe in place of the index", "a link to itself",
)  # fmt: skip


@pytest.mark.parametrize("damage", cases(*QUICK, grid=DAMAGES))
def test_damaged_newest_checkpoint_is_skipped(setup, two_steps, folder, capfd, damage):
    DAMAGES[damage](folder / "2")
    with pytest.warns(UserWarning, match=r"checkpoints/2 is damaged and skipped: .*Step 1 is used instead"):
        restored = Checkpoints(folder).restore(setup)
    assert restored.step == 1
    assert restored.data_state == {"step": 1}
    assert_same(restored.state, two_steps[1][1])
    assert capfd.readouterr() == ("", "")  # the log lines of orbax are dropped


def test_unreadable_file_is_damage(setup, two_steps, folder, monkeypatch):
    access = os.access  # patched, because root may read all files
    monkeypatch.setattr(os, "access", lambda path, mode: "2/run/" not in str(path) and access(path, mode))
    with pytest.warns(UserWarning, match="skipped: run/metadata is not a readable file.*Step 1 is used"):
        assert_same(Checkpoints(folder).restore(setup).state, two_steps[1][1])


@pytest.mark.matrix
def test_random_damage_is_detected(tmp_path):
    # The arrays are large enough for separate data files, which orbax does not verify: without fingerprints, a fifth
    # of these flips would restore wrong values.
    setup = make(2, model=make_model(mlp=2048))
    state = trained(setup, 1)
    values = on_host(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, data_state={"step": 1})
    draw, detected_by_fingerprint, detected = random.Random(0), 0, 0
    for number in range(100):
        paths = files(tmp_path / "1")  # chosen alternately at random and by size, so that about half are arrays
        (path,) = draw.choices(paths, [path.stat().st_size if number % 2 else 1 for path in paths])
        content = path.read_bytes()
        index = draw.randrange(len(content))
        flipped = bytes([content[index] ^ 1 << draw.randrange(8)])
        path.write_bytes(content[:index] if draw.random() < 0.3 else content[:index] + flipped + content[index + 1 :])
        try:
            restored = Checkpoints(tmp_path).restore(setup)
        except mp.MeshparError as error:
            assert error.code == "damaged-file", path  # noqa: PT017
            detected += 1
            detected_by_fingerprint += "changed since the save" in str(error)
        else:  # the byte is not used
            assert restored.data_state == {"step": 1}
            assert_same(restored.state, values)
        path.write_bytes(content)
    assert detected > 10
    assert detected_by_fingerprint > 2


def test_all_checkpoints_damaged_is_an_error(setup, folder):
    DAMAGES["bits flipped"](folder / "1")
    with raises("damaged-file"):
        Checkpoints(folder).restore(setup, 1)
    DAMAGES["run deleted"](folder / "2")
    for _ in range(2):
        with pytest.raises(mp.MeshparError, match=r"step 2 is damaged \(.*step 1 is damaged \(.*Restore the files"):
            Checkpoints(folder).restore(setup)


def test_save_sets_a_damaged_checkpoint_aside(setup, folder):
    DAMAGES["bits flipped"](folder / "2")
    with Checkpoints(folder, keep=2) as checkpoints:
        with pytest.warns(UserWarning, match="is damaged"):
            state = checkpoints.restore(setup).state
        state, _ = STEP(state, BATCH)
        values = on_host(state)
        with pytest.warns(UserWarning, match=r"steps \[2\] are moved to .*set_aside"):
            checkpoints.save(state, data_state={"step": 2})
        state, _ = STEP(state, BATCH)
        checkpoints.save(state)
    assert Checkpoints(folder).steps() == [2, 3]
    assert (folder / SET_ASIDE / "2" / "state").is_dir()
    assert_same(Checkpoints(folder).restore(setup, 2).state, values)


def test_save_sets_later_checkpoints_aside(setup, folder):
    for name in ("2", "2.1"):
        with Checkpoints(folder) as checkpoints:
            state, _ = STEP(checkpoints.restore(setup, 1).state, BATCH)
            with pytest.warns(UserWarning, match="this run restarted before step 2"):
                assert checkpoints.save(state)
        assert (folder / SET_ASIDE / name).is_dir()
    assert Checkpoints(folder).steps() == [1, 2]


def test_incomplete_checkpoint_is_ignored_then_removed(setup, folder):
    incomplete = folder / "3.orbax-checkpoint-tmp"
    shutil.copytree(folder / "2", incomplete)
    (incomplete / "commit_success.txt").unlink(missing_ok=True)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        restored = checkpoints.restore(setup)
        assert restored.step == 2
        assert incomplete.is_dir()  # a second process may be writing it
        checkpoints.save(STEP(restored.state, BATCH)[0])
    assert Checkpoints(folder).steps() == [1, 2, 3]
    assert not incomplete.exists()


# ---- Mismatch --------------------------------------------------------------------------------------------------------

MISFITS = {
    "shapes": (
        lambda: make(model=make_model(mlp=32)),
        ["`params/up/kernel (float32[16, 64] in the checkpoint, float32[16, 32] in the state)`", "the model"],
    ),
    "missing leaf": (
        lambda: make(model=make_model(bias=(EMBED,))),
        ["the checkpoint lacks `params/bias`", "the model"],
    ),
    "optimizer": (
        lambda: make(tx=optax.sgd(1e-2, momentum=0.9)),
        ["lacks `opt_state/0/trace/down/kernel`", "only the checkpoint has `opt_state/0/count`", "the optimizer"],
    ),
    "no optimizer": (
        lambda: make(tx=optax.identity()),
        ["only the checkpoint has `opt_state/0/count`", "and 3 more", "the optimizer"],
    ),
    "dtype": (
        lambda: make(precision=mp.Precision(params="bfloat16")),
        ["`params/down/kernel (float32[64, 16] in the checkpoint, bfloat16[64, 16] in the state)`", "the precision"],
    ),
}


@pytest.mark.parametrize(("other", "words"), MISFITS.values(), ids=MISFITS)
def test_restore_names_the_arrays_that_differ(two_steps, other, words):
    with raises("wrong-state", f"{two_steps[0]}/2") as error:
        Checkpoints(two_steps[0]).restore(other())
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("version", "fix"), [(3, "train again"), (0, "install meshpar")])
def test_restore_rejects_other_formats(setup, folder, monkeypatch, version, fix):
    monkeypatch.setattr(checkpoint_index, "FORMAT", version)
    with raises("unsupported-version") as error:
        Checkpoints(folder).restore(setup)
    assert "in format 2" in error.value.reason
    assert error.value.fix.startswith(fix)


def test_steps_ignores_other_names(folder, setup):
    none = Checkpoints(folder / "none")
    assert (none.steps(), none.restore(setup), none.folder.exists()) == ([], None, False)
    for name in ("0002", "-3", "9999999999", "9" * 100, "٣", "2.bak"):
        shutil.copytree(folder / "2", folder / name)
    (folder / "3").touch()
    assert Checkpoints(folder).steps() == [1, 2]


def test_checkpoints_reject_an_abstract_mesh_and_wrong_keep(two_steps):
    abstract = mp.abstract_state(
        make_model(), optax.adamw(1e-2), mesh=mp.MeshSpec(fsdp=16).abstract(), strategy=mp.fsdp()
    )
    with raises("abstract-mesh"):
        Checkpoints(two_steps[0]).restore(abstract)
    for keep in (0, True, 2.0):
        with raises("not-an-int", "Checkpoints"):
            Checkpoints(two_steps[0], keep=keep)


def test_save_without_free_space_is_not_started(tmp_path, setup, monkeypatch):
    state = setup.init(0)
    states = [state.replace(step=jax.device_put(np.int32(step), state.step.sharding)) for step in (1, 2, 3)]
    room = types.SimpleNamespace(free=1 << 40)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: room)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(states[0])
        checkpoints.save(states[1])
        room.free = 1
        with pytest.raises(checkpoint.NoRoomError, match="no space left.*that of step 2"):
            checkpoints.save(states[2])
        assert checkpoints.steps() == [1, 2]
        room.free = 1 << 40
        checkpoints.save(states[2])
    assert checkpoints.steps() == [1, 2, 3]


@pytest.fixture
def full_disk(tmp_path, monkeypatch):
    """Make the write of the index fail, after all arrays have been written."""
    import orbax.checkpoint as ocp

    async def fails(self, x, directory):
        while not any(tmp_path.rglob("_METADATA")):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ocp.JsonCheckpointHandler, "_save_fn", fails)
        yield patched


def test_patched_orbax_waits_for_pending_writes(tmp_path):
    from orbax.checkpoint._src import asyncio_utils

    Checkpoints(tmp_path)
    finished = []

    async def fails():
        raise OSError("no space left on device")

    async def writes():
        await asyncio.sleep(0.05)
        finished.append(True)

    async def both():
        await asyncio.gather(fails(), writes())

    with pytest.raises(OSError, match="no space left"):
        asyncio_utils.run_sync(both())
    assert finished  # otherwise it would print a traceback about a closed event loop


@pytest.mark.parametrize("changed", [None, lambda work, loop: work])
def test_unsupported_orbax_is_not_patched(tmp_path, monkeypatch, changed):
    from orbax.checkpoint._src import asyncio_utils

    monkeypatch.setattr(asyncio_utils, "run_sync", changed)
    with pytest.warns(UserWarning, match=r"orbax .* is not supported"):
        orbax_workarounds.wait_for_failed_writes.__wrapped__()
    assert asyncio_utils.run_sync is changed


def test_unsupported_orbax_refuses_s3(monkeypatch):
    from orbax.checkpoint._src.serialization import tensorstore_utils

    monkeypatch.setattr(tensorstore_utils, "build_kvstore_tspec", lambda folder: {})
    with raises("unsupported-version"):
        orbax_workarounds.support_s3.__wrapped__()


@pytest.mark.parametrize("store", cases(grid=["bucket", "gs_bucket"]))
def test_checkpoints_in_a_bucket_are_kept_and_set_aside(store, request, setup):
    folder = f"{request.getfixturevalue(store)}/checkpoints"
    states = [trained(setup, 1)]
    with Checkpoints(folder, keep=2) as checkpoints:
        (checkpoints.folder / "9").joinpath("state", "x").write_text("of a killed save")
        assert checkpoints.restore(setup) is None
        for number in range(3):
            checkpoints.save(states[-1], data_state={"number": number})
            values = on_host(states[-1])
            states.append(STEP(states[-1], BATCH)[0])
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
        assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["2", "3"]
        restored = checkpoints.restore(setup)
        assert (restored.step, restored.data_state) == (3, {"number": 2})
        assert_same(restored.state, values)
    with Checkpoints(folder, keep=2) as checkpoints:
        earlier = checkpoints.restore(setup, 2).state
        with pytest.warns(UserWarning, match="set_aside"):
            checkpoints.save(earlier.replace(step=earlier.step + 1), wait=True)
        assert checkpoints.steps() == [2, 3]
    with Checkpoints(f"{folder}/{SET_ASIDE}") as checkpoints:
        assert_same(checkpoints.restore(setup).state, values)
    assert checkpoint_index.damage_of(folder, 3) is None


def test_failed_save_is_a_note_on_the_error_of_the_block(tmp_path, setup, full_disk):
    with pytest.raises(KeyError) as error, Checkpoints(tmp_path) as checkpoints:  # noqa: PT012
        checkpoints.save(setup.init(0))
        raise KeyError("block")
    assert "no space left" in error.value.__notes__[0]


def test_same_step_can_be_saved_after_a_failed_save(tmp_path, setup, full_disk):
    state = setup.init(0)
    with raises("write-failed"), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
    assert Checkpoints(tmp_path).steps() == []
    with Checkpoints(tmp_path) as checkpoints:
        with raises("write-failed"):
            checkpoints.save(state, wait=True)
        full_disk.undo()
        assert checkpoints.save(state)
        checkpoints.wait()
        assert checkpoints.steps() == [0]
        assert_same(checkpoints.restore(setup).state, on_host(state))


def test_retry_waits_for_the_writers_of_a_failed_save(tmp_path, setup, monkeypatch):
    """orbax raises the first failure while its other writers continue, in the folder that the retry will use."""
    import orbax.checkpoint as ocp

    async def fails(self, x, directory):
        raise OSError("no space left on device")

    def write_late():
        for number in range(40):
            late = tmp_path / "0.orbax-checkpoint-tmp" / "state" / f"late{number}"
            late.parent.mkdir(parents=True, exist_ok=True)
            late.touch()
            time.sleep(0.05)

    state = setup.init(0)
    writer = threading.Thread(target=write_late)
    with Checkpoints(tmp_path) as checkpoints:
        with monkeypatch.context() as patched:
            patched.setattr(ocp.JsonCheckpointHandler, "_save_fn", fails)
            with raises("write-failed"):
                checkpoints.save(state, wait=True)
        writer.start()
        checkpoints.save(state, wait=True)
        writer.join()
        assert_same(checkpoints.restore(setup).state, on_host(state))
    assert not list(tmp_path.rglob("late*"))
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.matrix), "int8"])
def test_restore_of_arrays_without_elements(dtype, tmp_path):
    def init(key):
        return {"w": jax.random.normal(key, (8, 8)), "none": jnp.zeros((0, 8)), "thin": jnp.zeros((8, 0), jnp.bfloat16)}

    def apply(params, x):
        return mp.constrain(x, "batch", None) @ params["w"] + params["none"].sum() + params["thin"].sum()

    model, tx = mp.from_functions(init, apply), optax.adam(1e-2)
    tx = tx if dtype is None else mp.optim.low_precision_moments(tx, dtype)
    arguments = {"mesh": mp.MeshSpec(fsdp=8).build(), "strategy": mp.fsdp(min_bytes=0)}
    step = mp.train_step(lambda model, batch, key: ((model(batch) ** 2).mean(), {}))
    state, _ = step(mp.init_state(model, tx, key=0, **arguments), np.ones((8, 8), np.float32))
    like = mp.abstract_state(model, tx, **arguments)
    with mp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, wait=True)
        restored = checkpoints.restore(like).state
        weights = checkpoints.restore(like, weights_only=True).state.params
    jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, restored.opt_state, state.opt_state)
    jax.tree.map(np.testing.assert_array_equal, weights, state.params)
    jax.tree.map(lambda x, y: x.sharding == y.sharding or pytest.fail(str(x)), restored.params, state.params)
    assert checkpoint_index.damage_of(tmp_path, 1) is None
    assert checkpoint_index.read_leaf(tmp_path, checkpoint_index.read_index(tmp_path, 1), "params/none").shape == (0, 8)
    step(restored, np.ones((8, 8), np.float32))


@pytest.mark.parametrize("is_shared", [True, False])
def test_first_save_checks_that_processes_share_the_folder(tmp_path, monkeypatch, is_shared):
    monkeypatch.setattr(coordination, "_VISIBLE_S", 0.2)
    process = threading.local()
    monkeypatch.setattr(checkpoint, "this_pod", lambda: process.pod)

    def save(pod):
        process.pod = pod
        checkpoints = Checkpoints(tmp_path / ("shared" if is_shared else str(pod.process_id)))
        for _ in range(2):  # the second save does not check again
            with pytest.raises(AttributeError, match="step"):  # after the check, it reads the step of the state
                checkpoints.save(None)

    errors = run_processes(2, save)
    assert [error is None for error in errors] == [is_shared] * 2, errors
    assert is_shared or all("cannot share" in error and "probe file" in error for error in errors)
