"""Checks of a training step: its loss function, parameters, rules and options."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.layers.precision import Numerics, Precision, check_bits
from meshpar.layers.remat import MATMUL, named_in
from meshpar.layers.scan import is_partial_trace
from meshpar.sharding.activations import check_rules_matched
from meshpar.sharding.context import Boundaries, ambient, auto_sizes
from meshpar.sharding.errors import check_cases, check_takes, near_or, problem
from meshpar.sharding.rules import Rules, axes_in
from meshpar.sharding.types import PyTree, axes_of_spec, is_spec, tree_leaves_with_paths
from meshpar.training.options import StepOptions, check_not_float16
from meshpar.training.state import Setup, TrainState


def check_loss(where: str, loss_fn: Any) -> None:
    """Check that a loss function takes a model, a batch and a key."""
    fix = f"mp.{where}(lambda model, batch, key: (loss, metrics)), with a dict of metrics"
    check_takes(where, loss_fn, ("model", "batch", "key"), fix)


def check_parameters(setup: Setup, precision: Precision) -> None:
    """Check that dtypes of parameters fit the precision, can be differentiated, and can be quantized."""
    for leaf in (decision.leaf for decision in setup.table.params):
        if leaf.is_trained and precision.compute is None:
            check_not_float16(f"train_step, parameter `{leaf.path}`", leaf.dtype)
        is_other = precision.params is not None and leaf.dtype != jnp.dtype(precision.params)
        is_quantized, is_exact = bool(setup.strategy.gathering.formats), not jnp.issubdtype(leaf.dtype, jnp.inexact)
        check_cases(
            f"train_step, parameter `{leaf.path}` of dtype {leaf.dtype.name}", "train it", "wrong-dtype",
            (is_other and jnp.issubdtype(leaf.dtype, jnp.floating), "init_state was called with a different precision",
             f"pass precision=mp.Precision(params={precision.params!r}) to init_state"),
            (leaf.is_trained and is_exact, "integers have no gradient", "freeze it with init_state(trainable=...), or "
             "store it as an nnx.Variable, in a Linen collection, or with from_functions(keeps_state=True)"),
            (is_quantized and jnp.issubdtype(leaf.dtype, jnp.complexfloating), "the kernels quantize real numbers",
             "remove quantize, or store the real and imaginary parts separately"),
        )  # fmt: skip


def check_precision_rules(setup: Setup, precision: Precision) -> None:
    """Check that precision rules match modules with parameters, and widen their compute dtype."""
    strategy, compute = setup.strategy, precision.compute
    paths = [decision.path for decision in setup.table.params]
    modules = {path.rpartition("/")[0] for path in paths}
    for rule in strategy.activations.precision:
        where, requested = f"precision rule `{rule.key}`", f"compute in {rule.value}"
        is_matched = any(Rules(precision={rule.key: rule.value}).dtype_in(path) for path in paths)
        reason = f"it matches none of the {len(modules)} modules that have parameters"
        fix = near_or(rule.key, modules, "write a pattern that matches the full path of a module")
        check_cases(where, requested, "unknown-name", (not is_matched, reason, fix))
        is_wider = compute is not None and jnp.dtype(rule.value).itemsize > jnp.dtype(compute).itemsize
        reason = f"it must be wider than train_step(precision=Precision(compute={compute!r}))"
        fix = 'use compute="bfloat16" and a wider rule, or remove the rule'
        check_cases(where, requested, "wrong-dtype", (not is_wider, reason, fix))
        case = (
            bool(strategy.gathering.formats),
            f"{strategy.label} gathers all weights in the compute dtype",
            "remove it",
        )
        check_cases(where, requested, "conflict", case)
        check_bits(where, rule.value)


def check_arrays(state: TrainState) -> None:
    """Check shapes and dtypes of arrays that may come from `state.replace`."""
    for (path, x), like in zip(tree_leaves_with_paths(state), jax.tree.leaves(state.setup.abstract), strict=True):
        if (x.shape, x.dtype) != (like.shape, like.dtype):
            requested = f"train it as {x.dtype.name}{list(x.shape)}"
            reason = f"the state was created with {like.dtype.name}{list(like.shape)}"
            fix = "load weights with mp.load_params; choose dtypes with init_state(precision=mp.Precision(params=...))"
            code = "wrong-shape" if x.shape != like.shape else "wrong-dtype"
            raise problem(f"`{path}` of the state", requested, reason, fix, code=code)


def check_layers(setup: Setup, options: StepOptions, context: Numerics) -> None:
    """Check, after the model was traced, that `remat`, `batch_slices` and `matmul` matched layers and marked arrays."""
    uses_layers = options.remat is not None or options.batch_slices > 1
    where = f"train_step(remat={options.remat!r}, batch_slices={options.batch_slices})"
    reason = "the model marks no layer: it never calls meshpar.scan_layers"
    fix = "run its stacked layers with mp.scan_layers(layer, x, params), or use Flax's own remat"
    is_unused = uses_layers and not context.num_scans
    check_cases(where, "change how layers run", "unsupported-feature", (is_unused, reason, fix))
    pattern = options.precision.unmatched(context.matched)
    where, requested = f"Precision(matmul=...), modules `{pattern}`", "compute their matmuls in 8 bits"
    reason = "none of their matmuls calls meshpar.layers.precision.dot_general"
    fix = "write a pattern for the full path of a module, or pass dot_general=... to the layers of the model"
    check_cases(where, requested, "unknown-name", (pattern is not None, reason, fix))
    rules = [(f"remat rule `{rule.key}`", rule.value) for rule in setup.strategy.activations.remat]
    marked = sorted(context.names - {MATMUL})
    reason = f"the layers mark {', '.join(f'`{mark}`' for mark in marked) or 'nothing'}"
    for where, value in ((f"train_step(remat={options.remat!r})", options.remat), *rules):
        for name in () if value is None else named_in(value):
            fix = near_or(name, marked, f'mark it: jax.ad_checkpoint.checkpoint_name(x, "{name}")')
            case = name not in context.names, reason, fix
            check_cases(where, f"save arrays marked `{name}`", "unknown-name", case)


def check_variables(before: PyTree, after: PyTree) -> None:
    """Check that the forward pass keeps structure, shapes and dtypes of the model's variables."""
    types: list[dict[str, Any]] = [
        {path: (jnp.shape(x), jnp.result_type(x)) for path, x in tree_leaves_with_paths(t)} for t in (before, after)
    ]
    for path in sorted(types[0].keys() | types[1].keys()):
        old, new = (of_tree.get(path, ((), None)) for of_tree in types)
        if old[1] is None or new[1] is None:
            reason = f"it exists only {'after' if old[1] is None else 'before'} the forward pass"
            fix = "return it from the loss function as a metric, or create it with the model (`sow` creates it later)"
        elif old[0] != new[0] or (old[1] != new[1] and jnp.promote_types(old[1], new[1]) != old[1]):
            was, now = (f"{dtype.name}{list(shape)}" for shape, dtype in (old, new))
            reason, fix = f"it is {was} before the forward pass and {now} after it", "keep its shape and dtype"
        else:
            continue
        raise problem(f"`{path}` of the model", "carry it from step to step", reason, fix, code="wrong-shape")


def check_constraints(setup: Setup, boundaries: Boundaries) -> None:
    """Check that rules matched modules, and warn if nothing constrains activations."""
    context = ambient()
    assert context is not None
    if not is_partial_trace():
        check_rules_matched(boundaries, context)
        _check_axes_used(setup, boundaries)
    is_local_batch = all(auto_sizes(context)[axis] == 1 for axis in setup.batch_axes)
    if boundaries.num_constrained or is_local_batch or not boundaries.shard_batch or not may_move_activations(setup):
        return
    sharded = [d.path for d in setup.table.params if set(axes_of_spec(d.spec, setup.sizes)) & set(setup.batch_axes)]
    if sharded:
        axes = ", ".join(f"`{axis}`" for axis in setup.batch_axes)
        warnings.warn(
            f"the model does not constrain its activations, and {len(sharded)} parameters (`{sharded[0]}`, ...) are "
            f"sharded over {axes}, like the batch. XLA may communicate activations instead of parameters. Add "
            'mp.constrain(x, "batch", ...) between layers; mp.explain(step, state, batch) lists the communication.',
            stacklevel=2,
        )


def _check_axes_used(setup: Setup, boundaries: Boundaries) -> None:
    """Check that no mesh axis is only for activations that the model never constrains."""
    context, params = ambient(), jax.tree.leaves(setup.layout.params, is_leaf=is_spec)
    assert context is not None
    used = boundaries.constrained_axes.union(setup.batch_axes, *map(axes_of_spec, params))
    sizes, rules = auto_sizes(context), context.rules
    for axis in sorted(axis for axis in rules.axes - used if sizes.get(axis, 1) > 1):
        names = sorted(name for name in rules.names if (rule := rules.name_rule(name)) and axis in axes_in(rule.value))
        shown = ", ".join(f"`{name}`" for name in names)
        reason = (
            f"its rules shard activations named {shown}, and the model constrains none, so its devices would repeat "
        )
        reason += "the same work"
        dims = f'"batch", "{names[0]}", None' if names else '"batch", None'
        fix = f"write x = mp.constrain(x, {dims}) between layers, or use a strategy without rules for this axis"
        requested = "divide the work over it"
        raise problem(f"mesh axis `{axis}` ({sizes[axis]})", requested, reason, fix, code="unmatched-rule")


def may_move_activations(setup: Setup) -> bool:
    """Return whether XLA may reshard activations that have no constraints, because the parameters are sharded."""
    updates = jax.tree.leaves(setup.layout.updates, is_leaf=is_spec)
    return not setup.model.is_explicit and any(
        set(axes_of_spec(spec, setup.sizes)) & set(setup.batch_axes) for spec in updates
    )
