"""Collectives of a loss that combines examples, as a contrastive loss or a batch norm does.

Such a loss is a function of the global batch. XLA gathers an operand over the devices that share the batch, or reduces
the result, and does the same for the gradients. For a product of all pairs of examples (Radford et al. 2021, "Learning
Transferable Visual Models From Natural Language Supervision", section 2.3):

    images[B_data, d]  texts[B_data, d] ─► all-gather ─► texts[B, d]        logits[B_data, B]

Softmax over the sharded dim of the logits adds all-reduces of vectors with an entry per example.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from meshpar.layers.example_flow import Examination
from meshpar.parallel.execution import Execution
from meshpar.parallel.expected.collective import ExpectedCollective

ROLE = "examples that the loss combines"


def expected(examination: Examination, examples: int, execution: Execution) -> Iterator[ExpectedCollective]:
    """Yield the collectives that operations on several examples may cause; none for independent examples.

    Args:
      examination: the examined loss function, on the global batch.
      rows: number of examples of the global batch.
      execution: description of the step.
    """
    axes = execution.ordered(execution.batch_axes)
    if examination.combined is None or not axes or examples < 2:
        return
    runs: Counter[tuple[int, str]] = Counter()
    for combination in examination.combinations:
        for elements, dtype in set(combination.arrays):
            runs[elements, execution.wire(dtype)] += combination.runs
        # Per example: maximum, sum and target of a softmax, and the sum in its gradient.
        runs[examples, execution.wire("float32")] += 2 * combination.runs
    shards = math.prod(execution.sizes[axis] for axis in axes)
    for (elements, dtype), count in runs.items():
        # Twice, because the backward pass may recompute the forward pass.
        common: dict[str, Any] = {
            "role": ROLE, "axes": axes, "elements": elements, "dtype": dtype, "tensors": (),
            "count": (0, 2 * count * execution.microbatches),
        }  # fmt: skip
        if elements % shards:
            yield ExpectedCollective(kind="sum", **common)
            continue
        yield ExpectedCollective(kind="gather", **common)
        yield ExpectedCollective(kind="sum", scattered=axes, may_all_reduce=True, **common)
