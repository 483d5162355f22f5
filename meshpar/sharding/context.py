"""The trace context: mesh and rules for `constrain`, and settings of the step that is traced."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshpar.sharding.constraints import abstract_of, with_layout
from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.mesh import with_auto_axes
from meshpar.sharding.printing import human_mesh
from meshpar.sharding.rules import Rules, resolve
from meshpar.sharding.types import AnyMesh, Leaf, axes_of_spec, axis_sizes, without_axes

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ambient:
    """A mesh with the rules for activations and parameters."""

    mesh: AnyMesh
    rules: Rules
    params: Rules | None = None
    """Rules for parameters. None if only activation rules are set."""


# A user context is part of jax's trace cache key, so a jitted function is traced again with other options. There is a
# single context for all options, because a new one changes the key of programs that are compiled already.
_context = jax.make_user_context(default_value=())


class TraceOption(Generic[T]):
    """A setting of the current trace, such as the precision. Each module defines its own.

    jax compares the values of options by equality, to decide whether a function is traced again.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def value(self) -> T | None:
        """The current value, or None if it is not set."""
        return dict(_context.value).get(self._name)

    @contextlib.contextmanager
    def set(self, value: T | None) -> Iterator[None]:
        """Set the value within a block."""
        with _context(tuple(sorted({**dict(_context.value), self._name: value}.items(), key=lambda item: item[0]))):
            yield


@dataclasses.dataclass(eq=False)
class Boundaries:
    """Settings for the module outputs of a trace, and the modules and constraints that the trace has met so far."""

    num_examples: int
    """Number of examples in the batch that is traced."""
    shard_batch: bool
    """Whether outputs without an activation rule are sharded along their batch dim."""
    sharded_modules: frozenset[str] = frozenset()
    """Paths of modules with parameters sharded over axes other than the batch axes. Only the batch dim of their outputs
    is constrained."""
    other_batch_sizes: frozenset[int] = frozenset()
    """First dims of all batch leaves. With `Rules(inputs={...: "batch"})`, some may differ from `num_examples`."""
    compute: str | None = None
    """Compute dtype of the step, to which outputs of modules with a precision rule are cast back."""
    dot_general: Callable[..., jax.Array] | None = None
    """Replaces `lax.dot_general` in Flax's linear layers, if not None."""
    policy: Callable[[str], Any] | None = None
    """Returns the `jax.checkpoint` policy for the value of a remat rule. None disables remat rules."""
    prefix: tuple[str, ...] = ()
    """Paths of the submodules that are applied separately, outermost first. Modules inside know only relative paths."""
    scope: str = ""
    """Path of the NNX module whose named scope is open."""
    module: str = ""
    """Path of the module being called."""
    recomputed: frozenset[str] = frozenset()
    """Paths of the modules being called under a remat rule."""
    seen: set[str] = dataclasses.field(default_factory=set)
    """Paths of the modules that have returned."""
    num_constrained: int = 0
    """Number of constrained activations, including the model's calls of `constrain`."""
    constrained_axes: set[str] = dataclasses.field(default_factory=set)
    """Mesh axes that these constraints shard over."""


AMBIENT = TraceOption[Ambient]("ambient")
BOUNDARIES = TraceOption[Boundaries]("boundaries")
NAMED_MODULES = TraceOption[bool]("named modules")
"""Whether each call of an NNX module opens a named scope."""


@contextlib.contextmanager
def use_rules(mesh: AnyMesh, rules: Any) -> Iterator[Ambient]:
    """Set the mesh and the activation rules for `constrain`.

    Args:
      mesh: the mesh that activations are sharded over.
      rules: a `Rules`, or a `Strategy` with activation rules.

    Raises:
      ValueError: `rules` is neither of them, or `mesh` is not a mesh.

    Example:
      >>> with mp.use_rules(mesh, strategy):
      ...     y = jax.jit(lambda x: mp.constrain(x, "batch", None))(jnp.ones((8, 4)))
      >>> y.sharding.spec
      P('fsdp',)
    """
    rules, params = getattr(rules, "activations", rules), getattr(rules, "params", None)
    if not isinstance(rules, Rules):
        where, reason = "use_rules(mesh, rules)", f"it is a {type(rules).__name__}, not a Strategy or Rules"
        raise problem(where, f"use the rules {rules!r}", reason, "use mp.fsdp()", code="wrong-type")
    ambient = Ambient(with_auto_axes("use_rules(mesh, rules)", mesh), rules, params)
    with AMBIENT.set(ambient), replacing_mesh(ambient.mesh):
        yield ambient


OTHER_MESH = "other-mesh"
"""Code of the error of a model that passes a mesh other than that of the trace to `jax.shard_map`."""


@contextlib.contextmanager
def tracing(mesh: AnyMesh, rules: Any) -> Iterator[Ambient]:
    """Enter `use_rules`, and set the mesh in jax's own context, so that the model can use a bare PartitionSpec.

    Raises:
      MeshparError: the model calls `jax.shard_map(mesh=...)` with another mesh.
    """
    with use_rules(mesh, rules) as context, jax.sharding.use_abstract_mesh(abstract_of(context.mesh)):
        try:
            yield context
        except ValueError as error:
            if "should match the mesh passed to shard_map" not in str(error):
                raise
            reason = f"it differs from the mesh of the trace ({human_mesh(axis_sizes(context.mesh))})"
            fix = "omit the argument; jax.shard_map then uses the mesh of the trace"
            requested = "use the mesh that the model passes"
            raise problem("jax.shard_map(mesh=...)", requested, reason, fix, code=OTHER_MESH) from error


@contextlib.contextmanager
def clear_context_mesh() -> Iterator[None]:
    """Remove the mesh from jax's own context (`jax.set_mesh`, `jax.sharding.use_abstract_mesh`).

    Public functions take the mesh as an argument and must not depend on this context. `tracing` sets the mesh again
    around the model.
    """
    no_mesh: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not jax.sharding.get_abstract_mesh().empty:
        try:
            no_mesh = jax.set_mesh(None)  # type: ignore[arg-type]
        except ValueError:  # jax.set_mesh fails while tracing
            no_mesh = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    with no_mesh:
        yield


@contextlib.contextmanager
def replacing_mesh(mesh: AnyMesh) -> Iterator[None]:
    """Set the mesh in jax's own context, if the context has a different mesh or the same axes with different types.

    Inside a `shard_map` the context mesh has the manual axes and is not replaced.
    """
    context_mesh, mesh = jax.sharding.get_abstract_mesh(), abstract_of(mesh)
    is_other = not (context_mesh.empty or context_mesh.manual_axes or context_mesh == mesh)
    with jax.sharding.use_abstract_mesh(mesh) if is_other else contextlib.nullcontext():
        yield


def ambient() -> Ambient | None:
    """Return the current mesh and rules, or None outside `use_rules`."""
    return AMBIENT.value


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Shard an activation by the logical names of its dims.

    Args:
      x: an array of any shape.
      *names: a logical name for each dim. None: the dim is not sharded.

    Returns:
      x with a sharding constraint. On Explicit mesh axes (in a model of `mp.explicit` or in
      `jax.sharding.explicit_axes`), x is resharded. Manual axes of an enclosing `shard_map` are ignored.

    Raises:
      ValueError: the call is outside `use_rules`, a name or axis is unknown, or a dim is not divisible.

    Example:
      >>> def forward(x):
      ...     return mp.constrain(x @ x.T, "batch", "act_mlp")
      >>> with mp.use_rules(mesh, strategy):
      ...     print(jax.jit(forward)(jnp.ones((8, 4))).sharding.spec)
      P('fsdp', 'tensor')
    """
    spec = spec_of(x, *names)  # also on a single device, to check the names
    context = AMBIENT.value
    assert context is not None
    if context.mesh.size == 1:
        return x
    if (boundaries := BOUNDARIES.value) is not None:
        boundaries.num_constrained += 1
        boundaries.constrained_axes.update(axes_of_spec(spec))
    # In a shard_map the constraint must use the context mesh with its manual axes, which a bare spec does.
    return with_layout(x, spec if _manual_axes(context) else NamedSharding(context.mesh, spec))


def spec_of(x: jax.Array | jax.ShapeDtypeStruct, *names: str | None) -> PartitionSpec:
    """Return the spec that `constrain(x, *names)` applies, without manual axes. Raises like `constrain`."""
    context = AMBIENT.value
    if context is None:
        where = f"constrain(x of shape {x.shape}, {', '.join(map(repr, names))})"
        fix = "call the model inside `with mp.use_rules(mesh, strategy):`, as train_step and eval_step do"
        raise problem(where, "shard an activation", "no mesh or rules are set", fix, code="not-found")
    leaf = Leaf(path=f"activation {'×'.join(str(n) for n in names)}", shape=x.shape, dtype=x.dtype, names=names)
    spec, manual = resolve(leaf, context.rules, auto_sizes(context)).spec, _manual_axes(context)
    return without_axes(spec, manual) if manual else spec


def param_spec(x: jax.Array | jax.ShapeDtypeStruct, *names: str | None) -> PartitionSpec:
    """Return the spec of a parameter with these names, for kernels that gather it.

    Path rules are ignored. The result is replicated if the strategy cannot shard the array, or without a strategy.
    """
    context = AMBIENT.value
    if context is None or context.params is None:
        return PartitionSpec()
    try:
        return resolve(Leaf(path="", shape=x.shape, dtype=x.dtype, names=names), context.params, context.mesh).spec
    except MeshparError:
        return PartitionSpec()


def auto_sizes(context: Ambient) -> dict[str, int]:
    """Return the size of each mesh axis, with 1 for the manual axes of an enclosing `shard_map`."""
    manual = _manual_axes(context)
    return {axis: 1 if axis in manual else size for axis, size in axis_sizes(context.mesh).items()}


def _manual_axes(context: Ambient) -> frozenset[str]:
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes) & set(context.mesh.axis_names)
