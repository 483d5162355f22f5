"""Properties of random meshes, rules and leaves: the result is a complete error or a valid sharding."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import event, given, reject, settings
from jax.sharding import Mesh, NamedSharding

import meshpar as mp
from meshpar.parallel import as_strategy
from meshpar.parallel.strategy import Strategy
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.mesh import node_of
from meshpar.sharding.rules import resolve
from meshpar.sharding.types import Decision, Leaf, axis_sizes, spec_axes

QUICK = settings(max_examples=50)

AXES = ("data", "fsdp", "tensor", "context")
NAMES = ("embed", "mlp", "heads", "kv_heads", "layers")
PATHS = ("a/kernel", "a/bias", "b/up/kernel", "b/scale", "c")
PATTERNS = (*PATHS, r".*/kernel", r"b/.*", r".*", r"a")
FIELDS = ("params", "grads", "optimizer")

# ---------------------------------------------------------------------------------------------------------------------
# Strategies for examples
# ---------------------------------------------------------------------------------------------------------------------


@st.composite
def factors(draw, total: int) -> dict[str, int]:
    """Sizes of mesh axes whose product is `total`."""
    sizes = {}
    for axis in draw(st.permutations(AXES)):
        sizes[axis] = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
        total //= sizes[axis]
    return {**sizes, "expert": total}


@st.composite
def meshes(draw) -> Mesh:
    """A mesh of 1 to 8 devices, with the standard axes and a custom axis."""
    num_devices = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    return mp.MeshSpec(**draw(factors(num_devices))).build(jax.devices()[:num_devices])


axes = st.sampled_from(AXES) | st.sampled_from((*AXES, "nowhere"))
axis_tuples = axes | st.lists(st.sampled_from(AXES), min_size=1, max_size=3, unique=True).map(tuple)
firsts = st.lists(axis_tuples | st.none(), min_size=1, max_size=3).map(lambda choices: mp.first(*choices))
dim_rules = axis_tuples | firsts | st.just(mp.replicated) | st.none()
names = st.sampled_from((*NAMES, None)) | st.sampled_from((*NAMES, None, "undefined"))
path_rules = (
    st.just(mp.replicated)
    | st.lists(dim_rules, max_size=3).map(tuple)
    | st.lists(names, max_size=3).map(lambda dims: mp.names(*dims))
)


def rules_for(by_name, patterns=PATTERNS) -> st.SearchStrategy[mp.Rules]:
    """The given rules by name, with rules for up to two path patterns."""
    by_path = st.dictionaries(st.sampled_from(patterns), path_rules, max_size=2)
    return st.builds(lambda by_name, paths: mp.Rules(**by_name, paths=paths), by_name, by_path)


some_rules = rules_for(
    st.fixed_dictionaries(dict.fromkeys(NAMES, dim_rules)) | st.dictionaries(st.sampled_from(NAMES), dim_rules)
)
presets = st.sampled_from(
    [
        mp.ddp(),
        mp.zero1(min_bytes=0),
        mp.zero2(min_bytes=0),
        mp.fsdp(),
        mp.fsdp(min_bytes=0),
        mp.fsdp(axis=("data", "fsdp"), min_bytes=64),
        mp.hsdp(min_bytes=0),
        mp.tensor_parallel(sequence=True),
        mp.fsdp(min_bytes=0) | mp.tensor_parallel(),
        mp.zero1(min_bytes=0) | mp.tensor_parallel(),
    ]
)


@st.composite
def leaves(draw, path: str | None = None) -> Leaf:
    shape = tuple(draw(st.lists(st.sampled_from((0, 1, 3, 8, 12, 24, 24)), max_size=3)))
    different = st.permutations((*NAMES, None)).map(lambda some: tuple(some[: len(shape)]))
    return Leaf(
        path=path or draw(st.sampled_from(PATHS)),
        shape=shape,
        dtype=jnp.dtype(draw(st.sampled_from(("float32", "bfloat16", "int8")))),
        names=draw(st.none() | different | st.tuples(*[names for _ in shape])),
    )


@st.composite
def models(draw) -> tuple[list[Leaf], Strategy]:
    """Leaves, and a strategy with rules for their names and paths."""
    tree = [draw(leaves(path)) for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, unique=True))]
    leaf_names = sorted({name for leaf in tree for name in leaf.names or () if name})
    patterns = (*(leaf.path for leaf in tree), ".*")
    all_names = st.fixed_dictionaries(dict.fromkeys(leaf_names, dim_rules))
    some_names = st.dictionaries(st.sampled_from(leaf_names), dim_rules) if leaf_names else st.just({})
    strategy = draw(presets | rules_for(all_names, patterns))
    for more in draw(st.lists(rules_for(some_names, patterns) | presets, max_size=1)):
        try:
            strategy = strategy | more
        except mp.MeshparError:  # conflicting strategies
            reject()
    return tree, as_strategy(strategy).replace(big_leaf_bytes=draw(st.sampled_from((0, 64, 512, 2**20))))


def model_of(tree: list[Leaf]) -> Model:
    return mp.from_functions(
        lambda key: {leaf.path: jnp.zeros(leaf.shape, leaf.dtype) for leaf in tree},
        lambda params: params,
        names={leaf.path: leaf.names for leaf in tree if leaf.names is not None},
    )


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result, or the text of a `MeshparError`. Other exceptions fail the test."""
    try:
        return call()
    except mp.MeshparError as error:
        event("an error")
        is_complete = all(text.strip() for text in (error.where, error.reason, error.fix))
        return str(error) if is_complete else f"INCOMPLETE {error}"


def is_error(result: Any) -> bool:
    assert not str(result).startswith("INCOMPLETE"), result
    return isinstance(result, str)


def check_valid(decision: Decision, mesh: Mesh) -> None:
    leaf, spec = decision.leaf, decision.spec
    used = [axis for entry in spec for axis in spec_axes(entry)]
    assert len(used) == len(set(used)), "a mesh axis is used twice"
    assert set(used) <= set(mesh.axis_names)
    sharding = NamedSharding(mesh, spec)
    shard = sharding.shard_shape(leaf.shape)  # raises for an indivisible dim
    assert math.prod(shard) * decision.shards == leaf.size
    assert decision.bytes_per_device == math.prod(shard) * leaf.dtype.itemsize
    # Each element is in exactly one of the different shards.
    shards = {
        tuple(dim_slice.indices(size)[:2] for dim_slice, size in zip(index, leaf.shape, strict=True))
        for index in sharding.devices_indices_map(leaf.shape).values()
    }
    counts = np.zeros(leaf.shape, int)
    for bounds in shards:
        counts[tuple(slice(*bound) for bound in bounds)] += 1
    assert (counts == 1).all()
    assert len(shards) == decision.shards or leaf.size == 0


def check_replicated_on_purpose(decision: Decision, rules: mp.Rules, big_leaf_bytes: int, mesh: Mesh) -> None:
    """Check that a leaf above the threshold is replicated only if a rule permits it."""
    leaf = decision.leaf
    num_layers = math.prod(size for size, name in zip(leaf.shape, leaf.names or (), strict=False) if name == "layers")
    if mesh.size == 1 or decision.shards > 1 or leaf.nbytes // max(num_layers, 1) < big_leaf_bytes:
        return
    event("big and replicated on purpose")
    assert may_be_replicated(leaf.path.removeprefix("opt_state/trace/"), leaf.names, rules)


def may_be_replicated(path: str, leaf_names: tuple[str | None, ...] | None, rules: mp.Rules) -> bool:
    """Return whether a rule permits that a leaf is replicated. Does not use the resolver."""
    by_path = rules.path_rule(path)
    if by_path is None or hasattr(by_path.value, "names"):
        by_name = [rules.name_rule(name) for name in leaf_names or () if name]
        values = [rule.value for rule in by_name if rule is not None]
    else:
        values = [by_path.value] if by_path.value is mp.replicated else list(by_path.value)
    has_fallback = any(None in getattr(value, "alternatives", ()) for value in values)
    return rules.everything is not None or mp.replicated in values or has_fallback


# ---------------------------------------------------------------------------------------------------------------------
# Leaves
# ---------------------------------------------------------------------------------------------------------------------


@QUICK
@given(mesh=meshes(), rules=some_rules, leaf=leaves())
def test_resolve_is_valid_or_an_error(mesh, rules, leaf):
    decision = outcome(lambda: resolve(leaf, rules, mesh))
    if not is_error(decision):
        check_valid(decision, mesh)
        assert decision.path == leaf.path
        assert decision.rule


@QUICK
@given(mesh=meshes(), rules=some_rules, leaf=leaves())
def test_resolve_is_deterministic(mesh, rules, leaf):
    def resolved(rules, mesh=mesh):
        return outcome(lambda: resolve(leaf, rules, mesh))

    first = resolved(rules)
    assert resolved(rules) == first
    assert resolved(pickle.loads(pickle.dumps(rules))) == first
    assert resolved(rules | mp.Rules()) == first
    # The result does not depend on the devices or on the order of the names.
    assert resolved(rules, axis_sizes(mesh)) == first
    by_name = {name: rules.name_rule(name).value for name in sorted(rules.names)}
    without_paths = resolved(mp.Rules(**by_name))
    assert resolved(rules.without_paths()) == without_paths
    assert (resolved(mp.Rules(**dict(reversed(by_name.items())))) == without_paths) or is_error(without_paths)


@QUICK
@given(a=some_rules, b=some_rules, c=some_rules)
def test_join_is_associative_and_later_rules_win(a, b, c):
    assert (a | b) | c == a | (b | c)
    assert hash((a | b) | c) == hash(a | (b | c))
    assert a | a == a
    for name in b.names:
        assert (a | b).name_rule(name) == b.name_rule(name)
    for name in a.names - b.names:
        assert (a | b).name_rule(name) == a.name_rule(name)
    for path in PATHS:
        assert (a | b).path_rule(path) == (b.path_rule(path) or a.path_rule(path))


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


@QUICK
@given(mesh=meshes(), model=models())
def test_shardings_of_a_model_are_valid_or_an_error(mesh, model):
    tree, strategy = model

    def lay_out(tree):
        return outcome(lambda: mp.shardings(model_of(tree), mesh, strategy, tx=optax.trace(0.9)))

    table = lay_out(tree)
    assert lay_out(tree[::-1]) == table
    if is_error(table):
        return
    event("a table")
    assert [decision.path for decision in table.params] == sorted(leaf.path for leaf in tree)
    for field in FIELDS:
        for decision in getattr(table, field):
            check_valid(decision, mesh)
            check_replicated_on_purpose(decision, getattr(strategy, field), strategy.big_leaf_bytes, mesh)
    # Momentum is sharded by the rules for the optimizer, independently of the parameters.
    for leaf, momentum in zip(sorted(tree, key=lambda leaf: leaf.path), table.optimizer, strict=True):
        assert momentum.spec == resolve(leaf, strategy.optimizer, mesh).spec


# ---------------------------------------------------------------------------------------------------------------------
# Meshes
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    platform: str = "gpu"


@st.composite
def pods(draw) -> tuple[int, int, dict[str, int]]:
    """Number of nodes, devices per node, and sizes of mesh axes, some with a wrong product."""
    nodes, per_node = draw(st.integers(1, 4)), draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    sizes = draw(factors(nodes * per_node))
    changed = draw(st.sampled_from(AXES))
    return nodes, per_node, {**sizes, changed: draw(st.sampled_from((sizes[changed], -1, -1, 2)))}


@QUICK
@given(pod=pods(), inside=st.lists(st.sampled_from(AXES), unique=True, max_size=2).map(tuple), seed=st.integers(0, 3))
def test_mesh_has_all_devices_and_keeps_axes_inside_nodes(pod, inside, seed):
    nodes, per_node, sizes = pod
    ids = np.random.default_rng(seed).permutation(nodes * per_node)
    devices = [FakeDevice(int(i), node) for node, node_ids in enumerate(np.split(ids, nodes)) for i in node_ids]
    spec = mp.MeshSpec(**sizes, inside_node=inside)
    mesh = outcome(lambda: spec.build(devices))
    if is_error(mesh):
        return
    assert sorted(d.id for d in mesh.devices.flat) == list(range(len(devices)))
    assert spec.resolve(len(devices)) == axis_sizes(mesh) == axis_sizes(spec.abstract(len(devices)))
    assert all(spec[axis] in (-1, size) for axis, size in axis_sizes(mesh).items())
    for axis in inside:
        groups = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
        assert all(len({node_of(device) for device in group}) == 1 for group in groups)
