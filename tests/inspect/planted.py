"""Programs with a costly mistake each, and a small decoder under each strategy.

Each builder returns a `Plant`: a step, and the lint finding that it must cause. If `rule` is empty, the mistake causes
only unexpected collectives.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.parallel.execution import Execution
from meshpar.parallel.strategy import Strategy
from meshpar.sharding.adapters.model import Model
from meshpar.training.state import TrainState

LAYERS, VOCAB, EMBED, MLP, ROWS, SEQ, HEADS = 4, 512, 256, 512, 16, 64, 8
BF16 = mp.Precision(compute="bfloat16")
NAMES = {
    "embed": ("vocab", "embed"),
    "layers/up": ("layers", "embed", "mlp"),
    "layers/down": ("layers", "mlp", "embed"),
    "head": ("embed", "vocab"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plant:
    """A step with a mistake."""

    model: Model
    strategy: Strategy
    mesh: AbstractMesh | Mesh
    step: mp.TrainStep
    batch: dict[str, jax.ShapeDtypeStruct]
    rule: str = ""
    """Rule of the only lint finding. Empty if there is no finding."""
    module: str = ""
    """Module path of the mistake."""
    cluster: str = "h100:1x8"

    @functools.cached_property
    def state(self) -> TrainState:
        """Return the abstract state."""
        return mp.abstract_state(self.model, optax.adam(1e-3), mesh=self.mesh, strategy=self.strategy)

    @property
    def execution(self) -> Execution:
        """Return the description of the step."""
        return self.step.describe(self.state, self.batch)

    @property
    def on_cpu(self) -> Plant:
        """Return the plant on the CPU devices of this process."""
        sizes = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))
        return dataclasses.replace(self, mesh=mp.MeshSpec(**sizes, inside_node=()).build())


def init(key: jax.Array) -> dict[str, Any]:
    """Parameters of a decoder of MLP blocks."""
    keys = iter(jax.random.split(key, 4))
    draw = lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])  # noqa: E731
    return {
        "embed": draw(VOCAB, EMBED),
        "layers": {"up": draw(LAYERS, EMBED, MLP), "down": draw(LAYERS, MLP, EMBED)},
        "head": draw(EMBED, VOCAB),
    }


def mlp(x, w):
    """Apply a layer: [B T E] -> [B T E]."""
    with jax.named_scope("mlp"):
        h = mp.constrain(jax.nn.relu(x @ w["up"]), "batch", "seq", "act_mlp")
        return x + mp.constrain(h @ w["down"], "batch", "seq", "act_embed")


def decoder(params, tokens, layer=mlp, before=lambda x: x):
    """Return logits [B T V], with a scan of `layer`."""
    with jax.named_scope("embed"):
        rows = jax.nn.one_hot(tokens, VOCAB, dtype=params["embed"].dtype)
        x = mp.constrain(rows @ params["embed"], "batch", "seq", "act_embed")
    x = before(x)
    with jax.named_scope("layers"):
        x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
    with jax.named_scope("head"):
        return mp.constrain(x @ params["head"], "batch", "seq", "act_vocab")


def loss_of(model, batch, key):
    """Mean squared logit distance from the targets' one-hot vectors."""
    logits = model(batch["inputs"])
    with jax.named_scope("loss"):
        wrong = logits.astype(jnp.float32) - jax.nn.one_hot(batch["targets"], VOCAB)
        return jnp.mean(wrong * wrong), {}


def plant(
    rule: str = "",
    module: str = "",
    *,
    layer=mlp,
    apply=None,
    loss=loss_of,
    strategy=None,
    init=init,
    names=NAMES,
    precision=BF16,
    cluster="h100:1x8",
    **axes,
) -> Plant:
    """Return a plant in this decoder."""
    return Plant(
        model=mp.from_functions(init, apply or (lambda params, tokens: decoder(params, tokens, layer)), names=names),
        strategy=strategy or mp.fsdp(),
        mesh=mp.MeshSpec(**(axes or {"fsdp": 8}), inside_node=()).abstract(),
        step=mp.train_step(loss, precision=precision),
        batch=batch(),
        rule=rule,
        module=module,
        cluster=cluster,
    )


def batch() -> dict[str, jax.ShapeDtypeStruct]:
    """Return tokens and their targets."""
    return {name: jax.ShapeDtypeStruct((ROWS, SEQ), np.int32) for name in ("inputs", "targets")}


def nothing() -> Plant:
    """Return the decoder without a mistake."""
    return plant()


def gathered_activation() -> Plant:
    """Permute examples by indices that are known at run time only, so that each example is sent to all devices."""

    def layer(x, w):
        with jax.named_scope("order"):
            x = x[jnp.argsort(x[:, 0, 0])]
        return mlp(x, w)

    return plant("whole-batch", "gradients/layers/order", layer=layer)


def whole_batch() -> Plant:
    """Replicate the residual stream with a constraint without names, so that all devices repeat the same work."""

    def layer(x, w):
        with jax.named_scope("mlp"):
            x = mp.constrain(x, None, None, None)
            h = jax.nn.relu(x @ w["up"])
            return x + mp.constrain(h @ w["down"], None, None, None)

    return plant("whole-batch", "gradients/layers/mlp", layer=layer)


def reshaped_batch() -> Plant:
    """Divide the batch into micro-steps with a reshape, so that each micro-step has examples of a few devices."""

    def loss(model, batch, key):
        micro = jax.tree.map(lambda x: x.reshape(2, ROWS // 2, SEQ), batch)
        with jax.named_scope("micro_steps"):
            losses = lax.map(lambda rows: loss_of(model, rows, key)[0], micro)
        return losses.mean(), {}

    return plant("rows-moved", "gradients/micro_steps", loss=loss, strategy=mp.ddp(), data=8)


def names_in_wrong_order() -> Plant:
    """Swap `seq` and `batch`: examples are gathered, and the sequence is sharded instead."""

    def layer(x, w):
        with jax.named_scope("mlp"):
            h = mp.constrain(jax.nn.relu(x @ w["up"]), "seq", "batch", "act_mlp")
            return x + mp.constrain(h @ w["down"], "batch", "seq", "act_embed")

    return plant(module="gradients/layers/mlp", layer=layer)


def wrong_name() -> Plant:
    """Use the name of the hidden layer for the residual stream, which shards it over `tensor`."""

    def layer(x, w):
        with jax.named_scope("mlp"):
            h = mp.constrain(jax.nn.relu(x @ w["up"]), "batch", "seq", "act_mlp")
            return x + mp.constrain(h @ w["down"], "batch", "seq", "act_mlp")

    return plant(module="gradients/layers/mlp", layer=layer, strategy=mp.ddp() | mp.tensor_parallel(), data=2, tensor=4)


def float32_weights() -> Plant:
    """Cast the weights of a layer after the constraint that gathers them."""

    def layer(x, w):
        with jax.named_scope("mlp"):
            up, down = (mp.constrain(w[key], None, None).astype(jnp.bfloat16) for key in ("up", "down"))
            h = mp.constrain(jax.nn.relu(x @ up), "batch", "seq", "act_mlp")
            return x + mp.constrain(h @ down, "batch", "seq", "act_embed")

    def apply(params, tokens):
        tables = {key: params[key].astype(jnp.bfloat16) for key in ("embed", "head")}
        return decoder({**params, **tables}, tokens, layer)

    return plant("float32-on-the-wire", "gradients/layers/mlp", apply=apply, precision=mp.Precision())


def replicated_embedding() -> Plant:
    """Replicate the embedding with a path rule."""
    rules = mp.Rules(paths={"embed": mp.replicated})
    strategy = mp.fsdp() | mp.custom(params=rules, grads=rules, optimizer=rules)
    return plant("replicated", "embed", strategy=strategy.replace(big_leaf_bytes=2**18))


def loop_invariant_gather() -> Plant:
    """Apply a layer four times, which gathers its weights four times."""

    def apply(params, tokens):
        shared = jax.tree.map(lambda w: w[0], params["layers"])
        return decoder(params, tokens, lambda x, _: mlp(x, shared))

    return plant("loop-invariant", "gradients/layers/mlp", apply=apply)


def sliced_all_reduce() -> Plant:
    """All-reduce full arrays in a kernel, of which each device keeps a shard, in reverse order."""
    mesh = mp.MeshSpec(fsdp=8).abstract()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)
    def exchange(x):
        whole = lax.psum(x.reshape(-1, EMBED), "fsdp")
        rows = whole.shape[0] // 8
        part = lax.dynamic_slice_in_dim(whole, (7 - lax.axis_index("fsdp")) * rows, rows)
        return x + part.reshape(x.shape[0], -1, EMBED).mean(1, keepdims=True)

    def layer(x, w):
        with jax.named_scope("kernel"):
            x = exchange(x)
        return mlp(x, w)

    return plant("sliced-all-reduce", "gradients/layers/kernel", layer=layer)


def tensor_over_nodes() -> Plant:
    """Use tensor parallelism over eight GPUs on nodes with four GPUs."""
    return plant(
        "slow-axis", "gradients/layers/mlp", strategy=mp.ddp() | mp.tensor_parallel(), cluster="h100:2x4", tensor=8
    )


def flipped_split() -> Plant:
    """Exchange the dims of two mesh axes, for which the partitioner gathers the full array."""
    mesh = mp.MeshSpec(data=2, tensor=4).abstract()

    def flip(x):
        with jax.named_scope("flip"):
            x = lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", None, "tensor")))
            x = lax.with_sharding_constraint(jnp.tanh(x), NamedSharding(mesh, P(None, ("tensor", "data"), None)))
            return mp.constrain(x, "batch", "seq", "act_embed")

    return plant(
        "rematerialization",
        "gradients/flip",
        apply=lambda params, tokens: decoder(params, tokens, before=flip),
        strategy=mp.ddp() | mp.tensor_parallel(),
        data=2,
        tensor=4,
    )


def whole_heads() -> Plant:
    """Leave the heads of attention without a name, so that each device of `tensor` computes all heads."""

    def layer(x, w):
        with jax.named_scope("attention"):
            q = mp.constrain(x @ w["query"], "batch", "seq", None).reshape(ROWS, SEQ, HEADS, EMBED // HEADS)
            shares = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, q))
            heads = mp.constrain(jnp.einsum("bhts,bshd->bthd", shares, q), "batch", "seq", None, None)
            x = x + mp.constrain(heads.reshape(x.shape) @ w["out"], "batch", "seq", "act_embed")
        return mlp(x, w)

    def with_heads(key):
        params, square = init(key), jnp.zeros((LAYERS, EMBED, EMBED))
        return params | {"layers": params["layers"] | {"query": square, "out": square}}

    names = {"layers/query": ("layers", "embed", "heads"), "layers/out": ("layers", "heads", "embed")}
    return plant(
        module="gradients/layers/attention",
        layer=layer,
        init=with_heads,
        names=NAMES | names,
        strategy=mp.ddp() | mp.tensor_parallel(),
        data=2,
        tensor=4,
    )


def idle_axis() -> Plant:
    """Shard nothing over `tensor`, so that its devices repeat the same work."""
    return plant("idle-axis", fsdp=4, tensor=2)


PLANTS = {
    plant.__name__: plant
    for plant in (
        *(nothing, gathered_activation, whole_batch, reshaped_batch, names_in_wrong_order, wrong_name, float32_weights),
        *(replicated_embedding, loop_invariant_gather, sliced_all_reduce, tensor_over_nodes, flipped_split),
        *(whole_heads, idle_axis),
    )
}
"""Builders of programs with a mistake, by name."""

REFERENCE = {
    "ddp": (mp.ddp(), {"data": 8}),
    "zero1": (mp.zero1(), {"fsdp": 8}),
    "zero2": (mp.zero2(), {"fsdp": 8}),
    "zero3": (mp.zero3(), {"fsdp": 8}),
    "hsdp": (mp.hsdp(), {"data": 2, "fsdp": 4}),
    "tensor": (mp.ddp() | mp.tensor_parallel(), {"tensor": 8}),
    "sequence": (mp.ddp() | mp.tensor_parallel(sequence=True), {"tensor": 8}),
    "fsdp_tensor": (mp.fsdp() | mp.tensor_parallel(), {"fsdp": 4, "tensor": 2}),
    "fsdp_sequence": (mp.fsdp() | mp.tensor_parallel(sequence=True), {"fsdp": 4, "tensor": 2}),
    "data_tensor": (mp.ddp() | mp.tensor_parallel(), {"data": 4, "tensor": 2}),
    "two_axes": (mp.fsdp(axis=("data", "fsdp")), {"data": 2, "fsdp": 4}),
}
"""Strategies and their meshes, by name."""

KERNELS = {
    "context": (mp.ddp() | mp.context_parallel(), {"context": 8}),
    "context_fsdp": (mp.fsdp(axis=("fsdp", "context")) | mp.context_parallel(), {"fsdp": 2, "context": 4}),
    "context_apart": (mp.fsdp() | mp.context_parallel(), {"fsdp": 4, "context": 2}),
    "context_sequence": (
        mp.ddp() | mp.tensor_parallel(sequence=True) | mp.context_parallel(),
        {"context": 4, "tensor": 2},
    ),
    "heads": (mp.ddp() | mp.context_parallel(kind="all-to-all"), {"context": 8}),
    "heads_fsdp": (
        mp.fsdp(axis=("fsdp", "context")) | mp.context_parallel(kind="all-to-all"),
        {"fsdp": 2, "context": 4},
    ),
    "heads_sequence": (
        mp.ddp() | mp.tensor_parallel(sequence=True) | mp.context_parallel(kind="all-to-all"),
        {"context": 4, "tensor": 2},
    ),
    "overlapped": (mp.ddp() | mp.tensor_parallel(sequence=True), {"tensor": 8}),
    "quantized": (mp.fsdp(quantize="int8"), {"fsdp": 8}),
    "int8": (mp.fsdp(quantize="int8"), {"data": 2, "fsdp": 4}),
    "gradients_int8": (mp.fsdp(quantize={"weights": None}), {"data": 2, "fsdp": 4}),
    "second_shard": (mp.fsdp(axis=("data", "fsdp"), quantize={"secondary": "fsdp"}), {"data": 2, "fsdp": 4}),
    "fp8_tensor": (mp.fsdp(quantize="fp8") | mp.tensor_parallel(), {"fsdp": 4, "tensor": 2}),
}
"""Strategies that use kernels of `meshpar.collectives`."""

CONFIG = TransformerConfig(
    vocab_size=80, num_layers=4, embed_dim=256, num_heads=8, num_kv_heads=8, head_dim=32, mlp_dim=768
)


def reference(name: str, **options) -> Plant:
    """Return the small decoder under a strategy, without a mistake."""
    strategy, axes = {**REFERENCE, **KERNELS}[name]
    config = dataclasses.replace(CONFIG, tensor_matmul="overlapped") if name == "overlapped" else CONFIG
    return Plant(
        model=config.build(),
        strategy=strategy,
        mesh=mp.MeshSpec(**axes).abstract(),
        step=mp.train_step(next_token_loss, **{"precision": BF16, **options}),
        batch=batch(),
    )
