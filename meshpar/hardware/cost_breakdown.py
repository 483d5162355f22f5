"""What a collective costs by each algorithm, itemised: steps, bytes, latency and bandwidth parts, bandwidths, bound.

The costs are those of `cost.py`; here they get the names that people call them by, a link each, and their formulas.

    n payload in bytes · N ranks · K of them in a group, M = N/K groups · S servers
    α time of a message without its bytes · β time of a byte, one over the bandwidth

Algorithm bandwidth is n over the time. Bus bandwidth is that times the share of n that a rank has to send at best:
comparable between collectives, between numbers of ranks, and to the link. The terms are those of nccl-tests
(NVIDIA/nccl-tests, doc/PERFORMANCE.md, 2024).
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import Cluster, Link, Links, Profile
from meshpar.hardware.cost_model import Cost
from meshpar.sharding.printing import Plain, Printed, table
from meshpar.sharding.types import MeshLike, axis_sizes, is_int, near, problem
from meshpar.sharding.units import si


class Forms(NamedTuple):
    """The closed form of an algorithm, as people write it."""

    steps: str
    bytes_sent: str
    time: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A way to run a collective, and its closed form."""

    name: str
    kind: str
    """The collective, as XLA names it."""
    cost: Callable[[float, int], Cost]
    forms: Forms
    lays_rings: bool = False
    """Whether NCCL lays it through all network ports of a node; the others have one port a rank."""
    by_powers_of_two: bool = False


_HALF = Forms(steps="N−1", bytes_sent="(N−1)/N · n", time="(N−1) α + (N−1)/N · n β")
_HALF_DOUBLING = Forms(steps="log₂ N", bytes_sent="(N−1)/N · n", time="log₂ N α + (N−1)/N · n β")
_WHOLE = Forms(steps="2(N−1)", bytes_sent="2(N−1)/N · n", time="2(N−1) α + 2(N−1)/N · n β")
_ROOT = Forms(steps="2(N−1)", bytes_sent="(N−1) n at the root", time="2(N−1) (α + n β)")
_SERVERS = Forms(steps="2(N−1)", bytes_sent="(N+S−2)/S · n at a server", time="2(N−1) (α + n/S · β)")
_TWO_LEVELS = Forms(
    steps="2(K−1) + 2(M−1)",
    bytes_sent="2(K−1)/K · n inside + 2(M−1)/M · n/K across",
    time="2(K−1) α₁ + 2(K−1)/K · n β₁ + 2(M−1) α₂ + 2(M−1)/M · n/K · β₂",
)
_TREE = Forms(steps="2⌈log₂ N⌉", bytes_sent="n ⌈log₂ N⌉ at the root", time="2⌈log₂ N⌉ (α + n β)")
_DOUBLING = Forms(steps="log₂ N", bytes_sent="n log₂ N", time="log₂ N (α + n β)")
_HALVING = Forms(steps="2 log₂ N", bytes_sent="2(N−1)/N · n", time="2 log₂ N α + 2(N−1)/N · n β")
_BROADCAST = Forms(steps="N−1", bytes_sent="n", time="(N−1) α + n β")
_MESSAGE = Forms(steps="1", bytes_sent="n", time="α + n β")

# The two that take more than a payload and a number of ranks are completed in `account`.
_KNOWN = (
    Algorithm(name="ring", kind="all-reduce", cost=cost.ring_all_reduce, lays_rings=True, forms=_WHOLE),
    Algorithm(
        name="recursive-doubling", kind="all-reduce", cost=cost.tree_all_reduce, by_powers_of_two=True, forms=_DOUBLING
    ),
    Algorithm(
        name="halving-doubling",
        kind="all-reduce",
        cost=cost.halving_doubling_all_reduce,
        by_powers_of_two=True,
        forms=_HALVING,
    ),
    Algorithm(name="tree", kind="all-reduce", cost=cost.binomial_tree_all_reduce, forms=_TREE),
    Algorithm(name="hierarchical", kind="all-reduce", cost=cost.ring_all_reduce, forms=_TWO_LEVELS),
    Algorithm(name="root", kind="all-reduce", cost=cost.naive_root_all_reduce, forms=_ROOT),
    Algorithm(name="parameter-server", kind="all-reduce", cost=cost.parameter_server_all_reduce, forms=_SERVERS),
    Algorithm(
        name="reduce-scatter", kind="reduce-scatter", cost=cost.ring_reduce_scatter, lays_rings=True, forms=_HALF
    ),
    Algorithm(name="all-gather", kind="all-gather", cost=cost.ring_all_gather, lays_rings=True, forms=_HALF),
    Algorithm(name="doubling-all-gather", kind="all-gather", cost=cost.doubling_all_gather, forms=_HALF_DOUBLING),
    Algorithm(
        name="halving-reduce-scatter", kind="reduce-scatter", cost=cost.halving_reduce_scatter, forms=_HALF_DOUBLING
    ),
    Algorithm(name="all-to-all", kind="all-to-all", cost=cost.all_to_all, forms=_HALF),
    Algorithm(
        name="broadcast", kind="collective-broadcast", cost=cost.ring_broadcast, lays_rings=True, forms=_BROADCAST
    ),
    Algorithm(name="message", kind="collective-permute", cost=lambda n, _: cost.message(n), forms=_MESSAGE),
)
ALGORITHMS: Mapping[str, Algorithm] = {one.name: one for one in _KNOWN}
ALL_REDUCES = tuple(one.name for one in _KNOWN if one.kind == "all-reduce")
ALIASES: Mapping[str, str] = {
    "ring-all-reduce": "ring",
    "all-reduce": "ring",
    "ring-reduce-scatter": "reduce-scatter",
    "ring-all-gather": "all-gather",
    "naive-root": "root",
    "ring-broadcast": "broadcast",
    "permute": "message",
}

_BOUND: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda num_ranks: 2 * (num_ranks - 1) / num_ranks,
    "reduce-scatter": lambda num_ranks: (num_ranks - 1) / num_ranks,
    "all-gather": lambda num_ranks: (num_ranks - 1) / num_ranks,
    "all-to-all": lambda num_ranks: (num_ranks - 1) / num_ranks,
    "collective-broadcast": lambda num_ranks: 1.0,
    "collective-permute": lambda num_ranks: 1.0,
}


def bus_factor(kind: str, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: the share of the payload that a rank has to send at best.

    Raises:
      ValueError: no such kind of collective.
    """
    if kind not in _BOUND:
        raise problem(f"collective `{kind}`", "have a bus bandwidth", "there is no such kind", near(kind, _BOUND))
    return _BOUND[kind](num_ranks)


class LinkCost(NamedTuple):
    """What an algorithm does over one kind of link."""

    cost: Cost
    link: Link
    where: str
    """The link in words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account(Printed):
    """One collective by one algorithm, itemised."""

    algorithm: Algorithm
    payload_bytes: float
    num_ranks: int
    over: str
    """What holds the links, a cluster or a profile, and where their figures are from."""
    legs: tuple[LinkCost, ...]
    """One after the other; two for an algorithm of two levels: inside, across."""
    crossover_bytes: float | None = None
    """Payload below which recursive doubling is quicker than a ring, for an all-reduce; None where it never changes."""

    @property
    def name(self) -> str:
        return self.algorithm.name

    @property
    def steps(self) -> int:
        """Messages one after the other."""
        return sum(leg.cost.steps for leg in self.legs)

    @property
    def bytes_sent(self) -> float:
        """By one rank; by the busiest where ranks differ."""
        return sum(leg.cost.bytes_sent for leg in self.legs)

    @property
    def latency_s(self) -> float:
        """The steps' share of the time."""
        return sum(leg.cost.steps * leg.link.alpha_s for leg in self.legs)

    @property
    def bandwidth_s(self) -> float:
        """The bytes' share of the time."""
        return sum(leg.cost.bytes_in_turn * leg.link.beta_s_per_byte for leg in self.legs)

    @property
    def time_s(self) -> float:
        """From the first message to the last."""
        return self.latency_s + self.bandwidth_s

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Payload over time."""
        return self.payload_bytes / self.time_s if self.time_s else 0.0

    @property
    def bus_bytes_per_s(self) -> float:
        """Algorithm bandwidth times `bus_factor`."""
        return self.algorithm_bytes_per_s * bus_factor(self.algorithm.kind, self.num_ranks)

    @property
    def lower_bound_bytes(self) -> float:
        """What a rank has to send at best, by any algorithm."""
        return bus_factor(self.algorithm.kind, self.num_ranks) * self.payload_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """What the formulas leave out."""
        if self.algorithm.by_powers_of_two and self.num_ranks & (self.num_ranks - 1):
            return (
                "N is no power of two: the ranks beyond one hand their array in first and get the result last, two "
                "messages more; log₂ N is rounded down",
            )
        return ()

    def to_json(self) -> dict[str, Any]:
        figures = (
            "steps", "bytes_sent", "latency_s", "bandwidth_s", "time_s", "algorithm_bytes_per_s", "bus_bytes_per_s",
            "lower_bound_bytes", "crossover_bytes",
        )  # fmt: skip
        return {
            "algorithm": self.name,
            "kind": self.algorithm.kind,
            "payload_bytes": self.payload_bytes,
            "num_ranks": self.num_ranks,
            **{figure: getattr(self, figure) for figure in figures},
            "formulas": self.algorithm.forms._asdict(),
            "over": self.over,
            "links": [{"where": leg.where, **dataclasses.asdict(leg.link)} for leg in self.legs],
            "notes": list(self.notes),
        }

    def __rich__(self) -> Any:
        what = f"{self.name}: {self.algorithm.kind} of {si(self.payload_bytes, 'B')} over {self.num_ranks} ranks"
        caption = "\n".join([self._symbols(), f"links: {self.over}", *self.notes])
        columns = ("figure", "value", "formula")
        return table(what, columns, self._rows(), left=columns, caption=caption)

    def _rows(self) -> list[tuple[str, str, str]]:
        named, forms, sent = self.algorithm, self.algorithm.forms, self.bytes_sent
        over_bound = sent / self.lower_bound_bytes if self.lower_bound_bytes else 1.0
        rows = [
            ("steps", f"{self.steps:,}", forms.steps),
            ("bytes sent per rank", si(sent, "B"), forms.bytes_sent),
            (
                "lower bound",
                si(self.lower_bound_bytes, "B"),
                f"any algorithm; this one sends {over_bound:.3g} times it",
            ),
            ("latency part", si(self.latency_s, "s"), "steps × α"),
            ("bandwidth part", si(self.bandwidth_s, "s"), "bytes through a link in turn × β"),
            ("time", si(self.time_s, "s"), forms.time),
            ("algorithm bandwidth", si(self.algorithm_bytes_per_s, "B/s"), "n / time"),
            ("bus bandwidth", si(self.bus_bytes_per_s, "B/s"), "lower bound / time"),
        ]
        rows += [
            ("link", f"α {si(leg.link.alpha_s, 's')}, {si(leg.link.bytes_per_s, 'B/s')}", leg.where)
            for leg in self.legs
        ]
        if named.kind == "all-reduce" and len(self.legs) == 1:
            rows.append(("crossover", *_crossover_words(self.crossover_bytes)))
        return rows

    def _symbols(self) -> str:
        symbols = [f"n = {si(self.payload_bytes, 'B')}", f"N = {self.num_ranks}"]
        if len(self.legs) == 2:
            symbols += [f"{name} = {leg.cost.steps // 2 + 1}" for name, leg in zip("KM", self.legs, strict=True)]
        marks = ("",) if len(self.legs) == 1 else ("₁", "₂")
        for mark, leg in zip(marks, self.legs, strict=True):
            symbols += [
                f"α{mark} = {si(leg.link.alpha_s, 's')}",
                f"β{mark} = {si(leg.link.beta_s_per_byte, 's')} a byte",
            ]
        return ", ".join(symbols)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accounts(Printed, Plain):
    """The same collective by several algorithms, the quickest first."""

    accounts: tuple[Account, ...]

    def __rich__(self) -> Any:
        first = self.accounts[0]
        what = f"{first.algorithm.kind} of {si(first.payload_bytes, 'B')} over {first.num_ranks} ranks"
        lines = [f"links: {first.over}"]
        lines += [f"lower bound of any {first.algorithm.kind}: {si(first.lower_bound_bytes, 'B')} sent per rank"]
        if first.algorithm.kind == "all-reduce":
            lines.append("ring / recursive doubling: {}, {}".format(*_crossover_words(first.crossover_bytes)))
        columns = ("algorithm", "steps", "sent per rank", "latency", "bandwidth", "time", "bus bandwidth", "link")
        rows = [
            (
                one.name,
                f"{one.steps:,}",
                si(one.bytes_sent, "B"),
                *(si(time_s, "s") for time_s in (one.latency_s, one.bandwidth_s, one.time_s)),
                si(one.bus_bytes_per_s, "B/s"),
                "; ".join(dict.fromkeys(leg.where for leg in one.legs)),
            )
            for one in self.accounts
        ]
        return table(what, columns, rows, left=("algorithm", "link"), caption="\n".join(lines))


def account(
    algorithm: str,
    payload_bytes: float,
    num_ranks: int,
    over: Link | Profile,
    *,
    inner: int | None = None,
    servers: int = 1,
    axes: Sequence[str] = (),
    mesh: MeshLike | None = None,
    by_messages: bool = False,
) -> Account:
    """Itemises one collective.

    Args:
      algorithm: one of `ALGORITHMS`, or an alias.
      payload_bytes: n: of an all-gather the gathered array, of a reduce-scatter the array before scattering, of an
        all-to-all what a rank holds, of all others the array.
      num_ranks: N.
      over: a link; or a cluster, in which the ranks stand one after the other unless `axes` and `mesh` say how; or
        measured links.
      inner: K of the hierarchical algorithm; a cluster's GPUs in a node, where it is not given.
      servers: S of the parameter server.
      axes: the mesh axes that the ranks differ along: a profile may have measured them. Of the hierarchical algorithm
        the last is inside.
      mesh: the mesh that has them, in the order of the cluster's devices.
      by_messages: rings, too, go as single messages with one port a rank, as those of `meshpar.collectives` do; if
        not, they are laid as NCCL lays them.

    Raises:
      ValueError: no such algorithm; sizes that cannot be; a cluster that is too small, links that were not measured.
    """
    known = _named(algorithm)
    _check_sizes(known.name, payload_bytes, ranks=num_ranks, servers=servers, inner=1 if inner is None else inner)
    _check_links(known.name, over, axes, mesh)
    kind = "collective-permute" if by_messages or not known.lays_rings else known.kind
    cost.message(payload_bytes)  # refuses what is no payload
    mesh = mesh if mesh is not None else {"ranks": num_ranks}
    legs: tuple[LinkCost, ...]
    if known.name == "hierarchical":
        legs = _two_levels(payload_bytes, num_ranks, over, inner, axes, mesh, by_messages=by_messages)
    else:
        found = (
            cost.parameter_server_all_reduce(payload_bytes, num_ranks, num_servers=servers)
            if known.name == "parameter-server"
            else known.cost(payload_bytes, num_ranks)
        )
        legs = (_leg(found, kind, over, axes or _own(mesh), mesh),)
    return Account(
        over="as given" if isinstance(over, Link) else f"{over.name}, {over.links_from}",
        algorithm=known,
        payload_bytes=float(payload_bytes),
        num_ranks=num_ranks,
        legs=legs,
        crossover_bytes=_crossover_bytes(known, num_ranks, over, axes, mesh, by_messages=by_messages),
    )


def compare(names: Sequence[str], payload_bytes: float, num_ranks: int, over: Link | Profile, **how: Any) -> Accounts:
    """The same collective by several algorithms; `how` as for `account`. Errors are those of `account`."""
    found = [account(name, payload_bytes, num_ranks, over, **how) for name in names]
    return Accounts(accounts=tuple(sorted(found, key=lambda one: one.time_s)))


# ---- Parts -----------------------------------------------------------------------------------------------------------


MOST_RANKS = 1 << 24
"""Ranks that are priced together."""


def _check_sizes(name: str, payload_bytes: Any, **counts: Any) -> None:
    is_number = isinstance(payload_bytes, numbers.Real) and not isinstance(payload_bytes, bool)
    if not (is_number and 0 <= payload_bytes < math.inf):
        exists, fix = "it is a number of bytes, 0 or more", "write 14e9, say"
        raise problem(f"`{name}`", f"send {payload_bytes!r} bytes", exists, fix)
    for what, count in counts.items():
        if not is_int(count, 1) or count > MOST_RANKS:
            exists, fix = f"it is a whole number from 1 to {MOST_RANKS:,}", f"write {what}=8, say"
            raise problem(f"`{name}`", f"run with {what}={count!r}", exists, fix)


def _check_links(name: str, over: Any, axes: Any, mesh: Any) -> None:
    if not isinstance(over, Link | Cluster | Links):
        fix = 'read a cluster: meshpar.hardware.clusters.parse_cluster("h100:8x8")'
        raise problem(f"`{name}`", f"go over {over!r}", "links are a Link, a Cluster or measured Links", fix)
    if isinstance(axes, str) or not isinstance(axes, Sequence) or not all(isinstance(axis, str) for axis in axes):
        raise problem(f"`{name}`", f"go along axes={axes!r}", "it is a list of mesh axes", 'write axes=("data",)')
    if mesh is not None and not isinstance(mesh, Mapping) and not hasattr(mesh, "axis_names"):
        exists = f"it is a {type(mesh).__name__}"
        raise problem(f"`{name}`", f"run on mesh={mesh!r}", exists, 'give a mesh, or sizes by axis: {"data": 8}')


def _named(algorithm: str) -> Algorithm:
    name = str(algorithm).lower().replace("_", "-")
    known = ALGORITHMS.get(ALIASES.get(name, name))
    if known is None:
        exists = "there is no such algorithm"
        raise problem(f"algorithm `{algorithm}`", "be priced", exists, near(name, [*ALGORITHMS, *ALIASES]))
    return known


def _own(mesh: MeshLike) -> tuple[str, ...]:
    return tuple(axis_sizes(mesh))


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
        raise problem(
            "`hierarchical`", "form groups", "nothing says how many ranks one has", "give it: --inner 8, inner=8"
        )
    both = cost.hierarchical_all_reduce(payload_bytes, num_ranks, inner=inner)
    if len(axes) < 2:  # ranks of a group stand one after the other
        mesh = {"across": num_ranks // inner, "inside": inner}
        axes = ("across", "inside")
    kind = "collective-permute" if by_messages else "all-reduce"
    return (
        _leg(both.inside, kind, over, axes[-1:], mesh, within="inside: "),
        _leg(both.across, kind, over, axes[:-1], mesh, within="across: "),
    )


def _leg(
    found: Cost, kind: str, over: Link | Profile, axes: Sequence[str], mesh: MeshLike, *, within: str = ""
) -> LinkCost:
    link, where = _link(kind, over, axes, mesh)
    return LinkCost(cost=found, link=link, where=within + where)


def _link(kind: str, over: Link | Profile, axes: Sequence[str], mesh: MeshLike) -> tuple[Link, str]:
    if isinstance(over, Link):
        return over, "as given"
    label = "*".join(axes)
    measured = over.measured(axes, permute=kind == "collective-permute")
    if measured is not None:
        named = {*over.axes, *over.permutes}
        is_default = label not in named and not named.issuperset(axes)
        return measured, "measured, for any axis" if is_default else f"measured along `{label}`"
    if isinstance(over, Links):
        names = ", ".join(f"`{axis}`" for axis in dict.fromkeys((*over.axes, *over.permutes)))
        asked = f"price messages along mesh axis `{label}`"
        fix = f"name one of them, or measure it: meshpar bench collectives --mesh {axes[0]}=8 --save my.json"
        raise problem(f"profile `{over.name}`", asked, f"it was measured along {names}", fix)
    nodes, per_node = over.layout(axes, mesh)
    link = cost.collective_link(kind, over, num_nodes=nodes, per_node=per_node)
    if nodes == 1:
        return link, "inside a node"
    ports = f", {per_node} ports each" if kind != "collective-permute" and per_node > 1 else ""
    return link, f"between {nodes} nodes{ports}"


def _crossover_bytes(
    known: Algorithm, num_ranks: int, over: Link | Profile, axes: Sequence[str], mesh: MeshLike, *, by_messages: bool
) -> float | None:
    """Below it recursive doubling is quicker than the ring; None where they have more than one link."""
    if known.kind != "all-reduce" or known.name == "hierarchical":
        return None
    tree, _ = _link("collective-permute", over, axes or _own(mesh), mesh)
    ring, _ = (tree, "") if by_messages else _link("all-reduce", over, axes or _own(mesh), mesh)
    return cost.ring_tree_crossover_bytes(num_ranks, ring, tree_link=tree)


def _crossover_words(crossover_bytes: float | None) -> tuple[str, str]:
    if crossover_bytes is None:
        return "none", "recursive doubling is never slower than the ring"
    return si(crossover_bytes, "B"), "recursive doubling is quicker below, the ring above"
