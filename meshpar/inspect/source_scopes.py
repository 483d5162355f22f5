"""Origin of an instruction in the user's model: module path, source line, forward or backward pass."""

from __future__ import annotations

import re
from collections.abc import Collection

from meshpar.inspect.hlo.module import Frame, Instruction, Module

_TRANSFORM = re.compile(r"([A-Za-z_]+)\((.*)\)\Z", re.DOTALL)
_MACHINERY = frozenset(
    {"while", "body", "cond", "scan", "while_loop", "body_fun", "cond_fun", "pjit", "shard_map", "named_call"}
    | {"closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2", "rematted_computation"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"}
)
_BRANCH = re.compile(r"branch_[0-9]+_fun\Z")
# Frames of this library between a user's line and jax. Its models are not included: their lines are the origin.
_PLUMBING = re.compile(
    r"[/\\](?:site|dist)-packages[/\\](?!meshpar[/\\])"
    r"|(?:\A|[/\\])meshpar[/\\](?:sharding|parallel|layers|optim|training(?![/\\]gradients)|loop|inspect|cli)[/\\]"
)


def layerless(path: str) -> str:
    """Replace the layer numbers of a module path by a star, so that layers of an unrolled stack share one path.

    >>> layerless("transformer/h/0/attn"), layerless("block_1/mlp"), layerless("h_2/fc1")
    ('transformer/h/*/attn', 'block_*/mlp', 'h_*/fc1')
    """
    return re.sub(r"(?<![A-Za-z0-9.])[0-9]+(?=/|$|`)", "*", path)


def merge_layers(paths: Collection[str]) -> str:
    """Merge module paths that differ only in layer numbers into one path, with a star for each of these numbers."""
    parts = zip(*(path.split("/") for path in paths), strict=True)
    return "/".join(names[0] if len(set(names)) == 1 else layerless(names[0]) for names in parts)


def rule_for(module: str, scopes_above: int) -> str:
    """Return the text of an activation rule for a module, without the first `scopes_above` scopes of its path.

    >>> rule_for("gradients/GPT/h/0/mlp", 2)
    'mp.Rules(activations={r"h/0/mlp": ("batch", None, ...)}), a name or None for each dim'
    """
    path = "/".join(module.split("/")[scopes_above:]) or "path/of/the/module"
    return f'mp.Rules(activations={{r"{path}": ("batch", None, ...)}}), a name or None for each dim'


def _split_top(text: str, separator: str) -> list[str]:
    """Split text at the separators outside of round brackets, without empty parts."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == separator and depth <= 0:
            parts.append(text[start:index])
            start = index + 1
    return [part for part in (*parts, text[start:]) if part]


def components(op_name: str) -> list[str]:
    """Split an op name at the slashes outside brackets."""
    return _split_top(op_name, "/")


def members(op_name: str) -> list[str]:
    """Split an op name that XLA merged when it combined instructions: `a/(b/mul:c/dot)` -> `a/b/mul`, `a/c/dot`."""
    *parents, last = components(op_name) or [""]
    if not (last.startswith("(") and last.endswith(")")):
        return [op_name] if op_name else []
    return ["/".join((*parents, name)) for name in _split_top(last[1:-1], ":")]


def primitive(op_name: str) -> str:
    """Return the primitive at the end of an op name: `dot_general`."""
    parts = components(op_name)
    return parts[-1] if parts else ""


def module_path(op_name: str) -> str:
    """Return the named scopes: `jit(step)/transpose(jvp(decoder))/while/body/mlp/dot_general` -> `decoder/mlp`.

    Transformations are unwrapped. Scopes of jit, scan and remat, einsum formulas and the primitive are dropped. Of a
    kernel that XLA merged from several ops, the scopes of the first are returned.

    >>> module_path("jit(step)/mlp/mul;jit(step)/mlp/broadcast_in_dim")
    'mlp'
    """
    scopes: list[str] = []
    *parts, last = components(op_name.partition(";jit(")[0]) or [""]
    for part in (*parts, *(last,) * (last == "remat2")):
        scope = _unwrap(part)
        half, odd = divmod(len(scopes), 2)
        if scope in ("checkpoint", "remat2") and not odd and scopes[:half] == scopes[half:]:
            scopes = scopes[:half]  # jax repeats the path for work that the backward pass recomputes
        is_machinery = not scope or scope in _MACHINERY or _BRANCH.match(scope) or "->" in scope
        is_repeated = scope != part and scopes[-1:] == [scope]  # jax also writes `outer/transpose(outer)/inner`
        if not is_machinery and not is_repeated:
            scopes.append(scope)
    return "/".join(scopes)


def is_backward(op_name: str) -> bool:
    """Return whether an op belongs to the backward pass, including recomputed forward work."""
    return "transpose(" in op_name


def phase(op_name: str) -> str:
    """Return the phase of a training step: `forward`, `backward`, `optimizer` or `other`.

    >>> phase("jit(_step)/gradients/transpose(jvp(mlp))/mul"), phase("jit(_step)/update/add")
    ('backward', 'optimizer')
    """
    parts = components(op_name)
    if "update" in parts:
        return "optimizer"
    if not any("gradients" in part for part in parts):
        return "other"
    return "backward" if is_backward(op_name) else "forward"


def source(module: Module, instruction: Instruction) -> str:
    """Return `file:line` of the innermost frame of the user's code; empty if the program has none."""
    stack = module.stack(instruction)
    user_frames = [frame for frame in stack if frame.file[:1] not in ("", "<") and not _PLUMBING.search(frame.file)]
    frame: Frame | None = next(iter(user_frames or stack), None)
    return str(frame) if frame is not None and frame.file else ""


def _unwrap(part: str) -> str:
    while match := _TRANSFORM.match(part):
        if match.group(1) in ("jit", "pjit", "xla_computation"):
            return ""
        part = match.group(2)
    return part
