"""Presets and their composition: specs of each rule set, required axes, thresholds, and strategies as values."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.parallel import PRESETS, as_strategy, from_json, parse_strategy
from meshpar.parallel.batch import batch_sharding
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.context import spec_of
from meshpar.sharding.rules import BATCH_AXES, PARAMETER_NAMES
from meshpar.sharding.types import spec_axes
from tests.errors import raises

LEAVES = {
    "embed/table": ((64, 16), ("vocab", "embed")),
    "attention/query": ((16, 8, 4), ("embed", "heads", "head_dim")),
    "attention/key": ((16, 2, 4), ("embed", "kv_heads", "head_dim")),
    "mlp/up": ((3, 16, 32), ("layers", "embed", "mlp")),
    "moe/up": ((4, 16, 32), ("expert", "embed", "mlp")),
    "norm/scale": ((16,), ("embed",)),
}


def model_of(leaves: dict[str, tuple]) -> Model:
    """Return a model of plain arrays, from (shape, names) by path."""

    def init(key):
        nested: dict = {}
        for path, (shape, _) in leaves.items():
            *outer, name = path.split("/")
            (nested.setdefault(outer[0], {}) if outer else nested)[name] = jnp.zeros(shape)
        return nested

    names = {path: names for path, (_, names) in leaves.items() if names is not None}
    return mp.from_functions(init, lambda params: params, names=names)


MODEL = model_of(LEAVES)
UNNAMED = model_of({"big": ((64, 512), None), "odd": ((7, 9), None), "bias": ((8,), None)})
SMALL = model_of({"w": ((8, 8), None), "b": ((8,), None)})
REPLICATED = {path: P(*[None] * len(shape)) for path, (shape, _) in LEAVES.items()}
BY_EMBED = {
    path: P(*("fsdp" if name == "embed" else None for name in names)) for path, (_, names) in LEAVES.items()
}  # fmt: skip
TP, TP_SEQUENCE = mp.tensor_parallel(), mp.tensor_parallel(sequence=True)
RING, ALL_TO_ALL = mp.context_parallel(), mp.context_parallel(kind="all-to-all")


def specs(strategy, field: str = "params", **sizes: int) -> dict[str, P]:
    table = mp.shardings(MODEL, mp.MeshSpec(**sizes).abstract(), strategy)
    return {decision.path: P(*decision.spec) for decision in getattr(table, field)}


# ---- Specs of each preset --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "sizes", "params", "grads", "moments"),
    [
        (mp.ddp(), {"data": 8}, REPLICATED, REPLICATED, REPLICATED),
        (mp.zero1(), {"fsdp": 8}, REPLICATED, REPLICATED, BY_EMBED),
        (mp.zero2(), {"fsdp": 8}, REPLICATED, BY_EMBED, BY_EMBED),
        (mp.zero3(), {"fsdp": 8}, BY_EMBED, BY_EMBED, BY_EMBED),
        (mp.fsdp(), {"fsdp": 8}, BY_EMBED, BY_EMBED, BY_EMBED),
        (mp.hsdp(), {"data": 2, "fsdp": 4}, BY_EMBED, BY_EMBED, BY_EMBED),
    ],
    ids=str,
)
def test_state_sharding_of_a_preset(strategy, sizes, params, grads, moments):
    mesh = mp.MeshSpec(**sizes).abstract()
    table = mp.shardings(MODEL, mesh, strategy, tx=optax.adam(1e-3))
    for field, expected in (("params", params), ("grads", grads)):
        assert {d.path: P(*d.spec) for d in getattr(table, field)} == expected
    found = {d.path.removeprefix("opt_state/0/mu/"): P(*d.spec) for d in table.optimizer if "/mu/" in d.path}
    assert found == moments
    assert batch_sharding(mesh, strategy).spec == P(BATCH_AXES)


@pytest.mark.parametrize(
    ("strategy", "sizes", "path", "spec"),
    [
        (TP, {"tensor": 2}, "embed/table", P("tensor", None)),
        (TP, {"tensor": 2}, "attention/query", P(None, "tensor", None)),
        (TP, {"tensor": 2}, "attention/key", P(None, "tensor", None)),
        (TP, {"tensor": 2}, "mlp/up", P(None, None, "tensor")),
        (TP, {"tensor": 2}, "norm/scale", P(None)),
        (mp.tensor_parallel(axis="model"), {"model": 2}, "embed/table", P("model", None)),
        (mp.fsdp(axis=("data", "fsdp")), {"data": 2, "fsdp": 4}, "norm/scale", P(("data", "fsdp"))),
        (mp.hsdp(axis="expert"), {"data": 2, "expert": 4}, "norm/scale", P("expert")),
        (mp.expert_parallel() | mp.fsdp(), {"expert": 2, "fsdp": 2}, "moe/up", P("expert", "fsdp", None)),
        (mp.expert_parallel() | mp.fsdp(), {"expert": 2, "fsdp": 2}, "mlp/up", P(None, "fsdp", None)),
        (RING, {"context": 2}, "attention/query", P(None, None, None)),
        # The rules of the last strategy take precedence.
        (mp.fsdp() | TP | mp.Rules(mlp="data"), {"data": 2, "fsdp": 4}, "mlp/up", P(None, "fsdp", "data")),
        (mp.Rules(mlp="data") | (mp.fsdp() | TP), {"fsdp": 2, "tensor": 2}, "mlp/up", P(None, "fsdp", "tensor")),
        (mp.zero2() | TP, {"fsdp": 4, "tensor": 2}, "mlp/up", P(None, None, "tensor")),
        (mp.fsdp() | TP, {"fsdp": 8}, "mlp/up", P(None, "fsdp", "tensor")),  # an axis of size 1
    ],
    ids=str,
)
def test_param_sharding_of_a_strategy(strategy, sizes, path, spec):
    assert specs(strategy, **sizes)[path] == spec


def test_sequence_parallelism_changes_activations_only():
    assert TP.params == TP_SEQUENCE.params
    rules = [strategy.activations.name_rule(name) for strategy in (TP, TP_SEQUENCE) for name in ("norm_seq", "seq")]
    assert [rule and rule.value for rule in rules] == [None, None, "tensor", None]


def test_context_parallelism_shards_sequence_or_heads():
    q, few = (jax.ShapeDtypeStruct((4, 8, heads, 2), np.float32) for heads in (16, 4))
    around, inside = (None, "seq", "act_heads", None), (None, "attn_seq", "attn_heads", None)
    by_key_heads = (*inside[:2], "attn_kv_heads", None)
    mesh = mp.MeshSpec(context=2, tensor=4).abstract()
    with mp.use_rules(mesh, RING | TP):
        assert spec_of(q, *around) == spec_of(q, *inside) == P(None, "context", "tensor", None)
    for strategy in (ALL_TO_ALL | TP, TP | ALL_TO_ALL):
        with mp.use_rules(mesh, strategy):
            assert spec_of(q, *around) == P(None, "context", "tensor", None)
            assert spec_of(q, *inside) == spec_of(q, *by_key_heads) == P(None, None, ("tensor", "context"), None)
            assert spec_of(few, *by_key_heads) == P(None, None, None, None)


@pytest.mark.parametrize(
    ("sizes", "axes", "strategy"),
    [
        ((8,), ("fsdp",), mp.zero1()),
        ((8,), ("data",), mp.ddp()),
        ((2, 4), ("data", "fsdp"), mp.hsdp()),
        ((4, 2), ("fsdp", "tensor"), mp.fsdp() | TP_SEQUENCE),
        ((8,), ("x",), mp.fsdp(axis="x")),
    ],
    ids=str,
)
def test_presets_work_on_plain_meshes_with_some_axes(sizes, axes, strategy):
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), axes)
    model = UNNAMED if len(axes) == 1 else MODEL
    state = mp.init_state(model, optax.adam(1e-3), mesh=mesh, strategy=strategy, key=0)
    for x, sharding in zip(jax.tree.leaves(state.params), jax.tree.leaves(state.setup.shardings.params), strict=True):
        assert x.sharding == sharding
    assert set(spec_axes(batch_sharding(mesh, strategy).spec[0])) <= set(axes)


@pytest.mark.parametrize("strategy", [mp.fsdp(), mp.zero3(), mp.hsdp()], ids=str)
def test_unnamed_leaves_are_sharded_on_the_largest_dim(strategy):
    table = mp.shardings(UNNAMED, mp.MeshSpec(data=2, fsdp=4).abstract(), strategy)
    name = strategy.label.removesuffix("()")
    assert (table["big"].spec, table["big"].rule) == (P(None, "fsdp"), f"{name}: largest divisible dim (1)")
    assert table["bias"].rule == table["odd"].rule == f"{name}: small, replicated"
    table = mp.shardings(UNNAMED, mp.MeshSpec(fsdp=4).abstract(), mp.fsdp(min_bytes=0))
    assert (table["bias"].spec, table["odd"].rule) == (P("fsdp"), "fsdp: no dim is divisible by 4")


# ---- Presets without an effect ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaves", "sizes", "strategy", "where"),
    [
        (SMALL, {"fsdp": 8}, mp.fsdp(), "strategy fsdp"),
        (SMALL, {"fsdp": 4, "tensor": 2}, mp.fsdp(min_bytes=0) | TP, "strategy tensor_parallel"),
        (model_of({"w": ((7, 9), None)}), {"fsdp": 8}, mp.fsdp(min_bytes=0), "strategy fsdp"),
        (model_of({"w": ((8, 8), ("embed", "mlp"))}), {"expert": 8}, mp.expert_parallel() | mp.fsdp(), "expert_"),
    ],
)
def test_preset_that_shards_nothing_is_an_error(leaves, sizes, strategy, where):
    with raises("unmatched-rule", where):
        mp.shardings(leaves, mp.MeshSpec(**sizes).abstract(), strategy)


@pytest.mark.parametrize(
    ("model", "sizes", "strategy"),
    [
        (SMALL, {"fsdp": 8}, mp.ddp()),  # it has no rules
        (model_of({"w": ((8, 8), ("embed", "mlp"))}), {"tensor": 8}, TP),  # some of its rules are used
        (MODEL, {"fsdp": 8}, mp.fsdp() | mp.Rules(embed=None, head_dim=None)),  # the user replaced its rules
    ],
)
def test_preset_without_unused_rules_is_accepted(model, sizes, strategy):
    assert mp.shardings(model, mp.MeshSpec(**sizes).abstract(), strategy).params


def test_table_names_mesh_axes_without_a_rule():
    """This is not an error: pipelines and code in a `shard_map` need no rule."""
    mesh = mp.MeshSpec(fsdp=4, tensor=2).abstract()
    assert mp.shardings(MODEL, mesh, mp.fsdp()).idle == ("tensor",)
    for rules in (mp.Rules(act_mlp=mp.first("tensor", None)), mp.Rules(paths={"norm/scale": (("fsdp", "tensor"),)})):
        assert mp.shardings(MODEL, mesh, mp.fsdp() | rules).idle == ()
    table = mp.shardings(MODEL, mp.MeshSpec(fsdp=2, stage=2, context=2).abstract(), mp.fsdp())
    assert table.idle == ("stage", "context")
    assert all(f"no rule uses mesh axis `{axis}`" in " ".join(str(table).split()) for axis in table.idle)


@pytest.mark.parametrize(
    ("strategy", "later", "text"),
    [
        (mp.fsdp(), mp.ddp(), "never removes a rule"),
        (mp.zero2() | TP, mp.zero1(), "never removes a rule"),
        (ALL_TO_ALL, RING, "`attn_seq`"),
        (TP_SEQUENCE | mp.fsdp(), TP, "`norm_seq`"),
    ],
)
def test_composition_without_effect_is_an_error(strategy, later, text):
    with raises("conflict") as error:
        strategy | later
    assert text in error.value.reason
    assert later | strategy  # the other order has an effect


# ---- Composition -----------------------------------------------------------------------------------------------------


def test_composition_merges_each_rule_set():
    joined = mp.zero2() | TP_SEQUENCE
    assert joined.params.name_rule("mlp").value == "tensor"
    assert joined.params.name_rule("embed") is None
    assert joined.grads.name_rule("embed").value == "fsdp"
    assert joined.activations.name_rule("norm_seq").value == "tensor"
    a, b, c = mp.fsdp(), TP, mp.Rules(mlp=None)
    assert (a | b) | c == a | (b | c)
    assert (a | b.replace(big_leaf_bytes=10)).big_leaf_bytes == 10
    for other in ("fsdp", None, {"embed": "fsdp"}):
        with pytest.raises(TypeError):
            mp.fsdp() | other
        with pytest.raises(TypeError):
            other | mp.fsdp()


def test_rules_as_strategy_apply_to_every_rule_set():
    rules = mp.Rules(embed="fsdp", batch="fsdp", paths={"norm/scale": mp.replicated})
    strategy = as_strategy(rules)
    assert strategy.params == strategy.grads == strategy.optimizer == rules
    assert strategy.activations.name_rule("batch").value == "fsdp"
    assert strategy.label == repr(rules)
    assert as_strategy(strategy) is strategy
    others = dict.fromkeys(set(PARAMETER_NAMES) - {"embed"})
    for given in (rules | mp.Rules(**others), mp.Rules(**others) | as_strategy(rules)):
        assert specs(given, fsdp=8) == {**BY_EMBED, "norm/scale": P(None)}
    # A path rule does not match the batch.
    mesh = mp.MeshSpec(data=8).abstract()
    assert batch_sharding(mesh, mp.Rules(paths={".*": mp.replicated})).spec == P(BATCH_AXES)


# ---- Thresholds and required axes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "names", "max_bytes"), [((64, 64), ("mlp", None), 4 * 64 * 64), ((16, 64), ("layers", "mlp"), 4 * 64)]
)
def test_leaf_above_the_threshold_must_be_sharded(shape, names, max_bytes):
    """The threshold applies to each layer of a stack."""
    model, mesh = model_of({"w": (shape, names), "e": ((8,), ("embed",))}), mp.MeshSpec(fsdp=8).abstract()
    strategy = mp.fsdp(min_bytes=0).replace(big_leaf_bytes=max_bytes)
    with raises("replicated-by-accident", "`w`"):
        mp.shardings(model, mesh, strategy)
    assert mp.shardings(model, mesh, strategy.replace(big_leaf_bytes=max_bytes + 1))["w"].shards == 1
    on_purpose = strategy | mp.Rules(paths={"w": mp.replicated})
    assert mp.shardings(model, mesh, on_purpose)["w"].replicated_on_purpose


@pytest.mark.parametrize("field", ["params", "grads", "optimizer"])
def test_threshold_applies_to_every_rule_set(field):
    rules = {name: getattr(mp.fsdp(), name) for name in ("params", "grads", "optimizer")}
    rules[field] = mp.Rules(**dict.fromkeys(PARAMETER_NAMES))
    with raises("replicated-by-accident", "`attention/query`"):
        specs(mp.custom(**rules).replace(big_leaf_bytes=1024), fsdp=8)


def test_strategy_without_its_axes_replicates_big_leaves():
    big, mesh = model_of({"w": ((1024, 1024), ("embed", "mlp"))}), mp.MeshSpec(data=8).abstract()
    for replicated in (mp.ddp(), mp.zero1(axis="data")):
        assert mp.shardings(big, mesh, replicated | TP)["w"].shards == 1
    with raises("replicated-by-accident"):
        mp.shardings(big, mesh, mp.fsdp() | TP)


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [(mp.hsdp(), {"fsdp": 8}), (mp.hsdp() | TP, {"fsdp": 4, "tensor": 2}), (TP | mp.hsdp(), {"fsdp": 4, "tensor": 2})],
)
def test_hsdp_requires_a_data_axis(strategy, sizes):
    with raises("unknown-axis", "strategy hsdp()"):
        specs(strategy, **sizes)


def _preset(name):
    return PRESETS[name](**({"stages": 4, "microbatches": 8} if name == "pipeline_parallel" else {}))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_replicates_on_one_device(name):
    table = mp.shardings(MODEL, mp.MeshSpec().abstract(), _preset(name), tx=optax.adam(1e-3))
    assert all(d.shards == 1 for d in (*table.params, *table.grads, *table.optimizer))


# ---- Strategies as values --------------------------------------------------------------------------------------------

STRATEGIES = [
    *map(_preset, PRESETS),
    mp.pipeline_parallel(stages=2, microbatches=4, schedule="interleaved-1f1b", chunks=3, gather="microbatch"),
    mp.fsdp(axis=("data", "fsdp"), min_bytes=10),
    mp.zero1() | mp.tensor_parallel(sequence=True, axis="model"),
    mp.fsdp() | mp.context_parallel(kind="all-to-all", axis="ring"),
    mp.hsdp() | mp.Rules(mlp=mp.first("tensor", None), paths={".*/scale": mp.replicated}),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_strategies_survive_pickle_copy_json_and_repr(strategy):
    restored = [pickle.loads(pickle.dumps(strategy)), copy.copy(strategy), copy.deepcopy(strategy)]
    restored.append(from_json(json.loads(json.dumps(strategy.to_json()))))
    if strategy is not STRATEGIES[-1]:  # presets only
        restored.append(parse_strategy(strategy.label))
    for each in restored:
        assert (each, hash(each), str(each)) == (strategy, hash(strategy), strategy.label)
    assert STRATEGIES.count(strategy) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.components = ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fsdp", mp.fsdp()),
        (" zero1 | tensor_parallel ", mp.zero1() | TP),
        ("(hsdp() | tensor_parallel(sequence=True))", mp.hsdp() | TP_SEQUENCE),
        ("fsdp(axis=('data', 'fsdp'))", mp.fsdp(axis=("data", "fsdp"))),
    ],
)
def test_parse_strategy_accepts_short_forms(text, expected):
    assert parse_strategy(text) == expected


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"axis": ("context", "data")}, "unknown-axis"),
        ({"axis": ""}, "unknown-axis"),
        ({"kind": "all_to_all"}, "unknown-choice"),
    ],
)
def test_context_parallel_rejects_invalid_arguments(arguments, code):
    with raises(code, "context_parallel()"):
        mp.context_parallel(**arguments)
