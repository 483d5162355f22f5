"""Quantizing strategies: the same step within the bound, few bytes on the wire, one layer whole at a time."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import meshpar as mp
from meshpar.cli.recipe import load_recipe, override
from meshpar.collectives.quantized import error_bound
from meshpar.hardware import cost_model as cost
from meshpar.inspect import census
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.parallel import Quantize, parse_strategy
from tests.equal import linen_decoder
from tests.grid import cases

CONFIG = TransformerConfig(
    vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64
)
LAYERS, WIDTH, HIDDEN, ROWS = 3, 16, 24, 16

EXACT = {"weights": None, "gradients": None, "secondary": "fsdp"}
"""Second shards of what is sent as it is: all of the way by hand, and nothing rounded."""


def stacked_model(scan=mp.scan_layers):
    """A residual MLP, its layers in a scan."""

    def init(key):
        up, down, out = (jax.random.normal(k, shape) / 4 for k, shape in zip(
            jax.random.split(key, 3), ((LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH), (WIDTH, 8)), strict=True
        ))  # fmt: skip
        layers = {"up": {"kernel": up}, "down": {"kernel": down}, "scale": jnp.ones((LAYERS, WIDTH))}
        return {"layers": layers, "out": {"kernel": out}, "bias": jnp.zeros(8)}

    def apply(params, x):
        def layer(x, of_layer):
            h = jnp.tanh((x * of_layer["scale"]) @ of_layer["up"]["kernel"])
            return x + h @ of_layer["down"]["kernel"]

        x = scan(layer, x, params["layers"])
        return x @ params["out"]["kernel"] + params["bias"]

    names = {
        "layers/up/kernel": ("layers", "embed", "mlp"),
        "layers/down/kernel": ("layers", "mlp", "embed"),
        "layers/scale": ("layers", "embed"),
        "out/kernel": ("embed", None),
        "bias": (None,),
    }
    return mp.from_functions(init, apply, names=names)


def squares(model, batch, key):
    """Mean over rows by their weights; the metric of a part without weight is 0 / 0."""
    off = ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)
    total, weight = (off * batch["counts"]).sum(), batch["counts"].sum()
    return mp.MeanLoss(total, weight), {"mean": total / weight, "rows": jnp.asarray(len(off))}


def rows(counts=None):
    draw = np.random.default_rng(0).standard_normal
    counts = np.arange(ROWS) % 5 if counts is None else np.asarray(counts)
    return {name: np.asarray(x, "float32") for name, x in
            (("x", draw((ROWS, WIDTH))), ("y", draw((ROWS, 8))), ("counts", counts))}  # fmt: skip


def tokens():
    draw = np.random.default_rng(0).integers
    batch = {name: draw(0, CONFIG.vocab_size, (ROWS, 12)).astype("int32") for name in ("inputs", "targets")}
    return {**batch, "weights": (np.arange(12) < draw(0, 13, (ROWS, 1))).astype("int32")}


def linear_model():
    return mp.from_functions(
        lambda key: {"kernel": jax.random.normal(key, (WIDTH, 8))},
        lambda params, x: x @ params["kernel"],
        names={"kernel": ("embed", None)},
    )


def linear(model, batch, key):
    products = model(batch["x"]) * batch["y"]
    return mp.MeanLoss(products.sum(), products.size), {}


MODELS = {
    "linear": lambda: (linear_model(), linear, rows()),
    "functions": lambda: (stacked_model(), squares, rows()),
    "nnx": lambda: (CONFIG.build(), next_token_loss, tokens()),
    "linen": lambda: (
        mp.from_linen(linen_decoder(CONFIG), jnp.zeros((ROWS, 12), "int32")),
        next_token_loss,
        tokens(),
    ),
}


def one_step(mesh, strategy, *, model="functions", batch=None, **options):
    """(metrics, gradients, parameters before): of a step of plain descent at rate 1."""
    built, loss, own = MODELS[model]()
    mesh = mp.MeshSpec(**mesh).build(jax.devices()[: math.prod(mesh.values())])
    state = mp.init_state(built, optax.sgd(1.0), mesh=mesh, strategy=strategy, key=0)
    before = jax.tree.map(np.asarray, state.params)
    batch = mp.shard_batch(own if batch is None else batch, mesh, strategy)
    state, metrics = mp.train_step(loss, **options)(state, batch)
    grads = jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params)
    return jax.tree.map(np.asarray, metrics), grads, before


@pytest.mark.parametrize("strategy", [mp.fsdp(min_bytes=0, quantize="int8"), mp.fsdp(min_bytes=0, prefetch=1)], ids=str)
def test_stacked_layers_may_be_one_array(strategy):
    """A Linen parameter named by `at` itself. Its shards have another shape than its initializer makes."""

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.normal(0.5), ("layers", "embed", None))
            stack = self.param("stack", init, (LAYERS, WIDTH, WIDTH))
            return mp.scan_layers(lambda x, one: jnp.tanh(x @ one) + x, x, stack, at="stack")

    def loss_fn(model, batch, key):
        square = model(batch["x"]) ** 2
        return mp.MeanLoss(square.sum(), square.size), {}

    losses = []
    for ranks, one in ((1, mp.fsdp()), (8, strategy)):
        mesh = mp.MeshSpec(fsdp=ranks).build(jax.devices()[:ranks])
        model = mp.from_linen(Stack(), rows()["x"])
        state = mp.init_state(model, optax.sgd(1.0), mesh=mesh, strategy=one, key=0)
        state, first = mp.train_step(loss_fn)(state, rows())
        losses.append([float(first["loss"]), float(first["grad_norm"])])
    # int8 has 127 steps to the largest number of a block.
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6 if strategy.quantize is None else 1e-2)


@pytest.fixture(scope="module")
def plain():
    """(model) -> a step on one device, which all others stand for."""
    return functools.cache(lambda model: one_step({"fsdp": 1}, mp.fsdp(), model=model))


def close(found, expected, *, rtol):
    """Loss and norm, and every gradient up to a part of its largest element."""
    assert found[0].keys() == expected[0].keys()
    for name in ("loss_weight", "rows"):
        assert found[0].get(name) == expected[0].get(name), name
    for name in {"loss", "grad_norm", "mean"} & found[0].keys():
        np.testing.assert_allclose(found[0][name], expected[0][name], rtol=rtol)
    for x, y in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * np.abs(y).max() + 1e-7)


TWO_LEVELS = {"data": 2, "fsdp": 4}
ONCE = {"accumulate": 2, "reduce_gradients": "once"}


# ---------------------------------------------------------------------------------------------------------------------
# The way, with nothing rounded
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    cases(
        ONCE,
        grid=[{}, {"accumulate": 2}, ONCE, {"remat": "dots"}],
    ),
    ids=str,
)
def test_what_is_not_rounded_is_the_plain_step(plain, options):
    found = one_step(TWO_LEVELS, mp.fsdp(axis=("data", "fsdp"), quantize=EXACT), **options)
    close(found, plain("functions"), rtol=2e-5)  # sums in another order, in float32


@pytest.mark.matrix
@pytest.mark.parametrize("model", ["nnx", "linen"])
def test_the_shipped_models_gather_their_layers(plain, model):
    strategy = mp.fsdp(axis=("data", "fsdp"), quantize=EXACT) | mp.tensor_parallel(sequence=True)
    found = one_step({"data": 2, "fsdp": 2, "tensor": 2}, strategy, model=model)
    close(found, plain(model), rtol=2e-4)  # sums in another order, in float32, through 2 layers


@pytest.mark.parametrize("mode", [{}, ONCE], ids=str)
@pytest.mark.parametrize(("quantize", "rtol"), [(EXACT, 2e-5), ("int8", 0.05)], ids=["exact", "int8"])
def test_devices_without_rows_that_count_do_not_spoil_the_others(mode, quantize, rtol):
    """Half of the devices have 0/0 for a metric."""
    batch = rows(np.repeat([0.0, 1.0, 0.0, 3.0], ROWS // 4))
    strategy = mp.fsdp(axis=("data", "fsdp"), quantize=quantize)
    found = one_step(TWO_LEVELS, strategy, batch=batch, **mode)
    assert found[0]["finite"]
    close(found, one_step({"fsdp": 1}, mp.fsdp(), batch=batch), rtol=rtol)


# ---------------------------------------------------------------------------------------------------------------------
# With rounding
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "strategy", "options"),
    [
        pytest.param({"fsdp": 2}, mp.fsdp(quantize="int8"), {}, marks=pytest.mark.matrix),
        pytest.param({"fsdp": 8}, mp.zero3(quantize="fp8"), {}, marks=pytest.mark.matrix),
        pytest.param({"fsdp": 8}, mp.zero3(quantize="int8"), ONCE, marks=pytest.mark.matrix),
        pytest.param(TWO_LEVELS, mp.hsdp(quantize="int8"), {}, marks=pytest.mark.matrix),
        pytest.param(
            TWO_LEVELS, mp.fsdp(axis=("data", "fsdp"), quantize={"secondary": "fsdp"}), {}, marks=pytest.mark.matrix
        ),
        (TWO_LEVELS, mp.fsdp(axis=("data", "fsdp"), quantize={"stochastic": True, "block": 3}), ONCE),
    ],
    ids=str,
)
def test_loss_and_gradients_are_within_the_bound(mesh, strategy, options):
    """Of a loss that is linear in the weights: its gradients are moved by nothing but their own way."""
    wire, batch, num_devices = strategy.quantize, rows(), math.prod(mesh.values())
    metrics, grads, before = one_step(mesh, strategy, model="linear", **options)
    kernel, x, y = before["kernel"], batch["x"], batch["y"]
    slopes = np.einsum("ri,ro->rio", x, y) / 8  # of each row's loss
    by_device = np.abs(slopes.reshape(num_devices, -1, *slopes.shape[1:]).mean(1)).max()
    bound = functools.partial(error_bound, dtype=wire.gradients, stochastic=wire.stochastic)
    # A mean of terms, each quantized once; across nodes or groups what was summed is quantized up to twice more.
    most = bound(by_device)
    if "data" in mesh:
        most += 2 * bound(by_device + 2 * most)
    off = np.abs(grads["kernel"] - slopes.mean(0))
    assert 1e-6 < off.max() <= most
    weights = error_bound(np.abs(kernel).max(), dtype=wire.weights, stochastic=wire.stochastic)
    off = np.abs(metrics["loss"] - ((x @ kernel) * y).mean())
    assert 1e-6 < off <= weights * np.abs(slopes.mean(0)).sum()


@pytest.mark.matrix
def test_shards_that_other_axes_split_are_quantized_where_they_are(plain):
    strategy = mp.fsdp(quantize={"stochastic": True}) | mp.tensor_parallel()
    found = one_step({"fsdp": 2, "tensor": 2}, strategy)
    close(found, plain("functions"), rtol=0.1)  # as below, and rounding at random errs by twice as much
    with pytest.raises(AssertionError):
        close(found, plain("functions"), rtol=1e-4)


@pytest.mark.parametrize("side", cases("gradients", grid=["weights", "gradients"]))
def test_either_side_alone(plain, side):
    other = {"weights": "gradients", "gradients": "weights"}[side]
    found, exact = one_step({"fsdp": 4}, mp.fsdp(quantize={other: None})), plain("functions")
    same_loss = abs(found[0]["loss"] / exact[0]["loss"] - 1) < 1e-6
    assert same_loss == (side == "gradients")  # gradients alone leave the forward pass as it is
    with pytest.raises(AssertionError):
        close(found, exact, rtol=1e-4)
    close(found, exact, rtol=0.05)  # weights are off by 1/254 of the largest, through 3 layers and back


@pytest.mark.filterwarnings("ignore:.*of the matmul FLOPs are in float32")  # it is given float32 rows
def test_bfloat16_weights_are_cast_before_they_are_quantized():
    precision = mp.Precision(compute="bfloat16")
    found = one_step({"fsdp": 4}, mp.fsdp(quantize="int8"), precision=precision)
    close(found, one_step({"fsdp": 4}, mp.fsdp(), precision=precision), rtol=0.05)


def test_a_gradient_that_is_not_finite_is_seen():
    batch = rows()
    batch["y"][3, 2] = np.inf
    metrics, grads, _ = one_step({"fsdp": 4}, mp.fsdp(quantize="int8"), batch=batch)
    assert not metrics["finite"]
    assert all((g == 0).all() for g in jax.tree.leaves(grads))  # the update was left out


@pytest.mark.matrix
def test_random_rounding_follows_the_steps_key():
    strategy = mp.fsdp(quantize={"stochastic": True})
    mesh = mp.MeshSpec(fsdp=4).build(jax.devices()[:4])
    state = mp.init_state(stacked_model(), optax.sgd(0.0), mesh=mesh, strategy=strategy, key=0)
    step, batch = mp.train_step(squares), mp.shard_batch(rows(), mesh, strategy)
    losses = []
    for number in (0, 0, 1):  # the same parameters throughout
        state, metrics = step(state.replace(step=jnp.full_like(state.step, number)), batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1] != losses[2]


# ---------------------------------------------------------------------------------------------------------------------
# A curve
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_training_goes_as_it_does_unquantized():
    """Bytes of Python source, 80 steps, three seeds: the difference is small beside that between seeds."""
    text = np.frombuffer(Path(optax.__file__).with_name("__init__.py").read_bytes() * 4, np.uint8)
    cfg = TransformerConfig(
        vocab_size=128, num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64
    )
    mesh = mp.MeshSpec(fsdp=4).build(jax.devices()[:4])

    def curve_ends(strategy):
        step, ends = mp.train_step(next_token_loss), []
        setup = mp.init_state(cfg.build(), optax.adam(5e-3), mesh=mesh, strategy=strategy, key=0).setup
        for seed in range(3):
            state, draw, losses = setup.init(seed), np.random.default_rng(0), []
            for _ in range(80):
                starts = draw.integers(0, len(text) - 33, 8)
                found = np.stack([text[start : start + 33] for start in starts]).astype("int32") % 128
                state, metrics = step(state, {"inputs": found[:, :-1], "targets": found[:, 1:]})
                losses.append(float(metrics["loss"]))
            ends.append(np.mean(losses[-20:]))
        return np.asarray(ends)

    plain, quantized = curve_ends(mp.fsdp()), curve_ends(mp.fsdp(quantize="int8"))
    assert (plain < 3.2).all()  # it has learned: log 128 is 4.85
    assert (plain != quantized).all()
    assert abs((quantized - plain).mean()) < np.ptp(plain)


# ---------------------------------------------------------------------------------------------------------------------
# What is kept and what is sent
# ---------------------------------------------------------------------------------------------------------------------


def arrays_in(jaxpr):
    """Every array that a program makes, inside loops and calls too."""
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in eqn.outvars if hasattr(v.aval, "shape"))
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from arrays_in(inner)


@pytest.mark.parametrize(
    ("quantize", "remat"),
    cases((EXACT, "full"), grid=itertools.product(("int8", EXACT), (None, "full", "all_dots"))),
    ids=str,
)
def test_no_stack_of_whole_weights_is_kept_for_the_backward_pass(quantize, remat):
    strategy = mp.fsdp(axis=("data", "fsdp"), quantize=quantize)
    state = mp.abstract_state(
        stacked_model(), optax.sgd(1.0), mesh=mp.MeshSpec(**TWO_LEVELS).abstract(), strategy=strategy
    )
    traced = mp.train_step(squares, remat=remat).trace(state, rows())
    body = next(e for e in traced.jaxpr.jaxpr.eqns if "shard_map" in e.primitive.name).params["jaxpr"]
    body = getattr(body, "jaxpr", body)
    found = list(arrays_in(body))
    stacks = {aval.shape for aval in found if aval.ndim == 3 and aval.shape[0] == LAYERS}
    assert (LAYERS, WIDTH, HIDDEN) not in stacks
    assert (LAYERS, HIDDEN, WIDTH) not in stacks
    assert (LAYERS, WIDTH // 8, HIDDEN) in stacks  # gradients, in shards
    kept = {math.prod(a.shape[1:]) for a in found if a.dtype == jnp.uint8 and a.shape[:1] == (LAYERS,)}
    if quantize is EXACT:  # of every layer the second shard, as it was sent: a quarter, in four bytes an element
        assert kept == {4 * WIDTH * HIDDEN // 4}
    else:  # at most what the rank itself sends, where a policy would keep what it is made of
        assert sum(kept) <= (cost.quantized_bytes(WIDTH * HIDDEN // 8) if remat is None else 0)


POD = TransformerConfig(
    vocab_size=512, num_layers=4, embed_dim=256, num_heads=8, num_kv_heads=4, head_dim=32, mlp_dim=512
)
MATRICES = {  # elements of a layer's
    "query": 256 * 256, "key": 256 * 128, "value": 256 * 128, "out": 256 * 256,
    "gate": 256 * 512, "up": 256 * 512, "down": 256 * 512,
}  # fmt: skip
TABLES = 2 * 512 * 256
VECTORS = 4 * 256 * 2 + 256
"""Norm scales of four layers, and the last one."""


def sent_on_pod(pod, cluster, mesh, strategy):
    """(collectives, {(kind, axes, in a loop): bytes a device sends in a step}) in bfloat16."""
    mesh = mp.MeshSpec(**mesh).abstract()
    state = mp.abstract_state(POD.build(), optax.adam(1e-3), mesh=mesh, strategy=strategy)
    step = mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"))
    batch = {n: jax.ShapeDtypeStruct((16, 64), np.int32) for n in ("inputs", "targets")}
    found = census.census(pod.compile(step.trace(state, batch), cluster).module, mesh)
    keys = {(c.kind, c.axes, c.in_loop) for c in found}
    return found, {key: sum(c.bytes_sent_per_step for c in found if (c.kind, c.axes, c.in_loop) == key) for key in keys}


def big(collectives):
    """Dtypes of what is larger than all vectors together."""
    return {array.dtype for c in collectives for array in c.arrays if math.prod(array.dims) > VECTORS}


@pytest.mark.pod
@pytest.mark.parametrize("dtype", ["int8", pytest.param("fp8", marks=pytest.mark.matrix)])
def test_the_wire_of_a_node_carries_a_byte_an_element(pod, dtype):
    found, sent = sent_on_pod(pod, "h100:1x8", {"fsdp": 8}, mp.fsdp(quantize=dtype))
    assert big(found) == {"u8"}
    layer = sum(cost.quantized_all_gather(size, 8).inside.bytes_sent for size in MATRICES.values())
    assert sent["all-gather", ("fsdp",), True] == 2 * 4 * layer  # forward, and again in backward
    assert sent["all-to-all", ("fsdp",), True] == 4 * layer
    tables = 2 * cost.quantized_all_gather(TABLES // 2, 8).inside.bytes_sent
    assert sent["all-gather", ("fsdp",), False] == tables + 2 * VECTORS * 7 / 8
    assert sent["all-to-all", ("fsdp",), False] == tables
    in_bfloat16 = 2 * 7 / 8 * sum(MATRICES.values())
    assert layer / in_bfloat16 == pytest.approx(0.5 * (1 + 4 / 256))


@pytest.mark.pod
def test_second_shards_leave_one_gather_between_nodes(pod):
    strategy = mp.fsdp(axis=("data", "fsdp"), quantize={"secondary": "fsdp"})
    found, sent = sent_on_pod(pod, "h100:2x8", {"data": 2, "fsdp": 8}, strategy)
    assert big(found) == {"u8"}
    gathers = [cost.quantized_all_gather(size, 16, inner=8) for size in MATRICES.values()]
    scatters = [cost.quantized_reduce_scatter(size, 16, inner=8) for size in MATRICES.values()]
    assert sent["all-gather", ("data",), True] == 4 * sum(c.across.bytes_sent for c in gathers)  # forward only
    assert sent["all-gather", ("fsdp",), True] == 2 * 4 * sum(c.inside.bytes_sent for c in gathers)
    assert sent["all-to-all", ("data",), True] == 4 * sum(c.across.bytes_sent for c in scatters)
    assert sent["all-to-all", ("fsdp",), True] == 4 * sum(c.inside.bytes_sent for c in scatters)


# ---------------------------------------------------------------------------------------------------------------------
# How it is asked for
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        mp.fsdp(quantize="int8"),
        mp.zero3(quantize="fp8", min_bytes=0),
        mp.fsdp(quantize={"weights": None, "gradients": "fp8", "block": 64}),
        mp.fsdp(axis=("data", "fsdp"), quantize=EXACT | {"stochastic": True}) | mp.tensor_parallel(),
        mp.hsdp(quantize=Quantize(weights="fp8")) | mp.Rules(embed=None),
    ],
    ids=str,
)
def test_it_is_written_as_it_is_read(strategy):
    assert strategy.quantize is not None
    text = strategy.label.partition(" | Rules")[0]
    again = parse_strategy(text)
    assert again.quantize == strategy.quantize
    assert again.label == text


def test_the_later_of_two_joined_wins():
    assert (mp.fsdp(quantize="int8") | mp.fsdp(quantize="fp8")).quantize == Quantize(weights="fp8", gradients="fp8")
    assert (mp.fsdp() | mp.tensor_parallel()).quantize is None


def test_a_recipe_takes_it_as_text():
    recipe = load_recipe(Path(__file__).parents[3] / "recipes" / "gpt_stdlib.py")
    changed = override(recipe, ['strategy=fsdp(quantize="int8") | tensor_parallel()'])
    assert changed.strategy.quantize == Quantize()
    assert changed.to_json()["strategy"] == "fsdp(quantize='int8') | tensor_parallel()"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("int4", "weights='int4'.*Did you mean `int8`"),
        ({"weight": "int8"}, "set `weight`.*Did you mean `weights`"),
        ({"gradients": "f8"}, "gradients='f8'.*Did you mean `fp8`"),
        ({"block": 0}, "block=0.*integer of at least 1"),
        ({"stochastic": 1}, "stochastic=1"),
        ({"weights": None, "gradients": None}, "neither weights nor gradients"),
        (3, "weights=3"),
        ({"secondary": "fsdp"}, "proper subset of the axes"),
        ({"secondary": "tensor"}, "proper subset of the axes"),
    ],
    ids=str,
)
def test_what_cannot_be_is_told(given, message):
    with pytest.raises(mp.MeshparError, match=message):
        mp.fsdp(quantize=given)


def test_nothing_to_quantize_is_told():
    with pytest.raises(mp.MeshparError, match=r"no parameter is split over an axis that splits the batch \(`data`\)"):
        one_step({"data": 4}, mp.fsdp(quantize="int8"))


def test_a_model_that_never_gathers_its_layers_is_told():
    def scan(layer, x, params):
        return jax.lax.scan(lambda x, one: (layer(x, one), None), x, params)[0]

    MODELS["bare"] = lambda: (stacked_model(scan), squares, rows())
    with pytest.raises(mp.MeshparError, match="never calls meshpar.scan_layers"):
        one_step({"fsdp": 4}, mp.fsdp(quantize="int8"), model="bare")


def test_a_path_that_no_layer_has_is_told():
    MODELS["other"] = lambda: (stacked_model(functools.partial(mp.scan_layers, at="blocks")), squares, rows())
    with pytest.raises(mp.MeshparError, match="no parameters have paths that end in `blocks/down/kernel`"):
        one_step({"fsdp": 4}, mp.fsdp(quantize="int8"), model="other")


def test_gradients_of_bfloat16_parameters_are_summed_in_float32():
    """Over 512 micro-steps a bfloat16 sum of fours would stop at 1,024, half of the way."""
    model = mp.from_functions(
        lambda key: {"w": jnp.zeros((4, 2))}, lambda params, x: x @ params["w"], names={"w": ("embed", None)}
    )
    mesh, precision = mp.MeshSpec(data=2, fsdp=2).build(jax.devices()[:4]), mp.Precision(params="bfloat16")
    strategy = mp.fsdp(axis=("data", "fsdp"), min_bytes=0, quantize=EXACT)
    state = mp.init_state(model, optax.sgd(1.0), mesh=mesh, strategy=strategy, key=0, precision=precision)

    def total(model, batch, key):
        return mp.MeanLoss(model(batch).astype(jnp.float32).sum(), len(batch)), {}

    step = mp.train_step(total, accumulate=512, precision=precision)
    state, _ = step(state, np.ones((2048, 4), np.float32))
    np.testing.assert_array_equal(np.asarray(state.params["w"], np.float32), -1)
