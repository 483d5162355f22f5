"""Command `meshpar verify`: compare a small model under random layouts with a single device."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from meshpar.cli.main import HOST_DEVICES, prepare_devices, print_report, recipe_options
from meshpar.sharding.errors import MeshparError, problem

if TYPE_CHECKING:
    from meshpar.runs.recipe import Recipe

ROWS, SEQ_LEN = 16, 16
"""Shape of the batch: examples and positions. Any mesh of eight devices can divide it into two micro-steps."""
MOST_BYTES = 2**28
"""Maximum bytes of the model's parameters, because each host device stores a few copies."""
QUICKLY = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
"""Compiler flags for short compile times: each program runs only seven steps."""


@click.command()
@recipe_options
@click.option(
    "--cases", metavar="N", default=20, show_default=True, type=click.IntRange(1, 10_000), help="Layouts to test."
)
@click.option("--seed", metavar="N", default=0, show_default=True, type=click.IntRange(0, 2**31), help="Random seed.")
@click.option(
    "--time", "time_s", metavar="SECONDS", type=click.FloatRange(min=0), help="Start no layout after this time."
)
@click.option("--case", metavar="NAME", help="Test only this layout: 'fsdp=4; fsdp(min_bytes=0); accumulate=2'.")
@click.option(
    "--dtype", type=click.Choice(["float64", "float32"]), default="float64", show_default=True,
    help="Dtype of the comparison. Tolerance relative to the largest gradient: 1e-9 for float64, 1e-4 for float32. "
    "Use float32 for models that compute in float32 internally.",
)  # fmt: skip
@click.option("--devices", metavar="N", type=click.IntRange(2, 64), default=HOST_DEVICES, help="XLA host devices.")
def verify(
    recipe: str, assignments: tuple[str, ...], as_json: bool, cases: int, seed: int, time_s: float | None,
    case: str | None, dtype: str, devices: int,
) -> None:  # fmt: skip
    """Compare random layouts with a single device: `meshpar verify recipes/gpt_stdlib.py`.

    Each layout is a random mesh, strategy, number of micro-steps and pipeline schedule, on host devices. The test
    compares the loss and gradients of three steps, a restart, and a restart from the checkpoint of another layout. A
    model of meshpar.models is reduced to a few thousand parameters and trained on random tokens. Other models are not
    changed (reduce them with --set) and use the data of the recipe. If a layout differs, the exit code is 1, and a
    command to reproduce the smallest failure is printed.
    """
    os.environ["XLA_FLAGS"] = " ".join([*QUICKLY, os.environ.get("XLA_FLAGS", "")])  # the last value of a flag wins
    prepare_devices(devices)
    import jax

    from meshpar.loop.verify import Case, Outcome
    from meshpar.loop.verify import verify as run
    from meshpar.parallel import as_strategy, ddp
    from meshpar.pod.callback_failures import end_on_callback_failures
    from meshpar.runs.recipe import build_model, build_optimizer
    from meshpar.runs.recipe_file import load_recipe
    from meshpar.sharding.mesh import MeshSpec
    from meshpar.training.sharding_table import shardings

    def tell(outcome: Outcome) -> None:
        if outcome.verdict != "refused":
            print(f"{outcome.verdict}: {outcome.case}", file=sys.stderr, flush=True)

    end_on_callback_failures()
    full = load_recipe(recipe, devices=devices).override(*assignments)
    with jax.enable_x64(dtype == "float64"):
        small = shrunk(full, dtype)
        model, mesh = build_model(small), MeshSpec().abstract(1)
        tx = build_optimizer(small, model, mesh)
        totals = shardings(model, mesh, ddp(), tx=tx).totals
        if totals.params_bytes > MOST_BYTES:
            where, fix = f"model of {totals.num_params:,} parameters", "reduce it with --set model.FIELD=VALUE"
            reason = f"{totals.params_bytes:,} bytes exceed the maximum of {MOST_BYTES:,}"
            raise problem(where, "compare layouts on host devices", reason, fix, code="out-of-range")
        first = []
        with contextlib.suppress(MeshparError):  # the mesh may need more devices
            first.append(Case(mesh=MeshSpec(**small.mesh.resolve(devices)), strategy=as_strategy(small.strategy)))  # type: ignore[arg-type]
        report = run(
            model, small.loss, batch_of(small, seed), cases=cases, seed=seed, time_s=time_s, case=case, dtype=dtype,
            loss_is=small.step.loss_is, tx=tx, first=first, tell=tell, devices=jax.devices()[:devices],
        )  # fmt: skip
    print_report(report, as_json=as_json)
    if report.smallest is not None and not as_json:
        fields = "".join(f" --set '{assignment}'" for assignment in assignments)
        more = f" --dtype {dtype}" * (dtype != "float64") + f" --devices {devices}" * (devices != HOST_DEVICES)
        click.echo(f"again: meshpar verify {recipe} --case '{report.smallest.case}' --seed {seed}{fields}{more}")
    sys.exit(0 if report.ok else 1)


def shrunk(recipe: Recipe, dtype: str) -> Recipe:
    """Return the recipe with a decoder of a few thousand parameters and the same kinds of layers.

    Quantized and low-precision computations are disabled. Models from outside `meshpar.models` are not changed.
    Optimizer moments have the dtype of the parameters and stay on the device.
    """
    from meshpar.models.config import TransformerConfig
    from meshpar.runs.optimizers import AdamW

    if isinstance(recipe.optimizer, AdamW):
        recipe = recipe.replace(optimizer=dataclasses.replace(recipe.optimizer, moments=None, offload=False))
    if not isinstance(recipe.model, TransformerConfig):
        return recipe
    config = recipe.model
    kv = min(config.num_kv_heads, 4)
    latent, moe = config.latent, config.moe
    fields: dict[str, Any] = {
        "vocab_size": 32, "embed_dim": 16, "head_dim": 4, "mlp_dim": 32, "num_layers": 4, "param_dtype": dtype,
        "num_kv_heads": kv, "num_heads": kv * min(config.num_heads // config.num_kv_heads, 2),
        "num_dense_layers": min(config.num_dense_layers, 1), "tensor_matmul": "xla",
        "attention": "blockwise" if config.attention in ("cudnn", "tokamax") else config.attention,
    }  # fmt: skip
    if config.vocab_chunk:
        fields["vocab_chunk"] = 6
    if config.attention_window:
        fields["attention_window"] = 4
    fields |= {"rotary_dim": config.rotary_dim and 2, "rope_long": None}
    kinds = config.layer_pattern
    fields["layer_pattern"] = tuple(dataclasses.replace(kind, window=kind.window and 4) for kind in kinds)
    if latent is not None:
        fields["latent"] = dataclasses.replace(
            latent, q_rank=latent.q_rank and 8, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=4
        )
        fields |= {"head_dim": 8, "num_heads": kv, "num_kv_heads": kv}
    if moe is not None:
        groups = min(moe.routing.groups, 2)
        routing = dataclasses.replace(
            moe.routing, num_experts=8, groups=groups, top_groups=min(moe.routing.top_groups, groups),
            top_k=min(moe.routing.top_k, 2),
        )  # fmt: skip
        fields["moe"] = dataclasses.replace(
            moe, routing=routing, mlp_dim=16, payload=None, bound_factor=None, shared_experts=min(moe.shared_experts, 1)
        )
        fields["mlp_dim"] = 32 if fields["num_dense_layers"] else 16
    return recipe.replace(model=dataclasses.replace(config, **fields))


def batch_of(recipe: Recipe, seed: int) -> Mapping[str, Any]:
    """Return a batch of `ROWS` examples as host arrays.

    Models of `meshpar.models` get random tokens with random `weights`, so that each example has a different number of
    counted tokens, sometimes none. With experts, tokens without weight are padding, and examples are sorted by token,
    so that experts have different loads in each part of the batch. Other models get the first examples of the recipe's
    data.
    """
    import jax
    import numpy as np

    from meshpar.cli.explain_command import batch_of as shapes_of
    from meshpar.models.config import TransformerConfig
    from meshpar.runs.recipe import open_data

    if not isinstance(recipe.model, TransformerConfig):
        with open_data(recipe, batch_size=ROWS).train() as batches:
            return jax.tree.map(np.asarray, next(iter(batches)))
    draw = np.random.default_rng(seed)
    batch: dict[str, Any] = {}
    for name, like in shapes_of(recipe, None).items():
        shape = (ROWS, *(min(size, SEQ_LEN) for size in like.shape[1:]))
        if name == "segments":
            batch[name] = np.sort(draw.integers(0, 3, shape), axis=-1).astype(like.dtype)
        elif np.issubdtype(like.dtype, np.integer):
            batch[name] = draw.integers(0, recipe.model.vocab_size, shape).astype(like.dtype)
        else:
            batch[name] = draw.random(shape).astype(like.dtype)
    shape = batch["inputs"].shape
    if recipe.model.moe is not None:
        batch["inputs"] = np.sort(batch["inputs"], axis=None).reshape(shape)
        draw.permuted(batch["inputs"], axis=1, out=batch["inputs"])
    batch["weights"] = (np.arange(shape[1]) < draw.integers(0, shape[1] + 1, (ROWS, 1))).astype(np.int32)
    if recipe.model.moe is not None:
        batch["segments"] = batch.get("segments", 1) * batch["weights"]
    return batch
