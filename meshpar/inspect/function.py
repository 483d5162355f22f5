"""Reports on compiled functions other than training steps.

function, arguments with shardings ─► traced ─► compiled ─► census · lint · timeline ─► FunctionReport
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from meshpar.hardware.clusters import Cluster, cluster_here, parse_cluster
from meshpar.hardware.compile_options import fingerprint, overlap_limit
from meshpar.inspect.census import census
from meshpar.inspect.lint import lint
from meshpar.inspect.memory import limit_bytes, memory_note, temporaries
from meshpar.inspect.model_flops import ModelFlops, matmul_flops
from meshpar.inspect.pod import PodProcess
from meshpar.inspect.program import Program, compile_here
from meshpar.inspect.report import FunctionReport, program_notes, timed_collectives
from meshpar.inspect.report_data import FunctionMemory
from meshpar.inspect.target import require_aot, traced_for
from meshpar.inspect.timeline.simulator import timeline
from meshpar.inspect.timeline.step_prediction import compute, overlap, why_not_timed
from meshpar.sharding.errors import problem
from meshpar.sharding.jaxprs import equations
from meshpar.sharding.types import AnyMesh, PyTree, axis_sizes, tree_leaves_with_paths


def explain_function(
    function: Callable[..., Any],
    args: tuple[PyTree, ...],
    *,
    cluster: str | Cluster | None = None,
    in_shardings: PyTree = None,
    pod: PodProcess | None = None,
) -> FunctionReport:
    """Compile a function and report its collectives, memory and compute; see `meshpar.explain`."""
    name = getattr(function, "__qualname__", type(function).__name__)
    structs = _with_shardings(args, in_shardings)
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    target = None if cluster is None else parse_cluster(cluster)
    if target is not None:
        require_aot(target.name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(traced_for(target))
        traced = jitted.trace(*structs)
        mesh = _mesh_of(name, structs, traced, target)
        if target is None:
            lowered = traced.lower()
            program = compile_here(lowered)
            target = cluster_here(list(mesh.devices.flat)) if isinstance(mesh, Mesh) else None
        else:
            process = pod or stack.enter_context(PodProcess())
            lowered = traced.lower(lowering_platforms=("cuda",))
            program = process.compile(lowered, target)
        is_for_pod = cluster is not None
    sizes = {} if mesh is None else axis_sizes(mesh)
    collectives, num_devices = census(program.module, sizes), 1 if mesh is None else mesh.size
    reason, times = why_not_timed(program.target, target), None
    if target is not None and not reason:
        times = timeline(program.module, collectives, target, None, overlap_limit=overlap_limit({}))
    notes: dict[str, None] = {}
    flops = matmul_flops(traced.jaxpr.jaxpr, notes)
    return FunctionReport(
        name=name,
        devices=num_devices,
        mesh=sizes,
        target=program.target,
        memory=_memory(program, mesh, target),
        collectives=timed_collectives(collectives, times, target),
        overlap=overlap(times, reason),
        compute=compute(
            program.module,
            num_devices=num_devices,
            model_flops=ModelFlops(forward=flops, step=flops, notes=tuple(notes)),
            times=times,
            reason=reason,
            cluster=target,
        ),
        findings=lint(program, collectives, cluster=target, times=times),
        compile_s=program.compile_s,
        fingerprint=fingerprint(lowered, {}),
        notes=program_notes(program, collectives, program.host_temporary_bytes, is_for_pod=is_for_pod),
        timeline=times,
        program=program,
    )


def _with_shardings(args: tuple[PyTree, ...], in_shardings: PyTree) -> tuple[PyTree, ...]:
    """Return the arguments as `ShapeDtypeStruct`s. `in_shardings` is a prefix of the arguments, as in `jax.jit`."""

    def is_sharding(x: Any) -> bool:
        return x is None or isinstance(x, Sharding)

    if in_shardings is None or isinstance(in_shardings, Sharding):
        in_shardings = (in_shardings,) * len(args)
    in_shardings = tuple(in_shardings) if isinstance(in_shardings, list) else in_shardings
    for path, sharding in tree_leaves_with_paths(in_shardings):
        if not is_sharding(sharding):
            fix = "write jax.sharding.NamedSharding(mesh, spec); the mesh may be abstract"
            reason = f"it is a {type(sharding).__name__}, not a sharding"
            raise problem("explain", f"use `in_shardings` at `{path}`", reason, fix, code="wrong-type")
    try:
        return tuple(
            jax.tree.map(
                lambda sharding, subtree: jax.tree.map(lambda x: _struct(x, sharding), subtree),
                in_shardings,
                args,
                is_leaf=is_sharding,
            )
        )
    except ValueError as error:
        fix = "pass a sharding for each argument, or for each of the argument's leaves"
        raise problem("explain", "use `in_shardings`", str(error), fix, code="wrong-shape") from None


def _struct(x: Any, sharding: Sharding | None) -> Any:
    """Return an array or a scalar as a `ShapeDtypeStruct`. Without `sharding`, an array keeps its `NamedSharding`."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        x = np.asarray(x)
    current = getattr(x, "sharding", None)
    current = current if isinstance(current, NamedSharding) else None
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding if sharding is not None else current)


def _mesh_of(name: str, structs: PyTree, traced: Any, cluster: Cluster | None) -> AnyMesh | None:
    """Return the mesh of the arguments, or of the shardings inside the function; None without any.

    Raises:
      MeshparError: the arguments have different meshes, or the mesh does not fit the target.
    """
    shardings = [x.sharding for x in jax.tree.leaves(structs) if isinstance(x.sharding, NamedSharding)]
    meshes = [sharding.mesh for sharding in shardings] or list(_meshes_in(traced.jaxpr))
    shapes = {tuple(axis_sizes(mesh).items()): mesh for mesh in meshes}
    if len(shapes) > 1:
        listed = " and ".join(", ".join(f"{axis}={size}" for axis, size in shape) for shape in shapes)
        reason, fix = f"its shardings have the meshes {listed}", "use a single mesh for all arguments"
        raise problem("explain", f"report the collectives of `{name}` by mesh axis", reason, fix, code="conflict")
    mesh = next(iter(shapes.values()), None)
    num_devices = 1 if mesh is None else mesh.size
    if cluster is not None and cluster.num_devices != num_devices:
        reason = f"the function runs on {num_devices} device{'s' * (num_devices > 1)}"
        fix = (
            "pass in_shardings with NamedShardings on a mesh with a device per GPU, such as mp.MeshSpec(...).abstract()"
        )
        raise problem(f"cluster `{cluster.name}`", f"use its {cluster.num_devices} GPUs", reason, fix, code="conflict")
    if cluster is None and isinstance(mesh, AbstractMesh):
        fix = 'name a cluster, explain(..., cluster="h100:1x8"), or use a mesh of devices'
        reason = f"the mesh of {mesh.size} devices is abstract"
        raise problem("explain", "compile for the local devices", reason, fix, code="conflict")
    return mesh


def _meshes_in(jaxpr: Any) -> Iterable[AnyMesh]:
    for equation, _ in equations(jaxpr):
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, Sharding)):
            mesh = value.mesh if isinstance(value, NamedSharding) else value
            if isinstance(mesh, Mesh | AbstractMesh) and not mesh.empty:
                yield mesh


def _memory(program: Program, mesh: AnyMesh | None, cluster: Cluster | None) -> FunctionMemory:
    limit, peak = limit_bytes(mesh, cluster), program.peak_bytes
    return FunctionMemory(
        argument_bytes=program.argument_bytes,
        output_bytes=program.output_bytes - program.alias_bytes,
        temporaries_bytes=program.temporary_bytes,
        peak_bytes=peak,
        limit_bytes=limit,
        fits=None if limit is None else peak <= limit,
        host_bytes=program.host_temporary_bytes,
        note=memory_note(peak, limit),
        largest=tuple(temporaries(program)),
    )
