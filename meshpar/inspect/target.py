"""A cluster as a compile-only target of XLA: description, devices and compilation.

This needs the `aot` extra, but no GPU and no driver. `meshpar.inspect.pod` does the same in a separate process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from meshpar.hardware.clusters import Cluster, Gpu, cluster_of, parse_cluster
from meshpar.hardware.compile_options import GPU_OPTIONS
from meshpar.hardware.compile_target import compiled_for
from meshpar.inspect.program import Program, memory_of
from meshpar.sharding.errors import problem
from meshpar.sharding.types import AnyMesh


def topology(cluster: str | Cluster) -> list[jax.Device]:
    """Return the compile-only devices of a cluster; device i is in node `i // gpus_per_node`.

    The devices cannot run programs. Build a Mesh of them, and lower functions for abstract inputs on this mesh.
    """
    from jax.experimental import topologies

    cluster = parse_cluster(cluster)
    require_aot(cluster.name)
    if shutil.which("ptxas") is None and (ptxas := _ptxas()) is not None:  # XLA looks for it at compile time
        os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{ptxas.parent}"
    described = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(cluster.gpu), topology=f"1x{cluster.nodes}x{cluster.gpus_per_node}"
    )
    return list(described.devices)


def mesh_on(cluster: Cluster, mesh: AnyMesh, *, offloads: bool = False) -> AnyMesh:
    """Return a mesh with the axes of `mesh` on the compile-only devices of a cluster, or an abstract mesh.

    Library kernels inspect the devices that they are lowered for, so compile-only devices are preferred. The mesh is
    abstract in two cases. Without a GPU, jax can use the CUDA plugin only if `JAX_PLATFORMS=cpu` was set before jax
    started. And if state `offloads` to host memory, shardings on compile-only devices would lose the memory kind.
    """
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    if offloads:
        return abstract
    try:
        devices = np.array(topology(cluster), dtype=object)
    except NotImplementedError:  # jax has not loaded the plugin of the platform
        return abstract
    return Mesh(devices.reshape(abstract.axis_sizes), abstract.axis_names, axis_types=abstract.axis_types)


@contextlib.contextmanager
def traced_for(cluster: Cluster | None) -> Iterator[None]:
    """Trace cuDNN's attention and tokamax's kernels for the GPU of a cluster instead of the local GPU.

    Both inspect the devices of the process, not of the mesh: jax accepts large head sizes on newer GPUs only, and
    tokamax has kernels for each GPU generation. In this context, both choose the same kernels as on the pod.
    """
    if cluster is None:
        yield
        return
    from jax._src import dispatch
    from jax._src.cudnn import fused_attention_stablehlo as attention
    from jax.extend import backend

    # Inside a fully manual region attention is lowered without inspecting devices, which may be abstract.
    primitives = {p for p in dispatch.prim_requires_devices_during_lowering if "dot_product_attention" not in p.name}
    capability, single_gpu = cluster.gpu.chip.compute_capability, cluster_of(cluster.gpu, nodes=1, gpus_per_node=1)

    def device() -> jax.Device:
        return topology(single_gpu)[0]

    def parsed(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in text.split("."))

    with (
        compiled_for("cuda", capability, cluster),
        # Only tokamax calls it, so callers that only trace, such as the planner, do not load the plugin.
        mock.patch.object(backend, "get_default_device", device),
        mock.patch.object(attention, "check_compute_capability", lambda text: capability >= parsed(text)),
        mock.patch.object(attention, "is_cuda_compute_capability_equal", lambda text: capability == parsed(text)),
        mock.patch.object(dispatch, "prim_requires_devices_during_lowering", primitives),
    ):
        yield


def missing_aot() -> str:
    """Return the missing requirement for GPU compilation as text; empty if this machine can compile for GPUs."""
    if not any(_spec(f"jax_plugins.{name}") for name in ("xla_cuda12", "xla_cuda13")):
        return "jax's CUDA plugin is not installed"
    return "" if _ptxas() is not None else "`ptxas` is neither on PATH nor installed"


def require_aot(cluster_name: str) -> None:
    """Raise a `ValueError` with install instructions if this machine cannot compile for GPUs."""
    if missing := missing_aot():
        fix = "pip install 'meshpar[aot]'"
        raise problem(f"cluster `{cluster_name}`", "compile for it", missing, fix, code="missing-package")


def target_config(gpu: Gpu) -> str:
    """Return a GPU as XLA's `GpuTargetConfigProto` in text form."""
    chip = gpu.chip
    fields: dict[str, object] = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 2**10,
        "shared_memory_per_core": chip.shared_bytes_per_core,
        "threads_per_core_limit": chip.threads_per_core,
        "core_count": chip.num_cores,
        "fpus_per_core": chip.fpus_per_core,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(gpu.memory_bytes_per_s),
        "l2_cache_size": chip.l2_bytes,
        "clock_rate_ghz": chip.clock_hz / 1e9,
        "device_memory_size": int(gpu.memory_bytes),
        "shared_memory_per_block_optin": chip.shared_bytes_per_block,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    major, minor = chip.compute_capability
    # Hopper and later have architecture-specific instructions (sm_90a), which XLA requests on the real device.
    features = "feature_extension: ACCELERATED_FEATURES " if major >= 9 else ""
    described = " ".join(f"{name}: {value}" for name, value in fields.items())
    return (
        f"gpu_device_info {{ {described} cuda_compute_capability {{ major: {major} minor: {minor} {features}}} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 9 } '
        f'device_description_str: "{gpu.device_kinds[0]}"'
    )


def stablehlo_of(traced: jax.stages.Traced | jax.stages.Lowered, cluster: Cluster) -> bytes:
    """Lower a step for CUDA to portable StableHLO bytecode.

    Args:
      traced: the step, traced on concrete devices or an `AbstractMesh`, or already lowered for CUDA.
      cluster: the pod, with as many GPUs as the mesh has devices.
    """
    lowered = traced if isinstance(traced, jax.stages.Lowered) else traced.lower(lowering_platforms=("cuda",))
    module: Any = lowered.compiler_ir("stablehlo")
    devices = int(module.operation.attributes["mhlo.num_partitions"])
    if devices != cluster.num_devices:
        requested, reason = f"compile for its {cluster.num_devices} GPUs", f"the step's mesh has {devices} devices"
        fix = f"build the state on `MeshSpec(...).abstract(devices={cluster.num_devices})`"
        raise problem(f"cluster `{cluster.name}`", requested, reason, fix, code="conflict")
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def compile_stablehlo(module: bytes, cluster: Cluster, *, options: Mapping[str, Any] | None = None) -> Program:
    """Compile StableHLO for a cluster in this process. The compiler writes its warnings to standard error.

    Args:
      module: the result of `stablehlo_of`.
      cluster: the pod.
      options: XLA flags without dashes, merged over the GPU defaults.
    """
    # jax compiles a Lowered for other devices only if its mesh is abstract, but a step usually has a concrete mesh.
    # Therefore this repeats the steps of `Lowered.compile` on the module.
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    if b"mosaic_gpu" in module:
        importlib.import_module("jax.experimental.mosaic.gpu")  # registers the library that its kernels link to
    devices = topology(cluster)
    client = devices[0].client
    overrides: dict[str, Any] = {**GPU_OPTIONS, **(options or {})}
    with mlir.make_ir_context() as context, ir.Location.unknown(context):
        parsed = ir.Module.parse(module)
        main: Any = ir.SymbolTable(parsed.operation)["main"]
        compile_options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=np.array([[device.id for device in devices]]),
            env_options_overrides=overrides,
            backend=client,
        )
        build = compile_options.executable_build_options
        # The partitioner may only choose shardings that the program does not specify.
        build.allow_spmd_sharding_propagation_to_parameters = _unsharded(main.arg_attrs)
        build.allow_spmd_sharding_propagation_to_output = _unsharded(main.result_attrs)
        start = time.perf_counter()
        executable = client.compile(
            parsed, executable_devices=xla_client.DeviceList(tuple(devices)), compile_options=compile_options
        )
        compile_s = time.perf_counter() - start
    return Program(
        target=cluster.name,
        text="\n\n".join(module.to_string() for module in executable.hlo_modules()),
        **memory_of(executable.get_compiled_memory_stats()),
        compile_s=compile_s,
    )


def _unsharded(attributes: Any) -> list[bool]:
    return ["sdy.sharding" not in attrs and "mhlo.sharding" not in attrs for attrs in attributes]


def _spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


def _ptxas() -> Path | None:
    if (on_path := shutil.which("ptxas")) is not None:
        return Path(on_path)
    nvidia = _spec("nvidia")
    homes = [Path(home) for home in nvidia.submodule_search_locations or ()] if nvidia is not None else []
    paths = (home / package / "bin" / "ptxas" for home in homes for package in ("cuda_nvcc", "cu13", "cu12"))
    return next((path for path in paths if path.is_file()), None)
