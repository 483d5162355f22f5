"""Workarounds for orbax 0.12: logs, writes that fail in the background, and s3:// URLs.

Each comment names the public API that is missing.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
import warnings
from typing import Any

from meshpar.pod import watchdog
from meshpar.sharding import remote
from meshpar.sharding.errors import MeshparError, problem


@functools.cache
def filter_logs() -> None:
    """Drop the log lines of orbax, because its errors are raised. They are kept if absl's verbosity is DEBUG."""
    from absl import logging as absl_logging

    def is_kept(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname or absl_logging.get_verbosity() >= absl_logging.DEBUG

    logging.getLogger("absl").addFilter(is_kept)
    # If multiple writes fail, orbax raises the first error, and asyncio logs a traceback for each remaining error.
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())


@functools.cache
def wait_for_failed_writes() -> None:
    """Make orbax wait for all writes of a failed save, and report the failure immediately."""
    # orbax has no public API for either (google/orbax issue 605 made the manager raise in its next call only).
    # `asyncio_utils.run_sync` closes its event loop after the first failed write,
    # and each remaining write then prints a traceback ("Event loop is closed"). The error itself stays in the
    # background thread until `wait_until_finished`, which first waits for all processes at a barrier.
    import orbax.checkpoint as ocp

    run_sync = getattr(getattr(getattr(ocp, "_src", None), "asyncio_utils", None), "run_sync", None)
    if not callable(run_sync) or list(inspect.signature(run_sync).parameters) != ["coro"]:
        text = f"orbax {ocp.__version__} is not supported: a failed write of a checkpoint may also print tracebacks"
        warnings.warn(text, stacklevel=3)
        return

    async def finish(coro: Any) -> Any:
        previous = asyncio.all_tasks()
        try:
            return await coro
        except Exception as error:
            if threading.current_thread() is not threading.main_thread():  # the main thread reads, and raises itself
                failure = write_problem("write a checkpoint in the background", error)
                failure.__cause__ = error
                for callback in watchdog.write_failure_callbacks:
                    callback(failure)
            raise
        finally:
            while pending := asyncio.all_tasks() - previous:
                await asyncio.wait(pending)

    ocp._src.asyncio_utils.run_sync = functools.wraps(run_sync)(lambda coro: run_sync(finish(coro)))


@functools.cache
def support_s3() -> None:
    """Make orbax use TensorStore's `s3` driver for s3:// URLs."""
    # orbax creates TensorStore specifications for local paths and gs:// only, and has no public API for others
    # (google/orbax issue 872, pull request 2739).
    import orbax.checkpoint as ocp

    module = getattr(getattr(ocp, "_src", None), "serialization", None)
    build = getattr(getattr(module, "tensorstore_utils", None), "build_kvstore_tspec", None)
    if not callable(build) or "directory" not in inspect.signature(build).parameters:
        reason, fix = f"orbax {ocp.__version__} has different internal functions", "install orbax-checkpoint 0.12.8"
        raise problem("checkpoints in a bucket", "use s3://", reason, fix, code="unsupported-version")

    def to_s3(spec: Any) -> Any:
        if not isinstance(spec, dict):
            return [to_s3(item) for item in spec] if isinstance(spec, list) else spec
        if spec.get("driver") == "gcs":
            return remote.kvstore(f"s3://{spec['bucket']}/{spec['path']}")
        return {key: to_s3(value) for key, value in spec.items()}

    @functools.wraps(build)
    def build_kvstore_tspec(directory: Any, *args: Any, **kwargs: Any) -> Any:
        scheme, _, rest = str(directory).partition(":")
        if scheme != "s3":
            return build(directory, *args, **kwargs)
        return to_s3(build(f"gs://{rest.lstrip('/')}", *args, **kwargs))

    module.tensorstore_utils.build_kvstore_tspec = build_kvstore_tspec  # type: ignore[union-attr]


def write_problem(requested: str, error: Exception, where: str = "checkpoints") -> MeshparError:
    """Return the error for a failed write."""
    fix = "check that the folder is writable and has free space; earlier checkpoints are intact"
    return problem(where, requested, f"writing failed ({summarize(error)})", fix, code="write-failed")


def summarize(error: BaseException, limit: int = 200) -> str:
    """Return type and message of an error of orbax, without its specification of the file."""
    text = " ".join(str(error).split("[tensorstore_spec")[0].split())
    if "No space left" in text:
        text = "no space left on the disk"
    return f"{type(error).__name__}: {text[:limit]}{'…' if len(text) > limit else ''}" if text else type(error).__name__
