"""Training script with flax, optax and orbax alone, to which `meshpar train recipes/gpt_stdlib.py` is compared.

    python tests/benchmarks/by_hand.py --steps 3 --out /tmp/by_hand
    python tests/benchmarks/by_hand.py --steps 3 --out /tmp/by_hand --valid-batches 32    # as many as the recipe

The decoder, data, batch, mesh (fsdp=4, tensor=2 on 8 host devices) and optimizer are those of the recipe. The script
prints the loss of each step, validates on request, and writes a checkpoint after the last step. It does not sample
text, draw plots, check input or resume.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

VOCAB, LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP = 256, 2, 128, 4, 2, 32, 384
BATCH, SEQ_LEN = 8, 256


def linear(inputs: int, outputs: int, names: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


def rotate(x_BTHD: jax.Array) -> jax.Array:
    half = x_BTHD.shape[-1] // 2
    angles_TD = jnp.arange(x_BTHD.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles_TD)[:, None], jnp.sin(angles_TD)[:, None]
    a, b = jnp.split(x_BTHD, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def by_example(x_BTE: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x_BTE, PartitionSpec("fsdp"))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm, self.mlp_norm = (nnx.RMSNorm(EMBED, rngs=rngs) for _ in range(2))
        self.query = linear(EMBED, HEADS * HEAD_DIM, ("fsdp", "tensor"), rngs)
        self.key, self.value = (linear(EMBED, KV_HEADS * HEAD_DIM, ("fsdp", "tensor"), rngs) for _ in range(2))
        self.out = linear(HEADS * HEAD_DIM, EMBED, ("tensor", "fsdp"), rngs)
        self.gate, self.up = (linear(EMBED, MLP, ("fsdp", "tensor"), rngs) for _ in range(2))
        self.down = linear(MLP, EMBED, ("tensor", "fsdp"), rngs)

    def __call__(self, x_BTE: jax.Array) -> jax.Array:
        h = self.attention_norm(x_BTE)
        query, key, value = (f(h).reshape(*h.shape[:2], -1, HEAD_DIM) for f in (self.query, self.key, self.value))
        attended = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x_BTE = by_example(x_BTE + self.out(attended.reshape(*h.shape[:2], -1)))
        h = self.mlp_norm(x_BTE)
        return by_example(x_BTE + self.down(nnx.silu(self.gate(h)) * self.up(h)))


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.normal(EMBED**-0.5), ("tensor", "fsdp"))
        self.embed = nnx.Embed(VOCAB, EMBED, embedding_init=init, rngs=rngs)
        stacked = nnx.vmap(Block, transform_metadata={nnx.PARTITION_NAME: None})
        self.layers = nnx.split_rngs(splits=LAYERS)(stacked)(rngs)
        self.final_norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.head = linear(EMBED, VOCAB, ("fsdp", "tensor"), rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        scan = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(self.final_norm(scan(by_example(self.embed(tokens_BT)), self.layers)))


def read_text() -> np.ndarray:
    """Return the source files of the standard library as bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    return np.frombuffer(b"\0".join(path.read_bytes() for path in files), np.uint8)


def save(folder: str | os.PathLike[str], state: Any, step: int = 0) -> None:
    """Write a checkpoint with orbax, and wait until it is on disk."""
    with ocp.CheckpointManager(Path(folder).absolute()) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))


def restore(folder: str | os.PathLike[str], like: Any, step: int = 0) -> Any:
    """Read a checkpoint with orbax into the shapes and shardings of `like`."""
    with ocp.CheckpointManager(Path(folder).absolute()) as manager:
        return jax.block_until_ready(manager.restore(step, args=ocp.args.StandardRestore(like)))


def make_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def make_step(mesh: jax.sharding.Mesh) -> tuple[Any, Any, Any, Any]:
    """Return parameters, optimizer state, `step(params, opt_state, batch)`, and the jitted loss `(params, batch)`.

    The mesh is set in jax's context.
    """
    schedule = optax.warmup_cosine_decay_schedule(0, 4e-3, 50, 1000, 4e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))

    def init(key: jax.Array) -> tuple[Any, Any]:
        with nnx.use_eager_sharding(False):
            params = nnx.state(Decoder(nnx.Rngs(key)), nnx.Param)
        return params, optimizer.init(params)

    def shard(x: Any) -> NamedSharding:
        return NamedSharding(mesh, x)

    key = jax.random.key(0)
    abstract = jax.eval_shape(init, key)
    shardings = jax.tree.map(shard, nnx.get_partition_spec(abstract), is_leaf=lambda x: isinstance(x, PartitionSpec))
    params, opt_state = jax.jit(init, out_shardings=shardings)(key)
    with nnx.use_eager_sharding(False):
        graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0))))

    def loss_fn(params: Any, batch_BT: jax.Array) -> jax.Array:
        logits_BTV = nnx.merge(graph, params)(batch_BT[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch_BT[:, 1:]).mean()

    def update(params: Any, opt_state: Any, batch_BT: jax.Array) -> tuple[Any, Any, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch_BT)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return optax.apply_updates(params, updates), opt_state, metrics

    step = jax.jit(update, donate_argnums=(0, 1), out_shardings=(*shardings, shard(PartitionSpec())))
    return params, opt_state, step, jax.jit(loss_fn)


def make_batch(text: np.ndarray, starts: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    batch = np.stack([text[start : start + SEQ_LEN + 1] for start in starts]).astype(np.int32)
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("fsdp")))


def train(steps: int, out: str, valid_batches: int) -> None:
    mesh = make_mesh()
    jax.set_mesh(mesh)
    params, opt_state, step, loss_fn = make_step(mesh)
    text, rng = read_text(), np.random.default_rng(0)
    text, held_out = np.split(text, [len(text) * 19 // 20])
    for number in range(1, steps + 1):
        batch = make_batch(text, rng.integers(0, len(text) - SEQ_LEN - 1, BATCH), mesh)
        params, opt_state, metrics = step(params, opt_state, batch)
        print(f"step {number}/{steps}  loss {metrics['loss']:.3f}", flush=True)
    starts = np.linspace(0, len(held_out) - SEQ_LEN - 1, valid_batches * BATCH, dtype=int).reshape(-1, BATCH)
    if losses := [loss_fn(params, make_batch(held_out, row, mesh)) for row in starts]:
        print(f"validation loss {np.mean(losses):.3f}")
    save(out, {"params": nnx.to_pure_dict(params), "opt_state": jax.tree.leaves(opt_state)}, steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", required=True, help="a new folder for the checkpoint")
    parser.add_argument("--valid-batches", type=int, default=0, help="batches of a validation after the last step")
    args = parser.parse_args()
    train(args.steps, args.out, args.valid_batches)
