"""`meshpar cost`: what a collective costs in the alpha-beta model, itemised, or its algorithms side by side."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from meshpar.cli.main import output_options, prepare_devices, print_report
from meshpar.sharding.errors import problem

if TYPE_CHECKING:
    from meshpar.hardware.calculators import Sheet
    from meshpar.hardware.clusters import Link, Profile

CLUSTER = "h100:8x8"
"""Where nothing says which links."""


@click.command(no_args_is_help=False)
@click.argument("algorithm", required=False)
@click.argument("numbers", nargs=-1, metavar="[NUMBER=VALUE]...")
@click.option(
    "--ranks", metavar="N", default=8, show_default=True, type=click.IntRange(max=1 << 24),
    help="Ranks that take part together.",
)  # fmt: skip
@click.option(
    "--bytes", "payload", metavar="BYTES", default="14e9", show_default=True,
    help="The payload, as 14e9, 25MB or 4kB (SI). 14e9 are the bfloat16 gradients of 7e9 parameters.",
)  # fmt: skip
@click.option(
    "--cluster", metavar="GPUS",
    help=f"Whose links: h100:8x8 (GPU:NODESxGPUS), or a profile's my.json.  [default: {CLUSTER}]",
)  # fmt: skip
@click.option("--axis", metavar="AXIS", help="The mesh axis of a profile whose measured link it is.")
@click.option(
    "--alpha", metavar="SECONDS", type=float, help="Instead of a cluster: time of a message without its bytes."
)
@click.option("--bandwidth", metavar="BYTES/S", type=float, help="With --alpha: bytes a second.")
@click.option("--inner", metavar="K", type=int, help="Ranks in a group of the hierarchical algorithm.")
@click.option("--servers", metavar="S", default=1, show_default=True, type=int, help="Of the parameter server.")
@output_options
def cost(
    algorithm: str | None,
    numbers: tuple[str, ...],
    ranks: int,
    payload: str,
    cluster: str | None,
    axis: str | None,
    alpha: float | None,
    bandwidth: float | None,
    inner: int | None,
    servers: int,
    as_json: bool,
) -> None:
    """The α–β account of a collective: steps, bytes sent, time, bandwidths, the lower bound, the formulas.

    \b
    meshpar cost                                             all all-reduces of 14 GB over 8 ranks
    meshpar cost ring --ranks 64 --bytes 14e9                one of them, itemised
    meshpar cost hierarchical --ranks 64 --inner 8 --cluster h100:8x8
    meshpar cost tree --bytes 64kB --alpha 2e-6 --bandwidth 450e9
    meshpar cost all-gather --cluster my.json --axis data    over a link that was measured

    ALGORITHM is an all-reduce: ring, recursive-doubling, halving-doubling, tree, hierarchical, root, parameter-server;
    or reduce-scatter, all-gather, all-to-all, broadcast, message, doubling-all-gather, halving-reduce-scatter.

    Closed forms of the literature, with your numbers: meshpar cost zero params=70B ranks=64; and memory, bubble, tp,
    moe, remat, accumulate.

    In a cluster the ranks stand one after the other: N that fit a node use the links inside it, more use the network.
    """  # noqa: D301 (click knows a paragraph that it must not fold by its \b)
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is computed: an accelerator is not even looked for
    prepare_devices(None)
    from meshpar.hardware.calculators import CALCULATORS
    from meshpar.hardware.clusters import Cluster
    from meshpar.hardware.cost_breakdown import ALL_REDUCES, account, compare
    from meshpar.sharding.units import parse_bytes

    if algorithm is not None and algorithm in CALCULATORS:
        print_report(_sheet(algorithm, numbers, cluster), as_json=as_json)
        return
    over, nbytes = _links(cluster, alpha, bandwidth), parse_bytes(payload)
    _check_none(algorithm, numbers)
    axes = (axis,) if axis else ()
    mesh = {axis: ranks} if axis else None
    if axis and not (cluster or "").endswith(".json"):
        exists = "it names a link of a profile, and no profile is given"
        raise problem("meshpar cost", f"use --axis {axis}", exists, "leave it out, or give --cluster my.json")
    if algorithm is not None:
        found = account(algorithm, nbytes, ranks, over, inner=inner, servers=servers, axes=axes, mesh=mesh)
        _check_used(found.name, inner, servers)
        print_report(found, as_json=as_json)
        return
    names = [name for name in ALL_REDUCES if name != "hierarchical"]
    group = inner or (over.gpus_per_node if isinstance(over, Cluster) else 0)
    if inner is not None or (not axis and 1 < group < ranks and ranks % group == 0):
        names.append("hierarchical")
    how = {"inner": inner, "axes": axes, "mesh": mesh, "servers": servers}
    print_report(compare(names, nbytes, ranks, over, **how), as_json=as_json)


def _check_none(algorithm: str | None, numbers: tuple[str, ...]) -> None:
    """Raises `ValueError` for numbers of a calculator that is not asked."""
    from meshpar.hardware.calculators import CALCULATORS

    if numbers:
        exists, fix = f"they are for {', '.join(CALCULATORS)}", "use --ranks, --bytes and the other options"
        raise problem(f"meshpar cost {algorithm}", f"take {' '.join(numbers)}", exists, fix)


def _sheet(name: str, numbers: tuple[str, ...], cluster: str | None) -> Sheet:
    """What a calculator says; refuses what is not NUMBER=VALUE, given twice, or an option of the algorithms."""
    from meshpar.hardware.calculators import calculate
    from meshpar.hardware.clusters import parse_cluster

    where, context = f"meshpar cost {name}", click.get_current_context()
    names = [one.partition("=")[0] for one in numbers]
    for one in numbers:
        if "=" not in one or names.count(one.partition("=")[0]) > 1:
            exists = "it is NUMBER=VALUE, each number once"
            raise problem(where, f"take `{one}`", exists, "write it as ranks=64")
    for option in context.command.params:
        is_given = context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
        if is_given and option.name in ("ranks", "payload", "axis", "alpha", "bandwidth", "inner", "servers"):
            exists, fix = "it takes NUMBER=VALUE and --cluster", "write ranks=64, say, and leave the option out"
            raise problem(where, f"use {option.opts[0]}", exists, fix)
    given = {one: value for one, _, value in (number.partition("=") for number in numbers)}
    named = CLUSTER if cluster is None and name == "tp" else cluster
    return calculate(name, given, None if named is None else parse_cluster(named))


def _check_used(algorithm: str, inner: int | None, servers: int) -> None:
    """Raises `ValueError` for an option that changed nothing."""
    for option, is_given, serves in (
        ("--inner", inner is not None, "hierarchical"),
        ("--servers", servers != 1, "parameter-server"),
    ):
        if is_given and algorithm != serves:
            exists = f"it is for {serves}"
            raise problem(f"meshpar cost {algorithm}", f"use {option}", exists, f"leave it out, or take {serves}")


def _links(cluster: str | None, alpha: float | None, bandwidth: float | None) -> Link | Profile:
    from meshpar.hardware.clusters import Link, parse_profile

    if alpha is None and bandwidth is None:
        return parse_profile(CLUSTER if cluster is None else cluster)
    if alpha is None or bandwidth is None or cluster is not None:
        exists = "a cluster is named, too" if cluster is not None else "only one of the two is given"
        fix = "give --cluster, or both of --alpha and --bandwidth"
        raise problem("meshpar cost", "say which link by --alpha and --bandwidth", exists, fix)
    return Link(alpha_s=alpha, bytes_per_s=bandwidth)
