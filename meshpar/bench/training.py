"""A training step against the same model in bare `jax.jit`, and the host's work around it."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.bench.figures import Figures, Measure, paired_ratios, seconds_of
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.parallel import Strategy, fsdp, tensor_parallel
from meshpar.sharding.adapters import Model, from_functions
from meshpar.sharding.context import use
from meshpar.sharding.mesh import MeshSpec
from meshpar.sharding.rules import Rules, resolve
from meshpar.sharding.types import Leaf, PyTree, path_str, problem
from meshpar.training.state import TrainState, init_state, make_setup
from meshpar.training.step import train_step

CASES: dict[str, tuple[MeshSpec, Strategy]] = {
    "fsdp=8": (MeshSpec(fsdp=8), fsdp()),
    "fsdp=4,tensor=2": (MeshSpec(fsdp=4, tensor=2), fsdp() | tensor_parallel()),
}
CONFIG = TransformerConfig(
    vocab_size=256, num_layers=4, embed_dim=128, num_heads=8, num_kv_heads=4, head_dim=16, mlp_dim=384
)
ROWS, SEQ = 16, 128


def step(*, pairs: int = 20) -> Figures:
    """Measure a training step against the same model in bare `jax.jit` with hand-written shardings.

    Args:
      pairs: how often the two are run in turn.

    Raises:
      ValueError: other than 8 devices.
    """
    if len(jax.devices()) != 8:
        raise problem(
            "bench.step", "measure meshes of 8 devices", f"there are {len(jax.devices())}", "run it with --devices 8"
        )
    measures = [_against_bare(case, pairs) for case in CASES]
    measures += [_host_time(), _resolve_time(), _compile_growth(), _help_time()]
    return Figures(title="training step", measures=tuple(measures))


# ---- The step against bare jax.jit -----------------------------------------------------------------------------------


def _against_bare(case: str, pairs: int) -> Measure:
    spec, strategy = CASES[case]
    mesh, model, tx = spec.build(), CONFIG.build(), _optimizer()
    state = init_state(model, tx, mesh=mesh, strategy=strategy, key=0)
    batch = jax.device_put(_batch(), NamedSharding(mesh, P("fsdp")))
    bare, params, opt_state = _bare_step(model, tx, mesh, state)
    ours = train_step(next_token_loss)

    def run_ours() -> None:
        nonlocal state
        state, metrics = ours(state, batch)
        jax.block_until_ready((state, metrics))

    def run_bare() -> None:
        nonlocal params, opt_state
        params, opt_state, loss = bare(params, opt_state, batch)
        jax.block_until_ready((params, loss))

    ratios = paired_ratios(run_ours, run_bare, pairs)
    low, median, high = statistics.quantiles(ratios, n=4)
    return Measure(
        name=f"step time ratio, {case}",
        value=median,
        unit="×",
        limit=1.03,
        low=low,
        high=high,
        detail=f"train_step ÷ bare jax.jit, {pairs} pairs in turn",
    )


def _optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def _batch() -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, SEQ + 1), dtype=np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


# What a person would write by hand for this decoder, with neither names nor rules.
_HAND_WRITTEN = {
    "embed/embedding": P("tensor", "fsdp"),
    "head/kernel": P("fsdp", "tensor"),
    "final_norm/scale": P("fsdp"),
    "layers/attention_norm/scale": P(None, "fsdp"),
    "layers/mlp_norm/scale": P(None, "fsdp"),
    "layers/attention/query/kernel": P(None, "fsdp", "tensor", None),
    "layers/attention/key/kernel": P(None, "fsdp", "tensor", None),
    "layers/attention/value/kernel": P(None, "fsdp", "tensor", None),
    "layers/attention/out/kernel": P(None, "tensor", None, "fsdp"),
    "layers/mlp/gate/kernel": P(None, "fsdp", "tensor"),
    "layers/mlp/up/kernel": P(None, "fsdp", "tensor"),
    "layers/mlp/down/kernel": P(None, "tensor", "fsdp"),
}


def _bare_step(
    model: Model, tx: optax.GradientTransformation, mesh: Mesh, like: TrainState
) -> tuple[Any, PyTree, PyTree]:
    """The same training step in plain jax: hand-written shardings, one jit, donated arguments."""

    def sharding(path: tuple[Any, ...], x: jax.Array) -> NamedSharding:
        return NamedSharding(mesh, _HAND_WRITTEN[path_str(path)])

    def moments(path: tuple[Any, ...], x: jax.Array) -> NamedSharding:
        name = next((name for name in _HAND_WRITTEN if path_str(path).endswith(name)), None)
        return NamedSharding(mesh, _HAND_WRITTEN[name] if name else P())

    params_like, opt_like = like.params, like.opt_state
    of_params = jax.tree_util.tree_map_with_path(sharding, params_like)
    of_moments = jax.tree_util.tree_map_with_path(moments, opt_like)
    whole = NamedSharding(mesh, P())
    # The model says where its activations lie by name; these are the axes a person would write there.
    rules = Rules(
        batch="fsdp", seq=None, norm_seq=None, act_embed=None, act_head_dim=None,
        act_heads="tensor", act_kv_heads="tensor", act_mlp="tensor", act_vocab="tensor",
    )  # fmt: skip

    @functools.partial(
        jax.jit,
        in_shardings=(of_params, of_moments, NamedSharding(mesh, P("fsdp"))),
        out_shardings=(of_params, of_moments, whole),
        donate_argnums=(0, 1),
    )
    def bare(params: PyTree, opt_state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree, jax.Array]:
        def loss_of(params: PyTree) -> Any:
            return next_token_loss(model.bind(params, {}), batch, jax.random.key(0))

        with use(mesh, rules):
            (loss, _), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    # A copy: both sides donate theirs.
    params, opt_state = jax.tree.map(jnp.copy, (params_like, opt_like))
    return bare, jax.device_put(params, of_params), jax.device_put(opt_state, of_moments)


# ---- Host work -------------------------------------------------------------------------------------------------------


def _host_time(calls: int = 300) -> Measure:
    """What a call of the step costs the host beyond calling the jitted function it holds."""
    mesh = MeshSpec(fsdp=8).build()
    model = from_functions(lambda key: {"w": jnp.zeros((8, 8))}, lambda params, x: x @ params["w"])
    strategy = fsdp(min_bytes=0)
    state = init_state(model, optax.sgd(0.0), mesh=mesh, strategy=strategy, key=0)
    batch = {name: jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("fsdp"))) for name in "ab"}
    program = train_step(lambda model, batch, key: (model(batch["a"]).mean(), {}), nonfinite="ignore")
    compiled = program.jitted(state, batch)

    def run(call: Callable[[Any, Any], Any]) -> float:
        nonlocal state
        start = time.perf_counter()
        state, metrics = call(state, batch)
        elapsed = time.perf_counter() - start
        jax.block_until_ready(metrics)
        return elapsed

    run(program)
    extra = [run(program) - run(compiled) for _ in range(calls)]
    low, median, high = (1e6 * q for q in statistics.quantiles(extra, n=4))
    return Measure(
        name="host time of a call", value=median, unit="µs", limit=150, low=low, high=high,
        detail="step(...) − the compiled call, in turn",
    )  # fmt: skip


def _resolve_time(num_leaves: int = 10_000) -> Measure:
    rules = (fsdp() | tensor_parallel()).params
    mesh = MeshSpec(fsdp=64, tensor=8).abstract()
    leaves = [
        Leaf(path=f"layer_{i}/mlp/up/kernel", shape=(4096, 16384), dtype=np.dtype(np.float32), names=("embed", "mlp"))
        for i in range(num_leaves)
    ]
    seconds = seconds_of(lambda: [resolve(leaf, rules, mesh) for leaf in leaves])
    return Measure(name=f"resolving {num_leaves:,} leaves", value=seconds, unit="s", limit=1.0)


def _compile_growth(few: int = 4, many: int = 64) -> Measure:
    """Compile time of the step with many layers over that with few: layers are scanned, so it stays near one."""
    spec, strategy = CASES["fsdp=4,tensor=2"]

    def compile_with(layers: int) -> None:
        model = dataclasses.replace(CONFIG, num_layers=layers).build()
        setup = make_setup(model, _optimizer(), mesh=spec.build(), strategy=strategy)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _batch())
        # A new step each time: a compiled program of an earlier pair must not be found again.
        train_step(next_token_loss).lower(setup.abstract, batch).compile()

    ratios = paired_ratios(lambda: compile_with(many), lambda: compile_with(few), pairs=3)
    return Measure(
        name=f"compile time, {many} layers over {few}", value=statistics.median(ratios), unit="×", limit=1.3,
        low=min(ratios), high=max(ratios), detail="trace, lower and compile, 3 pairs in turn",
    )  # fmt: skip


def _help_time(runs: int = 5) -> Measure:
    command = [sys.executable, "-m", "meshpar.cli.main", "--help"]
    times = [seconds_of(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(runs)]
    return Measure(
        name="meshpar --help", value=statistics.median(times), unit="s", limit=0.4, low=min(times), high=max(times),
        detail=f"whole process, {runs} runs",
    )  # fmt: skip
