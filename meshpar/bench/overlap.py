"""overlap: what sets of compile options hide of a training step's communication, compiled for a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshpar.hardware.clusters import Cluster
from meshpar.hardware.compile_options import OVERLAP_LIMIT, pipelined
from meshpar.inspect.explain import on_cluster
from meshpar.inspect.latencies import Candidate, in_rounds, simulated
from meshpar.inspect.pod import PodProcess
from meshpar.inspect.program import Program
from meshpar.inspect.target import traced_for
from meshpar.inspect.timeline.simulator import Timed, Timeline
from meshpar.inspect.timeline.step_prediction import overlap
from meshpar.sharding.printing import Plain, Printed, table
from meshpar.sharding.types import PyTree, near, problem
from meshpar.training.gradients.fsdp_prefetch import bytes_of_a_layer
from meshpar.training.state import TrainState
from meshpar.training.step import TrainStep

Options = Mapping[str, Any]

OWN, BY_LATENCIES = "the step's own", "the step's own, a round of latencies"


def layer_bytes(step: TrainStep, state: TrainState) -> int:
    """Of a layer's weights, as a device holds them when they are gathered: a threshold that makes them one message."""
    return bytes_of_a_layer(state.setup, step.options)[0]


def third_of_shards(step: TrainStep, state: TrainState) -> int:
    """A third of a layer's gradients, as a device keeps them: see `meshpar.training.gradients.fsdp_prefetch`."""
    return bytes_of_a_layer(state.setup, step.options)[1] // 3


_PIPELINED = {
    name: value for kind in ("all_gather", "reduce_scatter", "all_reduce") for name, value in pipelined(kind).items()
}
_GATHER, _SCATTER, _REDUCE = (
    f"xla_gpu_{kind}_combine_threshold_bytes" for kind in ("all_gather", "reduce_scatter", "all_reduce")
)
_DOUBLE = {"xla_gpu_enable_while_loop_double_buffering": True}

SETS: Mapping[str, Options] = {
    "default": {},
    "gathers combined": {_GATHER: 2**30},
    "scatters apart": {_SCATTER: 1},
    "double buffering": _DOUBLE,
    "pipelined": {**_PIPELINED, _SCATTER: 1},
    "pipelined, gathers combined": {**_PIPELINED, _GATHER: 2**30, _SCATTER: 1},
    "pipelined, by layer": {**_PIPELINED, _GATHER: layer_bytes, _SCATTER: third_of_shards},
    "pipelined, by layer, four at once": {
        **_PIPELINED, _GATHER: layer_bytes, _SCATTER: third_of_shards, OVERLAP_LIMIT: 4,
    },
    "NVIDIA's": {
        **_PIPELINED, **_DOUBLE, _GATHER: 2**30, _SCATTER: 2**25, _REDUCE: 2**30,
        "xla_disable_hlo_passes": "rematerialization",
    },
    OWN: {},
    BY_LATENCIES: {},
}  # fmt: skip
"""XLA flags by the name of their set; a function is of (step, state). NVIDIA's: JAX Toolbox, "GPU performance".

The last two are what `train` has without rounds of latencies, and with as many as the step has, one at least."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlapRow:
    """One program. Messages are (with a matmul between start and done, all), of one layer; bytes of one device."""

    recipe: str
    options: str
    temporary_bytes: int
    forward_gathers: tuple[int, int]
    backward_gathers: tuple[int, int]
    scatters: tuple[int, int]
    hidden_fraction: float | None
    """Of the time of all collectives of a step; None when nothing is sent."""
    exposed_s: float
    step_s: float


@dataclasses.dataclass(frozen=True)
class Overlaps(Printed, Plain):
    """The rows of `meshpar bench overlap`. Prints as a table."""

    cluster: str
    rows: tuple[OverlapRow, ...]

    def __rich__(self) -> Any:
        columns = ("recipe", "options", "temporaries GB", "forward gathers", "backward gathers", "scatters", "hidden",
                   "exposed s", "step s")  # fmt: skip
        caption = "gathers and scatters of a layer: with a matmul between start and done / all"
        title = f"What compile options hide, {self.cluster}"
        return table(title, columns, map(_cells, self.rows), left=("recipe", "options"), caption=caption)


def _cells(row: OverlapRow) -> tuple[str, ...]:
    counts = (row.forward_gathers, row.backward_gathers, row.scatters)
    hidden = "" if row.hidden_fraction is None else f"{row.hidden_fraction:.1%}"
    return (
        row.recipe, row.options, f"{row.temporary_bytes / 1e9:.2f}", *(f"{some}/{every}" for some, every in counts),
        hidden, f"{row.exposed_s:.3f}", f"{row.step_s:.3f}",
    )  # fmt: skip


def sets_of(names: Sequence[str]) -> dict[str, Options]:
    """The named sets; all without a name. Raises `ValueError`: no such set."""
    for name in names:
        if name not in SETS:
            raise problem("bench overlap", f"compile with `{name}`", "there is no such set", near(name, SETS))
    return {name: SETS[name] for name in names or SETS}


def rows(
    recipe: str,
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    cluster: Cluster,
    *,
    sets: Mapping[str, Options] = SETS,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[OverlapRow]:
    """One row for each set of options; the step is traced once. Errors are those of `explain`."""
    of = on_cluster(cluster, state).setup
    with traced_for(cluster):
        lowered = step.trace(on_cluster(cluster, state), batch).lower(lowering_platforms=("cuda",))
    with PodProcess() as pod:
        for name, given in sets.items():
            progress(f"{recipe}: {name}")
            options = {flag: value(step, state) if callable(value) else value for flag, value in given.items()}
            options |= step.compile_options(of) if name in (OWN, BY_LATENCIES) else step.options.xla

            def compiled(more: Options, options: Options = options) -> Candidate[None]:
                return simulated(None, pod.compile(lowered, cluster, options={**options, **more}), of, cluster, options)

            rounds = max(step.options.latency_rounds, 1) if name == BY_LATENCIES else 0
            found, _ = in_rounds(compiled, rounds)
            program, times = found.program, found.timeline
            assert times is not None
            yield _row(recipe, name, program, times)


def _row(recipe: str, name: str, program: Program, times: Timeline) -> OverlapRow:
    of_layer = _of_layer(times.collectives)
    gathers = [one for one in of_layer if one.collective.kind == "all-gather"]
    return OverlapRow(
        recipe=recipe,
        options=name,
        temporary_bytes=program.temporary_bytes,
        forward_gathers=_covered([one for one in gathers if not one.collective.is_backward]),
        backward_gathers=_covered([one for one in gathers if one.collective.is_backward]),
        scatters=_covered([one for one in of_layer if one.collective.kind == "reduce-scatter"]),
        hidden_fraction=overlap(times).hidden_fraction,
        exposed_s=sum(times.exposed_s.values()),
        step_s=times.step_s,
    )


def _of_layer(collectives: Sequence[Timed]) -> list[Timed]:
    """Those in the innermost loops: in a loop over micro-steps stand the embedding's and the head's, too."""
    depth = max((len(one.collective.loops) for one in collectives), default=0)
    return [one for one in collectives if one.collective.loops and len(one.collective.loops) == depth]


def _covered(collectives: Sequence[Timed]) -> tuple[int, int]:
    return sum(one.cover == "matmul" for one in collectives), len(collectives)
