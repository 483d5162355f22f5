"""The one ambient context: mesh and rules for `constrain`, and what a step gives the model that it traces."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshpar.sharding.constraints import abstract_of, with_layout
from meshpar.sharding.mesh import with_auto_axes
from meshpar.sharding.rules import Rules, resolve
from meshpar.sharding.types import AnyMesh, Leaf, MeshparError, axis_sizes, problem, without_axes


@dataclasses.dataclass(frozen=True)
class Ambient:
    """The mesh and the activation rules in force."""

    mesh: AnyMesh
    rules: Rules
    params: Rules | None = None
    """How parameters lie; None where only activation rules were given."""


@dataclasses.dataclass(frozen=True)
class InForce:
    """All that is in force while a model is traced. One value: what one trace sets, another cannot be left without."""

    ambient: Ambient | None = None
    """The mesh and rules."""
    numerics: Any = None
    """What a step asks of layers: `meshpar.layers.precision.Numerics`."""
    reports: Any = None
    """Where what models report is kept: `meshpar.layers.auxiliary.Reports`."""
    boundaries: Any = None
    """What is held where modules hand arrays on: `meshpar.sharding.activations.Boundaries`."""
    run: Any = None
    """What runs stacked layers instead of a scan: `meshpar.layers.scan.running`."""
    updates: Any = None
    """How what an optimizer updates lies: `meshpar.optim.orthogonalized.Updating`."""


# A user context is part of jax's trace cache key: a function jitted under one mesh is traced again under another.
_context = jax.make_user_context(default_value=InForce())


def current() -> InForce:
    """What is in force."""
    return _context.value


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[InForce]:
    """Put more in force, fields of `InForce`, beside what is."""
    context = dataclasses.replace(_context.value, **changes)
    with _context(context):
        yield context


@contextlib.contextmanager
def use_rules(mesh: AnyMesh, rules: Any) -> Iterator[Ambient]:
    """Put a mesh and activation rules in force for `constrain`.

    Args:
      mesh: the mesh that activations are laid on.
      rules: a `Rules`, or a `Strategy`, whose activation rules are taken.
    """
    rules, params = getattr(rules, "activations", rules), getattr(rules, "params", None)
    if not isinstance(rules, Rules):
        raise problem(
            "use_rules(mesh, rules)", f"put {rules!r} in force", "it is no Strategy and no Rules", "use mp.fsdp()"
        )
    ambient = Ambient(with_auto_axes("use_rules(mesh, rules)", mesh), rules, params)
    with within(ambient=ambient), in_place_of_others(ambient.mesh):
        yield ambient


@contextlib.contextmanager
def tracing(mesh: AnyMesh, rules: Any) -> Iterator[Ambient]:
    """`use`, and the mesh as jax's own, around a model that is traced: a bare PartitionSpec in it finds its axes."""
    with use_rules(mesh, rules) as here, jax.sharding.use_abstract_mesh(abstract_of(here.mesh)):
        yield here


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Put aside the mesh of jax's own context (`jax.set_mesh`, `jax.sharding.use_abstract_mesh`).

    A mesh is an argument here, so every public function does the same in any context. Around a model `tracing` enters
    the argument.
    """
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    aside: contextlib.AbstractContextManager[Any]
    try:
        aside = jax.set_mesh(None)  # type: ignore[arg-type]
    except ValueError:  # jax sets no devices while it traces
        aside = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    with aside:
        yield


@contextlib.contextmanager
def in_place_of_others(mesh: AnyMesh) -> Iterator[None]:
    """Where jax's own context holds another mesh, or this one's axes of another type: put this one in its place.

    Not inside a `shard_map`, whose axes are in that context.
    """
    here, own = jax.sharding.get_abstract_mesh(), abstract_of(mesh)
    is_other = not (here.empty or here.manual_axes or here == own)
    with jax.sharding.use_abstract_mesh(own) if is_other else contextlib.nullcontext():
        yield


def ambient() -> Ambient | None:
    """What `use` has put in force, None outside of it."""
    return _context.value.ambient


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Lay an activation on the mesh by the names of its dims.

    Args:
      x: an array of any shape.
      *names: one logical name (or None: not split) for each dim of x.

    Returns:
      x, with a sharding constraint on the ambient mesh; where its axes are Explicit, inside a model of `mp.explicit` or
      `jax.sharding.explicit_axes`, resharded, its type by the rules. Inside a `shard_map` the axes it is manual over
      are left out: there, they are no longer XLA's to split.

    Raises:
      ValueError: outside `use`; or a name, axis or size that does not fit, as for parameters.
    """
    here, leaf = _ambient_leaf("constrain", x, names)
    spec = _activation_spec(leaf, here)  # on one device too: a mistyped name is an error there as well
    if here.mesh.size == 1:
        return x
    if current().boundaries is not None:
        current().boundaries.num_constrained += 1
    # The mesh of the context, with its manual axes, is the one a constraint must name here: a bare spec does.
    sharding = spec if _manual_axes(here) else NamedSharding(here.mesh, spec)
    return with_layout(x, sharding)


def spec_of(x: jax.Array | jax.ShapeDtypeStruct, *names: str | None) -> PartitionSpec:
    """How `constrain(x, *names)` lays an activation on the mesh, over the axes that are XLA's to split here.

    Raises:
      ValueError: as `constrain` does.
    """
    here, leaf = _ambient_leaf("spec_of", x, names)
    return _activation_spec(leaf, here)


def param_spec(x: jax.Array | jax.ShapeDtypeStruct, *names: str | None) -> PartitionSpec:
    """How a parameter with these names of its dims lies, by the strategy in force.

    For kernels that gather it themselves. By names and size alone: a path rule that lays it otherwise is not seen, nor
    are arrays of other sizes than the strategy can split, which are whole as far as this says.
    """
    here = _context.value.ambient
    if here is None or here.params is None:
        return PartitionSpec()
    try:
        return resolve(Leaf(path="", shape=x.shape, dtype=x.dtype, names=names), here.params, here.mesh).spec
    except MeshparError:
        return PartitionSpec()


def _ambient_leaf(asked_by: str, x: Any, names: tuple[str | None, ...]) -> tuple[Ambient, Leaf]:
    here = _context.value.ambient
    if here is None:
        where = f"{asked_by}(x of shape {x.shape}, {', '.join(map(repr, names))})"
        fix = "call the model inside `with mp.use_rules(mesh, strategy):`; train_step and eval_step do it for you"
        raise problem(where, "lay an activation on the mesh", "no mesh and rules are in force", fix)
    path = f"activation {'×'.join(str(n) for n in names)}"
    return here, Leaf(path=path, shape=x.shape, dtype=x.dtype, names=names)


def _activation_spec(leaf: Leaf, here: Ambient) -> PartitionSpec:
    manual = _manual_axes(here)
    if not manual:
        return resolve(leaf, here.rules, here.mesh).spec
    return without_axes(resolve(leaf, here.rules, auto_sizes(here)).spec, manual)


def auto_sizes(here: Ambient) -> dict[str, int]:
    """Sizes of the mesh axes that are XLA's to split here; 1 where a `shard_map` is manual over one."""
    manual = _manual_axes(here)
    return {axis: 1 if axis in manual else size for axis, size in axis_sizes(here.mesh).items()}


def _manual_axes(here: Ambient) -> frozenset[str]:
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes) & set(here.mesh.axis_names)
