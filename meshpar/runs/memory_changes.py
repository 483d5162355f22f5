"""Changes of a recipe that reduce the memory of its training step.

A ladder is a sequence of changes of the same kind. Each change needs less memory than the previous one, and usually
costs more time.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from meshpar.hardware.clusters import Cluster
from meshpar.inspect.memory import smaller_strategies
from meshpar.layers.remat import ATTENTION, MATMUL, checkpoint_name_of, named_in, saved_names
from meshpar.parallel import Strategy, parse_strategy
from meshpar.parallel.execution import Execution
from meshpar.parallel.zero import Zero
from meshpar.planner.plan import Plans, plan
from meshpar.runs.recipe import Recipe, build_model, build_optimizer
from meshpar.sharding.errors import MeshparError
from meshpar.sharding.jaxprs import equations
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.types import PyTree
from meshpar.training.state import Setup

MICRO_STEP_FACTORS = (2, 4, 8, 16)
_POLICIES = (None, "all_dots", "minimal", "dots", "full")
"""Remat policies, from the most to the least saved bytes."""
NUM_LAYOUTS = 3
"""Number of the planner's layouts that are compiled."""
VOCAB_CHUNK = 8192
"""Chunk of the vocabulary that `TransformerConfig.vocab_chunk` recommends for GPUs."""
MOE_FIELDS = ("bound_factor", "nodes_visited", "row_bytes")
"""Attributes of an MoE config that the planner reads."""
Fields = Mapping[str, Any]
"""Dotted path of a field of the recipe -> its new value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """New values of fields of a recipe."""

    kind: str
    """The kind, such as `micro-steps`. Kinds of a combination are joined with ` + `."""
    fields: Fields
    remaining: float | None = None
    """Size of the arrays that the change reduces, relative to the recipe. None if it is unknown."""

    @property
    def settings(self) -> tuple[str, ...]:
        """The change as `FIELD=VALUE`, for `--set` and `Recipe.override`."""
        return tuple(f"{path}={_text(value)}" for path, value in self.fields.items())

    @property
    def command(self) -> str:
        """The change as arguments of a command: `--set step.remat=full`."""
        return " ".join(f"--set {shlex.quote(text)}" for text in self.settings)

    @property
    def python(self) -> str:
        """The change as an expression, for a variable `recipe` and `import dataclasses, meshpar as mp`."""
        roots: dict[str, dict[str, Any]] = {}
        for path, value in self.fields.items():
            root, _, name = path.partition(".")
            roots.setdefault(root, {})[name] = value
        arguments = []
        for root, values in roots.items():
            inner = ", ".join(f"{name}={value!r}" for name, value in values.items())
            changed = f"dataclasses.replace(recipe.{root}, {inner})"
            arguments.append(f"{root}={_expression(values['']) if '' in values else changed}")
        return f"recipe.replace({', '.join(arguments)})"

    def __add__(self, other: Change) -> Change:
        return Change(kind=f"{self.kind} + {other.kind}", fields={**self.fields, **other.fields})

    def conflicts_with(self, other: Change) -> bool:
        """Return whether both are of the same kind or set the same field. A layout sets all fields of the step."""
        kinds = {self.kind, other.kind}
        by_layout = "layout" in kinds and any(
            path.startswith(("step.", "strategy")) for x in (self, other) if x.kind != "layout" for path in x.fields
        )
        return len(kinds) == 1 or by_layout or bool(self.fields.keys() & other.fields.keys())


def _text(value: Any) -> str:
    if isinstance(value, MeshSpec):
        return ",".join(f"{axis}={size}" for axis, size in value.items() if size > 1) or "data=1"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _expression(value: Any) -> str:
    if isinstance(value, MeshSpec):
        return f"mp.MeshSpec({_text(value)})"
    return " | ".join(f"mp.{part!r}" for part in value.components) if isinstance(value, Strategy) else repr(value)


# ---- Ladders ---------------------------------------------------------------------------------------------------------


def ladders(recipe: Recipe, setup: Setup, execution: Execution, jaxpr: core.ClosedJaxpr) -> list[tuple[Change, ...]]:
    """Return the changes by kind, without other layouts.

    Args:
      recipe: the recipe.
      setup: its model, mesh and strategy.
      execution: the description of its step.
      jaxpr: the traced step, which has the names and sizes of marked activations.
    """
    of_strategy = [_strategy_changes(kind, found) for kind, found in _strategies(setup, execution).items()]
    changes = [
        _micro_steps(recipe, execution),
        _policies(recipe),
        *_activations(recipe, execution, jaxpr),
        *of_strategy,
        *_of_fields(recipe),
    ]
    return [tuple(ladder) for ladder in map(list, changes) if ladder]


def _micro_steps(recipe: Recipe, execution: Execution) -> Iterator[Change]:
    for factor in MICRO_STEP_FACTORS if not execution.is_pipelined else ():
        count = recipe.step.accumulate * factor
        if execution.examples % factor == 0 and recipe.batch_size % count == 0:
            yield Change(kind="micro-steps", fields={"step.accumulate": count}, remaining=1 / factor)


def _policies(recipe: Recipe) -> Iterator[Change]:
    """Yield the policies that save less than the recipe's. A policy with names may save less than any but `full`."""
    current = recipe.step.remat
    start = _POLICIES.index(current) if current in _POLICIES else len(_POLICIES) - 2
    for policy in _POLICIES[start + 1 :]:
        yield Change(kind="remat policy", fields={"step.remat": policy})


def _activations(recipe: Recipe, execution: Execution, jaxpr: core.ClosedJaxpr) -> Iterator[Iterator[Change]]:
    """Yield ladders that recompute or offload the largest marked activations. Pipelines have no named policies."""
    sizes = {} if execution.is_pipelined else named_bytes(jaxpr)
    saved = saved_names(recipe.step.remat, tuple(sizes))
    # Attention has the most FLOPs per saved byte, so it is recomputed last.
    names = sorted(saved & sizes.keys(), key=lambda name: (name == ATTENTION, -sizes[name], name))
    kept_names = [name for name in named_in(recipe.step.remat or "full") if name not in saved]  # already offloaded
    total = sum(sizes[name] for name in names)

    def changes(kind: str, is_offloaded: bool) -> Iterator[Change]:
        for count in range(1, len(names) + is_offloaded):
            dropped, kept = names[:count], names[count:]
            offloaded = [*kept_names, *(dropped if is_offloaded else ())]
            terms = [f"save:{','.join(kept)}"] * bool(kept) + [f"offload:{','.join(offloaded)}"] * bool(offloaded)
            remaining = sum(sizes[name] for name in kept) / total
            yield Change(kind=kind, fields={"step.remat": "+".join(terms)}, remaining=remaining)

    yield changes("saved activations", False)
    yield changes("offloaded activations", True)


def named_bytes(jaxpr: core.ClosedJaxpr) -> dict[str, int]:
    """Return the bytes of a layer's activations that a traced step marks with `checkpoint_name`, by name."""
    sizes: dict[str, int] = {}
    for eqn, _ in equations(jaxpr):
        name = checkpoint_name_of(eqn.primitive, eqn.params)
        if name not in (None, MATMUL):
            aval = eqn.outvars[0].aval
            nbytes = int(np.prod(aval.shape, dtype=np.int64)) * aval.dtype.itemsize
            sizes[name] = max(nbytes, sizes.get(name, 0))
    return sizes


def _strategies(setup: Setup, execution: Execution) -> dict[str, list[Strategy]]:
    strategy = setup.strategy
    changed: dict[str, Any] = {"prefetch": 0, "keep": 0}
    parts = [dataclasses.replace(p, **changed) if isinstance(p, Zero) else p for p in strategy.components]
    without = dataclasses.replace(strategy, components=tuple(parts))
    return {
        "more sharded state": smaller_strategies(setup, execution, state=True),
        "microbatches": smaller_strategies(setup, execution, state=False),
        "no prefetch": [without] if without != strategy else [],
    }


def _strategy_changes(kind: str, strategies: Iterable[Strategy]) -> Iterator[Change]:
    """Yield changes of the strategy that can be written as text. Custom rules cannot."""
    for strategy in strategies:
        try:
            is_text = parse_strategy(strategy.label) == strategy
        except MeshparError:
            is_text = False
        if is_text:
            yield Change(kind=kind, fields={"strategy": strategy})


def _of_fields(recipe: Recipe) -> Iterator[Iterator[Change]]:
    """Yield ladders of fields of the model and the optimizer, if they have these fields."""
    model, optimizer = recipe.model, recipe.optimizer
    vocab_size, chunk = getattr(model, "vocab_size", 0), getattr(model, "vocab_chunk", 0)
    chunks = [min(VOCAB_CHUNK, vocab_size // 4) if chunk is None else chunk // 2]
    moments = {None: ("bfloat16", "int8"), "bfloat16": ("int8",)}.get(getattr(optimizer, "moments", "int8"), ())
    table: Sequence[tuple[str, str, Sequence[Any]]] = (
        ("chunked vocabulary", "model.vocab_chunk", chunks if chunk is None or chunk > 1024 else ()),
        ("attention", "model.attention", ("auto",) if getattr(model, "attention", None) == "xla" else ()),
        ("layers per iteration", "model.unroll", (1,) if getattr(model, "unroll", 1) != 1 else ()),
        ("batch slices", "step.batch_slices", (1,) if recipe.step.batch_slices > 1 else ()),
        ("low-precision moments", "optimizer.moments", moments),
        (
            "offloaded optimizer state",
            "optimizer.offload",
            (True,) if getattr(optimizer, "offload", 1) is False else (),
        ),
    )
    for kind, path, values in table:
        yield iter([Change(kind=kind, fields={path: value}) for value in values])


# ---- Other layouts ---------------------------------------------------------------------------------------------------


def plan_recipe(recipe: Recipe, batch: PyTree, cluster: Cluster, *, top: int, verify: int = 0) -> Plans:
    """Return the fastest layouts of a recipe on a cluster. Its own mesh, strategy and micro-steps are not used.

    Raises:
      MeshparError: as `planner.plan.plan`.
    """
    model = build_model(recipe)
    return plan(
        model, batch, cluster, top=top, verify=verify, loss=recipe.loss, loss_is=recipe.step.loss_is,
        tx=build_optimizer(recipe, model, MeshSpec().abstract(1)), precision=recipe.step.precision,
        xla=recipe.step.xla, remat=recipe.step.remat,
        **{name: getattr(getattr(recipe.model, "moe", None), name, None) for name in MOE_FIELDS},
    )  # fmt: skip


def layouts(recipe: Recipe, batch: PyTree, cluster: Cluster) -> Iterator[Change]:
    """Yield the planner's fastest layouts on the same GPUs. Raises like `plan_recipe`."""
    for each in itertools.islice(plan_recipe(recipe, batch, cluster, top=NUM_LAYOUTS).plans, NUM_LAYOUTS):
        layout = each.layout
        new: dict[str, Any] = {"mesh": layout.mesh, "strategy": layout.strategy}
        step = ("remat", "accumulate", "batch_slices")
        new |= {f"step.{name}": getattr(layout, name) for name in step}
        if recipe.step.reduce_gradients is not None:  # plans assume the default
            new["step.reduce_gradients"] = None
        yield Change(kind="layout", fields={path: value for path, value in new.items() if value != _get(recipe, path)})


def _get(recipe: Recipe, path: str) -> Any:
    root, _, name = path.partition(".")
    return getattr(getattr(recipe, root), name) if name else getattr(recipe, root)
