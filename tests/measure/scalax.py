"""A training step of meshpar's decoder beside a plain Flax one that scalax shards: time and bytes on the wire.

    python -m tests.measure.scalax --rounds 40        # on 8 host devices; scalax is in the extra `notebooks`

Both have 4 layers of width 256 with the same parameters by path and shape, float32, Adam, and keep what their matmuls
with weights gave. scalax's is `tests.measure.plain`: parameters by its rules, activations held to the batch's rows
where each block begins. meshpar's is as it ships: blockwise attention, a look whether loss and gradients are finite,
with norm scales whole on every device as scalax's rules have them: `fsdp` would split and gather these, too, 0.02 MB a
step. What then is left over at fsdp=8 are 70 bytes: the norm that is reported, and the accuracy.
Steps run in turn; each figure is the median over the rounds of meshpar's processor seconds over scalax's, with its
quartiles.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before jax is imported
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.bench.timing import quartiles
from meshpar.inspect.census import census
from meshpar.inspect.program import compile_here
from meshpar.models import TransformerConfig, next_token_loss
from tests.measure import plain

CONFIG = TransformerConfig(
    vocab_size=512, num_layers=4, embed_dim=256, num_heads=8, num_kv_heads=4, head_dim=32, mlp_dim=768
)
ROWS, SEQ = 16, 128
CASES = {"fsdp=8": {"fsdp": 8}, "fsdp=4,tensor=2": {"fsdp": 4, "tensor": 2}}
BY_PATH = (
    ("embed/embedding", P("tensor", "fsdp")),
    ("head/kernel", P("fsdp", "tensor")),
    ("layers/attention/(query|key|value)/kernel", P(None, "fsdp", "tensor")),
    ("layers/attention/out/kernel", P(None, "tensor", None, "fsdp")),
    ("layers/mlp/(gate|up)/kernel", P(None, "fsdp", "tensor")),
    ("layers/mlp/down/kernel", P(None, "tensor", "fsdp")),
    (".*", P()),
)


class Held(plain.Block):
    """A block whose activations a user of scalax holds to the batch's rows."""

    def __call__(self, x_BTE: jax.Array, angles_TF: jax.Array) -> jax.Array:
        from scalax.sharding import with_sharding_constraint

        return super().__call__(with_sharding_constraint(x_BTE, P("fsdp")), angles_TF)


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def by_scalax(sizes: dict[str, int], batch: dict[str, np.ndarray]) -> tuple[Callable[[], Any], Any]:
    """(runs a step and gives the loss, the lowered step)."""
    from scalax.sharding import MeshShardingHelper, TreePathShardingRule

    helper = MeshShardingHelper([sizes["fsdp"], sizes.get("tensor", 1)], ["fsdp", "tensor"])
    rule, tx = TreePathShardingRule(*BY_PATH), optimizer()
    plain.Block = Held  # type: ignore[misc]

    def make() -> plain.Decoder:
        return plain.Decoder(CONFIG, jnp.float32, rngs=nnx.Rngs(0))

    graph, abstract = nnx.split(nnx.eval_shape(make))

    def init() -> Any:
        params = nnx.state(make()).to_pure_dict()
        return params, tx.init(params)

    def loss(params: Any, batch: Any) -> jax.Array:
        state = jax.tree.map(lambda x: x, abstract)
        nnx.replace_by_pure_dict(state, params)
        return plain.loss(nnx.merge(graph, state), batch)

    def update(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads = helper.with_sharding_constraint(grads, rule)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    step = helper.sjit(
        update, in_shardings=(rule, rule, P("fsdp")), out_shardings=(rule, rule, P()), donate_argnums=(0, 1)
    )
    held = helper.sjit(init, out_shardings=(rule, rule))()

    def run() -> Any:
        nonlocal held
        *held, value = step(*held, batch)
        return value

    return run, step.lower(*held, batch)


def by_meshpar(sizes: dict[str, int], batch: dict[str, np.ndarray]) -> tuple[Callable[[], Any], Any]:
    mesh = mp.MeshSpec(**sizes).build()
    strategy = mp.fsdp() | mp.tensor_parallel() if "tensor" in sizes else mp.fsdp()
    strategy |= mp.Rules(paths={".*/scale": mp.replicated})  # as scalax's rules keep them
    state = mp.init_state(CONFIG.build(), optimizer(), mesh=mesh, strategy=strategy, key=0)
    step = mp.train_step(next_token_loss, remat="dots")

    def run() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return run, step.lower(state, batch)


def sent(lowered: Any, sizes: dict[str, int]) -> float:
    """Bytes that a device sends in a step."""
    return sum(one.bytes_sent_per_step for one in census(compile_here(lowered).module, sizes))


def seconds_of(run: Callable[[], Any]) -> float:
    """Processor time of this process, whose threads all devices are."""
    start = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - start


def compared(sizes: dict[str, int], rounds: int) -> str:
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, SEQ + 1), dtype=np.int32)
    mesh = mp.MeshSpec(**sizes).build()
    given = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch = jax.device_put(given, jax.NamedSharding(mesh, P("fsdp")))
    (ours, our_program), (theirs, their_program) = (make(sizes, batch) for make in (by_meshpar, by_scalax))
    first = float(ours()), float(theirs())
    if not np.isclose(*first, rtol=0.05):  # begun at random, both near the logarithm of the vocabulary
        raise SystemExit(f"they are not the same model: losses {first}")
    ratios = []
    for index in range(rounds):
        order = (ours, theirs) if index % 2 else (theirs, ours)
        taken = {run: seconds_of(run) for run in order}
        ratios.append(taken[ours] / taken[theirs])
    low, median, high = quartiles(ratios)
    nbytes = [sent(program, sizes) / 1e6 for program in (our_program, their_program)]
    taken_by = f"{median:.3f} ({low:.3f} to {high:.3f}) of scalax's time"
    return f"{taken_by}, {nbytes[0]:.2f} MB sent, scalax {nbytes[1]:.2f} MB"


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked.add_argument("--rounds", type=int, default=40)
    rounds = asked.parse_args().rounds
    for name, sizes in CASES.items():
        print(f"{name:16} {compared(sizes, rounds)}", flush=True)


if __name__ == "__main__":
    main()
