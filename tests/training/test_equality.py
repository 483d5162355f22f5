"""Training on a mesh equals training on a single device, for all engines and options.

`tests/parallel/test_equality.py` compares the strategies of the XLA engine.
"""

from __future__ import annotations

import re

import pytest

import meshpar as mp
from meshpar.moe import MoEConfig, Routing
from meshpar.parallel import parse_strategy
from meshpar.sharding.types import tree_leaves_with_paths
from tests.equal import equals_one_device
from tests.grid import cases

FSDP_TENSOR = "fsdp() | tensor_parallel(sequence=True)"
AHEAD = "fsdp(prefetch=1) | tensor_parallel(sequence=True)"
EXACT = "quantize={'weights': None, 'gradients': None, 'secondary': 'fsdp'}"
"""Secondary shards without quantization: all communication of the engine, and no rounding."""
TWO_LEVELS = f"fsdp(axis=('data', 'fsdp'), {EXACT})"
ONCE = {"accumulate": 2, "reduce_gradients": "once"}
NAMES = "query,key,value,attention,attention_out,gate,up,mlp_out"
LAYERS = {"num_layers": 8}
EXPERTS = MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=32, auxiliary_weight=0.0)
ROWWISE = {"precision": mp.Precision(matmul="fp8-rowwise")}
EIGHT_BITS = {"same": {"precision": mp.Precision(matmul="fp8")}, "atol": 1e-5}
"""A different order of summation rarely changes the rounding to 8 bits."""


def staged(stages: int, microbatches: int, rest: str, **options: object) -> str:
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"pipeline_parallel(stages={stages}, microbatches={microbatches}{given}) | {rest}"


GRID = {
    # Prefetched FSDP
    "prefetch": ("fsdp=8", "fsdp(prefetch=1)", {}),
    "prefetch, two axes": ("data=2,fsdp=4", "zero3(axis=('data', 'fsdp'), prefetch=1)", {"remat": "dots"}),
    "prefetch, hsdp": ("data=2,fsdp=4", "hsdp(prefetch=1)", {"accumulate": 2, "remat": "dots"}),
    "prefetch, tensor": ("fsdp=4,tensor=2", AHEAD, {"accumulate": 2, "remat": "full"}),
    "prefetch, experts": (
        "fsdp=2,expert=2,tensor=2", "fsdp(prefetch=1) | expert_parallel() | tensor_parallel()",
        {"remat": "full", "fields": {"moe": EXPERTS}},
    ),
    # Engines that run on each device
    "not rounded": ("data=2,fsdp=4", TWO_LEVELS, {}),
    "not rounded, micro-steps": ("data=2,fsdp=4", TWO_LEVELS, {"accumulate": 2}),
    "not rounded, once": ("data=2,fsdp=4", TWO_LEVELS, ONCE),
    "not rounded, remat": ("data=2,fsdp=4", TWO_LEVELS, {"remat": "dots"}),
    "not rounded, tensor": ("data=2,fsdp=2,tensor=2", f"{TWO_LEVELS} | tensor_parallel(sequence=True)", {}),
    "once": ("fsdp=4,tensor=2", FSDP_TENSOR, ONCE),
    # Saved activations
    "offload": ("fsdp=4,tensor=2", FSDP_TENSOR, {"remat": f"offload:{NAMES}"}),
    "save": ("fsdp=4,tensor=2", FSDP_TENSOR, {"remat": f"save:{NAMES}"}),
    "dots+offload": ("fsdp=4,tensor=2", FSDP_TENSOR, {"remat": "dots+offload:attention"}),
    "minimal": ("fsdp=4,tensor=2", FSDP_TENSOR, {"remat": "minimal"}),
    "stages, save": (
        "stage=2,fsdp=2,tensor=2", staged(2, 4, FSDP_TENSOR), {"remat": "save:attention,mlp_out"},
    ),
    # Several layers in an iteration: with a remainder, with slices, quantized gathers, experts and stages
    "unroll": ("fsdp=4,tensor=2", FSDP_TENSOR, {"remat": "dots", "fields": {"num_layers": 5, "unroll": 2}}),
    "unroll, all": ("fsdp=4,tensor=2", FSDP_TENSOR, {"remat": "full", "fields": {"num_layers": 3, "unroll": True}}),
    "unroll, slices": ("fsdp=4,tensor=2", FSDP_TENSOR, {"batch_slices": 2, "fields": {"num_layers": 3, "unroll": 2}}),
    "unroll, not rounded": ("data=2,fsdp=4", TWO_LEVELS, {"remat": "dots", "fields": {"num_layers": 3, "unroll": 2}}),
    "unroll, experts": (
        "fsdp=2,expert=4", "fsdp() | expert_parallel()",
        {"remat": "full", "fields": {"moe": EXPERTS, "num_layers": 3, "unroll": True}},
    ),
    "unroll, stages": (
        "stage=2,fsdp=2", staged(2, 4, "fsdp()"), {"remat": "full", "fields": {"num_layers": 6, "unroll": 2}},
    ),
    "unroll, zb-h1": (
        "stage=2,fsdp=2", staged(2, 4, "fsdp()", schedule="zb-h1"), {"fields": {"num_layers": 6, "unroll": True}},
    ),
    # Slices of the batch
    "slices": ("fsdp=8", "fsdp()", {"batch_slices": 2}),
    "slices, ddp": ("data=8", "ddp()", {"batch_slices": 2}),
    "slices, zero1": ("fsdp=4,tensor=2", "zero1() | tensor_parallel()", {"batch_slices": 2}),
    "slices, hsdp": ("data=2,fsdp=2,tensor=2", "hsdp() | tensor_parallel()", {"batch_slices": 2}),
    "slices, prefetch": ("fsdp=4,tensor=2", AHEAD, {"batch_slices": 2, "remat": "full"}),
    "slices, prefetch, offload": ("fsdp=4,tensor=2", AHEAD, {"batch_slices": 2, "remat": "dots+offload:attention"}),
    "slices, once": ("fsdp=2,tensor=2", "fsdp()", {"batch_slices": 2, **ONCE}),
    "slices, ring": ("fsdp=2,context=4", "fsdp() | context_parallel()", {"batch_slices": 2}),
    "slices, heads": ("fsdp=2,context=4", "fsdp() | context_parallel(kind='all-to-all')", {"batch_slices": 2}),
    "slices, stages": ("stage=2,fsdp=2,tensor=2", staged(2, 2, FSDP_TENSOR, schedule="zb-h1"), {"batch_slices": 2}),
    "slices, chunks": (
        "stage=2,fsdp=2,tensor=2", staged(2, 2, FSDP_TENSOR, gather="microbatch"), {"batch_slices": 2, "remat": "full"},
    ),
    "slices, whole": ("stage=2,data=2,tensor=2", staged(2, 2, "ddp() | tensor_parallel()"), {"batch_slices": 2}),
    "slices, experts": (
        "fsdp=2,expert=4", "fsdp() | expert_parallel()", {"batch_slices": 2, "fields": {"moe": EXPERTS}},
    ),
    "slices, experts, stages": (
        "stage=2,fsdp=2,expert=2", staged(2, 2, "fsdp() | expert_parallel()", schedule="eager-1f1b"),
        {"batch_slices": 2, "fields": {"moe": EXPERTS}},
    ),
    # Stages
    **{
        f"{num_layers} layers, {stages} stages, {options}": (
            f"stage={stages}", staged(stages, 4, "ddp()", **options), {"fields": {"num_layers": num_layers}},
        )
        for num_layers, stages, options in (
            (5, 2, {"schedule": "zb-v"}), (5, 4, {}), (4, 2, {"stage_layer_offset": (0, 2)}),
            (6, 4, {"schedule": "zb-h2"}), (3, 2, {"schedule": "zb-h1"}), (5, 2, {"schedule": "dualpipe-v"}),
            (7, 2, {"schedule": "interleaved-1f1b", "chunks": 3}),
            (9, 4, {"schedule": "dualpipe", "stage_layer_offset": (1, 1)}),
        )
    },
    "1f1b": ("stage=4", staged(4, 4, "ddp()"), {"fields": LAYERS}),
    "gpipe, one microbatch": ("stage=2", staged(2, 1, "ddp()", schedule="gpipe"), {"fields": LAYERS}),
    "zb-h1": ("stage=4,fsdp=2", staged(4, 8, "fsdp()", schedule="zb-h1"), {"fields": LAYERS}),
    "zb-v": ("stage=4,tensor=2", staged(4, 8, "tensor_parallel()", schedule="zb-v"), {"fields": LAYERS}),
    "interleaved": (
        "stage=2,fsdp=2,tensor=2", staged(2, 4, "fsdp() | tensor_parallel()", schedule="interleaved-1f1b"),
        {"fields": LAYERS},
    ),
    "dualpipe": ("stage=4,data=2", staged(4, 8, "ddp()", schedule="dualpipe"), {"fields": LAYERS}),
    "zb-h2": ("stage=4,expert=2", staged(4, 8, "ddp()", schedule="zb-h2"), {"fields": LAYERS}),
    "1f1b, gathers per microbatch": (
        "stage=2,fsdp=2,tensor=2", staged(2, 2, "fsdp() | tensor_parallel()", gather="microbatch"), {"fields": LAYERS},
    ),
    "1f1b, zero1": ("stage=2,fsdp=4", staged(2, 2, "zero1()"), {"fields": LAYERS}),
    "1f1b, sequence": ("stage=2,tensor=2", staged(2, 4, "tensor_parallel(sequence=True)"), {}),
    "zb-h1, sequence": ("stage=2,tensor=2", staged(2, 4, "tensor_parallel(sequence=True)", schedule="zb-h1"), {}),
    "interleaved, ring": (
        "stage=2,context=2", staged(2, 4, "context_parallel()", schedule="interleaved-1f1b"), {"fields": LAYERS},
    ),
    "eager, split backward": (
        "stage=2,fsdp=2,tensor=2", staged(2, 4, FSDP_TENSOR, schedule="eager-1f1b", split_backward=True), {},
    ),
    "1f1b, heads": ("stage=2,context=2", staged(2, 4, "context_parallel(kind='all-to-all')"), {}),
    "zb-v, fsdp, sequence": (
        "stage=2,fsdp=2,tensor=2", staged(2, 4, FSDP_TENSOR, schedule="zb-v"), {"fields": {"num_layers": 4}},
    ),
    "tied embeddings, remat": (
        "stage=4,tensor=2", staged(4, 4, "tensor_parallel()", schedule="zb-h1"),
        {"remat": "full", "fields": {**LAYERS, "tied_embeddings": True}},
    ),
    # Scales of 8-bit matmuls are computed over all shards. Row scales do not depend on microbatches.
    "8 bits, zero1": ("fsdp=8", "zero1()", EIGHT_BITS),
    "8 bits, sequence": ("fsdp=4,tensor=2", FSDP_TENSOR, EIGHT_BITS),
    "8 bits, experts": (
        "fsdp=2,expert=4", "fsdp() | expert_parallel()",
        {"same": {"precision": mp.Precision(matmul={"layers/mlp": "fp8"})}, "fields": {"moe": EXPERTS}, "atol": 1e-5},
    ),
    "8 bits, rows": ("fsdp=4,tensor=2", FSDP_TENSOR, {"same": ROWWISE, "atol": 1e-5}),
    "8 bits, rows, remat": ("fsdp=8", "fsdp()", {"same": {**ROWWISE, "remat": "full"}, "atol": 1e-5}),
    "8 bits, 1f1b": ("stage=2,fsdp=4", staged(2, 4, "fsdp()"), {"same": ROWWISE}),
    "8 bits, zb-h1, sequence": (
        "stage=2,fsdp=2,tensor=2", staged(2, 4, FSDP_TENSOR, schedule="zb-h1"), {"same": ROWWISE},
    ),
}  # fmt: skip
"""Mesh, strategy and options of `equals_one_device`."""
LINEN = (
    "prefetch, two axes", "prefetch, experts", "not rounded, tensor", "offload", "save", "slices, prefetch",
    "slices, stages", "slices, experts", "slices, experts, stages", "1f1b", "interleaved", "8 bits, sequence",
)  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "name"),
    cases(
        ("nnx", "slices, prefetch, offload"), ("nnx", "8 bits, rows"),
        grid=[*(("nnx", name) for name in GRID), *(("linen", name) for name in LINEN)],
    ),
)  # fmt: skip
def test_training_equals_one_device(framework, name):
    spec, strategy, options = GRID[name]
    equals_one_device(mp.MeshSpec.parse(spec), parse_strategy(strategy), framework=framework, **options)


@pytest.mark.matrix
def test_prefetched_slices_on_explicit_axes():
    spec = mp.MeshSpec(fsdp=4, tensor=2, axis_types="explicit")
    equals_one_device(spec, parse_strategy(AHEAD), remat="full", batch_slices=2)


@pytest.mark.matrix
@pytest.mark.parametrize("framework", ["nnx", "linen"])
@pytest.mark.parametrize("name", ["slices, prefetch", "slices, once"])
def test_frozen_parameters_with_slices(framework, name):
    spec, strategy, options = GRID[name]
    same = {"trainable": r"layers/(attention|mlp/down)/.*"}
    actual, _ = equals_one_device(
        mp.MeshSpec.parse(spec), parse_strategy(strategy), framework=framework, same=same, **options
    )
    start = dict(tree_leaves_with_paths(actual.start.params))
    changed = {path for path, x in actual.params.items() if (x != start[path]).any()}
    assert changed == {path for path in start if re.fullmatch(same["trainable"], path)} != set()


@pytest.mark.matrix
@pytest.mark.parametrize("framework", ["nnx", "linen modules"])
@pytest.mark.parametrize(
    "remat",
    [
        {".*": "full"},
        {"layers": "full"},
        {".*norm": "full"},
        {"layers/mlp/.*": "dots"},
        {".*": "full", "layers/.*": None},
        {"layers/attention": "dots", "layers/mlp": "save:gate"},
        {"layers/mlp": "full", "layers/.*_norm": "full"},
    ],
    ids=str,
)
def test_stages_recompute_modules_by_path(framework, remat):
    """Patterns match the model, the stack, modules in and after the stages, and modules in recomputed modules."""
    strategy = parse_strategy(staged(2, 4, "fsdp() | tensor_parallel()")) | mp.Rules(remat=remat)
    equals_one_device(mp.MeshSpec(stage=2, fsdp=2, tensor=2), strategy, framework=framework)
