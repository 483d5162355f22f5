"""Names from the flow of dims equal the names that an engineer would write."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import meshpar as mp
from meshpar.inspect.dim_classes import DimClasses
from meshpar.inspect.dim_flow import dim_flow
from meshpar.inspect.proposed_names import ProposedNames, propose_names
from tests.errors import raises
from tests.inspect.adopted_models import EMBED, ConvNet, Decoder, ScannedExperts

IDS = jax.ShapeDtypeStruct((8, 6), np.int32)
TOKENS = jax.ShapeDtypeStruct((8, 6, EMBED), np.float32)


def named(proposed: ProposedNames) -> dict[str, tuple[str | None, ...]]:
    return {leaf.path: leaf.names for leaf in proposed.leaves}


def test_attention_with_shared_keys_and_a_gated_mlp() -> None:
    proposed = propose_names(mp.from_nnx(Decoder), IDS)
    layer = {
        "1/q/kernel": ("embed", "heads"), "1/kv/kernel": ("embed", "kv_heads"), "1/out/kernel": ("heads", "embed"),
        "2/gate/kernel": ("embed", "mlp"), "2/up/kernel": ("embed", "mlp"), "2/down/kernel": ("mlp", "embed"),
        "2/gate/bias": ("mlp",), "2/up/bias": ("mlp",),
    }  # fmt: skip
    assert named(proposed) == {
        **{f"blocks/{number}/{path}": names for number in range(2) for path, names in layer.items()},
        "embed/embedding": ("vocab", "embed"), "head/kernel": ("embed", "vocab"), "head/bias": ("vocab",),
    }  # fmt: skip
    # Two key heads limit the size of `tensor`.
    assert proposed.divisors == {"vocab": 48, "heads": 2, "mlp": 40}
    assert "fused with others" in str(proposed)
    assert proposed.unnamed == (
        "blocks/0/0/scale", "blocks/0/2/down/bias", "blocks/1/0/scale", "blocks/1/2/down/bias", "positions/embedding",
    )  # fmt: skip


def test_rules_have_a_pattern_for_all_layers() -> None:
    proposed = propose_names(mp.from_nnx(lambda rngs: Decoder(rngs, num_layers=3)), IDS)
    rules = proposed.rules()
    assert r"blocks/\d+/1/q/kernel" in rules.patterns
    assert len(rules.patterns) == 11
    model, mesh = mp.from_nnx(Decoder), mp.MeshSpec(fsdp=2, tensor=2).abstract(4)
    table = mp.shardings(model, mesh, mp.fsdp(min_bytes=0) | mp.tensor_parallel() | rules)
    assert table["blocks/1/2/down/kernel"].spec == jax.P("tensor", "fsdp")
    assert not [pattern for pattern in proposed.rules(without=["mlp"]).patterns if "/2/" in pattern]


def test_experts_in_scanned_layers() -> None:
    proposed = propose_names(mp.from_linen(ScannedExperts(), TOKENS), TOKENS)
    assert named(proposed) == {
        "router": ("layers", "embed", "expert"),
        "up": ("layers", "expert", "embed", "mlp"),
        "down": ("layers", "expert", "mlp", "embed"),
    }
    assert proposed.divisors == {"mlp": 40, "expert": 4, "layers": 3}


def test_sorted_tokens_of_experts() -> None:
    def apply(params, x):
        sizes = jnp.full(4, x.shape[0] // 4, np.int32)
        hidden = jax.nn.relu(jax.lax.ragged_dot(x, params["up"], sizes))
        return x + jax.lax.ragged_dot(hidden, params["down"], sizes)

    shapes = {"up": (4, EMBED, 24), "down": (4, 24, EMBED)}
    model = mp.from_functions(lambda key: {name: jnp.zeros(shape) for name, shape in shapes.items()}, apply)
    proposed = propose_names(model, jax.ShapeDtypeStruct((8, EMBED), np.float32))
    assert named(proposed) == {"up": ("expert", "embed", "mlp"), "down": ("expert", "mlp", "embed")}


def test_unequal_pieces_are_not_sharded() -> None:
    """A shard of columns that are sliced into 24 and 16 would have parts of both pieces."""

    def apply(params, x):
        left, right = jnp.split(x @ params["columns"], [24], axis=-1)
        return x + left @ params["left"] + right @ params["right"]

    shapes = {"columns": (EMBED, 40), "left": (24, EMBED), "right": (16, EMBED)}
    model = mp.from_functions(lambda key: {name: jnp.zeros(shape) for name, shape in shapes.items()}, apply)
    proposed = propose_names(model, jax.ShapeDtypeStruct((8, EMBED), np.float32))
    assert proposed.leaves == ()


def test_channels_inside_a_residual_block() -> None:
    images = jax.ShapeDtypeStruct((8, 8, 8, 3), np.float32)
    proposed = propose_names(mp.from_linen(ConvNet(), images), images)
    assert named(proposed) == {
        "up/kernel": (None, None, "embed", "mlp"), "up/bias": ("mlp",), "norm/scale": ("mlp",), "norm/bias": ("mlp",),
        "down/kernel": (None, None, "mlp", "embed"),
    }  # fmt: skip
    assert proposed.divisors == {"mlp": 8}  # the groups of the norm


def test_layers_of_different_kinds_have_patterns_of_their_own() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for number, width in enumerate((24, 24, 8)):
                x = x + nn.Dense(EMBED, name=f"down_{number}")(nn.relu(nn.Dense(width, name=f"up_{number}")(x)))
            return x + nn.Dense(EMBED, name="up_3")(x)

    proposed = propose_names(mp.from_linen(Net(), TOKENS), TOKENS)
    patterns = [pattern for pattern in proposed.rules().patterns if pattern.endswith("kernel")]
    assert patterns == [r"down_\d+/kernel", "up_0/kernel", "up_1/kernel", "up_2/kernel"]


def test_a_model_without_matmuls_is_refused() -> None:
    model = mp.from_functions(lambda key: {"scale": jnp.ones(4)}, lambda params, x: x * params["scale"])
    with raises("not-found"):
        propose_names(model, jax.ShapeDtypeStruct((8, 4), np.float32))


@pytest.mark.parametrize(
    "control",
    [
        lambda w, x: jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x - x @ w, x),
        lambda w, x: jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: x @ w, x),
        lambda w, x: jax.lax.fori_loop(0, 3, lambda i, x: x @ w, x),
        lambda w, x: jax.checkpoint(lambda x: jax.nn.relu(x @ w))(x) + x,
        lambda w, x: x.at[:, 0].set(1.0) @ w + jnp.concatenate([x, x], -1)[:, :4],
    ],
    ids=["cond", "while", "scan", "checkpoint", "scatter"],
)
def test_control_flow_keeps_dims(control) -> None:
    """In each function, input and output of the matrix have the same class."""
    args = jnp.zeros((4, 4)), jnp.zeros((3, 4))
    flow = dim_flow(jax.make_jaxpr(control)(*args), 1, 1)
    rows, columns = map(flow.classes.resolved, flow.params[0])
    assert rows == columns == flow.classes.resolved(flow.inputs[0][1])
    assert rows != flow.classes.resolved(flow.inputs[0][0])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_reshapes_keep_the_order_of_atoms(shape: list[int], data: st.DataObject) -> None:
    """A reshape into any grouping of the dims, and back, returns the same atoms."""
    classes = DimClasses()
    dims = classes.new_dims(shape)
    cut = sorted(data.draw(st.sets(st.integers(1, max(len(shape) - 1, 1)))))
    bounds = [0, *(x for x in cut if x < len(shape)), len(shape)]
    grouped = [int(np.prod(shape[a:b])) for a, b in itertools.pairwise(bounds)]
    merged = classes.reshaped(dims, grouped)
    assert [classes.size(dim) for dim in merged] == grouped
    again = classes.reshaped(merged, shape)
    assert [classes.resolved(dim) for dim in again] == [classes.resolved(dim) for dim in dims]
