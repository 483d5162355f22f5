"""Activations of models that lay nothing out: held where modules hand them on, by the batch or by rules."""

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
from meshpar.inspect.expected import facts_of
from meshpar.layers.precision import products
from meshpar.sharding import adapters
from tests.grid import cases
from tests.linen_decoder import linen_model

WIDTH, MLP, ROWS = 64, 128, 16
X = np.random.default_rng(0).normal(size=(ROWS, 4, WIDTH)).astype(np.float32)
FSDP = mp.fsdp(min_bytes=0)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(MLP, name="up")(x)))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for at in range(2):
            x = LinenBlock(name=f"block{at}")(x)
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


def _mean(x):
    return mp.MeanLoss(x.sum(), x.size)


def _state(model, strategy=FSDP, mesh=None):
    mesh = mp.MeshSpec(fsdp=-1).build() if mesh is None else mesh
    return mp.init_state(model, optax.sgd(0.1), mesh=mesh, strategy=strategy, key=0)


def _abstract(model, strategy=FSDP, mesh=None):
    mesh = mp.MeshSpec(fsdp=-1).build() if mesh is None else mesh
    return mp.abstract_state(model, optax.sgd(0.1), mesh=mesh, strategy=strategy)


def _specs(state, loss=_loss, **options) -> list[P]:
    """Specs of the constraints on activations that a traced step has."""
    jaxpr = mp.train_step(loss, **options).trace(state, X).jaxpr
    found: list[P] = []

    def walk(inner) -> None:
        for eqn in inner.eqns:
            if eqn.primitive.name == "sharding_constraint" and eqn.outvars[0].aval.shape[:2] == X.shape[:2]:
                found.append(eqn.params["sharding"].spec)
            for one in jax.tree.leaves(
                tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                if hasattr(one, "eqns") or hasattr(one, "jaxpr"):
                    walk(getattr(one, "jaxpr", one))

    walk(jaxpr.jaxpr)
    return found


@pytest.mark.parametrize("kind", ["nnx", LINEN])
def test_what_modules_without_names_give_lies_as_the_batch(kind, monkeypatch):
    state = _state(MODELS[kind]())
    specs = _specs(state)
    assert len(specs) >= 2 * 7 - 1, "what each of seven modules gives, and its gradient"
    assert set(specs) == {P(("data", "fsdp", "expert"), None, None)}
    step = mp.train_step(_loss)
    report = mp.explain(step, state, X)
    assert not report.promise.unexpected
    state, metrics = step(state, X)
    monkeypatch.setattr(adapters, "handed_on", lambda path, out: out)
    alone, left = _state(MODELS[kind]()), mp.train_step(_loss)
    with pytest.warns(UserWarning, match="does not constrain its activations"):
        assert mp.explain(left, alone, X).promise.unexpected
    np.testing.assert_allclose(metrics["loss"], left(alone, X)[1]["loss"], rtol=1e-5)


@pytest.mark.call_stacks
@pytest.mark.parametrize("kind", ["nnx", LINEN])
def test_advice_names_modules_by_the_paths_that_rules_take(kind):
    """A model that nobody can add `constrain` to: what is unexpected stands at a module, and the rule names it."""
    rules = mp.Rules(activations={"block0/up": None, r"block\d": (None, None, "act_mlp")})
    held = mp.custom(params=mp.Rules(), grads=mp.Rules(), optimizer=mp.Rules(), activations=mp.Rules(act_mlp="fsdp"))
    report = mp.explain(mp.train_step(_loss), _abstract(MODELS[kind](), FSDP | held | rules), X)
    advised = [one for one in report.promise.unexpected if one.kind == "all-gather"]
    assert any(re.search(r"/block[01]/(up|down)$", one.module) for one in advised), advised
    assert all("mp.constrain" not in one.fix for one in advised)
    named = {path for one in advised for path in re.findall(r'activations=\{r"(.*?)"', one.fix)}
    assert named <= {"block0", "block0/up", "block0/down", "block1", "block1/up", "block1/down", "out"}, named


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_plain_layers_leave_their_matmuls_as_the_step_sums_them(kind):
    """Flax's layers know nothing of `Precision.reduce`: by themselves they would have it summed in bfloat16."""
    step = mp.train_step(lambda model, x, key: _loss(model, x.astype("bfloat16"), key), precision=mp.Precision(
        compute="bfloat16"))  # fmt: skip
    found = [
        eqn.outvars[0].aval.dtype.name
        for _, eqn in products(step.trace(_abstract(MODELS[kind](), FSDP), X).jaxpr.jaxpr)
        if eqn.outvars[0].aval.ndim == 2
    ]
    assert found == ["float32"] * 5, "of five weights"


@pytest.mark.parametrize("kind", MODELS)
def test_rules_lay_out_what_named_modules_give(kind):
    mesh = mp.MeshSpec(fsdp=4, tensor=2).build()
    given = {r"block\d/up": ("batch", None, "act_mlp"), "block1/down": None}
    rules = mp.Rules(activations=given, paths={r".*up/kernel": ("fsdp", "tensor")})
    strategy = FSDP | mp.custom(
        params=mp.Rules(), grads=mp.Rules(), optimizer=mp.Rules(), activations=mp.Rules(act_mlp="tensor")
    )
    specs = _specs(_abstract(MODELS[kind](), strategy | rules, mesh))
    rows = ("data", "fsdp", "expert")
    assert specs.count(P(rows, None, "tensor")) == 2 * 2, "two modules, forward and backward"
    assert specs.count(P(rows, None, None)) >= 2 * 4 - 1
    assert mp.Rules.from_json(rules.to_json()) == rules
    assert "activations={" in repr(rules)


def test_a_model_that_names_parameters_alone_has_its_activations_held_too():
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
    assert len(specs) >= 3, "of two modules and three methods"
    assert set(specs) == {P(("data", "fsdp", "expert"), None, None)}


def test_an_activation_rule_that_fits_nothing_is_an_error():
    for given, match in (
        ({"blok0/up": ("batch", None, None)}, "`blok0/up`.*none of the 8 modules.*Did you mean `block0/up`"),
        ({"block0/up": ("batch", None)}, "`block0/up` at module.*arrays of 3 dims.*narrow"),
        ({"out": ("batch", "seqq", None)}, "`seqq`"),
    ):
        state = _abstract(MODELS["nnx"](), FSDP | mp.Rules(activations=given))
        with pytest.raises(mp.MeshparError, match=match):
            mp.train_step(_loss).trace(state, X)
    for given, match in (({"out": "batch"}, "one name or None for each dim"), ({"(": None}, "no regular expression"),
                         ([], "`activations` is a list")):  # fmt: skip
        with pytest.raises(mp.MeshparError, match=match):
            mp.Rules(activations=given)


def test_a_model_of_functions_without_names_is_told():
    def init(key):
        return {"up": jax.random.normal(key, (WIDTH, MLP))}

    def free(params, x):
        return jnp.tanh(x @ params["up"]) @ params["up"].T

    def held(params, x):
        return mp.constrain(jnp.tanh(x @ params["up"]), "batch", None, "act_mlp") @ params["up"].T

    with pytest.warns(UserWarning, match=r"1 parameters .`up`, .* split over `fsdp`.*mp.constrain"):
        mp.train_step(_loss).trace(_abstract(mp.from_functions(init, free)), X)
    mp.train_step(_loss).trace(_abstract(mp.from_functions(init, held)), X)
    once = mp.train_step(_loss, accumulate=2, reduce_gradients="once")
    once.trace(_abstract(mp.from_functions(init, free)), X)
    mp.train_step(_loss).trace(_abstract(mp.from_functions(init, free), mp.ddp(), mp.MeshSpec(data=-1).build()), X)


# ---------------------------------------------------------------------------------------------------------------------
# What a model itself says, in Flax's and jax's words
# ---------------------------------------------------------------------------------------------------------------------


class Says(nn.Module):
    """Lays its activations out as Flax's examples do."""

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
        (("rows", None, "wide"), [("rows", "fsdp"), ("wide", None)], P("fsdp", None, None)),
        (("batch", None, "act_mlp"), [("act_mlp", None)], P("fsdp", None, None)),
        (("rows", None, None), None, "`rows`.*no activation rule.*nn.logical_axis_rules"),
    ],
)
def test_logical_constraints_of_flax_are_honoured(names, rules, spec):
    mesh = mp.MeshSpec(fsdp=4, tensor=2).build()
    model = mp.from_linen(Says(names), jax.ShapeDtypeStruct(X.shape, X.dtype))
    with contextlib.nullcontext() if rules is None else nn.logical_axis_rules(rules):
        state = _abstract(model, mp.fsdp() | mp.tensor_parallel(), mesh)
        if isinstance(spec, str):
            with pytest.raises(mp.MeshparError, match=spec):
                _specs(state)
        else:
            assert spec in _specs(state)


@pytest.mark.parametrize(
    ("kind", "accumulate"), cases(("nnx", 1), grid=[("nnx", 1), ("nnx", 2), ("linen", 1), ("linen", 2)])
)
def test_modules_that_rules_name_compute_in_a_wider_dtype(kind, accumulate):
    options = {"accumulate": accumulate, "reduce_gradients": "once"} if accumulate > 1 else {}
    rules = mp.Rules(precision={r"block\d/up": "float32"})
    assert mp.Rules.from_json(rules.to_json()) == rules == eval(repr(rules), {"Rules": mp.Rules})
    state = _abstract(MODELS[kind](), FSDP | rules)
    precision = mp.Precision(compute="bfloat16")
    step = mp.train_step(lambda model, x, key: _loss(model, x.astype("bfloat16"), key), precision=precision, **options)
    found = {}  # dtype of operands by the width of what they give
    for _, eqn in products(step.trace(state, X).jaxpr.jaxpr):
        found.setdefault(eqn.outvars[0].aval.shape[-1], set()).update(x.aval.dtype.name for x in eqn.invars)
    assert found[MLP] >= {"float32"}, "up"
    assert "bfloat16" in found[WIDTH], "down and out"
    facts = facts_of(state.setup, step.options, X)
    dtypes = [facts.compute_dtype(state.table[f"block1/{name}/kernel"]).name for name in ("up", "down")]
    assert dtypes == ["float32", "bfloat16"]


def test_a_rule_of_precision_that_would_change_nothing_is_refused():
    for rules, compute, says in (
        ({"upp": "float32"}, "bfloat16", "matches no module of the"),
        ({"block0/up": "float32"}, None, "take the wider dtype"),
        ({"block0/up": "bfloat16"}, "bfloat16", "take the wider dtype"),
        ({"block0/up": "float64"}, "bfloat16", "jax keeps 32 bits"),
    ):
        state = _abstract(MODELS["nnx"](), FSDP | mp.Rules(precision=rules))
        with pytest.raises(mp.MeshparError, match=says):
            mp.train_step(_loss, precision=mp.Precision(compute=compute)).trace(state, X)
    with pytest.raises(mp.MeshparError, match="no dtype of"):
        mp.Rules(precision={"up": "fp8"})


# ---------------------------------------------------------------------------------------------------------------------
# Made again in the backward pass, by path
# ---------------------------------------------------------------------------------------------------------------------


class LinenNoisy(nn.Module):
    """Keeps statistics, draws random numbers, sows, marks, and takes what is no array."""

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
        for at in range(2):
            x = LinenNoisy(name=f"blocks_{at}")(x, trains=True)
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
    given = {"rngs": {"dropout": key}} if isinstance(model, adapters.BoundLinen) else {}
    return _mean((model(batch, **given) - batch) ** 2), {}


def _remats(jaxpr) -> int:
    inner = (getattr(one, "jaxpr", one) for eqn in jaxpr.eqns for one in jax.tree.leaves(
        tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")))  # fmt: skip
    return sum(eqn.primitive.name in ("checkpoint", "remat2") for eqn in jaxpr.eqns) + sum(
        _remats(one) for one in inner if hasattr(one, "eqns")
    )


@pytest.mark.parametrize("kind", ["nnx", LINEN])
def test_a_remat_rule_that_says_nothing_is_an_error(kind):
    for given, match in (
        ({"blocks.7": "full"}, "remat rule `blocks.7`.*none of the 1. modules.*Did you mean"),
        ({"blocks.0": "ful"}, "remat='ful'.*Did you mean `full`"),
        ({"blocks.0": "save:hiden"}, "remat rule `blocks.0`.*`hiden`.*Did you mean `hidden`"),
    ):
        state = _abstract(DEEP[kind](), FSDP | mp.Rules(remat=given))
        with pytest.raises(mp.MeshparError, match=match):
            mp.train_step(_deep_loss).trace(state, X)
    rules = mp.Rules(remat={"blocks.0": "full"}) | mp.Rules(remat={"blocks.1": "dots", "out": None})
    assert mp.Rules.from_json(rules.to_json()) == rules == eval(repr(rules), {"Rules": mp.Rules})
    assert _remats(mp.train_step(_deep_loss).trace(_abstract(DEEP[kind](), FSDP | rules), X).jaxpr.jaxpr) == 2
    with pytest.raises(mp.MeshparError, match="it is a int"):
        mp.Rules(remat={"out": 3})


class NnxTold(nnx.Module):
    """Gives what is no array, or keeps what is in no variable."""

    def __init__(self, rngs, kind):
        self.up, self.kind, self.calls = nnx.Linear(WIDTH, WIDTH, rngs=rngs), kind, 0

    def __call__(self, x):
        self.calls += self.kind == "calls"
        if self.kind == "mean":
            self.mean = x.mean()
        return self.up(x), "named" if self.kind == "string" else None


class NnxTells(nnx.Module):
    def __init__(self, rngs, kind):
        self.told = NnxTold(rngs, kind)

    def __call__(self, x):
        return self.told(x)[0]


class LinenTells(nn.Module):
    @nn.compact
    def __call__(self, x):
        return LinenTold(name="told")(x)[0]


class LinenTold(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x), "named"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "match"),
    [("calls", "attributes that are no variables"), ("mean", "attributes that are no variables"),
     ("string", "gives a str"), ("linen", "gives a str")],
)  # fmt: skip
def test_what_cannot_be_made_again_is_an_error(kind, match):
    model = mp.from_linen(LinenTells(), X) if kind == "linen" else mp.from_nnx(lambda rngs: NnxTells(rngs, kind))
    for rules in (mp.Rules(), mp.Rules(remat={"told/up": "full"} if kind != "linen" else {"told/Dense_0": "full"})):
        mp.train_step(_deep_loss).trace(_abstract(model, FSDP | rules), X)
    with pytest.raises(mp.MeshparError, match=f"remat rule for `told`.*{match}"):
        mp.train_step(_deep_loss).trace(_abstract(model, FSDP | mp.Rules(remat={"told": "full"})), X)


@pytest.mark.matrix
@pytest.mark.call_stacks
@pytest.mark.parametrize("policy", ["full", "dots", "save:hidden"])
@pytest.mark.parametrize("kind", DEEP)
def test_modules_that_rules_name_are_made_again(kind, policy):
    """Statistics, random numbers and what is sown are those of one forward pass."""
    found, batch = [], np.tile(X, (4, 8, 1))  # more activations than weights
    for rules in (mp.Rules(), mp.Rules(remat={r"blocks.\d": policy})):
        state, step = _state(DEEP[kind](), FSDP | rules), mp.train_step(_deep_loss)
        report = mp.explain(step, state.setup.abstract, batch)
        assert report.is_as_promised, str(report)
        assert not re.search(r"(blocks.\d).*/\1", str(report)), "a path that is written twice"
        losses, held = [], report.memory.temporaries_bytes
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        found.append((losses, held, jax.device_get(state.extra)))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-6)  # float32, fused otherwise
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found[1][2], found[0][2])
    assert found[1][1] < found[0][1], "bytes of temporaries"


@pytest.mark.matrix
@pytest.mark.call_stacks
@pytest.mark.parametrize("layout", ["fsdp", "once"])
@pytest.mark.parametrize("linen", [False, True])
def test_modules_in_layers_of_a_decoder_are_made_again(linen, layout):
    cfg = mp.models.TransformerConfig(
        vocab_size=32, embed_dim=16, num_layers=4, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
    )
    model = linen_model(cfg, ROWS, 8) if linen else cfg.build()
    options = {"accumulate": 2, "reduce_gradients": "once"} if layout == "once" else {}
    mesh, strategy = mp.MeshSpec(fsdp=8), FSDP
    batch = {name: np.arange(ROWS * 8, dtype=np.int32).reshape(ROWS, 8) % 32 for name in ("inputs", "targets")}
    found = []
    for rules in (mp.Rules(), mp.Rules(remat={"layers/mlp": "full", "layers/.*_norm": "full"})):
        state = mp.init_state(model, optax.sgd(0.1), mesh=mesh.build(), strategy=strategy | rules, key=0)
        step = mp.train_step(mp.models.next_token_loss, **options)
        found.append(_remats(step.trace(state, batch).jaxpr.jaxpr))
        assert mp.explain(step, state.setup.abstract, batch).is_as_promised
        state, metrics = step(state, batch)
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert found[2] > found[0]
    np.testing.assert_allclose(found[3], found[1], rtol=1e-6)  # float32, fused otherwise
    state = mp.abstract_state(model, optax.sgd(0.1), mesh=mesh.abstract(), strategy=strategy | mp.Rules(
        precision={".*": "float32"}))  # fmt: skip
    if layout == "fsdp":
        step = mp.train_step(mp.models.next_token_loss, precision=mp.Precision(compute="bfloat16"))
        with pytest.raises(mp.MeshparError, match=r"precision rule `\.\*`.*narrow it"):
            step.trace(state, batch)


@pytest.mark.matrix
@pytest.mark.parametrize("linen", [False, True])
def test_layers_of_a_decoder_compute_in_a_wider_dtype(linen):
    """The residual stream between them stays in the step's dtype, or a scan would not take it."""
    cfg = mp.models.TransformerConfig(
        vocab_size=32, embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
    )
    model = linen_model(cfg, ROWS, 8) if linen else cfg.build()
    losses = []
    for rules in (mp.Rules(), mp.Rules(precision={"layers/(mlp|.*_norm)": "float32"})):
        state = mp.init_state(model, optax.sgd(0.1), mesh=mp.MeshSpec(fsdp=-1).build(), strategy=FSDP | rules, key=0)
        step = mp.train_step(mp.models.next_token_loss, precision=mp.Precision(compute="bfloat16"))
        batch = {name: np.arange(ROWS * 8, dtype=np.int32).reshape(ROWS, 8) % 32 for name in ("inputs", "targets")}
        losses.append(float(step(state, batch)[1]["loss"]))
    assert losses[0] != losses[1]
    np.testing.assert_allclose(*losses, rtol=1e-2)  # bfloat16 keeps 8 bits


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_bare_specs_in_a_model_find_the_mesh(kind):
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


def test_a_list_of_flaxs_rules_lays_out_parameters_and_activations():
    listed = [
        ("rows", "data"),
        ("rows", "fsdp"),
        ("mlp", "model"),
        ("wide", "model"),
        ("embed", "fsdp"),
        ("seq2", None),
    ]
    rules = mp.Rules.from_logical_axis_rules(listed, axes={"model": "tensor"}, batch="rows")
    model = mp.from_linen(Says(("rows", "seq2", "wide")), jax.ShapeDtypeStruct(X.shape, X.dtype))
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
def test_the_last_activation_rule_that_matches_a_module_wins(is_last):
    given = {r"block\d/.*": ("batch", None, None), r"block\d/up": ("batch", None, "act_mlp")}
    rules = mp.Rules(activations=given if is_last else dict(reversed(given.items())))
    strategy = FSDP | mp.custom(
        params=mp.Rules(), grads=mp.Rules(), optimizer=mp.Rules(), activations=mp.Rules(act_mlp="tensor")
    )
    specs = _specs(_abstract(MODELS["nnx"](), strategy | rules, mp.MeshSpec(fsdp=4, tensor=2).build()))
    assert specs.count(P(("data", "fsdp", "expert"), None, "tensor")) == 4 * is_last
