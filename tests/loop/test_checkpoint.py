"""A checkpoint comes back to the bit, onto any mesh; damage is always seen; what does not fit is refused by name."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import shutil
import sys
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import meshpar as mp
from meshpar.loop import checkpoint
from meshpar.loop.checkpoint import SET_ASIDE, Checkpoints
from meshpar.sharding.types import tree_leaves_with_paths
from meshpar.training.state import Setup, TrainState, make_setup
from tests.grid import cases

EMBED, MLP = 16, 64
NAMES = {"up/kernel": ("embed", "mlp"), "down/kernel": ("mlp", "embed"), "scale": ("embed",)}


def make_model(mlp: int = MLP, **more: tuple[int, ...]) -> mp.Model:
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
    # Copies: on a CPU device np.asarray may be a view of memory that the next step is given.
    return [np.array(x) for x in jax.tree.leaves(state)]


def assert_same(state, values: list[np.ndarray]) -> None:
    for (path, x), expected in zip(tree_leaves_with_paths(state), values, strict=True):
        assert x.dtype == expected.dtype, path
        np.testing.assert_array_equal(np.asarray(x), expected, err_msg=path)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory, setup) -> tuple[Path, dict[int, list[np.ndarray]]]:
    """A folder with checkpoints of steps 1 and 2, and what they hold."""
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
    """A copy of it, to be damaged."""
    shutil.copytree(two_steps[0], tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


class Twins:
    """A node whose two children have the same key, as a careless class of somebody's may."""

    def __init__(self, *children):
        self.children = children


jax.tree_util.register_pytree_with_keys(
    Twins,
    lambda node: ([(jax.tree_util.GetAttrKey("twin"), child) for child in node.children], None),
    lambda _, children: Twins(*children),
)


# ---------------------------------------------------------------------------------------------------------------------
# There and back
# ---------------------------------------------------------------------------------------------------------------------


def test_the_newest_comes_back_to_the_bit_in_the_same_shards(setup, two_steps):
    folder, values = two_steps
    restored = Checkpoints(folder).restore(setup)
    assert (restored.step, restored.data_state, restored.damaged) == (2, {"step": 2}, {})
    assert_same(restored.state, values[2])
    for x, like in zip(jax.tree.leaves(restored.state), jax.tree.leaves(setup.abstract), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)


def test_an_older_one_on_request_and_a_missing_one_is_an_error(setup, two_steps):
    folder, values = two_steps
    assert Checkpoints(folder).steps() == [1, 2]
    assert_same(Checkpoints(folder).restore(setup, 1).state, values[1])
    with pytest.raises(mp.MeshparError, match=r"restore step 3.*there are steps \[1, 2\]"):
        Checkpoints(folder).restore(setup, 3)


OTHERS = {
    "ddp on 2": lambda: make(2, mp.ddp(), data=2),
    "fsdp=2, tensor=2 on 4": lambda: make(4, mp.fsdp() | mp.tensor_parallel(), fsdp=2, tensor=2),
    "one device": lambda: make(1, mp.ddp(), data=1),
    "zero1 on 8": lambda: make(8, mp.zero1(), fsdp=8),
    "hsdp on 8": lambda: make(8, mp.hsdp(), data=2, fsdp=4),
}


@pytest.mark.parametrize("other", cases("fsdp=2, tensor=2 on 4", grid=OTHERS))
def test_onto_another_mesh_strategy_and_device_count(two_steps, other):
    folder, values = two_steps
    other = OTHERS[other]()
    state = Checkpoints(folder).restore(other).state
    assert_same(state, values[2])
    for x, like in zip(jax.tree.leaves(state), jax.tree.leaves(other.abstract), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    after, metrics = STEP(state, BATCH)  # and it trains there
    assert int(after.step) == 3
    assert np.isfinite(metrics["loss"])


def test_any_state_says_where_to(setup, two_steps):
    folder, values = two_steps
    assert_same(Checkpoints(folder).restore(setup.abstract).state, values[2])
    assert_same(Checkpoints(folder).restore(trained(setup, 0)).state, values[2])


def test_a_step_is_not_compiled_again_for_a_restored_state(setup, two_steps):
    step = mp.train_step(loss)
    state, _ = step(trained(setup, 0), BATCH)
    restored = Checkpoints(two_steps[0]).restore(setup).state
    step(restored, BATCH)
    assert step.jitted(state, BATCH)._cache_size() == 1


def test_training_on_while_it_is_written_changes_nothing_in_it(tmp_path):
    model = make_model(mlp=4096)  # long enough to write that steps run meanwhile
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
            assert last.params["up"]["kernel"].is_deleted()  # its memory was given to the next
            state = state.replace(step=jax.device_put(np.int32(step + 1), state.step.sharding))
    for step, expected in values.items():
        assert_same(Checkpoints(tmp_path).restore(setup, step).state, expected)


def test_the_newest_are_kept(tmp_path, setup):
    state = setup.init(0)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for _ in range(4):
            assert checkpoints.save(state) is True
            assert checkpoints.save(state) is False  # just written
            state, _ = STEP(state, BATCH)
    assert Checkpoints(tmp_path).steps() == [2, 3]


@pytest.mark.parametrize(
    ("how", "last_step"),
    [("removed", 3), ("renamed", 3), ("emptied", 3), ("newest replaced by a file", 3), ("removed", 2), ("emptied", 2)],
)
def test_a_folder_that_goes_away_is_reported_at_the_next_save(tmp_path, setup, how, last_step):
    """`last_step` 2: after the last save of a run; the checkpoint is then written again."""
    folder, last = tmp_path / "checkpoints", trained(setup, last_step)
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(trained(setup, step), wait=True)
        if how == "renamed":
            folder.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(folder)
        if how.startswith("newest"):
            folder.mkdir()
            (folder / "2").touch()
        if how == "emptied":
            folder.mkdir()
        with pytest.warns(UserWarning, match="checkpoints was removed, .* of step 2 is gone, none is left") as warned:
            checkpoints.save(last, wait=True)
        assert len(warned) == 1
        assert not checkpoints.save(last, wait=True)
        assert checkpoints.steps() == [last_step]
        assert_same(checkpoints.restore(setup).state, on_host(last))


def test_a_file_in_place_of_the_folder_fails_the_next_save_at_once(tmp_path, setup):
    """If the save began, orbax would retry for minutes in the background."""
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(trained(setup, 1), wait=True)
        shutil.rmtree(folder)
        folder.touch()
        warned, failed = pytest.warns(UserWarning, match="of step 1 is gone"), "save step 2: writing failed"
        with warned, pytest.raises(mp.MeshparError, match=failed):
            checkpoints.save(trained(setup, 2))
        folder.unlink()
        assert checkpoints.save(trained(setup, 2), wait=True)
        assert checkpoints.steps() == [2]


def test_half_of_one_that_was_being_removed_is_no_checkpoint_and_goes_with_the_next_save(tmp_path, setup, monkeypatch):
    state = setup.init(0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state)
        monkeypatch.setattr(type(checkpoints.folder), "rmtree", lambda path: shutil.rmtree(path / "state"))  # killed
        state, _ = STEP(state, BATCH)
        checkpoints.save(state)
    monkeypatch.undo()
    assert Checkpoints(tmp_path).steps() == [1]
    assert len(list(tmp_path.iterdir())) == 2
    state, _ = STEP(state, BATCH)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state)
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_models_of_flax_with_what_they_keep_beside_parameters(tmp_path):
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
    values = on_host(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        restored = checkpoints.restore(setup)
    assert_same(restored.state, values)
    assert len(jax.tree.leaves(restored.state.extra)) > 0
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)


def test_every_dtype_comes_back(tmp_path):
    with jax.enable_x64(True):
        kinds = (
            "float64",
            "float32",
            "bfloat16",
            "float16",
            "float8_e4m3fn",
            "int64",
            "int32",
            "uint8",
            "bool",
            "complex64",
        )

        def init(key):
            return {kind: jnp.arange(24).reshape(8, 3).astype(kind) for kind in kinds}

        setup = make(2, model=mp.from_functions(init, lambda p, x: x), tx=optax.identity(), strategy=mp.Rules())
        state = setup.init(0)
        values = on_host(state)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(state)
            assert_same(checkpoints.restore(setup).state, values)


def test_large_replicated_arrays_are_written_in_parts_that_processes_share(tmp_path):
    import tensorstore as ts

    large, small = (2, checkpoint._SPREAD_FROM // 4), (2, checkpoint._SPREAD_FROM // 4 - 1)
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


def test_keys_that_orbax_would_write_over_each_other(tmp_path):
    def init(key):
        return {"a.b": jnp.zeros(8), "a": {"b": jnp.ones(8), "c/d": jnp.full(8, 2.0), "c": {"d": jnp.full(8, 3.0)}}}

    setup = make(2, model=mp.from_functions(init, lambda p, x: x), tx=optax.identity(), strategy=mp.Rules())
    state = setup.init(0)
    values = on_host(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        assert_same(checkpoints.restore(setup).state, values)


def test_two_arrays_of_one_path_are_refused(tmp_path, setup):
    state = setup.init(0).replace(extra=[{"x": jnp.zeros(8)}, {"y": jnp.zeros(8)}])
    assert checkpoint._leaves(state).keys() >= {"extra/0/x", "extra/1/y"}
    with pytest.raises(mp.MeshparError, match="two arrays have this path"):
        Checkpoints(tmp_path).save(state.replace(extra=Twins(jnp.zeros(8), jnp.zeros(8))))


# ---------------------------------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path: Path, every: int = 256) -> None:
    """One bit of every 256 bytes: what lies in which file is a race of threads, and some of it nobody reads."""
    content = bytearray(path.read_bytes())
    for at in range(every // 2, len(content), every):
        content[at] ^= 1 << 4
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


def in_place_of(path: Path, make) -> None:
    path.unlink()
    make(path)


DAMAGES = {
    "data files truncated": lambda step: [truncate(path) for path in data_files(step)],
    "data files emptied": lambda step: [path.write_bytes(b"") for path in data_files(step)],
    "data files deleted": lambda step: [path.unlink() for path in data_files(step)],
    "bits flipped": lambda step: [garble(path) for path in files(step / "state") if path.parent.name == "d"],
    "arrays deleted": lambda step: shutil.rmtree(step / "state"),
    "a name changed in the index of arrays": lambda step: change_text(step / "state" / "_METADATA", "params", "tarams"),
    "run deleted": lambda step: shutil.rmtree(step / "run"),
    "run truncated": lambda step: truncate(step / "run" / "metadata"),
    "run is no document": lambda step: (step / "run" / "metadata").write_text("[]"),
    "shape changed": lambda step: change_json(
        step / "run" / "metadata", lambda run: run["document"]["leaves"]["params/scale"].update(shape=[3])
    ),
    "data position changed": lambda step: change_json(
        step / "run" / "metadata", lambda run: run["document"]["data_state"].update(step=0)
    ),
    "run of the step before": lambda step: shutil.copy(step.parent / "1/run/metadata", step / "run/metadata"),
    "arrays of the step before": lambda step: replace_folder(step.parent / "1/state", step / "state"),
    "all of the step before": lambda step: replace_folder(step.parent / "1", step),
    "a pipe in place of the index": lambda step: in_place_of(step / "run/metadata", os.mkfifo),
    "a folder in place of a file": lambda step: in_place_of(step / "state/_METADATA", os.mkdir),
    "a link to itself": lambda step: in_place_of(data_files(step)[-1], lambda path: os.symlink(path, path)),
    "a file in its place": lambda step: (shutil.rmtree(step), step.write_text("")),
    "all files deleted": lambda step: [path.unlink() for path in files(step)],
    "folder emptied": lambda step: [shutil.rmtree(path) if path.is_dir() else path.unlink() for path in step.iterdir()],
}


QUICK = (
    "data files deleted", "bits flipped", "run truncated", "run of the step before", "arrays of the step before",
    "a pipe in place of the index", "a link to itself", "a file in its place",
)  # fmt: skip


@pytest.mark.parametrize("damage", cases(*QUICK, grid=DAMAGES))
def test_a_damaged_newest_is_reported_and_the_one_before_it_used(setup, two_steps, folder, capfd, damage):
    DAMAGES[damage](folder / "2")
    with pytest.warns(UserWarning, match=r"checkpoints/2 is damaged and skipped: .*Step 1 is used instead"):
        restored = Checkpoints(folder).restore(setup)
    assert restored.step == 1
    assert restored.data_state == {"step": 1}
    assert list(restored.damaged) == [2]
    assert_same(restored.state, two_steps[1][1])
    assert capfd.readouterr() == ("", "")  # the warning says it; orbax's own complaints are kept back


def test_a_file_in_place_of_the_only_checkpoint_does_not_begin_anew(setup, tmp_path):
    (tmp_path / "3").touch()
    with pytest.raises(mp.MeshparError, match="step 3 is damaged .it is a file, and a checkpoint is a folder"):
        Checkpoints(tmp_path).restore(setup)


def test_a_run_that_comes_to_a_step_where_a_file_is_moves_it_away(setup, folder):
    DAMAGES["a file in its place"](folder / "2")
    with Checkpoints(folder) as checkpoints:
        with pytest.warns(UserWarning, match="2 is damaged and skipped: it is a file"):
            checkpoints.restore(setup)
        with pytest.warns(UserWarning, match="the checkpoints of steps 2 are moved"):
            checkpoints.save(trained(setup, 2), wait=True)
    assert Checkpoints(folder).restore(setup).step == 2
    assert (folder / SET_ASIDE / "2").is_file()


def test_a_file_that_may_not_be_read_is_damage_and_named(setup, two_steps, folder, monkeypatch):
    allowed = os.access  # whoever runs this may be allowed everything
    monkeypatch.setattr(os, "access", lambda path, how: "2/run/" not in str(path) and allowed(path, how))
    with pytest.warns(UserWarning, match=r"2 is damaged and skipped: run/metadata may not be read.*Step 1 is used"):
        assert_same(Checkpoints(folder).restore(setup).state, two_steps[1][1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "bool"])
def test_small_arrays_are_written_whole_and_large_ones_shard_by_shard(tmp_path, dtype, monkeypatch):
    """Of a process on its own: every shard costs, and small arrays have as many as large ones."""
    import orbax.checkpoint as ocp

    monkeypatch.setattr(checkpoint, "_WHOLE_BELOW", 1000)
    mesh = mp.MeshSpec(fsdp=8).build()
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    leaves = {
        name: jax.device_put((np.arange(rows * 8) % 13).reshape(rows, 8).astype(jnp.dtype(dtype)), split)
        for name, rows in (("small", 8), ("large", 128))
    }
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=checkpoint.array_handlers())
    handler.save(tmp_path / "state", args=ocp.args.PyTreeSave(checkpoint._small_ones_whole(leaves)))
    handler.finalize(tmp_path / "state")
    found = handler.metadata(tmp_path / "state").tree
    rows = {name: one.storage.chunk_shape[0] for name, one in found.items()}
    assert rows == {"small": 8, "large": 16}
    assert_same(checkpoint._read_arrays(tmp_path, leaves), [leaves[name] for name in sorted(leaves)])


@pytest.mark.matrix
def test_no_flipped_bit_and_no_cut_goes_unseen(tmp_path):
    # Arrays large enough that they lie in data files of their own, where orbax checks nothing: a fifth of these flips
    # would come back as other numbers.
    setup = make(2, model=make_model(mlp=2048))
    state = trained(setup, 1)
    values = on_host(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, data_state={"step": 1})
    draw, seen_by_fingerprint, seen = random.Random(0), 0, 0
    for number in range(100):
        there = files(tmp_path / "1")  # every other in any of them, or where most bytes are: in the arrays
        (path,) = draw.choices(there, [path.stat().st_size if number % 2 else 1 for path in there])
        whole = path.read_bytes()
        at = draw.randrange(len(whole))
        other = bytes([whole[at] ^ 1 << draw.randrange(8)])
        path.write_bytes(whole[:at] if draw.random() < 0.3 else whole[:at] + other + whole[at + 1 :])
        try:
            restored = Checkpoints(tmp_path).restore(setup)
        except mp.MeshparError as error:
            assert "step 1 is damaged" in str(error), path  # noqa: PT017
            seen += 1
            seen_by_fingerprint += "are not what was written" in str(error)
        else:  # a byte that nobody reads
            assert restored.data_state == {"step": 1}
            assert_same(restored.state, values)
        path.write_bytes(whole)
    assert seen > 10
    assert seen_by_fingerprint > 2


def test_no_file_of_the_checkpoint_before_goes_unseen(setup, two_steps, folder):
    seen = []
    for path in files(folder / "2"):
        other = folder / "1" / path.relative_to(folder / "2")
        if other.exists():
            whole = path.read_bytes()
            shutil.copy(other, path)
            try:
                restored = Checkpoints(folder).restore(setup, 2)
            except mp.MeshparError as error:
                assert "step 2 is damaged" in str(error), path  # noqa: PT017
                seen.append(path.name)
            else:  # a file that nobody reads, or the same in both
                assert restored.data_state == {"step": 2}, path
                assert_same(restored.state, two_steps[1][2])
            path.write_bytes(whole)
    assert "metadata" in seen


def test_other_numbers_than_were_written_are_damage(setup, two_steps, monkeypatch):
    found = checkpoint._fingerprints

    def of_other_numbers(*args):
        first, *others = found(*args)
        return [first ^ 1, *others]

    monkeypatch.setattr(checkpoint, "_fingerprints", of_other_numbers)
    with pytest.raises(mp.MeshparError, match="step 2 is damaged.*are not what was written"):
        Checkpoints(two_steps[0]).restore(setup, 2)


def test_a_read_that_fails_leaves_nothing_behind(setup, folder, monkeypatch):
    """No read goes on, to complain when it ends, and Python's hooks for errors are nobody's but the program's."""
    told = []
    hooks = {"excepthook": lambda *error: told.append(error), "unraisablehook": told.append}
    for name, hook in hooks.items():
        monkeypatch.setattr(sys, name, hook)
    DAMAGES["data files deleted"](folder / "2")
    with pytest.raises(mp.MeshparError, match="step 2 is damaged"):
        Checkpoints(folder).restore(setup, 2)
    gc.collect()
    assert told == []
    for name, hook in hooks.items():
        assert getattr(sys, name) is hook


def test_a_damaged_one_asked_for_by_step_is_an_error(setup, folder):
    DAMAGES["bits flipped"](folder / "2")
    with pytest.raises(mp.MeshparError, match="restore step 2: step 2 is damaged"):
        Checkpoints(folder).restore(setup, 2)


def test_all_damaged_is_an_error_and_never_a_fresh_start(setup, folder):
    DAMAGES["bits flipped"](folder / "1")
    DAMAGES["run deleted"](folder / "2")
    for _ in range(2):
        with pytest.raises(mp.MeshparError, match=r"step 2 is damaged \(.*step 1 is damaged \(.*Bring"):
            Checkpoints(folder).restore(setup)


def test_training_on_from_the_one_before_a_damaged_one_sets_that_aside(setup, folder):
    DAMAGES["bits flipped"](folder / "2")
    with Checkpoints(folder, keep=2) as checkpoints:
        with pytest.warns(UserWarning, match="is damaged"):
            state = checkpoints.restore(setup).state
        state, _ = STEP(state, BATCH)
        values = on_host(state)
        with pytest.warns(UserWarning, match=r"steps 2 are moved to .*set_aside"):
            checkpoints.save(state, data_state={"step": 2})
        state, _ = STEP(state, BATCH)
        checkpoints.save(state)
    assert Checkpoints(folder).steps() == [2, 3]
    assert (folder / SET_ASIDE / "2" / "state").is_dir()
    assert_same(Checkpoints(folder).restore(setup, 2).state, values)


def test_a_run_that_restarts_earlier_sets_later_ones_aside(setup, folder):
    for name in ("2", "2.1"):
        with Checkpoints(folder) as checkpoints:
            state, _ = STEP(checkpoints.restore(setup, 1).state, BATCH)
            with pytest.warns(UserWarning, match="a run that restarted before step 2 writes here"):
                assert checkpoints.save(state)
        assert (folder / SET_ASIDE / name).is_dir()
    assert Checkpoints(folder).steps() == [1, 2]


def test_what_a_killed_process_left_half_written_is_ignored_then_removed(setup, folder):
    half = folder / "3.orbax-checkpoint-tmp"
    shutil.copytree(folder / "2", half)
    (half / "commit_success.txt").unlink(missing_ok=True)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        restored = checkpoints.restore(setup)
        assert restored.step == 2
        assert half.is_dir()  # reading removes nothing: another process may be writing it
        checkpoints.save(STEP(restored.state, BATCH)[0])
    assert Checkpoints(folder).steps() == [1, 2, 3]
    assert not half.exists()


# ---------------------------------------------------------------------------------------------------------------------
# What does not fit
# ---------------------------------------------------------------------------------------------------------------------

MISFITS = {
    "shapes": (
        lambda: make(model=make_model(mlp=32)),
        ["they differ in", "`params/up/kernel (float32[16,64] there, float32[16,32] here)`", "the model"],
    ),
    "another leaf": (
        lambda: make(model=make_model(bias=(EMBED,))),
        ["it lacks `params/bias`", "the model"],
    ),
    "optimizer": (
        lambda: make(tx=optax.sgd(1e-2, momentum=0.9)),
        ["it lacks `opt_state/0/trace/down/kernel`", "only it has `opt_state/0/count`", "the optimizer"],
    ),
    "no optimizer": (
        lambda: make(tx=optax.identity()),
        ["only it has `opt_state/0/count`", "and 3 more", "the optimizer"],
    ),
    "dtype": (
        lambda: make(precision=mp.Precision(params="bfloat16")),
        ["`params/down/kernel (float32[64,16] there, bfloat16[64,16] here)`", "the precision"],
    ),
}


@pytest.mark.parametrize(("other", "words"), MISFITS.values(), ids=MISFITS)
def test_another_state_is_refused_by_the_paths_that_differ(two_steps, other, words):
    with pytest.raises(mp.MeshparError) as caught:
        Checkpoints(two_steps[0]).restore(other())
    for word in [f"{two_steps[0]}/2", "be restored into this state", *words]:
        assert word in str(caught.value)


def test_a_misfit_is_no_damage(setup, two_steps):
    """It must not make an older checkpoint be taken."""
    with pytest.raises(mp.MeshparError, match="be restored into this state"):
        Checkpoints(two_steps[0]).restore(make(model=make_model(mlp=32)))


def test_an_older_format_is_refused(setup, folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 3)
    with pytest.raises(mp.MeshparError, match=r"format 3.*wrote it in format 2.*Train anew"):
        Checkpoints(folder).restore(setup)


def test_a_newer_format_is_refused(setup, folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 0)
    with pytest.raises(mp.MeshparError, match=r"format 0.*wrote it in format 2.*Install meshpar"):
        Checkpoints(folder).restore(setup)


def test_only_numbers_of_steps_are_checkpoints(folder):
    for name in ("0002", "-3", "9999999999", "9" * 100, "٣", "2.bak"):
        shutil.copytree(folder / "2", folder / name)
    (folder / "8888888888").touch()
    assert Checkpoints(folder).steps() == [1, 2]
    assert Checkpoints(folder)._misplaced() == []


def test_nothing_there(tmp_path, setup):
    assert Checkpoints(tmp_path / "none").steps() == []
    assert Checkpoints(tmp_path / "none").restore(setup) is None
    assert not (tmp_path / "none").exists()


def test_an_abstract_mesh_holds_no_arrays(two_steps):
    abstract = mp.abstract_state(
        make_model(), optax.adamw(1e-2), mesh=mp.MeshSpec(fsdp=16).abstract(), strategy=mp.fsdp()
    )
    with pytest.raises(mp.MeshparError, match="the mesh is abstract"):
        Checkpoints(two_steps[0]).restore(abstract)


@pytest.mark.parametrize("keep", [0, -1, True, 2.0])
def test_keep_is_a_positive_integer(tmp_path, keep):
    with pytest.raises(mp.MeshparError, match="set keep="):
        Checkpoints(tmp_path, keep=keep)


def test_a_folder_that_cannot_be_written(tmp_path, setup):
    (tmp_path / "file").write_text("")
    with pytest.raises(mp.MeshparError, match="save step 0: writing failed"):
        Checkpoints(tmp_path / "file" / "checkpoints").save(setup.init(0))


def test_without_room_for_one_more_nothing_is_begun(tmp_path, setup, monkeypatch):
    """In a pod the others wait for the part of one whose write fails."""
    state = setup.init(0)
    states = [state.replace(step=jax.device_put(np.int32(step), state.step.sharding)) for step in (1, 2, 3)]
    room = types.SimpleNamespace(free=1 << 40)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: room)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(states[0])
        checkpoints.save(states[1])
        room.free = 1
        with pytest.raises(checkpoint.NoRoomError, match="no space left.*as large as that of step 2"):
            checkpoints.save(states[2])
        assert checkpoints.steps() == [1, 2]
        room.free = 1 << 40
        checkpoints.save(states[2])
    assert checkpoints.steps() == [1, 2, 3]


@pytest.fixture
def full_disk(tmp_path, monkeypatch):
    """The disk is full when a save's last file is written."""
    import orbax.checkpoint as ocp

    async def fails(self, x, directory):
        while not any(tmp_path.rglob("_METADATA")):  # the arrays are written; orbax would not wait for them
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ocp.JsonCheckpointHandler, "_save_fn", fails)
        yield patched


def test_a_save_that_fails_in_the_background_is_told(tmp_path, setup, full_disk):
    with pytest.raises(mp.MeshparError, match="no space left"), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(setup.init(0))
    assert Checkpoints(tmp_path).steps() == []


def test_orbax_reports_a_write_that_failed_when_the_others_have_ended(tmp_path):
    from orbax.checkpoint._src import asyncio_utils

    Checkpoints(tmp_path)
    ended = []

    async def fails():
        raise OSError("no space left on device")

    async def goes_on():
        await asyncio.sleep(0.05)
        ended.append(True)

    async def both():
        await asyncio.gather(fails(), goes_on())

    with pytest.raises(OSError, match="no space left"):
        asyncio_utils.run_sync(both())
    assert ended  # else it would meet a closed loop, and print a traceback


@pytest.mark.parametrize("changed", [None, lambda work, loop: work])
def test_an_orbax_that_is_not_known_is_told_and_left_as_it_is(tmp_path, monkeypatch, changed):
    from orbax.checkpoint._src import asyncio_utils

    from meshpar.loop import checkpoint

    monkeypatch.setattr(asyncio_utils, "run_sync", changed)
    with pytest.warns(UserWarning, match=r"orbax .* is not known: when a checkpoint cannot be written"):
        checkpoint._patient_orbax.__wrapped__()
    assert asyncio_utils.run_sync is changed


def test_what_ended_the_block_comes_before_a_save_that_failed(tmp_path, setup, full_disk):
    with pytest.raises(KeyError) as caught, Checkpoints(tmp_path) as checkpoints:  # noqa: PT012
        checkpoints.save(setup.init(0))
        raise KeyError("mine")
    assert "no space left" in caught.value.__notes__[0]


def test_after_a_save_that_failed_the_same_step_can_be_saved(tmp_path, setup, full_disk):
    state = setup.init(0)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(mp.MeshparError, match="no space left"):
            checkpoints.save(state, wait=True)
        full_disk.undo()
        assert checkpoints.save(state)
        checkpoints.wait()
        assert checkpoints.steps() == [0]
        assert_same(checkpoints.restore(setup).state, on_host(state))


def test_a_retry_waits_for_what_the_failed_save_still_writes(tmp_path, setup, monkeypatch):
    """orbax tells of the first failure while its other writers go on in the folder that the retry will use."""
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
            with pytest.raises(mp.MeshparError, match="no space left"):
                checkpoints.save(state, wait=True)
        writer.start()
        checkpoints.save(state, wait=True)
        writer.join()
        assert_same(checkpoints.restore(setup).state, on_host(state))
    assert not list(tmp_path.rglob("late*"))
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_saving_and_restoring_is_silent(tmp_path, setup, capfd):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(setup.init(0), wait=True)
        checkpoints.restore(setup)
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------------------------------------------------------------
# Fingerprints
# ---------------------------------------------------------------------------------------------------------------------


def test_a_fingerprint_does_not_depend_on_the_mesh(setup, two_steps):
    states = [Checkpoints(two_steps[0]).restore(s).state for s in (setup, make(2, mp.ddp(), data=2))]
    first, second = (checkpoint._fingerprints(checkpoint._leaves(s), s.setup) for s in states)
    np.testing.assert_array_equal(first, second)


FINGERPRINT = jax.jit(checkpoint._fingerprint)


@settings(max_examples=60)
@given(data=st.data())
def test_any_change_of_one_element_changes_the_fingerprint(data):
    dtype = np.dtype(data.draw(st.sampled_from(["float32", "float16", "int32", "uint8", "bool", "complex64"])))
    shape = data.draw(st.sampled_from([(), (2, 3, 2)]))
    seed = data.draw(st.integers(0, 99))
    x = np.random.default_rng(seed).integers(0, 2, size=shape).astype(dtype)
    changed = x.copy().reshape(-1).view(np.uint8)
    at = data.draw(st.integers(0, changed.size - 1))
    changed[at] ^= 1 if dtype.kind == "b" else 1 << data.draw(st.integers(0, 7))
    changed = changed.view(dtype).reshape(shape)
    assert FINGERPRINT(x) != FINGERPRINT(changed)


def test_elements_that_change_places_change_the_fingerprint():
    x = jnp.arange(24, dtype=jnp.float32).reshape(4, 6)
    others = [x.T.reshape(4, 6), x[::-1], jnp.roll(x, 1), x.at[0, 0].set(x[1, 0]).at[1, 0].set(x[0, 0])]
    assert len({int(FINGERPRINT(y)) for y in [x, *others]}) == 5


def test_one_fingerprint_a_leaf(setup):
    state = setup.init(0)
    found = checkpoint._fingerprints(checkpoint._leaves(state), setup)
    assert len(found) == len(jax.tree.leaves(state))
    assert all(type(fingerprint) is int and 0 <= fingerprint < 2**32 for fingerprint in found)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_parameters_without_elements_are_saved_and_restored(dtype, tmp_path):
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
    assert checkpoint.damage_of(tmp_path, 1) is None
    assert checkpoint.read_leaf(tmp_path, checkpoint.read_index(tmp_path, 1), "params/none").shape == (0, 8)
    step(restored, np.ones((8, 8), np.float32))
