"""Changes that save memory: their order, their text, and the recipes that they apply to."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import meshpar as mp
from meshpar.hardware.clusters import parse_cluster
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.runs.memory_changes import Change, ladders, layouts, named_bytes
from meshpar.runs.recipe import batch_shapes, build_abstract

DECODER = TransformerConfig(
    vocab_size=64, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32, attention="xla"
)
TOKENS = np.zeros((32, 16), np.int32)


def decoder(devices: int = 4, **fields) -> mp.Recipe:
    fields = {"mesh": mp.MeshSpec(fsdp=devices), "strategy": mp.fsdp(prefetch=1), "model": DECODER} | fields
    return mp.Recipe(
        name="decoder", loss=next_token_loss, steps=10, batch_size=8 * devices,
        data=mp.data.ArrayData(arrays={"inputs": TOKENS, "targets": TOKENS}), **fields,
    )  # fmt: skip


def climbed(recipe: mp.Recipe) -> dict[str, tuple[Change, ...]]:
    step, state = build_abstract(recipe, recipe.mesh.abstract(4))
    batch = batch_shapes(recipe)
    found = ladders(recipe, state.setup, step.describe(state, batch), step.trace(state, batch).jaxpr)
    return {ladder[0].kind: ladder for ladder in found}


@pytest.fixture(scope="module")
def found():
    return climbed(decoder(step=mp.StepOptions(remat="minimal")))


def test_every_kind_of_change_is_found(found):
    assert set(found) == {
        "micro-steps", "remat policy", "saved activations", "offloaded activations", "no prefetch",
        "chunked vocabulary", "attention", "low-precision moments", "offloaded optimizer state",
    }  # fmt: skip
    texts = {kind: [change.settings for change in ladder] for kind, ladder in found.items()}
    assert texts["micro-steps"] == [("step.accumulate=2",), ("step.accumulate=4",), ("step.accumulate=8",)]
    assert texts["remat policy"] == [("step.remat=dots",), ("step.remat=full",)]
    assert texts["no prefetch"] == [("strategy=fsdp()",)]
    assert texts["low-precision moments"] == [("optimizer.moments=bfloat16",), ("optimizer.moments=int8",)]
    assert texts["chunked vocabulary"] == [("model.vocab_chunk=16",)]


def test_the_largest_activations_are_recomputed_first_and_attention_last(found):
    sets = [change.fields["step.remat"] for change in found["saved activations"]]
    assert sets[0].startswith("save:")
    names = [set(text.removeprefix("save:").split(",")) for text in sets]
    assert names[0] == {"up", "query", "key", "value", "attention", "attention_out", "mlp_out"}
    assert names[-1] == {"attention"}
    assert all(later < earlier for earlier, later in itertools.pairwise(names))
    remaining = [change.remaining for change in found["saved activations"]]
    assert remaining == sorted(remaining, reverse=True)
    assert remaining[0] == pytest.approx(1 - 32 / (2 * 32 + 4 * 16 + 2 * 8))  # gate: 32 of all features


def test_offloaded_activations_end_with_all(found):
    first, last = found["offloaded activations"][0], found["offloaded activations"][-1]
    assert first.fields["step.remat"].endswith("+offload:gate")
    assert last.remaining == 0
    assert "save:" not in last.fields["step.remat"]


def test_a_recipe_without_these_fields_has_fewer_changes():
    optimizer = mp.Optax(make=lambda steps: __import__("optax").sgd(0.1))
    kinds = climbed(decoder(strategy=mp.ddp(), mesh=mp.MeshSpec(data=4), optimizer=optimizer))
    assert "low-precision moments" not in kinds
    assert [str(change.fields["strategy"]) for change in kinds["more sharded state"]] == [
        "zero1(axis='data')", "zero3(axis='data')",
    ]  # fmt: skip
    assert climbed(decoder(step=mp.StepOptions(remat="full"))).keys().isdisjoint({"saved activations", "remat policy"})


@pytest.mark.matrix
def test_a_pipeline_gets_more_microbatches():
    strategy = mp.pipeline_parallel(stages=2, microbatches=2)
    kinds = climbed(decoder(mesh=mp.MeshSpec(stage=2, data=2), strategy=strategy))
    assert kinds["microbatches"][0].fields["strategy"].pipeline.microbatches == 4
    assert kinds.keys().isdisjoint({"micro-steps", "saved activations"})


def test_rules_of_the_user_cannot_be_written_as_text():
    strategy = mp.ddp() | mp.Rules(mlp=None)
    assert "more sharded state" not in climbed(decoder(strategy=strategy, mesh=mp.MeshSpec(data=4)))


def test_text_and_python_make_the_same_recipe(found):
    recipe = decoder(step=mp.StepOptions(remat="minimal"))
    layout = Change(kind="layout", fields={
        "mesh": mp.MeshSpec(fsdp=2, tensor=2), "strategy": mp.fsdp() | mp.tensor_parallel(sequence=True),
        "step.remat": None, "step.accumulate": 2,
    })  # fmt: skip
    for change in [layout, *(change for ladder in found.values() for change in ladder)]:
        by_text = recipe.override(*change.settings)
        by_python = eval(change.python, {"recipe": recipe, "dataclasses": dataclasses, "mp": mp})
        assert by_text == by_python, change
        assert by_text != recipe


def test_combinations_set_the_fields_of_both(found):
    both = found["remat policy"][0] + found["chunked vocabulary"][0]
    assert both.settings == ("step.remat=dots", "model.vocab_chunk=16")
    assert found["remat policy"][0].conflicts_with(found["saved activations"][0])
    assert not found["remat policy"][0].conflicts_with(found["chunked vocabulary"][0])
    layout = Change(kind="layout", fields={"mesh": mp.MeshSpec(data=4)})
    assert layout.conflicts_with(found["micro-steps"][0])
    assert not layout.conflicts_with(found["low-precision moments"][0])


def test_named_bytes_are_those_of_a_layer():
    def layer(x, _):
        return jax.ad_checkpoint.checkpoint_name(x * 2, "twice"), None

    jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(layer, x, None, length=3))(np.zeros((4, 2), np.float32))
    assert named_bytes(jaxpr) == {"twice": 32}


@pytest.mark.matrix
def test_layouts_are_the_planners():
    recipe = decoder()
    changes = list(layouts(recipe, batch_shapes(recipe), parse_cluster("h100:1x4")))
    assert 1 <= len(changes) <= 3
    for change in changes:
        assert change.fields, "the layout of the recipe"
        recipe.override(*change.settings)
