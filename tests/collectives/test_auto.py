"""`algorithm="auto"`: the choice of the algorithm, its interconnect, and the program that runs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from meshpar import collectives as mc
from meshpar.collectives import reference
from meshpar.hardware import algorithm_choice as choice
from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import Link, Links, parse_cluster
from meshpar.sharding.errors import MeshparError
from tests.errors import raises

SLOWEST = Link(alpha_s=1e3, bytes_per_s=1e-3)
"""Link for XLA's collectives, if the choice should be one of ours."""


def measured(**permutes):
    """Return a profile in which XLA's collectives are slower than permutes over these links."""
    return Links(devices="cpu", axes=dict.fromkeys(permutes, SLOWEST), permutes=permutes)


SLOW_START = measured(x=Link(alpha_s=1.0, bytes_per_s=1e12))
SLOW_BYTES = measured(x=Link(alpha_s=1e-12, bytes_per_s=1.0))
GROUPS = measured(outer=Link(alpha_s=1e-6, bytes_per_s=1e3), inner=Link(alpha_s=1e-9, bytes_per_s=1e12))
H100 = parse_cluster("h100:1x8")
BOTH_MEASURED = dataclasses.replace(
    H100, axes={"*": SLOWEST}, permutes={"*": Link(alpha_s=1.9e-6, bytes_per_s=450e9)}, source="measured here"
)


def rows(count, size=24, dtype="float32"):
    return jnp.asarray(np.random.default_rng(0).integers(-40, 40, (count, size)), dtype)


def steps_of(ranks, count, kernel, size=24):
    return sum(c.count_per_step for c in ranks(count).sent(kernel, (size,)))


@pytest.fixture(autouse=True)
def _no_cluster_named(monkeypatch):
    monkeypatch.delenv(choice.VARIABLE, raising=False)


# ---- The choice ------------------------------------------------------------------------------------------------------


def test_short_arrays_need_few_steps_long_ones_few_bytes():
    link = Link(alpha_s=1e-6, bytes_per_s=1e11)
    crossover = cost.ring_tree_crossover_bytes(6, link)
    options = {"cluster": measured(x=link), "axes": ("x",), "mesh": {"x": 6}}
    short = mc.choose("all_reduce", crossover * 0.5, 6, **options)
    long = mc.choose("all_reduce", crossover * 100, 6, **options)
    assert (short.algorithm, long.algorithm) == ("recursive_doubling", "ring")
    for chosen in (short, long):
        times = [cost.time_s for cost in chosen.alternatives.values()]
        assert times == sorted(times)
        assert chosen.time_s == times[0] == chosen.alternatives[chosen.algorithm].time_s


@pytest.mark.parametrize(
    ("kernel", "count", "algorithm"),
    [
        ("all_reduce", 8, "halving_doubling"),
        ("all_gather", 8, "recursive_doubling"),
        ("reduce_scatter", 8, "recursive_halving"),
        ("all_gather", 6, "ring"),
    ],
)
def test_power_of_two_ranks_use_halving_and_doubling(kernel, count, algorithm):
    assert mc.choose(kernel, 1e9, count, cluster=BOTH_MEASURED).algorithm == algorithm


FAST = Link(alpha_s=1e-9, bytes_per_s=1e12)
SLOW = Link(alpha_s=1e-3, bytes_per_s=1e6)


@pytest.mark.parametrize("kernel", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    ("cluster", "is_xla"),
    [
        ("h100:1x8", True),
        ("h100:2x4", True),
        (Link(alpha_s=1e-6, bytes_per_s=1e11), True),
        (dataclasses.replace(H100, permutes={"x": FAST}), True),  # XLA's collectives were not measured
        (dataclasses.replace(H100, axes={"x": SLOW}), True),  # permutes were not measured
        (dataclasses.replace(H100, axes={"x": SLOW}, permutes={"x": FAST}), False),
        (dataclasses.replace(H100, axes={"x": FAST}, permutes={"x": SLOW}), True),
        (dataclasses.replace(H100, axes={"*": SLOW}, permutes={"x": FAST}), False),
    ],
)
def test_xla_is_used_unless_a_profile_measured_better(kernel, cluster, is_xla):
    for num_bytes in (100, 1e9):
        chosen = mc.choose(kernel, num_bytes, 8, cluster=cluster, axes=("x",), mesh={"x": 8})
        assert (chosen.algorithm == "xla") == is_xla
        assert "xla" in chosen.alternatives
        assert chosen.time_s == chosen.alternatives[chosen.algorithm].time_s
        is_measured = not isinstance(cluster, str | Link) and bool(cluster.axes and cluster.permutes)
        assert ("no profile has measures of both" in chosen.why) == (not is_measured)


def test_ties_go_to_the_first_algorithm():
    free = measured(x=Link(alpha_s=0, bytes_per_s=1e9))
    found = mc.choose("all_gather", 1e6, 8, cluster=free, axes=("x",), mesh={"x": 8})
    assert found.algorithm == "ring"
    assert "recursive_doubling takes the same time" in found.why


def test_permutes_between_nodes_share_the_port():
    cluster = parse_cluster("h100:2x8")
    found = mc.choose("all_gather", 16e6, 16, cluster=cluster)
    ours = [cost for name, cost in found.alternatives.items() if name != "xla"]
    assert {phase.link for cost in ours for phase in cost.phases} == {cluster.across}
    (phase,) = found.alternatives["xla"].phases
    assert phase.link.bytes_per_s == 8 * cluster.across.bytes_per_s
    inside = mc.choose("all_gather", 16e6, 4, cluster=cluster, axes=("b",), mesh={"a": 4, "b": 4})
    assert inside.alternatives["ring"].phases[0].link == cluster.inside


def test_several_axes_consider_the_hierarchical_algorithm():
    mesh = {"data": 2, "tensor": 8}
    found = mc.choose("all_reduce", 1e9, 16, cluster="h100:2x8", axes=("data", "tensor"), mesh=mesh)
    assert found.algorithm == "xla"
    assert next(name for name in found.alternatives if name != "xla") == "hierarchical"
    inside, across = found.alternatives["hierarchical"].phases
    cluster = parse_cluster("h100:2x8")
    assert (inside.link, across.link) == (cluster.inside, cluster.across)


def test_choice_explains_and_prints_its_alternatives():
    found = mc.choose("all_reduce", 25e6, 8, cluster=BOTH_MEASURED)
    assert found.why.startswith("halving_doubling: ")
    assert "mostly bandwidth; next ring: 1.14 times that" in found.why
    for word in (*(name.replace("_", "-") for name in found.alternatives), "h100:1x8", "1.14 times"):
        assert word in str(found)
    data = found.to_json()
    assert data["algorithm"] == "halving_doubling"
    assert list(data["alternatives"]) == list(found.alternatives)
    assert data["alternatives"]["xla"]["title"].startswith("xla: all-reduce")
    unmeasured = mc.choose("all_reduce", 25e6, 8, cluster="h100:1x8")
    assert unmeasured.why.startswith("xla: ")
    assert "The fastest kernel in the model is halving_doubling" in unmeasured.why


@pytest.mark.parametrize(
    ("arguments", "options", "code"),
    [
        (("all_reduced", 1, 2), {}, "unknown-choice"),
        (("all_reduce", -1, 2), {}, "out-of-range"),
        (("all_reduce", 1, 0), {}, "not-an-int"),
        (("all_reduce", 1, 16), {}, "out-of-range"),
        (("all_reduce", 1, 2), {"cluster": "h1000:1x8"}, "unknown-name"),
        (("all_reduce", 1, 2), {"cluster": SLOW_START, "axes": ("y",), "mesh": {"y": 2}}, "unknown-axis"),
    ],
)
def test_choose_checks_its_arguments(arguments, options, code):
    with raises(code):
        mc.choose(*arguments, **{"cluster": "h100:1x8", **options})


# ---- The program -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "links", "steps"),
    [
        ("all_reduce", SLOW_START, 2 + 2),  # recursive doubling over 4 of 5 ranks, and two more messages
        ("all_reduce", SLOW_BYTES, 8),  # a ring
        ("all_gather", SLOW_START, 4),
        ("reduce_scatter", SLOW_BYTES, 4),
    ],
)
def test_chosen_algorithm_runs(ranks, name, links, steps):
    kernel = functools.partial(getattr(mc, name), axis="x", algorithm="auto", cluster=links)
    assert steps_of(ranks, 5, kernel, size=25) == steps


@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
def test_doubling_and_halving_keep_the_dtype(ranks, dtype):
    parts = rows(4, dtype=dtype)
    gather = ranks(4).view(functools.partial(mc.all_gather, axis="x", dim=-1, algorithm="recursive_doubling"))
    scatter = ranks(4).view(functools.partial(mc.reduce_scatter, axis="x", algorithm="recursive_halving"))
    actual = jax.jit(lambda x: (gather(x), scatter(x)))(parts)
    for y, expected in zip(actual, (reference.all_gather(parts), reference.reduce_scatter(parts)), strict=True):
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, expected)


def test_two_levels_over_two_axes(ranks):
    kernel = functools.partial(mc.all_reduce, axis=("outer", "inner"), algorithm="auto", cluster=GROUPS)
    row, parts = ranks(outer=2, inner=3), rows(6)
    np.testing.assert_array_equal(jax.jit(row.view(kernel))(parts), reference.all_reduce(parts))
    assert {c.axes for c in row.sent(kernel, (24,))} == {("inner",), ("outer",)}


def test_algorithm_is_chosen_per_bucket(ranks):
    links = measured(x=Link(alpha_s=1e-6, bytes_per_s=1e9))
    assert cost.ring_tree_crossover_bytes(3, links.permutes["x"]) < 4000
    tree = {"a": rows(3, 4), "b": rows(3, 3000)}
    kernel = functools.partial(mc.bucketed_all_reduce, axis="x", algorithm="auto", cluster=links, bucket_bytes=1000)
    found = jax.jit(ranks(3).view(kernel))(tree)
    for name, parts in tree.items():
        np.testing.assert_array_equal(found[name], reference.all_reduce(parts))
    text = str(jax.make_jaxpr(ranks(3).view(kernel))(tree))
    assert text.count("ppermute") == 3 + 2  # unrolled recursive doubling, and the two loops of the ring


# ---- The interconnect ------------------------------------------------------------------------------------------------


def trace(ranks, **options):
    kernel = functools.partial(mc.all_reduce, axis="x", **options)
    return jax.eval_shape(ranks(2).view(kernel), rows(2))


def test_cpu_devices_use_a_measured_default(ranks):
    num_bytes = {"short": 96, "long": 4_000_000}
    found = {name: mc.choose("all_reduce", n, 6, axes=("x",), mesh={"x": 6}) for name, n in num_bytes.items()}
    for name, fastest in (("short", "recursive_doubling"), ("long", "ring")):
        chosen = found[name]
        assert (chosen.algorithm, next(a for a in chosen.alternatives if a != "xla")) == ("xla", fastest)
        assert "links: default for CPU host devices: meshpar bench collectives" in chosen.why
        assert "-core" in chosen.why
        assert chosen.alternatives["ring"].phases[0].where == "measured, for all axes"
    assert "default for CPU" not in mc.choose("all_reduce", 96, 6, cluster="h100:1x8").why
    kernel = functools.partial(mc.all_reduce, axis="x", algorithm="auto")
    assert "psum" in str(jax.make_jaxpr(ranks(6).view(kernel))(rows(6)))
    both = functools.partial(mc.all_reduce, axis=("outer", "inner"), algorithm="auto")
    parts = rows(6)
    found = jax.jit(ranks(outer=2, inner=3).view(both))(parts)
    np.testing.assert_array_equal(found, reference.all_reduce(parts))


@pytest.mark.parametrize("processes", [1, 2])
def test_unknown_interconnects_are_an_error(monkeypatch, processes, ranks):
    """A mesh without devices, and several processes."""
    mesh = ranks(2).mesh if processes == 2 else AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    kernel = functools.partial(mc.all_reduce, axis="x", algorithm="auto")
    with pytest.raises(MeshparError, match="the links of the `cpu` devices of this mesh are unknown") as raised:
        jax.eval_shape(jax.shard_map(kernel, mesh=mesh, in_specs=P("x"), out_specs=P("x")), rows(2))
    assert 'cluster="h100:8x8" or MESHPAR_CLUSTER=h100:8x8' in raised.value.fix


def test_environment_variable_sets_the_cluster(ranks, monkeypatch, tmp_path):
    monkeypatch.setenv(choice.VARIABLE, "h100:1x8")
    assert trace(ranks, algorithm="auto").shape == (2, 24)
    SLOW_START.save(tmp_path / "mine.json")
    monkeypatch.setenv(choice.VARIABLE, str(tmp_path / "mine.json"))
    assert trace(ranks, algorithm="auto").shape == (2, 24)
    monkeypatch.setenv(choice.VARIABLE, "h1000:1x8")
    with pytest.raises(MeshparError, match="Did you mean `h100`"):
        trace(ranks, algorithm="auto")
    trace(ranks, algorithm="auto", cluster=SLOW_START)  # the argument has priority


def test_known_gpus_use_their_data_sheet(ranks, monkeypatch):
    gpu = dataclasses.replace(parse_cluster("h100:1x8").gpu, device_kinds=("cpu",))
    monkeypatch.setattr(choice, "gpu_of_kind", lambda kind: gpu if kind == "cpu" else None)
    assert trace(ranks, algorithm="auto").shape == (2, 24)
    with jax.set_mesh(ranks(2).mesh):
        found = choice.links_here("all_reduce")
    assert (found.gpu, found.nodes, found.gpus_per_node) == (gpu, 1, 2)
    assert mc.choose("all_reduce", 1e6, 8).why.endswith(
        "links: h100:1x8, data-sheet links and NCCL's latencies, unmeasured"
    )


def test_single_rank_needs_no_interconnect(ranks):
    kernel = functools.partial(mc.all_reduce, axis="x", algorithm="auto")
    np.testing.assert_array_equal(ranks(1).view(kernel)(rows(1)), rows(1))


def test_options_are_checked(ranks):
    with raises("conflict", "all_reduce"):
        trace(ranks, cluster="h100:1x8")
    with raises("conflict", "all_reduce"):
        trace(ranks, algorithm="auto", channels=2, cluster="h100:1x8")
    with pytest.raises(MeshparError, match="it has 1 GPUs"):
        trace(ranks, algorithm="auto", cluster="h100:1x1")
    for name, algorithm in (("all_gather", "recursive_doubling"), ("reduce_scatter", "recursive_halving")):
        kernel = functools.partial(getattr(mc, name), axis="x", algorithm=algorithm)
        with raises("unsupported-feature", name):
            jax.eval_shape(ranks(6).view(kernel), rows(6))
