"""Strong and weak scaling of a model, by kind of layout."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from meshpar.hardware.clusters import Cluster
from meshpar.parallel import Strategy
from meshpar.planner.search import Candidate, Search
from meshpar.planner.workload import Workload, batch_of
from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.printing import Plain, Printed, table

Scaling = Literal["strong", "weak"]
SCALINGS: tuple[Scaling, ...] = ("strong", "weak")
MAX_GPUS = 16_384
MIN_EFFICIENCY = 0.5
"""Minimum throughput per GPU of a worthwhile layout, as a fraction of the throughput on the fewest GPUs."""
MAX_PARTS = 2
"""Maximum number of parallelisms in a strategy that is evaluated."""
MAX_CANDIDATES = 2
"""Number of layouts of each kind that are evaluated per cluster size, the most promising first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size(Plain):
    """The fastest layout of a kind on a number of GPUs."""

    scaling: Scaling
    """`strong`: with a constant global batch; `weak`: with a constant batch per GPU."""
    num_gpus: int
    kind: str
    """Names of the parallelisms: `fsdp | tensor_parallel`."""
    layout: str
    step_s: float
    tokens_per_s: float
    """Tokens per second and GPU; examples if the batch has no tokens."""
    bound: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth(Printed, Plain):
    """Throughput of a model on different numbers of GPUs. Prints as a table of tokens per second and GPU."""

    gpu: str
    sizes: tuple[Size, ...]
    rates: str

    def of(self, scaling: Scaling, kind: str) -> list[Size]:
        """Return the sizes of a kind, ordered by the number of GPUs."""
        return [size for size in self.sizes if (size.scaling, size.kind) == (scaling, kind)]

    @property
    def kinds(self) -> list[str]:
        """Kinds of layouts, ordered by the number of clusters on which they are the fastest."""
        best = [_fastest(sizes).kind for sizes in _by_cluster(self.sizes).values()]
        return sorted(dict.fromkeys(size.kind for size in self.sizes), key=lambda kind: -best.count(kind))

    def stops(self, scaling: Scaling, kind: str) -> int | None:
        """Return the largest number of GPUs on which a layout is worthwhile, or None if there is no limit.

        A layout is worthwhile if it fits and has at least `MIN_EFFICIENCY` of the throughput per GPU on the
        fewest GPUs.
        """
        sizes, clusters = self.of(scaling, kind), [num for kind_, num in _by_cluster(self.sizes) if kind_ == scaling]
        last = None
        for size in sizes:
            if size.tokens_per_s < MIN_EFFICIENCY * sizes[0].tokens_per_s:
                return last
            last = size.num_gpus
        return None if last == max(clusters, default=None) else last

    def __rich__(self) -> Any:
        kinds, rows = self.kinds, []
        for (scaling, num), sizes in _by_cluster(self.sizes).items():
            cells = {size.kind: f"{size.tokens_per_s:,.0f}" for size in sizes}
            cells[_fastest(sizes).kind] += " *"
            rows.append((scaling, f"{num:,}", *(cells.get(kind, "") for kind in kinds)))
        lines = ["* the fastest; an empty cell means that no layout of this kind fits"]
        for scaling, kind in itertools.product(SCALINGS, kinds):
            if sizes := self.of(scaling, kind):
                stops, until = self.stops(scaling, kind), "on all these sizes"
                if stops is not None:
                    until = f"up to {stops:,} GPUs" if stops > sizes[0].num_gpus else f"on {stops:,} GPUs only"
                lines.append(f"{scaling}, {kind}: worthwhile {until}")
        caption = "\n".join([*lines, "", self.rates])
        return table(f"{self.gpu}: tokens/s per GPU", ("", "GPUs", *kinds), rows, left=("",), caption=caption)


def _by_cluster(sizes: Sequence[Size]) -> dict[tuple[Scaling, int], list[Size]]:
    by_cluster: dict[tuple[Scaling, int], list[Size]] = {}
    for size in sizes:
        by_cluster.setdefault((size.scaling, size.num_gpus), []).append(size)
    return by_cluster


def _fastest(sizes: Sequence[Size]) -> Size:
    return max(sizes, key=lambda size: size.tokens_per_s)


def grow(work: Workload, cluster: Cluster, *, max_gpus: int = MAX_GPUS) -> Growth:
    """Evaluate a model on increasing numbers of GPUs.

    Args:
      work: the workload with the batch for `cluster`. Weak scaling keeps its number of examples per GPU.
      cluster: its nodes are multiplied, starting with a single node. Measured links of mesh axes are ignored, because
        they belong to one cluster size.
      max_gpus: maximum number of GPUs.
    """
    if max_gpus < cluster.gpus_per_node:
        reason, fix = f"a node has {cluster.gpus_per_node}", f"use at least {cluster.gpus_per_node}"
        raise problem(f"growth of {cluster.name}", f"use at most {max_gpus} GPUs", reason, fix, code="out-of-range")
    sizes: list[Size] = []
    for scaling in SCALINGS:
        nodes = 1
        while (num := nodes * cluster.gpus_per_node) <= max_gpus:
            examples = work.examples if scaling == "strong" else work.examples * num // cluster.num_devices
            if examples:
                pod, job = (
                    dataclasses.replace(cluster, nodes=nodes, axes={}, permutes={}),
                    with_examples(work, examples),
                )
                per_gpu = (examples if job.tokens is None else job.tokens) / num
                sizes += [
                    Size(
                        scaling=scaling, num_gpus=num, kind=kind, layout=candidate.layout.label,
                        step_s=candidate.time.step_s, tokens_per_s=per_gpu / candidate.time.step_s,
                        bound=candidate.time.bound,
                    )
                    for kind, candidate in best_by_kind(Search(job, pod)).items()
                ]  # fmt: skip
            nodes *= 2
    best = {_fastest(group).kind for group in _by_cluster(sizes).values()}
    # Composed strategies appear in the table only if they are the fastest somewhere.
    sizes = [size for size in sizes if size.kind in best or "|" not in size.kind]
    if not sizes:
        reason = f"no layout fits on up to {max_gpus:,} of its GPUs"
        fix = "run `meshpar plan`, which reports the missing memory"
        raise problem(f"growth of {cluster.name}", "compare layouts", reason, fix, code="does-not-fit")
    rates = Search(work, dataclasses.replace(cluster, axes={}, permutes={})).rates
    return Growth(gpu=cluster.gpu.name, sizes=tuple(sizes), rates=rates)


def with_examples(work: Workload, examples: int) -> Workload:
    """Return the workload of the same step with this number of examples."""
    tokens = None if work.seq_len is None else examples * work.seq_len
    return dataclasses.replace(work, examples=examples, tokens=tokens, batch=batch_of(work.batch, examples))


def best_by_kind(search: Search) -> Mapping[str, Candidate]:
    """Return the fastest layout that fits, for each kind of strategy."""
    num_evaluated: dict[str, int] = {}
    best: dict[str, Candidate] = {}
    for start in search.starts():
        kind = kind_of(start.strategy)
        is_skipped = len(start.strategy.components) > MAX_PARTS or start.state_bytes > search.limit_bytes
        if is_skipped or num_evaluated.get(kind, 0) >= MAX_CANDIDATES:
            continue
        try:
            fits: Sequence[Candidate] = list(search.of(search.placer.place(start.sizes, start.strategy)))
        except MeshparError:
            continue
        num_evaluated[kind] = num_evaluated.get(kind, 0) + bool(fits)
        for candidate in fits:
            if kind not in best or candidate.time.step_s < best[kind].time.step_s:
                best[kind] = candidate
    return best


def kind_of(strategy: Strategy) -> str:
    """Return the names of the parallelisms of a strategy: `fsdp | tensor_parallel`."""
    return " | ".join(repr(part).partition("(")[0] for part in strategy.components)
