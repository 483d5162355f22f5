"""Measurements behind `meshpar bench`: ratios of programs taken in one run, never absolute claims.

    report.py     figures, and ratios of two programs in turn
    training.py   step: a training step against bare jax.jit
    kernels.py    collectives: every algorithm against XLA's own, as nccl-tests does
    gpu.py        gpu: products by size, copies, whole steps, as a profile
    decoder.py    whole steps of a decoder: utilisation, kernels, measured against predicted
    plain.py      the same decoder in plain Flax
    fit.py        α and β of a link, from times
    found.py      the rows and links of such a measurement; the profile they make
    moe.py        moe: MoE layers against one-hot einsums
    run.py        run: what a run costs beside its steps
    overlap.py    overlap: what compile options hide of a step's communication

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from meshpar.sharding.lazy_imports import lazy

if TYPE_CHECKING:
    from meshpar.bench.collective_timing import collectives
    from meshpar.bench.figures import Figures, Measure, paired_ratios
    from meshpar.bench.training import step

__getattr__, __dir__ = lazy(__name__)

__all__ = ["Figures", "Measure", "collectives", "paired_ratios", "step"]
