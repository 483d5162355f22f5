"""Command `meshpar cost`: compute the time of collective algorithms in the alpha-beta model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from meshpar.cli.main import output_options, prepare_devices, print_report
from meshpar.sharding.errors import check_choice, check_number, problem

if TYPE_CHECKING:
    from meshpar.hardware.clusters import Link, Profile
    from meshpar.hardware.cost_breakdown import Sheet

CLUSTER = "h100:8x8"
"""Default cluster."""


@click.command(no_args_is_help=False)
@click.argument("algorithm", required=False)
@click.argument("numbers", nargs=-1, metavar="[NUMBER=VALUE]...")
@click.option(
    "--ranks", metavar="N", default=8, show_default=True, type=click.IntRange(max=1 << 24),
    help="Number of ranks.",
)  # fmt: skip
@click.option(
    "--bytes", "payload", metavar="BYTES", default="14e9", show_default=True,
    help="Payload size, as 14e9, 25MB or 4kB (SI). The default is the size of 7e9 bfloat16 gradients.",
)  # fmt: skip
@click.option(
    "--cluster", metavar="GPUS",
    help=f"Cluster: h100:8x8 (GPU:NODESxGPUS), or a saved profile: my.json.  [default: {CLUSTER}]",
)  # fmt: skip
@click.option("--axis", metavar="AXIS", help="Mesh axis whose link was measured in the profile.")
@click.option(
    "--alpha", metavar="SECONDS", type=float, help="With --bandwidth: latency of a message. The two replace --cluster."
)
@click.option("--bandwidth", metavar="BYTES/S", type=float, help="With --alpha: bandwidth in bytes per second.")
@click.option(
    "--gamma", metavar="SECONDS|GPU", default="0", show_default=True,
    help="Time to reduce a byte, or a GPU: three memory accesses per byte. With 0, the bandwidth includes it, as in "
    "measurements of NCCL.",
)  # fmt: skip
@click.option("--inner", metavar="K", type=int, help="Group size of the hierarchical algorithm.")
@click.option("--servers", metavar="S", default=1, show_default=True, type=int, help="Number of parameter servers.")
@output_options
def cost(
    algorithm: str | None, numbers: tuple[str, ...], ranks: int, payload: str, cluster: str | None, axis: str | None,
    alpha: float | None, bandwidth: float | None, gamma: str, inner: int | None, servers: int, as_json: bool,
) -> None:  # fmt: skip
    """Show the alpha-beta cost of a collective: steps, bytes, time, bandwidth, lower bound and formulas.

    \b
    meshpar cost                                             compare all-reduces of 14 GB over 8 ranks
    meshpar cost ring --ranks 64 --bytes 14e9                show the terms of one algorithm
    meshpar cost hierarchical --ranks 64 --inner 8 --cluster h100:8x8
    meshpar cost tree --bytes 64kB --alpha 2e-6 --bandwidth 450e9
    meshpar cost all-gather --cluster my.json --axis data    use a measured link
    meshpar cost ring --cluster h100:8 --gamma h100          add the time of the reduction

    ALGORITHM is an all-reduce algorithm (ring, recursive-doubling, halving-doubling, tree, hierarchical, root,
    parameter-server), reduce-scatter, all-gather, all-to-all, broadcast, message, doubling-all-gather or
    halving-reduce-scatter.

    The calculators evaluate formulas from papers: zero, memory, bubble, tp, moe, remat, accumulate, bucket and train.
    For example: meshpar cost zero params=70B ranks=64 --cluster h100:8x8

    Ranks fill the nodes of a cluster in order. If all ranks fit in a node, they use the links within the node,
    otherwise the network.
    """  # noqa: D301 (click does not wrap paragraphs that start with \b)
    prepare_devices(None, use_host=True)
    from meshpar.hardware.calculators import CALCULATORS
    from meshpar.hardware.clusters import Cluster
    from meshpar.hardware.cost_breakdown import ALL_REDUCES, breakdown, comparison
    from meshpar.sharding.units import parse_bytes

    if algorithm is not None and algorithm in CALCULATORS:
        print_report(_sheet(algorithm, numbers, cluster), as_json=as_json)
        return
    links, nbytes, gamma_s = _links(cluster, alpha, bandwidth), parse_bytes(payload), _gamma(gamma)
    if numbers:
        reason = f"only {', '.join(CALCULATORS)} accept NUMBER=VALUE"
        fix = "use options, such as --ranks and --bytes"
        raise problem(f"meshpar cost {algorithm}", f"use {' '.join(numbers)}", reason, fix, code="conflict")
    axes = (axis,) if axis else ()
    mesh = {axis: ranks} if axis else None
    if axis and not (cluster or "").endswith(".json"):
        reason, fix = "only the links of a profile have axes", "add --cluster my.json, or remove --axis"
        raise problem("meshpar cost", f"use --axis {axis}", reason, fix, code="conflict")
    options = {"inner": inner, "axes": axes, "mesh": mesh, "servers": servers, "gamma_s_per_byte": gamma_s}
    if algorithm is not None:
        result = breakdown(algorithm, nbytes, ranks, links, **options)  # type: ignore[arg-type]
        _check_used(result.name, inner, servers)
        print_report(result, as_json=as_json)
        return
    names = [name for name in ALL_REDUCES if name != "hierarchical"]
    group = inner or (links.gpus_per_node if isinstance(links, Cluster) else 0)
    if inner is not None or (not axis and 1 < group < ranks and ranks % group == 0):
        names.append("hierarchical")
    print_report(comparison(breakdown(name, nbytes, ranks, links, **options) for name in names), as_json=as_json)  # type: ignore[arg-type]


def _sheet(name: str, numbers: tuple[str, ...], cluster: str | None) -> Sheet:
    """Evaluate a calculator. Options of algorithms, duplicates and invalid numbers are errors."""
    from meshpar.hardware.calculators import calculate
    from meshpar.hardware.clusters import parse_cluster

    where, context = f"meshpar cost {name}", click.get_current_context()
    names = [number.partition("=")[0] for number in numbers]
    for number, key in zip(numbers, names, strict=True):
        if "=" not in number or names.count(key) > 1:
            reason = "the format is NUMBER=VALUE, without duplicates"
            raise problem(where, f"use `{number}`", reason, "write it like ranks=64", code="bad-syntax")
    for option in context.command.params:
        is_given = context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
        if is_given and option.name in ("ranks", "payload", "axis", "alpha", "bandwidth", "gamma", "inner", "servers"):
            reason, fix = "calculators accept only NUMBER=VALUE and --cluster", "write it like ranks=64"
            raise problem(where, f"use {option.opts[0]}", reason, fix, code="conflict")
    values = {key: value for key, _, value in (number.partition("=") for number in numbers)}
    if cluster is None and name == "tp":
        cluster = CLUSTER
    return calculate(name, values, None if cluster is None else parse_cluster(cluster))


def _gamma(text: str) -> float:
    from meshpar.hardware.catalogue import GPUS

    try:
        seconds = float(text)
    except ValueError:
        check_choice("--gamma", "a number of seconds or a GPU", tuple(GPUS), gamma=text)
        return GPUS[text].reduction_s_per_byte
    check_number("meshpar cost", "9e-13", positive=False, **{"--gamma": seconds})
    return seconds


def _check_used(algorithm: str, inner: int | None, servers: int) -> None:
    ignored = ("--inner", "hierarchical") if inner is not None and algorithm != "hierarchical" else None
    ignored = ("--servers", "parameter-server") if servers != 1 and algorithm != "parameter-server" else ignored
    if ignored:
        reason, fix = f"it is an option of {ignored[1]}", f"remove it, or use {ignored[1]}"
        raise problem(f"meshpar cost {algorithm}", f"use {ignored[0]}", reason, fix, code="conflict")


def _links(cluster: str | None, alpha: float | None, bandwidth: float | None) -> Link | Profile:
    from meshpar.hardware.clusters import Link, parse_profile

    if alpha is None and bandwidth is None:
        return parse_profile(CLUSTER if cluster is None else cluster)
    if alpha is None or bandwidth is None or cluster is not None:
        reason = "--cluster is also set" if cluster is not None else "only one of them is set"
        fix = "set --cluster, or both --alpha and --bandwidth"
        raise problem("meshpar cost", "use --alpha and --bandwidth", reason, fix, code="conflict")
    check_number("meshpar cost", "2e-6", positive=False, **{"--alpha": alpha})
    check_number("meshpar cost", "450e9", positive=True, **{"--bandwidth": bandwidth})
    return Link(alpha_s=alpha, bytes_per_s=bandwidth)
