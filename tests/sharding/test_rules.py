from __future__ import annotations

import copy
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.sharding.context import ambient
from meshpar.sharding.rules import ACTIVATION_NAMES, PARAMETER_NAMES, Largest, resolve
from meshpar.sharding.types import Leaf, axis_sizes
from tests.errors import raises

MESH = mp.MeshSpec(data=2, fsdp=4, tensor=2).abstract()


def leaf(*shape: int, names=None, path="decoder/mlp/up/kernel", dtype="float32") -> Leaf:
    return Leaf(path=path, shape=shape, dtype=np.dtype(dtype), names=names)


def spec(rules: mp.Rules, leaf: Leaf, mesh=MESH) -> P:
    return resolve(leaf, rules, mesh).spec


# ---------------------------------------------------------------------------------------------------------------------
# By name
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "shape", "names", "expected"),
    [
        (mp.Rules(embed="fsdp", mlp="tensor"), (8, 16), ("embed", "mlp"), P("fsdp", "tensor")),
        (mp.Rules(embed="fsdp", mlp="tensor"), (16, 8), ("mlp", "embed"), P("tensor", "fsdp")),
        (mp.Rules(embed=("data", "fsdp")), (8, 3), ("embed", None), P(("data", "fsdp"), None)),
        (mp.Rules(embed=["data", "fsdp"]), (8,), ("embed",), P(("data", "fsdp"))),
        (mp.Rules(embed=("fsdp",)), (8,), ("embed",), P("fsdp")),
        (mp.Rules(embed=None), (7,), ("embed",), P(None)),
        (mp.Rules(embed=mp.replicated), (7,), ("embed",), P(None)),
        (mp.Rules(embed="expert"), (7,), ("embed",), P("expert")),  # an axis of size 1 divides any dim
        (mp.Rules(embed="fsdp"), (0,), ("embed",), P("fsdp")),  # 0 is divisible by any axis
        (mp.Rules(embed="fsdp"), (5, 8), (None, "embed"), P(None, "fsdp")),
        (mp.Rules(), (5, 8), (None, None), P(None, None)),
        (mp.Rules(), (), (), P()),
    ],
)
def test_name_rules_give_the_spec(rules, shape, names, expected):
    assert spec(rules, leaf(*shape, names=names)) == expected


def test_decision_records_the_rules():
    decision = resolve(leaf(8, 16, names=("embed", "mlp")), mp.Rules(embed="fsdp", mlp="tensor"), MESH)
    assert decision.rule == "embed='fsdp'; mlp='tensor'"
    assert decision.sources == {("user", "embed"), ("user", "mlp")}
    assert (decision.shards, decision.bytes_per_device) == (8, 8 * 16 * 4 // 8)
    assert decision.path == "decoder/mlp/up/kernel"


@pytest.mark.parametrize(
    ("rule", "size", "expected", "replicated_on_purpose"),
    [
        (mp.first("tensor", None), 4, "tensor", False),
        (mp.first("tensor", None), 3, None, True),
        (mp.first(("fsdp", "tensor"), "fsdp", None), 8, ("fsdp", "tensor"), False),
        (mp.first(("fsdp", "tensor"), "fsdp", None), 4, "fsdp", False),
        (mp.first(("fsdp", "tensor"), "fsdp", None), 6, None, True),
        (mp.first("expert", None), 3, "expert", True),  # replicated, as the rule permits
        (mp.first("expert"), 3, "expert", False),
        (mp.first(["fsdp", "tensor"], None), 8, ("fsdp", "tensor"), False),
    ],
)
def test_first_uses_the_first_valid_alternative(rule, size, expected, replicated_on_purpose):
    decision = resolve(leaf(size, names=("kv_heads",)), mp.Rules(kv_heads=rule), MESH)
    assert decision.spec == P(expected)
    assert decision.replicated_on_purpose == replicated_on_purpose


def test_first_avoids_axes_of_other_dims():
    rules = mp.Rules(kv_heads=mp.first("tensor", "data", None), mlp="tensor")
    assert spec(rules, leaf(4, 4, names=("kv_heads", "mlp"))) == P("data", "tensor")
    assert spec(rules, leaf(4, 4, names=("kv_heads", None))) == P("tensor", None)
    rules = mp.Rules(heads=mp.first("tensor", None), mlp=mp.first("tensor", None))
    assert spec(rules, leaf(4, 4, names=("heads", "mlp"))) == P("tensor", None)


# ---------------------------------------------------------------------------------------------------------------------
# By path
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (("fsdp", "tensor"), P("fsdp", "tensor")),
        (["fsdp", None], P("fsdp", None)),
        (("fsdp",), P("fsdp", None)),  # dims without an entry are replicated, as in a PartitionSpec
        (P(None, ("fsdp", "tensor")), P(None, ("fsdp", "tensor"))),
        ((mp.first("fsdp", None), mp.first("fsdp", "tensor")), P("fsdp", "tensor")),
        ((mp.replicated, "tensor"), P(None, "tensor")),
        ((), P(None, None)),
        (mp.replicated, P(None, None)),
        (mp.names("embed", "mlp"), P("fsdp", "tensor")),
        (mp.names("mlp", None), P("tensor", None)),
        (mp.names("mlp", ...), P("tensor", None)),
        (mp.names("embed", "mlp", ...), P("fsdp", "tensor")),
    ],
)
def test_path_rules_give_the_spec(layout, expected):
    rules = mp.Rules(embed="fsdp", mlp="tensor", paths={r".*/kernel": layout})
    assert spec(rules, leaf(8, 16)) == expected


def test_pattern_must_match_the_full_path():
    rules = mp.Rules(paths={r"decoder/.*/up/kernel": (None, "tensor"), "kernel": ("fsdp",), "decoder": ("fsdp",)})
    assert spec(rules, leaf(8, 16)) == P(None, "tensor")


def test_last_matching_pattern_overrides_names():
    rules = mp.Rules(embed="data", paths={r".*": ("fsdp",), r".*/kernel": (None, "fsdp")})
    named = leaf(8, 16, names=("embed", None))
    assert spec(rules, named) == P(None, "fsdp")
    assert resolve(named, rules, MESH).rule == "'.*/kernel': (None, 'fsdp')"
    assert spec(rules, leaf(8, 16, names=("embed", None), path="bias")) == P("fsdp", None)


def test_names_by_path_replace_the_names_of_the_leaf():
    rules = mp.Rules(embed="fsdp", mlp="tensor", paths={r".*/kernel": mp.names("mlp", "embed")})
    decision = resolve(leaf(8, 16, names=("embed", "mlp")), rules, MESH)
    assert decision.spec == P("tensor", "fsdp")
    assert decision.leaf.names == ("mlp", "embed")
    assert decision.rule == "'.*/kernel': names('mlp', 'embed') → mlp='tensor'; embed='fsdp'"


def test_names_with_ellipsis_keep_the_other_names():
    rules = mp.Rules(layers="data", embed="fsdp", mlp="tensor", paths={r".*": mp.names("layers", ...)})
    assert spec(rules, leaf(2, 8, 16, names=("blocks", "embed", "mlp"))) == P("data", "fsdp", "tensor")
    assert spec(rules, leaf(2, names=("blocks",))) == P("data")
    with raises("wrong-shape", "of shape ()"):
        spec(rules, leaf())


def test_replicated_is_on_purpose_and_none_is_not():
    for value, replicated_on_purpose in ((mp.replicated, True), ((None, None), False)):
        assert resolve(leaf(8, 16), mp.Rules(paths={".*": value}), MESH).replicated_on_purpose == replicated_on_purpose


# ---------------------------------------------------------------------------------------------------------------------
# Leaves without names
# ---------------------------------------------------------------------------------------------------------------------


def largest(*axes: str, min_bytes: int = 0) -> mp.Rules:
    return mp.Rules.preset("zero", known=PARAMETER_NAMES, largest=Largest(axes, min_bytes, "zero"))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 16), P(None, "fsdp")),
        ((16, 8), P("fsdp", None)),
        ((8, 8), P("fsdp", None)),  # the first of two equal dims
        ((18, 4, 7), P(None, "fsdp", None)),  # the largest divisible dim
        ((0, 8), P(None, "fsdp")),
    ],
)
def test_unnamed_leaves_are_sharded_on_the_largest_dim(shape, expected):
    assert spec(largest("fsdp"), leaf(*shape)) == expected


@pytest.mark.parametrize("shape", [(), (3,), (6, 7), (0,), (0, 0)])
def test_indivisible_unnamed_leaves_are_replicated(shape):
    decision = resolve(leaf(*shape), largest("fsdp"), MESH)
    assert decision.spec == P(*[None] * len(shape))
    assert (decision.shards, decision.replicated_on_purpose) == (1, False)
    assert decision.rule == "zero: no dim is divisible by 4"


def test_small_unnamed_leaves_are_replicated():
    assert resolve(leaf(8, 16), largest("fsdp", min_bytes=8 * 16 * 4 + 1), MESH).rule == "zero: small, replicated"
    assert spec(largest("fsdp", min_bytes=8 * 16 * 4), leaf(8, 16)) == P(None, "fsdp")
    assert spec(largest("data", "fsdp"), leaf(4, 16)) == P(None, ("data", "fsdp"))


def test_named_leaves_are_not_sharded_by_size():
    assert spec(largest("fsdp"), leaf(8, 16, names=("embed", "mlp"))) == P(None, None)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((64, 8, 16), P("data", None, "fsdp")),  # the largest dim is `layers`
        ((4, 16, 8, 4), P("data", "fsdp", None, None)),
        ((4, 7), P("data", None)),
        ((4,), P("data")),
    ],
)
def test_largest_dim_after_named_dims_is_sharded(shape, expected):
    rules = mp.Rules(layers="data", paths={r".*": mp.names("layers", ...)})
    assert spec(largest("fsdp") | rules, leaf(*shape)) == expected
    small = largest("fsdp", min_bytes=10**6) | rules
    assert spec(small, leaf(*shape)) == P("data", *[None] * (len(shape) - 1))
    # An axis shards at most one dim.
    assert spec(largest("data") | rules, leaf(*shape)) == P("data", *[None] * (len(shape) - 1))
    assert spec(rules, leaf(*shape)) == P("data", *[None] * (len(shape) - 1))


@pytest.mark.parametrize("value", ["data", ("tensor", "data"), mp.first(("tensor", "data"), None)], ids=str)
def test_axes_of_the_refined_name_come_first(value):
    rules = mp.Rules(seq="tensor", norm_seq=value)
    assert spec(rules, leaf(16, names=("norm_seq",))) == P(("tensor", "data"))


# ---------------------------------------------------------------------------------------------------------------------
# Rules as values
# ---------------------------------------------------------------------------------------------------------------------

RULES = [
    mp.Rules(),
    mp.Rules(embed="fsdp", mlp=("data", "tensor"), heads=None, kv_heads=mp.first("tensor", None), vocab=mp.replicated),
    mp.Rules(paths={r".*/scale": mp.replicated, r".*/up": ("fsdp", None), r".*/down": mp.names("mlp", None)}),
    mp.Rules(paths={r".*/layers": mp.names("layers", ...)}),
    mp.fsdp().params,
    (mp.zero1() | mp.tensor_parallel(sequence=True)).activations,
]


@pytest.mark.parametrize("rules", RULES, ids=range(len(RULES)))
def test_rules_survive_pickle_and_copy(rules):
    for restored in (pickle.loads(pickle.dumps(rules)), copy.copy(rules), copy.deepcopy(rules)):
        assert restored == rules
        assert hash(restored) == hash(rules)
        assert repr(restored) == repr(rules)
        assert restored.names == rules.names
    assert pickle.loads(pickle.dumps(mp.replicated)) is mp.replicated
    assert len({*RULES, rules}) == len(RULES)


@pytest.mark.parametrize("rules", RULES[:4], ids=range(4))
def test_rules_survive_repr_and_json(rules):
    assert mp.Rules.from_json(json.loads(json.dumps(rules.to_json()))) == rules
    namespace = {"Rules": mp.Rules, "first": mp.first, "names": mp.names, "replicated": mp.replicated}
    assert eval(repr(rules), namespace) == rules


def test_rules_are_immutable():
    rules = mp.Rules(embed="fsdp")
    with pytest.raises(AttributeError, match="immutable"):
        rules.known = frozenset()
    joined = rules | mp.Rules(embed="data")
    assert rules == mp.Rules(embed="fsdp")
    assert joined == mp.Rules(embed="data")


# ---------------------------------------------------------------------------------------------------------------------
# Activations
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    return mp.MeshSpec(data=2, fsdp=2, tensor=2).build()


def test_constrain_shards_an_activation(mesh):
    @jax.jit
    def f(x):
        return mp.constrain(x * 2, "batch", "norm_seq", "act_mlp")

    with mp.use_rules(mesh, mp.fsdp() | mp.tensor_parallel()):
        y = f(jnp.ones((8, 3, 4)))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "fsdp"), None, "tensor")), 3)
    assert {s.data.shape for s in y.addressable_shards} == {(2, 3, 2)}
    np.testing.assert_array_equal(y, 2)


def test_jitted_function_is_retraced_for_new_rules(mesh):
    @jax.jit
    def f(x):
        return mp.constrain(x, "batch", "act_mlp")

    x = jnp.ones((8, 8))
    shapes = []
    for strategy in (mp.fsdp(), mp.fsdp() | mp.tensor_parallel(), mp.Rules(batch=None, act_mlp="fsdp")):
        with mp.use_rules(mesh, strategy):
            shapes.append(f(x).sharding.shard_shape((8, 8)))
    assert shapes == [(2, 8), (2, 4), (8, 4)]


def test_use_rules_can_be_nested(mesh):
    assert ambient() is None
    outer, inner = mp.fsdp(), mp.Rules(batch="data")
    with mp.use_rules(mesh, outer) as context:
        assert context.rules == outer.activations
        with mp.use_rules(mesh, inner):
            assert ambient().rules == inner
        assert ambient() == context
    assert ambient() is None


def test_constrain_skips_manual_axes(mesh):
    def body(x):  # the local shard: [4, 4] of [8, 4]
        return mp.constrain(x + 1, "batch", "act_mlp")

    with mp.use_rules(mesh, mp.fsdp() | mp.tensor_parallel()):
        f = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        y = jax.jit(f)(jnp.zeros((8, 4)))
        np.testing.assert_array_equal(y, 1)
        text = jax.jit(f).lower(jnp.zeros((8, 4))).as_text()
    assert y.sharding.shard_shape((8, 4)) == (2, 2)
    assert "sdy.sharding_constraint" in text


def test_constrain_checks_names_on_one_device():
    with mp.use_rules(mp.MeshSpec().build(jax.devices()[:1]), mp.tensor_parallel()):
        x = jnp.ones((3, 5))
        assert mp.constrain(x, "batch", "act_mlp") is x
        with raises("unknown-name", "`act_mpl`"):
            mp.constrain(x, "batch", "act_mpl")


def test_presets_know_all_activation_names():
    for strategy in (mp.ddp(), mp.fsdp(), mp.tensor_parallel(), mp.expert_parallel(), mp.zero1() | mp.Rules(mlp=None)):
        assert set(ACTIVATION_NAMES) <= strategy.activations.names


def test_batch_rule_skips_axes_that_the_mesh_lacks():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    assert axis_sizes(mesh) == {"fsdp": 8}
    decision = resolve(leaf(16, 3, names=("batch", None)), mp.fsdp().activations, mesh)
    assert decision.spec == P("fsdp", None)


# ---------------------------------------------------------------------------------------------------------------------
# Logical axis rules of Flax and MaxText
# ---------------------------------------------------------------------------------------------------------------------

FLAX_LIST = (
    ("batch", "data"),
    ("vocab", "model"),
    ("mlp", "model"),
    ("heads", "model"),
    ("embed", "model"),
    ("embed", "data"),
    ("kv", None),
)
MAXTEXT_LIST = [
    ["activation_batch", ["data", "fsdp", "fsdp_transpose"]],
    ["activation_mlp", ["tensor"]],
    ["mlp", ["fsdp_transpose", "tensor"]],
    ["embed", ["fsdp", "fsdp_transpose"]],
    ["embed", ["fsdp"]],
    ["norm", []],
]


@pytest.mark.parametrize(
    "names",
    [("embed", "mlp"), ("mlp", "embed"), ("vocab", "embed"), ("heads", "kv"), ("batch", "embed"), ("kv", "kv2")],
)
def test_flax_rules_give_the_same_spec_as_flax(names):
    from flax import linen as nn

    rules = mp.Rules.from_logical_axis_rules([*FLAX_LIST, ("kv2", None)])
    mesh = {"data": 2, "model": 4}
    expected = nn.logical_to_mesh_axes(names, [*FLAX_LIST, ("kv2", None)])
    assert spec(rules, leaf(16, 16, names=names), mesh) == expected
    assert mp.Rules.from_json(rules.to_json()).name_rule("embed").value == rules.name_rule("embed").value


def test_maxtext_rules_with_removed_axes():
    rules = mp.Rules.from_logical_axis_rules(MAXTEXT_LIST, axes={"fsdp_transpose": None})
    mesh = mp.MeshSpec(fsdp=4, tensor=2).abstract()
    kernel = leaf(16, 16, names=("embed", "mlp"), path="up")
    assert spec(rules, kernel, mesh) == P("fsdp", "tensor")
    assert spec(rules, leaf(16, names=("batch",), path="batch"), mesh) == P(("data", "fsdp"))
    # `batch` is preferred to `activation_batch`, and an argument to both.
    for batch, axis in ((None, "tensor"), ("activation_mlp", "tensor"), ("norm", None), ("rows", "fsdp")):
        lines = [*MAXTEXT_LIST, ["batch", ["tensor"]], ["rows", "fsdp"]]
        chosen = mp.Rules.from_logical_axis_rules(lines, axes={"fsdp_transpose": None}, batch=batch)
        assert spec(chosen, leaf(16, names=("batch",), path="batch"), mesh) == P(axis)
    with raises("unknown-axis", "`up` dim 1"):
        resolve(kernel, mp.Rules.from_logical_axis_rules(MAXTEXT_LIST), mesh)
    with raises("indivisible", "dim 0"):
        resolve(leaf(17, 16, names=("embed", "mlp")), rules, mesh)


def test_invalid_logical_axis_rules_are_refused():
    for entry in ("batch", ("batch",), ("batch", 3), (None, "data"), ("batch", ("data", "data"))):
        with raises("wrong-type", "from_logical_axis_rules"):
            mp.Rules.from_logical_axis_rules([entry])
    for rules, axes, code in (
        (None, None, "wrong-type"), ("mlp", None, "wrong-type"), ({"mlp": None}, None, "wrong-type"),
        (FLAX_LIST, 5, "wrong-type"), ([("mlp", "model")], {"modle": None}, "unknown-axis"),
    ):  # fmt: skip
        with raises(code, "from_logical_axis_rules"):
            mp.Rules.from_logical_axis_rules(rules, axes=axes)
    with raises("unknown-name", "from_logical_axis_rules"):
        mp.Rules.from_logical_axis_rules(FLAX_LIST, batch="rows")


def test_last_matching_precision_rule_wins():
    dtypes = {"layers/.*": "float32", "layers/mlp": "bfloat16"}
    assert mp.Rules(precision=dtypes).dtype_in("layers/mlp/kernel") == "bfloat16"
    assert mp.Rules(precision=dict(reversed(dtypes.items()))).dtype_in("layers/mlp/kernel") == "float32"
    joined = mp.Rules(precision=dtypes) | mp.Rules(precision={"layers/(mlp|norm)": "float64"})
    assert [joined.dtype_in(f"layers/{path}") for path in ("mlp/up/kernel", "norm/scale", "out/kernel", "scale")] == [
        "float64", "float64", "float32", None,
    ]  # fmt: skip


def test_last_matching_inputs_rule_wins():
    inputs = {".*": mp.replicated, "graph/nodes": "batch"}
    assert mp.Rules(inputs=inputs).input_rule("graph/nodes") == "batch"
    assert mp.Rules(inputs=inputs).input_rule("graph/globals") is mp.replicated
    assert mp.Rules(inputs=dict(reversed(inputs.items()))).input_rule("graph/nodes") is mp.replicated
    assert mp.Rules().input_rule("graph/nodes") is None
