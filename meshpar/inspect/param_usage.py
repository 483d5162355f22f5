"""Parameter usage in the traced forward pass: number of uses, in full or in slices.

The usage of a parameter determines its collectives. For models without logical names, the usage is read from the
trace. For example, a tied embedding table has two gradients, an unused bias has none, and if a convolution reads its
kernel row by row, each row is gathered.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from jax.extend import core

from meshpar.parallel.execution import ParamUsage

_SAME = frozenset({"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "copy",
                   "sharding_constraint", "optimization_barrier", "reduce_precision", "expand_dims"})  # fmt: skip
"""Primitives that pass a parameter on unchanged."""
_SLICES = frozenset({"slice", "dynamic_slice", "split", "unstack"})
_WITHOUT_GRADIENT = frozenset({"stop_gradient"})


def uses(jaxpr: core.Jaxpr, num_params: int) -> tuple[ParamUsage, ...]:
    """Return the usage of each parameter, where the first `num_params` arguments are the parameters."""
    counts: dict[Any, Counter[int]] = {}
    params: list[Any] = jaxpr.invars[:num_params]
    _count(jaxpr, {x: x.aval.size for x in params}, counts, {x: x for x in params}, 1)
    usages = []
    for x in params:
        sizes = counts.get(x, Counter())
        rows = counts.get((x, "rows"), Counter()).total()
        slices = tuple(sorted((n, k) for n, k in sizes.items() if n != x.aval.size))
        usages.append(ParamUsage(sizes[x.aval.size], slices, rows))
    return tuple(usages)


def _count(
    jaxpr: core.Jaxpr, sizes: dict[Any, int], counts: dict[Any, Counter[int]], of: dict[Any, Any], times: int
) -> None:
    """Add the uses of parameters and of their slices in a jaxpr to `counts`.

    Args:
      jaxpr: the function.
      sizes: number of elements of each variable that is a parameter or a slice of one.
      counts: parameter -> number of uses by number of elements.
      of: the parameter of each variable in `sizes`.
      times: how often the function runs.
    """
    of, sizes = dict(of), dict(sizes)
    eqn: Any
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        taken = [x for x in eqn.invars if not isinstance(x, core.Literal) and x in sizes]
        if not taken or name in _WITHOUT_GRADIENT:
            continue
        if name in _SAME | _SLICES and taken[0] is eqn.invars[0]:
            for out in eqn.outvars:
                of[out] = of[taken[0]]
                sizes[out] = min(sizes[taken[0]], math.prod(out.aval.shape))
            continue
        inner = list(core.jaxprs_in_params(eqn.params))
        for body in inner:
            args = eqn.invars[len(eqn.invars) - len(body.invars) :]  # skips, for example, a conditional's index
            inputs = {invar: x for invar, x in zip(body.invars, args, strict=False) if x in taken}
            runs = times * (eqn.params["length"] if name == "scan" else 1)
            _count(body, {a: sizes[x] for a, x in inputs.items()}, counts, {a: of[x] for a, x in inputs.items()}, runs)
            if len(body.outvars) == len(eqn.outvars):  # inputs that are returned unchanged
                for out, outvar in zip(eqn.outvars, body.outvars, strict=True):
                    if outvar in inputs:
                        of[out], sizes[out] = of[inputs[outvar]], sizes[inputs[outvar]]
        for x in () if inner else taken:
            counts.setdefault(of[x], Counter())[sizes[x]] += times
            if name == "gather" and x is eqn.invars[0] and x.aval.ndim > 1:
                rows = eqn.outvars[0].aval.size // max(math.prod(x.aval.shape[1:]), 1)
                counts.setdefault((of[x], "rows"), Counter())[rows] += rows * times
