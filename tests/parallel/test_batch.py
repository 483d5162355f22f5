"""Batch leaves without the common batch dim: graphs, tables, scalars and PRNG keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.parallel.batch import StepBatch, StepBatches, batch_sharding
from tests.equal import mesh_of
from tests.errors import raises

GRAPHS, NODES, EDGES, WIDTH = 16, 4, 6, 8
FSDP = mp.fsdp(min_bytes=0)
INPUTS = mp.Rules(inputs={r"graph/(nodes|senders|receivers)": "batch", "table": mp.replicated})


class Graphs(NamedTuple):
    """Graphs as in jraph, padded to the same number of nodes and edges. Edges use node indices within their graph."""

    nodes: np.ndarray
    """[graphs * NODES, WIDTH]."""
    senders: np.ndarray
    """[graphs * EDGES], node indices in their graph."""
    receivers: np.ndarray
    n_node: np.ndarray
    """[graphs]."""
    globals: None = None


def batch() -> dict:
    rng = np.random.default_rng(0)
    return {
        "graph": Graphs(
            rng.normal(size=(GRAPHS * NODES, WIDTH)).astype(np.float32),
            *rng.integers(0, NODES, (2, GRAPHS * EDGES), dtype=np.int32),
            rng.integers(1, NODES + 1, GRAPHS, dtype=np.int32),
        ),
        "table": rng.normal(size=(5, WIDTH)).astype(np.float32),
        "scale": np.float32(0.5),
        "key": jax.random.key(1),
    }


class Net(nn.Module):
    @nn.compact
    def __call__(self, graph, table):
        count = graph.n_node.shape[0]
        nodes = nn.Dense(WIDTH)(graph.nodes).reshape(count, NODES, WIDTH)
        senders, receivers = (x.reshape(count, EDGES) for x in (graph.senders, graph.receivers))
        sent = jnp.take_along_axis(nodes, senders[..., None], 1)
        nodes = nodes + jax.vmap(lambda x, at: jax.ops.segment_sum(x, at, NODES))(sent, receivers)
        is_real = jnp.arange(NODES) < graph.n_node[:, None]
        return nn.Dense(WIDTH)((nodes * is_real[..., None]).sum(1) + table.sum(0))


def loss(model, batch, key):
    noise = jax.random.normal(batch["key"], (WIDTH,))
    errors = ((model(batch["graph"], batch["table"]) * batch["scale"] - noise) ** 2).mean(-1)
    num_nodes = batch["graph"].n_node
    return mp.MeanLoss((errors * num_nodes).sum(), num_nodes.sum()), {}


def state_on(spec: mp.MeshSpec, strategy, rules=INPUTS):
    graph = batch()["graph"]._replace(globals=None)
    model = mp.from_linen(Net(), graph, batch()["table"])
    return mp.init_state(model, optax.sgd(0.1), mesh=mesh_of(spec), strategy=strategy | rules, key=0)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_padded_graphs_train_as_on_one_device(accumulate):
    results = []
    hybrid = mp.MeshSpec(data=2, fsdp=4), mp.hsdp(min_bytes=0)
    for spec, strategy, micro_steps in (
        (mp.MeshSpec(), mp.ddp(), 1), (*hybrid, accumulate), (mp.MeshSpec(fsdp=8), FSDP, accumulate),
    ):  # fmt: skip
        state, step = state_on(spec, strategy), mp.train_step(loss, accumulate=micro_steps)
        arrays = batch() if spec == mp.MeshSpec() else mp.shard_batch(batch(), state.setup.mesh, strategy | INPUTS)
        for _ in range(2):
            state, metrics = step(state, arrays)
        results.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-5)  # float32, different order of summation
    assert arrays["table"].sharding.is_fully_replicated
    assert arrays["graph"].nodes.addressable_shards[0].data.shape == (GRAPHS * NODES // 8, WIDTH)
    assert mp.Rules.from_json(INPUTS.to_json()) == INPUTS == eval(repr(INPUTS), {**vars(mp), "Rules": mp.Rules})


def test_batch_errors():
    once = {"accumulate": 2, "reduce_gradients": "once"}
    for code, where, rules, options in (
        ("wrong-shape", "`graph/", mp.Rules(), {}),
        ("unknown-name", "inputs rule `graph/globals`", INPUTS | mp.Rules(inputs={"graph/globals": "batch"}), {}),
        ("indivisible", "`table` of shape (5, 8) dim 0", mp.Rules(inputs={"graph/.*": "batch", "table": "batch"}), {}),
        ("indivisible", "`graph/n_node`", INPUTS, {"accumulate": 4}),
        ("unsupported-feature", "", INPUTS, once),
        ("conflict", "batch", mp.Rules(inputs={".*": mp.replicated}), {}),
    ):
        with raises(code, where):
            mp.train_step(loss, **options).trace(state_on(mp.MeshSpec(fsdp=8), FSDP, rules).setup.abstract, batch())
    mesh = mesh_of(mp.MeshSpec(fsdp=8))
    with raises("wrong-dtype", "`table` of dtype <U1"):
        mp.shard_batch({**batch(), "table": np.array(["a"])}, mesh, FSDP | INPUTS)
    single = mp.Rules(inputs={"": "batch"})  # the batch is a single array
    assert mp.shard_batch(np.zeros((8, 2)), mesh, FSDP | single).shape == (8, 2)
    with raises("conflict", "batch"):
        mp.shard_batch(np.zeros((8, 2)), mesh, FSDP | mp.Rules(inputs={"": mp.replicated}))
    with pytest.raises(mp.MeshparError):
        mp.Rules(inputs={"table": "fsdp"})


@pytest.mark.matrix
@pytest.mark.call_stacks
def test_explain_counts_replicated_leaves_in_full():
    state = state_on(mp.MeshSpec(fsdp=8), FSDP)
    report = mp.explain(mp.train_step(loss), state.setup.abstract, batch())
    assert report.is_as_expected, str(report)
    sharded = sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch()["graph"]))
    unsharded = report.memory.batch_bytes - sharded // 8
    table = batch()["table"].nbytes
    assert table <= unsharded < table + 64, "the scalar and the key are repeated for each graph"


MODEL = mp.from_functions(
    lambda key: {"w": jax.random.normal(key, (4, 4)), "rows": jax.random.normal(key, (16, 4))},
    lambda params, x: x @ params["w"] + params["rows"].sum(),
)


def with_bias(model, batch, key):
    return ((model(mp.constrain(batch["x"], "batch", None)) + batch["bias"].sum()) ** 2).mean(), {}


def test_every_example_may_use_all_rows_of_a_replicated_input():
    def loss(model, batch, key):
        distances = jnp.square(batch["x"][:, None] - batch["table"]).sum(-1)
        return mp.MeanLoss((distances.min(1) * model(batch["x"]).sum(1)).sum(), len(batch["x"])), {}

    strategy = mp.ddp() | mp.Rules(inputs={"table": mp.replicated})
    data = {name: np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32) for name in ("x", "table")}
    losses = []
    for accumulate in (1, 2):
        state = mp.init_state(MODEL, optax.sgd(0.1), mesh=mesh_of(mp.MeshSpec(data=2)), strategy=strategy, key=0)
        losses.append(float(mp.train_step(loss, accumulate=accumulate)(state, data)[1]["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("explicit", [False, True])
def test_arrays_on_devices_in_another_layout_are_resharded(explicit):
    mesh = mp.MeshSpec(fsdp=8).build()
    if explicit:
        kinds = (jax.sharding.AxisType.Explicit,) * len(mesh.axis_names)
        mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    strategy = mp.fsdp(min_bytes=0) | mp.Rules(inputs={"bias": mp.replicated})
    state = mp.init_state(MODEL, optax.sgd(0.1), mesh=mesh, strategy=strategy, key=0)
    evaluate, step = mp.eval_step(with_bias), mp.train_step(with_bias)
    rng = np.random.default_rng(0)
    x, bias = rng.normal(size=(16, 4)).astype(np.float32), rng.normal(size=8).astype(np.float32)
    expected = float(evaluate(state, {"x": x, "bias": bias})["loss"])
    out = state.bound()(x)
    half = jax.make_mesh((4,), ("half",), devices=jax.devices()[4:])
    for sharding in (
        NamedSharding(mesh, P()),
        NamedSharding(mesh, P(None, "data")),
        NamedSharding(mp.MeshSpec(data=8).build(), P("data")),
        NamedSharding(half, P("half")),
        jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    ):
        array = jax.device_put(x, sharding)
        for batch in (
            {"x": array, "bias": bias},
            {"x": x, "bias": jax.device_put(bias, NamedSharding(mesh, P("fsdp")))},
        ):
            assert float(evaluate(state, batch)["loss"]) == pytest.approx(expected, rel=1e-6)
        if sharding.device_set == set(jax.devices()) and sharding.mesh.axis_names == mesh.axis_names:
            np.testing.assert_allclose(state.bound()(array), out, rtol=1e-6)
    for array in (out, state.params["rows"], jax.device_put(state.params["rows"], NamedSharding(mesh, P()))):
        expected = float(evaluate(state, {"x": np.asarray(array), "bias": bias})["loss"])
        assert float(evaluate(state, {"x": array, "bias": bias})["loss"]) == pytest.approx(expected, rel=1e-6)
    replicated = {"x": jax.device_put(x, NamedSharding(mesh, P())), "bias": bias}
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), replicated
    )
    step.lower(state, like)
    _, metrics = step(state, replicated)
    assert float(metrics["loss"]) > 0


def test_batches_of_a_kind_are_checked_once(monkeypatch):
    mesh = mesh_of(mp.MeshSpec(fsdp=8))
    sharding, checked, check = batch_sharding(mesh, FSDP), [], StepBatch.of
    monkeypatch.setattr(StepBatch, "of", lambda x, *args: checked.append(x) or check(x, *args))
    batches = StepBatches(sharding, FSDP.activations, 1, "micro-steps")
    host = {"x": np.zeros((16, 4), np.float32), "y": None}
    devices = {"x": mp.shard_batch(host["x"], mesh, FSDP), "y": None}
    replicated = {"x": jax.device_put(host["x"], NamedSharding(mesh, P())), "y": None}
    kinds = [host, devices, {"x": host["x"].astype(np.int8), "y": None}, {"x": host["x"][:8], "y": None}, host["x"]]
    for batch in kinds * 2:
        result, expected = batches.of(batch), check(batch, sharding, FSDP.activations)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        assert all(x is y for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True))
    assert len(checked) == len(kinds)
    for batch in [replicated, {"x": host["x"], "y": np.float32(1)}] * 2:  # leaves that are converted in each step
        result = batches.of(batch)
        assert result.examples["x"] is host["x"] or result.examples["x"].sharding == sharding
    assert len(checked) == len(kinds) + 4
