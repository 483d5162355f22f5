"""Compilation of a step for local devices or a remote cluster, and analysis of the program.

step, state, batch ─► traced ─► compiled ─► census ─► expected · overlap · lint ─► Report
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import jax
from jax.extend import core
from jax.sharding import Mesh

from meshpar.hardware.clusters import Cluster, cluster_here, parse_cluster
from meshpar.hardware.compile_options import fingerprint, overlap_limit
from meshpar.hardware.grouped_kernels import grouped_kernels
from meshpar.inspect import example_collectives
from meshpar.inspect.census import Collective, census, on_stage
from meshpar.inspect.expected import expected_by_stage, num_outer_scopes, scopes_above
from meshpar.inspect.function import explain_function
from meshpar.inspect.hlo.shapes import dtype_bits
from meshpar.inspect.kernels import ProgramKernel, kernel_findings, kernel_rows, program_kernels, reasons
from meshpar.inspect.lint import Finding, lint
from meshpar.inspect.matching import SMALL_SHARE, MatchResult, match_collectives, merge_stages
from meshpar.inspect.memory import memory, remedies
from meshpar.inspect.model_flops import forward_of, micro_batch, model_flops
from meshpar.inspect.param_usage import uses
from meshpar.inspect.pod import PodProcess
from meshpar.inspect.program import Program, compile_here
from meshpar.inspect.report import FunctionReport, Report, program_notes, timed_collectives
from meshpar.inspect.schedule_counts import ScheduleCounts
from meshpar.inspect.stage_summary import stages
from meshpar.inspect.target import mesh_on, require_aot, traced_for
from meshpar.inspect.timeline.simulator import timeline
from meshpar.inspect.timeline.step_prediction import compute, overlap, why_not_timed
from meshpar.inspect.traced_collectives import by_stage, enters, messages, vocab_chunks
from meshpar.layers.example_flow import Examination
from meshpar.layers.precision import cast_back_fix, high_precision_ops
from meshpar.models import embedding_lookup as lookup
from meshpar.moe.grouped import SWIGLU, choose_grouped_matmul, has_tokamax
from meshpar.parallel.batch import StepBatch, shape_of
from meshpar.parallel.execution import Execution, ParamUsage, split_axes
from meshpar.sharding.context import clear_context_mesh
from meshpar.sharding.errors import problem
from meshpar.sharding.printing import human_mesh
from meshpar.sharding.types import PyTree, axis_sizes
from meshpar.training.independence import examined
from meshpar.training.state import Setup, TrainState, abstract_state
from meshpar.training.step import TrainStep

Compile = Callable[..., Program]
"""Function that compiles a traced or lowered step. Its keyword `options` replaces the step's compile options."""


@overload
def explain(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    /,
    cluster: str | Cluster | None = None,
    *,
    pod: PodProcess | None = None,
    advise: bool = True,
) -> Report: ...


@overload
def explain(
    step: Callable[..., Any],
    *args: PyTree,
    cluster: str | Cluster | None = None,
    in_shardings: PyTree = None,
    pod: PodProcess | None = None,
) -> FunctionReport: ...


@clear_context_mesh()
def explain(
    step: TrainStep | Callable[..., Any],
    *args: PyTree,
    cluster: str | Cluster | None = None,
    in_shardings: PyTree = None,
    pod: PodProcess | None = None,
    advise: bool = True,
) -> Report | FunctionReport:
    """Compile a training step, or any function, and report its memory, communication and compute.

    The collectives of a training step are compared with the collectives that the strategy is expected to cause. For
    other functions the report lists the collectives by mesh axis and source line. Nothing is executed, and the
    arguments are not modified.

    Args:
      step: from `train_step`; or a function, plain or jitted.
      *args: `state, batch` of a training step, optionally followed by `cluster`: a state from `init_state` or
        `abstract_state`, whose mesh has a device per GPU of the cluster, and the global batch, as arrays or as
        `jax.ShapeDtypeStruct`. For a function, its positional arguments, also as arrays or shapes.
      cluster: `h100:8x8`, the path of a profile, or a `Cluster`. The program is compiled for these GPUs on the local
        machine, which needs no GPU but the `aot` extra. None compiles for the local devices.
      in_shardings: for functions, the sharding of each argument or of its leaves, as in `jax.jit`. None uses the
        shardings of the arguments. For a cluster, the mesh may be abstract.
      pod: a running compiler process, to share between several reports.
      advise: if a training step does not fit in memory, compile variants until one fits.

    Returns:
      A `Report` of a training step, or a `FunctionReport`. Print it, display it in a notebook, or convert it with
      `to_json`.

    Raises:
      MeshparError: the number of devices differs from the cluster's, the cluster is unknown, the `aot` extra is
        missing, or the mesh is abstract and no cluster is given.
      PodError: the compiler failed.

    Example:
      >>> report = mp.explain(mp.train_step(loss_fn), state, batch)
      >>> report.is_as_expected
      True

      A function instead of a step:

      >>> sharding = jax.NamedSharding(mesh, P(None, "tensor")), jax.NamedSharding(mesh, P("tensor", None))
      >>> x, w = jax.ShapeDtypeStruct((64, 256), np.float32), jax.ShapeDtypeStruct((256, 512), np.float32)
      >>> report = mp.explain(jnp.matmul, x, w, in_shardings=sharding)
      >>> {(sent.collective.kind, *sent.collective.axes) for sent in report.collectives}
      {('all-reduce', 'tensor')}
    """
    _check_arguments(step, args, in_shardings)
    if not isinstance(step, TrainStep):
        return explain_function(step, args, cluster=cluster, in_shardings=in_shardings, pod=pod)
    state, batch, *rest = args
    cluster = rest[0] if rest else cluster
    cluster = None if cluster is None else parse_cluster(cluster)
    check_equal_parts(state)
    batch = jax.tree.map(shape_of, batch)
    state = on_target(state, cluster)
    if cluster is None:
        return _explain(step, state, batch, compile_here, cluster_here(list(state.setup.mesh.devices.flat)), advise)
    with contextlib.ExitStack() as stack:
        process = pod or stack.enter_context(PodProcess())
        stack.enter_context(traced_for(cluster))
        options = step.compile_options(state.setup)
        compiler = functools.partial(process.compile, cluster=cluster, options=options)
        try:
            return _explain(step, state, batch, compiler, cluster, advise)
        except ValueError as error:
            if "AbstractMesh cannot be used" not in str(error):
                raise
            requested = "compile a step with an operation that queries its devices, such as cuDNN's attention"
            reason = "jax has disabled its CUDA plugin, because this process has no GPUs"
            fix = "set JAX_PLATFORMS=cpu before Python starts"
            raise problem("explain", requested, reason, fix, code="unsupported-feature") from error


def _explain(
    step: TrainStep, state: TrainState, batch: PyTree, compiler: Compile, cluster: Cluster | None, advise: bool
) -> Report:
    setup, sizes = state.setup, axis_sizes(state.setup.mesh)
    traced = step.trace(state, batch)
    batch = StepBatch.of(batch, setup.batch_sharding, setup.strategy.activations)
    lowered = traced.lower(lowering_platforms=None if compiler is compile_here else ("cuda",))
    options, execution = step.compile_options(setup), step.describe(state, batch)
    counts = None if execution.pipeline is None else ScheduleCounts(execution.pipeline.table())
    program = compiler(lowered)
    collectives = census(program.module, sizes, counts)
    on_cpu, reason = program.target == "cpu", why_not_timed(program.target, cluster)
    times = None
    if cluster is not None and not reason:
        times = timeline(program.module, collectives, cluster, counts, overlap_limit=overlap_limit(options))
    execution = dataclasses.replace(execution, on_cpu=on_cpu)
    account = memory(program, setup, batch, cluster, execution=execution)
    if advise and account.fits is False:
        assert account.limit_bytes is not None
        changes = remedies(step, setup, batch, compiler, account.limit_bytes)
        account = dataclasses.replace(account, remedies=changes)
    flops = model_flops(step, state, batch)
    param_uses = _uses(step, state, batch)
    examination = None
    if not execution.divides_batch:
        examination = examined(step.loss_fn, step.options, state, micro_batch(step, state, batch))
    match = check_collectives(setup, execution, collectives, traced.jaxpr, uses=param_uses, examination=examination)
    findings = [*lint(program, collectives, setup, execution, cluster, times), *_other_dtypes(match, execution)]
    wide = high_precision_ops(traced.jaxpr.jaxpr, execution.compute, setup.strategy.activations.dtypes)
    if wide is not None:
        findings.append(Finding(rule="wide-compute", source=wide.where, message=wide.message, fix=wide.fix, nbytes=0))
    choices = step.kernels(state, batch)
    kernels: tuple[ProgramKernel, ...] = ()
    if times is not None and cluster is not None:
        kernels = program_kernels(program.module, cluster, counts)
        findings += kernel_findings(kernels, execution, choices, setup.strategy.activations, num_outer_scopes(setup))
    why = reasons(choices, grouped_why=_why_blocked(execution), is_autotuned=compiler is compile_here)
    return Report(
        devices=setup.mesh.size,
        mesh=sizes,
        target=program.target,
        strategy=str(setup.strategy),
        memory=account,
        collectives=timed_collectives(collectives, times, cluster),
        matching=match,
        overlap=overlap(times, reason),
        compute=compute(
            program.module,
            num_devices=setup.mesh.size,
            model_flops=flops,
            times=times,
            reason=reason,
            schedule_counts=counts,
            cluster=cluster,
        ),
        findings=tuple(findings),
        compile_s=program.compile_s,
        compile_options=options,
        fingerprint=fingerprint(lowered, options),
        notes=(
            *program_notes(program, collectives, account.host_bytes, is_for_pod=compiler is not compile_here),
            *_grouped_note(program, execution),
            *_repeated_reductions_note(execution),
            *_router_losses_note(execution, traced.out_info[1]),
        ),
        kernels=choices,
        kernel_list=kernel_rows(kernels, times.step_s, why) if times is not None else (),
        stages=None if execution.pipeline is None else stages(execution, times, program.module, kernels),
        timeline=times,
        program=program,
        shardings=setup.table,
    )


def check_collectives(
    setup: Setup,
    execution: Execution,
    collectives: Sequence[Collective],
    jaxpr: core.ClosedJaxpr | None = None,
    *,
    uses: Mapping[str, ParamUsage] | None = None,
    examination: Examination | None = None,
) -> MatchResult:
    """Compare a program's collectives with the strategy's expected collectives and the traced kernel messages.

    Args:
      setup: model, mesh and strategy.
      execution: the description of the step.
      collectives: the program's census.
      jaxpr: the traced step, which shows the collectives of `shard_map` kernels. None means no kernels.
      uses: uses of parameters by path.
      examination: the examined loss function, on the global batch of a micro-step. None if it only sees local batches.
    """
    limits: dict[str, Any] = {
        "sizes": execution.sizes,
        "longest": max((max(d.leaf.shape, default=0) * d.leaf.num_layers for d in setup.table.params), default=0),
        "batch_axes": execution.batch_axes,
    }
    if execution.pipeline is not None:
        sent = () if jaxpr is None else messages(jaxpr, ScheduleCounts(execution.pipeline.table()))
        by_stages = enumerate(expected_by_stage(setup.strategy, execution))
        return merge_stages(
            [
                match_collectives(expected, on_stage(collectives, stage), by_stage(sent, stage), **limits)
                for stage, expected in by_stages
            ]
        )
    traced = dataclasses.replace(
        execution.with_uses(uses or {}),
        exchanges_rows=jaxpr is not None and enters(jaxpr, lookup.SCOPE),
        vocab_chunks=1 if jaxpr is None else vocab_chunks(jaxpr),
    )
    expected = setup.strategy.expected_collectives(traced)
    if examination is not None:
        examples = execution.examples * execution.num_shards(execution.batch_axes)
        expected += tuple(example_collectives.expected(examination, examples, execution))
    limits["small_share"] = SMALL_SHARE if uses else 0.0
    limits["unannotated_axes"] = traced.unannotated_axes
    limits["scopes_above"] = scopes_above(setup)
    sent = () if jaxpr is None else messages(jaxpr)
    return match_collectives(expected, collectives, sent, micro_steps=execution.micro_steps, **limits)


def _uses(step: TrainStep, state: TrainState, batch: PyTree) -> dict[str, ParamUsage]:
    """Return path -> uses of the parameter; empty if the model has activation constraints."""
    decisions = state.setup.table.params
    if not state.setup.has_free_activations:
        return {}
    param_uses = uses(forward_of(step, state, batch), len(decisions))
    return {decision.path: use for decision, use in zip(decisions, param_uses, strict=True)}


def _other_dtypes(matching: MatchResult, execution: Execution) -> Iterator[Finding]:
    """Yield a finding for each expected collective whose dtype differs from the precision of the step.

    With 8-bit matmuls, weights gathered in an 8-bit dtype are expected.
    """
    rounded = {"f8e4m3fn", "f8e5m2", "f16"} if execution.low_precision else set()  # f16: by XLA:CPU
    for entry in matching.matched:
        if dtypes := set(entry.actual_dtypes) - (rounded if entry.kind == "all-gather" else set()):
            is_wider = max(map(dtype_bits, dtypes)) > dtype_bits(entry.dtype)
            yield Finding(
                rule="other-dtype",
                message=f"{entry.role} ({', '.join(entry.tensors[:3])}{', ...' * (len(entry.tensors) > 3)}): "
                f"{entry.kind} over {'*'.join(entry.axes)} in {', '.join(sorted(dtypes))}, "
                f"but the step's precision is {entry.dtype}",
                fix=cast_back_fix(execution.compute)
                if is_wider
                else "pass dot_general=meshpar.layers.precision.dot_general to the model's matmuls, so that gradients "
                "are reduced in Precision.reduce",
                nbytes=int(entry.actual_bytes),
            )


def _grouped_note(program: Program, execution: Execution) -> Iterator[str]:
    """Yield a note if expert matmuls on GPUs use no library kernel, for example because a package is not installed."""
    if program.target == "cpu" or f"/{SWIGLU}/" not in program.text:
        return
    yield f"expert matmuls use the blocked implementation: {_why_blocked(execution)}"


def _why_blocked(execution: Execution) -> str:
    """Return why expert matmuls on GPUs use no library kernel."""
    if execution.low_precision:
        return "the only one for 8-bit matmuls"
    dtype = execution.compute or next((w.leaf.dtype.name for w in execution.weights if w.leaf.is_expert), "float32")
    choice = choose_grouped_matmul("cuda", dtype)
    if choice.implementation != "blocked":
        return "the model names it"
    why = choice.why
    if grouped_kernels() is not None and not has_tokamax():
        why += "; with the extras cuda12 or cuda13 the pod runs a different program"
    return why


def _router_losses_note(execution: Execution, metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note if router losses depend on the number of micro-steps or microbatches."""
    parts, unit = execution.microbatches, "microbatches" if execution.is_pipelined else "micro-steps"
    if parts > 1 and "moe/aux_loss" in metrics:
        yield f"auxiliary losses of routers, if they have a weight, are means over {parts} {unit}, each with its tokens"


def _repeated_reductions_note(execution: Execution) -> Iterator[str]:
    """Yield a note if each micro-step all-reduces gradient shards, although one all-reduce per step would suffice."""
    if execution.num_exchanges == 1 or execution.deferred_axes:
        return
    for weight in execution.weights:
        axes = set(split_axes(execution, weight.spec)) & set(execution.batch_axes)
        if axes and (others := set(execution.batch_axes) - axes):
            over = ", ".join(f"`{axis}`" for axis in execution.batch_axes if axis in others)
            yield (
                f"gradient shards are all-reduced over {over} in each of {execution.micro_steps} micro-steps; "
                'reduce_gradients="once_across_groups" accumulates them and reduces them once'
            )
            return


def check_equal_parts(state: TrainState) -> None:
    """Check that all pipeline chunks have the same number of layers, so that a program can be counted by stage."""
    pipelined = state.setup.strategy.pipeline
    stacks = {d.leaf.shape[0] for d in state.setup.table.params if d.leaf.is_stacked}
    if pipelined is None or len(stacks) != 1:
        return
    num_parts, num_layers = pipelined.table().num_parts, stacks.pop()
    counts = pipelined.layers_of_parts(num_layers, num_parts)
    if len(set(counts)) > 1:
        near = [n for n in (num_layers // num_parts * num_parts, -(-num_layers // num_parts) * num_parts) if n]
        raise problem(
            "explain",
            f"count the collectives of pipeline chunks with {'+'.join(map(str, counts))} layers",
            "the program does not show which stages run the additional layers",
            f"use {' or '.join(map(str, dict.fromkeys(near)))} layers"
            + " and without stage_layer_offset" * any(pipelined.stage_layer_offset),
            code="unsupported-feature",
        )


def _check_arguments(step: Any, args: tuple[Any, ...], in_shardings: Any) -> None:
    is_step, has_state = isinstance(step, TrainStep), bool(args) and isinstance(args[0], TrainState)
    code, requested = "wrong-type", f"inspect a {type(step).__name__}"
    if not is_step and (has_state or not callable(step)):
        reason, fix = (
            "it is neither a training step nor a function of arrays",
            "make a step with mp.train_step(loss_fn)",
        )
    elif is_step and not (has_state and len(args) in (2, 3)):
        requested = f"use ({', '.join(type(arg).__name__ for arg in args)}) as the arguments of the step"
        reason, fix = "they must be a TrainState and a batch", "make the state with mp.init_state"
    elif is_step and in_shardings is not None:
        code, requested = "conflict", "use `in_shardings`"
        reason, fix = "the strategy of the state determines the shardings of a training step", "remove it"
    else:
        return
    raise problem("explain", requested, reason, fix, code=code)


def on_target(state: TrainState, cluster: Cluster | None) -> TrainState:
    """Return the abstract state. With a cluster, its mesh has the compile-only devices of the cluster."""
    setup: Setup = state.setup
    if cluster is None:
        if isinstance(setup.mesh, Mesh):
            return setup.abstract
        reason = f"the state's mesh of {setup.mesh.size} devices is abstract"
        fix = 'name a cluster, explain(..., cluster="h100:1x8"), or build the mesh with MeshSpec.build()'
        raise problem("explain", "compile for the local devices", reason, fix, code="conflict")
    require_aot(cluster.name)
    if setup.mesh.size != cluster.num_devices:
        requested = f"run a step over {setup.mesh.size} devices ({human_mesh(axis_sizes(setup.mesh))})"
        reason = f"it has {cluster.num_devices} GPUs"
        fix = f"make the mesh with MeshSpec(...).abstract(devices={cluster.num_devices}), or use a different cluster"
        raise problem(f"cluster `{cluster.name}`", requested, reason, fix, code="conflict")
    mesh = mesh_on(cluster, setup.given_mesh, offloads=any(decision.is_on_host for decision in setup.table.optimizer))
    options: dict[str, Any] = {"precision": setup.precision, "trainable": setup.trainable}
    return abstract_state(setup.model, setup.tx, mesh=mesh, strategy=setup.strategy, **options)
