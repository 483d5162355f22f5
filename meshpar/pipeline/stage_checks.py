"""What a user of stages may get wrong, said before the loop over ticks is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from meshpar.layers.auxiliary import check_numbers
from meshpar.layers.scan import check_alike
from meshpar.pipeline.executor import Micro, Params, layout_of
from meshpar.pipeline.jaxpr_slicing import Cut, flat_jaxpr
from meshpar.schedules import Schedule
from meshpar.sharding.jaxprs import equations
from meshpar.sharding.types import (
    AnyMesh,
    PyTree,
    axis_sizes,
    is_spec,
    num_shards,
    problem,
    spec_axes,
    tree_leaves_with_paths,
)

if TYPE_CHECKING:
    from meshpar.pipeline.gradients import StagedRun

WHERE = "pipeline.value_and_grad"


def check_functions(**functions: Any) -> None:
    """By name, what is called."""
    for name, function in functions.items():
        if not callable(function):
            where = f"{WHERE}({name}={function!r})"
            fix = "give stage_fn(parameters, x, micro) and loss_fn(ends, y, micro); first_fn(ends, micro) or None"
            raise problem(where, "call it", f"it is a {type(function).__name__}, not a function", fix)


def check_run(run: StagedRun) -> None:
    """Schedule and options fit the mesh."""
    schedule, mesh, axis = run.schedule, run.mesh, run.axis
    if not isinstance(schedule, Schedule):
        where, exists = f"{WHERE}(schedule={schedule!r})", f"it is a {type(schedule).__name__}, not a Schedule"
        raise problem(where, "run it", exists, "write schedule=mp.pipeline.one_f_one_b(stages=4, microbatches=8)")
    if not isinstance(mesh, AnyMesh) or any(kind != AxisType.Auto for kind in mesh.axis_types):
        asked, fix = "run stages on it", f"write mesh=mp.MeshSpec({axis}={schedule.stages}, ...).build()"
        raise problem(f"{WHERE}(mesh={mesh!r})", asked, "it takes a mesh whose axes are all of type Auto", fix)
    sizes = axis_sizes(mesh)
    if sizes.get(axis) != schedule.stages:
        asked = f"run the {schedule.stages} stages of schedule `{schedule.name}`"
        fix = f"give it {schedule.stages} ranks, MeshSpec({axis}={schedule.stages}, ...), or a schedule of other stages"
        raise problem(f"{WHERE}(axis={axis!r})", asked, f"the mesh has {_text(sizes)}", fix)
    if run.gather not in ("step", "microbatch"):
        where = f"{WHERE}(gather={run.gather!r})"
        raise problem(where, "gather weights then", "there is no such choice", 'use "step" or "microbatch"')
    if run.batch_axes is not None:
        _check_batch_axes(run.batch_axes, axis, sizes)
    schedule.validate()


def _check_batch_axes(given: Any, stages: str, sizes: Mapping[str, int]) -> None:
    named = (given,) if isinstance(given, str) else given
    if not (isinstance(named, tuple | list) and all(isinstance(name, str) for name in named)):
        asked = "split the batch's rows over them"
        fix = f'write batch_axes=("data", "fsdp"), of {", ".join(sizes)}, or leave it out'
        raise problem(f"{WHERE}(batch_axes={given!r})", asked, "those are no names of mesh axes", fix)
    for name in named:
        if name == stages or name not in sizes or named.count(name) > 1:
            once = f"the mesh has {', '.join(sizes)}, each to be named once"
            where, exists = f"{WHERE}(batch_axes={given!r})", "that axis is the stages'" if name == stages else once
            raise problem(where, f"split the batch over `{name}`", exists, "name axes of the mesh that split rows")


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())


# ---- What a step is given --------------------------------------------------------------------------------------------


def checked_params(run: StagedRun, params: Any, specs: PyTree | None) -> Params:
    """Parameters that the schedule has parts for, and how they are to lie."""
    if not isinstance(params, tuple) or len(params) not in (1, 2):
        where, exists = "pipeline parameters", "they are those of the parts, and of what stands before and behind them"
        raise problem(where, f"run a model of {type(params).__name__}", exists, "give pipeline.Params(parts, ends)")
    params = Params(*params)
    _check_plain("pipeline parameters", params.parts, "be trained")
    _check_parts(run, params)
    if specs is not None:
        _check_specs(run, params, specs)
    return params


def _check_plain(name: str, tree: PyTree, asked: str) -> None:
    """Numbers, and no random keys."""
    for path, x in tree_leaves_with_paths(tree):
        if jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended):
            exists = "parameters, messages and their gradients are plain numbers"
            fix = "draw random numbers from micro.key, or carry jax.random.key_data(key)"
            raise problem(f"{name}, `{path}`", f"{asked} as {x.dtype}", exists, fix)


def _check_parts(run: StagedRun, params: Params) -> None:
    wanted = run.schedule.num_parts
    for path, x in tree_leaves_with_paths(params.parts):
        if np.shape(x)[:1] != (wanted,):
            where = f"pipeline parameters `{path}` of shape {np.shape(x)} dim 0"
            asked = f"be the parts of schedule `{run.schedule.name}`"
            raise problem(where, asked, f"it has {wanted} parts", f"stack {wanted} parts along the first dim")


def _check_specs(run: StagedRun, params: Params, specs: PyTree) -> None:
    """Of how the parts' parameters are to lie."""
    sizes = axis_sizes(run.mesh)
    leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)
    if str(structure) != str(jax.tree.structure(params.parts)):
        where = f"pipeline.value_and_grad(specs=...) of structure {structure}"
        asked, fix = "lay out the parts' parameters", f'give a PartitionSpec("{run.axis}", ...) for each leaf'
        raise problem(where, asked, f"those are of structure {jax.tree.structure(params.parts)}", fix)
    for (path, x), spec in zip(tree_leaves_with_paths(params.parts), leaves, strict=True):
        entries = [spec_axes(entry) for entry in spec] if is_spec(spec) else []
        axes = [axis for entry in entries for axis in entry]
        if (
            entries[:1] != [(run.axis,)]
            or len(set(axes)) < len(axes)
            or not set(axes) <= set(sizes)
            or len(entries) > np.ndim(x)
            or any(size % num_shards([entry], sizes) for size, entry in zip(np.shape(x), entries, strict=False))
        ):
            raise problem(
                f"pipeline.value_and_grad(specs=...), `{path}` of shape {np.shape(x)}",
                f"lie as {spec!r}",
                f"parts come first, split over `{run.axis}` alone; other dims over other axes that divide them, of "
                + _text(sizes),
                f'write PartitionSpec("{run.axis}"), and for other dims None or axes of the mesh',
            )


def check_key(key: Any) -> None:
    """One key, or None."""
    dtype, shape = getattr(key, "dtype", None), np.shape(key)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    if key is not None and not typed and not (dtype == np.uint32 and len(shape) == 1):
        asked, fix = "draw random numbers for every microbatch from it", "give jax.random.key(0), or leave it out"
        raise problem(f"a pipeline's random key, {type(key).__name__} of shape {shape}", asked, "it is one key", fix)


def check_late(late: Any, schedule: Schedule) -> None:
    """`[stage, numbers]`, or None."""
    if late is not None and (not hasattr(late, "dtype") or late.ndim != 2 or len(late) != schedule.stages):
        where = f"late, a {type(late).__name__} of shape {getattr(late, 'shape', ())}"
        exists = f"every one of {schedule.stages} stages brings a row of numbers"
        raise problem(where, "be summed over the stages", exists, f"give a float32 array [{schedule.stages}, numbers]")


# ---- What the functions do -------------------------------------------------------------------------------------------


def owners_of_ends(run: StagedRun, one: PyTree, ends: PyTree, micro: Micro) -> list[set[int]]:
    """For each leaf of the ends, the stages that make gradients of it; the functions fit each other."""
    functions, count = run.functions, len(jax.tree.leaves(ends))
    x = jax.eval_shape(functions.first, ends, micro)
    _check_plain("what first_fn gives", x, "be sent from stage to stage")
    y, _ = jax.eval_shape(functions.stage, one, x, micro)
    check_alike("stage_fn", x, y)
    if run.split_inside and not any(layout_of(functions.first, ends, micro)):
        raise problem(
            "what stands before the stacked layers",
            f"give them activations split over {', '.join(run.split_inside)}",
            "its result is no meshpar.constrain(...) that splits them so",
            'end it with x = mp.constrain(x, "batch", "norm_seq", "act_embed"), with the names of its dims',
        )
    if functions.inside is not None:
        _check_own(functions.inside, one, ends, x, micro)

    def loss(ends: PyTree, y: PyTree, micro: Micro) -> Any:
        return functions.last(ends, y, micro).normalized()[0]

    uses = []
    for name, function, args in (
        ("first_fn", functions.first, (ends, micro)),
        ("stage_fn", functions.stage, (one, x, micro)),
        ("loss_fn", loss, (ends, x, micro)),
    ):
        closed, _ = flat_jaxpr(lambda *args, f=function: (f(*args), ()), *args)
        _check_apart(name, closed.jaxpr, run.axis, axis_sizes(run.mesh))
        if name != "stage_fn":
            uses.append(Cut(closed, first=[True] * len(closed.jaxpr.outvars)).first_needs[:count])
    parts = run.schedule.parts.tolist()
    held = [{s for s, row in enumerate(parts) if part in row} for part in (0, run.schedule.num_parts - 1)]
    return [
        set[int]().union(*(stages for use, stages in zip(of, held, strict=True) if use))
        for of in zip(*uses, strict=True)
    ]


def checked_loss(found: Any) -> tuple[Any, Mapping[str, Any]]:
    """Check the result of a loss function, and return its loss and metrics."""
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
        asked = f"take the loss and the metrics from its result, a {type(found).__name__}"
        raise problem("loss_fn", asked, "it gives (loss, metrics), a loss and a dict", "return loss, {}")
    loss: Any = getattr(found[0], "total", found[0])
    if np.shape(loss):
        asked, fix = f"differentiate a loss of shape {np.shape(loss)}", "return loss.mean(), {...}"
        raise problem("loss_fn", asked, "a loss is a scalar, the mean over the microbatch's rows", fix)
    kind = getattr(loss, "dtype", None) or np.asarray(loss).dtype
    if not jnp.issubdtype(kind, jnp.floating):
        asked = f"differentiate a loss of dtype {kind}"
        fix = "return loss.astype(jnp.float32), {...}, and nothing rounded on the way to it"
        raise problem("loss_fn", asked, "a loss is a real number, of a floating dtype", fix)
    weight = getattr(found[0], "weight", 1)
    check_numbers({**found[1], "weight": weight})
    return found


def _check_own(inside: Callable[..., PyTree], one: PyTree, ends: PyTree, x: PyTree, micro: Micro) -> None:
    """Layers may not use parameters from outside of them: their gradients would be lost."""
    closed, _ = flat_jaxpr(lambda ends, one, x, micro: (inside(one, ends, x, micro), ()), ends, one, x, micro)
    used = Cut(closed, first=[True] * len(closed.jaxpr.outvars)).first_needs
    for leaf, use in zip(jax.tree.leaves(ends), used, strict=False):
        if use:
            raise problem(
                f"the layers of the model, and a parameter of shape {leaf.shape}",
                "use it inside of a stage",
                "it stands outside of the stacked layers: only the first and the last stage have a part in it",
                "give every layer a copy in its own stacked parameters, or use it before or behind the layers",
            )


LOCAL = frozenset({"axis_index", "pvary", "pcast", "pbroadcast"})
"""Primitives that name an axis and send nothing."""


def _check_apart(name: str, jaxpr: Any, axis: str, sizes: Mapping[str, int]) -> None:
    """Nothing communicates over the stages: each is in another part of the model, in another microbatch."""
    for eqn, _ in equations(jaxpr):
        named = eqn.params.get("axis_name", eqn.params.get("axes", ()))
        axes = named if isinstance(named, tuple | list | frozenset | set) else (named,)
        if axis in axes and eqn.primitive.name not in LOCAL:
            asked = f"run `{eqn.primitive.name}` over mesh axis `{axis}`"
            fix = "leave it out: results go from stage to stage by themselves, and gradients are summed behind the loop"
            raise problem(name, asked, "its ranks are the stages, each at another microbatch and some at none", fix)
        if eqn.primitive.name == "ppermute" and any(sizes.get(a, 1) > 1 for a in axes):
            raise problem(
                name,
                f"run `ppermute` over {', '.join(f'`{a}`' for a in axes)} inside a stage",
                "host devices wait for all others in every permute, also of groups of them, and other stages do "
                "something else meanwhile: a deadlock",
                "leave out what sends around a ring (context_parallel, matmuls that overlap their messages) under "
                "stages; tensor_parallel(sequence=True) works",
            )
