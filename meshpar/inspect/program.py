"""A compiled program as data: its text, memory use and compiler warnings."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshpar.inspect import compiler_messages as messages
from meshpar.inspect.hlo import parser as hlo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """The result of one compilation. Bytes are per device."""

    target: str
    """A cluster (`h100:8x8`) or the local platform (`cpu`)."""
    text: str = dataclasses.field(repr=False)
    """The optimized, scheduled HLO."""
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Bytes of outputs that reuse donated arguments."""
    temporary_bytes: int
    compile_s: float
    host_temporary_bytes: int = 0
    """Bytes offloaded to the host; 0 on XLA:CPU, which has a single memory."""
    warnings: tuple[str, ...] = ()
    """The compiler's warnings, without duplicates."""
    cost: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """XLA's cost analysis (`flops`, `bytes accessed`, ...), which counts a loop body once; empty for a pod."""

    @property
    def peak_bytes(self) -> int:
        """Sum of arguments, temporaries, and outputs that do not reuse donated arguments."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes

    @functools.cached_property
    def module(self) -> hlo.Module:
        """The parsed text."""
        return hlo.parse(self.text)

    @property
    def rematerializations(self) -> tuple[messages.Rematerialization, ...]:
        """The compiler's messages about tensors that are replicated in order to reshard them."""
        return messages.rematerializations(self.warnings)


def compile_here(
    traced: jax.stages.Traced | jax.stages.Lowered, *, options: Mapping[str, Any] | None = None
) -> Program:
    """Compile for the devices of the trace and capture the compiler's messages."""
    lowered = traced if isinstance(traced, jax.stages.Lowered) else traced.lower()
    with _compiled_anew():
        return program_of(lowered, options)


def program_of(lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None) -> Program:
    """Compile a lowered function. Without `options`, jax reuses the executable when the function is called later."""
    with messages.catch_stderr() as caught:
        start = time.perf_counter()
        compiled = lowered.compile(dict(options) if options else None)
        compile_s = time.perf_counter() - start
    cost = compiled.cost_analysis() or {}
    return Program(
        target=jax.default_backend(),
        text=compiled.as_text() or "",
        **memory_of(compiled.memory_analysis()),
        compile_s=compile_s,
        warnings=messages.warnings_in(caught.text),
        cost={key: value for key, value in cost.items() if "{" not in key},
    )


@contextlib.contextmanager
def _compiled_anew() -> Iterator[None]:
    """Disable jax's persistent cache, because a program from the cache comes without the compiler's warnings."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # jax checks once per process whether there is a cache
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def memory_of(stats: Any) -> dict[str, Any]:
    """Return the five sizes of jaxlib's `CompiledMemoryStats` under the names of `Program`."""
    return {
        "argument_bytes": int(stats.argument_size_in_bytes),
        "output_bytes": int(stats.output_size_in_bytes),
        "alias_bytes": int(stats.alias_size_in_bytes),
        "temporary_bytes": int(stats.temp_size_in_bytes),
        "host_temporary_bytes": int(stats.host_temp_size_in_bytes),
    }
