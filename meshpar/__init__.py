"""Shard Flax models over a named mesh: logical names, strategies, training steps and their programs.

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

from meshpar.sharding.cuda_plugin import select_cpu_without_nvidia
from meshpar.sharding.lazy_imports import TYPE_CHECKING, lazy

if TYPE_CHECKING:
    from meshpar import bench, collectives, data, inspect, interop, models, moe, optim, pipeline, planner, plots
    from meshpar.inspect.explain import explain
    from meshpar.layers.losses import MeanLoss, SumLoss
    from meshpar.layers.precision import Precision
    from meshpar.layers.scan import Aux, scan_layers
    from meshpar.loop import hooks
    from meshpar.loop.checkpoint import Checkpoints
    from meshpar.loop.diff import diff
    from meshpar.loop.fit import fit
    from meshpar.loop.verify import verify
    from meshpar.optim.averages import ema
    from meshpar.optim.orthogonalized import muon
    from meshpar.parallel import (
        Quantize,
        context_parallel,
        custom,
        ddp,
        expert_parallel,
        fsdp,
        hsdp,
        pipeline_parallel,
        tensor_parallel,
        zero1,
        zero2,
        zero3,
    )
    from meshpar.parallel.batch import shard_batch
    from meshpar.planner.plan import plan
    from meshpar.runs.adoption import adopt
    from meshpar.runs.memory_fit import fit_memory
    from meshpar.runs.optimizers import AdamW, Muon, Optax
    from meshpar.runs.recipe import Recipe, Sample
    from meshpar.runs.training_run import run
    from meshpar.sharding.adapters.functions import from_functions
    from meshpar.sharding.adapters.linen import from_linen
    from meshpar.sharding.adapters.model import explicit
    from meshpar.sharding.adapters.nnx import from_nnx
    from meshpar.sharding.context import constrain, use_rules
    from meshpar.sharding.errors import MeshparError
    from meshpar.sharding.mesh import MeshSpec
    from meshpar.sharding.rules import Rules, first, names, replicated
    from meshpar.training.earlier_steps import check_finite
    from meshpar.training.eval_params import ema_params, eval_params
    from meshpar.training.expert_rebalancing import rebalance_experts
    from meshpar.training.lora import lora
    from meshpar.training.options import StepOptions
    from meshpar.training.sharding_table import shardings
    from meshpar.training.state import abstract_state, init_state, load_params
    from meshpar.training.step import eval_step, train_step

__version__ = "0.1.0"

__getattr__, __dir__ = lazy(__name__)
select_cpu_without_nvidia()

__all__ = [
    "AdamW", "Aux", "Checkpoints", "MeanLoss", "MeshSpec", "MeshparError", "Muon", "Optax", "Precision", "Quantize",
    "Recipe", "Rules", "Sample", "StepOptions", "SumLoss", "__version__", "abstract_state", "adopt", "bench",
    "check_finite", "collectives", "constrain", "context_parallel", "custom", "data", "ddp", "diff", "ema",
    "ema_params", "eval_params", "eval_step", "expert_parallel", "explain", "explicit", "first", "fit", "fit_memory",
    "from_functions", "from_linen", "from_nnx", "fsdp", "hooks", "hsdp", "init_state", "inspect", "interop",
    "load_params", "lora", "models", "moe", "muon", "names", "optim", "pipeline", "pipeline_parallel", "plan",
    "planner", "plots", "rebalance_experts", "replicated", "run", "scan_layers", "shard_batch", "shardings",
    "tensor_parallel", "train_step", "use_rules", "verify", "zero1", "zero2", "zero3",
]  # fmt: skip
