"""Checks of the arguments and functions of a pipelined model, before the loop over ticks is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from meshpar.layers.auxiliary import check_numbers
from meshpar.layers.scan import check_alike
from meshpar.pipeline.jaxpr_slicing import PartialEval, flat_jaxpr
from meshpar.pipeline.stage_program import MicrobatchInputs, Params, layout_of
from meshpar.pipeline.staged_model import StagedModel
from meshpar.schedules import Schedule
from meshpar.schedules.uniform import uniform
from meshpar.sharding.errors import check_choice, problem
from meshpar.sharding.jaxprs import equations
from meshpar.sharding.types import AnyMesh, PyTree, axis_sizes, is_spec, num_shards, spec_axes, tree_leaves_with_paths

WHERE = "pipeline.value_and_grad"


def check_functions(**functions: object) -> None:
    """Check that arguments are callable."""
    for name, function in functions.items():
        if not callable(function):
            where, reason = f"{WHERE}({name}={function!r})", f"it is a {type(function).__name__}, not a function"
            fix = "pass stage_fn(params, x, inputs), loss_fn(params, y, inputs) and first_fn(params, inputs) or None"
            raise problem(where, "call it", reason, fix, code="wrong-type")


def check_run(run: StagedModel) -> None:
    """Check the schedule and the options against the mesh."""
    schedule, mesh, axis = run.schedule, run.mesh, run.axis
    is_auto = isinstance(mesh, AnyMesh) and all(kind == AxisType.Auto for kind in mesh.axis_types)
    example = f"mesh=mp.MeshSpec({axis}=4, ...).build(), schedule=mp.pipeline.one_f_one_b(stages=4, microbatches=8)"
    for name, is_valid, reason in (
        ("schedule", isinstance(schedule, Schedule), "it must be a Schedule"),
        ("mesh", is_auto, "it must be a mesh with Auto axes only"),
    ):
        if not is_valid:
            where = f"{WHERE}({name}={getattr(run, name)!r})"
            raise problem(where, "run stages", reason, f"write {example}", code="wrong-type")
    sizes = axis_sizes(mesh)
    if sizes.get(axis) != schedule.stages:
        requested = f"run the {schedule.stages} stages of schedule `{schedule.name}`"
        fix = f"use MeshSpec({axis}={schedule.stages}, ...), or a schedule with a different number of stages"
        raise problem(f"{WHERE}(axis={axis!r})", requested, f"the mesh has {sizes}", fix, code="unknown-axis")
    check_choice(WHERE, "the time of the weight gather", ("step", "microbatch"), gather=run.gather)
    names = (run.batch_axes,) if isinstance(run.batch_axes, str) else () if run.batch_axes is None else run.batch_axes
    is_names = isinstance(names, tuple | list) and all(isinstance(name, str) for name in names)
    for is_wrong, reason, code in (
        (not is_names, "it must be a tuple of mesh axis names", "wrong-type"),
        (is_names and axis in names, f"`{axis}` is the axis of the stages", "conflict"),
        (is_names and not set(names) <= set(sizes), "one of them is not an axis of the mesh", "unknown-axis"),
        (is_names and len(set(names)) < len(names), "an axis is used twice", "unknown-axis"),
    ):
        if is_wrong:
            where, fix = f"{WHERE}(batch_axes={run.batch_axes!r})", f"use axes among {', '.join(sizes)}, or omit it"
            raise problem(where, "shard the batch over these axes", reason, fix, code=code)
    schedule.validate()


# ---- Arguments of a step ---------------------------------------------------------------------------------------------


def checked_params(run: StagedModel, params: object, specs: PyTree | None) -> Params:
    """Check parameters and their specs against the schedule and the mesh, and return them as `Params`."""
    if not isinstance(params, tuple) or len(params) not in (1, 2):
        reason, fix = f"they are a {type(params).__name__}", "pass pipeline.Params(chunks, embedding_and_head)"
        raise problem("pipeline parameters", "run the model", reason, fix, code="wrong-type")
    params = Params(*params)
    _check_plain("pipeline parameters", params.chunks)
    num_parts = run.schedule.num_parts
    for path, x in tree_leaves_with_paths(params.chunks):
        if np.shape(x)[:1] != (num_parts,):
            where = f"pipeline parameters `{path}` of shape {np.shape(x)} dim 0"
            reason = f"schedule `{run.schedule.name}` has {num_parts} chunks"
            raise problem(where, "", reason, f"stack {num_parts} chunks along the first dim", code="wrong-shape")
    if specs is not None:
        _check_specs(run, params, specs)
    return params


def _check_plain(name: str, tree: PyTree) -> None:
    """Check that a tree contains no PRNG keys."""
    for path, x in tree_leaves_with_paths(tree):
        if jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended):
            reason = "parameters, messages and their gradients must be arrays of numbers"
            fix = "draw random numbers from inputs.key, or pass jax.random.key_data(key)"
            raise problem(f"{name}, `{path}` of dtype {x.dtype}", "", reason, fix, code="wrong-dtype")


def _check_specs(run: StagedModel, params: Params, specs: PyTree) -> None:
    where, sizes = f"{WHERE}(specs=...)", axis_sizes(run.mesh)
    leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)
    fix = f'write PartitionSpec("{run.axis}") for each leaf, with None or mesh axes for other dims'
    if str(structure) != str(jax.tree.structure(params.chunks)):
        reason = f"its structure is {structure}, and the parameters have {jax.tree.structure(params.chunks)}"
        raise problem(where, "shard the parameters of the chunks", reason, fix, code="wrong-shape")
    for (path, x), spec in zip(tree_leaves_with_paths(params.chunks), leaves, strict=True):
        entries = [spec_axes(entry) for entry in spec] if is_spec(spec) else []
        axes = [axis for entry in entries for axis in entry]
        if (
            entries[:1] != [(run.axis,)]
            or len(set(axes)) < len(axes)
            or not set(axes) <= set(sizes)
            or len(entries) > np.ndim(x)
            or any(size % num_shards([entry], sizes) for size, entry in zip(np.shape(x), entries, strict=False))
        ):
            reason = (
                f"the first dim must be sharded over `{run.axis}` only, and other dims over other axes that divide "
                f"them, among {sizes}"
            )
            where = f"{where}, {spec!r} for `{path}` of shape {np.shape(x)}"
            raise problem(where, "", reason, fix, code="bad-spec")


def check_key(key: Any) -> None:
    """Check that `key` is a single PRNG key or None."""
    dtype, shape = getattr(key, "dtype", None), np.shape(key)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    if key is not None and not is_typed and not (dtype == np.uint32 and len(shape) == 1):
        where = f"pipeline PRNG key, {type(key).__name__} of shape {shape}"
        fix = "pass jax.random.key(0), or omit it"
        raise problem(where, "draw random numbers from it", "a step needs a single key", fix, code="wrong-type")


# ---- User functions --------------------------------------------------------------------------------------------------


def checked_uses(
    run: StagedModel, chunk_params: PyTree, embedding_and_head: PyTree, inputs: MicrobatchInputs
) -> tuple[list[bool], list[bool]]:
    """Check the functions against each other, and return whether `first` and `last` use each leaf.

    The leaves are those of `embedding_and_head`.
    """
    functions, count = run.functions, len(jax.tree.leaves(embedding_and_head))
    x = jax.eval_shape(functions.first, embedding_and_head, inputs)
    _check_plain("result of first_fn", x)
    y, _ = jax.eval_shape(functions.stage, chunk_params, x, inputs)
    check_alike("stage_fn", x, y)
    if run.activation_axes and not any(layout_of(functions.first, embedding_and_head, inputs)):
        requested = f"shard it over {', '.join(run.activation_axes)}"
        reason = "the code before the layers does not end with a suitable meshpar.constrain(...)"
        fix = 'end it with x = mp.constrain(x, "batch", "norm_seq", "act_embed"), with the logical names of the dims'
        raise problem("the input of the stacked layers", requested, reason, fix, code="unknown-layout")
    if functions.inside is not None:
        _check_independent(functions.inside, chunk_params, embedding_and_head, x, inputs)

    def loss(params: PyTree, y: PyTree, inputs: MicrobatchInputs) -> Any:
        return functions.last(params, y, inputs).normalized()[0]

    uses = []
    for name, function, args in (
        ("first_fn", functions.first, (embedding_and_head, inputs)),
        ("stage_fn", functions.stage, (chunk_params, x, inputs)),
        ("loss_fn", loss, (embedding_and_head, x, inputs)),
    ):
        closed, _ = flat_jaxpr(lambda *args, f=function: (f(*args), ()), *args)
        is_uniform = uniform(run.schedule) is not None
        _check_collectives(name, closed.jaxpr, run.axis, axis_sizes(run.mesh), is_uniform=is_uniform)
        if name != "stage_fn":
            uses.append(list(PartialEval(closed, known=[True] * len(closed.jaxpr.outvars)).known_reads[:count]))
    return uses[0], uses[1]


def checked_loss(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """Check the result of a loss function, and return its loss and metrics."""
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    loss: Any = getattr(result[0], "total", result[0]) if is_pair else 0.0
    dtype = getattr(loss, "dtype", None) or np.asarray(loss).dtype
    for is_valid, reason, code in (
        (is_pair, f"it returned a {type(result).__name__}, not (loss, dict)", "wrong-type"),
        (not np.shape(loss), f"the loss must be a scalar, and its shape is {np.shape(loss)}", "wrong-shape"),
        (jnp.issubdtype(dtype, jnp.floating), f"the loss must be floating, and its dtype is {dtype}", "wrong-dtype"),
    ):
        if not is_valid:
            fix = "return loss.mean(), {...} with a floating loss"
            raise problem("loss_fn", "differentiate its result", reason, fix, code=code)
    check_numbers({**result[1], "weight": getattr(result[0], "weight", 1)})
    return result


def _check_independent(
    inside: Callable[..., PyTree], chunk_params: PyTree, embedding_and_head: PyTree, x: PyTree, inputs: MicrobatchInputs
) -> None:
    """Check that layers do not use parameters from outside the stack, whose gradients would be lost."""
    closed, _ = flat_jaxpr(
        lambda outer, chunk_params, x, inputs: (inside(chunk_params, outer, x, inputs), ()),
        embedding_and_head, chunk_params, x, inputs,
    )  # fmt: skip
    used = PartialEval(closed, known=[True] * len(closed.jaxpr.outvars)).known_reads
    for leaf, is_used in zip(jax.tree.leaves(embedding_and_head), used, strict=False):
        if is_used:
            where = f"a parameter of shape {leaf.shape} that the layers use"
            reason = "it is not part of the stacked layers, and only the first and the last stage compute its gradient"
            fix = "add a copy to the stacked parameters of each layer, or use it before or after the layers"
            raise problem(where, "use it inside a stage", reason, fix, code="unsupported-feature")


LOCAL = frozenset({"axis_index", "pvary", "pcast", "pbroadcast"})
"""Primitives that name a mesh axis but do not communicate."""


def _check_collectives(name: str, jaxpr: Any, axis: str, sizes: Mapping[str, int], *, is_uniform: bool) -> None:
    """Check that a function does not communicate over the stages, which run different chunks and microbatches.

    If all stages run the same ops in a tick (`is_uniform`), the function may permute over other axes.
    """
    for eqn, _ in equations(jaxpr):
        names, primitive = eqn.params.get("axis_name", eqn.params.get("axes", ())), eqn.primitive.name
        axes = names if isinstance(names, tuple | list | frozenset | set) else (names,)
        if axis in axes and primitive not in LOCAL:
            reason = f"ranks along `{axis}` are stages, which process different microbatches, or none, at the same time"
            fix = "remove the collective; the executor sends results between stages and sums gradients after the loop"
        elif primitive == "ppermute" and not is_uniform and any(sizes.get(a, 1) > 1 for a in axes):
            reason = (
                "a permute synchronizes all host devices, even outside its groups, and other stages run different "
                "ops at that time: a deadlock"
            )
            fix = (
                "use schedule='eager-1f1b' or 'interleaved-1f1b', in which all stages run the same ops, or no ring "
                "communication (context_parallel, overlapped matmuls) inside stages"
            )
        else:
            continue
        requested = f"run `{primitive}` over {', '.join(f'`{a}`' for a in axes)} inside a stage"
        raise problem(name, requested, reason, fix, code="unsupported-feature")
