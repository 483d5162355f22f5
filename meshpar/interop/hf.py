"""Conversion of Hugging Face folders to training states and back.

    config.json ─► family ─► TransformerConfig ─► model, mesh, strategy ─► sharding of each array
    *.safetensors ─► tensors checked against the family ─► slice by slice ─► each shard on its device

Nothing is unpickled, and no code in a folder is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.interop.block_fp8 import CONFIG_FIELD, Block, read_block_shape
from meshpar.interop.decoder import EMBEDDING, HEAD, Family, check_known
from meshpar.interop.families import BY_TYPE, MISSING_FIELDS
from meshpar.interop.fields import make_config, read_rope, write_rope
from meshpar.interop.files import (
    INDEX,
    SINGLE,
    Folder,
    assigned,
    read_json,
    tensors_by_file,
    whole_folder,
    write,
    write_json,
)
from meshpar.interop.weight_mapping import WeightMapping
from meshpar.layers.precision import Precision, check_bits
from meshpar.models.config import PARAM_DTYPES, TransformerConfig
from meshpar.parallel import Strategy
from meshpar.sharding.context import apart
from meshpar.sharding.host_resources import check_inside
from meshpar.sharding.rules import Rules
from meshpar.sharding.types import PyTree, near, problem, tree_leaves_with_paths
from meshpar.training.lora import Lora, fresh_pairs, merged_params, of_pair
from meshpar.training.state import Setup, TrainState, make_setup

CONFIG = "config.json"
FILE_BYTES = 5 * 10**9
"""Default maximum size of a weight file."""
BESIDE = (
    "additional_chat_templates/*", "chat_template.*", "generation_config.json", "merges.txt",
    "special_tokens_map.json", "tokenizer.*", "tokenizer_config.json", "vocab.*",
)  # fmt: skip
"""Files that are copied unchanged."""


class Described(NamedTuple):
    """The parsed config.json of a folder."""

    config: TransformerConfig
    family: Family
    document: dict[str, Any]
    block: Block | None = None
    """Block shape of block-scaled FP8 weights."""


def from_hf(
    folder: str | Path,
    *,
    mesh: Mesh,
    strategy: Strategy | Rules,
    tx: optax.GradientTransformation | None = None,
    dtype: str | None = None,
    precision: Precision | None = None,
    lora: Lora | None = None,
    key: jax.Array | int = 0,
    **changes: Any,
) -> tuple[TransformerConfig, TrainState]:
    """Load a folder with `config.json` and safetensors files into a training state.

    Each shard is read from the files and moved to its device. Host memory holds one shard of one array at a time.
    Block-scaled FP8 releases (DeepSeek-V3, Kimi-K2) are dequantized in float32 and rounded to `dtype`.

    Args:
      folder: a release, or the output of transformers' `save_pretrained`.
      mesh: the device mesh.
      strategy: a strategy, or `Rules`.
      tx: the optimizer. None if the model is not trained.
      dtype: dtype of the parameters. None: the highest precision in the files, and bfloat16 for FP8 weights.
      precision: as for `init_state`. Its parameter dtype takes precedence over `dtype`.
      lora: adapters to train, as in `mp.lora`.
      key: a PRNG key or a seed for training.
      **changes: config fields to change, such as `attention="cudnn"` or `vocab_chunk=8192`.

    Returns:
      the config and the state of the model. `state.bound()` is the model.

    Raises:
      ValueError: an unsupported family or config field; a damaged file; a tensor that is missing, unexpected, or has
        the wrong shape or dtype; a dim that is not divisible by its mesh axes.

    Example:
      >>> cfg, state = from_hf("Llama-3.1-8B", mesh=mesh, strategy=mp.fsdp(), tx=optax.adamw(1e-5))
    """
    described = describe(Path(folder))
    with open_files(folder, described) as files:
        _check(files, described)
        param_dtype = dtype or widest(files, described)
        check_dtype("from_hf(dtype=...)", param_dtype)
        config = dataclasses.replace(described.config, param_dtype=param_dtype, **changes)
        tx = optax.identity() if tx is None else tx
        model = config.build() if lora is None else lora(config.build())
        setup = make_setup(model, tx, mesh=mesh, strategy=strategy, precision=precision)
        return config, _load(files, described, setup, key)


def load_hf(folder: str | Path, setup: Setup, *, key: jax.Array | int = 0) -> TrainState:
    """Load the weights of a folder into a model that was built from `config_of(folder)`.

    Raises:
      ValueError: as `from_hf`; the setup has another model.
    """
    described = describe(Path(folder))
    with open_files(folder, described) as files:
        _check(files, described)
        tell_rounded(f"load_hf, `{folder}`", files, setup.abstract.params)
        return _load(files, described, setup, key)


def check_weights(folder: str | Path) -> None:
    """Check that the files of a folder have the tensors that its `config.json` requires.

    Values are read only to compare the head of a tied model with its embedding.

    Raises:
      ValueError: as `from_hf`.
    """
    described = describe(Path(folder))
    with open_files(folder, described) as files:
        _check(files, described)


def config_of(folder: str | Path, **changes: Any) -> TransformerConfig:
    """Return the config of a folder, with changed fields. Weights are not read.

    Raises:
      ValueError: an unsupported family or field.
    """
    return dataclasses.replace(describe(Path(folder)).config, **changes)


# ---- config.json -----------------------------------------------------------------------------------------------------


def describe(folder: Path) -> Described:
    """Read and check the config.json of a folder."""
    if not os.path.isdir(folder):
        fix = "use a folder with config.json"
        raise problem(f"folder `{folder}`", "read a model", "there is no such folder", fix, code="missing-file")
    return described(read_json(folder / CONFIG), where=str(folder / CONFIG))


def described(document: Mapping[str, Any], *, where: str = CONFIG) -> Described:
    """Convert the contents of a config.json. Errors are those of `config_of`."""
    document = _older(where, document)
    kind = document.get("model_type")
    family = BY_TYPE.get(kind) if isinstance(kind, str) else None
    if family is None:
        shown = repr(kind)[:60]
        fix = "use one of them, or add a family in meshpar/interop/families"
        reason = f"the supported families are {', '.join(BY_TYPE)}"
        if isinstance(kind, str) and kind in MISSING_FIELDS:
            reason += f", and TransformerConfig lacks features of {shown}: {MISSING_FIELDS[kind]}"
        raise problem(f"{where}, `model_type`", f"read {shown}", reason, fix, code="unsupported-feature")
    check_known(where, document, family)
    block = read_block_shape(where, document)
    values: dict[str, Any] = {}
    for field in family.fields:
        values[field.path] = field.read(where, document)
    values |= read_rope(where, document, scale_scores="latent.kv_rank" in values)
    family.read_more(where, document, values)
    try:
        return Described(make_config(values), family, dict(document), block)
    except ValueError as error:
        reason, fix = str(error).rstrip("."), "use the config.json of the release"
        raise problem(where, "create a TransformerConfig", reason, fix, code="damaged-file") from error


def _older(where: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `rope_parameters` of transformers 5 to the fields of earlier versions."""
    if "rope_parameters" not in document:
        return dict(document)
    document = dict(document)
    rope = document.pop("rope_parameters")
    if not isinstance(rope, Mapping):
        reason, fix = "it must be an object", "use the config.json of the release"
        raise problem(f"{where}, `rope_parameters`", "read it", reason, fix, code="wrong-type")
    rope = dict(rope)
    theta = rope.pop("rope_theta", None)
    return document | ({} if theta is None else {"rope_theta": theta}) | {"rope_scaling": rope or None}


def written(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """Return the config.json of a config. Raises `ValueError` if the family does not support a field."""
    document = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.fixed,
        **{field.name: field.write(config) for field in family.fields},
        "rope_scaling": write_rope(config),
        **family.write_more(config),
        "torch_dtype": config.param_dtype,
    }
    again, asked = (dict(tree_leaves_with_paths(_meaning(one))) for one in (described(document).config, config))
    for name in sorted(asked.keys() | again.keys()):  # a field that is None has no leaf
        if again.get(name) != asked.get(name):
            where = f"TransformerConfig.{name.replace('/', '.')} ({asked.get(name)!r})"
            reason, fix = f"that family has {again.get(name)!r}", "use another family, or change the field"
            raise problem(where, f"write it as `{family.model_type}`", reason, fix, code="unsupported-feature")
    return document


_OURS = {"attention", "tensor_matmul", "vocab_chunk", "param_dtype"}
_OURS_OF_MOE = {"auxiliary_weight", "z_weight", "bias_rate", "implementation", "bound_factor", "payload", "chunks"}
_OURS_OF_ROUTING = {"capacity_factor", "causal", "force"}


def _meaning(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields that determine the forward pass, without those for kernels and training."""
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in _OURS}
    if config.moe is not None:
        moe = fields["moe"]
        routing = {name: value for name, value in moe["routing"].items() if name not in _OURS_OF_ROUTING}
        rest = {name: value for name, value in moe.items() if name not in _OURS_OF_MOE}
        fields["moe"] = {**rest, "routing": routing, "is_biased": config.moe.is_biased}
    return fields


def family_of(config: TransformerConfig) -> Family:
    """Return the default family for writing a config."""
    if config.latent is not None:
        return BY_TYPE["deepseek_v3"]
    if config.moe is not None:
        return BY_TYPE["qwen3_moe" if config.qk_norm else "mixtral"]
    return BY_TYPE["qwen3" if config.qk_norm else "llama" if config.attention_window is None else "mistral"]


# ---- Reading ---------------------------------------------------------------------------------------------------------

INV_FREQ = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Buffers of rotary frequencies. They are derived from config.json, and transformers ignores them."""


def open_files(folder: str | Path, described: Described) -> Folder:
    """Open the files of a folder, drop rotary buffers, and keep one copy of a tied embedding.

    Raises:
      ValueError: as `Folder`; the head of a tied model differs from its embedding.
    """
    files = Folder(folder, block=described.block)
    with contextlib.ExitStack() as until_checked:
        until_checked.enter_context(files)
        for name in [name for name in files.entries if INV_FREQ.fullmatch(name)]:
            del files.entries[name]
        if described.config.tied_embeddings and HEAD in files.entries:
            if EMBEDDING not in files.entries:
                files.rename(HEAD, EMBEDDING)
            elif files.are_equal(HEAD, EMBEDDING):
                del files.entries[HEAD]
            else:
                reason = f"config.json ties it to `{EMBEDDING}` (tie_word_embeddings), which has different values"
                fix = "use the config.json of these files"
                raise problem(f"{files.path}, `{HEAD}`", "read it", reason, fix, code="conflict")
        until_checked.pop_all()
    return files


def widest(files: Folder, described: Described) -> str:
    """Return a dtype that represents the parameters in the files without rounding."""
    names = {
        name for one in described.family.tensors(described.config) if not one.is_extra for name, _ in one.tensors()
    }
    found = {jnp.dtype(files.entries[name].dtype) for name in names}
    if jnp.dtype("float64") in found:  # `jnp.result_type` returns float32 without jax_enable_x64
        return "float64"
    return jnp.dtype(jnp.result_type(*found)).name


def tell_rounded(where: str, files: Folder, like: PyTree) -> None:
    """Warn if float64 files are read into arrays of lower precision."""
    is_wide = any(entry.dtype == "float64" for entry in files.entries.values())
    if is_wide and all(x.dtype.itemsize < 8 for x in jax.tree.leaves(like)):
        fix = "set jax_enable_x64 and the dtype, where that is not wanted"
        warnings.warn(
            str(problem(where, "read float64", "the model's dtypes are narrower: it is rounded", fix)), stacklevel=3
        )


def check_dtype(where: str, dtype: str) -> None:
    """Check that a name is a dtype of weights that jax supports in its present configuration."""
    if dtype not in PARAM_DTYPES:
        reason = f"weights must be {', '.join(PARAM_DTYPES)}"
        raise problem(where, f"be {dtype!r}", reason, "use one of them", code="unknown-choice")
    check_bits(where, dtype)


def _check(files: Folder, described: Described) -> None:
    """Check that the files have exactly the tensors of the family, with the right shapes."""
    config, family, document, _ = described
    there = files.entries
    expected = _shapes(family.tensors(config), len(there), files.path)
    kept = _shapes(family.passthrough(config, document), len(there), files.path)
    kept = kept if kept.keys() & there.keys() else {}  # transformers itself leaves them out
    expected |= kept
    for name in expected:
        if name not in there:
            reason = f"none of the {len(there)} tensors in the files has this name"
            raise problem(f"{files.path}, `{name}`", "read it", reason, near(name, there), code="not-found")
    for name, entry in there.items():
        if name not in expected:
            reason = f"`{family.model_type}` with this config.json has no such tensor, and the model may need it"
            fix = "use the config.json of these files, or remove the tensor if the code of the model does not read it"
            raise problem(f"{files.path}, `{name[:100]}`", "read it", reason, fix, code="unknown-name")
        if entry.shape != expected[name]:
            requested, reason = f"read shape {list(entry.shape)}", f"config.json requires {list(expected[name])}"
            fix = "use the config.json of these files"
            raise problem(f"{files.path}, `{name}`", requested, reason, fix, code="wrong-shape")


def _shapes(tensors: Iterable[WeightMapping], most: int, path: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for one in tensors:
        if one.num_tensors > most:
            reason = f"config.json requires {one.num_tensors:,} of them"
            requested, fix = f"find it among {most} tensors", "use the config.json of these files"
            raise problem(f"{path}, `{one.template}`", requested, reason, fix, code="not-found")
        shapes |= {name: one.file_shape for name, _ in one.tensors()}
    return shapes


@apart()
def _load(files: Folder, described: Described, setup: Setup, key: jax.Array | int) -> TrainState:
    tensors = described.family.tensors(described.config)
    like = setup.abstract
    of_params = {one.path: one for one in tensors if not one.is_extra}
    of_extra = {one.path: one for one in tensors if one.is_extra}
    given = {path: leaf.shape for path, leaf in tree_leaves_with_paths(like.params) if not of_pair(path)}
    pairs = fresh_pairs(setup, key)
    if given != {path: one.shape for path, one in of_params.items()}:
        wrong = next(path for path in sorted(given.keys() | of_params) if path not in of_params
                     or given.get(path) != of_params[path].shape)  # fmt: skip
        exists = f"it has {given.get(wrong, 'none')}, and the files {getattr(of_params.get(wrong), 'shape', 'none')}"
        raise problem(f"load_hf, `{wrong}`", "put weights into the model", exists, "build it of config_of(folder, ...)")

    def param(path: str, leaf: Any) -> jax.Array:
        return pairs[path] if path in pairs else born(files, of_params[path], leaf)

    def extra(path: str, leaf: Any) -> jax.Array:
        end = next((one for ours, one in of_extra.items() if path.endswith(ours)), None)
        if end is not None:
            return born(files, end, leaf)
        return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding)  # what was counted since the last step

    return setup.begin(_mapped(param, like.params), _mapped(extra, like.extra), key)


def _mapped(f: Any, tree: PyTree) -> PyTree:
    leaves = [f(path, leaf) for path, leaf in tree_leaves_with_paths(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def born(files: Folder, tensor: WeightMapping, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Create a sharded array from files. Each shard is released on the host before the next one is read."""
    owners: dict[Any, list[jax.Device]] = {}
    indices: dict[Any, Any] = {}
    assert like.sharding is not None
    for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
        assert index is not None
        bounds = tuple(one.indices(size)[:2] for one, size in zip(index, like.shape, strict=True))
        owners.setdefault(bounds, []).append(device)
        indices[bounds] = tuple(slice(*one) for one in bounds)
    shards = []
    for bounds, devices in owners.items():
        part = tensor.read(indices[bounds], like.dtype, _reader(files, like.dtype))
        shards += jax.block_until_ready([jax.device_put(part, device) for device in devices])
        del part
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def _reader(files: Folder, dtype: Any) -> Any:
    """Return a function that reads slices of tensors and checks that all values are finite in a dtype."""
    reaches = float(jnp.finfo(dtype).max)

    def read(name: str, slices: tuple[slice, ...]) -> np.ndarray:
        part = files.read(name, slices)
        if not np.isfinite(part).all():
            reason = f"{np.count_nonzero(~np.isfinite(part)):,} of its values are nan or infinite"
            fix = "download the files again"
            raise problem(f"{files.path}, `{name}`", "use it as weights", reason, fix, code="damaged-file")
        if float(jnp.finfo(part.dtype).max) > reaches and part.size and float(np.abs(part).max()) > reaches:
            exists = (
                f"its numbers go up to {float(np.abs(part).max()):.3g}, which {jnp.dtype(dtype).name} does not hold"
            )
            raise problem(f"{files.path}, `{name}`", f"take it as {dtype}", exists, "choose a wider dtype")
        return part

    return read


# ---- Writing ---------------------------------------------------------------------------------------------------------


def to_hf(
    state: TrainState | PyTree,
    config: TransformerConfig,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    dtype: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Write a model as a folder for transformers, with `config.json` and safetensors files.

    The folder appears under its name when all files are written. Host memory holds one file at a time. With several
    processes, all of them must call this function: process 0 writes, and receives one tensor at a time.

    Args:
      state: a state, whose adapters are merged, or a pytree of parameters.
      config: config of the model.
      folder: path of the new folder.
      like: the source folder of the model, or `hf` in a run. It determines the family, other fields of config.json, the
        tokenizer, tensors that the decoder does not use, and the file of each tensor. FP8 weights are written
        dequantized, without `quantization_config` and with a warning.
      dtype: dtype of the weights. None: the dtype of each tensor in `like`, or else of the parameters. Router biases
        remain float32.
      file_bytes: maximum size of a file, unless it has only one tensor.

    Returns:
      the folder.

    Raises:
      ValueError: the folder exists already; no family supports the config; the parameters are of another model.
    """
    params, extra = (merged_params(state), state.extra) if isinstance(state, TrainState) else (state, {})
    for path, _ in tree_leaves_with_paths(params):
        if of_pair(path):
            reason, fix = "their scale is in the state, not in the parameters", "pass the TrainState"
            raise problem(f"to_hf, `{path}`", "merge adapters", reason, fix, code="wrong-type")
    if dtype is not None:
        check_dtype("to_hf(dtype=...)", dtype)
    with contextlib.ExitStack() as stack:
        source = None if like is None else describe(Path(like))
        family = family_of(config) if source is None else source.family
        document = _document(written(config, family), source, dtype)
        has_files = like is not None and any((Path(like) / name).exists() for name in (SINGLE, INDEX))
        files = stack.enter_context(open_files(like, source)) if like and source and has_files else None
        made = Made(family.tensors(config), params, extra, files, dtype, together=True)
        kept = [] if source is None else kept_names(source)
        made.kept = tuple(name for name in kept if files is not None and name in files.entries)
        sizes = {name: made.nbytes(name) for name in (*made.pieces, *made.kept)}
        spread = _spread(sizes, files, file_bytes)

        def fill(fresh: Path) -> None:
            write(fresh, spread, made, sum(sizes.values()))
            write_json(fresh / CONFIG, document)
            copy_beside(like, fresh)

        _filled(folder, fill, made, spread)
    return Path(folder)


def _spread(sizes: Mapping[str, int], files: Folder | None, file_bytes: int) -> dict[str, str]:
    """Return the file of each tensor, as in the source folder if that has the same tensors."""
    if files is not None and not files.has_float8 and {n: one.nbytes for n, one in files.entries.items()} == sizes:
        return {name: files.entries[name].file for name in sizes}
    return assigned(sizes.items(), file_bytes)


def _filled(folder: str | Path, fill: Callable[[Path], None], made: Made, files: Mapping[str, str]) -> None:
    """Create a folder in process 0, while the other processes send it their shards of each tensor.

    Raises:
      ValueError: process 0 could not write the folder. All processes raise.
    """
    failure: BaseException | None = None
    if jax.process_index() == 0:
        try:
            with whole_folder(folder) as fresh:
                fill(fresh)
        except BaseException as error:
            if jax.process_count() == 1:
                raise
            failure = error
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    for name in itertools.chain(*tensors_by_file(files).values()):
        made.take_part(name)
    has_failed = multihost_utils.process_allgather(np.array(failure is not None)).any()
    if failure is not None:
        raise failure
    if has_failed:
        reason, fix = "process 0 could not write it", "see the error of process 0"
        raise problem(f"to_hf, folder `{folder}`", "write it", reason, fix, code="not-writable")


def kept_names(described: Described) -> list[str]:
    """Return the names of the tensors that a folder may have and the decoder does not use."""
    config, family, document, _ = described
    return [name for one in family.passthrough(config, document) for name, _ in one.tensors()]


def copy_beside(like: str | Path | None, folder: Path) -> None:
    """Copy the tokenizer and the other files of a source folder that are not converted."""
    for pattern in BESIDE if like is not None else ():
        for path in Path(like or "").glob(pattern):
            if path.is_file():
                check_inside(path, Path(like or ""))
                to = folder / path.relative_to(like or "")
                to.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, to)


def _document(ours: dict[str, Any], source: Described | None, dtype: str | None) -> dict[str, Any]:
    """Return the config.json of the source folder, updated if the config has changed."""
    if source is None:
        return ours | ({} if dtype is None else {"torch_dtype": dtype})
    theirs = dict(source.document)
    if theirs.pop(CONFIG_FIELD, None) is not None:
        warnings.warn(f"to_hf writes dequantized weights, and config.json without `{CONFIG_FIELD}`", stacklevel=3)
    if source.config != described(ours).config:
        drop = {"architectures", "model_type", "torch_dtype", "num_nextn_predict_layers"}
        for field in source.family.fields:
            theirs.pop(field.alias or "", None)
        theirs |= {name: value for name, value in ours.items() if name not in drop}
    if dtype is not None:
        theirs["dtype" if "dtype" in theirs else "torch_dtype"] = dtype
    return theirs


class Made:
    """The checkpoint tensors of a model. Each is assembled from sharded arrays when it is written."""

    def __init__(
        self, tensors: list[WeightMapping], params: PyTree, extra: PyTree, files: Folder | None, dtype: str | None,
        *, together: bool = False,
    ) -> None:  # fmt: skip
        self.files, self.dtype = files, dtype
        self._taken: dict[str, int] = {}
        self.kept: tuple[str, ...] = ()
        arrays = dict(tree_leaves_with_paths(params))
        beside = dict(tree_leaves_with_paths(extra))
        self.pieces: dict[str, list[tuple[WeightMapping, Any, tuple[int, ...]]]] = {}
        for one in tensors:
            found = arrays.get(one.path)
            if one.is_extra:
                found = next((x for path, x in beside.items() if path.endswith(one.path)), None)
            if found is None or found.shape != one.shape:
                reason = "there is no such array" if found is None else f"the array has shape {found.shape}"
                fix = "pass the TrainState of this config"
                raise problem(f"to_hf, `{one.path}`", f"write shape {one.shape}", reason, fix, code="wrong-shape")
            if isinstance(found, jax.Array) and not (together or found.is_fully_addressable):
                reason = "other processes have shards of it"
                fix = "save a checkpoint, and convert it in one process: meshpar convert to-peft RUN DIR"
                raise problem(f"to_peft, `{one.path}`", "write it", reason, fix, code="unsupported-feature")
            for name, at in one.tensors():
                self.pieces.setdefault(name, []).append((one, found, at))

    def dtype_of(self, name: str) -> Any:
        """Return the dtype in which a tensor is written."""
        if name in self.kept or (self.dtype is None and self.files is not None and name in self.files.entries):
            assert self.files is not None
            return jnp.dtype(self.files.entries[name].dtype)
        one, array, _ = self.pieces[name][0]
        return jnp.dtype(self.dtype or array.dtype) if not one.is_extra else jnp.dtype(np.float32)

    def nbytes(self, name: str) -> int:
        if name in self.kept:
            assert self.files is not None
            return self.files.entries[name].nbytes
        shape = self.pieces[name][0][0].file_shape
        return int(np.prod(shape, dtype=np.int64)) * self.dtype_of(name).itemsize

    def __call__(self, name: str) -> np.ndarray:
        """Assemble a tensor on the host."""
        if name in self.kept:
            assert self.files is not None
            return self.files.read_full(name)
        pieces = self.pieces[name]
        out = np.zeros(pieces[0][0].file_shape, self.dtype_of(name))  # some pieces are blocks of it
        for number, (one, array, at) in enumerate(pieces, 1):
            self._taken[name] = number  # begun together with the other processes, so not to be begun again
            one.write(_gathered(array, at), out)
        return out

    def take_part(self, name: str) -> None:
        """Take part in gathering the pieces of a tensor that this process has not gathered yet."""
        for _, array, at in self.pieces.get(name, ())[self._taken.get(name, 0) :]:
            _gathered(array, at)


def _gathered(array: Any, at: tuple[int, ...]) -> np.ndarray:
    """Gather an array, indexed in its leading dims, on the host."""
    if not isinstance(array, jax.Array):
        return np.asarray(array)[at]
    if not array.is_fully_addressable:
        assert isinstance(array.sharding, NamedSharding)
        of = _picked(NamedSharding(array.sharding.mesh, PartitionSpec()))(array, [np.int32(i) for i in at])
        return np.asarray(of.addressable_data(0))
    out = np.empty(array.shape[len(at) :], array.dtype)
    for shard in array.addressable_shards:
        bounds = [one.indices(size)[:2] for one, size in zip(shard.index, array.shape, strict=True)]
        inside = all(low <= i < high for i, (low, high) in zip(at, bounds, strict=False))
        if shard.replica_id or not inside:
            continue
        here = tuple(i - low for i, (low, _) in zip(at, bounds, strict=False))
        on_host = shard.device.platform == "cpu"
        part = np.asarray(shard.data)[here] if on_host else np.asarray(shard.data[here])  # all of it, or what is needed
        out[tuple(slice(*one) for one in bounds[len(at) :])] = part
    return out


@functools.lru_cache(maxsize=8)
def _picked(whole: NamedSharding) -> Any:
    """Return a compiled function that indexes the leading dims of an array and replicates the result."""
    return jax.jit(lambda array, at: array[tuple(at)], out_shardings=whole)
