"""Test the choice of the CPU on machines whose CUDA plugin can only compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from meshpar.sharding import cuda_plugin


@pytest.mark.parametrize(
    ("plugins", "has_nvidia", "platforms", "selects_cpu"),
    [
        (["xla_cuda12"], False, None, True),
        (["xla_cuda12"], True, None, False),
        (["xla_cuda12"], False, "", False),
        (["xla_cuda12", "xla_rocm7"], False, None, False),
        ([], False, None, False),
    ],
)
def test_cpu_is_selected_if_cuda_can_only_compile(monkeypatch, tmp_path, plugins, has_nvidia, platforms, selects_cpu):
    for plugin in plugins:
        (tmp_path / "jax_plugins" / plugin).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    monkeypatch.setattr(cuda_plugin, "has_nvidia", lambda: has_nvidia)
    monkeypatch.setenv("JAX_PLATFORMS", platforms or "")
    if platforms is None:
        monkeypatch.delenv("JAX_PLATFORMS")
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    cuda_plugin.select_cpu_without_nvidia()
    selected = jax.config.jax_platforms
    jax.config.update("jax_platforms", before)
    assert (os.environ.get("JAX_PLATFORMS"), selected) == (("cpu", "cpu") if selects_cpu else (platforms, None))


@pytest.mark.matrix
@pytest.mark.parametrize("imports", ["import jax, meshpar", "import meshpar, jax"])
def test_script_without_a_gpu_prints_its_own_output_only(imports):
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    env["PYTHONPATH"] = str(Path(cuda_plugin.__file__).parents[2])
    code = f"{imports}; print(jax.default_backend())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cpu\n", "")
