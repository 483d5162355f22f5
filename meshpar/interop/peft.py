"""LoRA adapters in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`.

The tensor names and dims follow from the table of the checkpoint family:

q_proj.weight: "(H D) E -> L E H D"    ⇒    q_proj.lora_A.weight: "Z E -> L E Z"
                                            q_proj.lora_B.weight: "(H D) Z -> L Z H D"

Each expert has a separate pair in the files that are written, with the tensor names of the release. PEFT stacks the
pairs itself if transformers 5 stacks the experts. Stacked adapters (`target_parameters`) can also be read:

experts.base_layer.lora_A.weight: "(X Z) E -> L X E Z"      of `gate_up_proj`; for `down_proj`: experts.lora_A.weight
experts.base_layer.lora_B.weight: "F (Z X) -> L X Z F"      output features of gate, then of up

If a matrix of the release corresponds to n of our matrices, their pairs are written as blocks of a single pair of rank
n r (`rank_pattern`). If a file has a pair of rank r for such a matrix, all n matrices share its first factor.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshpar.interop.fields import bad_value
from meshpar.interop.files import Folder, read_json, write, write_json
from meshpar.interop.hf import (
    CheckpointTensors,
    check_dtype,
    create_folder,
    describe,
    family_of,
    read_sharded,
    source_of,
    warn_rounded,
)
from meshpar.interop.weight_mapping import WeightMapping, contiguous
from meshpar.models.config import TransformerConfig
from meshpar.sharding.context import clear_context_mesh
from meshpar.sharding.errors import near, problem
from meshpar.sharding.types import PAIR, matrix_of, tree_leaves_with_paths
from meshpar.training.lora import Lora, of_pair
from meshpar.training.state import TrainState

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ROOT = "base_model.model."
"""Prefix of the tensor names of the model."""
PLAIN = {
    "bias": "none", "fan_in_fan_out": False, "layers_to_transform": None, "modules_to_save": None, "use_dora": False,
    "use_rslora": False, "lora_bias": False, "layer_replication": None, "trainable_token_indices": None,
}  # fmt: skip
"""Fields of adapter_config.json that affect the adapter, with their values for plain LoRA."""
NEWER = {
    "alora_invocation_tokens": None, "arrow_config": None, "enable_lora": None, "kasa_config": None,
    "megatron_config": None, "monteclora_config": None, "use_bdlora": None, "use_qalora": False, "velora_config": None,
}  # fmt: skip
"""Like `PLAIN`, for fields of newer PEFT versions. They are not written, because older versions reject them."""
READ = frozenset({
    "alpha_pattern", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "target_parameters",
})  # fmt: skip
"""Fields that determine the adapters."""
HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
    "merge_weights", "peft_version", "qalora_group_size", "revision", "target_modules", "task_type",
})  # fmt: skip
"""Fields that do not affect a trained adapter, or only in combination with `PLAIN`, `NEWER` or `READ`. The tensor names
determine which modules have a pair."""

STACKED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
"""Parameter of transformers 5 that contains each expert matrix."""

MERGE = "merge the adapter into its model with PEFT, and load the merged model"
"""Fix for unsupported adapters."""
SUPPORTED = {"init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal", "mica"), "peft_type": ("LORA",)}
"""Supported values of `READ` fields. Other initializations of a pair also change the base weights."""


def to_peft(
    state: TrainState,
    config: TransformerConfig,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    base: str | None = None,
    dtype: str | None = None,
) -> Path:
    """Write the adapters of a state as a folder that PEFT can load.

    Args:
      state: the state of a model with adapters.
      config: the config of the model.
      folder: the folder to create.
      like: the folder that the model was loaded from, by default `config.source`. It determines the family.
      base: name of the base model for adapter_config.json: a folder or a name on the hub.
      dtype: dtype of the adapters. `None` means their current dtype.

    Returns:
      The path of the folder.

    Raises:
      ValueError: the model has no adapters, the folder already exists, or the family has no matrix for an adapter.
    """
    lora = _lora_of(state, "to_peft")
    if dtype is not None:
        check_dtype("to_peft", dtype)
    rows = _rows(config, like, {})
    pairs = {path: x for path, x in tree_leaves_with_paths(state.params) if of_pair(path)}
    tensors = _tensors(rows, pairs, lora.rank)
    checkpoint = CheckpointTensors(tensors, pairs, {}, None, dtype)
    files = dict.fromkeys(checkpoint.pieces, WEIGHTS)
    ranks = {name: pair.file_size("Z") for pair in tensors for name, _ in pair.tensors() if "Z" in pair.parts}
    ranks = {_module_of(name).removeprefix(ROOT): rank for name, rank in ranks.items()}
    document = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0, "rank_pattern": ranks,
        "alpha_pattern": {name: lora.scale * rank for name, rank in ranks.items()},
        **_targets(files, rows), **PLAIN,
    }  # fmt: skip

    def fill(fresh: Path) -> None:
        write(fresh, files, checkpoint)
        write_json(fresh / CONFIG, document)

    create_folder(folder, fill, checkpoint, files)
    return Path(folder)


def lora_of_peft(folder: str | Path, config: TransformerConfig, *, like: str | Path | None = None) -> Lora:
    """Return the adapter config of a PEFT folder. `load_peft` loads the weights.

    Args:
      folder: a folder with `adapter_config.json` and `adapter_model.safetensors`.
      config: the config of the base model.
      like: the folder that the model was loaded from, by default `config.source`. It determines the family.

    Raises:
      ValueError: a file is damaged, or the adapter has unsupported options.
    """
    path = Path(folder) / CONFIG
    document, lora = _read_config(path)
    with Folder(folder, single=WEIGHTS) as files:
        modules = _modules(files, _rows(config, like, document, path), lora.rank, path)
    return dataclasses.replace(lora, modules="|".join(map(re.escape, modules)))


def _read_config(path: Path) -> tuple[dict[str, Any], Lora]:
    """Read an adapter_config.json, and check that it describes LoRA with the same scale for all modules."""
    document, plain = read_json(path), PLAIN | NEWER
    for name, value in {"peft_type": None, **document}.items():
        if name not in READ | HARMLESS | plain.keys():
            reason = "the field is unknown, and it may affect the adapter"
            raise bad_value(str(path), name, value, reason, MERGE, code="unknown-name")
        supported = SUPPORTED.get(name, (plain.get(name),))
        if name in SUPPORTED | plain and value not in supported and (value or any(supported)):
            # PEFT cannot merge adapters that apply only after an invocation.
            fix = "use an adapter without it" if name == "alora_invocation_tokens" else MERGE
            raise bad_value(str(path), name, value, f"it must be one of {supported}", fix)
    rank, alpha = document.get("r"), document.get("lora_alpha")
    try:
        lora = Lora(rank=rank, alpha=alpha)  # type: ignore[arg-type]
    except ValueError as error:
        reason, fix = str(error).rstrip("."), "use a file written by PEFT"
        raise problem(str(path), "read the adapters", reason, fix, code="out-of-range") from error
    patterns = [document.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    ranks, alphas = (pattern if isinstance(pattern, dict) else {"": None} for pattern in patterns)
    for name in sorted({*ranks, *alphas}):
        numbers: list[Any] = [ranks.get(name, rank), alpha, alphas.get(name, alpha), rank]
        is_number = all(isinstance(x, int | float) and abs(x) < 1e9 for x in numbers)
        if not is_number or not math.isclose(numbers[0] * numbers[1], numbers[2] * numbers[3]):
            field, reason = ("rank" if name in ranks else "alpha"), "alpha / rank must be the same for all modules"
            raise bad_value(str(path), f"{field}_pattern", ranks or alphas, reason, MERGE)
    return document, lora


@clear_context_mesh()
def load_peft(
    state: TrainState, config: TransformerConfig, folder: str | Path, *, like: str | Path | None = None
) -> TrainState:
    """Return the state with the adapter weights of a PEFT folder. The optimizer state is unchanged.

    Args:
      state: the state of a model with these adapters; see `lora_of_peft`.
      config: the config of the base model.
      folder: a folder with `adapter_config.json` and `adapter_model.safetensors`.
      like: the folder that the model was loaded from, by default `config.source`. It determines the family.

    Raises:
      ValueError: as `lora_of_peft`; the adapters of the model have another scale; or tensors are missing, unexpected
        or have the wrong shape.
    """
    lora, path = _lora_of(state, "load_peft"), Path(folder) / CONFIG
    document, saved = _read_config(path)
    if not math.isclose(saved.scale, lora.scale):
        reason = f"the adapters of the model have alpha / rank = {lora.scale:g}"
        requested, fix = f"use lora_alpha / r = {saved.scale:g}", "build the model with lora_of_peft(...)"
        raise problem(f"load_peft, {path}", requested, reason, fix, code="conflict")
    leaves = dict(tree_leaves_with_paths(state.setup.abstract.params))
    rows = _rows(config, like, document, path)
    with Folder(folder, single=WEIGHTS) as files:
        tensors = _tensors(rows, filter(of_pair, leaves), lora.rank, files)
        shapes = {name: pair.file_shape for pair in tensors for name, _ in pair.tensors()}
        for name in sorted(shapes.keys() | files.entries.keys()):
            shape = files.entries[name].shape if name in files.entries else None
            if shape != shapes.get(name):
                reason, fix = f"its shape in the model is {shapes.get(name)}", "build the model with lora_of_peft(...)"
                if shape is None:
                    reason = "the file has no such tensor"
                elif name not in shapes:
                    reason, fix = "the adapters of the model have no such tensor", near(name, shapes)
                where = f"{files.path}, `{name[:100]}`"
                raise problem(where, "read the tensor", reason, fix, code="wrong-shape")
        _check_blocks(files, tensors)
        warn_rounded(f"load_peft, `{folder}`", files, [leaves[pair.path] for pair in tensors])
        loaded = {pair.path: read_sharded(files, pair, leaves[pair.path]) for pair in tensors}
    params = [loaded.get(path, x) for path, x in tree_leaves_with_paths(state.params)]
    return state.replace(params=jax.tree.unflatten(jax.tree.structure(state.params), params))


def _lora_of(state: TrainState, where: str) -> Lora:
    lora = state.setup.model.lora
    if lora is None:
        reason, fix = "the model has no adapters", "build it with mp.lora(...), or use to_hf for the full model"
        raise problem(where, "find adapters", reason, fix, code="not-found")
    return lora


def _rows(
    config: TransformerConfig, like: str | Path | None, document: Mapping[str, Any], path: Path = Path(CONFIG)
) -> list[WeightMapping]:
    """Return the matrices of the family that may have a pair. `target_parameters` selects the stacked experts."""
    source = source_of(config, like, "adapters")
    family = family_of(config) if source is None else describe(source).family
    targets = document.get("target_parameters") or []
    stacked = {str(name).rpartition(".")[2] for name in targets} if isinstance(targets, list) else {"?"}
    stacked -= {"weight"}  # the weight of a linear layer, which has an ordinary pair
    if stacked - {*STACKED.values()}:
        reason = f"only {' and '.join(dict.fromkeys(STACKED.values()))} of experts are supported"
        raise bad_value(str(path), "target_parameters", targets, reason, MERGE)
    rows = []
    for mapping in family.tensors(config):
        name = mapping.path.rpartition("/")[2]
        if len(mapping.file_dims) != 2 or name in ("embedding", "router"):
            continue
        if "{X}" in mapping.template and STACKED[name] in stacked:
            inner = ".base_layer" if len(stacked) == 2 and name != "down" else ""
            module = mapping.template.partition(".experts.")[0].replace("block_sparse_moe", "mlp")
            width, half = mapping.sizes["F"], name == "up"
            parts = {} if name == "down" else {"F": contiguous(half * width, (half + 1) * width, 2 * width)}
            mapping = dataclasses.replace(mapping, template=f"{module}.experts{inner}.weight", parts=parts)
        rows.append(mapping)
    return rows


def _tensors(
    table: list[WeightMapping], pairs: Iterable[str], rank: int, files: Folder | None = None
) -> list[WeightMapping]:
    """Return the mappings between our adapters and the tensors of PEFT, in existing files or in files to write."""
    by_path = {row.path: row for row in table}
    matrix_by_pair = {path: by_path.get(matrix_of(path.rpartition("/")[0])) for path in sorted(pairs)}
    matrices, mappings = list(matrix_by_pair.values()), []
    for path, matrix in matrix_by_pair.items():
        if matrix is None:
            reason, fix = "the family has no such matrix", "merge the adapters, and use to_hf"
            raise problem(f"adapters, `{path}`", "convert the pair to PEFT", reason, fix, code="unsupported-feature")
        same_tensor = [
            row.path
            for row in table
            if row in matrices and (row.template, row.first_layer) == (matrix.template, matrix.first_layer)
        ]
        pair = _pair_of(matrix, path, is_inward=path.endswith(PAIR[0]), rank=rank)
        start, width = same_tensor.index(matrix.path) * rank, len(same_tensor) * rank
        # In a file, the matrices may share a pair instead of having a block each.
        entry = None if files is None else files.entries.get(next(name for name, _ in pair.tensors()))
        if len(same_tensor) > 1 and (entry is None or entry.shape != pair.file_shape):
            pair = dataclasses.replace(pair, parts={**pair.parts, "Z": contiguous(start, start + rank, width)})
        mappings.append(pair)
    return mappings


def _pair_of(matrix: WeightMapping, path: str, *, is_inward: bool, rank: int) -> WeightMapping:
    out, into = (f"({' '.join(group)})" if len(group) > 1 else group for group in matrix.file_dims)
    outputs, inputs = matrix.file_dims
    lead = [letter for letter in matrix.model_dims if letter not in outputs + inputs]
    dims = [*lead, *inputs, "Z"] if is_inward else [*lead, "Z", *outputs]
    inward, outward = ("Z", "Z") if "X" not in lead or "{X}" in matrix.template else ("(X Z)", "(Z X)")
    side = f"{inward} {into}" if is_inward else f"{out} {outward}"
    name = ROOT + matrix.template.removesuffix("weight") + ("lora_A.weight" if is_inward else "lora_B.weight")
    sizes = {**matrix.sizes, "Z": rank}
    return dataclasses.replace(matrix, template=name, path=path, dims=f"{side} -> {' '.join(dims)}", sizes=sizes)


def _check_blocks(files: Folder, tensors: list[WeightMapping]) -> None:
    """Check that a pair shared by multiple matrices is block-diagonal, with a block for each matrix."""
    by_name: dict[str, list[WeightMapping]] = {}
    for pair in tensors:
        if pair.path.endswith(PAIR[1]) and pair.parts:
            for name in dict.fromkeys(name for name, _ in pair.tensors()):
                by_name.setdefault(name, []).append(pair)
    for name, blocks in by_name.items():
        off_diagonal = np.array(files.read_full(name))
        for pair in blocks:
            shape = [pair.sizes[letter] for letter in pair.model_dims if letter in "".join(pair.file_dims)]
            pair.write(np.zeros(shape, off_diagonal.dtype), off_diagonal)
        if off_diagonal.any():
            reason = "the pair combines multiple matrices of the model, and it is not block-diagonal"
            where = f"{files.path}, `{name[:100]}`"
            raise problem(where, "split the pair", reason, MERGE, code="unsupported-feature")


def _module_of(name: str) -> str:
    """Return the module path of an adapter tensor."""
    return name.rpartition(".lora_")[0]


def _targets(pairs: Iterable[str], rows: list[WeightMapping]) -> dict[str, Any]:
    """Return `target_modules` and `target_parameters` of an adapter_config.json.

    With transformers 5, PEFT stacks every target module that is named like an expert matrix. If such a module is not
    part of an expert, it is listed under `target_parameters`, which PEFT does not stack.
    """
    modules = {_module_of(name).removeprefix(ROOT) for name in pairs}
    all_modules = {name.removesuffix(".weight") for row in rows for name, _ in row.tensors()}
    expert_names = {row.template.split(".")[-2] for row in rows if "{X}" in row.template}
    as_params = {name for name in modules if name.rpartition(".")[2] in expert_names and ".experts." not in name}
    parameters = [f"{name}.weight" for name in _suffixes(as_params, all_modules)]
    return {"target_modules": _suffixes(modules - as_params, all_modules), "target_parameters": parameters or None}


def _suffixes(modules: set[str], all_modules: set[str]) -> list[str]:
    """Return the shortest suffixes of the module names that match no other module."""
    for depth in itertools.count(1):
        suffixes, other_suffixes = (
            {".".join(name.split(".")[-depth:]) for name in names} for names in (modules, all_modules - modules)
        )
        if not suffixes & other_suffixes:
            return sorted(suffixes)
    raise AssertionError


def _modules(files: Folder, rows: list[WeightMapping], rank: int, path: Path) -> list[str]:
    """Return the paths of our layers that have a pair in a PEFT folder."""
    by_module: dict[str, list[WeightMapping]] = {}
    for row in rows:
        for module in _modules_of(row):
            by_module.setdefault(module, []).append(row)
    targets: dict[str, WeightMapping] = {}
    for name, entry in files.entries.items():
        module, side = _module_of(name), re.fullmatch(r".*\.lora_([AB])\.weight", name)
        matrices = by_module.get(module) if side else None
        if side is None or matrices is None:
            reason = "it is not an adapter of a linear layer of the family"
            fix = f"{MERGE}; adapters of routers, embeddings and other tensors are not supported"
            raise problem(f"{files.path}, `{name[:100]}`", "read the tensor", reason, fix, code="unknown-name")
        # A pair may stack the experts of a layer, and it may have a block for each of our matrices.
        stacked = 1 if "{X}" in matrices[0].template else matrices[0].sizes["X"] if "X" in matrices[0].model_dims else 1
        width = dict(zip("AB", (entry.shape[:1], entry.shape[1:2]), strict=True))[side[1]]
        if width and width[0] not in (rank * stacked, rank * stacked * len(matrices)):
            reason = f"`{module[:100]}` has rank {width[0] / stacked:g}, and all pairs must have rank `r`"
            raise bad_value(str(path), "r", rank, reason, MERGE)
        targets |= {row.path: row for row in matrices}
    for row in targets.values():
        for module in _modules_of(row):
            if f"{module}.lora_A.weight" not in files.entries:
                where = f"{files.path}, `{module}.lora_A.weight`"
                reason = "it is missing, and stacked layers need a pair in every layer or in none"
                raise problem(where, "read the tensor", reason, MERGE, code="not-found")
    return sorted(path.removesuffix("/kernel") for path in targets)


def _modules_of(row: WeightMapping) -> list[str]:
    """Return PEFT's names of the modules that a table row covers."""
    return list(dict.fromkeys(ROOT + name.removesuffix(".weight") for name, _ in row.tensors()))
