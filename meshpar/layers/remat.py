"""Remat policies: the activations that layers save for the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.sharding.errors import near, problem
from meshpar.sharding.types import spec_axes

MATMUL = "matmul"
"""`checkpoint_name` of the product with a weight inside a kernel. jax's policies recognize plain matmuls only."""

ATTENTION = "attention"
"""`checkpoint_name` of the output of attention, and of the residuals of attention kernels."""

FLASH = "flash_attention"
"""Part of the names of tokamax's kernels that return attention's output and its residuals."""

_either = jax.checkpoint_policies.save_from_both_policies
_NAMED = jax.checkpoint_policies.save_only_these_names(MATMUL)


def checkpoint_name_of(primitive: Any, params: Mapping[str, Any]) -> str | None:
    """Return the `checkpoint_name` of an operation's results. Attention kernels count as marked `ATTENTION`."""
    if primitive.name == "name":
        return str(params["name"])
    if primitive.name == "remat_opt":  # a kernel together with its residuals, which jax drops if they are unused
        return ATTENTION if FLASH in str(params["fwd_jaxpr"]) else None
    return ATTENTION if "dot_product_attention_fwd" in primitive.name else None


def _with_attention(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return the policy extended by the results of attention, whose kernels hide their matmuls."""

    def extended(primitive: Any, *operands: Any, **params: Any) -> Any:
        return checkpoint_name_of(primitive, params) == ATTENTION or policy(primitive, *operands, **params)

    return extended


_DOTS = _either(jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _NAMED)

REMAT_POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": _DOTS,
    "all_dots": _with_attention(_either(jax.checkpoint_policies.dots_saveable, _NAMED)),
    "minimal": _with_attention(_DOTS),
}
"""Policies by name. In addition to the input of a layer, "full" saves nothing, "dots" the products with weights,
"all_dots" all matmuls and attention, and "minimal" the products with weights and attention."""


def remat_policy(remat: str, names: set[str] | None = None) -> Callable[..., Any]:
    """Return the policy for `jax.checkpoint` of a remat specification.

    Args:
      remat: terms joined by `+`: a key of `REMAT_POLICIES`; `save:NAMES` to save the arrays that the model marks with
        `jax.ad_checkpoint.checkpoint_name` under these names, joined by commas; `offload:NAMES` to save them in
        pinned host memory.
      names: set to which the policy adds the names that the model uses, when the model is differentiated.
    """
    policies, saved, offloaded = _remat_terms(remat)

    def policy(primitive: Any, *operands: Any, **params: Any) -> Any:
        name = checkpoint_name_of(primitive, params)
        if name is not None and names is not None:
            names.add(name)
        if name in saved:
            return True
        if name in offloaded:
            return Offloadable(src="device", dst="pinned_host")
        return any(REMAT_POLICIES[key](primitive, *operands, **params) for key in policies)

    return policy


def named_in(remat: str) -> tuple[str, ...]:
    """Return the names that a specification saves or offloads."""
    _, saved, offloaded = _remat_terms(remat)
    return (*saved, *offloaded)


def saved_names(remat: str | None, names: tuple[str, ...]) -> set[str]:
    """Return which of a model's marked activations stay in device memory under a specification.

    All marked activations of a layer but `ATTENTION` are products with weights or elementwise functions of them, so
    policies that save these products count as saving the activations.
    """
    if remat is None:
        return set(names)
    policies, saved, offloaded = _remat_terms(remat)
    saves = set(saved)
    for policy in policies:
        saves |= {"full": set(), "dots": set(names) - {ATTENTION}}.get(policy, set(names))
    return saves - set(offloaded)


def offloads(remat: str | None) -> bool:
    """Return whether a specification saves anything in host memory."""
    return remat is not None and bool(_remat_terms(remat)[2])


def check_remat(remat: str | None, where: str = "") -> None:
    """Check the syntax of a remat specification; see `remat_policy`."""
    if remat is not None:
        _remat_terms(str(remat), where)


def _remat_terms(remat: str, where: str = "") -> tuple[list[str], list[str], list[str]]:
    """Return the policies, saved names and offloaded names of a specification."""
    where = where or f"remat={remat!r}"
    terms: dict[str, list[str]] = {"": [], "save": [], "offload": []}
    for term in map(str.strip, remat.split("+")):
        kind, colon, listed = term.partition(":")
        names = [name.strip() for name in listed.split(",")]
        both = {*names} & {*terms["offload" if kind == "save" else "save"]} if colon else set()
        for is_wrong, code, reason, fix in (
            (not colon and kind not in REMAT_POLICIES, "unknown-choice", "the policy is unknown",
             near(kind, [*REMAT_POLICIES, "save:NAMES", "offload:NAMES"])),
            (colon and (kind not in ("save", "offload") or not all(names)), "bad-syntax",
             "a colon is for `save:NAMES` and `offload:NAMES`", "write save:attention,mlp_out, for example"),
            (both, "conflict", f"{sorted(both)} are both saved and offloaded", "name each array once"),
        ):  # fmt: skip
            if is_wrong:
                raise problem(where, f"use {term!r}", reason, fix, code)
        terms[kind if colon else ""] += names if colon else [kind]
    return terms[""], terms["save"], terms["offload"]


# ---- Policies that gather weights again ------------------------------------------------------------------------------

_LAYOUT_ONLY = frozenset(
    {"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "copy", "pvary"}
)
"""Operations without arithmetic. Their results may be gathered weights, which must not be saved."""

_ELEMENTWISE = frozenset({"add", "erf", "integer_pow", "logistic", "max", "mul", "sub", "tanh"})
"""Operations of activation functions and rotary embeddings. XLA fuses them, so their inputs are saved instead."""


def _shards_first_dim_fully(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Return whether a constraint shards the first dim over all devices.

    Its result can be recomputed without communication, so it need not be saved.
    """
    sharding = params.get("sharding")
    if primitive.name != "sharding_constraint" or not isinstance(sharding, NamedSharding) or not sharding.spec:
        return False
    first, *trailing = sharding.spec
    sizes = dict(sharding.mesh.shape)
    num_shards = math.prod(sizes[axis] for axis in spec_axes(first)) if first is not PartitionSpec.UNCONSTRAINED else 0
    return num_shards == math.prod(sizes.values()) and not any(trailing)


def regathering(policy: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a policy that gathers weights again in the backward pass.

    It saves results according to `policy`, or all of them if `policy` is None.
    """

    def regather(primitive: Any, *operands: Any, **params: Any) -> bool:
        fused = primitive.name in _LAYOUT_ONLY | _ELEMENTWISE
        return not fused and not _shards_first_dim_fully(primitive, params)

    return regather if policy is None else policy
