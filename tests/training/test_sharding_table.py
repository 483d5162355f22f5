from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.types import tree_leaves_with_paths
from meshpar.sharding.units import human_bytes
from meshpar.training.sharding_table import spec_text

# All dims have different sizes, so that the shape of a factored moment shows its dims.
SHAPES = {
    "up": {"kernel": (128, 256), "bias": (256,)},
    "down": {"kernel": (256, 128), "bias": (128,)},
    "stack": {"kernel": (3, 128, 512)},
    "temperature": (),
}
NAMES = {
    "up/kernel": ("embed", "mlp"),
    "up/bias": ("mlp",),
    "down/kernel": ("mlp", "embed"),
    "down/bias": ("embed",),
    "stack/kernel": ("layers", "embed", "heads"),
}
IS_SHAPE = {"is_leaf": lambda x: isinstance(x, tuple)}


def init(key):
    return jax.tree.map(lambda shape: jax.random.normal(key, shape), SHAPES, **IS_SHAPE)


MODEL = mp.from_functions(init, lambda params, x: x, names=NAMES)
MESH = mp.MeshSpec(fsdp=4, tensor=2).abstract()
STRATEGY = mp.zero1() | mp.tensor_parallel()
FOLLOWED = {
    "up/kernel": P("fsdp", "tensor"),
    "up/bias": P("tensor"),
    "down/kernel": P("tensor", "fsdp"),
    "down/bias": P("fsdp"),
    "stack/kernel": P(None, "fsdp", "tensor"),
    "temperature": P(),
}
MATRICES = {"up/kernel", "down/kernel", "stack/kernel"}


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "other", params)


def owner_of(path: str) -> str | None:
    found = [name for name in FOLLOWED if path.endswith("/" + name) or f"/{name}/" in path]
    return max(found, key=len) if found else None


# ---- Rules for optimizer state ---------------------------------------------------------------------------------------

# name -> (optimizer, paths of parameters whose state it keeps, copies of each)
EVERYTHING = set(FOLLOWED)
OPTIMIZERS = {
    "adamw": (optax.adamw(1e-3), EVERYTHING, 2),
    "clip and schedule": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 10))),
        EVERYTHING,
        2,
    ),
    "MultiSteps": (optax.MultiSteps(optax.adam(1e-3), 4), EVERYTHING, 3),
    "inject_hyperparams": (optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3), EVERYTHING, 2),
    "masked": (optax.masked(optax.adam(1e-3), is_matrix), MATRICES, 2),
    "masked by a prefix": (
        optax.masked(optax.adam(1e-3), {"up": True, "down": False, "stack": True, "temperature": False}),
        {"up/kernel", "up/bias", "stack/kernel"},
        2,
    ),
    "partition": (
        optax.partition({"matrix": optax.adam(1e-3), "other": optax.sgd(0.1, momentum=0.9)}, labels),
        None,
        None,
    ),
    "frozen": (
        optax.partition(
            {"train": optax.adam(1e-3), "freeze": optax.set_to_zero()},
            {"up": "train", "down": "freeze", "stack": "train", "temperature": "freeze"},
        ),
        {"up/kernel", "up/bias", "stack/kernel"},
        2,
    ),
    "ema": (optax.chain(optax.adam(1e-3), optax.ema(0.9)), EVERYTHING, 3),
    "noise": (optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.adam(1e-3)), EVERYTHING, 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_shaped_like_a_parameter_uses_optimizer_rules(name):
    tx, kept, copies = OPTIMIZERS[name]
    table = mp.shardings(MODEL, MESH, STRATEGY, tx=tx)
    assert table["up/kernel"].spec == P(None, "tensor")  # which is not how the parameters lie
    owned: dict[str, int] = {}
    for d in table.optimizer:
        owner = owner_of(d.path)
        if owner is None:
            assert d.rule == "belongs to no parameter"
            assert d.spec == P()
            continue
        owned[owner] = owned.get(owner, 0) + 1
        assert P(*d.spec) == FOLLOWED[owner], d.path
        assert d.leaf.names == NAMES.get(owner), d.path
    if name == "partition":
        assert owned == {path: 2 if path in MATRICES else 1 for path in EVERYTHING}
    else:
        assert owned == dict.fromkeys(kept, copies)


def test_factored_moments_are_sharded_like_their_parameter():
    table = mp.shardings(MODEL, MESH, STRATEGY, tx=optax.adafactor(1e-3, multiply_by_parameter_scale=False))
    found = {d.path.removeprefix("opt_state/0/"): (d.leaf.shape, P(*d.spec)) for d in table.optimizer}
    assert found["v_row/up/kernel"] == ((128,), P("fsdp"))
    assert found["v_col/up/kernel"] == ((256,), P("tensor"))
    assert found["v_row/down/kernel"] == ((128,), P("fsdp"))
    assert found["v_row/stack/kernel"] == ((3, 128), P(None, "fsdp"))
    assert found["v_col/stack/kernel"] == ((3, 512), P(None, "tensor"))
    assert found["v/up/bias"] == ((256,), P("tensor"))
    assert found["v/up/kernel"] == ((1,), P())  # placeholder of a factored moment
    assert found["v_row/up/bias"] == ((1,), P())


def test_stored_updates_are_sharded_like_the_parameter():
    table = mp.shardings(MODEL, MESH, STRATEGY, tx=optax.scale_by_lbfgs(memory_size=5))
    (found,) = [d for d in table.optimizer if d.path == "opt_state/diff_params_memory/up/kernel"]
    assert (found.leaf.shape, found.spec) == ((5, 128, 256), P(None, "fsdp", "tensor"))
    assert found.leaf.names == (None, "embed", "mlp")


def test_lists_per_parameter_are_sharded_like_it():
    table = mp.shardings(MODEL, MESH, STRATEGY, tx=optax.sm3(0.1))
    assert {owner_of(d.path) for d in table.optimizer} == EVERYTHING
    assert not any(d.rule == "belongs to no parameter" for d in table.optimizer)


def test_names_of_parameters_that_are_names_of_state_too():
    params = {"count": jnp.zeros((8, 16)), "mu": {"count": jnp.zeros((16, 8))}}
    model = mp.from_functions(
        lambda key: params, lambda p: p, names={"count": ("embed", "mlp"), "mu/count": ("mlp", "embed")}
    )
    table = mp.shardings(model, MESH, mp.fsdp() | mp.tensor_parallel(), tx=optax.adam(1e-3))
    found = {d.path: d.spec for d in table.optimizer}
    assert found["opt_state/0/count"] == P()
    for moment in ("mu", "nu"):
        assert found[f"opt_state/0/{moment}/count"] == P("fsdp", "tensor")
        assert found[f"opt_state/0/{moment}/mu/count"] == P("tensor", "fsdp")


def test_model_may_be_a_single_array():
    model = mp.from_functions(lambda key: jnp.zeros((8, 16)), lambda w: w, names={"": ("embed", "mlp")})
    table = mp.shardings(model, MESH, mp.fsdp() | mp.tensor_parallel(), tx=optax.adam(1e-3))
    assert [(d.path, d.spec) for d in table.optimizer] == [
        ("opt_state/0/count", P()),
        ("opt_state/0/mu", P("fsdp", "tensor")),
        ("opt_state/0/nu", P("fsdp", "tensor")),
    ]


@pytest.mark.parametrize("name", ["MultiSteps", "partition", "noise"])
def test_optimizer_state_is_born_in_its_shards(name):
    mesh = mp.MeshSpec(fsdp=4, tensor=2).build()
    state = mp.init_state(MODEL, OPTIMIZERS[name][0], mesh=mesh, strategy=STRATEGY, key=0)
    decisions = {d.path: d for d in state.table.optimizer}
    leaves = tree_leaves_with_paths(state.opt_state)
    assert len(leaves) == len(decisions)
    for path, x in leaves:
        d = decisions[f"opt_state/{path}"]
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, d.spec), x.ndim)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert {s.data.nbytes for s in x.addressable_shards} == {d.bytes_per_device}


def test_optimizer_state_of_another_shape_is_replicated_if_small():
    def doubled():  # concatenates two copies of each array
        return optax.GradientTransformation(
            lambda params: {"twice": jax.tree.map(lambda p: jnp.zeros((2 * p.size,)), params)},
            lambda grads, state, params=None: (grads, state),
        )

    small = STRATEGY.replace(big_leaf_bytes=2**30)
    assert {d.rule for d in mp.shardings(MODEL, MESH, small, tx=doubled()).optimizer} >= {
        "shape differs from `up/kernel`"
    }
    with pytest.raises(mp.MeshparError, match=r"`opt_state/twice/.*kernel`.*Use an optimizer whose state"):
        mp.shardings(MODEL, MESH, STRATEGY.replace(big_leaf_bytes=2**18), tx=doubled())


# ---- State of a model ------------------------------------------------------------------------------------------------


def with_statistics() -> Model:
    from flax import nnx

    class Normed(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(64, 128, rngs=rngs)
            self.norm = nnx.BatchNorm(128, rngs=rngs)

    return mp.from_nnx(Normed)


def test_extras_are_whole_unless_a_path_says_otherwise():
    model = with_statistics()
    table = mp.shardings(model, MESH, mp.fsdp(min_bytes=0))
    assert {d.path: d.spec for d in table.extra} == {"norm/mean": P(None), "norm/var": P(None)}
    placed = mp.shardings(model, MESH, mp.fsdp(min_bytes=0) | mp.Rules(paths={r"norm/mean": ("tensor",)}))
    assert {d.path: d.spec for d in placed.extra} == {"norm/mean": P("tensor"), "norm/var": P(None)}
    with pytest.raises(mp.MeshparError, match=r"`norm/mean`.*mp.replicated"):
        mp.shardings(model, MESH, mp.fsdp(min_bytes=0).replace(big_leaf_bytes=512))


# ---- Totals and how they are shown -----------------------------------------------------------------------------------


@pytest.fixture
def table():
    return mp.shardings(MODEL, MESH, mp.fsdp() | mp.tensor_parallel(), tx=optax.adamw(1e-3))


def test_totals_add_up(table):
    sizes = {path: math.prod(x.shape) for path, x in tree_leaves_with_paths(MODEL.abstract().params)}
    shards = {"up/kernel": 8, "up/bias": 2, "down/kernel": 8, "down/bias": 4, "stack/kernel": 8, "temperature": 1}
    params = sum(4 * sizes[path] // shards[path] for path in sizes)
    assert table.totals._asdict() == {
        "params_bytes": params,
        "grads_bytes": params,
        "optimizer_bytes": 2 * params + 4,
        "state_bytes": 3 * params + 4,
        "num_params": sum(sizes.values()),
        "host_bytes": 0,
    }


def test_json_is_plain_and_complete(table):
    data = json.loads(json.dumps(table.to_json()))
    assert data["mesh"] == {"data": 1, "stage": 1, "fsdp": 4, "expert": 1, "tensor": 2}
    assert data["strategy"] == "fsdp() | tensor_parallel()"
    assert data["totals"] == table.totals._asdict()
    (leaf,) = [leaf for leaf in data["leaves"] if leaf["path"] == "stack/kernel"]
    assert leaf == {
        "path": "stack/kernel",
        "shape": [3, 128, 512],
        "dtype": "float32",
        "names": ["layers", "embed", "heads"],
        "rule": "fsdp: embed='fsdp'; tensor_parallel: heads='tensor'",
        "spec": [None, "fsdp", "tensor"],
        "bytes_per_device": 3 * 128 * 512 * 4 // 8,
    }
    assert len(data["leaves"]) == len(NAMES) + 1


def test_printed_table_shows_all_leaves_and_totals(table):
    text = str(table)
    for d in table.params:
        (row,) = [line for line in text.splitlines() if f" {d.path} " in line]
        assert human_bytes(d.bytes_per_device) in row
        assert d.rule in row
    assert "mesh fsdp=4, tensor=2 · fsdp() | tensor_parallel()" in text
    assert f"{table.totals.num_params:,} parameters" in text
    assert "\x1b" not in text


def test_printed_table_folds_equal_layers_and_counts_trained_parameters():
    params = {f"blocks/{i}/up": (16, 64) for i in range(12)} | {"blocks/12/up": (16, 32), "a1/b1": (8,), "a2/b2": (8,)}
    model = mp.from_functions(lambda key: {path: jnp.zeros(shape) for path, shape in params.items()}, lambda p, x: x)
    text = str(mp.shardings(model, mp.MeshSpec(fsdp=8).abstract(), mp.fsdp(min_bytes=64), trainable=r"blocks/[0-3]/up"))
    rows = [" ".join(line.replace("│", " ").split()) for line in text.splitlines() if "float32" in line]
    assert [(row.split()[0], row.rpartition("fsdp")[2] if "up" in row else row[-4:]) for row in rows] == [
        ("a1/b1", "32 B"),
        ("a2/b2", "32 B"),
        ("blocks/0…3/up", " 4 × 512 B"),
        ("blocks/4…11/up", " 8 × 512 B"),
        ("blocks/12/up", " 256 B"),
    ]
    assert "12,816 parameters, 4,096 trained (31.96%)" in text


def test_specs_for_people():
    assert spec_text(P("fsdp", None, ("data", "tensor"))) == "fsdp, –, data×tensor"
    assert spec_text(P()) == ""
