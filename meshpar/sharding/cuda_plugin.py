"""Choice of the CPU on machines where jax's CUDA plugin can only compile. Does not import jax."""

from __future__ import annotations

import importlib.util
import os
import sys

_CUDA_PLUGINS = {"xla_cuda12", "xla_cuda13"}


def select_cpu_without_nvidia() -> None:
    """Set `JAX_PLATFORMS=cpu` if CUDA is the only plugin of jax and this machine has no NVIDIA GPU.

    Otherwise jax logs a traceback of the plugin when it creates its devices. It then uses the CPU as well, but does not
    load the plugin, which `explain` needs to compile for GPUs. A value that the user set is kept.
    """
    if "JAX_PLATFORMS" in os.environ or not _is_cuda_the_only_plugin() or has_nvidia():
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules and not sys.modules["jax"].config.jax_platforms:  # jax read the variable on import
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def has_nvidia() -> bool:
    """Return whether the machine has an NVIDIA device or driver, also on Jetson and in WSL."""
    if any(name == "dxg" or name.startswith("nvidia") for name in os.listdir("/dev")):
        return True
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _is_cuda_the_only_plugin() -> bool:
    namespace = importlib.util.find_spec("jax_plugins")
    if namespace is None or importlib.util.find_spec("libtpu") is not None:
        return False
    folders = [folder for folder in namespace.submodule_search_locations or () if os.path.isdir(folder)]
    names = {name for folder in folders for name in os.listdir(folder)} - {"__init__.py", "__pycache__"}
    return bool(names) and names <= _CUDA_PLUGINS
