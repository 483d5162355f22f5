"""Models, constructor arguments and example inputs from text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import meshpar as mp
from meshpar.runs.model_target import evaluated, parse_inputs, parse_target
from tests.errors import raises

HERE = __name__


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 8
    depth: int = 1
    dtype: object = jnp.float32


class Stack(nn.Module):
    config: Config = Config()
    name_of: str = "stack"

    @nn.compact
    def __call__(self, x):
        for _ in range(self.config.depth):
            x = nn.Dense(self.config.width)(x)
        return x


class Pretrained:
    """A class with weights that keeps the module in an attribute, as in transformers."""

    def __init__(self, config: Config):
        self.module = Stack(config)


class Linear(nnx.Linear):
    pass


def functions(width: int) -> mp.MeshSpec:
    return mp.from_functions(lambda key: jnp.ones((width, width)), jnp.matmul)


def test_arguments_become_code() -> None:
    settings = [f"config={HERE}:Config", "config.width=16", "config.dtype=jax.numpy:bfloat16", "name_of=small net"]
    target = parse_target(f"{HERE}:Stack", settings)
    assert target.kind == "linen"
    assert target.modules == (HERE, "jax.numpy")
    assert evaluated(target.expression, target.modules, "") == Stack(Config(16, 1, jnp.bfloat16), "small net")
    assert target.expression.endswith("name_of='small net',\n)")


@pytest.mark.parametrize(
    ("name", "settings", "kind", "end"),
    [
        ("Stack", [], "linen", "Stack()"),
        ("Stack", [f"config={HERE}:Config()"], "linen", "Config())"),
        ("Pretrained", [f"config={HERE}:Config", "config.depth=2"], "linen", ".module"),
        ("Linear", ["in_features=4", "out_features=2"], "nnx", "Linear(in_features=4, out_features=2, rngs=rngs)"),
        ("functions", ["width=4"], "model", "functions(width=4)"),
    ],
)
def test_kinds_of_models(name, settings, kind, end) -> None:
    target = parse_target(f"{HERE}:{name}", settings)
    assert (target.kind, target.expression[-len(end) :]) == (kind, end)


@pytest.mark.parametrize(
    ("target", "settings", "code"),
    [
        ("tests", [], "bad-syntax"),
        ("no_such_package_:Net", [], "not-found"),
        (f"{HERE}:Stak", [], "not-found"),
        (f"{HERE}:Config", [], "wrong-type"),
        (f"{HERE}:HERE", [], "wrong-type"),
        (f"{HERE}:functions", [], "error-in-model"),
        (f"{HERE}:Stack", ["width"], "bad-syntax"),
        (f"{HERE}:Stack", ["config.width=4"], "missing-argument"),
        (f"{HERE}:Stack", ["config=small", "config.width=4"], "missing-argument"),
        (f"{HERE}:Stack", [f"config={HERE}:Konfig"], "not-found"),
        (f"{HERE}:Stack", "config=1", "wrong-type"),
        (f"{HERE}:Linear", ["rngs=1"], "conflict"),
        (f"{HERE}:test.<locals>.Net", [], "unsupported-feature"),
    ],
)
def test_errors_of_targets(target, settings, code) -> None:
    with raises(code):
        parse_target(target, settings)


def test_a_module_that_raises(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "module_with_a_syntax_error.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with raises("error-in-model", "module_with_a_syntax_error"):
        parse_target("module_with_a_syntax_error:Net")


def test_inputs_from_text_file_and_dict(tmp_path: Path) -> None:
    found = parse_inputs("ids=int32[8, 128], scale=float32[8],deterministic=True,mode=train")
    assert found.arrays["ids"] == jax.ShapeDtypeStruct((8, 128), np.int32)
    assert (found.arrays["scale"].shape, found.batch_size) == ((8,), 8)
    assert found.static == {"deterministic": True, "mode": "train"}
    file = tmp_path / "inputs.py"
    file.write_text("import numpy as np\ninputs = {'x': np.zeros((4, 2)), 'train': False}\n")
    found = parse_inputs(file)
    assert found.arrays == {"x": jax.ShapeDtypeStruct((4, 2), np.float32)}  # jax converts float64
    assert found == parse_inputs({"x": np.zeros((4, 2)), "train": False})


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("ids", "bad-syntax"),
        ("ids=int32[8,x]", "bad-syntax"),
        ("ids=int33[8]", "wrong-dtype"),
        ("train=True", "wrong-shape"),
        ("x=float32[8,2],y=float32[4,2]", "wrong-shape"),
        ("x=float32[]", "wrong-shape"),
        ("x=float32[0,8]", "wrong-shape"),
        ("x=float32[8 8]", "bad-syntax"),
        ("x=float32[8,,8]", "bad-syntax"),
        ("x=str[8]", "wrong-shape"),
        ("x=float32[8,2],x=float32[8,4]", "conflict"),
        ("no_such_file.py", "missing-file"),
        (None, "wrong-type"),
        ({1: np.zeros((8, 2))}, "bad-syntax"),
        ({"x": {"a": np.zeros((8, 2))}}, "wrong-shape"),
    ],
)
def test_errors_of_inputs(text, code) -> None:
    with raises(code):
        parse_inputs(text)


def test_a_file_without_inputs(tmp_path: Path) -> None:
    (tmp_path / "inputs.py").write_text("x = 1\n")
    with raises("not-found"):
        parse_inputs(tmp_path / "inputs.py")
