"""Cost breakdown of a collective: steps, bytes, latency, bandwidth and formulas per algorithm.

The costs come from `cost_model.py`. This module adds names, links and formulas.

    n payload in bytes · N ranks · K ranks in a group, M = N/K groups · S servers
    α latency of a message · β time per byte, the inverse of the bandwidth · γ time to reduce a byte, by default 0

The algorithm bandwidth is n / time. The bus bandwidth is the algorithm bandwidth times the fraction of n that a rank
must send. It can be compared with the bandwidth of the link, and between collectives and numbers of ranks. The terms
follow nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md, 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import Cluster, Link, Links, Profile, parse_profile
from meshpar.hardware.cost_model import Cost
from meshpar.sharding.errors import check_choice, check_number, check_positive_int, problem
from meshpar.sharding.printing import Plain, Printed, table
from meshpar.sharding.types import MeshLike, axis_sizes
from meshpar.sharding.units import si


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sheet(Printed, Plain):
    """Numbers with their formulas. Prints as a table."""

    title: str
    rows: tuple[tuple[str, float, str, str], ...]
    """(name, value, unit, formula)."""

    def __getitem__(self, name: str) -> float:
        return next(value for row, value, *_ in self.rows if row == name)

    def __rich__(self) -> Any:
        columns = ("quantity", "value", "formula")
        shown = [(name, si(value, unit) if unit else f"{value:.6g}", form) for name, value, unit, form in self.rows]
        return table(self.title, columns, shown, left=columns)


class Formulas(NamedTuple):
    """Formulas of an algorithm, as text."""

    steps: str
    bytes_sent: str
    time: str
    bytes_reduced: str = ""
    """Bytes that are reduced, multiplied by γ in the time; empty if the collective has no reduction."""


class Algorithm(NamedTuple):
    """An algorithm for a collective."""

    name: str
    kind: str
    """Name of the collective in XLA."""
    cost: Callable[..., Cost]
    forms: Formulas
    uses_all_ports: bool = False
    """Whether NCCL uses all network ports of a node. Other algorithms use one port per rank."""


_HALF = Formulas("N−1", "(N−1)/N · n", "(N−1) α + (N−1)/N · n β")
_HALF_DOUBLING = Formulas("log₂ N", "(N−1)/N · n", "log₂ N α + (N−1)/N · n β")
_REDUCED = "(N−1)/N · n"
_HALF_REDUCED = _HALF._replace(bytes_reduced=_REDUCED)
_WHOLE = Formulas("2(N−1)", "2(N−1)/N · n", "2(N−1) α + 2(N−1)/N · n β", _REDUCED)
_ROOT = Formulas("2(N−1)", "(N−1) n at the root", "2(N−1) (α + n β)", "(N−1) n")
_SERVERS = Formulas("2(N−1)", "(N+S−2)/S · n at a server", "2(N−1) (α + n/S · β)", "(N−1)/S · n")
_TWO_LEVELS = Formulas(
    "2(K−1) + 2(M−1)",
    "2(K−1)/K · n inside + 2(M−1)/M · n/K across",
    "2(K−1) α₁ + 2(K−1)/K · n β₁ + 2(M−1) α₂ + 2(M−1)/M · n/K · β₂",
    "((K−1)/K · n + (M−1)/M · n/K)",
)
_TREE = Formulas("2⌈log₂ N⌉", "n ⌈log₂ N⌉ at the root", "2⌈log₂ N⌉ (α + n β)", "n ⌈log₂ N⌉")
_DOUBLING = Formulas("log₂ N; ⌊log₂ N⌋ + 2 if N is not a power of two", "n log₂ N", "log₂ N (α + n β)", "n log₂ N")
_HALVING = Formulas(
    "2 log₂ N; 2 ⌊log₂ N⌋ + 2 if N is not a power of two", "2(N−1)/N · n", "2 log₂ N α + 2(N−1)/N · n β", _REDUCED
)
_BROADCAST = Formulas("N−1", "n", "(N−1) α + n β")
_MESSAGE = Formulas("1", "n", "α + n β")

# `breakdown` handles the two algorithms that have additional arguments.
_KNOWN = (
    Algorithm("ring", "all-reduce", cost.ring_all_reduce, _WHOLE, uses_all_ports=True),
    Algorithm("recursive-doubling", "all-reduce", cost.tree_all_reduce, _DOUBLING),
    Algorithm("halving-doubling", "all-reduce", cost.halving_doubling_all_reduce, _HALVING),
    Algorithm("tree", "all-reduce", cost.binomial_tree_all_reduce, _TREE),
    Algorithm("hierarchical", "all-reduce", cost.ring_all_reduce, _TWO_LEVELS),
    Algorithm("root", "all-reduce", cost.naive_root_all_reduce, _ROOT),
    Algorithm("parameter-server", "all-reduce", cost.parameter_server_all_reduce, _SERVERS),
    Algorithm("reduce-scatter", "reduce-scatter", cost.ring_reduce_scatter, _HALF_REDUCED, uses_all_ports=True),
    Algorithm("all-gather", "all-gather", cost.ring_all_gather, _HALF, uses_all_ports=True),
    Algorithm("doubling-all-gather", "all-gather", cost.doubling_all_gather, _HALF_DOUBLING),
    Algorithm(
        "halving-reduce-scatter",
        "reduce-scatter",
        cost.halving_reduce_scatter,
        _HALF_DOUBLING._replace(bytes_reduced=_REDUCED),
    ),
    Algorithm("all-to-all", "all-to-all", cost.all_to_all, _HALF),
    Algorithm("broadcast", "collective-broadcast", cost.ring_broadcast, _BROADCAST, uses_all_ports=True),
    Algorithm("message", "collective-permute", lambda n, _: cost.message(n), _MESSAGE),
)
ALGORITHMS: Mapping[str, Algorithm] = {algorithm.name: algorithm for algorithm in _KNOWN}
ALL_REDUCES = tuple(name for name, algorithm in ALGORITHMS.items() if algorithm.kind == "all-reduce")


def bus_factor(kind: str, num_ranks: int) -> float:
    """Return the ratio of bus to algorithm bandwidth: the fraction of the payload that a rank must send."""
    return cost.bytes_sent(kind, 1.0, num_ranks)


class LinkCost(NamedTuple):
    """Cost of an algorithm over a link."""

    cost: Cost
    link: Link
    where: str
    """Description of the link."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostBreakdown(Printed):
    """Cost of a collective with an algorithm: steps, bytes, latency and bandwidth time. Prints as a table."""

    algorithm: Algorithm
    payload_bytes: float
    num_ranks: int
    over: str
    """Text about the cluster or profile and the source of its links."""
    phases: tuple[LinkCost, ...]
    """Consecutive phases. A two-level algorithm has two: within and between groups."""
    crossover_bytes: float | None = None
    """For an all-reduce, the payload below which recursive doubling is faster than a ring; otherwise None."""
    gamma_s_per_byte: float = 0.0
    """Time to reduce a byte. It is 0 if the bandwidth of the links includes the reduction."""

    @property
    def name(self) -> str:
        return self.algorithm.name

    @property
    def steps(self) -> int:
        """Number of consecutive messages."""
        return sum(phase.cost.steps for phase in self.phases)

    @property
    def bytes_sent(self) -> float:
        """Bytes sent by a rank, or by the busiest rank."""
        return sum(phase.cost.bytes_sent for phase in self.phases)

    @property
    def latency_s(self) -> float:
        """Part of `time_s` due to latency: steps × α."""
        return sum(phase.cost.steps * phase.link.alpha_s for phase in self.phases)

    @property
    def bandwidth_s(self) -> float:
        """Part of `time_s` due to bandwidth: consecutive bytes × β."""
        return sum(phase.cost.bytes_in_turn * phase.link.beta_s_per_byte for phase in self.phases)

    @property
    def reduction_s(self) -> float:
        """Part of `time_s` due to reductions: reduced bytes × γ."""
        return sum(phase.cost.bytes_reduced for phase in self.phases) * self.gamma_s_per_byte

    @property
    def time_s(self) -> float:
        """Total time."""
        return self.latency_s + self.bandwidth_s + self.reduction_s

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Payload over total time."""
        return self.payload_bytes / self.time_s if self.time_s else 0.0

    @property
    def bus_bytes_per_s(self) -> float:
        """Algorithm bandwidth times `bus_factor`."""
        return self.algorithm_bytes_per_s * bus_factor(self.algorithm.kind, self.num_ranks)

    @property
    def lower_bound_bytes(self) -> float:
        """Minimum bytes that a rank sends with any algorithm."""
        return bus_factor(self.algorithm.kind, self.num_ranks) * self.payload_bytes

    @property
    def sheet(self) -> Sheet:
        """All quantities with their formulas."""
        forms = self.algorithm.forms
        rows = [
            ("steps", self.steps, "", forms.steps),
            ("bytes sent per rank", self.bytes_sent, "B", forms.bytes_sent),
            ("lower bound", self.lower_bound_bytes, "B", "bytes sent per rank, for any algorithm"),
            ("latency", self.latency_s, "s", "steps × α"),
            ("bandwidth", self.bandwidth_s, "s", "consecutive bytes × β"),
            *([("reduction", self.reduction_s, "s", f"{forms.bytes_reduced} γ")] if self.reduction_s else []),
            ("time", self.time_s, "s", self.time_formula),
            ("algorithm bandwidth", self.algorithm_bytes_per_s, "B/s", "n / time"),
            ("bus bandwidth", self.bus_bytes_per_s, "B/s", "lower bound / time"),
        ]
        if len(self.phases) == 2:
            rows += [(x, phase.cost.steps // 2 + 1, "", "ranks") for x, phase in zip("KM", self.phases, strict=True)]
        for mark, phase in zip(("",) if len(self.phases) == 1 else "₁₂", self.phases, strict=True):
            rows.append((f"α{mark}", phase.link.alpha_s, "s", phase.where))
            rows.append((f"1/β{mark}", phase.link.bytes_per_s, "B/s", phase.where))
        rows += _crossover(self)
        return Sheet(title=f"{self.name}: {self._title}", rows=tuple(rows))

    @property
    def time_formula(self) -> str:
        return self.algorithm.forms.time + f" + {self.algorithm.forms.bytes_reduced} γ" * bool(self.reduction_s)

    @property
    def _title(self) -> str:
        kind, ranks = self.algorithm.kind, self.num_ranks
        return f"{kind} of {si(self.payload_bytes, 'B')} over {ranks} ranks, links: {self.over}"

    def to_json(self) -> dict[str, Any]:
        return self.sheet.to_json()

    def __rich__(self) -> Any:
        return self.sheet.__rich__()


def comparison(breakdowns: Iterable[CostBreakdown]) -> Sheet:
    """Compare the times of algorithms for a collective, the fastest first."""
    ranked = sorted(breakdowns, key=lambda each: each.time_s)
    rows = [(each.name, each.time_s, "s", each.time_formula) for each in ranked]
    return Sheet(title=ranked[0]._title, rows=(*rows, *_crossover(ranked[0])))


def _crossover(breakdown: CostBreakdown) -> list[tuple[str, float, str, str]]:
    if breakdown.crossover_bytes is None:
        return []
    return [("crossover", breakdown.crossover_bytes, "B", "recursive doubling is faster below, the ring above")]


def breakdown(
    algorithm: str,
    payload_bytes: float,
    num_ranks: int,
    over: Link | Profile | str,
    *,
    inner: int | None = None,
    servers: int = 1,
    axes: Sequence[str] = (),
    mesh: MeshLike | None = None,
    by_messages: bool = False,
    gamma_s_per_byte: float = 0.0,
) -> CostBreakdown:
    """Return the breakdown of the cost of a collective.

    Args:
      algorithm: one of `ALGORITHMS`.
      payload_bytes: n, the bytes of the gathered array for an all-gather, of the array before scattering for a
        reduce-scatter, and of the local array otherwise.
      num_ranks: N.
      over: a link, measured links or a cluster, also as text for `parse_profile`. The ranks are consecutive devices of
        a cluster, unless `axes` and `mesh` determine them.
      inner: K of the hierarchical algorithm, by default the GPUs per node.
      servers: S, the number of parameter servers.
      axes: mesh axes of the group, which select measured links. The last axis is the inner axis of the hierarchical
        algorithm.
      mesh: the mesh with these axes, in the order of the cluster's devices.
      by_messages: True for kernels of `meshpar.collectives`, whose rings send single messages through one port per
        rank. False for NCCL's rings.
      gamma_s_per_byte: γ, the time to reduce a byte, such as `Gpu.reduction_s_per_byte`. Use 0 if the bandwidths of the
        links were measured or published for all-reduces or reduce-scatters, because these include the reduction.
    """
    name = str(algorithm).lower().replace("_", "-")
    check_choice("cost", "an algorithm", tuple(ALGORITHMS), algorithm=name)
    entry = ALGORITHMS[name]
    check_positive_int(f"`{name}`", "a number of ranks", ranks=num_ranks, servers=servers, inner=inner or 1)
    check_number(f"`{name}`", "9e-13", positive=False, gamma_s_per_byte=gamma_s_per_byte)
    over = over if isinstance(over, Link) else parse_profile(over)
    mesh = mesh if mesh is not None else {"ranks": num_ranks}
    all_axes = axes or tuple(axis_sizes(mesh))
    phases: tuple[LinkCost, ...]
    if entry.name == "hierarchical":
        phases = _two_levels(payload_bytes, num_ranks, over, inner, axes, mesh, by_messages=by_messages)
    else:
        options = {"num_servers": servers} if entry.name == "parameter-server" else {}
        kind = "collective-permute" if by_messages or not entry.uses_all_ports else entry.kind
        phases = (LinkCost(entry.cost(payload_bytes, num_ranks, **options), *_link(kind, over, all_axes, mesh)),)
    crossover_bytes = None
    if entry.kind == "all-reduce" and len(phases) == 1:
        tree, _ = _link("collective-permute", over, all_axes, mesh)
        ring, _ = (tree, "") if by_messages else _link("all-reduce", over, all_axes, mesh)
        gamma = {"gamma_s_per_byte": gamma_s_per_byte}
        crossover_bytes = cost.ring_tree_crossover_bytes(num_ranks, ring, tree_link=tree, **gamma)
    return CostBreakdown(
        over="as given" if isinstance(over, Link) else f"{over.name}, {over.links_from}",
        algorithm=entry,
        payload_bytes=float(payload_bytes),
        num_ranks=num_ranks,
        phases=phases,
        crossover_bytes=crossover_bytes,
        gamma_s_per_byte=gamma_s_per_byte,
    )


def _two_levels(
    payload_bytes: float,
    num_ranks: int,
    over: Link | Profile,
    inner: int | None,
    axes: Sequence[str],
    mesh: MeshLike,
    *,
    by_messages: bool,
) -> tuple[LinkCost, LinkCost]:
    if inner is None:
        inner = axis_sizes(mesh)[axes[-1]] if len(axes) > 1 else over.gpus_per_node if isinstance(over, Cluster) else 0
    if not inner:
        reason, fix = "the number of ranks per group is missing", "use --inner 8, or inner=8"
        raise problem("`hierarchical`", "form groups", reason, fix, code="missing-argument")
    both = cost.hierarchical_all_reduce(payload_bytes, num_ranks, inner=inner)
    if len(axes) < 2:  # the ranks of a group are consecutive
        mesh = {"across": num_ranks // inner, "inside": inner}
        axes = ("across", "inside")
    kind = "collective-permute" if by_messages else "all-reduce"
    inside, inside_where = _link(kind, over, axes[-1:], mesh)
    across, across_where = _link(kind, over, axes[:-1], mesh)
    return LinkCost(both.inside, inside, f"inside: {inside_where}"), LinkCost(
        both.across, across, f"across: {across_where}"
    )


def _link(kind: str, over: Link | Profile, axes: Sequence[str], mesh: MeshLike) -> tuple[Link, str]:
    if isinstance(over, Link):
        return over, "as given"
    label = "*".join(axes)
    measured = over.measured(axes, permute=kind == "collective-permute")
    if measured is not None:
        keys = {*over.axes, *over.permutes}
        is_default = label not in keys and not keys.issuperset(axes)
        return measured, "measured, for all axes" if is_default else f"measured along `{label}`"
    if isinstance(over, Links):
        fix = f"use one of these axes, or measure this one: meshpar bench collectives --mesh {axes[0]}=8 --save my.json"
        reason = f"its links were measured along {over.axis_names}"
        raise problem(f"profile `{over.name}`", f"use mesh axis `{label}`", reason, fix, code="unknown-axis")
    nodes, per_node = over.layout(axes, mesh)
    link = cost.collective_link(kind, over, num_nodes=nodes, per_node=per_node)
    if nodes == 1:
        return link, "within a node"
    ports = f", {per_node} ports per node" if kind != "collective-permute" and per_node > 1 else ""
    return link, f"between {nodes} nodes{ports}"
