"""Families of checkpoints on models with odd sizes: logits, gradients and files equal transformers'."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import meshpar as mp
from meshpar.interop import to_hf
from meshpar.interop.hf import described, family_of, written
from tests.grid import cases
from tests.interop.folders import ODD_KINDS, folder_of, golden, gradients_of, read_single

QUICK = ("odd/gemma2", "odd/gpt_oss", "odd/llama4_text")
"""Families of `make test`."""
TOLERANCE = 1e-4
"""Of logits and gradients in float32: torch and JAX sum in other orders."""


@pytest.mark.parametrize("kind", cases(*QUICK, grid=ODD_KINDS))
def test_logits_gradients_and_bytes_equal_transformers(kind, tmp_path):
    source = folder_of(kind, tmp_path / "source", files=2)
    config, state = read_single(source, dtype="float32")
    document, _, tokens, logits = golden(kind)
    tokens = tokens.astype(np.int32)

    def loss(params):
        found = state.setup.model.bind(params, state.extra)(tokens)
        log_probs = jax.nn.log_softmax(found[:, :-1])
        return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean(), found

    with mp.use_rules(state.setup.mesh, state.setup.strategy):
        gradients, found = jax.jit(jax.grad(loss, has_aux=True))(state.params)
    np.testing.assert_allclose(found, logits, rtol=0, atol=TOLERANCE)
    folder = to_hf(gradients, dataclasses.replace(config, source=None), tmp_path / "gradients")
    written_gradients = load_file(folder / "model.safetensors")
    expected = gradients_of(kind)
    assert written_gradients.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(written_gradients[name], x, rtol=0, atol=TOLERANCE, err_msg=name)

    back = to_hf(state, config, tmp_path / "back")  # like its source
    for name in sorted(path.name for path in source.glob("*.safetensors")):
        assert (back / name).read_bytes() == (source / name).read_bytes(), name
    assert json.loads((back / "config.json").read_text()) == document


@pytest.mark.parametrize("kind", ODD_KINDS)
def test_config_of_family_roundtrips(kind):
    config, family, *_ = described(golden(kind)[0])
    assert described(written(config, family)).config == config
    assert family_of(config) is family
    assert sum(leaf.size for leaf in config.build().leaves()) == config.num_params
