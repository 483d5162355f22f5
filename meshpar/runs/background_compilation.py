"""Compilation of a program in a thread, while the run prepares its first step."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import jax

from meshpar.loop.fit import Hook, Run


class BackgroundCompilation(Hook):
    """Compile a lowered program in a thread. As a hook of `fit`, wait for it before the first step.

    jax keeps the executable with the lowered program, so a call of the jitted function does not compile it again.
    """

    order = 3  # after `Preemption`, so that signals are handled during the wait

    def __init__(self, lowered: jax.stages.Lowered) -> None:
        self.compile_s: float | None = None
        """Seconds of the compilation, when it has finished."""

        def compile_program() -> None:
            began = time.perf_counter()
            lowered.compile()
            self.compile_s = time.perf_counter() - began

        executor = ThreadPoolExecutor(1, thread_name_prefix="meshpar-compile")
        self._result = executor.submit(compile_program)
        executor.shutdown(wait=False)

    def wait(self) -> None:
        """Block until the program is compiled. Raise the error of a failed compilation."""
        self._result.result()

    def on_start(self, run: Run) -> None:
        with run.within("compile"):
            self.wait()
