"""Linen classifier of scikit-learn's handwritten digits (8×8 pixels).

    meshpar train recipes/digits_linen.py
    meshpar explain recipes/digits_linen.py --check     # each device sends 0.9 MB per step, as expected

Hardware: two CPU cores with 8 host devices (mesh fsdp=4, tensor=2). Training takes less than a minute, including
compilation, and reaches a validation accuracy of 98.7 %. Requires scikit-learn: pip install 'meshpar[recipes]'.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import meshpar as mp
from meshpar.data import ArrayData
from meshpar.sharding.adapters.model import Model

NUM_PIXELS, NUM_DIGITS = 64, 10


def dense(features: int, *names: str | None) -> nn.Dense:
    """Return a dense layer with logical names for the dims of its kernel."""
    kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
    bias = nn.with_logical_partitioning(nn.initializers.zeros_init(), names[-1:])
    return nn.Dense(features, kernel_init=kernel, bias_init=bias)


class Classifier(nn.Module):
    embed_dim: int
    mlp_dim: int
    num_layers: int

    @nn.compact
    def __call__(self, pixels):
        x = dense(self.embed_dim, None, "embed")(pixels)
        for _ in range(self.num_layers):
            h = nn.gelu(dense(self.mlp_dim, "embed", "mlp")(nn.RMSNorm()(x)))
            h = mp.constrain(h, "batch", "act_mlp")
            x = x + mp.constrain(dense(self.embed_dim, "mlp", "embed")(h), "batch", "act_embed")
        return dense(NUM_DIGITS, "embed", None)(nn.RMSNorm()(x))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    embed_dim: int = 128
    """Width of the residual stream."""
    mlp_dim: int = 256
    """Width of the hidden layers."""
    num_layers: int = 2
    """Number of hidden layers."""

    def build(self) -> Model:
        pixels = jax.ShapeDtypeStruct((48, NUM_PIXELS), jnp.float32)  # a batch size that common meshes divide
        return mp.from_linen(Classifier(**dataclasses.asdict(self)), pixels)


def digits() -> dict[str, np.ndarray]:
    from sklearn.datasets import load_digits

    dataset = load_digits()
    return {"pixels": (dataset.data / 16).astype(np.float32), "digit": dataset.target.astype(np.int32)}


def loss(model, batch, key):
    logits = model(batch["pixels"])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["digit"])
    return mp.MeanLoss(nats.sum(), nats.size), {"accuracy": (logits.argmax(-1) == batch["digit"]).mean()}


def recipe(devices: int = 8) -> mp.Recipe:
    # Mesh: tensor parallelism over pairs of devices, and fsdp over the largest power of two that divides the rest.
    tensor = 2 if devices % 2 == 0 else 1
    batch_shards = devices // tensor
    fsdp = batch_shards & -batch_shards
    mesh = mp.MeshSpec(data=batch_shards // fsdp, fsdp=fsdp, tensor=tensor)

    # Model.
    model = ClassifierConfig()

    # Strategy: shard "embed" over fsdp and "mlp" over tensor.
    strategy = mp.fsdp() | mp.tensor_parallel() if tensor > 1 else mp.fsdp()

    # Data: a fifth of the digits are for validation.
    data = ArrayData(arrays=digits, valid_fraction=0.2)

    # Optimizer.
    optimizer = mp.AdamW(lr=3e-3, warmup_steps=20, weight_decay=0.05)

    # Run.
    return mp.Recipe(
        name="digits_linen",
        mesh=mesh,
        strategy=strategy,
        model=model,
        loss=loss,
        data=data,
        optimizer=optimizer,
        steps=300,
        batch_size=-(-64 // batch_shards) * batch_shards,
        validate_every=100,
    )


if __name__ == "__main__":
    from meshpar.cli.main import train_this

    train_this(__file__)
