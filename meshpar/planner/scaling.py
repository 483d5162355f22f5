"""Growth: what a model costs on more and more GPUs, with the same batch and with one that grows, by kind of layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from meshpar.hardware.clusters import Cluster
from meshpar.parallel import Strategy
from meshpar.planner.search import Found, Search
from meshpar.planner.workload import Workload, batch_of
from meshpar.sharding.printing import Plain, Printed, table
from meshpar.sharding.types import MeshparError, problem

Scaling = Literal["strong", "weak"]
SCALINGS: tuple[Scaling, ...] = ("strong", "weak")
MOST_GPUS = 16_384
PAYS = 0.5
"""A layout pays as long as a GPU does this share of what it does on the fewest GPUs that the layout fits."""
MOST_PARTS = 2
"""Kinds of more parts than one that keeps the state and another are left out."""
LOOKED_AT = 2
"""Of each kind of layout on a cluster, so many are looked at closely, the most promising first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size(Plain):
    """The quickest layout of a kind on so many GPUs."""

    scaling: Scaling
    """`strong`: with the batch given; `weak`: with as many rows a GPU as it has on the fewest."""
    num_gpus: int
    kind: str
    """Names of the strategy's parts: `fsdp | tensor_parallel`."""
    layout: str
    step_s: float
    tokens_per_s: float
    """Of one GPU; rows a second where the batch holds no tokens."""
    bound: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth(Printed, Plain):
    """A model on more and more GPUs. Prints as a table of tokens a second of one GPU."""

    gpu: str
    sizes: tuple[Size, ...]
    rates: str

    def of(self, scaling: Scaling, kind: str) -> list[Size]:
        """Those of one kind, the fewest GPUs first."""
        return [one for one in self.sizes if (one.scaling, one.kind) == (scaling, kind)]

    @property
    def kinds(self) -> list[str]:
        """Kinds of layouts, the quickest of most clusters first."""
        best = [max(each, key=lambda one: one.tokens_per_s).kind for each in _by_cluster(self.sizes).values()]
        return sorted(dict.fromkeys(one.kind for one in self.sizes), key=lambda kind: -best.count(kind))

    def stops(self, scaling: Scaling, kind: str) -> int | None:
        """The most GPUs up to which a layout pays; None: it still does on the most that were looked at.

        It pays as long as it fits, and a GPU does `PAYS` of what it does on the fewest.
        """
        found, clusters = self.of(scaling, kind), [num for one, num in _by_cluster(self.sizes) if one == scaling]
        last = None
        for one in found:
            if one.tokens_per_s < PAYS * found[0].tokens_per_s:
                return last
            last = one.num_gpus
        return None if last == max(clusters, default=None) else last

    def __rich__(self) -> Any:
        kinds, rows = self.kinds, []
        for (scaling, num), each in _by_cluster(self.sizes).items():
            by_kind, most = {one.kind: one for one in each}, max(one.tokens_per_s for one in each)
            cells = [_cell(by_kind.get(kind), most) for kind in kinds]
            rows.append((scaling, f"{num:,}", *cells))
        stops = [_words(self, scaling, kind) for scaling in SCALINGS for kind in kinds if self.of(scaling, kind)]
        caption = "\n".join(["* the quickest; where a kind is empty nothing of it fits", *stops, "", self.rates])
        return table(f"{self.gpu}: tokens/s a GPU", ("", "GPUs", *kinds), rows, left=("",), caption=caption)


def _by_cluster(sizes: Sequence[Size]) -> dict[tuple[Scaling, int], list[Size]]:
    found: dict[tuple[Scaling, int], list[Size]] = {}
    for one in sizes:
        found.setdefault((one.scaling, one.num_gpus), []).append(one)
    return found


def _cell(one: Size | None, most: float) -> str:
    return "" if one is None else f"{one.tokens_per_s:,.0f}" + (" *" if one.tokens_per_s == most else "")


def _words(growth: Growth, scaling: Scaling, kind: str) -> str:
    stops, first = growth.stops(scaling, kind), growth.of(scaling, kind)[0].num_gpus
    if stops is None:
        return f"{scaling}, {kind}: pays up to the most GPUs"
    return f"{scaling}, {kind}: " + (f"pays up to {stops:,} GPUs" if stops > first else f"pays on {first:,} GPUs only")


def grow(work: Workload, cluster: Cluster, *, most: int = MOST_GPUS) -> Growth:
    """The same model on more and more GPUs, by kind of layout: the table that says where each stops paying.

    Args:
      work: with the batch of the cluster; the batch of weak scaling is as many rows a GPU.
      cluster: whose nodes there are more and more of, from one node on; links measured along axes are left out, for
        they are those of one size.
      most: GPUs.

    Raises:
      ValueError: nothing fits on any of them, or fewer GPUs than one node has.
    """
    if most < cluster.gpus_per_node:
        exists = f"a node has {cluster.gpus_per_node}"
        raise problem(f"growth of {cluster.name}", f"look at {most} GPUs at most", exists, "give as many or more")
    sizes: list[Size] = []
    for scaling in SCALINGS:
        nodes = 1
        while (num := nodes * cluster.gpus_per_node) <= most:
            rows = work.rows if scaling == "strong" else work.rows * num // cluster.num_devices
            if rows:
                pod = dataclasses.replace(cluster, nodes=nodes, axes={}, permutes={})
                sizes += _sizes(with_rows(work, rows), pod, scaling)
            nodes *= 2
    best = {max(each, key=lambda one: one.tokens_per_s).kind for each in _by_cluster(sizes).values()}
    # Of kinds with two parts those that are the quickest somewhere: the others would only fill the table.
    sizes = [one for one in sizes if one.kind in best or "|" not in one.kind]
    if not sizes:
        exists = f"nothing fits on {most:,} of its GPUs"
        raise problem(f"growth of {cluster.name}", "compare layouts", exists, "meshpar plan tells by how much")
    rates = Search(work, dataclasses.replace(cluster, axes={}, permutes={})).rates
    return Growth(gpu=cluster.gpu.name, sizes=tuple(sizes), rates=rates)


def with_rows(work: Workload, rows: int) -> Workload:
    """The same step on a batch of so many rows."""
    tokens = None if work.seq_len is None else rows * work.seq_len
    return dataclasses.replace(work, rows=rows, tokens=tokens, batch=batch_of(work.batch, rows))


def _sizes(work: Workload, cluster: Cluster, scaling: Scaling) -> Iterator[Size]:
    for kind, found in best_by_kind(Search(work, cluster)).items():
        done = (work.rows if work.tokens is None else work.tokens) / cluster.num_devices
        yield Size(
            scaling=scaling, num_gpus=cluster.num_devices, kind=kind, layout=found.layout.label,
            step_s=found.time.step_s, tokens_per_s=done / found.time.step_s, bound=found.time.bound,
        )  # fmt: skip


def best_by_kind(search: Search) -> Mapping[str, Found]:
    """The quickest layout that fits of each kind of strategy."""
    looked: dict[str, int] = {}
    found: dict[str, Found] = {}
    for start in search.starts():
        kind = kind_of(start.strategy)
        is_over = len(start.strategy.parts) > MOST_PARTS or start.state_bytes > search.limit_bytes
        if is_over or looked.get(kind, 0) >= LOOKED_AT:
            continue
        try:
            fits: Sequence[Found] = list(search.of(search.placer.place(start.sizes, start.strategy)))
        except MeshparError:
            continue
        looked[kind] = looked.get(kind, 0) + bool(fits)
        for one in fits:
            if kind not in found or one.time.step_s < found[kind].time.step_s:
                found[kind] = one
    return found


def kind_of(strategy: Strategy) -> str:
    """Names of the parts of a strategy: `fsdp | tensor_parallel`."""
    return " | ".join(repr(part).partition("(")[0] for part in strategy.parts)
