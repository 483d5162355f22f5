"""Reading and writing LoRA adapters in the format of PEFT (`adapter_model.safetensors`, `adapter_config.json`).

q_proj.weight: "(H D) E -> L E H D"    ⇒    q_proj.lora_A.weight: "Z E -> L E Z"
                                            q_proj.lora_B.weight: "(H D) Z -> L Z H D"

Each expert has its own pair, under the tensor names of the release. PEFT stacks them for transformers 5. Its stacked
adapters (`target_parameters`) can be read too:

experts.base_layer.lora_A.weight: "(X Z) E -> L X E Z"      of `gate_up_proj`; of `down_proj` experts.lora_A.weight
experts.base_layer.lora_B.weight: "F (Z X) -> L X Z F"      gate, then up

If a matrix of the release corresponds to n arrays here, their pairs are the blocks of one pair of rank n r
(`rank_pattern`). If that pair has rank r, all n arrays share its lora_A.
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

from meshpar.interop.files import Folder, read_json, whole_folder, write, write_json
from meshpar.interop.hf import Made, born, check_dtype, describe, family_of, tell_rounded
from meshpar.interop.weight_mapping import WeightMapping, contiguous
from meshpar.models.config import TransformerConfig
from meshpar.sharding.context import apart
from meshpar.sharding.types import PAIR, matrix_of, near, problem, tree_leaves_with_paths
from meshpar.training.lora import Lora, of_pair
from meshpar.training.state import TrainState

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ROOT = "base_model.model."
"""Prefix of the names of the base model's tensors."""
PLAIN = {
    "bias": "none", "fan_in_fan_out": False, "layers_to_transform": None, "modules_to_save": None, "use_dora": False,
    "use_rslora": False, "lora_bias": False, "layer_replication": None, "trainable_token_indices": None,
}  # fmt: skip
"""Fields of adapter_config.json that change the computation, with their value for plain LoRA."""
NEWER = {
    "alora_invocation_tokens": None, "arrow_config": None, "enable_lora": None, "kasa_config": None,
    "megatron_config": None, "monteclora_config": None, "use_bdlora": None, "use_qalora": False, "velora_config": None,
}  # fmt: skip
"""More such fields, which are not written because some versions of PEFT do not have them."""
READ = frozenset({
    "alpha_pattern", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "target_parameters",
})  # fmt: skip
"""Fields that are read."""
HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
    "merge_weights", "peft_version", "qalora_group_size", "revision", "target_modules", "task_type",
})  # fmt: skip
"""Fields that do not change the computation, or only together with a field in `PLAIN`, `NEWER` or `READ`.

The tensor names determine which modules have adapters.
"""

STACKED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
"""The parameter of transformers 5 that contains each expert matrix."""

MERGE = "merge the adapter into its model with PEFT, and read the merged model"
"""The fix for adapters that cannot be expressed here."""
KEEP_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that do not modify the base model. The others subtract the initial product."""


def to_peft(
    state: TrainState,
    config: TransformerConfig,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    base: str | None = None,
    dtype: str | None = None,
) -> Path:
    """Write the adapters of a state as a PEFT folder.

    Args:
      state: state of a model with adapters.
      config: config of the model.
      folder: path of the new folder.
      like: source folder of the model, which determines the family.
      base: base model to name in adapter_config.json: a folder, or a name on the Hugging Face hub.
      dtype: dtype of the adapters. None: unchanged.

    Returns:
      the folder.

    Raises:
      ValueError: the model has no adapters; the folder exists; the family has no matrix for an adapter.
    """
    lora = _lora_of(state, "to_peft")
    if dtype is not None:
        check_dtype("to_peft(dtype=...)", dtype)
    rows = _rows(config, like, {})
    pairs = {path: x for path, x in tree_leaves_with_paths(state.params) if of_pair(path)}
    tensors = _tensors(rows, pairs, lora.rank)
    made = Made(tensors, pairs, {}, None, dtype)
    sizes = {name: made.nbytes(name) for name in made.pieces}
    with whole_folder(folder) as fresh:
        write(fresh, dict.fromkeys(sizes, WEIGHTS), made, sum(sizes.values()), index=False)
        wide = {name: one.file_size("Z") for one in tensors for name, _ in one.tensors() if "Z" in one.parts}
        wide = {_module_of(name).removeprefix(ROOT): rank for name, rank in wide.items()}
        document = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
            "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0, "rank_pattern": wide,
            "alpha_pattern": {name: lora.scale * rank for name, rank in wide.items()}, **_targets(sizes, rows), **PLAIN,
        }  # fmt: skip
        write_json(fresh / CONFIG, document)
    return Path(folder)


def lora_of_peft(folder: str | Path, config: TransformerConfig, *, like: str | Path | None = None) -> Lora:
    """Return the `Lora` of a PEFT folder, with which the model is built. `load_peft` loads the weights.

    Args:
      folder: folder with `adapter_config.json` and `adapter_model.safetensors`.
      config: config of the base model.
      like: source folder of the model, which determines the family.

    Raises:
      ValueError: a damaged file, or an unsupported kind of adapter.
    """
    path = Path(folder) / CONFIG
    document = _document(path)
    lora = _plain_lora(document, path)
    with Folder(folder, single=WEIGHTS) as files:
        modules = _modules(files, _rows(config, like, document, path), lora.rank, path)
    return dataclasses.replace(lora, modules="|".join(map(re.escape, modules)))


def _plain_lora(document: Mapping[str, Any], path: Path) -> Lora:
    """Return the rank and scale in an adapter_config.json. Raises `ValueError` if modules have different scales."""
    rank, alpha = document.get("r"), document.get("lora_alpha")
    try:
        lora = Lora(rank=rank, alpha=alpha)  # type: ignore[arg-type]
    except ValueError as error:
        raise problem(str(path), "read it", str(error).rstrip("."), "take the file that PEFT wrote") from error
    _check_patterns(document, path)
    return lora


def _document(path: Path) -> dict[str, Any]:
    """Read an adapter_config.json and check that it describes plain LoRA.

    Raises:
      ValueError: an unknown field, or a value that changes the computation.
    """
    document, plain = read_json(path), {**PLAIN, **NEWER}
    if document.get("peft_type") != "LORA":
        shown = repr(document.get("peft_type"))[:60]
        raise problem(f"{path}, `peft_type`", f"read {shown}", "adapters are LORA here", MERGE)
    for field, found in document.items():
        if field not in READ | HARMLESS | plain.keys():
            exists = "this field is unknown, and it may change what the adapter computes"
            raise problem(f"{path}, `{field[:60]}`", "read it", exists, MERGE)
        value = plain.get(field)
        if field in plain and found != value and (found or value):
            if field == "alora_invocation_tokens":  # which PEFT cannot merge either
                exists = "adapters act on all tokens here, not only after an invocation"
                raise problem(f"{path}, `{field}`", f"be {found!r}"[:80], exists, "take an adapter without it")
            raise problem(f"{path}, `{field}`", f"be {found!r}"[:80], f"adapters here have {value!r}", MERGE)
    start = document.get("init_lora_weights")
    if start not in KEEP_THE_BASE:
        exists = "PEFT changed the model's matrices when it made such an adapter, or the value is unknown"
        raise problem(f"{path}, `init_lora_weights`", f"be {start!r}"[:80], exists, MERGE)
    return document


@apart()
def load_peft(
    state: TrainState, config: TransformerConfig, folder: str | Path, *, like: str | Path | None = None
) -> TrainState:
    """Return a state with the adapters of a PEFT folder. The optimizer state does not change.

    Args:
      state: state of a model with these adapters; see `lora_of_peft`.
      config, folder, like: as for `lora_of_peft`.

    Raises:
      ValueError: as `lora_of_peft`; the scale differs from that of the model; missing or unexpected tensors, or wrong
        shapes.
    """
    lora, path = _lora_of(state, "load_peft"), Path(folder) / CONFIG
    document = _document(path)
    scale = _plain_lora(document, path).scale
    if not math.isclose(scale, lora.scale):
        exists = f"the model's adapters have alpha / rank {lora.scale:g}"
        asked, fix = f"have lora_alpha / r {scale:g}", "make the model with lora_of_peft(...)"
        raise problem(f"load_peft, {path}", asked, exists, fix)
    leaves = dict(tree_leaves_with_paths(state.setup.abstract.params))
    rows = _rows(config, like, document, path)
    with Folder(folder, single=WEIGHTS) as files:
        tensors = _tensors(rows, {path: leaves[path] for path in leaves if of_pair(path)}, lora.rank, files)
        shapes = {name: one.file_shape for one in tensors for name, _ in one.tensors()}
        for name in sorted(shapes.keys() | files.entries.keys()):
            found = files.entries[name].shape if name in files.entries else None
            if found != shapes.get(name):
                exists = f"the model's adapters have {shapes.get(name, 'none')} there, and the file {found or 'none'}"
                fix = "make the model with lora_of_peft(...)" + ("" if name in shapes else f". {near(name, shapes)}")
                raise problem(f"{files.path}, `{name[:100]}`", "read it", exists, fix)
        _check_blocks(files, tensors)
        tell_rounded(f"load_peft, `{folder}`", files, [leaves[one.path] for one in tensors])
        read = {one.path: born(files, one, leaves[one.path]) for one in tensors}
    params = [read.get(path, x) for path, x in tree_leaves_with_paths(state.params)]
    return state.replace(params=jax.tree.unflatten(jax.tree.structure(state.params), params))


def _lora_of(state: TrainState, where: str) -> Lora:
    lora = state.setup.model.lora
    if lora is None:
        exists, fix = "the model has no adapters", "make it with mp.lora(...), or use to_hf for the whole model"
        raise problem(where, "find adapters", exists, fix)
    return lora


def _rows(
    config: TransformerConfig, like: str | Path | None, document: Mapping[str, Any], path: Path = Path(CONFIG)
) -> list[WeightMapping]:
    """The family's matrices that may have a pair; of stacked experts in the tensors that the document says.

    Raises:
      ValueError: it says other parameters than those of experts.
    """
    family = family_of(config) if like is None else describe(Path(like)).family
    given = document.get("target_parameters") or []
    stacked = {str(name).rpartition(".")[2] for name in given} if isinstance(given, list) else {"?"}
    stacked -= {"weight"}  # of a linear layer, whose pair is the layer's
    if stacked - {*STACKED.values()}:
        exists = f"of parameters {' and '.join(dict.fromkeys(STACKED.values()))} of experts have adapters here"
        raise problem(f"{path}, `target_parameters`", f"be {given!r}"[:80], exists, MERGE)
    rows = []
    for one in family.tensors(config):
        name = one.path.rpartition("/")[2]
        if len(one.file_dims) != 2 or name in ("embedding", "router"):
            continue
        if "{X}" in one.template and STACKED[name] in stacked:
            inner = ".base_layer" if len(stacked) == 2 and name != "down" else ""
            module = one.template.partition(".experts.")[0].replace("block_sparse_moe", "mlp")
            wide, at = one.sizes["F"], name == "up"
            parts = {} if name == "down" else {"F": contiguous(at * wide, (at + 1) * wide, 2 * wide)}
            one = dataclasses.replace(one, template=f"{module}.experts{inner}.weight", parts=parts)
        rows.append(one)
    return rows


def _tensors(
    table: list[WeightMapping], pairs: Mapping[str, Any], rank: int, files: Folder | None = None
) -> list[WeightMapping]:
    """The table of adapters: for each of ours, PEFT's tensors, as they are in files or are to be written."""
    of = {row.path: row for row in table}
    chosen = [of.get(matrix_of(path.rpartition("/")[0])) for path in sorted(pairs)]
    found = []
    for path, one in zip(sorted(pairs), chosen, strict=True):
        if one is None:
            exists = "PEFT has one pair a matrix of the release, and there this one is none"
            raise problem(f"adapters, `{path}`", "name it as PEFT does", exists, "merge the adapters, and use to_hf")
        together = [
            row.path
            for row in table
            if row in chosen and (row.template, row.first_layer) == (one.template, one.first_layer)
        ]
        pair = _pair_of(one, path, is_inward=path.endswith(PAIR[0]), rank=rank)
        at, width = together.index(one.path), len(together) * rank
        if len(together) > 1 and not _is_shared(files, pair):
            pair = dataclasses.replace(pair, parts={**pair.parts, "Z": contiguous(at * rank, at * rank + rank, width)})
        found.append(pair)
    return found


def _is_shared(files: Folder | None, pair: WeightMapping) -> bool:
    """Return whether a matrix for several arrays has one shared pair of the adapters' rank."""
    entry = None if files is None else files.entries.get(next(name for name, _ in pair.tensors()))
    return entry is not None and entry.shape == pair.file_shape


def _pair_of(one: WeightMapping, path: str, *, is_inward: bool, rank: int) -> WeightMapping:
    out, into = (f"({' '.join(group)})" if len(group) > 1 else group for group in one.file_dims)
    outputs, inputs = one.file_dims
    lead = [letter for letter in one.model_dims if letter not in outputs + inputs]
    dims = [*lead, *inputs, "Z"] if is_inward else [*lead, "Z", *outputs]
    inward, outward = ("Z", "Z") if "X" not in lead or "{X}" in one.template else ("(X Z)", "(Z X)")
    side = f"{inward} {into}" if is_inward else f"{out} {outward}"
    name = ROOT + one.template.removesuffix("weight") + ("lora_A.weight" if is_inward else "lora_B.weight")
    sizes = {**one.sizes, "Z": rank}
    return dataclasses.replace(one, template=name, path=path, dims=f"{side} -> {' '.join(dims)}", sizes=sizes)


def _check_patterns(document: Mapping[str, Any], path: Path) -> None:
    """Check that all modules have the same scale."""
    given = [document.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    ranks, alphas = (one if isinstance(one, dict) else {"": None} for one in given)
    rank, alpha = document.get("r"), document.get("lora_alpha")
    for name in sorted({*ranks, *alphas}):
        numbers: list[Any] = [ranks.get(name, rank), alpha, alphas.get(name, alpha), rank]
        is_number = all(isinstance(x, int | float) and abs(x) < 1e9 for x in numbers)
        if not is_number or not math.isclose(numbers[0] * numbers[1], numbers[2] * numbers[3]):
            exists = "rank and alpha are one pair of numbers here, or as many times both for a matrix that is several"
            where = f"{path}, `{'rank' if name in ranks else 'alpha'}_pattern`"
            raise problem(where, f"be {dict(ranks or alphas)!r}"[:80], exists, MERGE)


def _check_blocks(files: Folder, tensors: list[WeightMapping]) -> None:
    """Check that the pair of a matrix for several arrays is block-diagonal."""
    of_name: dict[str, list[WeightMapping]] = {}
    for one in tensors:
        if one.path.endswith(PAIR[1]) and one.parts:
            for name in dict.fromkeys(name for name, _ in one.tensors()):
                of_name.setdefault(name, []).append(one)
    for name, several in of_name.items():
        rest = np.array(files.read_full(name))
        for one in several:
            shape = [one.sizes[letter] for letter in one.model_dims if letter in "".join(one.file_dims)]
            one.write(np.zeros(shape, rest.dtype), rest)
        if rest.any():
            exists = "the release's matrix is several of ours, and these are not the pairs of each, side by side"
            raise problem(f"{files.path}, `{name[:100]}`", "take it apart", exists, MERGE)


def _module_of(name: str) -> str:
    """Return the module name in the name of an adapter tensor."""
    return name.rpartition(".lora_")[0]


def _targets(pairs: Iterable[str], rows: list[WeightMapping]) -> dict[str, Any]:
    """Return `target_modules` and `target_parameters` of the modules with adapters.

    With transformers 5, PEFT stacks every module whose name ends like that of an expert. Modules with such a name that
    are not experts are therefore listed as parameters.
    """
    chosen = {_module_of(name).removeprefix(ROOT) for name in pairs}
    known = {name.removesuffix(".weight") for one in rows for name, _ in one.tensors()}
    ends = {one.template.split(".")[-2] for one in rows if "{X}" in one.template}
    beside = {name for name in chosen if name.rpartition(".")[2] in ends and ".experts." not in name}
    parameters = [f"{name}.weight" for name in _ends(beside, known)]
    return {"target_modules": _ends(chosen - beside, known), "target_parameters": parameters or None}


def _ends(chosen: set[str], known: set[str]) -> list[str]:
    """Return the shortest name suffixes that do not match other modules."""
    for depth in itertools.count(1):
        ends, others = ({".".join(name.split(".")[-depth:]) for name in names} for names in (chosen, known - chosen))
        if not ends & others:
            return sorted(ends)
    raise AssertionError


def _modules(files: Folder, rows: list[WeightMapping], rank: int, path: Path) -> list[str]:
    """Return the paths of our layers that have a pair in a PEFT folder.

    Raises:
      ValueError: a tensor that is not a pair of the family; a pair of another rank; a matrix with pairs in some layers
        only.
    """
    of_module: dict[str, list[WeightMapping]] = {}
    for one in rows:
        for module in _modules_of(one):
            of_module.setdefault(module, []).append(one)
    found: dict[str, WeightMapping] = {}
    for name, entry in files.entries.items():
        module, side = _module_of(name), re.fullmatch(r".*\.lora_([AB])\.weight", name)
        matrices = of_module.get(module) if side else None
        if side is None or matrices is None:
            exists = "the family has no linear layer of that name, or it is no adapter"
            fix = f"{MERGE}: routers, tables and other tensors have no adapters here"
            raise problem(f"{files.path}, `{name[:100]}`", "read it", exists, fix)
        # The experts of a layer may be stacked in one pair, and a matrix that is several of ours may have a block each.
        stacked = 1 if "{X}" in matrices[0].template else matrices[0].sizes["X"] if "X" in matrices[0].model_dims else 1
        width = dict(zip("AB", (entry.shape[:1], entry.shape[1:2]), strict=True))[side[1]]
        if width and width[0] not in (rank * stacked, rank * stacked * len(matrices)):
            asked = f"give `{module[:100]}` rank {width[0] / stacked:g}"
            exists = f"all pairs must have the same rank, and `r` is {rank}"
            raise problem(f"{path}, `rank_pattern`", asked, exists, MERGE)
        found |= {one.path: one for one in matrices}
    for one in found.values():
        for module in _modules_of(one):
            if f"{module}.lora_A.weight" not in files.entries:
                where = f"{files.path}, `{module}.lora_A.weight`"
                exists = "it is missing, and stacked layers need a pair in every layer or in none"
                raise problem(where, "read it", exists, MERGE)
    return sorted(ours.removesuffix("/kernel") for ours in found)


def _modules_of(one: WeightMapping) -> list[str]:
    """Return PEFT's names of the modules that a table row covers."""
    return list(dict.fromkeys(ROOT + name.removesuffix(".weight") for name, _ in one.tensors()))
