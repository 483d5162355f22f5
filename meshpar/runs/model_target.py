"""Models of other packages as text: `MODULE:CLASS`, arguments and example inputs.

"flax_models.gpt2:GPT2", ["config=flax_models.gpt2:Config", "config.layers=2"], "ids=int32[8,128]" ─► Python code

The description becomes code of a recipe, so the recipe builds the same model.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.runs.recipe_file import explain_recipe_errors, imported
from meshpar.sharding.adapters.model import Model
from meshpar.sharding.errors import MeshparError, check_cases, near, problem
from meshpar.sharding.host_resources import check_file

Kind = Literal["nnx", "linen", "equinox", "model"]
_REFERENCE = r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)(\(\))?"
"""`MODULE:NAME`, or `MODULE:NAME()` for the result of a call."""
_INPUT = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(\w+)\s*\[\s*((?:\d+\s*,\s*)*(?:\d+\s*)?)\]\s*$")
"""`name=dtype[shape]`."""
_MAX_WIDTH = 90
"""Maximum width of a call on a single line."""
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Example inputs of a model, which are passed by keyword."""

    arrays: Mapping[str, jax.ShapeDtypeStruct]
    """Arrays of a batch. The first dim of each is the batch."""
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Other arguments, such as `deterministic=True`."""

    @property
    def batch_size(self) -> int:
        """Number of examples."""
        return next(iter(self.arrays.values())).shape[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelTarget:
    """A model to adopt, as code."""

    name: str
    """`MODULE:NAME`."""
    kind: Kind
    expression: str
    """Code that creates the module, from `rngs` or `key` for NNX and Equinox."""
    modules: tuple[str, ...]
    """Modules to import."""


def parse_inputs(text: str | Path | Mapping[str, Any]) -> Inputs:
    """Return the example inputs of a model.

    Args:
      text: "ids=int32[8,128],deterministic=True"; the path of a Python file that defines a dict `inputs`; or a dict
        from names to arrays, shapes and other arguments.

    Raises:
      MeshparError: a part has another format, a name is not an argument's, a dtype is unknown, or the first dims of the
        arrays differ.
    """
    check_cases(
        "adopt(inputs=...)", "read the inputs", "wrong-type",
        (not isinstance(text, str | Path | Mapping), f"they are a {type(text).__name__}",
         "pass text such as 'x=float32[8,64]', the path of a file, or a dict from names to arrays"),
    )  # fmt: skip
    values = dict(text) if isinstance(text, Mapping) else _inputs_of(str(text))
    wrong_name = next((name for name in values if not isinstance(name, str) or not name.isidentifier()), None)
    check_cases(
        "adopt(inputs=...)", "call the model", "bad-syntax",
        (wrong_name is not None, f"`{wrong_name!r}` is not the name of an argument", "use names such as `x`"),
    )  # fmt: skip
    arrays = {
        name: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
        for name, x in values.items()
        if hasattr(x, "shape") and hasattr(x, "dtype")
    }
    static = {name: x for name, x in values.items() if name not in arrays}
    unreadable = next((name for name, x in static.items() if not isinstance(x, bool | int | float | str | None)), "")
    not_numerical = next((name for name, x in arrays.items() if not _is_numerical(x.dtype)), "")
    sizes = {x.shape[:1] for x in arrays.values()}
    check_cases(
        "adopt(inputs=...)", "call the model", "wrong-shape",
        (unreadable, f"`{unreadable}` must be an array, a number, text, a bool or None",
         "leave it out, or create it in a function MODULE:FUNCTION"),
        (not arrays, "it has no arrays", "write for example x=float32[8,64]"),
        (len(sizes) > 1 or () in sizes, "the first dims of the arrays differ, and must be the batch",
         "use the same first dim for all arrays, or create other arrays in a function MODULE:FUNCTION"),
        ((0,) in sizes, "the batch has no examples", "use a first dim of at least 1"),
        (not_numerical, f"the dtype of `{not_numerical}` is not a numerical dtype", "use a dtype such as float32"),
    )  # fmt: skip
    return Inputs(arrays=arrays, static=static)


def _is_numerical(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)


def _inputs_of(text: str) -> dict[str, Any]:
    if text.endswith(".py") and "=" not in text:
        check_file(text, f"inputs `{text}`", "name a Python file that defines a dict `inputs`")
        with explain_recipe_errors([text], "read its inputs"):
            defined = getattr(imported(Path(text)), "inputs", None)
        if isinstance(defined, Mapping):
            return dict(defined)
        fix = "define inputs = {'x': np.zeros((8, 64), np.float32)}"
        raise problem(f"inputs `{text}`", "read them", "the file defines no dict `inputs`", fix, code="not-found")
    values: dict[str, Any] = {}
    for part in re.split(r",(?![^\[]*\])", text):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name in values:
            raise problem(f"inputs `{text}`", "read them", f"`{name}` occurs twice", "remove one of them", "conflict")
        match = _INPUT.match(part)
        if match:
            values[name] = jax.ShapeDtypeStruct(_shape(match[3]), _dtype(match[2], part))
        elif equals and name.isidentifier() and "[" not in value:
            values[name] = _literal(value)
        else:
            fix = "write name=dtype[shape], such as ids=int32[8,128], or name=value"
            raise problem(f"inputs `{text}`", "read them", f"`{part}` has another format", fix, code="bad-syntax")
    return values


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size.strip())


def _dtype(name: str, part: str) -> Any:
    try:
        return jnp.dtype(name)
    except TypeError:
        fix = near(name, ("int32", "float32", "bfloat16", "bool", "uint8"))
        raise problem(
            f"input `{part.strip()}`", "read it", f"`{name}` is not a dtype", fix, code="wrong-dtype"
        ) from None


def _literal(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_target(target: str, settings: Iterable[str] = ()) -> ModelTarget:
    """Return the description of a model.

    Args:
      target: `MODULE:CLASS`, a class of Flax Linen, Flax NNX or Equinox, or `MODULE:FUNCTION`, a function that returns
        a module or a `Model`. Functions receive `rngs` or `key` if they have such a parameter.
      settings: keyword arguments, "NAME=VALUE". A value `MODULE:NAME` is imported. "NAME.FIELD=VALUE" calls it with
        this keyword argument, and `MODULE:NAME()` calls it without arguments.

    Raises:
      MeshparError: the module cannot be imported, does not define the name, or the result is not a model.
    """
    if isinstance(settings, str | Mapping):
        reason, fix = f"they are a {type(settings).__name__}", 'pass a list, such as ["num_layers=2"]'
        raise problem("adopt(settings=...)", "set arguments", reason, fix, code="wrong-type")
    if "<locals>" in target:
        reason, fix = "it is defined inside a function", "define it at the top level of the module or notebook"
        raise problem(f"`{target}`", "adopt it", reason, fix, code="unsupported-feature")
    match = re.fullmatch(_REFERENCE, target)
    if not match or match[3]:
        fix = "write MODULE:CLASS, such as my_package.models:Net"
        raise problem(f"`{target}`", "adopt it", "it is not MODULE:CLASS", fix, code="bad-syntax")
    tree: dict[str, Any] = {}
    for setting in settings:
        path, equals, value = setting.partition("=")
        *outer, last = (name.strip() for name in path.split("."))
        if not equals or not all(name.isidentifier() for name in (*outer, last)):
            fix = "write NAME=VALUE, such as num_layers=2"
            raise problem(f"--set {setting}", "set an argument", "it is not NAME=VALUE", fix, code="bad-syntax")
        node = tree
        for name in outer:
            node = node.setdefault(name, {})
        node[last] = {**node.get(last, {}), "": value.strip()}
    modules: dict[str, None] = {}
    found = _imported(match[1], match[2], modules)
    arguments = _arguments(tree, modules)
    name = f"{match[1]}.{match[2]}"
    kind = _kind_of(found)
    if kind in ("nnx", "equinox"):
        key = "rngs=rngs" if kind == "nnx" else "key=key"
        if (random := key.partition("=")[0]) in tree:
            reason, fix = "the recipe sets it from its seed", f"remove --set {random}"
            raise problem(f"`{target}`", f"set `{random}`", reason, fix, code="conflict")
        return ModelTarget(name=target, kind=kind, expression=_call(name, [*arguments, key]), modules=tuple(modules))
    expression = _call(name, arguments)
    created = evaluated(expression, tuple(modules), f"`{target}`")
    if isinstance(created, Model):
        kind = "model"
    elif _is_a(type(created), "flax.linen"):
        kind = "linen"
    elif _is_a(type(getattr(created, "module", None)), "flax.linen"):
        kind, expression = "linen", f"{expression}.module"
    else:
        reason = f"it is a {type(created).__name__}, not a module of Flax or Equinox, and not an mp.Model"
        fix = "name a class of a model, or a function that returns mp.from_functions(init, apply)"
        raise problem(f"`{target}`", "adopt it", reason, fix, code="wrong-type")
    return ModelTarget(name=target, kind=kind, expression=expression, modules=tuple(modules))


def _imported(module: str, name: str, modules: dict[str, None]) -> Any:
    """Import a module, add it to `modules`, and return an attribute."""
    where = f"`{module}:{name}`"
    try:
        value: Any = importlib.import_module(module)
    except ImportError as error:
        fix = f"install the package of `{module}`, or run the command in its folder"
        raise problem(where, "import it", str(error), fix, code="not-found") from error
    except Exception as error:
        reason = f"it raised {type(error).__name__}: {str(error).strip()[:300] or 'no message'}"
        raise problem(where, "import it", reason, "correct the module", code="error-in-model") from error
    modules[module] = None
    for part in name.split("."):
        if not hasattr(value, part):
            raise problem(where, f"find `{part}`", "the name is not defined", near(part, dir(value)), code="not-found")
        value = getattr(value, part)
    return value


def _arguments(tree: Mapping[str, Any], modules: dict[str, None]) -> list[str]:
    """Return the code of keyword arguments."""
    return [f"{name}={_value(name, node, modules)}" for name, node in tree.items() if name]


def _call(name: str, arguments: Sequence[str]) -> str:
    """Return the code of a call, with a line for each argument if it is long."""
    line = f"{name}({', '.join(arguments)})"
    if len(line) <= _MAX_WIDTH and "\n" not in line:
        return line
    lines = "".join(f"{argument},\n" for argument in arguments)
    return f"{name}(\n{textwrap.indent(lines, 4 * ' ')})"


def _value(name: str, node: Mapping[str, Any], modules: dict[str, None]) -> str:
    text, fields = node.get(""), _arguments(node, modules)
    match = re.fullmatch(_REFERENCE, text or "")
    if match:
        _imported(match[1], match[2], modules)
        reference = f"{match[1]}.{match[2]}"
        return _call(reference, fields) if fields or match[3] else reference
    if fields:
        reason = f"`{name}` has no class" if text is None else f"`{text}` is not MODULE:CLASS"
        fix = f"add --set {name}=MODULE:CLASS"
        raise problem(f"--set {name}.{fields[0]}", f"set a field of `{name}`", reason, fix, code="missing-argument")
    return repr(_literal(text or ""))


def _is_a(cls: type, package: str) -> bool:
    """Return whether a class is a `Module` of a package, without importing the package."""
    bases = ((base.__module__, base.__name__) for base in cls.__mro__)
    return any(name == "Module" and (module == package or module.startswith(f"{package}.")) for module, name in bases)


def _kind_of(found: Any) -> Kind | None:
    """Return the kind of a class or function. None: it has to be called first."""
    if isinstance(found, type):
        return next((kind for kind, package in _PACKAGES if _is_a(found, package)), None)
    if not callable(found):
        reason, fix = f"it is a {type(found).__name__}", "name a class, or a function that returns a model"
        raise problem(f"`{found!r:.100}`", "create a model", reason, fix, code="wrong-type")
    parameters = inspect.signature(found).parameters
    return "nnx" if "rngs" in parameters else "equinox" if "key" in parameters else None


_PACKAGES: tuple[tuple[Kind, str], ...] = (("nnx", "flax.nnx"), ("equinox", "equinox"))


def evaluated(expression: str, modules: Iterable[str], where: str) -> Any:
    """Evaluate code of a target. An exception becomes an error that names `where`."""
    namespace: dict[str, Any] = {"np": np, "jnp": jnp}
    for module in modules:
        exec(f"import {module}", namespace)
    try:
        return eval(expression, namespace)
    except MeshparError:
        raise
    except Exception as error:
        reason = f"`{expression}` raised {type(error).__name__}: {str(error).strip()[:300].rstrip('.') or 'no message'}"
        fix = "set other arguments with --set NAME=VALUE"
        raise problem(where, "create the model", reason, fix, code="error-in-model") from error
