"""A compiled program as data: its text, the compiler's own account of memory, and what it warned of."""

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
    """What one compilation gave. Bytes are those of one device."""

    target: str
    """A cluster (`h100:8x8`) or the platform at hand (`cpu`)."""
    text: str = dataclasses.field(repr=False)
    """The optimized, scheduled HLO."""
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Outputs that take the place of donated arguments."""
    temporary_bytes: int
    compile_s: float
    host_temporary_bytes: int = 0
    """Of what is offloaded to the host; XLA:CPU has one memory only, and says 0."""
    warnings: tuple[str, ...] = ()
    """The compiler's warnings, each once."""
    cost: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """XLA's own cost analysis (`flops`, `bytes accessed`, ...), which counts a loop's body once; empty for a pod."""

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs that are not donated arguments, and temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes

    @functools.cached_property
    def module(self) -> hlo.Module:
        """The text, parsed."""
        return hlo.parse(self.text)

    @property
    def rematerializations(self) -> tuple[messages.Rematerialization, ...]:
        """Tensors the partitioner gathered whole because it knew no better way."""
        return messages.rematerializations(self.warnings)


def compile_here(
    traced: jax.stages.Traced | jax.stages.Lowered, *, options: Mapping[str, Any] | None = None
) -> Program:
    """Compiles for the devices it was traced for, and keeps what the compiler says."""
    lowered = traced if isinstance(traced, jax.stages.Lowered) else traced.lower()
    with _compiled_anew():
        return program_of(lowered, options)


def program_of(lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None) -> Program:
    """The same through jax's caches: a call of the function that was lowered finds what it gives without options."""
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
    """Leaves jax's persistent cache aside: a program that comes from there comes without the compiler's warnings."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # jax asks once in a process whether there is a cache
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def memory_of(stats: Any) -> dict[str, Any]:
    """The five sizes of jaxlib's `CompiledMemoryStats`, under the names of `Program`."""
    return {
        "argument_bytes": int(stats.argument_size_in_bytes),
        "output_bytes": int(stats.output_size_in_bytes),
        "alias_bytes": int(stats.alias_size_in_bytes),
        "temporary_bytes": int(stats.temp_size_in_bytes),
        "host_temporary_bytes": int(stats.host_temp_size_in_bytes),
    }
