"""The interface of gradient engines, and the features that an engine may support."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

import jax

from meshpar.hardware.compile_options import Options
from meshpar.layers.losses import Loss, MicrobatchTotals
from meshpar.parallel.execution import Execution
from meshpar.sharding.adapters.model import OVERWRITTEN
from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.types import PyTree
from meshpar.training.execution import Sharded, described
from meshpar.training.options import StepOptions
from meshpar.training.state import TrainState

Gradients = Callable[[Loss, StepOptions, TrainState, PyTree, jax.Array], MicrobatchTotals]
"""A function (loss, options, state, batch, key) -> loss, metrics and gradients, summed over the global batch."""


PLAIN = 'use reduce_gradients="each_microbatch" and a strategy without stages and quantize'
LOCAL = 'stages, quantize and reduce_gradients="once" evaluate the model on the local batch of each device'


class Feature(enum.Enum):
    """A feature that an engine may lack. The value is its error: subject, request, reason and fix."""

    ACCUMULATION = (
        "train_step(accumulate=...)", "accumulate gradients over micro-steps",
        "a pipeline already accumulates gradients over its microbatches", "use accumulate=1 and more microbatches",
    )  # fmt: skip
    LAYER_LOOP = (
        "prefetch or keep", "gather the weights of each layer ahead of it, or keep them",
        "stages gather the weights of all their layers before the first microbatch, and keep them",
        "remove prefetch and keep from the strategy, or the stages",
    )  # fmt: skip
    HOST_OFFLOAD = (
        "remat with `offload:`", "keep the activations of a microbatch in host memory",
        "stages keep them in device buffers between the forward and the backward pass",
        "use save:NAMES, or remove the stages",
    )  # fmt: skip
    EXPLICIT_AXES = (
        "mp.explicit(model)", "trace the model on Explicit axes",
        "the model would run inside shard_map, and JAX does not support Explicit next to Manual axes",
        f"{PLAIN}, or remove mp.explicit",
    )  # fmt: skip
    DELAYED_SCALING = (
        f"collection `{OVERWRITTEN}` of the model", "measure its scales over the global batch", LOCAL,
        f'{PLAIN}, or mp.Precision(matmul="fp8")',
    )  # fmt: skip
    BATCH_STATISTICS = (
        "batch statistics of the model", "compute them over the global batch", LOCAL,
        f"{PLAIN}, or normalize without batch statistics (LayerNorm, GroupNorm)",
    )  # fmt: skip
    REPLICATED_INPUTS = (
        "an inputs rule with `replicated`", "replicate a leaf of the batch", LOCAL,
        f"{PLAIN}, or repeat the leaf for each example",
    )  # fmt: skip
    LOSS_AT_OTHER_PARAMS = (
        "the optimizer's update",
        "evaluate the loss at other parameters (`value_fn`, `obj_fn`), as line searches and Hessian estimates do",
        "stages, quantize and accumulate evaluate the loss only on parts of the batch",
        "use accumulate=1 and a strategy without stages and quantize, or a different optimizer",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GradientEngine:
    """A way to compute the gradients of a step."""

    gradients: Gradients
    supports: frozenset[Feature]
    describe: Callable[[Sharded, StepOptions], Execution] = described
    """Resolves the options of a step to what the engine does."""
    compile_options: Callable[[Execution], Options] = lambda execution: {}
    """Returns the XLA options that the engine needs."""


def unsupported(feature: Feature, label: str) -> MeshparError:
    """Return the error for a feature that the engine does not support. `label` names the strategy or option."""
    subject, requested, reason, fix = feature.value
    return problem(f"{subject} with {label}", requested, reason, fix, "unsupported-feature")
