"""How a model uses its parameters, read from its traced forward pass: how often, and whole or in slices.

Names say of a parameter what it is for, and so what its sharding sends. Of one without names the trace tells as much:
a table that is looked up and multiplied by has two gradients, a bias that nothing trains has none, and the taps of a
convolution that takes its kernel row by row are gathered one by one.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from jax.extend import core

from meshpar.parallel.expected.step_spec import ParamUsage

_SAME = frozenset({"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "copy",
                   "sharding_constraint", "optimization_barrier", "reduce_precision", "expand_dims"})  # fmt: skip
"""What hands a parameter on as it is."""
_SLICES = frozenset({"slice", "dynamic_slice", "split"})
_WITHOUT_GRADIENT = frozenset({"stop_gradient"})


def uses(jaxpr: core.Jaxpr, num_params: int) -> tuple[ParamUsage, ...]:
    """How each of the first arguments is used.

    Args:
      jaxpr: of the loss, whose first arguments are the parameters.
      num_params: how many these are.

    Returns:
      for each parameter how often it is used whole by what has a gradient, the sizes of the slices that are, and how
      many rows are looked up in it.
    """
    counts: dict[Any, Counter[int]] = {}
    params: list[Any] = jaxpr.invars[:num_params]
    _count(jaxpr, {x: x.aval.size for x in params}, counts, {x: x for x in params}, 1)
    found = []
    for x in params:
        sizes = counts.get(x, Counter())
        rows = counts.get((x, "rows"), Counter()).total()
        slices = tuple(sorted((n, k) for n, k in sizes.items() if n != x.aval.size))
        found.append(ParamUsage(sizes[x.aval.size], slices, rows))
    return tuple(found)


def _count(
    jaxpr: core.Jaxpr, sizes: dict[Any, int], counts: dict[Any, Counter[int]], of: dict[Any, Any], times: int
) -> None:
    """Adds to `counts` what equations do with the variables in `sizes`, each of which is (a slice of) a parameter."""
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
        for one in inner:
            args = eqn.invars[len(eqn.invars) - len(one.invars) :]  # a conditional's index, say, stands before them
            into = {mine: x for mine, x in zip(one.invars, args, strict=False) if x in taken}
            runs = times * (eqn.params["length"] if name == "scan" else 1)
            _count(one, {a: sizes[x] for a, x in into.items()}, counts, {a: of[x] for a, x in into.items()}, runs)
            if len(one.outvars) == len(eqn.outvars):  # what it hands out as it came in
                for out, made in zip(eqn.outvars, one.outvars, strict=True):
                    if made in into:
                        of[out], sizes[out] = of[into[made]], sizes[into[made]]
        for x in () if inner else taken:
            counts.setdefault(of[x], Counter())[sizes[x]] += times
            if name == "gather" and x is eqn.invars[0] and x.aval.ndim > 1:
                rows = eqn.outvars[0].aval.size // max(math.prod(x.aval.shape[1:]), 1)
                counts.setdefault((of[x], "rows"), Counter())[rows] += rows * times
