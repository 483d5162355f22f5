"""Name what each dim of a Flax model is, choose how a mesh splits those names, and derive every sharding.

    Recipe ─► MeshSpec ─► Mesh
           ─► Strategy = four Rules        parameters · gradients · optimizer state · activations
           ─► Model  = leaves, init, bind  NNX | Linen | plain functions
                  │ resolve: leaf + Rules + Mesh ─► Decision ─► NamedSharding
                  ▼
           TrainState, born sharded
                  ▼
           train_step   loss ─► gradients ─► (accumulate) ─► optimizer ─► new state
                  ▼
           fit: steps, hooks  ◄── batches  ─► checkpoints, metrics

Names are imported when they are first used, so `import meshpar` costs little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.sharding.lazy import lazy

if TYPE_CHECKING:
    from meshpar import bench as bench
    from meshpar import collectives as collectives
    from meshpar import compiled as compiled
    from meshpar import data as data
    from meshpar import models as models
    from meshpar import moe as moe
    from meshpar import pipeline as pipeline
    from meshpar import planner as planner
    from meshpar.commands import plots as plots
    from meshpar.commands.recipe import AdamW as AdamW
    from meshpar.commands.recipe import Optax as Optax
    from meshpar.commands.recipe import Recipe as Recipe
    from meshpar.commands.recipe import Sample as Sample
    from meshpar.compiled.explain import explain as explain
    from meshpar.compiled.report import Report as Report
    from meshpar.parallel import Quantize as Quantize
    from meshpar.parallel import Strategy as Strategy
    from meshpar.parallel import context_parallel as context_parallel
    from meshpar.parallel import custom as custom
    from meshpar.parallel import ddp as ddp
    from meshpar.parallel import expert_parallel as expert_parallel
    from meshpar.parallel import fsdp as fsdp
    from meshpar.parallel import hsdp as hsdp
    from meshpar.parallel import pipeline_parallel as pipeline_parallel
    from meshpar.parallel import tensor_parallel as tensor_parallel
    from meshpar.parallel import zero1 as zero1
    from meshpar.parallel import zero2 as zero2
    from meshpar.parallel import zero3 as zero3
    from meshpar.sharding.adapters import Model as Model
    from meshpar.sharding.adapters import from_functions as from_functions
    from meshpar.sharding.adapters import from_linen as from_linen
    from meshpar.sharding.adapters import from_nnx as from_nnx
    from meshpar.sharding.context import constrain as constrain
    from meshpar.sharding.context import use as use
    from meshpar.sharding.mesh import MeshSpec as MeshSpec
    from meshpar.sharding.rules import Rules as Rules
    from meshpar.sharding.rules import first as first
    from meshpar.sharding.rules import names as names
    from meshpar.sharding.rules import replicated as replicated
    from meshpar.sharding.table import ShardingTable as ShardingTable
    from meshpar.sharding.table import shardings as shardings
    from meshpar.sharding.types import Decision as Decision
    from meshpar.sharding.types import Leaf as Leaf
    from meshpar.sharding.types import MeshparError as MeshparError
    from meshpar.training.batch import shard_batch as shard_batch
    from meshpar.training.checkpoint import Checkpoints as Checkpoints
    from meshpar.training.loop import fit as fit
    from meshpar.training.precision import Precision as Precision
    from meshpar.training.state import TrainState as TrainState
    from meshpar.training.state import abstract_state as abstract_state
    from meshpar.training.state import init_state as init_state
    from meshpar.training.step import eval_step as eval_step
    from meshpar.training.step import train_step as train_step

__version__ = "0.1.0"

_HOMES = {
    "sharding.types": ("Decision", "Leaf", "MeshparError"),
    "sharding.mesh": ("MeshSpec",),
    "sharding.rules": ("Rules", "first", "names", "replicated"),
    "sharding.context": ("constrain", "use"),
    "sharding.adapters": ("Model", "from_nnx", "from_linen", "from_functions"),
    "sharding.table": ("ShardingTable", "shardings"),
    "parallel": (
        "custom", "Quantize", "Strategy", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tensor_parallel",
        "expert_parallel", "context_parallel", "pipeline_parallel",
    ),
    "training.precision": ("Precision",),
    "training.state": ("TrainState", "init_state", "abstract_state"),
    "training.batch": ("shard_batch",),
    "training.step": ("train_step", "eval_step"),
    "training.checkpoint": ("Checkpoints",),
    "training.loop": ("fit",),
    "compiled.explain": ("explain",),
    "compiled.report": ("Report",),
    "commands.recipe": ("AdamW", "Optax", "Recipe", "Sample"),
}  # fmt: skip
_MODULES = {name: name for name in ("bench", "collectives", "compiled", "data", "models", "moe", "pipeline", "planner")}
_MODULES["plots"] = "commands.plots"
__getattr__, __dir__ = lazy(__name__, _HOMES, _MODULES)

__all__ = ["__version__", *(name for names in _HOMES.values() for name in names), *_MODULES]
