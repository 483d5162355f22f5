"""What every test stands on: eight XLA host devices, set up before jax is imported anywhere.

Fixtures, for whoever names them: `mesh8`, `strict`, `child_env`.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

XLA_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Two workers share two cores: one arithmetic thread per device, and patience with a device thread that awaits its
    # turn (by default XLA gives up after 40 s, and takes the process down with it).
    "--xla_cpu_multi_thread_eigen": "false",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",
    # Tests compile many small programs and run each a few times, so machine code is made fast instead of making fast
    # code. The collectives stay the same; the tests of the step take 101 s of processor, not 173.
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
}
if importlib.metadata.version("jax").startswith("0.10."):
    # jax 0.10 still has XLA's older code generator: 55 s of processor instead of 101. jax 0.12 uses the newer one only.
    XLA_FLAGS["--xla_cpu_use_fusion_emitters"] = "false"


def _with_defaults(flags: str) -> str:
    """`flags` with the ones above added where it does not already set them."""
    given = {flag.split("=")[0] for flag in flags.split()}
    return " ".join([flags, *(f"{name}={value}" for name, value in XLA_FLAGS.items() if name not in given)]).strip()


os.environ["XLA_FLAGS"] = _with_defaults(os.environ.get("XLA_FLAGS", ""))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MPLBACKEND"] = "agg"
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import jax  # noqa: E402  (the environment above must come first)
import pytest  # noqa: E402


@pytest.fixture(scope="session")
def mesh8() -> jax.sharding.Mesh:
    """`fsdp=4, tensor=2` on the eight host devices, in plain jax: Auto axes, as everything here uses."""
    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.fixture(scope="session")
def child_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a child process: its own eight devices, and programs compiled once for all children.

    Only children share compiled programs. In the tests' own process a program from the cache would answer for another
    one that differs in nothing but the names of its ops, and those names are what the ledger reads.
    """
    session = tmp_path_factory.getbasetemp()
    shared = session.parent if "PYTEST_XDIST_WORKER" in os.environ else session
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]).strip(
            os.pathsep
        ),
        "JAX_COMPILATION_CACHE_DIR": str(shared / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }


@pytest.fixture
def strict():
    """No silent broadcasting across ranks, no silent dtype promotion, inside one test.

    Not for tests that run an optimizer: optax itself multiplies int32 counts by Python floats.
    """
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


SLOW_FILES = ("test_notebooks.py", "test_recipes.py", "test_readme.py")
"""Few tests that take minutes: begun last, one of them would keep one worker busy while the other has nothing left."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in SLOW_FILES)
