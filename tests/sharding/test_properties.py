"""Whatever the mesh, the rules and the leaves: an error in four parts, or a legal sharding, every time the same."""

from __future__ import annotations

import dataclasses
import functools
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
from meshpar.sharding.mesh import node_of
from meshpar.sharding.rules import resolve
from meshpar.sharding.types import axis_sizes, spec_axes

QUICK = settings(max_examples=50)

AXES = ("data", "fsdp", "tensor", "context")
NAMES = ("embed", "mlp", "heads", "kv_heads", "layers")
PATHS = ("a/kernel", "a/bias", "b/up/kernel", "b/scale", "c")
PATTERNS = (*PATHS, r".*/kernel", r"b/.*", r".*", r"a")
PARTS = ("params", "grads", "optimizer")

# ---------------------------------------------------------------------------------------------------------------------
# What examples are made of
# ---------------------------------------------------------------------------------------------------------------------


@st.composite
def factors(draw, total: int) -> dict[str, int]:
    """Sizes of axes that multiply to a total, which is spread over them at random."""
    sizes = {}
    for axis in draw(st.permutations(AXES)):
        sizes[axis] = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
        total //= sizes[axis]
    return {**sizes, "expert": total}


@st.composite
def meshes(draw) -> Mesh:
    """A real mesh over 1 to 8 devices, with the standard axes and one of the user's."""
    num_devices = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    return mp.MeshSpec(**draw(factors(num_devices))).build(jax.devices()[:num_devices])


axes = st.sampled_from(AXES) | st.sampled_from((*AXES, "nowhere"))
splits = axes | st.lists(st.sampled_from(AXES), min_size=1, max_size=3, unique=True).map(tuple)
firsts = st.lists(splits | st.none(), min_size=1, max_size=3).map(lambda choices: mp.first(*choices))
dim_rules = splits | firsts | st.just(mp.replicated) | st.none()
names = st.sampled_from((*NAMES, None)) | st.sampled_from((*NAMES, None, "nobody"))
path_rules = (
    st.just(mp.replicated)
    | st.lists(dim_rules, max_size=3).map(tuple)
    | st.lists(names, max_size=3).map(lambda dims: mp.names(*dims))
)


def rules_for(by_name, patterns=PATTERNS) -> st.SearchStrategy[mp.Rules]:
    """Rules by name as drawn, and for a path pattern or two."""
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
def leaves(draw, path: str | None = None) -> mp.Leaf:
    shape = tuple(draw(st.lists(st.sampled_from((0, 1, 3, 8, 12, 24, 24)), max_size=3)))
    different = st.permutations((*NAMES, None)).map(lambda some: tuple(some[: len(shape)]))
    return mp.Leaf(
        path=path or draw(st.sampled_from(PATHS)),
        shape=shape,
        dtype=jnp.dtype(draw(st.sampled_from(("float32", "bfloat16", "int8")))),
        names=draw(st.none() | different | st.tuples(*[names for _ in shape])),
    )


@st.composite
def models(draw) -> tuple[list[mp.Leaf], mp.Strategy]:
    """Leaves, and a strategy that is about their names and paths."""
    tree = [draw(leaves(path)) for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, unique=True))]
    theirs = sorted({name for leaf in tree for name in leaf.names or () if name})
    patterns = (*(leaf.path for leaf in tree), ".*")
    all_names = st.fixed_dictionaries(dict.fromkeys(theirs, dim_rules))
    some_names = st.dictionaries(st.sampled_from(theirs), dim_rules) if theirs else st.just({})
    strategy = draw(presets | rules_for(all_names, patterns))
    for more in draw(st.lists(rules_for(some_names, patterns) | presets, max_size=1)):
        try:
            strategy = strategy | more
        except mp.MeshparError:  # the second takes nothing away from the first, and says so
            reject()
    return tree, as_strategy(strategy).replace(big_leaf_bytes=draw(st.sampled_from((0, 64, 512, 2**20))))


def model_of(tree: list[mp.Leaf]) -> mp.Model:
    return mp.from_functions(
        lambda key: {leaf.path: jnp.zeros(leaf.shape, leaf.dtype) for leaf in tree},
        lambda params: params,
        names={leaf.path: leaf.names for leaf in tree if leaf.names is not None},
    )


# ---------------------------------------------------------------------------------------------------------------------
# What must hold of any answer
# ---------------------------------------------------------------------------------------------------------------------


def outcome(ask: Callable[[], Any]) -> Any:
    """What comes back, or the text of an error of ours. Any other exception fails the test."""
    try:
        return ask()
    except mp.MeshparError as error:
        event("an error")
        complete = all(part.strip() for part in (error.where, error.requested, error.reason, error.fix))
        return str(error) if complete else f"INCOMPLETE {error}"


def refused(answer: Any) -> bool:
    assert not str(answer).startswith("INCOMPLETE"), answer
    return isinstance(answer, str)


def check_legal(decision: mp.Decision, mesh: Mesh) -> None:
    leaf, spec = decision.leaf, decision.spec
    used = [axis for entry in spec for axis in spec_axes(entry)]
    assert len(used) == len(set(used)), "one mesh axis on two dims"
    assert set(used) <= set(mesh.axis_names)
    sharding = NamedSharding(mesh, spec)
    piece = sharding.shard_shape(leaf.shape)  # raises when a dim does not divide
    assert math.prod(piece) * decision.shards == leaf.size
    assert decision.bytes_per_device == math.prod(piece) * leaf.dtype.itemsize
    # The different pieces make up the whole, no element twice.
    pieces = {
        tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
        for index in sharding.devices_indices_map(leaf.shape).values()
    }
    seen = np.zeros(leaf.shape, int)
    for bounds in pieces:
        seen[tuple(slice(*bound) for bound in bounds)] += 1
    assert (seen == 1).all()
    assert len(pieces) == decision.shards or leaf.size == 0


def check_meant(decision: mp.Decision, rules: mp.Rules, big_leaf_bytes: int, mesh: Mesh) -> None:
    """A leaf above the threshold is whole on every device only when somebody wrote that down."""
    leaf = decision.leaf
    stacked = math.prod(size for size, name in zip(leaf.shape, leaf.names or (), strict=False) if name == "layers")
    if mesh.size == 1 or decision.shards > 1 or leaf.nbytes // max(stacked, 1) < big_leaf_bytes:
        return
    event("big, whole and meant")
    assert said_to_be_whole(leaf.path.removeprefix("opt_state/trace/"), leaf.names, rules)


def said_to_be_whole(path: str, leaf_names: tuple[str | None, ...] | None, rules: mp.Rules) -> bool:
    """Whether somebody wrote down that a leaf may be whole: found without the resolver."""
    by_path = rules.path_rule(path)
    if by_path is None or hasattr(by_path.value, "names"):
        found = [rules.name_rule(name) for name in leaf_names or () if name]
        said = [rule.value for rule in found if rule is not None]
    else:
        said = [by_path.value] if by_path.value is mp.replicated else list(by_path.value)
    allowed = any(None in getattr(value, "alternatives", ()) for value in said)
    return rules.everything is not None or mp.replicated in said or allowed


# ---------------------------------------------------------------------------------------------------------------------
# One leaf
# ---------------------------------------------------------------------------------------------------------------------


@QUICK
@given(mesh=meshes(), rules=some_rules, leaf=leaves())
def test_a_leaf_is_laid_out_legally_or_refused(mesh, rules, leaf):
    decision = outcome(lambda: resolve(leaf, rules, mesh))
    if not refused(decision):
        check_legal(decision, mesh)
        assert decision.path == leaf.path
        assert decision.rule


@QUICK
@given(mesh=meshes(), preset=presets, more=some_rules, leaf=leaves(), part=st.sampled_from(PARTS))
def test_so_it_is_under_presets(mesh, preset, more, leaf, part):
    for strategy in (preset, preset | more, more | preset):
        decision = outcome(functools.partial(resolve, leaf, getattr(strategy, part), mesh))
        if not refused(decision):
            check_legal(decision, mesh)


@QUICK
@given(mesh=meshes(), rules=some_rules, leaf=leaves())
def test_the_same_question_has_the_same_answer(mesh, rules, leaf):
    def answer(rules, mesh=mesh):
        return outcome(lambda: resolve(leaf, rules, mesh))

    first = answer(rules)
    assert answer(rules) == first
    assert answer(pickle.loads(pickle.dumps(rules))) == first
    assert answer(rules | mp.Rules()) == first
    # Neither devices nor the order in which names were written matter.
    assert answer(rules, axis_sizes(mesh)) == first
    by_name = {name: rules.name_rule(name).value for name in sorted(rules.names)}
    backwards = dict(reversed(by_name.items()))
    plain = answer(mp.Rules(**by_name))
    assert answer(rules.without_paths()) == plain
    assert (answer(mp.Rules(**backwards)) == plain) or refused(plain)


@QUICK
@given(a=some_rules, b=some_rules, c=some_rules)
def test_joining_is_associative_and_the_later_wins(a, b, c):
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
# A whole model
# ---------------------------------------------------------------------------------------------------------------------


@QUICK
@given(mesh=meshes(), model=models())
def test_a_model_is_laid_out_legally_or_refused(mesh, model):
    tree, strategy = model

    def lay_out(tree):
        return outcome(lambda: mp.shardings(model_of(tree), mesh, strategy, tx=optax.trace(0.9)))

    table = lay_out(tree)
    assert lay_out(tree[::-1]) == table
    if refused(table):
        return
    event("laid out")
    assert [d.path for d in table.params] == sorted(leaf.path for leaf in tree)
    for part in PARTS:
        for decision in getattr(table, part):
            check_legal(decision, mesh)
            check_meant(decision, getattr(strategy, part), strategy.big_leaf_bytes, mesh)
    # Momentum lies as the rules for the optimizer say, whatever the parameters do.
    for leaf, slot in zip(sorted(tree, key=lambda leaf: leaf.path), table.optimizer, strict=True):
        assert slot.spec == resolve(leaf, strategy.optimizer, mesh).spec


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
    """Nodes, devices in each, and sizes that fit them, or nearly."""
    nodes, per_node = draw(st.integers(1, 4)), draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    sizes = draw(factors(nodes * per_node))
    changed = draw(st.sampled_from(AXES))
    return nodes, per_node, {**sizes, changed: draw(st.sampled_from((sizes[changed], -1, -1, 2)))}


@QUICK
@given(pod=pods(), inside=st.lists(st.sampled_from(AXES), unique=True, max_size=2).map(tuple), seed=st.integers(0, 3))
def test_a_mesh_holds_every_device_once_and_keeps_its_promise(pod, inside, seed):
    nodes, per_node, sizes = pod
    ids = np.random.default_rng(seed).permutation(nodes * per_node)
    devices = [FakeDevice(int(i), node) for node, some in enumerate(np.split(ids, nodes)) for i in some]
    spec = mp.MeshSpec(**sizes, inside_node=inside)
    mesh = outcome(lambda: spec.build(devices))
    if refused(mesh):
        return
    assert sorted(d.id for d in mesh.devices.flat) == list(range(len(devices)))
    assert spec.resolve(len(devices)) == axis_sizes(mesh) == axis_sizes(spec.abstract(len(devices)))
    assert all(spec[axis] in (-1, size) for axis, size in axis_sizes(mesh).items())
    for axis in inside:
        rows = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
        assert all(len({node_of(d) for d in row}) == 1 for row in rows)


@QUICK
@given(sizes=st.dictionaries(st.sampled_from((*AXES, "stage", "expert")), st.integers(1, 99)))
def test_a_mesh_spec_reads_back_what_it_says(sizes):
    spec = mp.MeshSpec(**sizes)
    assert mp.MeshSpec.parse(",".join(f"{axis}={size}" for axis, size in spec.items())) == spec
    assert eval(repr(spec), {"MeshSpec": mp.MeshSpec}) == spec
    assert hash(pickle.loads(pickle.dumps(spec))) == hash(spec)
