"""Eight XLA host devices, which are configured before jax is imported, shared fixtures, and costs of tests.

The tests in `tests/gpu` run in separate processes: `python -m pytest tests/gpu`. These use the default device of JAX
and need no packages for development.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

XLA_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Two workers share two cores, so each device has one thread for arithmetic. A device thread may wait long for a
    # core. By default XLA aborts the process after 40 s.
    "--xla_cpu_multi_thread_eigen": "false",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",
    # Tests compile many small programs and run each a few times, so fast compilation matters more than fast code. The
    # collectives do not change. The tests of the step need 101 s of processor time instead of 173 s.
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
    # With one LLVM module per program, a training step compiles in 0.9 s instead of 1.5 s (32 modules, the default).
    "--xla_cpu_parallel_codegen_split_count": "1",
}
if importlib.metadata.version("jax").startswith("0.10."):
    # The older code generator of jax 0.10 needs 55 s of processor time instead of 101 s. jax 0.12 does not have it.
    XLA_FLAGS["--xla_cpu_use_fusion_emitters"] = "false"


def _with_defaults(flags: str) -> str:
    """Add `XLA_FLAGS` to the flags, except flags that are set already."""
    given = {flag.split("=")[0] for flag in flags.split()}
    return " ".join([flags, *(f"{name}={value}" for name, value in XLA_FLAGS.items() if name not in given)]).strip()


ROOT = Path(__file__).parents[1]
GPU_SUITE = "MESHPAR_TEST_GPU"
"""Environment variable that is set if only `tests/gpu` runs: "gpu", or "cpu" for small sizes on CPU devices."""
_PATHS = [Path(arg.partition("::")[0]).resolve() for arg in sys.argv[1:] if not arg.startswith("-")]
if any(path.is_relative_to(ROOT / "tests" / "gpu") for path in _PATHS):
    os.environ.setdefault(GPU_SUITE, "gpu")  # also for workers of pytest-xdist
USES_GPU = os.environ.get(GPU_SUITE) == "gpu"
collect_ignore = [] if GPU_SUITE in os.environ else ["gpu"]
LEFT = ROOT / ".pytest_cache"
"""Cache of bytecode and compiled programs for later runs."""
if sys.dont_write_bytecode:  # bytecode reduces the import of jax and flax from 8 s to 3 s
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(LEFT / "bytecode")
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": sys.pycache_prefix}
if not USES_GPU:
    os.environ["XLA_FLAGS"] = _with_defaults(os.environ.get("XLA_FLAGS", ""))
    os.environ["JAX_PLATFORMS"] = "cpu"
elif os.environ.get("JAX_PLATFORMS"):
    os.environ["JAX_PLATFORMS"] += ",cpu"  # for the references
os.environ["MPLBACKEND"] = "agg"
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(name, "1")
GIVEN_ENV = dict(os.environ)
"""Environment of child processes. Commands with `--devices` change the environment of this process."""

import jax  # noqa: E402  (the environment above must come first)
import pytest  # noqa: E402

from tests.buckets import bucket, gs_bucket, gs_server, s3_server  # noqa: E402, F401 - fixtures

if GPU_SUITE not in os.environ:
    import hypothesis

    # Machines that run tests are busy, so no test depends on time.
    hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.load_profile("busy")
# Tracing creates millions of small objects. Less frequent garbage collection saves 10% of the time.
gc.freeze()
gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def mesh8() -> jax.sharding.Mesh:
    """Return a mesh `fsdp=4, tensor=2` of the eight host devices, with Auto axes."""
    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.fixture(scope="session")
def child_env() -> dict[str, str]:
    """Return the environment of a child process, with eight devices and a shared cache of compiled programs."""
    return {
        **GIVEN_ENV,
        "PYTHONPATH": os.pathsep.join([str(ROOT), GIVEN_ENV.get("PYTHONPATH", "")]).strip(os.pathsep),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }


@pytest.fixture(scope="session")
def pod():
    """Return a process that compiles for GPUs, or skip the test if the `aot` extra is not installed."""
    from meshpar.inspect.pod import PodProcess
    from meshpar.inspect.target import missing_aot

    if missing_aot():
        pytest.skip(f"compiles for GPUs, which needs `pip install meshpar[aot]`: {missing_aot()}")
    with PodProcess() as process:
        yield process


@pytest.fixture
def strict():
    """Make implicit broadcasting and dtype promotion errors.

    Tests of optimizers cannot use it, because optax multiplies int32 counts by Python floats.
    """
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


KEPT_SOURCES = 3
"""Number of versions of the source whose compiled programs are cached."""
MOST_BYTES = 2_000_000_000
"""Limit of a worker's peak memory. The summary warns if a worker exceeds it."""
KEPT_BYTES = 1_000_000_000
"""A worker with more memory than this clears its caches between two files."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Record call stacks and scope names in programs only for tests that read them.

    Call stacks need 1/8 of the compile time, and equal programs of two tests would have different cache keys.
    """
    read_here = item.path.is_relative_to(ROOT / "tests" / "inspect") or item.get_closest_marker("call_stacks")
    jax.config.update("jax_include_full_tracebacks_in_locations", bool(read_here) or "pod" in item.fixturenames)


@pytest.fixture(scope="module", autouse=True)
def _programs_of_a_file_go_with_it(request: pytest.FixtureRequest):
    yield
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    if pages * resource.getpagesize() > KEPT_BYTES:
        for value in vars(request.module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
        jax.clear_caches()
        gc.collect()


class Costs:
    """Processor seconds of each test, including fixtures and child processes, and peak memory of each worker.

    A worker adds them to the report of a test's teardown.
    """

    def __init__(self, file: str | None) -> None:
        self.file = file
        self.cpu_s: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self._before_s = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        self._before_s = sum(os.times()[:4])
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo):
        report = yield
        if call.when == "teardown":
            unit = 1 if sys.platform == "darwin" else 1024
            peak_bytes = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
            report.user_properties.append(("cost", (sum(os.times()[:4]) - self._before_s, worker, peak_bytes)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.cpu_s[report.nodeid], worker, peak_bytes = dict(report.user_properties)["cost"]
            self.peak_bytes[worker] = max(peak_bytes, self.peak_bytes.get(worker, 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.cpu_s:
            return
        held = ", ".join(f"{worker} {nbytes / 1e9:.2f} GB" for worker, nbytes in sorted(self.peak_bytes.items()))
        over = f" (MORE THAN {MOST_BYTES / 1e9:.0f} GB)" if max(self.peak_bytes.values()) > MOST_BYTES else ""
        terminalreporter.write_line(f"processor: {sum(self.cpu_s.values()):.0f} s; most held: {held}{over}")
        if self.file:
            Path(self.file).write_text(self.table())

    def table(self) -> str:
        """Return JSON with processor seconds and number of cases of each test function, slowest first."""
        found: dict[str, list[float]] = {}
        for name, cpu_s in self.cpu_s.items():
            found.setdefault(name.partition("[")[0], []).append(cpu_s)
        slowest = sorted(found.items(), key=lambda one: -sum(one[1]))
        rows = {name: [round(sum(each), 1), len(each)] for name, each in slowest if sum(each) >= 0.1}
        total = {"processor_s": round(sum(self.cpu_s.values())), "tests": len(self.cpu_s)}
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in [*total.items(), *rows.items()])
        return f"{{\n{lines}\n}}\n"


def _read_programs_back(config: pytest.Config) -> None:
    """Configure the cache of compiled programs, and delete the programs of older versions of the source.

    Names of operations are part of the cache key, because tests of `inspect` read them.
    """
    content = [file.read_bytes() for file in sorted((ROOT / "meshpar").rglob("*.py"))]
    words = [sys.version, jax.__version__, os.environ["XLA_FLAGS"]]
    key = hashlib.sha256(b"".join([*content, *(word.encode() for word in words)])).hexdigest()[:16]
    folder = LEFT / "compiled" / key
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for old in sorted(folder.parent.iterdir(), key=lambda one: one.stat().st_mtime)[:-KEPT_SOURCES]:
            shutil.rmtree(old, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", help="keep the processor seconds of each test function here, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config.getoption("--durations-file")))
    if not USES_GPU:
        _read_programs_back(config)


LONG_FILES = ("test_notebooks.py", "test_recipes.py", "test_docs.py", "test_commands.py")
"""Files with few tests that take minutes and are not in `make test`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first, so that both workers finish at about the same time."""
    cpu_s = dict.fromkeys(LONG_FILES, 1000.0)
    for test, row in json.loads((ROOT / "tests" / "durations.json").read_text()).items():
        if "::" in test:
            file = test.partition("::")[0]
            cpu_s[file] = cpu_s.get(file, 0) + row[0]
    items.sort(key=lambda item: -cpu_s.get(item.path.name, cpu_s.get(item.nodeid.partition("::")[0], 0)))


@pytest.fixture
def meshpar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run a command line. Return exit code, standard output and standard error."""
    from meshpar.cli import main as cli

    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL"):  # variables that commands set
        monkeypatch.setenv(name, os.environ.get(name, ""))

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err, "control codes in a pipe"
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture(autouse=True)
def _same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variables that a command sets for its own process."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
