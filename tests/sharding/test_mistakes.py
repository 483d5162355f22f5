"""Frequent mistakes: each is an error before a loss is traced or a program compiled. mistakes.txt has the messages.

`python tests/sharding/test_mistakes.py` regenerates that file. Review the differences.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.parallel import parse_strategy
from meshpar.sharding.adapters.model import Model

if __name__ == "__main__":  # under pytest, conftest configures the devices
    jax.config.update("jax_platforms", "cpu")
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # read when jax creates the devices

MESH = mp.MeshSpec(fsdp=4, tensor=2).abstract()
TEXTS = Path(__file__).with_name("mistakes.txt")


def model(names: dict | None = None, **shapes: tuple[int, ...]) -> Model:
    """Return a model of plain arrays. `up_kernel=(8, 16)` has the path up/kernel."""
    nested: dict = {}
    for path, shape in shapes.items():
        outer, inner = path.split("_")
        nested.setdefault(outer, {})[inner] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return mp.from_functions(
        lambda key: jax.tree.map(lambda x: jnp.zeros(x.shape), nested), lambda params, x: x, names=names
    )


MLP = {"up_kernel": (8, 16), "down_kernel": (16, 8)}
NAMED = model({"up/kernel": ("embed", "mlp"), "down/kernel": ("mlp", "embed")}, **MLP)
PLAIN = model(**MLP)
BIG = {"w_kernel": (1024, 768)}
TP = mp.fsdp() | mp.tensor_parallel()
LINEAR = nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))  # a module without arrays


def lay_out(strategy, a_model=NAMED, mesh=MESH, **kwargs):
    return lambda: mp.shardings(a_model, mesh, strategy, **kwargs)


class TypoNNX(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.zeros, ("embed", "mpl"))
        self.up = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)


class Wide(nnx.Module):
    def __init__(self, width, *, rngs):
        self.up = nnx.Linear(8, width, rngs=rngs)


class TypoLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.zeros, ("embed", "mpl"))
        return nn.Dense(16, kernel_init=init, name="up")(x)


class Long(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.zeros, ("embed", "mlp", None))
        self.up = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)


# ---------------------------------------------------------------------------------------------------------------------
# Names, axes and sizes that do not match
# ---------------------------------------------------------------------------------------------------------------------

RULES: dict[str, Callable[[], Any]] = {
    "a typo in an NNX annotation": lay_out(TP, mp.from_nnx(lambda rngs: TypoNNX(rngs))),
    "a typo in a Linen annotation": lay_out(TP, mp.from_linen(TypoLinen(), np.zeros((2, 8)))),
    "an annotation with too many names": lay_out(TP, mp.from_nnx(lambda rngs: Long(rngs))),
    "a name without a rule": lay_out(mp.Rules(embed="fsdp")),
    "a rule for a name that no leaf has": lay_out(TP | mp.Rules(mpl="tensor")),
    "a typo in the mesh axis of a rule": lay_out(TP | mp.Rules(mlp="tensr")),
    "a tuple with an axis that the mesh lacks": lay_out(TP | mp.Rules(mlp=("tensor", "model"))),
    "an axis that the mesh lacks in a fallback": lay_out(TP | mp.Rules(mlp=mp.first("tenser", None))),
    "an axis that the mesh lacks in a path rule": lay_out(TP | mp.Rules(paths={"up/kernel": (None, "model")})),
    "a preset with an axis that the mesh lacks": lay_out(mp.fsdp(axis="fdsp", min_bytes=0), PLAIN),
    "tensor parallelism on a plain mesh without that axis": lay_out(TP, mesh=Mesh(np.array(jax.devices()), ("fsdp",))),
    "an indivisible dim": lay_out(TP, model({"up/kernel": ("embed", "mlp")}, up_kernel=(8, 33))),
    "a dim that the product of two axes does not divide": lay_out(
        mp.Rules(mlp=("fsdp", "tensor"), embed=None), model({"up/kernel": ("embed", "mlp")}, up_kernel=(8, 12))
    ),
    "a path rule for an indivisible dim": lay_out(
        mp.Rules(paths={"w/kernel": (None, "fsdp")}), model(w_kernel=(8, 10))
    ),
    "an axis for two names of a leaf": lay_out(mp.Rules(embed="fsdp", mlp="fsdp")),
    "an axis twice in a path rule": lay_out(TP | mp.Rules(paths={"up/kernel": ("fsdp", ("tensor", "fsdp"))})),
    "alternatives that do not divide": lay_out(TP | mp.Rules(mlp=mp.first("fsdp", ("tensor", "fsdp")))),
    "a pattern that matches no path": lay_out(TP | mp.Rules(paths={"up/kernle": ("fsdp",)})),
    "a pattern that matches only part of a path": lay_out(TP | mp.Rules(paths={"kernel": mp.replicated})),
    "a path rule with more entries than dims": lay_out(TP | mp.Rules(paths={".*/kernel": (None, "fsdp", "tensor")})),
    "a path rule that matches a scalar": lay_out(mp.Rules(paths={".*": ("fsdp",)}), model(log_scale=())),
    "too many names by path": lay_out(TP | mp.Rules(paths={"up/.*": mp.names("layers", "embed", "mlp")})),
    "a big leaf that no name shards": lay_out(
        mp.fsdp(), model({"w/kernel": ("heads", "head_dim"), "v/kernel": ("embed",)}, v_kernel=(8,), **BIG)
    ),
    "a big leaf sharded over an axis of size 1": lay_out(
        mp.fsdp(), model({"w/kernel": ("embed", "mlp")}, **BIG), mesh=mp.MeshSpec(data=8).abstract()
    ),
    "a big leaf without a divisible dim": lay_out(mp.fsdp(), model(w_kernel=(1023, 769), v_kernel=(512, 64))),
    "a big leaf without a rule": lay_out(mp.Rules(paths={"v/kernel": ("fsdp",)}), model(v_kernel=(8,), **BIG)),
    "tensor parallelism of a model without names": lay_out(mp.tensor_parallel(), PLAIN),
    "fsdp of a model of small unnamed leaves": lay_out(mp.fsdp(), PLAIN),
    "expert parallelism without experts": lay_out(TP | mp.expert_parallel()),
    "pipeline stages of layers that are not stacked": lay_out(
        mp.pipeline_parallel(stages=2, microbatches=4), mesh=mp.MeshSpec(stage=2, data=4).abstract()
    ),
    "hsdp without an axis to replicate over": lay_out(mp.hsdp()),
}

# ---------------------------------------------------------------------------------------------------------------------
# Invalid rules, strategies and meshes
# ---------------------------------------------------------------------------------------------------------------------

VALUES: dict[str, Callable[[], Any]] = {
    "a number as rule": lambda: mp.Rules(mlp=2),
    "a rule with a number among axes": lambda: mp.Rules(mlp=("tensor", 2)),
    "an axis twice in a rule": lambda: mp.Rules(mlp=("tensor", "tensor")),
    "a PartitionSpec as rule": lambda: mp.Rules(mlp=P("tensor", None)),
    "an axis as path rule": lambda: mp.Rules(paths={".*/kernel": "fsdp"}),
    "None as path rule": lambda: mp.Rules(paths={".*/kernel": None}),
    "a path rule with a number for a dim": lambda: mp.Rules(paths={".*/kernel": (None, 4)}),
    "a pattern with invalid syntax": lambda: mp.Rules(paths={"*/kernel": mp.replicated}),
    "a number as pattern": lambda: mp.Rules(paths={0: mp.replicated}),
    "a list of paths": lambda: mp.Rules(paths=[(".*", mp.replicated)]),
    "no alternatives": mp.first,
    "a number as alternative": lambda: mp.first("tensor", 2),
    "a number as name": lambda: mp.names("embed", 2),
    "an Ellipsis without names": lambda: mp.names(...),
    "a number as axis": lambda: mp.fsdp(axis=4),
    "an axis twice in a preset": lambda: mp.zero1(axis=("fsdp", "fsdp")),
    "a number as axis of tensor_parallel": lambda: mp.tensor_parallel(axis=2),
    "a threshold as text": lambda: mp.fsdp(min_bytes="64k"),
    "a dict as strategy": lambda: mp.custom(params={"embed": "fsdp"}, grads=mp.Rules(), optimizer=mp.Rules()),
    "a negative threshold": lambda: mp.fsdp().replace(big_leaf_bytes=-1),
    "a preset without its parentheses": lay_out(mp.fsdp),
    "a strategy as text": lay_out("fsdp"),
    "an unknown preset": lambda: parse_strategy("fdsp() | tensor_parallel()"),
    "an argument that a preset lacks": lambda: parse_strategy("fsdp(axes='data')"),
    "an argument without its name": lambda: parse_strategy("tensor_parallel(True)"),
    "a computed argument": lambda: parse_strategy("fsdp(min_bytes=2**16)"),
    "strategies joined with and": lambda: parse_strategy("fsdp() and zero1()"),
    "a strategy with invalid syntax": lambda: parse_strategy("fsdp( | zero1()"),
    "a typo in an axis of the mesh": lambda: mp.MeshSpec(fdsp=4, tensor=2),
    "a typo in an axis on the command line": lambda: mp.MeshSpec.parse("fsdp=4,tensors=2"),
    "an axis of size zero": lambda: mp.MeshSpec(fsdp=0),
    "an axis with a fractional size": lambda: mp.MeshSpec(fsdp=8 / 2),
    "a size as text": lambda: mp.MeshSpec(tensor="2"),
    "two axes of size -1": lambda: mp.MeshSpec(data=-1, fsdp=-1),
    "a mesh smaller than the devices": lambda: mp.MeshSpec(fsdp=2, tensor=2).build(),
    "a mesh larger than the devices": lambda: mp.MeshSpec(fsdp=16).build(),
    "sizes that do not divide the devices": lambda: mp.MeshSpec(data=-1, tensor=3).build(),
    "a mesh with invalid syntax": lambda: mp.MeshSpec.parse("fsdp:4"),
    "a mesh with an axis twice": lambda: mp.MeshSpec.parse("fsdp=2,fsdp=4"),
    "an abstract mesh of unknown size": lambda: mp.MeshSpec(data=-1, tensor=8).abstract(),
    "a number in place of devices": lambda: mp.MeshSpec(fsdp=8).build(8),
    "no devices": lambda: mp.MeshSpec(fsdp=-1).build([]),
    "an unknown axis that must stay inside a node": lambda: mp.MeshSpec(tensor=2, inside_node=("tensr",)),
    "an axis larger than a node": lambda: mp.MeshSpec(fsdp=4, tensor=16).abstract(devices_per_node=8),
    "a number for inside_node": lambda: mp.MeshSpec(tensor=2, inside_node=8),
}

# ---------------------------------------------------------------------------------------------------------------------
# Arguments of a wrong type
# ---------------------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[], Any]] = {
    "a module instead of a model": lay_out(mp.ddp(), LINEAR),
    "a Linen module instead of a model": lay_out(mp.ddp(), nn.Dense(2)),
    "an existing NNX module": lambda: mp.from_nnx(LINEAR),
    "a function without rngs": lambda: mp.from_nnx(lambda: LINEAR),
    "a loss without a key": lambda: mp.train_step(lambda model, batch: (0.0, {})),
    "a function that returns None": lay_out(mp.ddp(), mp.from_nnx(lambda rngs: None)),
    "a module class with a second argument": lambda: mp.from_nnx(Wide),
    "a module created without rngs": lay_out(mp.ddp(), mp.from_nnx(lambda rngs: Wide(8))),
    "a function that returns a class": lay_out(mp.ddp(), mp.from_nnx(lambda rngs: Wide)),
    "a Linen module without an example": lambda: mp.from_linen(nn.Dense(8)),
    "a Linen call with mutable": lambda: mp.from_linen(nn.Dense(8), np.zeros((1, 8))).bind({}, {})(
        np.zeros((1, 8)), mutable=["batch_stats"]
    ),
    "an NNX module in from_linen": lambda: mp.from_linen(LINEAR, np.zeros((1, 2))),
    "names for an unknown path": lay_out(TP, model({"up/kernle": ("embed", "mlp")}, **MLP)),
    "a string in place of a tuple of names": lambda: model({"up/kernel": "embed"}, **MLP),
    "the sizes of a mesh instead of a mesh": lay_out(TP, mesh=mp.MeshSpec(fsdp=8)),
    "no mesh": lay_out(TP, mesh=None),
    "an optimizer that was not called": lay_out(TP, tx=optax.adam),
    "a learning rate instead of an optimizer": lay_out(TP, tx=3e-4),
    "a state on an abstract mesh": lambda: mp.init_state(NAMED, optax.sgd(0.1), mesh=MESH, strategy=TP, key=0),
    "a path that the table lacks": lambda: mp.shardings(NAMED, MESH, TP)["up/kernal"],
    "constrain outside of use_rules": lambda: mp.constrain(np.zeros((8, 4)), "batch", None),
    "an activation with too few names": lambda: constrained((8, 4, 2), "batch", "seq"),
    "an activation with a mistyped name": lambda: constrained((8, 4), "batch", "act_mpl"),
    "an activation with an indivisible dim": lambda: constrained((8, 5), "batch", "act_mlp"),
    "use_rules without a strategy": lambda: mp.use_rules(MESH, None).__enter__(),
}


def constrained(shape, *names):
    with mp.use_rules(MESH, TP):
        return jax.eval_shape(lambda x: mp.constrain(x, *names), jax.ShapeDtypeStruct(shape, jnp.float32))


# ---------------------------------------------------------------------------------------------------------------------
# Steps and batches
# ---------------------------------------------------------------------------------------------------------------------


def never(model, batch, key):
    raise AssertionError("the loss was traced")


def steps(**options):
    return lambda: mp.train_step(never, **options)


def real_mesh() -> Mesh:
    return mp.MeshSpec(fsdp=4, tensor=2).build()


def batches(batch):
    return lambda: mp.shard_batch(batch, real_mesh(), TP)


def stepped(batch, **options):
    # The state is abstract, because all checks precede the first use of arrays.
    return lambda: mp.train_step(never, **options).lower(
        mp.abstract_state(NAMED, optax.sgd(0.1), mesh=real_mesh(), strategy=TP), batch
    )


def loss_from(value, model, batch, key):
    return value(batch), {}


def with_loss(value, strategy=TP, **axes):
    def lowered():
        mesh = mp.MeshSpec(tensor=2, **(axes or {"fsdp": 4})).build()
        state = mp.abstract_state(NAMED, optax.sgd(0.1), mesh=mesh, strategy=strategy)
        loss: Any = functools.partial(loss_from, value)  # errors name no line number of a partial function
        loss.__name__ = "loss"
        mp.train_step(loss).lower(state, {"tokens": np.zeros((8, 3), np.float32)})

    return lowered


STEPS: dict[str, Callable[[], Any]] = {
    "no micro-steps": steps(accumulate=0),
    "True as number of micro-steps": steps(accumulate=True),
    "an unknown way to accumulate": steps(accumulate=2, reduce_gradients="all"),
    "an unknown answer to NaN": steps(nonfinite="crash"),
    "an unknown remat policy": steps(remat="ful"),
    "an abbreviated dtype": lambda: mp.Precision(compute="bf16"),
    "an indivisible batch": batches({"tokens": np.zeros((6, 3))}),
    "an indivisible batch with micro-steps": stepped({"tokens": np.zeros((12, 3))}, accumulate=2),
    "leaves with different batch sizes": batches({"tokens": np.zeros((8, 3)), "weights": np.zeros(4)}),
    "an nnx.State instead of a state": lambda: mp.train_step(never)(nnx.state(LINEAR), {"x": np.zeros((8, 2))}),
    "parameters instead of a state": lambda: mp.eval_step(never)({"w": np.zeros(8)}, {"x": np.zeros((8, 2))}),
    "an empty batch": stepped({}),
    "text in the batch": stepped({"tokens": np.zeros((8, 3)), "text": np.array(["a"] * 8)}),
    "objects in the batch": stepped({"tokens": np.zeros((8, 3)), "any": np.array([None] * 8)}),
    "dates in the batch": stepped({"tokens": np.zeros((8, 3)), "day": np.zeros(8, "datetime64[D]")}),
    "a batch of size zero": stepped({"tokens": np.zeros((0, 3))}),
    "a batch of lists": stepped({"tokens": np.zeros((8, 3)).tolist()}),
    "a loss per example": with_loss(lambda batch: batch["tokens"].mean(-1)),
    "a total per example": with_loss(lambda batch: mp.MeanLoss(batch["tokens"].mean(-1), 8)),
    "context parallelism of a model that never constrains seq": with_loss(
        lambda batch: batch["tokens"].mean(), TP | mp.context_parallel(), context=4
    ),
}

MISTAKES = {**RULES, **VALUES, **KINDS, **STEPS}


@pytest.fixture(scope="module")
def compiled() -> list[str]:
    """Record compilations while the tests of the module run."""
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **kwargs: events.append(event) if "backend_compile" in event else None
    )
    jax.jit(lambda x: x + 1).lower(1.0).compile()
    assert events, "the listener receives compilations"
    return events


def error_of(name: str) -> mp.MeshparError:
    with pytest.raises(mp.MeshparError) as error:
        MISTAKES[name]()
    return error.value


def expected_messages() -> dict[str, str]:
    """Return the messages in mistakes.txt, by the name of the mistake."""
    entries = TEXTS.read_text(encoding="utf-8").split("\n\n")
    return {name: text.strip() for name, _, text in (entry.partition("\n") for entry in entries)}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_an_early_error(name, compiled):
    compiled.clear()
    error = error_of(name)
    assert not compiled
    assert str(error) == expected_messages()[name]
    for part in (error.where, error.reason, error.fix):
        assert part == part.strip() != ""
    assert " at 0x" not in str(error)


def test_all_messages_belong_to_a_mistake():
    assert list(expected_messages()) == list(MISTAKES)
    assert len(MISTAKES) > 100


if __name__ == "__main__":
    TEXTS.write_text("\n\n".join(f"{name}\n{error_of(name)}" for name in MISTAKES) + "\n", encoding="utf-8")
