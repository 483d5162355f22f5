"""Optimizers of recipes: descriptions of optax optimizers and their schedules."""

from __future__ import annotations

import dataclasses
import math
import numbers
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol

import optax

from meshpar.optim.averages import ema
from meshpar.optim.matrix_dims import decayed
from meshpar.optim.moments import DTYPES, low_precision_moments, offload_state
from meshpar.optim.orthogonalized import matrices, muon
from meshpar.optim.rounding import stochastic_rounding
from meshpar.optim.stacked_layers import per_layer

# Not for type checkers only: overrides read the annotations at run time.
from meshpar.sharding.errors import check_bool, check_choice, check_positive_int, check_takes, named, problem
from meshpar.sharding.types import Names

_POSITIVE: tuple[Callable[[Any], bool], str] = (lambda value: value > 0, "it must be positive")
AT_LEAST_0: tuple[Callable[[Any], bool], str] = (lambda value: value >= 0, "it must be at least 0")
_RATE: tuple[Callable[[Any], bool], str] = (lambda value: 0 <= value < 1, "it must be at least 0 and below 1")


def check_value(where: str, value: Any, is_valid: bool, rule: str, code: str = "out-of-range") -> None:
    """Raise an error if the value of a field is not valid; `rule` describes valid values."""
    if not is_valid:
        raise problem(where, f"use {value!r:.200}", rule, "change it", code=code)


def check_number(where: str, value: Any, is_valid: Callable[[Any], bool], rule: str) -> None:
    """Raise an error if a value is not a finite number for which `is_valid` is true."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    check_value(where, value, is_number, "it must be a number", "wrong-type")
    check_value(where, value, math.isfinite(value), "it must be finite")
    check_value(where, value, is_valid(value), rule)


class Optimizer(Protocol):
    """Description of an optimizer in a recipe."""

    def build(self, *, steps: int, names: Mapping[str, Names]) -> optax.GradientTransformation:
        """Return the optax optimizer for a run of `steps` steps. `names` has the logical names of each parameter."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    """optax's AdamW with warm-up, a schedule and clipping (Loshchilov & Hutter 2019).

    Weight decay applies to the parameters that `meshpar.optim.matrix_dims.decayed` selects: those with at least two
    dims, not counting dims that stack layers or experts, that are not called `scale` or `bias`.

    Example:
      >>> optimizer = mp.AdamW(lr=3e-4, warmup_steps=100)
      >>> f"{optimizer.learning_rate(1000)(99):.1e}"
      '3.0e-04'
      >>> tx = optimizer.build(steps=1000, names=model.names())
    """

    lr: float = 3e-4
    """Learning rate after the warm-up."""
    warmup_steps: int = 0
    """Steps of the linear warm-up from 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Schedule after the warm-up."""
    final_lr: float = 0.1
    """Learning rate at the end as a fraction of `lr`. Not used by "constant"."""
    schedule_steps: int | None = None
    """Steps of the schedule; None means the steps of the run when it started. If set, the learning rates do not depend
    on `steps`."""
    b1: float = 0.9
    """Decay rate of the first moment."""
    b2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay: each step subtracts `weight_decay * learning rate * weight`."""
    clip_norm: float | None = 1.0
    """Clip gradients to this global norm; None disables clipping."""
    moments: str | None = None
    """Dtype of both moments, as in `mp.optim.low_precision_moments`. None means the dtype of the parameters."""
    offload: bool = False
    """Keep both moments in host memory between updates, as in `mp.optim.offload_state`."""
    stochastic_rounding: bool = False
    """Round updated parameters stochastically, as in `mp.optim.stochastic_rounding`, because rounding to nearest loses
    most updates of bfloat16 parameters."""
    ema: float | None = None
    """Decay rate of an exponential moving average of the parameters, as in `mp.ema`; None disables it. Validation, the
    sample, `generate` and `convert` use the averages instead of the parameters."""

    _RULES: ClassVar[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
        **dict.fromkeys(("lr", "eps", "clip_norm", "schedule_steps"), _POSITIVE),
        **dict.fromkeys(("warmup_steps", "final_lr", "weight_decay"), AT_LEAST_0),
        **dict.fromkeys(("b1", "b2", "ema"), _RATE),
    }
    """Valid values of each numeric field: a condition, and the condition in words."""

    def __post_init__(self) -> None:
        who = type(self).__name__
        check_choice(who, "the schedule after the warm-up", ("cosine", "linear", "constant"), schedule=self.schedule)
        check_choice(who, "the dtype of the moments", (None, *DTYPES), moments=self.moments)
        check_bool(who, "moments are kept in host memory", offload=self.offload)
        check_bool(who, "updated parameters are rounded stochastically", stochastic_rounding=self.stochastic_rounding)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in self._RULES and not (value is None and "None" in str(field.type)):
                check_number(f"{who}.{field.name}", value, *self._RULES[field.name])
        length = self.schedule_steps
        is_short = length is None or self.schedule == "constant" or self.warmup_steps < length
        rule = f"it must be less than schedule_steps ({length}), so that steps are left for the decay"
        check_value(f"{who}.warmup_steps", self.warmup_steps, is_short, rule)

    def learning_rate(self, steps: int) -> Callable[[Any], Any]:
        """Return the learning rate schedule of a run of `steps` steps.

        A run that is shorter than the warm-up ends during the warm-up. A warning is printed.
        """
        if self.warmup_steps > steps:
            who = f"{type(self).__name__}(warmup_steps={self.warmup_steps})"
            reached = f"the learning rate reaches {steps / self.warmup_steps:.0%} of {self.lr:g}"
            warnings.warn(f"{who}: the warm-up is longer than the run of {steps} steps; {reached}", stacklevel=2)
        decay_steps = max((self.schedule_steps or steps) - self.warmup_steps, 1)
        after: Any = optax.constant_schedule(self.lr)
        if self.schedule == "cosine":
            after = optax.cosine_decay_schedule(self.lr, decay_steps, alpha=self.final_lr)
        elif self.schedule == "linear":
            after = optax.linear_schedule(self.lr, self.lr * self.final_lr, decay_steps)
        if not self.warmup_steps:
            return after
        # Not from 0, because the first step would then change nothing.
        rise = optax.linear_schedule(self.lr / self.warmup_steps, self.lr, max(self.warmup_steps - 1, 1))
        return optax.join_schedules([rise, after], [self.warmup_steps])

    def build(self, *, steps: int, names: Mapping[str, Names]) -> optax.GradientTransformation:
        tx = self._rule(self.learning_rate(steps), names)
        tx = tx if self.clip_norm is None else optax.chain(optax.clip_by_global_norm(self.clip_norm), tx)
        tx = tx if self.moments is None else low_precision_moments(tx, self.moments)
        tx = stochastic_rounding(tx) if self.stochastic_rounding else tx
        tx = offload_state(tx) if self.offload else tx
        return tx if self.ema is None else ema(tx, self.ema)

    def _rule(self, rate: Callable[[Any], Any], names: Mapping[str, Names]) -> optax.GradientTransformation:
        return optax.adamw(
            rate,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=decayed(names),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(AdamW):
    """Muon for the hidden matrices of the model, AdamW for embeddings, heads, norms and routers.

    `mp.muon` runs it on sharded arrays, and `meshpar.optim.orthogonalized.matrices` selects the matrices. `lr` is the
    learning rate of AdamW, because updates are scaled to the usual size of AdamW's (Liu et al. 2025, "Muon is Scalable
    for LLM Training").

    Example:
      >>> tx = mp.Muon(lr=3e-4, warmup_steps=100).build(steps=1000, names=model.names())
    """

    momentum: float = 0.95
    """Decay rate of the Nesterov momentum."""
    ns_steps: int = 5
    """Number of Newton-Schulz iterations."""
    rms: float = 0.2
    """Root mean square of each matrix update, as a multiple of the learning rate. AdamW's updates have 0.2 to 0.4."""
    share: bool = True
    """Divide the work among devices that have the same matrices, and exchange the results, as in `mp.muon`."""

    _RULES: ClassVar = {**AdamW._RULES, "momentum": _RATE, "rms": _POSITIVE}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_int("Muon", "the number of Newton-Schulz iterations", ns_steps=self.ns_steps)
        check_bool("Muon", "devices share the work", share=self.share)

    def _rule(self, rate: Callable[[Any], Any], names: Mapping[str, Names]) -> optax.GradientTransformation:
        return muon(
            rate,
            ns_steps=self.ns_steps,
            beta=self.momentum,
            eps=self.eps,
            weight_decay=self.weight_decay,
            adam_b1=self.b1,
            adam_b2=self.b2,
            adam_weight_decay=self.weight_decay,
            adam_weight_decay_mask=decayed(names),
            muon_weight_dimension_numbers=matrices(names),
            consistent_rms=self.rms,
            share=self.share,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optax:
    """Any optax optimizer.

    Example:
      >>> optimizer = mp.Optax(make=lambda steps: optax.lion(optax.cosine_decay_schedule(1e-4, steps)))
      >>> tx = optimizer.build(steps=1000, names=model.names())
    """

    make: Callable[[int], optax.GradientTransformation]
    """Function that receives the number of steps and returns the optimizer."""
    schedule_steps: int | None = None
    """Number of steps for `make`; None means the steps of the run when it started."""
    per_layer: bool = False
    """Apply the optimizer to each layer and expert of a stack, as in `mp.optim.per_layer`."""

    def __post_init__(self) -> None:
        check_bool("Optax", "the optimizer is applied to each layer", per_layer=self.per_layer)
        if self.schedule_steps is not None:
            check_positive_int("Optax", "the number of steps for `make`", schedule_steps=self.schedule_steps)

    def build(self, *, steps: int, names: Mapping[str, Names]) -> optax.GradientTransformation:
        check_takes("Optax.make", self.make, ("steps",), "make=lambda steps: ...", name=named(self.make))
        tx = self.make(self.schedule_steps or steps)
        return per_layer(tx, names) if self.per_layer else tx
