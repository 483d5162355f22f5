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

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshpar import bench as bench
    from meshpar import collectives as collectives
    from meshpar import data as data
    from meshpar import ledger as ledger
    from meshpar import models as models
    from meshpar import moe as moe
    from meshpar import pipeline as pipeline
    from meshpar import planner as planner
    from meshpar import plots as plots
    from meshpar.adapters import Model as Model
    from meshpar.adapters import from_functions as from_functions
    from meshpar.adapters import from_linen as from_linen
    from meshpar.adapters import from_nnx as from_nnx
    from meshpar.checkpoint import Checkpoints as Checkpoints
    from meshpar.config import AdamW as AdamW
    from meshpar.config import Optax as Optax
    from meshpar.config import Recipe as Recipe
    from meshpar.config import Sample as Sample
    from meshpar.ledger.explain import explain as explain
    from meshpar.ledger.report import Report as Report
    from meshpar.loop import fit as fit
    from meshpar.mesh import MeshSpec as MeshSpec
    from meshpar.precision import Precision as Precision
    from meshpar.rules import Rules as Rules
    from meshpar.rules import constrain as constrain
    from meshpar.rules import first as first
    from meshpar.rules import names as names
    from meshpar.rules import replicated as replicated
    from meshpar.rules import use as use
    from meshpar.state import TrainState as TrainState
    from meshpar.state import abstract_state as abstract_state
    from meshpar.state import init_state as init_state
    from meshpar.step import eval_step as eval_step
    from meshpar.step import shard_batch as shard_batch
    from meshpar.step import train_step as train_step
    from meshpar.strategies import Quantize as Quantize
    from meshpar.strategies import Strategy as Strategy
    from meshpar.strategies import context_parallel as context_parallel
    from meshpar.strategies import ddp as ddp
    from meshpar.strategies import expert_parallel as expert_parallel
    from meshpar.strategies import fsdp as fsdp
    from meshpar.strategies import hsdp as hsdp
    from meshpar.strategies import pipeline_parallel as pipeline_parallel
    from meshpar.strategies import tensor_parallel as tensor_parallel
    from meshpar.strategies import zero1 as zero1
    from meshpar.strategies import zero2 as zero2
    from meshpar.strategies import zero3 as zero3
    from meshpar.table import ShardingTable as ShardingTable
    from meshpar.table import shardings as shardings
    from meshpar.types import Decision as Decision
    from meshpar.types import Leaf as Leaf
    from meshpar.types import MeshparError as MeshparError

__version__ = "0.1.0"

_HOMES = {
    "types": ("Decision", "Leaf", "MeshparError"),
    "mesh": ("MeshSpec",),
    "rules": ("Rules", "constrain", "first", "names", "replicated", "use"),
    "strategies": (
        "Quantize", "Strategy", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tensor_parallel", "expert_parallel",
        "context_parallel", "pipeline_parallel",
    ),
    "adapters": ("Model", "from_nnx", "from_linen", "from_functions"),
    "table": ("ShardingTable", "shardings"),
    "state": ("TrainState", "init_state", "abstract_state"),
    "precision": ("Precision",),
    "step": ("train_step", "eval_step", "shard_batch"),
    "checkpoint": ("Checkpoints",),
    "loop": ("fit",),
    "ledger.explain": ("explain",),
    "ledger.report": ("Report",),
    "config": ("AdamW", "Optax", "Recipe", "Sample"),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("bench", "collectives", "data", "ledger", "models", "moe", "pipeline", "planner", "plots")

__all__ = [
    "__version__",
    *_HOME_OF,
    *_MODULES,
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"meshpar.{_HOME_OF[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"meshpar.{name}")
    else:
        raise AttributeError(f"meshpar has no {name!r}; it has {', '.join(sorted(_HOME_OF))}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
