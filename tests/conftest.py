"""What every test stands on: eight XLA host devices, set up before jax is imported anywhere.

Fixtures, for whoever names them: `mesh8`, `strict`, `pod`, `child_env`, `meshpar`, and those of `buckets.py`. `Costs`
reports what tests cost.
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
    # Two workers share two cores: one arithmetic thread per device, and patience with a device thread that awaits its
    # turn (by default XLA gives up after 40 s, and takes the process down with it).
    "--xla_cpu_multi_thread_eigen": "false",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",
    # Tests compile many small programs and run each a few times, so machine code is made fast instead of making fast
    # code. The collectives stay the same; the tests of the step take 101 s of processor, not 173.
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
    # One LLVM module a program: cut into 32, as by default, a training step takes 1.5 s of processor instead of 0.9.
    "--xla_cpu_parallel_codegen_split_count": "1",
}
if importlib.metadata.version("jax").startswith("0.10."):
    # jax 0.10 still has XLA's older code generator: 55 s of processor instead of 101. jax 0.12 uses the newer one only.
    XLA_FLAGS["--xla_cpu_use_fusion_emitters"] = "false"


def _with_defaults(flags: str) -> str:
    """`flags` with the ones above added where it does not already set them."""
    given = {flag.split("=")[0] for flag in flags.split()}
    return " ".join([flags, *(f"{name}={value}" for name, value in XLA_FLAGS.items() if name not in given)]).strip()


ROOT = Path(__file__).parents[1]
LEFT = ROOT / ".pytest_cache"
"""What one run leaves for the next: bytecode, compiled programs."""
if sys.dont_write_bytecode:  # 8 s of processor for each process that imports jax and flax; kept, it is 3 s
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(LEFT / "bytecode")
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": sys.pycache_prefix}
os.environ["XLA_FLAGS"] = _with_defaults(os.environ.get("XLA_FLAGS", ""))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MPLBACKEND"] = "agg"
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(name, "1")
GIVEN_ENV = dict(os.environ)
"""Of child processes: tests that run a command in this one leave its `--devices` in the environment."""

import hypothesis  # noqa: E402
import jax  # noqa: E402  (the environment above must come first)
import pytest  # noqa: E402

from tests.buckets import bucket, gs_bucket, gs_server, s3_server  # noqa: E402, F401 - fixtures

# No verdict hangs on the clock: machines that run tests are busy.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")
# Tracing makes millions of small objects that live: looked through less often, they cost a tenth less.
gc.freeze()
gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def mesh8() -> jax.sharding.Mesh:
    """`fsdp=4, tensor=2` on the eight host devices, in plain jax: Auto axes, as everything here uses."""
    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.fixture(scope="session")
def child_env() -> dict[str, str]:
    """The environment of a child process: its own eight devices, and programs compiled once for all children."""
    return {
        **GIVEN_ENV,
        "PYTHONPATH": os.pathsep.join([str(ROOT), GIVEN_ENV.get("PYTHONPATH", "")]).strip(os.pathsep),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }


@pytest.fixture(scope="session")
def pod():
    """A process that compiles for GPUs; tests that use it are skipped where the `aot` extra is not installed."""
    from meshpar.inspect.pod import PodProcess
    from meshpar.inspect.target import missing_aot

    if missing_aot():
        pytest.skip(f"compiles for GPUs, which needs `pip install meshpar[aot]`: {missing_aot()}")
    with PodProcess() as process:
        yield process


@pytest.fixture
def strict():
    """No silent broadcasting across ranks, no silent dtype promotion, inside one test.

    Not for tests that run an optimizer: optax itself multiplies int32 counts by Python floats.
    """
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


KEPT_SOURCES = 3
"""Of so many states of the source compiled programs are kept."""
MOST_BYTES = 2_000_000_000
"""What a worker is to hold at its peak; the summary tells when one holds more."""
KEPT_BYTES = 1_000_000_000
"""From here on a worker lets go of compiled programs between two files."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Call stacks in programs, and with them the names of scopes, only where a test reads them.

    An eighth of a compilation goes to them, and programs of two tests that are the same otherwise are not to the cache.
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
    """Processor seconds of each test, with its fixtures and children, and the most bytes a worker held.

    A worker tells its figures in the report of each test's teardown.
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
        """JSON: processor seconds of each test function, dearest first, and its number of cases."""
        found: dict[str, list[float]] = {}
        for name, cpu_s in self.cpu_s.items():
            found.setdefault(name.partition("[")[0], []).append(cpu_s)
        dearest = sorted(found.items(), key=lambda one: -sum(one[1]))
        rows = {name: [round(sum(each), 1), len(each)] for name, each in dearest if sum(each) >= 0.1}
        total = {"processor_s": round(sum(self.cpu_s.values())), "tests": len(self.cpu_s)}
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in [*total.items(), *rows.items()])
        return f"{{\n{lines}\n}}\n"


def _read_programs_back(config: pytest.Config) -> None:
    """Programs compiled by an earlier run of the same source are read back, those of other sources go.

    Names of ops are part of jax's key here, since they are what the ledger reads.
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
    _read_programs_back(config)


LONG_FILES = ("test_notebooks.py", "test_recipes.py", "test_docs.py", "test_commands.py")
"""Few tests that take minutes, in what `make test` leaves out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The dearest files first: a long one begun last keeps one worker busy while the other has nothing left."""
    cpu_s = dict.fromkeys(LONG_FILES, 1000.0)
    for test, row in json.loads((ROOT / "tests" / "durations.json").read_text()).items():
        if "::" in test:
            file = test.partition("::")[0]
            cpu_s[file] = cpu_s.get(file, 0) + row[0]
    items.sort(key=lambda item: -cpu_s.get(item.path.name, cpu_s.get(item.nodeid.partition("::")[0], 0)))


@pytest.fixture
def meshpar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run a command line; gives (exit code, standard output, standard error)."""
    from meshpar.cli import main as cli

    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL"):  # what a command sets for its own process
        monkeypatch.setenv(name, os.environ.get(name, ""))

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err, "control codes in a pipe"
        return int(end.value.code or 0), out, err

    return run
