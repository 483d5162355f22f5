"""explain of functions that are not training steps."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.inspect.target import missing_aot
from tests.errors import raises

MESH = mp.MeshSpec(data=2, tensor=4).build()
OTHER = mp.MeshSpec(data=8).build()


def shaped(*shape: int, dtype=np.float32, spec: P | None = None, mesh=MESH) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=None if spec is None else NamedSharding(mesh, spec))


def sent(report) -> dict[tuple[str, ...], float]:
    return {
        (item.collective.logical_kind, *item.collective.axes): item.collective.bytes_sent_per_step
        for item in report.collectives
    }


EINSUMS = {
    # A contracted dim that is sharded leaves partial sums of the local [32, 512] result.
    "contracted": (P("data", "tensor"), P("tensor"), P("data"), {("all-reduce", "tensor"): 2 * 3 / 4 * 32 * 512 * 4}),
    "columns": (P("data"), P(None, "tensor"), P("data", "tensor"), {}),
}


def test_explain_function_counts_gathers_of_weights():
    spec, matmul = P("data"), jax.jit(jnp.matmul, out_shardings=NamedSharding(OTHER, P("data")))
    x, w = shaped(4096, 256, spec=spec, mesh=OTHER), shaped(256, 512, spec=spec, mesh=OTHER)
    assert sent(mp.explain(matmul, x, w)) == {("all-gather", "data"): 7 / 8 * 256 * 512 * 4}


@pytest.mark.parametrize(("x_spec", "w_spec", "out_spec", "expected"), EINSUMS.values(), ids=EINSUMS)
def test_explain_function_counts_bytes(x_spec, w_spec, out_spec, expected):
    matmul = jax.jit(lambda x, w: jnp.einsum("bd,df->bf", x, w), out_shardings=NamedSharding(MESH, out_spec))
    report = mp.explain(matmul, shaped(64, 256, spec=x_spec), shaped(256, 512, spec=w_spec))
    assert sent(report) == expected
    assert report.compute.model_flops_per_device == 2 * 64 * 256 * 512 / 8
    assert json.loads(json.dumps(report.to_json()))["totals"].keys() == {axis for _, axis in expected}


def test_explain_function_reads_in_shardings():
    x, w = np.ones((64, 256), np.float32), {"kernel": np.ones((256, 512), np.float32)}
    shardings = NamedSharding(MESH, P("data", "tensor")), {"kernel": NamedSharding(MESH, P("tensor", None))}
    report = mp.explain(lambda x, w: x @ w["kernel"], x, w, in_shardings=shardings)
    assert ("all-reduce", "tensor") in sent(report)
    assert report.mesh["tensor"] == 4
    (collective,) = (item.collective for item in report.collectives)
    assert "test_function.py" in collective.source
    assert "per call" in str(report)
    assert "<lambda>" in report._repr_html_().replace("&lt;", "<").replace("&gt;", ">")


def test_explain_function_reads_shardings_inside_of_it():
    def mean(x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P("data")))
        return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P())) * 2

    assert ("all-gather", "data") in sent(mp.explain(mean, shaped(64, 256)))

    def summed(x):
        return jax.lax.psum(x, "tensor")

    mapped = jax.shard_map(summed, mesh=MESH, in_specs=P("tensor"), out_specs=P())
    report = mp.explain(mapped, shaped(64, 256))
    assert ("all-reduce", "tensor") in sent(report)
    assert report.collectives[0].collective.origin == "kernel"


def test_explain_function_without_shardings_is_on_one_device():
    report = mp.explain(jnp.sin, shaped(8))
    assert (report.devices, report.collectives) == (1, ())
    assert report.memory.peak_bytes == 64


def test_explain_function_finds_loop_invariant_collectives():
    weights, x = shaped(256, 256, spec=P("tensor", None)), shaped(64, 256, spec=P("data", None))

    def repeated(x, w):
        def body(x, _):
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(w * 2, NamedSharding(MESH, P()))), None

        return jax.lax.scan(body, x, length=5)[0]

    report = mp.explain(repeated, x, weights)
    assert {item.collective.count_per_step for item in report.collectives} <= {1, 5}


ABSTRACT = mp.MeshSpec(data=2, tensor=4).abstract()
INVALID = {
    "two meshes": ((shaped(8, spec=P("data")), shaped(8, spec=P("data"), mesh=OTHER)), {}, "conflict", "explain"),
    "abstract mesh": ((shaped(8, spec=P("data"), mesh=ABSTRACT),), {}, "conflict", "explain"),
    "specs": ((shaped(8),), {"in_shardings": (P("data"),)}, "wrong-type", "explain"),
    "too many shardings": (
        (shaped(8),),
        {"in_shardings": (NamedSharding(MESH, P()),) * 2},
        "wrong-shape",
        "explain",
    ),
}


@pytest.mark.parametrize(("args", "options", "code", "where"), INVALID.values(), ids=INVALID)
def test_explain_function_refuses_invalid_arguments(args, options, code, where):
    with raises(code, where):
        mp.explain(lambda *xs: xs, *args, **options)


def test_explain_refuses_other_objects():
    for value in (3, "step", None):
        with raises("wrong-type", "explain"):
            mp.explain(value, shaped(8))


@pytest.mark.skipif(
    bool(missing_aot()), reason=f"targets GPUs, which needs `pip install meshpar[aot]`: {missing_aot()}"
)
def test_explain_function_checks_the_number_of_gpus():
    with raises("conflict", "h100:1x4"):
        mp.explain(jnp.sin, shaped(8, spec=P("data"), mesh=ABSTRACT), cluster="h100:1x4")
    with raises("conflict", "h100:1x4"):
        mp.explain(jnp.sin, shaped(8), cluster="h100:1x4")


@pytest.mark.pod
def test_explain_function_for_a_cluster():
    def mlp(params, x):
        def layer(x, w):
            return jax.nn.relu(x @ w[0]) @ w[1], None

        return jax.lax.scan(layer, x, params)[0]

    params = (
        shaped(4, 1024, 4096, dtype=jnp.bfloat16, spec=P(None, None, "tensor"), mesh=ABSTRACT),
        shaped(4, 4096, 1024, dtype=jnp.bfloat16, spec=P(None, "tensor", None), mesh=ABSTRACT),
    )
    x = shaped(2048, 1024, dtype=jnp.bfloat16, spec=P("data"), mesh=ABSTRACT)
    report = mp.explain(mlp, params, x, cluster="h100:1x8")
    # Each of four layers all-reduces its local [1024, 1024] output in bfloat16 over four ranks.
    assert sent(report) == {("all-reduce", "tensor"): 4 * 2 * 3 / 4 * 1024 * 1024 * 2}
    assert report.memory.fits
    assert report.compute.predicted_step_s > 0
    assert report.compute.ratio == pytest.approx(1)
    assert report.collectives[0].crosses_node is False
