from __future__ import annotations

import copy
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
from meshpar.sharding.types import axis_sizes

MESH = mp.MeshSpec(data=2, fsdp=4, tensor=2).abstract()


def leaf(*shape: int, names=None, path="decoder/mlp/up/kernel", dtype="float32") -> mp.Leaf:
    return mp.Leaf(path=path, shape=shape, dtype=np.dtype(dtype), names=names)


def spec(rules: mp.Rules, a_leaf: mp.Leaf, mesh=MESH) -> P:
    return resolve(a_leaf, rules, mesh).spec


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
        (mp.Rules(embed="expert"), (7,), ("embed",), P("expert")),  # an axis of size 1 divides everything
        (mp.Rules(embed="fsdp"), (0,), ("embed",), P("fsdp")),  # and nothing is left over of no rows
        (mp.Rules(embed="fsdp"), (5, 8), (None, "embed"), P(None, "fsdp")),
        (mp.Rules(), (5, 8), (None, None), P(None, None)),
        (mp.Rules(), (), (), P()),
    ],
)
def test_names_become_axes(rules, shape, names, expected):
    assert spec(rules, leaf(*shape, names=names)) == expected


def test_a_decision_says_which_rules_made_it():
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
        (mp.first("expert", None), 3, "expert", True),  # whole, as its author allowed
        (mp.first("expert"), 3, "expert", False),
        (mp.first(["fsdp", "tensor"], None), 8, ("fsdp", "tensor"), False),
    ],
)
def test_first_takes_the_first_that_fits(rule, size, expected, replicated_on_purpose):
    decision = resolve(leaf(size, names=("kv_heads",)), mp.Rules(kv_heads=rule), MESH)
    assert decision.spec == P(expected)
    assert decision.replicated_on_purpose == replicated_on_purpose


def test_first_leaves_axes_to_dims_without_a_choice():
    rules = mp.Rules(kv_heads=mp.first("tensor", "data", None), mlp="tensor")
    assert spec(rules, leaf(4, 4, names=("kv_heads", "mlp"))) == P("data", "tensor")
    assert spec(rules, leaf(4, 4, names=("kv_heads", None))) == P("tensor", None)


def test_two_firsts_do_not_meet():
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
        (("fsdp",), P("fsdp", None)),  # dims without an entry are whole, as in a PartitionSpec
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
def test_a_path_rule_gives_a_layout(layout, expected):
    rules = mp.Rules(embed="fsdp", mlp="tensor", paths={r".*/kernel": layout})
    assert spec(rules, leaf(8, 16)) == expected


def test_a_pattern_must_match_the_whole_path():
    rules = mp.Rules(paths={r"decoder/.*/up/kernel": (None, "tensor"), "kernel": ("fsdp",), "decoder": ("fsdp",)})
    assert spec(rules, leaf(8, 16)) == P(None, "tensor")


def test_the_last_pattern_that_matches_wins_over_names():
    rules = mp.Rules(embed="data", paths={r".*": ("fsdp",), r".*/kernel": (None, "fsdp")})
    named = leaf(8, 16, names=("embed", None))
    assert spec(rules, named) == P(None, "fsdp")
    assert resolve(named, rules, MESH).rule == "'.*/kernel': (None, 'fsdp')"
    assert spec(rules, leaf(8, 16, names=("embed", None), path="bias")) == P("fsdp", None)


def test_names_by_path_replace_the_leafs_own():
    rules = mp.Rules(embed="fsdp", mlp="tensor", paths={r".*/kernel": mp.names("mlp", "embed")})
    decision = resolve(leaf(8, 16, names=("embed", "mlp")), rules, MESH)
    assert decision.spec == P("tensor", "fsdp")
    assert decision.leaf.names == ("mlp", "embed")
    assert decision.rule == "'.*/kernel': names('mlp', 'embed') → mlp='tensor'; embed='fsdp'"


def test_names_for_the_first_dims_leave_the_others_their_own():
    rules = mp.Rules(layers="data", embed="fsdp", mlp="tensor", paths={r".*": mp.names("layers", ...)})
    assert spec(rules, leaf(2, 8, 16, names=("blocks", "embed", "mlp"))) == P("data", "fsdp", "tensor")
    assert spec(rules, leaf(2, names=("blocks",))) == P("data")
    with pytest.raises(mp.MeshparError, match="it has 0 dims, fewer than 1"):
        spec(rules, leaf())


def test_replicated_is_meant_and_none_is_not():
    for value, replicated_on_purpose in ((mp.replicated, True), ((None, None), False)):
        assert resolve(leaf(8, 16), mp.Rules(paths={".*": value}), MESH).replicated_on_purpose == replicated_on_purpose


# ---------------------------------------------------------------------------------------------------------------------
# Leaves that nobody named
# ---------------------------------------------------------------------------------------------------------------------


def largest(*axes: str, min_bytes: int = 0) -> mp.Rules:
    return mp.Rules.preset("zero", known=PARAMETER_NAMES, largest=Largest(axes, min_bytes, "zero"))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 16), P(None, "fsdp")),
        ((16, 8), P("fsdp", None)),
        ((8, 8), P("fsdp", None)),  # the first of equals
        ((18, 4, 7), P(None, "fsdp", None)),  # the largest that divides
        ((0, 8), P(None, "fsdp")),
    ],
)
def test_unnamed_leaves_are_split_on_their_largest_dim(shape, expected):
    assert spec(largest("fsdp"), leaf(*shape)) == expected


@pytest.mark.parametrize("shape", [(), (3,), (6, 7), (0,), (0, 0)])
def test_what_no_dim_of_divides_stays_whole_and_is_not_meant(shape):
    decision = resolve(leaf(*shape), largest("fsdp"), MESH)
    assert decision.spec == P(*[None] * len(shape))
    assert (decision.shards, decision.replicated_on_purpose) == (1, False)
    assert decision.rule == "zero: no dim divides by 4"


def test_small_leaves_stay_whole():
    assert resolve(leaf(8, 16), largest("fsdp", min_bytes=8 * 16 * 4 + 1), MESH).rule == "zero: small, replicated"
    assert spec(largest("fsdp", min_bytes=8 * 16 * 4), leaf(8, 16)) == P(None, "fsdp")
    assert spec(largest("data", "fsdp"), leaf(4, 16)) == P(None, ("data", "fsdp"))


def test_named_leaves_are_not_split_by_size():
    assert spec(largest("fsdp"), leaf(8, 16, names=("embed", "mlp"))) == P(None, None)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((64, 8, 16), P("data", None, "fsdp")),  # the largest is the layers'
        ((4, 16, 8, 4), P("data", "fsdp", None, None)),
        ((4, 7), P("data", None)),
        ((4,), P("data")),
    ],
)
def test_behind_the_first_names_the_largest_dim_is_split(shape, expected):
    rules = mp.Rules(layers="data", paths={r".*": mp.names("layers", ...)})
    assert spec(largest("fsdp") | rules, leaf(*shape)) == expected
    small = largest("fsdp", min_bytes=10**6) | rules
    assert spec(small, leaf(*shape)) == P("data", *[None] * (len(shape) - 1))
    # An axis splits one dim alone.
    assert spec(largest("data") | rules, leaf(*shape)) == P("data", *[None] * (len(shape) - 1))
    assert spec(rules, leaf(*shape)) == P("data", *[None] * (len(shape) - 1))


# ---------------------------------------------------------------------------------------------------------------------
# A value that joins
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
    for again in (pickle.loads(pickle.dumps(rules)), copy.copy(rules), copy.deepcopy(rules)):
        assert again == rules
        assert hash(again) == hash(rules)
        assert repr(again) == repr(rules)
        assert again.names == rules.names
    assert pickle.loads(pickle.dumps(mp.replicated)) is mp.replicated
    assert len({*RULES, rules}) == len(RULES)


@pytest.mark.parametrize("rules", RULES[:3], ids=range(3))
def test_rules_print_as_they_are_written(rules):
    known = {"Rules": mp.Rules, "first": mp.first, "names": mp.names, "replicated": mp.replicated}
    assert eval(repr(rules), known) == rules


def test_rules_do_not_change():
    rules = mp.Rules(embed="fsdp")
    with pytest.raises(AttributeError, match="join them"):
        rules.known = frozenset()
    joined = rules | mp.Rules(embed="data")
    assert rules == mp.Rules(embed="fsdp")
    assert joined == mp.Rules(embed="data")


def test_the_later_rule_wins():
    a = mp.Rules(embed="fsdp", mlp="tensor", paths={"x": ("fsdp",), "y": ("fsdp",)})
    b = mp.Rules(embed="data", paths={"x": mp.replicated})
    assert a | b == mp.Rules(embed="data", mlp="tensor", paths={"y": ("fsdp",), "x": mp.replicated})
    assert b | a == mp.Rules(embed="fsdp", mlp="tensor", paths={"x": ("fsdp",), "y": ("fsdp",)})
    assert (a | b).patterns == ("y", "x")
    assert (a | b) | mp.Rules(embed=None) == a | (b | mp.Rules(embed=None))


def test_a_pattern_said_again_moves_to_the_end():
    rules = mp.Rules(paths={".*": ("fsdp",), ".*/kernel": (None, "fsdp")}) | mp.Rules(paths={".*": ("tensor",)})
    assert spec(rules, leaf(8, 16)) == P("tensor", None)


def test_rules_join_with_rules_only():
    with pytest.raises(TypeError):
        mp.Rules() | {"embed": "fsdp"}


def test_rules_without_paths():
    rules = mp.Rules(embed="fsdp", paths={".*": mp.replicated})
    assert rules.without_paths() == mp.Rules(embed="fsdp")
    assert rules.patterns == (".*",)


# ---------------------------------------------------------------------------------------------------------------------
# Activations
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    return mp.MeshSpec(data=2, fsdp=2, tensor=2).build()


def test_constrain_lays_an_activation_out(mesh):
    @jax.jit
    def f(x):
        return mp.constrain(x * 2, "batch", "norm_seq", "act_mlp")

    with mp.use_rules(mesh, mp.fsdp() | mp.tensor_parallel()):
        y = f(jnp.ones((8, 3, 4)))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "fsdp"), None, "tensor")), 3)
    assert {s.data.shape for s in y.addressable_shards} == {(2, 3, 2)}
    np.testing.assert_array_equal(y, 2)


def test_a_function_jitted_before_follows_the_mesh_and_rules_in_force(mesh):
    @jax.jit
    def f(x):
        return mp.constrain(x, "batch", "act_mlp")

    x = jnp.ones((8, 8))
    seen = []
    for strategy in (mp.fsdp(), mp.fsdp() | mp.tensor_parallel(), mp.Rules(batch=None, act_mlp="fsdp")):
        with mp.use_rules(mesh, strategy):
            seen.append(f(x).sharding.shard_shape((8, 8)))
    assert seen == [(2, 8), (2, 4), (8, 4)]


def test_use_nests_and_ends(mesh):
    assert ambient() is None
    outer, inner = mp.fsdp(), mp.Rules(batch="data")
    with mp.use_rules(mesh, outer) as here:
        assert here.rules == outer.activations
        with mp.use_rules(mesh, inner):
            assert ambient().rules == inner
        assert ambient() == here
    assert ambient() is None


def test_inside_a_shard_map_its_axes_are_left_out(mesh):
    def body(x):  # a device's own rows: [4, 4] of [8, 4]
        return mp.constrain(x + 1, "batch", "act_mlp")

    with mp.use_rules(mesh, mp.fsdp() | mp.tensor_parallel()):
        f = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        y = jax.jit(f)(jnp.zeros((8, 4)))
        np.testing.assert_array_equal(y, 1)
        text = jax.jit(f).lower(jnp.zeros((8, 4))).as_text()
    assert y.sharding.shard_shape((8, 4)) == (2, 2)
    assert "sdy.sharding_constraint" in text


def test_on_one_device_names_are_still_checked():
    one = mp.MeshSpec().build(jax.devices()[:1])
    with mp.use_rules(one, mp.tensor_parallel()):
        x = jnp.ones((3, 5))
        assert mp.constrain(x, "batch", "act_mlp") is x
        with pytest.raises(mp.MeshparError, match="no rule knows the logical name `act_mpl`"):
            mp.constrain(x, "batch", "act_mpl")


def test_shipped_activation_names_are_known_to_every_preset():
    for strategy in (mp.ddp(), mp.fsdp(), mp.tensor_parallel(), mp.expert_parallel(), mp.zero1() | mp.Rules(mlp=None)):
        assert set(ACTIVATION_NAMES) <= strategy.activations.names


def test_the_batch_is_split_over_the_axes_that_a_plain_mesh_has():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    assert axis_sizes(mesh) == {"fsdp": 8}
    decision = resolve(leaf(16, 3, names=("batch", None)), mp.fsdp().activations, mesh)
    assert decision.spec == P("fsdp", None)


# ---------------------------------------------------------------------------------------------------------------------
# Lists of rules, as Flax and MaxText write them
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
def test_a_list_of_flax_is_read_as_flax_reads_it(names):
    from flax import linen as nn

    rules = mp.Rules.from_logical_axis_rules([*FLAX_LIST, ("kv2", None)])
    mesh = {"data": 2, "model": 4}
    theirs = nn.logical_to_mesh_axes(names, [*FLAX_LIST, ("kv2", None)])
    assert spec(rules, leaf(16, 16, names=names), mesh) == theirs
    assert mp.Rules.from_json(rules.to_json()).name_rule("embed").value == rules.name_rule("embed").value


def test_a_list_of_maxtext_is_read_with_its_axes_left_out_or_renamed():
    rules = mp.Rules.from_logical_axis_rules(MAXTEXT_LIST, axes={"fsdp_transpose": None})
    mesh = mp.MeshSpec(fsdp=4, tensor=2).abstract()
    kernel = leaf(16, 16, names=("embed", "mlp"), path="up")
    assert spec(rules, kernel, mesh) == P("fsdp", "tensor")
    rows = leaf(16, names=("batch",), path="batch")
    assert spec(rules, rows, mesh) == P(("data", "fsdp"))
    with pytest.raises(mp.MeshparError, match="`up` dim 1 .* the mesh has .*MeshSpec.fsdp_transpose="):
        resolve(kernel, mp.Rules.from_logical_axis_rules(MAXTEXT_LIST), mesh)
    with pytest.raises(mp.MeshparError, match="17 is not a multiple of 4"):
        resolve(leaf(17, 16, names=("embed", "mlp")), rules, mesh)


def test_mistakes_in_a_list_of_rules():
    for entry in ("batch", ("batch",), ("batch", 3), (None, "data"), ("batch", ("data", "data"))):
        with pytest.raises(mp.MeshparError, match="an entry is a logical name and a mesh axis"):
            mp.Rules.from_logical_axis_rules([entry])
    for rules, axes, match in (
        (None, None, "`rules` is a NoneType"), ("mlp", None, "`rules` is a str"), ({"mlp": None}, None, "is a dict"),
        (FLAX_LIST, 5, "axes=5.*`axes` is a int"),
        ([("mlp", "model")], {"modle": None}, "axes=.'modle'.*no line of the list has such an axis.*`model`"),
    ):  # fmt: skip
        with pytest.raises(mp.MeshparError, match=f"from_logical_axis_rules.*{match}"):
            mp.Rules.from_logical_axis_rules(rules, axes=axes)
    with pytest.raises(mp.MeshparError, match="batch='rows'.*no such name"):
        mp.Rules.from_logical_axis_rules(FLAX_LIST, batch="rows")


def test_the_last_precision_rule_that_matches_a_module_wins():
    wide = {"layers/.*": "float32", "layers/mlp": "bfloat16"}
    assert mp.Rules(precision=wide).dtype_in("layers/mlp/kernel") == "bfloat16"
    assert mp.Rules(precision=dict(reversed(wide.items()))).dtype_in("layers/mlp/kernel") == "float32"
    joined = mp.Rules(precision=wide) | mp.Rules(precision={"layers/(mlp|norm)": "float64"})
    assert [joined.dtype_in(f"layers/{path}") for path in ("mlp/up/kernel", "norm/scale", "out/kernel", "scale")] == [
        "float64", "float64", "float32", None,
    ]  # fmt: skip


def test_the_last_inputs_rule_that_matches_wins():
    given = {".*": mp.replicated, "graph/nodes": "batch"}
    assert mp.Rules(inputs=given).input_rule("graph/nodes") == "batch"
    assert mp.Rules(inputs=given).input_rule("graph/globals") is mp.replicated
    assert mp.Rules(inputs=dict(reversed(given.items()))).input_rule("graph/nodes") is mp.replicated
    assert mp.Rules().input_rule("graph/nodes") is None
