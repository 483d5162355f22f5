"""Activations that layers save for the backward pass: errors, and a table of the costs of each policy.

`python -m tests.training.test_remat` compiles for an H100 and writes the table anew.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.hardware.clusters import parse_cluster
from meshpar.inspect.model_flops import matmul_flops
from meshpar.inspect.pod import PodProcess
from meshpar.inspect.target import traced_for
from meshpar.layers.remat import remat_policy
from meshpar.models import TransformerConfig, llama3_8b, next_token_loss
from meshpar.training.state import abstract_state
from tests.equal import token_batches
from tests.errors import raises
from tests.linen_decoder import linen_model

TABLE = Path(__file__).with_name("remat.txt")
SPECS = (
    None, "all_dots", "minimal", "dots", "save:query,key,value,attention_out,gate", "save:query,key,value,attention",
    "save:attention", "full",
    "offload:attention", "minimal+offload:gate,up",
)  # fmt: skip


def config(**changes):
    sizes = {"vocab_size": 32, "num_layers": 2, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
    return TransformerConfig(**{**sizes, "mlp_dim": 32, "attention": "blockwise", **changes})


STAGED = mp.fsdp() | mp.tensor_parallel() | mp.pipeline_parallel(stages=2, microbatches=4)
STAGES = mp.MeshSpec(stage=2, fsdp=2, tensor=2)


@pytest.mark.call_stacks
@pytest.mark.matrix
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_stages_save_less_with_remat_rules(framework):
    """Activations of a microbatch, from its F to its B."""
    model = linen_model(config(), 16, 8) if framework == "linen" else config().build()
    saved_bytes = []
    by_path = {"layers/mlp": "full", "layers/.*_norm": "full"}
    for rules in (mp.Rules(), mp.Rules(remat=by_path, activations={"layers/mlp": ("batch", None, None)})):
        state = abstract_state(model, optax.sgd(1.0), mesh=STAGES.build(), strategy=STAGED | rules)
        report = mp.explain(mp.train_step(next_token_loss), state, token_batches(16, 8, 1)[0])
        assert report.is_as_expected, str(report)
        saved_bytes.append(report.program.temporary_bytes)
    assert saved_bytes[1] < saved_bytes[0]


@functools.cache
def staged_state(rules):
    return abstract_state(config().build(), optax.sgd(1.0), mesh=STAGES.abstract(), strategy=STAGED | rules)


@pytest.mark.parametrize(
    ("by_path", "remat", "code", "fix"),
    [
        ({}, "offload:attention", "unsupported-feature", ""),
        ({"layers/mlp": "offload:gate"}, None, "unsupported-feature", ""),
        ({"layers/mpl": "full"}, None, "not-found", "`layers/mlp`"),
        pytest.param({"": "full"}, None, "not-found", "", marks=pytest.mark.matrix),
        pytest.param({"layers/0/mlp": "full"}, None, "not-found", "`layers/mlp`", marks=pytest.mark.matrix),
        pytest.param({"layers/mlp": "save:nothing"}, None, "unknown-name", "checkpoint_name", marks=pytest.mark.matrix),
        ({}, "dots+save:atention", "unknown-name", "`attention`"),
        ({}, "dot", "unknown-choice", "dots"),
        ({}, "keep:attention", "bad-syntax", ""),
        ({}, "save:", "bad-syntax", ""),
        ({}, "save:a+offload:b,a", "conflict", ""),
    ],
)
def test_invalid_remat_is_an_error(by_path, remat, code, fix):
    state = staged_state(mp.Rules(remat=by_path))
    with raises(code, "remat") as error:
        mp.train_step(next_token_loss, remat=remat).trace(state, token_batches(16, 8, 1)[0])
    assert fix in error.value.fix


def test_remat_saves_kernel_results_by_name():
    """Blockwise attention is not run a second time where its result and log-sum-exp are kept."""
    from meshpar.collectives import blockwise_attention

    x = np.ones((1, 8, 2, 4), np.float32)

    def tiles(remat):
        attention = jax.checkpoint(lambda x: blockwise_attention(x, x, x, tile=4), policy=remat_policy(remat))
        return matmul_flops(jax.make_jaxpr(jax.grad(lambda x: attention(x).sum()))(x).jaxpr)

    once = tiles("save:attention")
    assert tiles("full") == once + 2 / 7 * once  # two products forward, five backward


def rows(pod):
    """(spec, bytes on the GPU, bytes on the host, FLOPs over those without remat)."""
    cfg = config(
        vocab_size=256, num_layers=8, embed_dim=256, head_dim=64, mlp_dim=768, param_dtype="bfloat16", vocab_chunk=128
    )
    cluster, mesh = parse_cluster("h100:1x1"), mp.MeshSpec(data=1).abstract(devices=1)
    state = abstract_state(cfg.build(), optax.sgd(1.0), mesh=mesh, strategy=mp.ddp())
    batch = {name: jax.ShapeDtypeStruct((2, 2048), np.int32) for name in ("inputs", "targets")}
    found = []
    for remat in SPECS:
        with traced_for(cluster):
            traced = mp.train_step(next_token_loss, remat=remat).trace(state, batch)
            program = pod.compile(traced, cluster)
        flops = matmul_flops(traced.jaxpr.jaxpr)
        found.append((str(remat), program.temporary_bytes, program.host_temporary_bytes, flops))
    plain = found[0][3]
    return [(remat, device, host, flops / plain) for remat, device, host, flops in found]


def written(found):
    """The table."""
    lines = [f"{'remat':41}{'on the GPU':>12}{'on the host':>13}{'FLOPs':>8}"]
    lines += [f"{name:41}{gpu / 1e6:>9.1f} MB{host / 1e6:>10.1f} MB{more:>8.3f}" for name, gpu, host, more in found]
    return "\n".join([f"A decoder of 8 layers, 2 × 2,048 tokens, one H100, jax {jax.__version__}", "", *lines, ""])


@pytest.mark.pod
def test_remat_table_matches_compiled_programs(pod):
    found = rows(pod)
    of = {name: (gpu, host, flops) for name, gpu, host, flops in found}
    order = ("full", "save:attention", "save:query,key,value,attention", "dots", "minimal", "None")
    assert [of[name][0] for name in order] == sorted(of[name][0] for name in order)
    assert of["None"][2] == of["minimal"][2] == 1 < of["dots"][2] < of["full"][2]
    # Layers, rows, positions, heads, of each its width of two bytes and a log-sum-exp in float32.
    assert of["offload:attention"][1] == 8 * 2 * 2048 * 4 * (64 * 2 + 4)
    if f"jax {jax.__version__}" in TABLE.read_text():
        assert written(found) == TABLE.read_text()


@pytest.mark.pod
@pytest.mark.parametrize(
    ("remat", "most_gb"), [("full", 5), ("save:query,key,value,attention_out,gate", 20), (None, 36)]
)
def test_llama_8b_with_one_row_of_8192_on_each_of_64_gpus(pod, remat, most_gb):
    """`dots` itself keeps 22.5 GB: 43,008 numbers of two bytes for each of 8,192 tokens in 32 layers. Without up's,
    which is made again, it is 15."""
    cfg = llama3_8b(attention="cudnn", vocab_chunk=16_032)
    cluster, mesh = parse_cluster("h100:8x8"), mp.MeshSpec(fsdp=64).abstract(devices=64)
    state = abstract_state(cfg.build(), optax.adamw(3e-4), mesh=mesh, strategy=mp.fsdp())
    batch = {name: jax.ShapeDtypeStruct((64, 8192), np.int32) for name in ("inputs", "targets")}
    step = mp.train_step(next_token_loss, remat=remat, precision=mp.Precision(compute="bfloat16"))
    with traced_for(cluster):
        program = pod.compile(step.trace(state, batch), cluster, options=step.compile_options(state.setup))
    assert program.temporary_bytes < most_gb * 1e9


if __name__ == "__main__":
    with PodProcess() as process:
        TABLE.write_text(written(rows(process)))
