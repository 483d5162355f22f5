"""The programs whose compiled text is kept as test data, and the script that renews it.

    python tests/inspect/programs.py          # once with each supported jax; needs the `aot` extra

Files are named `<program>.<cpu|cuda>.jax<major>.<minor>.hlo.gz`. They contain no paths of the machine that made them.
"""

from __future__ import annotations

import gzip
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":  # under pytest the environment is conftest's
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

DATA = Path(__file__).parent / "data"
MESHES = {"kernels": {"data": 2, "tensor": 4}, "scan": {"fsdp": 4, "tensor": 2}}
LAYERS, BATCH, EMBED, HIDDEN, RECEIVED = 4, 64, 32, 64, 16


def abstract_mesh(program: str) -> AbstractMesh:
    """The mesh of a program, without devices."""
    axes = MESHES[program]
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def scan(mesh) -> jax.stages.Traced:
    """A scanned two-matmul block with its gradient, FSDP on one axis and tensor parallelism on the other."""

    def sharded(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    def pin(x, *spec):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def layer(h, weights):
        up, down = weights
        with jax.named_scope("mlp"):
            return h + pin(jax.nn.relu(pin(h, "fsdp") @ up) @ down, "fsdp"), None

    def loss(weights, x):
        with jax.named_scope("decoder"):
            h, _ = lax.scan(layer, x, weights)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return value, jax.tree.map(lambda w, g: w - g, weights, grads)

    weights = (
        sharded((LAYERS, EMBED, HIDDEN), None, "fsdp", "tensor"),
        sharded((LAYERS, HIDDEN, EMBED), None, "tensor", "fsdp"),
    )
    outputs = (NamedSharding(mesh, P()), jax.tree.map(lambda w: w.sharding, weights))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=outputs)
    return jitted.trace(weights, sharded((BATCH, EMBED), "fsdp"))


def kernels(mesh, *, on_cuda: bool = True) -> jax.stages.Traced:
    """Every collective that can be written by hand, at the top, in a loop of five and in a branch.

    XLA:CPU has no ragged-all-to-all and jax no collective-broadcast for it: `on_cuda=False` leaves them out.
    """

    def ring(axis):
        size = mesh.shape[axis]
        return [(i, (i + 1) % size) for i in range(size)]

    def body(x):  # x: one device's [32, 16]
        results = [
            lax.psum(x, "tensor"),
            lax.all_gather(x, "tensor", tiled=True),
            lax.psum_scatter(x * 2, "data", tiled=True),
            lax.all_to_all(x, "tensor", split_axis=1, concat_axis=1, tiled=True),
            lax.ppermute(x, "tensor", ring("tensor")),
            lax.pmax(x, ("data", "tensor")),
            lax.fori_loop(0, 5, lambda _, h: lax.ppermute(h, "data", ring("data")) * 2, x),
            lax.cond(x.sum() > 0, lambda h: lax.psum(h, "data"), lambda h: lax.psum(h * 3, "data"), x),
        ]
        if on_cuda:
            eighths = jnp.full((4,), 8, jnp.int32)
            places = jnp.arange(4, dtype=jnp.int32) * 8
            room = lax.pcast(jnp.zeros((RECEIVED, 16)), ("data", "tensor"), to="varying")
            results.append(lax.ragged_all_to_all(x, room, places, eighths, places, eighths, axis_name="tensor"))
            results.append(lax.pbroadcast(x, ("tensor",), 1))
        return x + sum(jnp.sum(result) for result in results)

    def step(x):
        with jax.named_scope("hand"):
            return jax.shard_map(body, mesh=mesh, in_specs=P("data", "tensor"), out_specs=P("data", "tensor"))(x)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P("data", "tensor")))
    return jax.jit(step).trace(x)


PROGRAMS: dict[str, Callable[..., jax.stages.Traced]] = {"scan": scan, "kernels": kernels}


def saved(program: str, platform: str) -> dict[str, str]:
    """The kept texts of a program, by jax version."""
    files = sorted(DATA.glob(f"{program}.{platform}.*.hlo.gz"))
    return {
        file.name.split(".", 2)[2].removesuffix(".hlo.gz"): gzip.decompress(file.read_bytes()).decode()
        for file in files
    }


def without_paths(text: str) -> str:
    """The text with the paths of this machine made relative."""
    here = str(Path(__file__).parents[2]) + os.sep
    return re.sub(r"\"/[^\"\n]*?/(?=site-packages/|lib/python)", '"', text.replace(here, ""))


def _renew() -> None:
    from meshpar.inspect.pod import PodProcess
    from meshpar.inspect.program import compile_here

    version = "jax" + ".".join(jax.__version__.split(".")[:2])
    with PodProcess() as pod:
        for name, build in PROGRAMS.items():
            axes = MESHES[name]
            here = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
            for_cpu = {"on_cuda": False} if name == "kernels" else {}
            texts = {
                "cpu": compile_here(build(here, **for_cpu)).text,
                "cuda": pod.compile(build(abstract_mesh(name)), "h100:1x8").text,
            }
            for platform, text in texts.items():
                file = DATA / f"{name}.{platform}.{version}.hlo.gz"
                file.write_bytes(gzip.compress(without_paths(text).encode(), 9, mtime=0))
                print(file.name, len(text), file.stat().st_size)


if __name__ == "__main__":
    _renew()
