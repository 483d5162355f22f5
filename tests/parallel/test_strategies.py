from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.parallel import PRESETS, as_strategy, from_json, parse_strategy
from meshpar.parallel.batch import batch_sharding
from meshpar.sharding.context import spec_of
from meshpar.sharding.rules import BATCH_AXES, PARAMETER_NAMES
from meshpar.sharding.types import spec_axes
from tests.errors import raises

NAMES = {
    "embed/table": ("vocab", "embed"),
    "attention/query": ("embed", "heads", "head_dim"),
    "attention/key": ("embed", "kv_heads", "head_dim"),
    "mlp/up": ("layers", "embed", "mlp"),
    "moe/up": ("expert", "embed", "mlp"),
    "norm/scale": ("embed",),
}
SHAPES = {
    "embed/table": (64, 16),
    "attention/query": (16, 8, 4),
    "attention/key": (16, 2, 4),
    "mlp/up": (3, 16, 32),
    "moe/up": (4, 16, 32),
    "norm/scale": (16,),
}


def tree(of) -> dict:
    nested: dict = {}
    for path, value in of.items():
        outer, inner = path.split("/")
        nested.setdefault(outer, {})[inner] = value
    return nested


MODEL = mp.from_functions(
    lambda key: tree({path: jnp.zeros(shape) for path, shape in SHAPES.items()}), lambda params: params, names=NAMES
)
UNNAMED = mp.from_functions(
    lambda key: {"big": jnp.zeros((64, 512)), "odd": jnp.zeros((7, 9)), "bias": jnp.zeros(8)}, lambda params: params
)


def specs(strategy, part: str = "params", **sizes: int) -> dict[str, P]:
    table = mp.shardings(MODEL, mp.MeshSpec(**sizes).abstract(), strategy)
    return {d.path: P(*d.spec) for d in getattr(table, part)}


# ---------------------------------------------------------------------------------------------------------------------
# What each preset splits
# ---------------------------------------------------------------------------------------------------------------------

WHOLE = {path: P(*[None] * len(shape)) for path, shape in SHAPES.items()}
BY_EMBED = {
    "embed/table": P(None, "fsdp"),
    "attention/query": P("fsdp", None, None),
    "attention/key": P("fsdp", None, None),
    "mlp/up": P(None, "fsdp", None),
    "moe/up": P(None, "fsdp", None),
    "norm/scale": P("fsdp"),
}


@pytest.mark.parametrize(
    ("strategy", "params", "grads"),
    [
        (mp.zero1(), WHOLE, WHOLE),
        (mp.zero2(), WHOLE, BY_EMBED),
        (mp.zero3(), BY_EMBED, BY_EMBED),
        (mp.fsdp(), BY_EMBED, BY_EMBED),
    ],
    ids=str,
)
def test_zero_stages_differ_in_what_they_split(strategy, params, grads):
    assert specs(strategy, "params", fsdp=8) == params
    assert specs(strategy, "grads", fsdp=8) == grads
    table = mp.shardings(MODEL, mp.MeshSpec(fsdp=8).abstract(), strategy, tx=_adam())
    moments = {d.path: P(*d.spec) for d in table.optimizer if "/mu/" in d.path}
    assert moments == {f"opt_state/0/mu/{path}": spec for path, spec in BY_EMBED.items()}


def _adam():
    import optax

    return optax.adam(1e-3)


def test_ddp_splits_nothing_but_the_batch():
    table = mp.shardings(MODEL, mp.MeshSpec(data=8).abstract(), mp.ddp(), tx=_adam())
    assert all(d.shards == 1 for d in (*table.params, *table.grads, *table.optimizer))
    assert {d.rule for d in table.params} == {"ddp: replicated"}
    assert batch_sharding(mp.MeshSpec(data=8).abstract(), mp.ddp()).spec == P(BATCH_AXES)


def test_hsdp_splits_inside_and_replicates_across():
    assert specs(mp.hsdp(), data=2, fsdp=4) == BY_EMBED
    assert specs(mp.hsdp(axis="expert"), data=2, expert=4)["norm/scale"] == P("expert")


def test_tensor_parallel_splits_inside_a_layer():
    assert specs(mp.tensor_parallel(), tensor=2) == {
        "embed/table": P("tensor", None),
        "attention/query": P(None, "tensor", None),
        "attention/key": P(None, "tensor", None),
        "mlp/up": P(None, None, "tensor"),
        "moe/up": P(None, None, "tensor"),
        "norm/scale": P(None),
    }


def test_sequence_parallelism_is_about_activations_only():
    plain, sequence = mp.tensor_parallel(), mp.tensor_parallel(sequence=True)
    assert plain.params == sequence.params
    assert plain.activations.name_rule("norm_seq") is None
    assert sequence.activations.name_rule("norm_seq").value == "tensor"
    assert sequence.activations.name_rule("seq") is None


def test_context_parallel_is_about_activations_only():
    ring, heads = mp.context_parallel(), mp.context_parallel(kind="all-to-all")
    assert specs(ring, context=2) == specs(heads, context=2) == WHOLE
    q = jax.ShapeDtypeStruct((4, 8, 16, 2), np.float32)
    around, inside = (None, "seq", "act_heads", None), (None, "attn_seq", "attn_heads", None)
    by_key_heads = (*inside[:2], "attn_kv_heads", None)
    with mp.use_rules(mp.MeshSpec(context=2, tensor=4).abstract(), ring | mp.tensor_parallel()):
        assert spec_of(q, *around) == spec_of(q, *inside) == P(None, "context", "tensor", None)
    for strategy in (heads | mp.tensor_parallel(), mp.tensor_parallel() | heads):
        with mp.use_rules(mp.MeshSpec(context=2, tensor=4).abstract(), strategy):
            assert spec_of(q, *around) == P(None, "context", "tensor", None)
            assert spec_of(q, *inside) == spec_of(q, *by_key_heads) == P(None, None, ("tensor", "context"), None)
            few = jax.ShapeDtypeStruct((4, 8, 4, 2), np.float32)
            assert spec_of(few, *by_key_heads) == P(None, None, None, None)


def test_expert_parallel_splits_experts():
    found = specs(mp.expert_parallel() | mp.fsdp() | mp.tensor_parallel(), expert=2, fsdp=2, tensor=2)
    assert found["moe/up"] == P("expert", "fsdp", "tensor")
    assert found["mlp/up"] == P(None, "fsdp", "tensor")
    assert mp.expert_parallel().activations.name_rule("act_expert").value == "expert"


def test_expert_parallel_needs_experts():
    dense = mp.from_functions(lambda key: {"w": jnp.zeros((8, 8))}, lambda p: p, names={"w": ("embed", "mlp")})
    with pytest.raises(mp.MeshparError, match="strategy expert_parallel: cannot shard leaves by `expert`"):
        mp.shardings(dense, mp.MeshSpec(expert=8).abstract(), mp.expert_parallel() | mp.fsdp())


def test_another_axis_to_split_over():
    assert specs(mp.fsdp(axis=("data", "fsdp")), data=2, fsdp=4)["norm/scale"] == P(("data", "fsdp"))
    assert specs(mp.tensor_parallel(axis="model"), model=2)["embed/table"] == P("model", None)
    assert specs(mp.zero1(axis="data"), "grads", data=8) == WHOLE


@pytest.mark.parametrize(
    ("sizes", "axes", "strategy"),
    [
        ((8,), ("fsdp",), mp.fsdp()),
        ((8,), ("fsdp",), mp.zero1()),
        ((8,), ("data",), mp.ddp()),
        ((2, 4), ("data", "fsdp"), mp.hsdp()),
        ((4, 2), ("fsdp", "tensor"), mp.fsdp() | mp.tensor_parallel(sequence=True)),
        ((8,), ("x",), mp.fsdp(axis="x")),
    ],
    ids=str,
)
def test_presets_work_on_plain_meshes_with_some_of_the_axes(sizes, axes, strategy):
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), axes)
    state = mp.init_state(UNNAMED if len(axes) == 1 else MODEL, _adam(), mesh=mesh, strategy=strategy, key=0)
    for x, sharding in zip(jax.tree.leaves(state.params), jax.tree.leaves(state.setup.shardings.params), strict=True):
        assert x.sharding == sharding
    assert set(spec_axes(batch_sharding(mesh, strategy).spec[0])) <= set(axes)


# ---------------------------------------------------------------------------------------------------------------------
# Leaves without names
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [mp.fsdp(), mp.zero3(), mp.hsdp()], ids=str)
def test_zero3_without_names_splits_the_largest_dim_and_says_so(strategy):
    table = mp.shardings(UNNAMED, mp.MeshSpec(data=2, fsdp=4).abstract(), strategy)
    name = strategy.label.removesuffix("()")
    assert table["big"].spec == P(None, "fsdp")
    assert table["big"].rule == f"{name}: largest dim that divides (1)"
    assert table["bias"].rule == table["odd"].rule == f"{name}: small, replicated"
    assert f"{name}: largest dim that divides (1)" in str(table)


def test_smaller_leaves_are_split_when_asked():
    table = mp.shardings(UNNAMED, mp.MeshSpec(fsdp=4).abstract(), mp.fsdp(min_bytes=0))
    assert table["bias"].spec == P("fsdp")
    assert table["odd"].rule == "fsdp: no dim divides by 4"


def test_a_preset_that_finds_nothing_to_do_is_an_error():
    small = mp.from_functions(lambda key: {"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)}, lambda p: p)
    mesh = mp.MeshSpec(fsdp=8).abstract()
    with pytest.raises(mp.MeshparError, match=r"strategy fsdp: .*none of the model's 2 leaves.*mp.fsdp\(min_bytes=0\)"):
        mp.shardings(small, mesh, mp.fsdp())
    assert mp.shardings(small, mesh, mp.fsdp(min_bytes=0))["w"].shards == 8
    with pytest.raises(mp.MeshparError, match="strategy tensor_parallel"):
        mp.shardings(small, mp.MeshSpec(fsdp=4, tensor=2).abstract(), mp.fsdp(min_bytes=0) | mp.tensor_parallel())
    assert mp.shardings(small, mesh, mp.ddp())["w"].shards == 1  # has no rules that could idle


def test_leaves_none_of_whose_dims_divides_are_no_work_for_a_preset():
    odd = mp.from_functions(lambda key: {"w": jnp.zeros((7, 9)), "b": jnp.zeros(5)}, lambda p: p)
    with pytest.raises(mp.MeshparError, match="strategy fsdp: .*or is large enough and divisible.*pad a dim"):
        mp.shardings(odd, mp.MeshSpec(fsdp=8).abstract(), mp.fsdp(min_bytes=0))


def test_the_table_tells_of_an_axis_that_no_rule_names():
    """Not an error: code that splits by itself, as pipelines and `shard_map` do, needs no rule."""
    mesh = mp.MeshSpec(fsdp=4, tensor=2).abstract()
    assert mp.shardings(MODEL, mesh, mp.fsdp()).idle == ("tensor",)
    for rules in (mp.Rules(act_mlp=mp.first("tensor", None)), mp.Rules(paths={"norm/scale": (("fsdp", "tensor"),)})):
        assert mp.shardings(MODEL, mesh, mp.fsdp() | rules).idle == ()
    table = mp.shardings(MODEL, mp.MeshSpec(fsdp=2, stage=2, context=2).abstract(), mp.fsdp())
    assert table.idle == ("stage", "context")
    for axis in table.idle:
        assert f"no rule uses mesh axis `{axis}`" in " ".join(str(table).split())
    assert "no rule names" not in str(mp.shardings(MODEL, mp.MeshSpec(fsdp=2).abstract(), mp.fsdp()))


@pytest.mark.parametrize(
    ("strategy", "later"),
    [(mp.fsdp(), mp.ddp()), (mp.zero2() | mp.tensor_parallel(), mp.zero1()), (mp.hsdp(), mp.ddp())],
)
def test_strategy_without_effect_is_an_error(strategy, later):
    with raises("conflict"):
        strategy | later
    assert specs(later | mp.fsdp(), fsdp=8) == BY_EMBED  # the other way round the later one wins


@pytest.mark.parametrize(
    ("strategy", "later", "key"),
    [
        (mp.context_parallel(kind="all-to-all"), mp.context_parallel(), "attn_seq"),
        (mp.tensor_parallel(sequence=True) | mp.fsdp(), mp.tensor_parallel(), "norm_seq"),
    ],
)
def test_repeated_preset_with_remaining_rules_is_an_error(strategy, later, key):
    with raises("conflict") as error:
        strategy | later
    assert f"`{key}`" in error.value.reason
    assert later.parts[0].name in error.value.fix
    assert later | strategy


def test_some_rules_of_a_preset_may_idle():
    mlp = mp.from_functions(lambda key: {"w": jnp.zeros((8, 8))}, lambda p: p, names={"w": ("embed", "mlp")})
    assert mp.shardings(mlp, mp.MeshSpec(tensor=8).abstract(), mp.tensor_parallel())["w"].spec == P(None, "tensor")


def test_a_preset_whose_rules_the_user_replaced_is_no_error():
    table = mp.shardings(MODEL, mp.MeshSpec(fsdp=8).abstract(), mp.fsdp() | mp.Rules(embed=None, head_dim=None))
    assert all(d.shards == 1 for d in table.params)


# ---------------------------------------------------------------------------------------------------------------------
# Joins
# ---------------------------------------------------------------------------------------------------------------------


def test_the_later_strategy_wins():
    a = mp.Rules(mlp="data")
    assert specs(mp.fsdp() | mp.tensor_parallel() | a, data=2, fsdp=2, tensor=2)["mlp/up"] == P(None, "fsdp", "data")
    assert specs(a | (mp.fsdp() | mp.tensor_parallel()), fsdp=2, tensor=2)["mlp/up"] == P(None, "fsdp", "tensor")


def test_joins_reach_every_part():
    joined = mp.zero2() | mp.tensor_parallel(sequence=True)
    assert joined.params.name_rule("mlp").value == "tensor"
    assert joined.params.name_rule("embed") is None
    assert joined.grads.name_rule("embed").value == "fsdp"
    assert joined.activations.name_rule("norm_seq").value == "tensor"
    assert specs(joined, "params", fsdp=4, tensor=2)["mlp/up"] == P(None, None, "tensor")
    assert specs(joined, "grads", fsdp=4, tensor=2)["mlp/up"] == P(None, "fsdp", "tensor")


def test_joining_is_associative():
    a, b, c = mp.fsdp(), mp.tensor_parallel(), mp.Rules(mlp=None)
    assert (a | b) | c == a | (b | c)


def test_bare_rules_serve_every_part():
    rules = mp.Rules(embed="fsdp", batch="fsdp", paths={"norm/scale": mp.replicated})
    strategy = as_strategy(rules)
    assert strategy.params == strategy.grads == strategy.optimizer == rules
    assert strategy.activations.name_rule("batch").value == "fsdp"
    assert strategy.label == repr(rules)
    assert as_strategy(strategy) is strategy
    others = dict.fromkeys(set(PARAMETER_NAMES) - {"embed"})
    for given in (rules | mp.Rules(**others), mp.Rules(**others) | as_strategy(rules)):
        found = specs(given, fsdp=8)
        assert found == {**BY_EMBED, "norm/scale": P(None)}


def test_a_path_rule_of_bare_rules_does_not_catch_the_batch():
    strategy = mp.Rules(paths={".*": mp.replicated})
    mesh = mp.MeshSpec(data=8).abstract()
    assert batch_sharding(mesh, strategy).spec == P(BATCH_AXES)
    assert {d.rule for d in mp.shardings(MODEL, mesh, strategy).params} == {"'.*': replicated"}


def test_rules_and_strategies_join_with_nothing_else():
    for other in ("fsdp", None, {"embed": "fsdp"}):
        with pytest.raises(TypeError):
            mp.fsdp() | other
        with pytest.raises(TypeError):
            other | mp.fsdp()


def test_one_strategy_serves_meshes_without_its_axes():
    strategy = mp.fsdp() | mp.tensor_parallel()
    assert specs(strategy, fsdp=8) == specs(strategy, fsdp=4, tensor=2)
    big = mp.from_functions(lambda key: {"w": jnp.zeros((1024, 1024))}, lambda p: p, names={"w": ("embed", "mlp")})
    mesh = mp.MeshSpec(data=8).abstract()
    for whole in (mp.ddp(), mp.zero1(axis="data")):  # which say that parameters are whole
        assert mp.shardings(big, mesh, whole | mp.tensor_parallel())["w"].shards == 1
    with pytest.raises(mp.MeshparError, match="mesh axis `fsdp`, `tensor` has size 1"):
        mp.shardings(big, mesh, strategy)


# ---------------------------------------------------------------------------------------------------------------------
# Thresholds and needs
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("big_leaf_bytes", "fits"), [(4 * 4096, False), (4 * 4096 + 1, True)])
def test_a_leaf_as_big_as_the_threshold_is_not_replicated_by_accident(big_leaf_bytes, fits):
    model = mp.from_functions(
        lambda key: {"w": jnp.zeros((64, 64)), "e": jnp.zeros(8)}, lambda p: p, names={"w": ("mlp", None)}
    )
    strategy = mp.fsdp(min_bytes=0).replace(big_leaf_bytes=big_leaf_bytes)
    mesh = mp.MeshSpec(fsdp=8).abstract()
    if fits:
        assert mp.shardings(model, mesh, strategy)["w"].shards == 1
    else:
        with pytest.raises(mp.MeshparError, match="replicated on all devices, and no rule requests that"):
            mp.shardings(model, mesh, strategy)
    replicated_on_purpose = mp.shardings(model, mesh, strategy | mp.Rules(paths={"w": mp.replicated}))
    assert replicated_on_purpose["w"].replicated_on_purpose


@pytest.mark.parametrize("part", ["params", "grads", "optimizer"])
def test_every_part_is_held_to_the_threshold(part):
    unsplit = mp.Rules(**dict.fromkeys(PARAMETER_NAMES))
    fsdp = mp.fsdp()
    rules = {name: getattr(fsdp, name) for name in ("params", "grads", "optimizer")}
    strategy = mp.custom(**{**rules, part: unsplit}).replace(big_leaf_bytes=1024)
    with pytest.raises(mp.MeshparError, match=r"`attention/query`.*named, not split"):
        specs(strategy, fsdp=8)


def test_stacked_layers_count_one_by_one():
    model = mp.from_functions(
        lambda key: {"s": jnp.zeros((16, 64)), "e": jnp.zeros((8, 8))},
        lambda p: p,
        names={"s": ("layers", "mlp"), "e": ("embed", None)},
    )
    mesh = mp.MeshSpec(fsdp=8).abstract()
    assert mp.shardings(model, mesh, mp.fsdp().replace(big_leaf_bytes=257))["s"].shards == 1
    with pytest.raises(mp.MeshparError, match="`s`"):
        mp.shardings(model, mesh, mp.fsdp().replace(big_leaf_bytes=256))


def test_joining_keeps_the_lower_threshold():
    assert (mp.fsdp() | mp.tensor_parallel().replace(big_leaf_bytes=10)).big_leaf_bytes == 10


def test_hsdp_without_data_axis_is_an_error():
    with raises("unknown-axis", "strategy hsdp()"):
        specs(mp.hsdp(), fsdp=8)
    with raises("unknown-axis", "strategy hsdp()"):
        specs(mp.hsdp() | mp.tensor_parallel(), fsdp=4, tensor=2)
    with raises("unknown-axis", "strategy hsdp()"):
        specs(mp.tensor_parallel() | mp.hsdp(), fsdp=4, tensor=2)
    with raises("unknown-axis", "strategy hsdp()"):
        mp.shardings(UNNAMED, Mesh(np.array(jax.devices()), ("fsdp",)), mp.hsdp())


def _preset(name):
    return PRESETS[name](**({"stages": 4, "microbatches": 8} if name == "pipeline_parallel" else {}))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_on_one_device_every_strategy_is_the_same_program(name):
    table = mp.shardings(MODEL, mp.MeshSpec().abstract(), _preset(name), tx=_adam())
    assert all(d.shards == 1 for d in (*table.params, *table.grads, *table.optimizer))


# ---------------------------------------------------------------------------------------------------------------------
# A value
# ---------------------------------------------------------------------------------------------------------------------

STRATEGIES = [
    *map(_preset, PRESETS),
    mp.pipeline_parallel(stages=2, microbatches=4, schedule="interleaved-1f1b", chunks=3, gather="microbatch"),
    mp.fsdp(axis=("data", "fsdp"), min_bytes=10),
    mp.zero1() | mp.tensor_parallel(sequence=True, axis="model"),
    mp.fsdp() | mp.context_parallel(kind="all-to-all", axis="ring"),
    mp.hsdp() | mp.Rules(mlp=mp.first("tensor", None), paths={".*/scale": mp.replicated}),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_strategies_survive_pickle_and_copy(strategy):
    for again in (pickle.loads(pickle.dumps(strategy)), copy.copy(strategy), copy.deepcopy(strategy)):
        assert again == strategy
        assert hash(again) == hash(strategy)
        assert str(again) == str(strategy)
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.parts = ()
    assert repr(strategy) == strategy.label
    assert from_json(json.loads(json.dumps(strategy.to_json()))) == strategy


def test_strategies_differ():
    assert len(set(STRATEGIES)) == len(STRATEGIES)


@pytest.mark.parametrize("strategy", STRATEGIES[:-1], ids=str)
def test_the_label_reads_back(strategy):
    assert parse_strategy(strategy.label) == strategy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fsdp", mp.fsdp()),
        (" zero1 | tensor_parallel ", mp.zero1() | mp.tensor_parallel()),
        ("(hsdp() | tensor_parallel(sequence=True))", mp.hsdp() | mp.tensor_parallel(sequence=True)),
        ("fsdp(axis=('data', 'fsdp'))", mp.fsdp(axis=("data", "fsdp"))),
    ],
)
def test_parse(text, expected):
    assert parse_strategy(text) == expected


@pytest.mark.parametrize("axis", [("context", "data"), ""])
def test_context_parallel_requires_one_axis(axis):
    with raises("unknown-axis"):
        mp.context_parallel(axis=axis)


def test_context_parallel_unknown_kind_is_an_error():
    with raises("unknown-choice"):
        mp.context_parallel(kind="all_to_all")
