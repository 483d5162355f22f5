"""A host callback that raises ends the command with one line, also where other devices wait."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshpar.pod import callback_failures

PROGRAM = """
from meshpar.cli import main
from meshpar.pod import callback_failures
main.prepare_devices(2)
callback_failures.end_on_callback_failures()
import jax, jax.numpy as jnp
mesh = jax.make_mesh((2,), ("data",))
x = jax.device_put(jnp.arange(2.0), jax.NamedSharding(mesh, jax.P("data")))

def raises(*args):
    raise ValueError("no number")

def f(x):
    {call}
    return (x * x).sum()

print(jax.jit(f)(x))
"""


@pytest.mark.parametrize(
    "call",
    [
        "jax.debug.callback(raises)",
        pytest.param(
            "x = x + jax.pure_callback(raises, jax.ShapeDtypeStruct((), x.dtype), x.sum())", marks=pytest.mark.matrix
        ),
    ],
)
def test_a_failed_callback_ends_the_command(call: str, child_env, tmp_path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(call=call))
    command = [sys.executable, "program.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=child_env, capture_output=True, text=True, timeout=240, check=False
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("meshpar: ")]
    assert done.returncode == 2
    assert len(errors) == 1
    assert "ValueError was raised (no number) at program.py:11" in errors[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("generate", "none", "--prompt", "a"), ("verify", "none.py")])
def test_every_command_that_runs_a_model_ends(words, meshpar, monkeypatch, tmp_path) -> None:
    """The handler is installed before the model is read."""
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(callback_failures, "end_on_callback_failures", lambda: calls.append(words))
    code, _, error = meshpar(*words)
    assert (code, calls) == (2, [words]), error
