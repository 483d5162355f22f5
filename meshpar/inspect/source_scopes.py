"""Where an instruction comes from, in words of the user's model: module path, source line, forward or backward."""

from __future__ import annotations

import re
from collections.abc import Collection

from meshpar.inspect.hlo.parser import Frame, Instruction, Module

_TRANSFORM = re.compile(r"([A-Za-z_]+)\((.*)\)\Z", re.DOTALL)
_MACHINERY = frozenset(
    {"while", "body", "cond", "scan", "while_loop", "body_fun", "cond_fun", "pjit", "shard_map", "named_call"}
    | {"closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2", "rematted_computation"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"}
)
_BRANCH = re.compile(r"branch_[0-9]+_fun\Z")
# Frames of ours that stand between a user's line and jax; the models are not among them: there the line is the answer.
_PLUMBING = re.compile(
    r"[/\\](?:site|dist)-packages[/\\](?!meshpar[/\\])"
    r"|(?:\A|[/\\])meshpar[/\\](?:sharding|compiled|commands|training(?![/\\]engines))[/\\]"
)


def layerless(path: str) -> str:
    """A path of a module with a star for its numbers: what layers of a stack that is not scanned have in common.

    >>> layerless("transformer/h/0/attn"), layerless("block_1/mlp"), layerless("h_2/fc1")
    ('transformer/h/*/attn', 'block_*/mlp', 'h_*/fc1')
    """
    return re.sub(r"(?<![A-Za-z0-9.])[0-9]+(?=/|$|`)", "*", path)


def of_layers(paths: Collection[str]) -> str:
    """Paths that `layerless` makes one, as one: with a star for each number in which they differ."""
    parts = zip(*(path.split("/") for path in paths), strict=True)
    return "/".join(some[0] if len(set(some)) == 1 else layerless(some[0]) for some in parts)


def rule_for(module: str, scopes_above: int) -> str:
    """The text of an activation rule by the path of a module, from the scopes that it stands in.

    >>> rule_for("gradients/GPT/h/0/mlp", 2)
    'mp.Rules(activations={r"h/0/mlp": ("batch", None, ...)}), a name or None for each dim'
    """
    path = "/".join(module.split("/")[scopes_above:]) or "path/of/the/module"
    return f'mp.Rules(activations={{r"{path}": ("batch", None, ...)}}), a name or None for each dim'


def components(op_name: str) -> list[str]:
    """The parts of an op name: split at the slashes outside any bracket."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(op_name):
        depth += (char == "(") - (char == ")")
        if char == "/" and depth <= 0:
            parts.append(op_name[start:at])
            start = at + 1
    return [part for part in (*parts, op_name[start:]) if part]


def members(op_name: str) -> list[str]:
    """The op names in one that XLA merged when it combined instructions: `a/(b/mul:c/dot)` -> `a/b/mul`, `a/c/dot`."""
    parts = components(op_name)
    merged = parts[-1] if parts else ""
    if not (merged.startswith("(") and merged.endswith(")")):
        return [op_name] if op_name else []
    inner, before = merged[1:-1], "/".join(parts[:-1])
    cuts = [at for at, char in enumerate(inner) if char == ":" and inner.count("(", 0, at) == inner.count(")", 0, at)]
    names = [inner[start:stop] for start, stop in zip([0, *(at + 1 for at in cuts)], [*cuts, len(inner)], strict=True)]
    return [f"{before}/{name}" if before else name for name in names]


def primitive(op_name: str) -> str:
    """The primitive an op name ends in: `dot_general`."""
    parts = components(op_name)
    return parts[-1] if parts else ""


def module_path(op_name: str) -> str:
    """The named scopes in an op name: `jit(step)/transpose(jvp(decoder))/while/body/mlp/dot_general` -> `decoder/mlp`.

    Transformations are unwrapped; what jit, scan and remat put in, einsum formulas and the primitive are left out.
    """
    scopes: list[str] = []
    *parts, last = components(op_name) or [""]
    for part in (*parts, *(last,) * (last == "remat2")):
        scope = _unwrap(part)
        half, odd = divmod(len(scopes), 2)
        if scope in ("checkpoint", "remat2") and not odd and scopes[:half] == scopes[half:]:
            scopes = scopes[:half]  # of what the backward pass makes again jax writes the path from the start twice
        is_machinery = not scope or scope in _MACHINERY or _BRANCH.match(scope) or "->" in scope
        is_repeated = scope != part and scopes[-1:] == [scope]  # jax writes `outer/transpose(outer)/inner`, too
        if not is_machinery and not is_repeated:
            scopes.append(scope)
    return "/".join(scopes)


def is_backward(op_name: str) -> bool:
    """Whether the instruction belongs to the backward pass (recomputed forward work included)."""
    return "transpose(" in op_name


def source(module: Module, instruction: Instruction) -> str:
    """`file:line` of the innermost Python line that is the user's; empty when the program does not say."""
    stack = module.stack(instruction)
    users = [frame for frame in stack if frame.file[:1] not in ("", "<") and not _PLUMBING.search(frame.file)]
    chosen: Frame | None = next(iter(users or stack), None)
    return str(chosen) if chosen is not None and chosen.file else ""


def _unwrap(part: str) -> str:
    while match := _TRANSFORM.match(part):
        if match.group(1) in ("jit", "pjit", "xla_computation"):
            return ""
        part = match.group(2)
    return part
