"""Constraints on module outputs, along the batch dim or by rules, in models that do not call `constrain`."""

from __future__ import annotations

import contextlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.layers.precision import products
from meshpar.sharding import adapters
from meshpar.sharding.jaxprs import equations
from meshpar.sharding.rules import BATCH_AXES
from tests.errors import raises
from tests.grid import cases
from tests.linen_decoder import linen_model

WIDTH, MLP, BATCH = 64, 128, 16
X = np.random.default_rng(0).normal(size=(BATCH, 4, WIDTH)).astype(np.float32)
TOKENS = {name: np.arange(BATCH * 8, dtype=np.int32).reshape(BATCH, 8) % 32 for name in ("inputs", "targets")}
FSDP = mp.fsdp(min_bytes=0)
BF16 = mp.Precision(compute="bfloat16")


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(MLP, name="up")(x)))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for index in range(2):
            x = LinenBlock(name=f"block{index}")(x)
        return nn.Dense(WIDTH, name="out")(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(WIDTH, MLP, rngs=rngs), nnx.Linear(MLP, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.block0, self.block1 = NnxBlock(rngs), NnxBlock(rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.out(self.block1(self.block0(x)))


MODELS = {
    "linen": lambda: mp.from_linen(Linen(), jax.ShapeDtypeStruct(X.shape, X.dtype)),
    "nnx": lambda: mp.from_nnx(Nnx),
}
LINEN = pytest.param("linen", marks=pytest.mark.matrix)


def _loss(model, batch, key):
    return _mean((model(batch) - batch) ** 2), {}


def _bf16_loss(model, batch, key):
    return _loss(model, batch.astype("bfloat16"), key)


def _mean(x):
    return mp.MeanLoss(x.sum(), x.size)


def _decoder(linen, num_layers):
    cfg = mp.models.TransformerConfig(
        vocab_size=32, embed_dim=16, num_layers=num_layers, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
    )
    return linen_model(cfg, BATCH, 8) if linen else cfg.build()


def _state(model, strategy=FSDP, mesh=None):
    mesh = mesh or mp.MeshSpec(fsdp=-1).build()
    return mp.init_state(model, optax.sgd(0.1), mesh=mesh, strategy=strategy, key=0)


def _abstract(model, strategy=FSDP, mesh=None):
    mesh = mesh or mp.MeshSpec(fsdp=-1).build()
    return mp.abstract_state(model, optax.sgd(0.1), mesh=mesh, strategy=strategy)


def _activation_rules(**by_name):
    """A strategy with activation rules only."""
    empty = mp.Rules()
    return mp.custom(params=empty, grads=empty, optimizer=empty, activations=mp.Rules(**by_name))


def _specs(state) -> list[P]:
    """Return the specs of all constraints on activations in a traced step."""
    jaxpr = mp.train_step(_loss).trace(state, X).jaxpr
    constraints = [eqn for eqn, _ in equations(jaxpr) if eqn.primitive.name == "sharding_constraint"]
    return [eqn.params["sharding"].spec for eqn in constraints if eqn.outvars[0].aval.shape[:2] == X.shape[:2]]


@pytest.mark.parametrize("kind", ["nnx", LINEN])
def test_outputs_of_unnamed_modules_are_sharded_by_batch(kind, monkeypatch):
    state = _state(MODELS[kind]())
    specs = _specs(state)
    assert len(specs) >= 2 * 7 - 1, "outputs of seven modules and their gradients"
    assert set(specs) == {P(BATCH_AXES, None, None)}
    step = mp.train_step(_loss)
    report = mp.explain(step, state, X)
    assert not report.matching.unexpected
    state, metrics = step(state, X)
    monkeypatch.setattr(f"meshpar.sharding.adapters.{kind}.constrain_output", lambda path, out: out)
    state, step = _state(MODELS[kind]()), mp.train_step(_loss)
    with pytest.warns(UserWarning, match="constrain"):
        assert mp.explain(step, state, X).matching.unexpected
    np.testing.assert_allclose(metrics["loss"], step(state, X)[1]["loss"], rtol=1e-5)


@pytest.mark.call_stacks
@pytest.mark.parametrize("kind", ["nnx", LINEN])
def test_advice_names_modules_by_paths_for_rules(kind):
    """Unexpected collectives come with the path of a module and an activation rule, because the code is not ours."""
    rules = mp.Rules(activations={"block0/up": None, r"block\d": (None, None, "act_mlp")})
    strategy = FSDP | _activation_rules(act_mlp="fsdp") | rules
    report = mp.explain(mp.train_step(_loss), _abstract(MODELS[kind](), strategy), X)
    gathers = [collective for collective in report.matching.unexpected if collective.kind == "all-gather"]
    assert any(re.search(r"/block[01]/(up|down)$", gather.module) for gather in gathers), gathers
    assert all("mp.constrain" not in gather.fix for gather in gathers)
    advised = {path for gather in gathers for path in re.findall(r'activations=\{r"(.*?)"', gather.fix)}
    assert advised <= {"block0", "block0/up", "block0/down", "block1", "block1/up", "block1/down", "out"}, advised


@pytest.mark.parametrize("kind", MODELS)
def test_weight_gradients_have_the_reduce_dtype(kind):
    """Without `mp` dot_general, layers of Flax ignore `Precision.reduce` and return bfloat16 weight gradients."""
    step = mp.train_step(_bf16_loss, precision=BF16)
    jaxpr = step.trace(_abstract(MODELS[kind]()), X).jaxpr.jaxpr
    outputs = [eqn.outvars[0].aval for _, eqn in products(jaxpr)]
    assert [x.dtype.name for x in outputs if x.ndim == 2] == ["float32"] * 5, "five weights"


@pytest.mark.parametrize("kind", MODELS)
def test_activation_rules_shard_outputs_of_named_modules(kind):
    mesh = mp.MeshSpec(fsdp=4, tensor=2).build()
    patterns = {r"block\d/up": ("batch", None, "act_mlp"), "block1/down": None}
    rules = mp.Rules(activations=patterns, paths={r".*up/kernel": ("fsdp", "tensor")})
    specs = _specs(_abstract(MODELS[kind](), FSDP | _activation_rules(act_mlp="tensor") | rules, mesh))
    assert specs.count(P(BATCH_AXES, None, "tensor")) == 2 * 2, "two modules, forward and backward"
    assert specs.count(P(BATCH_AXES, None, None)) >= 2 * 4 - 1
    assert mp.Rules.from_json(rules.to_json()) == rules
    assert "activations={" in repr(rules)


def test_outputs_are_sharded_if_only_parameters_have_names():
    class Named(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp"))
            self.table = nnx.Param(init(rngs.params(), (WIDTH, WIDTH)))
            self.up = nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs)

        def encode(self, x):
            return x @ self.table[...]

        def __call__(self, x):
            return self.up(self.encode(x))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specs = _specs(_abstract(mp.from_nnx(Named), mp.fsdp()))
    assert len(specs) >= 3, "two modules with three methods"
    assert set(specs) == {P(BATCH_AXES, None, None)}


def test_unconstrained_functions_cause_a_warning():
    def init(key):
        return {"up": jax.random.normal(key, (WIDTH, MLP))}

    def free(params, x):
        return jnp.tanh(x @ params["up"]) @ params["up"].T

    def constrained(params, x):
        return mp.constrain(jnp.tanh(x @ params["up"]), "batch", None, "act_mlp") @ params["up"].T

    with pytest.warns(UserWarning, match=r"`up`.*`fsdp`.*mp.constrain"):
        mp.train_step(_loss).trace(_abstract(mp.from_functions(init, free)), X)
    mp.train_step(_loss).trace(_abstract(mp.from_functions(init, constrained)), X)
    once = mp.train_step(_loss, accumulate=2, reduce_gradients="once")
    once.trace(_abstract(mp.from_functions(init, free)), X)
    mp.train_step(_loss).trace(_abstract(mp.from_functions(init, free), mp.ddp(), mp.MeshSpec(data=-1).build()), X)


# ---------------------------------------------------------------------------------------------------------------------
# Constraints in the model: Flax's logical names and jax's specs
# ---------------------------------------------------------------------------------------------------------------------


class LogicallyConstrained(nn.Module):
    """Constrains its activations like Flax's examples."""

    names: tuple[str | None, ...]

    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.normal(), ("embed", "mlp"))
        x = nn.with_logical_constraint(nn.Dense(MLP, kernel_init=init)(x), self.names)
        return nn.Dense(WIDTH)(x)


@pytest.mark.parametrize(
    ("names", "rules", "spec"),
    [
        (("batch", None, "act_mlp"), None, P("fsdp", None, "tensor")),
        (("rows", None, "up"), [("rows", "fsdp"), ("up", None)], P("fsdp", None, None)),
        (("batch", None, "act_mlp"), [("act_mlp", None)], P("fsdp", None, None)),
        (("rows", None, None), None, "`rows`"),
    ],
)
def test_linen_logical_constraints_follow_the_rules(names, rules, spec):
    mesh = mp.MeshSpec(fsdp=4, tensor=2).build()
    model = mp.from_linen(LogicallyConstrained(names), jax.ShapeDtypeStruct(X.shape, X.dtype))
    with contextlib.nullcontext() if rules is None else nn.logical_axis_rules(rules):
        state = _abstract(model, mp.fsdp() | mp.tensor_parallel(), mesh)
        if isinstance(spec, str):
            with raises("unknown-name", spec):
                _specs(state)
        else:
            assert spec in _specs(state)


@pytest.mark.parametrize(
    ("kind", "accumulate"), cases(("nnx", 1), grid=[("nnx", 1), ("nnx", 2), ("linen", 1), ("linen", 2)])
)
def test_precision_rule_sets_the_dtype_of_modules(kind, accumulate):
    options = {"accumulate": accumulate, "reduce_gradients": "once"} if accumulate > 1 else {}
    rules = mp.Rules(precision={r"block\d/up": "float32"})
    assert mp.Rules.from_json(rules.to_json()) == rules == eval(repr(rules), {"Rules": mp.Rules})
    state = _abstract(MODELS[kind](), FSDP | rules)
    step = mp.train_step(_bf16_loss, precision=BF16, **options)
    dtypes = {}  # of the operands, by output width
    for _, eqn in products(step.trace(state, X).jaxpr.jaxpr):
        dtypes.setdefault(eqn.outvars[0].aval.shape[-1], set()).update(x.aval.dtype.name for x in eqn.invars)
    assert dtypes[MLP] >= {"float32"}, "up"
    assert "bfloat16" in dtypes[WIDTH], "down and out"
    execution = step.describe(state, X)
    dtypes = [execution.compute_dtype(state.table[f"block1/{name}/kernel"]).name for name in ("up", "down")]
    assert dtypes == ["float32", "bfloat16"]


# ---------------------------------------------------------------------------------------------------------------------
# Remat rules
# ---------------------------------------------------------------------------------------------------------------------


class LinenNoisy(nn.Module):
    """Has batch statistics, random numbers, sown values, checkpoint names and arguments that are not arrays."""

    @nn.compact
    def __call__(self, x, *, scale=None, trains=False):
        assert trains is True
        assert scale is None
        h = nn.Dense(MLP, name="up")(nn.BatchNorm(use_running_average=False)(x))
        h = nn.Dense(WIDTH, name="down")(nn.gelu(checkpoint_name(h, "hidden")))
        self.sow("losses", "aux", h.mean())
        return x + nn.Dropout(0.1, deterministic=False)(h)


class LinenDeep(nn.Module):
    @nn.compact
    def __call__(self, x):
        for index in range(2):
            x = LinenNoisy(name=f"blocks_{index}")(x, trains=True)
        return nn.Dense(WIDTH, name="out")(x)


class NnxNoisy(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, MLP, rngs=rngs), nnx.Linear(MLP, WIDTH, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, *, scale=None, trains=False):
        assert trains is True
        assert scale is None
        return x + self.drop(self.down(nnx.gelu(checkpoint_name(self.up(self.norm(x)), "hidden"))))


class NnxDeep(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NnxNoisy(rngs) for _ in range(2)])
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x, trains=True)
        return self.out(x)


DEEP = {"linen": lambda: mp.from_linen(LinenDeep(), X), "nnx": lambda: mp.from_nnx(NnxDeep)}


def _deep_loss(model, batch, key):
    kwargs = {"rngs": {"dropout": key}} if isinstance(model, adapters.BoundLinen) else {}
    return _mean((model(batch, **kwargs) - batch) ** 2), {}


def _num_remats(jaxpr) -> int:
    return sum(eqn.primitive.name in ("checkpoint", "remat2") for eqn, _ in equations(jaxpr))


@pytest.mark.parametrize(
    ("rules", "compute", "code", "where"),
    [
        ({"activations": {"blok/0/up": ("batch", None, None)}}, None, "not-found", "`blok/0/up`"),
        ({"activations": {"blocks/0/up": ("batch", None)}}, None, "wrong-shape", "`blocks/0/up` for module"),
        ({"activations": {"out": ("batch", "seqq", None)}}, None, "unknown-name", "`seqq`"),
        ({"precision": {"upp": "float32"}}, "bfloat16", "unknown-name", "`upp`"),
        ({"precision": {"blocks/0/up": "float32"}}, None, "wrong-dtype", "`blocks/0/up`"),
        ({"precision": {"blocks/0/up": "bfloat16"}}, "bfloat16", "wrong-dtype", "`blocks/0/up`"),
        ({"precision": {"blocks/0/up": "float64"}}, "bfloat16", "unsupported-feature", "`blocks/0/up`"),
        ({"remat": {"blocks.7": "full"}}, None, "not-found", "remat rule `blocks.7`"),
        ({"remat": {"blocks.0": "ful"}}, None, "unknown-choice", ""),
        ({"remat": {"blocks.0": "save:hiden"}}, None, "unknown-name", ""),
        ({"remat": {"blocks.0": "dots+offload:hiden"}}, None, "unknown-name", ""),
    ],
)
def test_rule_without_effect_is_an_error(rules, compute, code, where):
    state = _abstract(DEEP["nnx"](), FSDP | mp.Rules(**rules))
    with raises(code, where):
        mp.train_step(_deep_loss, precision=mp.Precision(compute=compute)).trace(state, X)


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ({"activations": {"out": "batch"}}, "wrong-type"),
        ({"activations": {"(": None}}, "bad-syntax"),
        ({"activations": []}, "wrong-type"),
        ({"precision": {"up": "fp8"}}, "unknown-choice"),
        ({"remat": {"out": 3}}, "wrong-type"),
    ],
)
def test_invalid_rule_for_modules_is_an_error(rules, code):
    with raises(code):
        mp.Rules(**rules)


@pytest.mark.parametrize("kind", ["nnx", LINEN])
def test_remat_rules_recompute_each_module_once(kind):
    rules = mp.Rules(remat={"blocks.0": "full"}) | mp.Rules(remat={"blocks.1": "dots", "out": None})
    assert mp.Rules.from_json(rules.to_json()) == rules == eval(repr(rules), {"Rules": mp.Rules})
    assert _num_remats(mp.train_step(_deep_loss).trace(_abstract(DEEP[kind](), FSDP | rules), X).jaxpr) == 2


class NnxInvalid(nnx.Module):
    """Returns a string, or changes attributes that are not variables."""

    def __init__(self, rngs, kind):
        self.up, self.kind, self.calls = nnx.Linear(WIDTH, WIDTH, rngs=rngs), kind, 0

    def __call__(self, x):
        self.calls += self.kind == "calls"
        if self.kind == "mean":
            self.mean = x.mean()
        return self.up(x), "named" if self.kind == "string" else None


class NnxOuter(nnx.Module):
    def __init__(self, rngs, kind):
        self.inner = NnxInvalid(rngs, kind)

    def __call__(self, x):
        return self.inner(x)[0]


class LinenInvalid(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x), "named"


class LinenOuter(nn.Module):
    @nn.compact
    def __call__(self, x):
        return LinenInvalid(name="inner")(x)[0]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "code"),
    [("calls", "unsupported-feature"), ("mean", "unsupported-feature"), ("string", "wrong-type"),
     ("linen", "wrong-type")],
)  # fmt: skip
def test_remat_of_unsupported_module_is_refused(kind, code):
    model = mp.from_linen(LinenOuter(), X) if kind == "linen" else mp.from_nnx(lambda rngs: NnxOuter(rngs, kind))
    for rules in (mp.Rules(), mp.Rules(remat={"inner/Dense_0" if kind == "linen" else "inner/up": "full"})):
        mp.train_step(_deep_loss).trace(_abstract(model, FSDP | rules), X)
    with raises(code, "remat rule for `inner`"):
        mp.train_step(_deep_loss).trace(_abstract(model, FSDP | mp.Rules(remat={"inner": "full"})), X)


@pytest.mark.matrix
@pytest.mark.call_stacks
@pytest.mark.parametrize("policy", ["full", "dots", "save:hidden"])
@pytest.mark.parametrize("kind", DEEP)
def test_remat_rules_save_memory_and_keep_results(kind, policy):
    """Batch statistics, random numbers and sown values are as in a single forward pass."""
    results, batch = [], np.tile(X, (4, 8, 1))  # more activations than weights
    for rules in (mp.Rules(), mp.Rules(remat={r"blocks.\d": policy})):
        state, step = _state(DEEP[kind](), FSDP | rules), mp.train_step(_deep_loss)
        report = mp.explain(step, state.setup.abstract, batch)
        assert report.is_as_expected, str(report)
        assert not re.search(r"(blocks.\d).*/\1", str(report)), "a path occurs twice in a name"
        losses = []
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        results.append((losses, jax.device_get(state.extra), report.memory.temporaries_bytes))
    (losses, extra, saved_bytes), (remat_losses, remat_extra, remat_bytes) = results
    np.testing.assert_allclose(remat_losses, losses, rtol=1e-6)  # float32; fusions differ
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), remat_extra, extra)
    assert remat_bytes < saved_bytes


@pytest.mark.matrix
@pytest.mark.call_stacks
@pytest.mark.parametrize("layout", ["fsdp", "once"])
@pytest.mark.parametrize("linen", [False, True])
def test_remat_rules_apply_inside_scanned_layers(linen, layout):
    model = _decoder(linen, num_layers=4)
    options = {"accumulate": 2, "reduce_gradients": "once"} if layout == "once" else {}
    num_remats, metrics = [], []
    for rules in (mp.Rules(), mp.Rules(remat={"layers/mlp": "full", "layers/.*_norm": "full"})):
        state = _state(model, FSDP | rules)
        step = mp.train_step(mp.models.next_token_loss, **options)
        num_remats.append(_num_remats(step.trace(state, TOKENS).jaxpr))
        assert mp.explain(step, state.setup.abstract, TOKENS).is_as_expected
        results = step(state, TOKENS)[1]
        metrics.append((float(results["loss"]), float(results["grad_norm"])))
    assert num_remats[1] > num_remats[0]
    np.testing.assert_allclose(metrics[1], metrics[0], rtol=1e-6)  # float32; fusions differ
    if layout == "fsdp":
        state = _abstract(model, FSDP | mp.Rules(precision={".*": "float32"}), mp.MeshSpec(fsdp=8).abstract())
        with pytest.raises(mp.MeshparError, match=r"precision rule `\.\*`"):
            mp.train_step(mp.models.next_token_loss, precision=BF16).trace(state, TOKENS)


@pytest.mark.matrix
@pytest.mark.parametrize("linen", [False, True])
def test_precision_rules_apply_inside_scanned_layers(linen):
    """The carry of the scan keeps the compute dtype of the step."""
    model, losses = _decoder(linen, num_layers=2), []
    for rules in (mp.Rules(), mp.Rules(precision={"layers/(mlp|.*_norm)": "float32"})):
        step = mp.train_step(mp.models.next_token_loss, precision=BF16)
        losses.append(float(step(_state(model, FSDP | rules), TOKENS)[1]["loss"]))
    assert losses[0] != losses[1]
    np.testing.assert_allclose(*losses, rtol=1e-2)  # bfloat16 keeps 8 bits


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_partition_specs_in_the_model_use_the_mesh(kind):
    def with_layout(x):
        return jax.lax.with_sharding_constraint(x, P("fsdp", None, None))

    class LinenBare(nn.Module):
        @nn.compact
        def __call__(self, x):
            return with_layout(nn.Dense(WIDTH)(with_layout(x)))

    class NnxBare(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return with_layout(self.dense(with_layout(x)))

    model = mp.from_linen(LinenBare(), X) if kind == "linen" else mp.from_nnx(NnxBare)
    state = _state(model)
    assert _specs(state).count(P("fsdp", None, None)) >= 3
    state, metrics = mp.train_step(_loss)(state, X)
    assert np.isfinite(metrics["loss"])


def test_logical_axis_rules_shard_parameters_and_activations():
    pairs = [("rows", "data"), ("rows", "fsdp"), ("mlp", "model"), ("up", "model"), ("embed", "fsdp"), ("seq2", None)]
    rules = mp.Rules.from_logical_axis_rules(pairs, axes={"model": "tensor"}, batch="rows")
    model = mp.from_linen(LogicallyConstrained(("rows", "seq2", "up")), jax.ShapeDtypeStruct(X.shape, X.dtype))
    losses = []
    for mesh in (mp.MeshSpec(data=2, fsdp=2, tensor=2).build(), mp.MeshSpec().build(jax.devices()[:1])):
        state = _state(model, rules, mesh)
        assert state.table["Dense_0/kernel"].spec == P("fsdp", "tensor")
        if mesh.size > 1:
            assert P("data", None, "tensor") in _specs(state)
        step = mp.train_step(_loss)
        for _ in range(2):
            state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("is_last", [True, False])
def test_last_activation_rule_that_matches_wins(is_last):
    patterns = {r"block\d/.*": ("batch", None, None), r"block\d/up": ("batch", None, "act_mlp")}
    rules = mp.Rules(activations=patterns if is_last else dict(reversed(patterns.items())))
    strategy = FSDP | _activation_rules(act_mlp="tensor") | rules
    if not is_last:  # no activation is sharded over `tensor`
        with raises("unmatched-rule", "`tensor`"):
            _specs(_abstract(MODELS["nnx"](), strategy, mp.MeshSpec(fsdp=4, tensor=2).build()))
        return
    specs = _specs(_abstract(MODELS["nnx"](), strategy, mp.MeshSpec(fsdp=4, tensor=2).build()))
    assert specs.count(P(BATCH_AXES, None, "tensor")) == 4
