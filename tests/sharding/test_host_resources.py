"""A process that was forked after jax had started gets an error instead of waiting forever."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import optax

import meshpar as mp
from meshpar.sharding import host_resources
from meshpar.training.state import make_setup
from tests.errors import raises

FORK = """
import os, sys, warnings
import meshpar as mp

def code_in_child():
    pid = os.fork()
    if pid == 0:
        try:
            spec.build()
        except mp.MeshparError as error:
            os._exit(7 if error.code == "conflict" else 8)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

warnings.simplefilter("ignore")
spec = mp.MeshSpec(data=-1)
before = code_in_child()
spec.build()
sys.exit([before, code_in_child()] != [0, 7])
"""


def test_child_forked_after_jax_has_started_gets_an_error(child_env):
    assert subprocess.run([sys.executable, "-c", FORK], env=child_env, check=False, timeout=120).returncode == 0


def test_forked_process_neither_creates_a_state_nor_runs_a_step(monkeypatch):
    model = mp.from_functions(lambda key: {"w": jnp.ones(2)}, lambda params, x: x * params["w"])
    setup = make_setup(model, optax.sgd(0.1), mesh=jax.make_mesh((1,), ("data",)), strategy=mp.ddp())
    monkeypatch.setattr(host_resources, "_is_forked", True)
    loss = lambda model, batch, key: (model(batch).sum(), {})  # noqa: E731
    for use in (lambda: setup.init(0), lambda: mp.train_step(loss)(None, None), lambda: mp.eval_step(loss)(None, None)):
        with raises("conflict"):
            use()
