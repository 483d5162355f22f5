"""What each strategy sends, in closed form, against programs compiled for eight H100s and for eight CPU devices."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.ledger.census import census
from meshpar.ledger.pod import PodProcess
from meshpar.ledger.program import compile_here
from meshpar.ledger.promise import SMALL, hold, promised
from meshpar.ledger.target import require_aot
from meshpar.models import TransformerConfig, next_token_loss

L, D, F, V = 4, 256, 768, 512
B, T = 32, 64
CONFIG = TransformerConfig(
    vocab_size=V, num_layers=L, embed_dim=D, num_heads=8, num_kv_heads=8, head_dim=D // 8, mlp_dim=F
)
LAYER = 4 * D * D + 3 * D * F + 2 * D
"""Parameters of a layer: query, key, value and out; gate, up and down; two norms."""
REST = 2 * V * D + D
"""The embedding, the head, the last norm."""
ALL = L * LAYER + REST
LAYER_LEAVES, OTHER_LEAVES = 9, 3
LEAVES = L * LAYER_LEAVES + OTHER_LEAVES
BF16, F32 = 2, 4

CASES = {
    "ddp": (mp.ddp(), {"data": 8}),
    "zero1": (mp.zero1(), {"fsdp": 8}),
    "zero2": (mp.zero2(), {"fsdp": 8}),
    "zero3": (mp.zero3(), {"fsdp": 8}),
    "hsdp": (mp.hsdp(), {"data": 2, "fsdp": 4}),
    "two axes": (mp.fsdp(axis=("data", "fsdp")), {"data": 2, "fsdp": 4}),
    "tensor": (mp.ddp() | mp.tensor_parallel(), {"tensor": 8}),
    "sequence": (mp.ddp() | mp.tensor_parallel(sequence=True), {"tensor": 8}),
    "ddp x tensor": (mp.ddp() | mp.tensor_parallel(), {"data": 4, "tensor": 2}),
    "fsdp x tensor": (mp.fsdp() | mp.tensor_parallel(), {"fsdp": 4, "tensor": 2}),
    "fsdp x sequence": (mp.fsdp() | mp.tensor_parallel(sequence=True), {"fsdp": 4, "tensor": 2}),
}


def ring(n: int) -> float:
    """Share of a payload that a device sends in a gather or a scatter among n (FACTS: (N-1)/N)."""
    return (n - 1) / n


def closed_form(case: str, *, on_cpu: bool) -> dict[tuple[str, str], tuple[int, float]]:
    """(axes, kind) -> (arrays a step, bytes a device sends a step), written down from the formulas.

    XLA:CPU sends float32 for bfloat16, an all-reduce for a reduce-scatter (twice the bytes), and reduces each of the
    gradients of a shared input by itself (three in attention, two in the MLP) instead of their sum.
    """
    compute = F32 if on_cpu else BF16
    scatter = 2 if on_cpu else 1
    n = 8
    if case == "ddp":
        return {("data", "all-reduce"): (LEAVES, 2 * ring(n) * F32 * ALL)}
    if case in ("zero1", "zero2"):
        return {
            ("fsdp", "reduce-scatter"): (LEAVES, scatter * ring(n) * F32 * ALL),
            ("fsdp", "all-gather"): (LEAVES, ring(n) * F32 * ALL),
        }
    # Outside the loop over layers the backward pass uses what the forward pass gathered; XLA:CPU gathers the last
    # norm's scale again.
    gathers = 2 * L * LAYER_LEAVES + OTHER_LEAVES + on_cpu
    gathered = compute * (2 * L * LAYER + REST + D * on_cpu)
    if case in ("zero3", "two axes"):
        label = "fsdp" if case == "zero3" else "data*fsdp"
        return {
            (label, "all-gather"): (gathers, ring(n) * gathered),
            (label, "reduce-scatter"): (LEAVES, scatter * ring(n) * F32 * ALL),
        }
    if case == "hsdp" and not on_cpu:
        return {
            ("fsdp", "all-gather"): (gathers, ring(4) * gathered),
            ("fsdp", "reduce-scatter"): (LEAVES, ring(4) * F32 * ALL),
            ("data", "all-reduce"): (LEAVES, 2 * ring(2) * F32 * ALL / 4),
        }
    if case == "hsdp":
        # The gradients of the embedding and of the norms are summed over both axes at once.
        once = V * D + D + 2 * L * D
        return {
            ("fsdp", "all-gather"): (gathers, ring(4) * gathered),
            ("fsdp", "reduce-scatter"): (LEAVES - 2 - 2 * L, 2 * ring(4) * F32 * (ALL - once)),
            ("data", "all-reduce"): (LEAVES - 2 - 2 * L, 2 * ring(2) * F32 * (ALL - once) / 4),
            ("data*fsdp", "all-reduce"): (2 + 2 * L, 2 * ring(8) * F32 * once),
        }
    ways, rows = (8, B) if case in ("tensor", "sequence") else (2, B // 4)
    activation, token = compute * rows * T * D, F32 * rows * T
    forward, backward = 2 * L + 1, (5 * L if on_cpu else 2 * L) + 1
    norms = (2 * L + 1) * D
    found: dict[tuple[str, str], tuple[int, float]] = {}
    if "sequence" not in case:
        # Two a layer and direction (Megatron's g and f), the embedding's result, the gradient of the head's input;
        # three numbers a token for the loss over a split vocabulary.
        sums = forward + backward
        found["tensor", "all-reduce"] = (sums + 3, 2 * ring(ways) * (sums * activation + 3 * token))
    else:
        # Each all-reduce becomes a scatter and a gather, but for the lookup, whose result is summed whole.
        small = 2 * ring(ways) * (activation + 3 * token)
        split = ring(4) if case.startswith("fsdp") else 0
        norm_bytes = 2 * ring(ways) * F32 * norms / (4 if split and not on_cpu else 1)
        reduces, reduced = 1 + 3 + len_norms(), small + norm_bytes
        scatters = forward - 1 + 2 * L + 1
        if on_cpu:  # the sums of several gradients are not scattered
            scatters -= 2 * L
            reduces += 5 * L
            reduced += 2 * ring(ways) * 5 * L * activation
        found["tensor", "all-reduce"] = (reduces, reduced)
        found["tensor", "reduce-scatter"] = (scatters, scatter * ring(ways) * scatters * activation)
        found["tensor", "all-gather"] = (4 * L + 2, ring(ways) * (4 * L + 2) * activation)
    # Of a weight that `tensor` splits, half is gathered, scattered and reduced.
    halved, whole = L * (LAYER - 2 * D) + 2 * V * D, norms
    if case == "ddp x tensor":
        found["data", "all-reduce"] = (LEAVES, 2 * ring(4) * F32 * (halved / 2 + whole))
    if case.startswith("fsdp"):
        twice = compute * (2 * L * ((LAYER - 2 * D) / 2 + 2 * D) + V * D + D + D * on_cpu)
        found["fsdp", "all-gather"] = (gathers, ring(4) * twice)
        found["fsdp", "reduce-scatter"] = (LEAVES, scatter * ring(4) * F32 * (halved / 2 + whole))
    return found


def len_norms() -> int:
    """Norm scales, whose gradients are partial where the sequence is split."""
    return 2 * L + 1


@pytest.fixture(scope="module")
def pod():
    try:
        require_aot("h100:1x8")
    except mp.MeshparError as error:
        pytest.skip(str(error))
    with PodProcess() as process:
        yield process


@pytest.fixture(scope="module")
def compiled(request):
    """(setup, options, census) of a decoder's step, for a pod or here; each compiled once."""
    known = {}

    def one(target, strategy, axes, config=CONFIG, **options):
        key = (target, str(strategy), str(axes), str(config), str(options))
        if key not in known:
            spec = mp.MeshSpec(**axes)
            mesh = spec.build() if target == "cpu" else spec.abstract()
            state = mp.abstract_state(config.build(), optax.adam(1e-3), mesh=mesh, strategy=strategy)
            step = mp.train_step(next_token_loss, precision=mp.Precision(compute="bfloat16"), **options)
            traced = step.trace(state, BATCH)
            program = (
                compile_here(traced) if target == "cpu" else request.getfixturevalue("pod").compile(traced, target)
            )
            known[key] = state.setup, step.options, census(program.module, mesh)
        return known[key]

    return one


BATCH = {name: jax.ShapeDtypeStruct((B, T), np.int32) for name in ("inputs", "targets")}
EXTRA = ("two axes", "ddp x tensor")
"""Beyond the table every reader knows: long."""
TABLE = [
    pytest.param(case, target, marks=[*[pytest.mark.matrix] * (case in EXTRA), *[pytest.mark.pod] * (target != "cpu")])
    for case in CASES
    for target in ("cpu", "h100:1x8")
]
TARGETS = ["cpu", pytest.param("h100:1x8", marks=pytest.mark.pod)]


def verdict(setup, options, collectives, target, batch=BATCH):
    promises = promised(setup, options, batch, on_cpu=target == "cpu")
    return hold(promises, collectives, micro_steps=options.accumulate)


def elements(one):
    return sum(array.size for array in one.arrays) * (one.group_size if one.kind == "all-gather" else 1)


@pytest.mark.parametrize(("case", "target"), TABLE)
def test_a_strategy_sends_what_the_formulas_say(compiled, case, target):
    """The first table of the field: what is split decides what is sent; kinds, counts, and bytes to 1 %."""
    setup, options, collectives = compiled(target, *CASES[case])
    found = verdict(setup, options, collectives, target)
    assert not found.missing
    assert not found.surprise
    expected = closed_form(case, on_cpu=target == "cpu")
    counts, sent = {}, {}
    for line in found.kept:
        key = "*".join(line.axes), line.kind
        counts[key] = counts.get(key, 0) + line.found_count
        sent[key] = sent.get(key, 0.0) + line.found_bytes
        assert line.count[0] <= line.found_count <= line.count[1]
    if case == "fsdp x sequence" and ("fsdp*tensor", "all-reduce") in counts:
        # Older GPU compilers do not scatter what is as small as a norm's scale: they sum it over both axes at once.
        assert counts.pop(("fsdp*tensor", "all-reduce")) == len_norms()
        assert sent.pop(("fsdp*tensor", "all-reduce")) <= 2 * F32 * len_norms() * D
        counts["fsdp", "reduce-scatter"] += len_norms()
        counts["tensor", "all-reduce"] += len_norms()
    assert counts == {key: count for key, (count, _) in expected.items()}
    for key, (_, expected_bytes) in expected.items():
        assert sent[key] == pytest.approx(expected_bytes, rel=0.01), key
    # Nothing was left out of the account but numbers of the size of a loss.
    total = sum(one.bytes_sent_per_step for one in collectives)
    assert sum(line.found_bytes for line in (*found.kept, *found.small)) == pytest.approx(total)
    assert all(line.bytes_sent_per_device / line.found_count <= 2 * F32 * SMALL for line in found.small)


@pytest.mark.parametrize(("case", "target"), TABLE)
def test_promised_bytes_are_the_found_ones(compiled, case, target):
    """Within 1 %, in the kind the program spells it with."""
    for line in verdict(*compiled(target, *CASES[case]), target).kept:
        spelled = 2 if (line.kind, line.spelled) == ("reduce-scatter", "all-reduce") else 1
        assert line.found_bytes == pytest.approx(spelled * line.bytes_sent_per_device, rel=0.01), line


def test_the_cpu_says_how_it_spells_a_reduce_scatter(compiled):
    lines = verdict(*compiled("cpu", *CASES["zero3"]), "cpu").kept
    assert {(line.kind, line.spelled) for line in lines} == {("all-gather", ""), ("reduce-scatter", "all-reduce")}


OPTIONS = {
    "accumulate each": {"accumulate": 2},
    "as many micro-steps as layers": {"accumulate": L},
    "accumulate once": {"accumulate": 2, "accumulate_mode": "once"},
    "remat full": {"remat": "full"},
    "remat dots": {"remat": "dots"},
}


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("zero1", "accumulate each"),
        ("zero3", "as many micro-steps as layers"),
        ("fsdp x sequence", "accumulate once"),
        ("fsdp x sequence", "remat full"),
    ],
)
def test_options_of_the_step_are_part_of_the_promise(compiled, case, options):
    found = verdict(*compiled("cpu", *CASES[case], **OPTIONS[options]), "cpu")
    assert not found.missing
    assert not found.surprise


@pytest.mark.matrix
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", ["ddp", "zero1", "zero3", "hsdp", "fsdp x tensor", "fsdp x sequence"])
def test_every_option_under_every_strategy(compiled, case, options, target):
    found = verdict(*compiled(target, *CASES[case], **OPTIONS[options]), target)
    assert not found.missing
    assert not found.surprise


def test_each_micro_step_reduces_and_gathers(compiled):
    """Reduction in every micro-step costs so many times the bytes of one after the loop."""
    each = verdict(*compiled("cpu", *CASES["zero3"], accumulate=2), "cpu")
    once = verdict(*compiled("cpu", *CASES["zero3"], accumulate=2, accumulate_mode="once"), "cpu")

    def sent(found, kind):
        return sum(line.found_count for line in found.kept if line.kind == kind)

    assert sent(each, "reduce-scatter") == 2 * sent(once, "reduce-scatter") == 2 * LEAVES
    assert sent(each, "all-gather") > 3 * L * LAYER_LEAVES
    assert sent(once, "all-gather") == LEAVES


VARIANTS = {
    "tied": dataclasses.replace(CONFIG, tied_embeddings=True),
    "grouped query": dataclasses.replace(CONFIG, num_kv_heads=2),
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("case", ["fsdp x tensor", pytest.param("fsdp x sequence", marks=pytest.mark.matrix)])
def test_shapes_of_the_decoder_are_part_of_the_promise(compiled, case, config):
    found = verdict(*compiled("cpu", *CASES[case], config=config), "cpu")
    assert not found.missing
    assert not found.surprise


def test_another_strategys_program_breaks_the_promise(compiled):
    """zero3's promise against ddp's program: nothing is gathered, and the gradients' sums are a surprise."""
    setup, options, _ = compiled("cpu", *CASES["zero3"])
    _, _, collectives = compiled("cpu", *CASES["ddp"])
    moved = tuple(dataclasses.replace(one, axes=("fsdp",)) for one in collectives)
    found = hold(promised(setup, options, BATCH, on_cpu=False), moved)
    assert {(line.role, line.kind) for line in found.missing} >= {
        ("weights before use", "all-gather"),
        ("gradients", "reduce-scatter"),
    }
    assert {one.kind for one in found.surprise} == {"all-reduce"}
    assert any("scattered" in one.fix for one in found.surprise)


def test_nothing_is_promised_on_one_device():
    mesh = mp.MeshSpec().abstract()
    state = mp.abstract_state(CONFIG.build(), optax.adam(1e-3), mesh=mesh, strategy=mp.ddp())
    assert promised(state.setup, mp.train_step(next_token_loss).options, BATCH) == ()


def mlp(num_blocks=2, width=64, hidden=128):
    """Blocks without names: a column-parallel and a row-parallel weight each, split by path rules."""

    def init(key):
        shapes = {"up": (width, hidden), "down": (hidden, width)}
        return {
            f"block_{at}": {
                name: {"kernel": jax.random.normal(jax.random.fold_in(key, at), shape) / 10}
                for name, shape in shapes.items()
            }
            for at in range(num_blocks)
        }

    def apply(params, x):
        for block in params.values():
            x = x + jax.nn.gelu(x @ block["up"]["kernel"]) @ block["down"]["kernel"]
        return x

    return mp.from_functions(init, apply)


def test_a_model_of_plain_functions_is_held_to_its_promise():
    strategy = mp.ddp() | mp.Rules(
        paths={r".*/up/kernel": mp.names(None, "mlp"), r".*/down/kernel": mp.names("mlp", None)}, mlp="tensor"
    )
    mesh = mp.MeshSpec(data=4, tensor=2).build()
    state = mp.abstract_state(mlp(), optax.adam(1e-3), mesh=mesh, strategy=strategy)
    step = mp.train_step(lambda model, batch, key: ((model(batch["x"]) ** 2).mean(), {}))
    batch = {"x": jax.ShapeDtypeStruct((32, 64), np.float32)}
    program = compile_here(step.trace(state, batch))
    found = verdict(state.setup, step.options, census(program.module, mesh), "cpu", batch)
    assert not found.surprise
    assert {(line.role, line.axes) for line in found.kept} >= {("gradients", ("data",))}


def test_json_has_plain_data(compiled):
    import json

    found = verdict(*compiled("cpu", *CASES["hsdp"]), "cpu").to_json()
    assert json.loads(json.dumps(found)) == found
    assert found.keys() >= {"kept", "missing", "surprise"}
