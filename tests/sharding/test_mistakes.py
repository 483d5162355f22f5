"""Mistakes people make: each is told before a loss is traced or anything compiled, with path, dim, axis and fix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.parallel import parse_strategy

MESH = mp.MeshSpec(fsdp=4, tensor=2).abstract()


@dataclasses.dataclass(frozen=True)
class Mistake:
    """Something done wrong, and what the error must say in which of its parts."""

    do: Callable[[], Any]
    where: str
    """The path of the leaf, or the call."""
    exists: str
    fix: str
    asked: str = ""
    dim: str = ""
    """Must stand beside the path."""
    axis: str = ""
    """The mesh axis, wherever it is told."""


def model(names: dict | None = None, **shapes: tuple[int, ...]) -> mp.Model:
    """A model of plain arrays; `up_kernel=(8, 16)` is at path up/kernel."""
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
LINEAR = nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))  # a module whose arrays were never made


def lay_out(strategy, a_model=NAMED, mesh=MESH, **kwargs):
    return lambda: mp.shardings(a_model, mesh, strategy, **kwargs)


class TypoNNX(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.zeros, ("embed", "mpl"))
        self.up = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)


class TypoLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.zeros, ("embed", "mpl"))
        return nn.Dense(16, kernel_init=init, name="up")(x)


class Short(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.zeros, ("mlp",))
        self.up = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)


# ---------------------------------------------------------------------------------------------------------------------
# Names, axes and sizes that do not fit
# ---------------------------------------------------------------------------------------------------------------------

RULES = {
    "a typo in an NNX annotation": Mistake(
        lay_out(TP, mp.from_nnx(lambda rngs: TypoNNX(rngs))),
        where="`up/kernel`",
        dim="dim 1 (`mpl`, size 16)",
        exists="no rule knows the logical name `mpl`",
        fix="did you mean `mlp`?",
    ),
    "a typo in a Linen annotation": Mistake(
        lay_out(TP, mp.from_linen(TypoLinen(), np.zeros((2, 8)))),
        where="`up/kernel`",
        dim="dim 1 (`mpl`, size 16)",
        exists="no rule knows the logical name `mpl`",
        fix="mpl=None: not split",
    ),
    "an annotation with too few names": Mistake(
        lay_out(TP, mp.from_nnx(lambda rngs: Short(rngs))),
        where="`up/kernel` of shape (8, 16)",
        exists="it has 2 dims, not 1",
        fix="one name (or None) to each dim",
    ),
    "a name that nothing maps": Mistake(
        lay_out(mp.Rules(embed="fsdp")),
        where="`down/kernel`",
        dim="dim 0 (`mlp`, size 16)",
        exists="no rule knows the logical name `mlp`",
        fix="write Rules(mlp=...)",
    ),
    "a rule for a name that no leaf has": Mistake(
        lay_out(TP | mp.Rules(mpl="tensor")),
        where="rule for the name `mpl`",
        exists="no leaf of the model has it",
        fix="did you mean `mlp`?",
    ),
    "a typo in the mesh axis of a rule": Mistake(
        lay_out(TP | mp.Rules(mlp="tensr")),
        where="`down/kernel`",
        dim="dim 0 (`mlp`, size 16)",
        axis="`tensr`",
        exists="`tensor` (2)",
        fix="did you mean `tensor`?",
    ),
    "an axis that the mesh lacks among several": Mistake(
        lay_out(TP | mp.Rules(mlp=("tensor", "model"))),
        where="`down/kernel`",
        dim="dim 0 (`mlp`, size 16)",
        axis="`model`",
        exists="the mesh has axes",
        fix="MeshSpec(model=...)",
    ),
    "an axis that the mesh lacks in a fallback": Mistake(
        lay_out(TP | mp.Rules(mlp=mp.first("tenser", None))),
        where="`down/kernel`",
        dim="dim 0 (`mlp`, size 16)",
        axis="`tenser`",
        exists="`tensor` (2)",
        fix="did you mean `tensor`?",
    ),
    "an axis that the mesh lacks in a path rule": Mistake(
        lay_out(TP | mp.Rules(paths={"up/kernel": (None, "model")})),
        where="`up/kernel`",
        dim="dim 1 (`mlp`, size 16)",
        axis="`model`",
        exists="`tensor` (2)",
        fix="MeshSpec(model=...)",
    ),
    "a preset told to split over an axis that the mesh lacks": Mistake(
        lay_out(mp.fsdp(axis="fdsp", min_bytes=0), PLAIN),
        where="`down/kernel`",
        axis="`fdsp`",
        exists="`fsdp` (4)",
        fix="did you mean `fsdp`?",
    ),
    "tensor parallelism on a plain mesh without that axis": Mistake(
        lay_out(TP, mesh=Mesh(np.array(jax.devices()), ("fsdp",))),
        where="`down/kernel`",
        dim="dim 0 (`mlp`, size 16)",
        axis="`tensor`",
        exists="the mesh has axes `fsdp` (8)",
        fix="MeshSpec(tensor=...)",
    ),
    "a dim that does not divide": Mistake(
        lay_out(TP, model({"up/kernel": ("embed", "mlp")}, up_kernel=(8, 33))),
        where="`up/kernel`",
        dim="dim 1 (`mlp`, size 33)",
        axis="`tensor` (2)",
        exists="33 is not a multiple of 2",
        fix="pad it to 34, map `mlp` to None, or write the fallback first('tensor', None)",
    ),
    "a dim that does not divide by two axes together": Mistake(
        lay_out(
            mp.Rules(mlp=("fsdp", "tensor"), embed=None), model({"up/kernel": ("embed", "mlp")}, up_kernel=(8, 12))
        ),
        where="`up/kernel`",
        dim="dim 1 (`mlp`, size 12)",
        axis="`fsdp` (4) × `tensor` (2)",
        exists="12 is not a multiple of 8",
        fix="pad it to 16",
    ),
    "a path rule on a dim that does not divide": Mistake(
        lay_out(mp.Rules(paths={"w/kernel": (None, "fsdp")}), model(w_kernel=(8, 10))),
        where="`w/kernel`",
        dim="dim 1 (size 10)",
        axis="`fsdp` (4)",
        exists="10 is not a multiple of 4",
        fix="pad it to 12, leave this dim whole (None)",
    ),
    "one axis for two names of a leaf": Mistake(
        lay_out(mp.Rules(embed="fsdp", mlp="fsdp")),
        where="`down/kernel`",
        dim="dim 1 (`embed`, size 8)",
        axis="`fsdp`",
        exists="already splits dim 0 of the same array",
        fix="map one of the two dims to None, or to another",
    ),
    "one axis twice in a path rule": Mistake(
        lay_out(TP | mp.Rules(paths={"up/kernel": ("fsdp", ("tensor", "fsdp"))})),
        where="`up/kernel`",
        dim="dim 1 (`mlp`, size 16)",
        axis="`fsdp`",
        exists="already splits dim 0",
        fix="another of the mesh's axes `data` (1)",
    ),
    "alternatives of which none fits": Mistake(
        lay_out(TP | mp.Rules(mlp=mp.first("fsdp", ("tensor", "fsdp")))),
        where="`down/kernel`",
        dim="dim 0 (`mlp`, size 16)",
        axis="`fsdp` (4)",
        exists="none of them is free and divides 16",
        fix="first('fsdp', ('tensor', 'fsdp'), None)",
    ),
    "a pattern that matches no path": Mistake(
        lay_out(TP | mp.Rules(paths={"up/kernle": ("fsdp",)})),
        where="path rule `up/kernle`",
        exists="none of 2 paths",
        fix="did you mean `up/kernel`",
    ),
    "a pattern that matches a part of a path": Mistake(
        lay_out(TP | mp.Rules(paths={"kernel": mp.replicated})),
        where="path rule `kernel`",
        exists="none of 2 paths",
        fix="not just a part of it",
    ),
    "a path rule with more entries than dims": Mistake(
        lay_out(TP | mp.Rules(paths={".*/kernel": (None, "fsdp", "tensor")})),
        where="`down/kernel` of shape (16, 8)",
        asked="by the path rule `.*/kernel`",
        exists="it has 2 dims, fewer than the 3 of the rule",
        fix="narrow the pattern",
    ),
    "a path rule that catches a scalar": Mistake(
        lay_out(mp.Rules(paths={".*": ("fsdp",)}), model(log_scale=())),
        where="`log/scale` of shape ()",
        exists="it has 0 dims, fewer than the 1 of the rule",
        fix="narrow the pattern",
    ),
    "names by path that are too many": Mistake(
        lay_out(TP | mp.Rules(paths={"up/.*": mp.names("layers", "embed", "mlp")})),
        where="`up/kernel` of shape (8, 16)",
        asked="by the path rule `up/.*`",
        exists="it has 2 dims, not 3",
        fix="one name or None to each dim",
    ),
    "a big leaf that no name splits": Mistake(
        lay_out(mp.fsdp(), model({"w/kernel": ("heads", "head_dim"), "v/kernel": ("embed",)}, v_kernel=(8,), **BIG)),
        where="`w/kernel` (1024 × 768 float32, 3.15 MB, names ('heads', 'head_dim'))",
        axis="`fsdp` (4), `tensor` (2)",
        exists="whole on every device, and nothing says that is meant",
        fix="mp.Rules(paths={r'w/kernel': mp.replicated})",
    ),
    "a big leaf split over an axis of size one": Mistake(
        lay_out(mp.fsdp(), model({"w/kernel": ("embed", "mlp")}, **BIG), mesh=mp.MeshSpec(data=8).abstract()),
        where="`w/kernel`",
        axis="mesh axis `fsdp` has size 1",
        exists="whole on every device",
        fix="split a dim by a rule",
    ),
    "a big leaf none of whose dims divides": Mistake(
        lay_out(mp.fsdp(), model(w_kernel=(1023, 769), v_kernel=(512, 64))),
        where="`w/kernel`",
        axis="`fsdp` (4)",
        exists="no dim divides by 4",
        fix="big_leaf_bytes=",
    ),
    "a big leaf that rules do not mention": Mistake(
        lay_out(mp.Rules(paths={"v/kernel": ("fsdp",)}), model(v_kernel=(8,), **BIG)),
        where="`w/kernel`",
        axis="`fsdp` (4)",
        exists="no names, no rule",
        fix="mp.replicated",
    ),
    "tensor parallelism of a model without names": Mistake(
        lay_out(mp.tensor_parallel(), PLAIN),
        where="strategy tensor_parallel",
        asked="`vocab`, `heads`, `kv_heads`, `mlp`",
        exists="none of the model's 2 leaves (`down/kernel`, `up/kernel`) has such a name; their names are none",
        fix="mp.names(...)",
    ),
    "fsdp of a model of small unnamed leaves": Mistake(
        lay_out(mp.fsdp(), PLAIN),
        where="strategy fsdp",
        asked="`largest dim`",
        exists="has such a name or is big enough",
        fix="mp.fsdp(min_bytes=0)",
    ),
    "expert parallelism without experts": Mistake(
        lay_out(TP | mp.expert_parallel()),
        where="strategy expert_parallel",
        asked="`expert`",
        exists="their names are `embed`, `mlp`",
        fix="annotate the model",
    ),
    "hsdp with nothing to replicate over": Mistake(
        lay_out(mp.hsdp()),
        where="strategy hsdp()",
        axis="`data`",
        exists="the mesh has fsdp=4, tensor=2",
        fix="MeshSpec(data=2, ...)",
    ),
}

# ---------------------------------------------------------------------------------------------------------------------
# Rules, strategies and meshes that cannot be
# ---------------------------------------------------------------------------------------------------------------------

VALUES = {
    "a rule that is a number": Mistake(
        lambda: mp.Rules(mlp=2), where="rule for `mlp`", asked="map to 2", exists="a mesh axis", fix='mlp="fsdp"'
    ),
    "a rule with a number among axes": Mistake(
        lambda: mp.Rules(mlp=("tensor", 2)),
        where="rule for `mlp`",
        asked="('tensor', 2)",
        exists="a tuple of different axes",
        fix='mlp="fsdp"',
    ),
    "one axis twice in a rule": Mistake(
        lambda: mp.Rules(mlp=("tensor", "tensor")),
        where="rule for `mlp`",
        asked="('tensor', 'tensor')",
        exists="a tuple of different axes",
        fix='mlp="fsdp"',
    ),
    "a rule that is a PartitionSpec": Mistake(
        lambda: mp.Rules(mlp=P("tensor", None)),
        where="rule for `mlp`",
        exists="a dim maps to a mesh axis",
        fix='mlp="fsdp"',
    ),
    "a path rule that is one axis": Mistake(
        lambda: mp.Rules(paths={".*/kernel": "fsdp"}),
        where="path rule `.*/kernel`",
        asked="'fsdp'",
        exists="one entry per dim",
        fix="write ('fsdp', None)",
    ),
    "a path rule that is None": Mistake(
        lambda: mp.Rules(paths={".*/kernel": None}),
        where="path rule `.*/kernel`",
        asked="None",
        exists="replicated",
        fix="mp.replicated",
    ),
    "a path rule with a number for a dim": Mistake(
        lambda: mp.Rules(paths={".*/kernel": (None, 4)}),
        where="path rule `.*/kernel`",
        dim="dim 1",
        asked="4",
        exists="a mesh axis",
        fix="name mesh axes",
    ),
    "a pattern that is no regular expression": Mistake(
        lambda: mp.Rules(paths={"*/kernel": mp.replicated}),
        where="path rule `*/kernel`",
        exists="no regular expression (nothing to repeat",
        fix="r'.*/kernel'",
    ),
    "a pattern that is a number": Mistake(
        lambda: mp.Rules(paths={0: mp.replicated}), where="path rule 0", exists="is of type int", fix="r'.*/kernel'"
    ),
    "paths that are a list": Mistake(
        lambda: mp.Rules(paths=[(".*", mp.replicated)]), where="Rules(paths=", exists="a list", fix="paths={"
    ),
    "no alternatives": Mistake(
        mp.first, where="first()", asked="nothing", exists="alternative", fix='("tensor", None)'
    ),
    "an alternative that is a number": Mistake(
        lambda: mp.first("tensor", 2), where="first('tensor', 2)", exists="a mesh axis", fix='("tensor", None)'
    ),
    "a name that is a number": Mistake(
        lambda: mp.names("embed", 2), where="names('embed', 2)", exists="a string", fix='names("embed", None)'
    ),
    "an axis that is a number": Mistake(
        lambda: mp.fsdp(axis=4), where="fsdp(axis=4)", exists="no mesh axis", fix='mp.fsdp(axis="data")'
    ),
    "an axis twice in a preset": Mistake(
        lambda: mp.zero1(axis=("fsdp", "fsdp")), where="zero1(axis=('fsdp', 'fsdp'))", exists="different", fix="axis="
    ),
    "an axis of tensor_parallel that is a number": Mistake(
        lambda: mp.tensor_parallel(axis=2),
        where="tensor_parallel(axis=2)",
        exists="no mesh axis",
        fix="the name of one",
    ),
    "a threshold in words": Mistake(
        lambda: mp.fsdp(min_bytes="64k"), where="fsdp(min_bytes='64k')", exists="not a number", fix="min_bytes=2**16"
    ),
    "a strategy made of a dict": Mistake(
        lambda: mp.custom(params={"embed": "fsdp"}, grads=mp.Rules(), optimizer=mp.Rules()),
        where="custom(params=...)",
        exists="a Rules",
        fix='params=mp.Rules(embed="fsdp")',
    ),
    "a negative threshold": Mistake(
        lambda: mp.fsdp().replace(big_leaf_bytes=-1), where="big_leaf_bytes", exists="not negative", fix="2**20"
    ),
    "a preset without its parentheses": Mistake(
        lay_out(mp.fsdp), where="strategy", asked="fsdp", exists="a function", fix="mp.fsdp() with its parentheses"
    ),
    "a strategy in words": Mistake(
        lay_out("fsdp"), where="strategy", asked="'fsdp'", exists="this is a str", fix="write mp.fsdp()"
    ),
    "a preset that does not exist": Mistake(
        lambda: parse_strategy("fdsp() | tensor_parallel()"),
        where="strategy `fdsp() | tensor_parallel()`",
        asked="`fdsp`",
        exists="no such preset",
        fix="did you mean `fsdp`",
    ),
    "an argument that a preset lacks": Mistake(
        lambda: parse_strategy("fsdp(axes='data')"), where="strategy", exists="axes", fix="write it like"
    ),
    "an argument without its name": Mistake(
        lambda: parse_strategy("tensor_parallel(True)"),
        where="strategy `tensor_parallel(True)`",
        exists="`tensor_parallel` takes its arguments by name",
        fix="tensor_parallel(sequence=True)",
    ),
    "an argument that is computed": Mistake(
        lambda: parse_strategy("fsdp(min_bytes=2**16)"), where="strategy", exists="`min_bytes`", fix="write it like"
    ),
    "strategies joined with and": Mistake(
        lambda: parse_strategy("fsdp() and zero1()"), where="strategy", exists="joined with `|`", fix="write it like"
    ),
    "a strategy that does not parse": Mistake(
        lambda: parse_strategy("fsdp( | zero1()"), where="strategy", exists="no Python expression", fix="write it like"
    ),
    "a typo in an axis of the mesh": Mistake(
        lambda: mp.MeshSpec(fdsp=4, tensor=2),
        where="MeshSpec axis `fdsp`",
        exists="the standard axis `fsdp`, mistyped",
        fix="write fsdp=...",
    ),
    "a typo in an axis on the command line": Mistake(
        lambda: mp.MeshSpec.parse("fsdp=4,tensors=2"),
        where="MeshSpec axis `tensors`",
        exists="`tensor`",
        fix="write tensor=",
    ),
    "an axis of size zero": Mistake(
        lambda: mp.MeshSpec(fsdp=0), where="axis `fsdp`", asked="size 0", exists="positive integer", fix="fsdp=4"
    ),
    "an axis of a broken size": Mistake(
        lambda: mp.MeshSpec(fsdp=8 / 2),
        where="axis `fsdp`",
        asked="4.0",
        exists="positive integer",
        fix="write it as fsdp=4",
    ),
    "a size in words": Mistake(
        lambda: mp.MeshSpec(tensor="2"),
        where="axis `tensor`",
        asked="'2'",
        exists="positive integer",
        fix="write it as tensor=4",
    ),
    "two axes that take what is left": Mistake(
        lambda: mp.MeshSpec(data=-1, fsdp=-1), where="axes data, fsdp", exists="only one", fix="give all but one a size"
    ),
    "sizes that are fewer than the devices": Mistake(
        lambda: mp.MeshSpec(fsdp=2, tensor=2).build(),
        where="MeshSpec(fsdp=2, tensor=2)",
        asked="8 devices",
        exists="multiply to 4",
        fix=".build(jax.devices()[:4])",
    ),
    "sizes that are more than the devices": Mistake(
        lambda: mp.MeshSpec(fsdp=16).build(),
        where="MeshSpec(fsdp=16)",
        asked="8 devices",
        exists="multiply to 16",
        fix="whose product is 8, or use 16 devices (.abstract()",
    ),
    "sizes that leave a broken rest": Mistake(
        lambda: mp.MeshSpec(data=-1, tensor=3).build(),
        where="MeshSpec(data=-1, tensor=3)",
        exists="multiply to 3, which does not divide 8",
        fix="whose product divides 8, or use a multiple of 3 devices",
    ),
    "a mesh in another notation": Mistake(
        lambda: mp.MeshSpec.parse("fsdp:4"), where="mesh `fsdp:4`", exists="axis=size", fix="fsdp=64,tensor=8"
    ),
    "a mesh with an axis twice": Mistake(
        lambda: mp.MeshSpec.parse("fsdp=2,fsdp=4"), where="`fsdp=2,fsdp=4`", asked="`fsdp=4`", exists="once", fix="like"
    ),
    "an abstract mesh of unknown size": Mistake(
        lambda: mp.MeshSpec(data=-1, tensor=8).abstract(),
        where="MeshSpec(data=-1, tensor=8)",
        exists="one axis is -1",
        fix=".abstract(devices=4096)",
    ),
    "a number of devices for the devices": Mistake(
        lambda: mp.MeshSpec(fsdp=8).build(8), where=".build(8)", exists="a number", fix=".build(jax.devices()[:8])"
    ),
    "no devices": Mistake(
        lambda: mp.MeshSpec(fsdp=-1).build([]), where="MeshSpec(fsdp=-1)", exists="at least one", fix="give it devices"
    ),
    "an unknown axis that must stay inside a node": Mistake(
        lambda: mp.MeshSpec(tensor=2, inside_node=("tensr",)),
        where="inside_node=('tensr',)",
        exists="no axis `tensr`",
        fix="did you mean `tensor`?",
    ),
    "an axis bigger than the node it must stay inside": Mistake(
        lambda: mp.MeshSpec(fsdp=4, tensor=16).abstract(devices_per_node=8),
        where="mesh axis `tensor` (16)",
        exists="a node has 8",
        fix="inside_node=()",
    ),
    "a constant for inside_node": Mistake(
        lambda: mp.MeshSpec(tensor=2, inside_node=8), where="inside_node=8", exists="names of axes", fix='("tensor",)'
    ),
}

# ---------------------------------------------------------------------------------------------------------------------
# The wrong thing in the wrong place
# ---------------------------------------------------------------------------------------------------------------------

KINDS = {
    "a module instead of a model": Mistake(
        lay_out(mp.ddp(), LINEAR),
        where="model",
        asked="Linear",
        exists="Model",
        fix="from_nnx",
    ),
    "a Linen module instead of a model": Mistake(
        lay_out(mp.ddp(), nn.Dense(2)), where="model", asked="Dense", exists="Model", fix="mp.from_linen(module"
    ),
    "an NNX module that exists already": Mistake(
        lambda: mp.from_nnx(LINEAR),
        where="from_nnx",
        asked="a Linear that exists already",
        exists="whole on one device",
        fix="mp.from_nnx(lambda rngs:",
    ),
    "an NNX module for Linen": Mistake(
        lambda: mp.from_linen(LINEAR, np.zeros((1, 2))),
        where="from_linen",
        asked="Linear",
        exists="no flax.linen.Module",
        fix="use from_nnx",
    ),
    "names for a path that does not exist": Mistake(
        lay_out(TP, model({"up/kernle": ("embed", "mlp")}, **MLP)),
        where="from_functions(names={'up/kernle'",
        exists="no leaf has this path",
        fix="did you mean `up/kernel`",
    ),
    "one string of names": Mistake(
        lambda: model({"up/kernel": "embed"}, **MLP),
        where="from_functions(names={'up/kernel': 'embed'})",
        exists="it is a str",
        fix='("embed", "mlp")',
    ),
    "the sizes of a mesh instead of a mesh": Mistake(
        lay_out(TP, mesh=mp.MeshSpec(fsdp=8)), where="mesh", asked="MeshSpec(fsdp=8)", exists="sizes", fix=".build()"
    ),
    "no mesh": Mistake(
        lay_out(TP, mesh=None), where="mesh", asked="None", exists="NoneType", fix="mp.MeshSpec(fsdp=-1)"
    ),
    "a mesh of Explicit axes": Mistake(
        lay_out(TP, mesh=jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)),
        where="mesh",
        axis="`fsdp`, `tensor`",
        exists="Explicit",
        fix="axis_types=(jax.sharding.AxisType.Auto,) * 2",
    ),
    "an optimizer that was not called": Mistake(
        lay_out(TP, tx=optax.adam),
        where="optimizer",
        asked="adam",
        exists="no init and update",
        fix="optax.adamw(3e-4)",
    ),
    "a learning rate instead of an optimizer": Mistake(
        lay_out(TP, tx=3e-4), where="optimizer", asked="0.0003", exists="no init and update", fix="optax.adamw(3e-4)"
    ),
    "a state on an abstract mesh": Mistake(
        lambda: mp.init_state(NAMED, optax.sgd(0.1), mesh=MESH, strategy=TP, key=0),
        where="init_state",
        exists="abstract",
        fix="MeshSpec.build()",
    ),
    "a path that the table lacks": Mistake(
        lambda: mp.shardings(NAMED, MESH, TP)["up/kernal"],
        where="ShardingTable",
        asked="`up/kernal`",
        exists="no leaf",
        fix="did you mean `up/kernel`",
    ),
    "constrain outside of use": Mistake(
        lambda: mp.constrain(np.zeros((8, 4)), "batch", None),
        where="constrain(x of shape (8, 4), 'batch', None)",
        exists="no mesh and rules are in force",
        fix="with mp.use(mesh, strategy):",
    ),
    "an activation with too few names": Mistake(
        lambda: constrained((8, 4, 2), "batch", "seq"),
        where="activation batch×seq` of shape (8, 4, 2)",
        exists="it has 3 dims, not 2",
        fix="one name (or None) to each dim",
    ),
    "an activation with a mistyped name": Mistake(
        lambda: constrained((8, 4), "batch", "act_mpl"),
        where="activation batch×act_mpl",
        dim="dim 1 (`act_mpl`, size 4)",
        exists="no rule knows",
        fix="did you mean `act_mlp`",
    ),
    "an activation that does not divide": Mistake(
        lambda: constrained((8, 5), "batch", "act_mlp"),
        where="activation batch×act_mlp",
        dim="dim 1 (`act_mlp`, size 5)",
        axis="`tensor` (2)",
        exists="5 is not a multiple of 2",
        fix="pad it to 6",
    ),
    "use without a strategy": Mistake(
        lambda: mp.use(MESH, None).__enter__(),
        where="use(mesh, rules)",
        asked="None",
        exists="no Strategy",
        fix="mp.fsdp()",
    ),
}


def constrained(shape, *names):
    with mp.use(MESH, TP):
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
    # Abstract state: what a step checks, it checks before it asks for arrays.
    return lambda: mp.train_step(never, **options).lower(
        mp.abstract_state(NAMED, optax.sgd(0.1), mesh=real_mesh(), strategy=TP), batch
    )


STEPS = {
    "no micro-steps": Mistake(steps(accumulate=0), where="accumulate=0", exists="no positive integer", fix="1 or more"),
    "an unknown way to accumulate": Mistake(
        steps(accumulate=2, accumulate_mode="all"),
        where="accumulate_mode='all'",
        exists="no such",
        fix="'each', 'once'",
    ),
    "an unknown answer to NaN": Mistake(
        steps(nonfinite="crash"), where="nonfinite='crash'", exists="no such choice", fix="'raise', 'skip', 'ignore'"
    ),
    "an unknown remat policy": Mistake(
        steps(remat="ful"), where="remat='ful'", exists="no such policy", fix="did you mean `full`?"
    ),
    "a dtype by its short name": Mistake(
        lambda: mp.Precision(compute="bf16"), where="compute='bf16'", exists="no floating dtype", fix="`bfloat16`"
    ),
    "a batch that does not divide": Mistake(
        batches({"tokens": np.zeros((6, 3))}),
        where="batch leaf `tokens` of shape (6, 3)",
        dim="dim 0 (`batch`)",
        axis="`fsdp` (4)",
        exists="6 rows are not a positive multiple of 4",
        fix="a batch of 8",
    ),
    "a batch that does not divide into micro-steps": Mistake(
        stepped({"tokens": np.zeros((12, 3))}, accumulate=2),
        where="batch leaf `tokens` of shape (12, 3)",
        dim="dim 0 (`batch`)",
        axis="`fsdp` (4)",
        asked="in 2 micro-steps",
        exists="12 rows are not a positive multiple of 8",
        fix="a batch of 16",
    ),
    "rows that differ": Mistake(
        batches({"tokens": np.zeros((8, 3)), "weights": np.zeros(4)}),
        where="batch leaf `weights` of shape (4,)",
        exists="another leaf has 8",
        fix="the same first dim",
    ),
    "a number in the batch": Mistake(
        stepped({"tokens": np.zeros((8, 3)), "z_loss": np.float32(1)}),
        where="batch leaf `z_loss` of shape ()",
        exists="another leaf has 8",
        fix="the same first dim",
    ),
    "an empty batch": Mistake(stepped({}), where="batch", exists="no arrays", fix="a batch dim first"),
    "a batch of no rows": Mistake(
        stepped({"tokens": np.zeros((0, 3))}),
        where="batch leaf `tokens` of shape (0, 3)",
        dim="dim 0 (`batch`)",
        exists="0 rows are not a positive multiple of 4",
        fix="a batch of 4",
    ),
}

MISTAKES = {**RULES, **VALUES, **KINDS, **STEPS}


@pytest.fixture(scope="module")
def compiled() -> list[str]:
    """Names of what was compiled while the module's tests ran."""
    seen: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **kwargs: seen.append(event) if "backend_compile" in event else None
    )
    jax.jit(lambda x: x + 1).lower(1.0).compile()
    assert seen, "the listener hears compilations"
    return seen


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_early_and_fully(name, compiled):
    mistake = MISTAKES[name]
    compiled.clear()
    with pytest.raises(mp.MeshparError) as caught:
        mistake.do()
    error = caught.value
    assert not compiled
    assert mistake.where in error.where
    assert mistake.dim in error.where
    assert mistake.axis in f"{error.where} {error.asked} {error.exists}"
    assert mistake.asked in error.asked
    assert mistake.exists in error.exists
    assert mistake.fix in error.fix
    for part in (error.where, error.asked, error.exists, error.fix):
        assert part in str(error)
        assert part == part.strip() != ""
    assert " at 0x" not in str(error)


def test_there_are_plenty():
    assert len(MISTAKES) >= 30
