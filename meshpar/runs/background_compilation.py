"""Compilation of programs in a thread, while the run prepares its first step and trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import jax

from meshpar.loop.fit import Hook, Run

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


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

        self._executor = ThreadPoolExecutor(1, thread_name_prefix="meshpar-compile")
        self._result = self._executor.submit(compile_program)
        self._during_wait: list[Callable[[], None]] = []

    def wait(self) -> None:
        """Block until the program is compiled. Raise the error of a failed compilation."""
        self._result.result()

    def during_wait(self, work: Callable[[], None]) -> None:
        """Call `work` in `on_start` until the program is compiled. The work prepares the end of the run.

        If the program is compiled earlier, `work` is not called.
        """
        self._during_wait.append(work)

    def then(self, lower: Callable[[], jax.stages.Lowered], call: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        """Lower a further program with `during_wait`, and compile it in the thread after the previous programs.

        Returns:
          `call`, which runs the program, with a wait for the compilation.
        """
        results: list[Future[object]] = []
        self.during_wait(lambda: results.append(self._executor.submit(lower().compile)))

        def wait_and_call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
            for result in results:
                result.result()
            return call(*args, **kwargs)

        return wait_and_call

    def on_start(self, run: Run) -> None:
        with run.within("compile"):
            for work in self._during_wait:
                if self._result.done():
                    break
                work()
            self.wait()

    def on_end(self, run: Run, reason: str) -> None:
        self._executor.shutdown(wait=False, cancel_futures=reason != "done")
