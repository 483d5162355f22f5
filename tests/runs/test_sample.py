"""The sample of a run: its program, and the text."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import meshpar as mp
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.runs.recipe import build_setup
from meshpar.runs.sample import SampleProgram, continued

SOURCE = SimpleNamespace(
    encode=lambda text: np.frombuffer(text.encode(), np.uint8) % 16, decode=lambda ids: " ".join(map(str, ids))
)


@pytest.mark.matrix
@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_text_uses_the_lowered_program(compute):
    recipe = mp.Recipe(
        name="sample",
        mesh=mp.MeshSpec(fsdp=2),
        model=TransformerConfig(
            vocab_size=16, num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=8
        ),
        loss=next_token_loss,
        data=mp.data.ArrayData(arrays={"inputs": np.zeros((4, 4), np.int32)}),
        step=mp.StepOptions(precision=mp.Precision(compute=compute)),
        steps=1,
        batch_size=2,
        seed=3,
        sample=mp.Sample(prompt="def ", num_tokens=6),
    )
    setup = build_setup(recipe, recipe.mesh.build(jax.devices()[:2]))
    state, program, compiled = setup.init(0), SampleProgram(recipe, setup, SOURCE), []

    def record(event, seconds, fun_name=None, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        program.lower().compile()
        text = program.text(state)
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
    assert compiled == ["jit(run)"]
    options = {"num_tokens": 6, "seed": 3, "temperature": recipe.sample.temperature}
    if compute is None:
        assert text == SOURCE.decode(*continued(state, recipe.model, [SOURCE.encode("def ")], **options))
    assert len(text.split()) == 10
    assert text.startswith("4 5 6 0 ")
