"""Adapters in PEFT's format, both ways: `adapter_model.safetensors` and `adapter_config.json`, by the family's table.

q_proj.weight: "(H D) E -> L E H D"    ⇒    q_proj.lora_A.weight: "R E -> L E R"
                                            q_proj.lora_B.weight: "(H D) R -> L R H D"

Experts have a pair each, as PEFT has them where each is a module of its own, under the release's names: transformers
before 5. PEFT's `target_parameters`, for experts that a later one stacks in one tensor, are other tensors: not these.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from meshpar.interop.files import Folder, read_json, whole_folder, write, write_json
from meshpar.interop.hf import Made, born, check_dtype, describe, family_of, tell_rounded
from meshpar.interop.table import Tensor
from meshpar.models.config import TransformerConfig
from meshpar.sharding.context import apart
from meshpar.sharding.types import PAIR, matrix_of, near, problem, tree_leaves_with_paths
from meshpar.training.lora import Lora, of_pair
from meshpar.training.state import TrainState

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ROOT = "base_model.model."
"""Stands before the names of the model's own tensors."""
PLAIN = {
    "bias": "none", "fan_in_fan_out": False, "layers_to_transform": None, "modules_to_save": None, "rank_pattern": {},
    "alpha_pattern": {}, "use_dora": False, "use_rslora": False, "lora_bias": False, "layer_replication": None,
    "trainable_token_indices": None, "target_parameters": None,
}  # fmt: skip
"""Fields of adapter_config.json by which adapters do more than ours, and what they are where they do not."""

CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Values of `init_lora_weights` with which PEFT takes what the pair begins with out of the matrix."""


def to_peft(
    state: TrainState,
    config: TransformerConfig,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    base: str | None = None,
    dtype: str | None = None,
) -> Path:
    """Write a state's adapters, and nothing else, as a folder that PEFT reads beside the model that they belong to.

    Args:
      state: of a model with adapters.
      config: of the model.
      folder: a new one.
      like: the folder the model came from, which names the family.
      base: what to name as the model they belong to: a folder, or a name on the hub.
      dtype: of the adapters; None: as they are.

    Returns:
      the folder.

    Raises:
      ValueError: a model without adapters; the folder is there already; adapters of a matrix that the family keeps in
        one with others, which PEFT cannot say.
    """
    lora = _lora_of(state, "to_peft")
    if dtype is not None:
        check_dtype("to_peft(dtype=...)", dtype)
    family = family_of(config) if like is None else describe(Path(like)).family
    pairs = {path: x for path, x in tree_leaves_with_paths(state.params) if of_pair(path)}
    tensors = _tensors(family.tensors(config), pairs, lora.rank)
    made = Made(tensors, pairs, {}, None, dtype)
    sizes = {name: made.nbytes(name) for name in made.pieces}
    with whole_folder(folder) as fresh:
        write(fresh, dict.fromkeys(sizes, WEIGHTS), made, sum(sizes.values()), index=False)
        names = _targets(sizes, family.tensors(config))
        document = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
            "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0, "target_modules": names, **PLAIN,
        }  # fmt: skip
        write_json(fresh / CONFIG, document)
    return Path(folder)


def lora_of_peft(folder: str | Path, config: TransformerConfig, *, like: str | Path | None = None) -> Lora:
    """The adapters that a folder of PEFT's has, to make the model with; their weights are `load_peft`'s.

    Args:
      folder: with `adapter_config.json` and `adapter_model.safetensors`.
      config: of the model that they belong to.
      like: the folder the model came from, which names the family.

    Raises:
      ValueError: a file that is not sound, or says what our adapters do not do.
    """
    document, path = read_json(Path(folder) / CONFIG), Path(folder) / CONFIG
    if document.get("peft_type") != "LORA":
        shown = repr(document.get("peft_type"))[:60]
        raise problem(f"{path}, `peft_type`", f"read {shown}", "adapters are LORA here", "merge it by PEFT first")
    for field, value in PLAIN.items():
        found = document.get(field, value)
        if found != value and (found or value):
            exists = f"adapters here have {value!r}"
            raise problem(f"{path}, `{field}`", f"be {found!r}"[:80], exists, "merge it by PEFT first")
    start = document.get("init_lora_weights")
    if str(start).startswith(CHANGE_THE_BASE):
        exists = "such adapters belong to a model whose matrices were changed as training began"
        raise problem(f"{path}, `init_lora_weights`", f"be {start!r}"[:80], exists, "merge it by PEFT first")
    rank, alpha = document.get("r"), document.get("lora_alpha")
    with Folder(folder, single=WEIGHTS) as files:
        modules = _modules(files, config, like)
    try:
        return Lora(rank=rank, alpha=alpha, modules="|".join(map(re.escape, modules)))  # type: ignore[arg-type]
    except ValueError as error:
        raise problem(str(path), "read it", str(error).rstrip("."), "take the file that PEFT wrote") from error


@apart()
def load_peft(
    state: TrainState, config: TransformerConfig, folder: str | Path, *, like: str | Path | None = None
) -> TrainState:
    """A state with the adapters of a folder of PEFT's; its optimizer stays as it is.

    Args:
      state: of a model with those adapters: see `lora_of_peft`.
      config, folder, like: as for `lora_of_peft`.

    Raises:
      ValueError: tensors that are missing, surplus or of another shape.
    """
    lora = _lora_of(state, "load_peft")
    family = family_of(config) if like is None else describe(Path(like)).family
    leaves = dict(tree_leaves_with_paths(state.setup.abstract.params))
    tensors = _tensors(family.tensors(config), {path: leaves[path] for path in leaves if of_pair(path)}, lora.rank)
    with Folder(folder, single=WEIGHTS) as files:
        shapes = {name: one.their_shape for one in tensors for name, _ in one.names()}
        for name in sorted(shapes.keys() | files.entries.keys()):
            found = files.entries[name].shape if name in files.entries else None
            if found != shapes.get(name):
                exists = f"the model's adapters have {shapes.get(name, 'none')} there, and the file {found or 'none'}"
                fix = f"make the model with lora_of_peft(...). {near(name, shapes)}"
                raise problem(f"{files.path}, `{name[:100]}`", "read it", exists, fix)
        tell_rounded(f"load_peft, `{folder}`", files, [leaves[one.ours] for one in tensors])
        read = {one.ours: born(files, one, leaves[one.ours]) for one in tensors}
    params = [read.get(path, x) for path, x in tree_leaves_with_paths(state.params)]
    return state.replace(params=jax.tree.unflatten(jax.tree.structure(state.params), params))


def _lora_of(state: TrainState, where: str) -> Lora:
    lora = state.setup.model.lora
    if lora is None:
        exists, fix = "the model has no adapters", "make it with mp.lora(...), or use to_hf for the whole model"
        raise problem(where, "find adapters", exists, fix)
    return lora


def _tensors(table: list[Tensor], pairs: Mapping[str, Any], rank: int) -> list[Tensor]:
    """The table of adapters: for each of ours, PEFT's tensors."""
    found = []
    for path in sorted(pairs):
        module, _, name = path.rpartition("/")
        one = next((row for row in table if row.ours == matrix_of(module)), None)
        parts = [] if one is None else [len(part.order) < part.size for part in one.parts.values()]
        shared = one is not None and sum((row.theirs, row.first) == (one.theirs, one.first) for row in table) > 1
        shared = shared or any(parts)
        if one is None or shared:
            exists = "PEFT has one pair a matrix of the release, and there this one is a part of another, or is not"
            raise problem(f"adapters, `{path}`", "name it as PEFT does", exists, "merge the adapters, and use to_hf")
        found.append(_pair_of(one, path, is_inward=name == PAIR[0], rank=rank))
    return found


def _pair_of(one: Tensor, path: str, *, is_inward: bool, rank: int) -> Tensor:
    ours = one.dims.partition("->")[2]
    out, into = (f"({' '.join(group)})" if len(group) > 1 else group for group in one.groups)
    outputs, inputs = one.groups
    lead = [letter for letter in ours.split() if letter not in outputs + inputs]
    dims = [*lead, *inputs, "R"] if is_inward else [*lead, "R", *outputs]
    side = f"R {into}" if is_inward else f"{out} R"
    name = ROOT + one.theirs.removesuffix("weight") + ("lora_A.weight" if is_inward else "lora_B.weight")
    sizes = {**one.sizes, "R": rank}
    return dataclasses.replace(one, theirs=name, ours=path, dims=f"{side} -> {' '.join(dims)}", sizes=sizes)


def _targets(pairs: Iterable[str], table: list[Tensor]) -> list[str]:
    """What to name as `target_modules`: ends of names, or whole ones where an end stands for other modules, too."""
    chosen = {name.removeprefix(ROOT).rpartition(".lora_")[0] for name in pairs}
    ends = {name.rpartition(".")[2] for name in chosen}
    known = {name.removesuffix(".weight") for one in table for name, _ in one.names()}
    return sorted(chosen if any(name.rpartition(".")[2] in ends for name in known - chosen) else ends)


def _modules(files: Folder, config: TransformerConfig, like: str | Path | None) -> list[str]:
    """Paths of our layers whose adapters a folder of PEFT's has."""
    family = family_of(config) if like is None else describe(Path(like)).family
    of_name: dict[str, str] = {}
    for one in family.tensors(config):
        if one.ours.endswith("/kernel") or "{X}" in one.theirs:
            path = one.ours.removesuffix("/kernel")
            of_name |= {f"{ROOT}{name.removesuffix('.weight')}": path for name, _ in one.names()}
    found = set()
    for name in files.entries:
        module, known = re.fullmatch(r"(.*)\.lora_[AB]\.weight", name), None
        known = None if module is None else of_name.get(module[1])
        if known is None:
            exists = f"`{family.model_type}` has no linear layer of that name, or it is no adapter"
            fix = "merge it by PEFT first: shared experts, tables and other tensors have no adapters here"
            raise problem(f"{files.path}, `{name[:100]}`", "read it", exists, fix)
        found.add(known)
    return sorted(found)
