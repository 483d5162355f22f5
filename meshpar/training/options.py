"""Options of a training step."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias, get_args

from meshpar.hardware.compile_options import Options, check_kind
from meshpar.layers.losses import LossIs
from meshpar.layers.precision import Precision, as_precision
from meshpar.layers.remat import check_remat
from meshpar.sharding.errors import check_choice, check_positive_int, near, problem
from meshpar.sharding.printing import with_field_docs

RENAMED = {"interleave": "batch_slices"}
"""Earlier names of options, for the hint in errors and for recipes of earlier runs."""
ReduceGradients: TypeAlias = Literal["each_microbatch", "once_across_groups", "once"]

_MODES = get_args(ReduceGradients)


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a training step: the keyword arguments of `train_step` and the field `step` of a recipe.

    Example:
      >>> options = mp.StepOptions(accumulate=4, remat="dots")
      >>> step = mp.train_step(loss_fn, accumulate=4, remat="dots")
    """

    # `equal` are values with the same result, which `verify` compares. `splits_batch`: other values split the batch.
    accumulate: int = dataclasses.field(default=1, metadata={"equal": (1, 2), "splits_batch": True})
    """Number of micro-steps per update. Each device divides its local batch."""
    reduce_gradients: ReduceGradients | None = dataclasses.field(
        default=None, metadata={"equal": (None, *_MODES), "splits_batch": True}
    )
    """When gradients are reduced over devices.

    - "each_microbatch": in each micro-step. The default of most strategies.
    - "once_across_groups": in each micro-step over the axes that shard gradients, and once, after the loop, over the
      other batch axes. The loss receives the batch of a group. The default of `hsdp()`, unless the model has batch
      statistics or another feature that needs the global batch.
    - "once": after the loop. Sharded parameters are gathered once and stay replicated. The loss receives the local
      batch of a device. `key` and the random streams of an NNX module then differ between devices."""
    precision: Precision = dataclasses.field(default_factory=Precision)
    """Dtypes of parameters, compute and gradient reduction."""
    remat: str | None = dataclasses.field(
        default=None, metadata={"equal": (None, "full", "dots"), "splits_batch": False}
    )
    """Activations that layers under `mp.scan_layers` save for the backward pass. All others are recomputed.

    - None: everything is saved.
    - "full": the inputs of layers.
    - "dots": the inputs of layers and the results of matmuls with weights.
    - "minimal": as "dots", and the results of attention.
    - "all_dots": the inputs of layers, the results of all matmuls and of attention.
    - "save:NAMES": arrays marked with `checkpoint_name`, as a comma-separated list. "offload:NAMES" moves them to
      pinned host memory.

    `+` joins policies. The decoders of meshpar mark `query`, `key`, `value`, `attention`, `attention_out`, `gate`, `up`
    and `mlp_out`."""
    batch_slices: int = dataclasses.field(default=1, metadata={"equal": (1, 2), "splits_batch": True})
    """Number of slices of the local batch. Layers compute the slices independently, so that messages of the first
    slice (tensor or expert parallelism) overlap with matmuls of the second.

    Gradients are reduced once per slice. A pipeline slices its microbatches at no extra cost. Router statistics are
    summed over the slices, and experts with a limited capacity are refused. Other statistics over examples are per
    slice, unless layers return them as `Aux.sums`. Random numbers differ between slices only for typed keys in
    `scan_layers(extra=...)`."""
    nonfinite: Literal["raise", "skip", "ignore"] = "raise"
    """Reaction to a non-finite loss or gradient.

    "skip" omits the update and counts it in `state.skipped`. "raise" does the same, and raises an error when the metric
    is known: in `fit`, in the third call after it, or in `mp.check_finite(metrics)`. "ignore" does not check."""
    loss_is: LossIs | None = None
    """Meaning of the loss, for micro-steps, pipelines, quantized gradients and `reduce_gradients="once"`, which
    evaluate it on parts of the batch.

    - None: the traced loss function is examined. A loss that combines examples, such as a contrastive loss or a batch
      norm, is refused, and so is a scalar, because the mean of the means of unequal parts is not the mean of the batch.
    - "mean_over_examples": a scalar loss is a mean over equally weighted examples.
    - "sum_over_examples": the loss is a sum over independent examples, although the analysis cannot decide it.
    - "sum_over_parts": as "sum_over_examples", also for a loss that combines examples. Each part computes its own
      value, for example its own batch statistics, and the result depends on the number of parts."""
    xla: Options = dataclasses.field(default_factory=dict, hash=False)
    """Compile options, as names of XLA flags without dashes. They override the defaults for GPUs and the options of the
    strategy."""

    def __new__(cls, **options: Any) -> StepOptions:
        """Check the names of the options."""
        field_names = [field.name for field in dataclasses.fields(cls)]
        for name in options.keys() - field_names:
            fix = f"it is now `{RENAMED[name]}`" if name in RENAMED else near(name, field_names)
            raise problem(f"train_step({name}=...)", "set it", "a step has no such option", fix, code="unknown-name")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_positive_int("train_step", "the number of micro-steps per update", accumulate=self.accumulate)
        check_positive_int("train_step", "the number of batch slices", batch_slices=self.batch_slices)
        mode = self.reduce_gradients
        check_choice("train_step", "the time at which gradients are reduced", (*_MODES, None), reduce_gradients=mode)
        reactions = ("raise", "skip", "ignore")
        check_choice("train_step", "the reaction to a non-finite loss or gradient", reactions, nonfinite=self.nonfinite)
        check_choice("train_step", "the meaning of the loss", (None, *get_args(LossIs)), loss_is=self.loss_is)
        precision = as_precision(self.precision, "train_step")
        object.__setattr__(self, "precision", precision)
        check_not_float16("train_step", precision.compute or precision.params)
        check_remat(self.remat)
        check_kind(self.xla)

    @property
    def batch_parts(self) -> tuple[int, str]:
        """Number of parts of the local batch that are computed separately, and their name in errors."""
        if self.batch_slices == 1:
            return self.accumulate, "micro-steps"
        unit = f"slices (accumulate={self.accumulate}, batch_slices={self.batch_slices})"
        return self.accumulate * self.batch_slices, unit

    @property
    def is_once(self) -> bool:
        """Whether gradients are accumulated on each device and reduced once, after the last micro-step."""
        return self.accumulate > 1 and self.reduce_gradients == "once"


def check_not_float16(where: str, dtype: object) -> None:
    """Check that a step does not compute in float16."""
    if str(dtype) == "float16":
        reason = "gradients below 6e-8 would become zero, and meshpar does not scale the loss"
        fix = 'use Precision(compute="bfloat16"), which has the range of float32'
        raise problem(where, "compute in float16", reason, fix, code="unsupported-feature")
