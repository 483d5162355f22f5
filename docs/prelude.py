import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshpar as mp


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def loss_fn(model, batch, key):
    errors = jnp.square(model(batch["x"]) - batch["y"])
    return mp.MeanLoss(errors.sum(), errors.size), {}


mesh = mp.MeshSpec(fsdp=4, tensor=2).build()
by_path = mp.Rules(paths={r"up/kernel": mp.names("embed", "mlp"), r"down/kernel": mp.names("mlp", "embed")})
strategy = mp.fsdp() | mp.tensor_parallel() | by_path
model = mp.from_nnx(lambda rngs: Mlp(rngs))
state = mp.init_state(model, optax.adam(1e-3), mesh=mesh, strategy=strategy, key=0)
batch = {"x": np.ones((16, 8), np.float32), "y": np.zeros((16, 8), np.float32)}
