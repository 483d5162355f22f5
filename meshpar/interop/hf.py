"""Conversion between Hugging Face model folders and sharded training states.

    config.json ─► family ─► TransformerConfig ─► model, mesh, strategy ─► sharding of each array
    *.safetensors ─► names, shapes and dtypes checked ─► slices read ─► shard on each device

No file is unpickled, and no code from a folder is executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.interop import files as hf_files
from meshpar.interop.block_fp8 import CONFIG_FIELD, Block, read_block_shape
from meshpar.interop.decoder import FULL, HEAD, PARTIAL, SLIDING, TABLE, Family, check_known
from meshpar.interop.families import ALL, BY_TYPE, WRAPPERS
from meshpar.interop.fields import RELEASE, bad_value, built, read_rope, write_rope
from meshpar.interop.files import INDEX, SINGLE, Folder, read_json, whole_folder, write_json
from meshpar.interop.weight_mapping import WeightMapping
from meshpar.layers.precision import Precision, check_bits
from meshpar.models.architecture import PARAM_DTYPES
from meshpar.models.config import TransformerConfig
from meshpar.parallel import Strategy
from meshpar.sharding.context import clear_context_mesh
from meshpar.sharding.errors import check_choice, is_int, near, problem
from meshpar.sharding.host_resources import check_inside
from meshpar.sharding.rules import Rules
from meshpar.sharding.types import PyTree, path_str, tree_leaves_with_paths
from meshpar.training.lora import Lora, fresh_pairs, merged_params, of_pair
from meshpar.training.state import Setup, TrainState, make_setup

CONFIG = "config.json"
FILE_BYTES = 5 * 10**9
"""Maximum size of a weight file in bytes."""
COPIED_FILES = (
    "additional_chat_templates/*", "chat_template.*", "generation_config.json", "merges.txt",
    "special_tokens_map.json", "tokenizer.*", "tokenizer_config.json", "vocab.*",
)  # fmt: skip
"""Patterns of the tokenizer and generation files that are copied unchanged."""
GENERATION_CONFIG = "generation_config.json"
TEXT_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
"""Fields of config.json about the text that a model reads and writes."""
DTYPE_FIELDS = ("dtype", "torch_dtype")
"""Names of the dtype in config.json, since and before transformers 5."""


class Described(NamedTuple):
    """Contents of a folder's config.json."""

    config: TransformerConfig
    family: Family
    document: dict[str, Any]
    """The fields, with `rope_theta` and `rope_scaling` instead of `rope_parameters`."""
    original: Mapping[str, Any]
    """The fields as in the file."""
    block: Block | None = None
    """Block shape (rows, columns) of the scale factors, if the weights are quantized."""


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

    Each device receives its shards directly. The host buffers a single shard at a time.

    Releases in 8-bit floats with block-wise scale factors (DeepSeek-V3, Kimi-K2: `quantization_config`) are
    dequantized: multiplied by their factors in float32, then rounded to `dtype`. MXFP4 releases (GPT-OSS) are, too.

    Args:
      folder: a release, or a folder written by transformers' `save_pretrained`.
      mesh: the device mesh.
      strategy: a strategy or `Rules`.
      tx: the optimizer. `None` loads the model for inference or conversion.
      dtype: parameter dtype. `None` means the highest-precision dtype in the files, so that no parameter is rounded.
        For quantized weights it is bfloat16. If an optimizer trains the parameters, `None` means at least float32,
        because bfloat16 loses most updates of a fine-tuning run. With `lora` they are frozen and keep the dtype.
      precision: as for `init_state`. Its parameter dtype overrides `dtype`.
      lora: adapters to train instead of the parameters of the model, as in `mp.lora`.
      key: random key or seed for training.
      **changes: fields of the config to replace, such as `attention="cudnn"` or `vocab_chunk=8192`.

    Returns:
      The model config and the state. `state.bound()` is the model.

    Raises:
      ValueError: the decoders do not support the family or a field of its config; an index or a file is damaged; a
        tensor is missing, unexpected, or has a wrong shape or an unknown dtype; a sharded dim is not divisible.

    Example:
      >>> config, state = mp.interop.from_hf(  # doctest: +SKIP
      ...     "Llama-3.1-8B", mesh=mesh, strategy=mp.fsdp(), tx=optax.adamw(1e-5)
      ... )
    """
    with checked_files(folder) as (files, described):
        param_dtype = dtype or widest(files, described)
        assert param_dtype is not None
        if dtype is None and tx is not None and lora is None and jnp.dtype(param_dtype).itemsize < 4:
            param_dtype = "float32"
        check_dtype("from_hf", param_dtype)
        config = dataclasses.replace(described.config, param_dtype=param_dtype, **changes)
        tx = optax.identity() if tx is None else tx
        model = config.build() if lora is None else lora(config.build())
        setup = make_setup(model, tx, mesh=mesh, strategy=strategy, precision=precision)
        return config, _load(files, described, setup, key)


def load_hf(folder: str | Path, setup: Setup, *, key: jax.Array | int = 0) -> TrainState:
    """Load the weights of a folder into the state of a setup whose model was built from `config_of(folder)`.

    Args:
      folder: a Hugging Face folder.
      setup: the model, the optimizer and the shardings.
      key: random key or seed for training.

    Raises:
      ValueError: as `from_hf`, or the setup has another model.
    """
    with checked_files(folder) as (files, described):
        warn_rounded(f"load_hf, `{folder}`", files, setup.abstract.params)
        return _load(files, described, setup, key)


def check_weights(folder: str | Path) -> None:
    """Check that the files of a folder contain the tensors that its `config.json` describes.

    Only headers are read, except to compare the head of a tied model with its embedding table.
    """
    with checked_files(folder):
        pass


def config_of(folder: str | Path, **changes: Any) -> TransformerConfig:
    """Return the model config of a folder without reading its weights.

    Args:
      folder: a Hugging Face folder.
      **changes: fields of the config to replace.

    Raises:
      ValueError: the decoders do not support the family or a field of its config.
    """
    return dataclasses.replace(describe(Path(folder)).config, **changes)


# ---- config.json -----------------------------------------------------------------------------------------------------


def describe(folder: Path) -> Described:
    """Read and check the config.json of a folder."""
    result = described(read_json(folder / CONFIG), where=str(folder / CONFIG))
    return result._replace(config=dataclasses.replace(result.config, source=str(folder.resolve())))


def source_of(config: TransformerConfig, like: str | Path | None, where: str) -> Path | None:
    """Return `like`, or by default the folder from which the config was read, if any."""
    if like is not None or config.source is None:
        return None if like is None else Path(like)
    if not (Path(config.source) / CONFIG).exists():
        reason = "the folder does not exist any more, and it has the family, the token ids and the dtype"
        fix = "pass like=..., or write a model without a source: dataclasses.replace(config, source=None)"
        raise problem(where, f"write the model of {config.source}"[:200], reason, fix, code="missing-file")
    return Path(config.source)


def described(document: Mapping[str, Any], *, where: str = CONFIG) -> Described:
    """Translate a parsed config.json."""
    if str(document.get("model_type")) in WRAPPERS:
        text_config = document.get("text_config")
        if not isinstance(text_config, Mapping):
            raise bad_value(where, "text_config", text_config, "it must be an object", code="wrong-type")
        document, where = text_config, f"{where}, `text_config`"
    original, document = document, dict(document)
    if "rope_parameters" in document:  # transformers 5; earlier versions have `rope_theta` and `rope_scaling`
        rope = document.pop("rope_parameters")
        if not isinstance(rope, Mapping):
            raise bad_value(where, "rope_parameters", rope, "it must be an object", code="wrong-type")
        if isinstance(rope.get(FULL), Mapping):  # one entry for each type of layer
            local = rope.get(SLIDING) or {}
            if not isinstance(local, Mapping):
                raise bad_value(where, f"rope_parameters.{SLIDING}", local, "it must be an object", code="wrong-type")
            document["rope_local_base_freq"] = local.get("rope_theta")
            if local and local.get("rope_type", "default") != "default":
                raise bad_value(where, f"rope_parameters.{SLIDING}", local, "local layers have no scaled frequencies")
            rope = rope[FULL]
        document |= {"rope_theta": rope["rope_theta"]} if rope.get("rope_theta") is not None else {}
        document["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"} or None
    scaling = document.get("rope_scaling")
    if isinstance(scaling, Mapping) and scaling.get(PARTIAL) is not None:
        document |= {PARTIAL: scaling[PARTIAL], "rope_scaling": {k: v for k, v in scaling.items() if k != PARTIAL}}
    kind = document.get("model_type")
    family = BY_TYPE.get(kind) if isinstance(kind, str) else None
    if family is None:
        fix = "use a supported family, or add a table to meshpar/interop/families"
        raise bad_value(where, "model_type", kind, f"the families are {', '.join(BY_TYPE)}", fix)
    check_known(where, document, family)
    block = read_block_shape(where, document)
    values: dict[str, Any] = {field.ours: field.read(where, document) for field in family.fields}
    for field in family.fields:
        if field.ours in ("embed_dim", "num_layers", "head_dim") and values[field.ours] < 1:
            raise bad_value(where, field.theirs, values[field.ours], "it must be at least 1")
    values |= read_rope(where, document, scores="latent.kv_rank" in values)
    family.read_more(where, document, values)
    try:
        return Described(built(values), family, document, original, block)
    except ValueError as error:
        raise problem(where, "build a TransformerConfig", str(error).rstrip("."), RELEASE, "out-of-range") from error


def written(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """Return the config.json of a family for a `TransformerConfig`.

    Token ids are null, because the default ids of a family may exceed the vocabulary.
    """
    document = _fields_of(config, family)
    for name, (ours, theirs) in _differences(config, described(document).config).items():
        where = f"TransformerConfig.{name.replace('/', '.')} ({ours!r})"
        reason, fix = f"that family has {theirs!r}", "choose another family, or change the field"
        raise problem(where, f"write it as `{family.model_type}`", reason, fix, code="unsupported-feature")
    return document


def _fields_of(config: TransformerConfig, family: Family) -> dict[str, Any]:
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.fixed,
        **{field.theirs: field.write(config) for field in family.fields},
        "rope_scaling": write_rope(config),
        **family.write_more(config),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "torch_dtype": config.param_dtype,
    }


def _differences(config: TransformerConfig, other: TransformerConfig) -> dict[str, tuple[Any, Any]]:
    """Return the values of both configs for each field that differs and affects the forward pass."""
    ours, theirs = _architecture(config), _architecture(other)
    names = sorted(ours.keys() | theirs.keys())  # a field that is None has no leaf
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


_RUNTIME_FIELDS = re.compile(
    r"attention|tensor_matmul|unroll|vocab_chunk|param_dtype|source|moe/routing/(capacity_factor|causal|force)"
    r"|moe/(auxiliary_weight|z_weight|bias_rate|implementation|bound_factor|chunks|payload(/.*)?)"
)
"""Paths of the fields about the implementation and the training of a model."""


def _architecture(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields that define the forward pass, by path."""
    config = dataclasses.replace(config, attention_window=None, layer_pattern=config.kind_of_layer)
    fields = dict(tree_leaves_with_paths(dataclasses.asdict(config)))
    fields["is_biased"] = config.moe is not None and config.moe.is_biased
    return {name: value for name, value in fields.items() if not _RUNTIME_FIELDS.fullmatch(name)}


def family_of(config: TransformerConfig) -> Family:
    """Return the family that a config is written as by default: the first with the fewest different fields."""
    parts = {part for part in ("moe", "latent") if getattr(config, part) is not None}

    def num_differences(family: Family) -> float:
        if {part for part in ("moe", "latent") if any(f.ours.startswith(f"{part}.") for f in family.fields)} != parts:
            return math.inf
        try:
            return len(_differences(config, described(_fields_of(config, family)).config))
        except ValueError:  # the family has no value for a field
            return math.inf

    return min(ALL, key=num_differences)


# ---- Reading ---------------------------------------------------------------------------------------------------------

TEXT_PREFIX = "language_model."
"""Prefix of the tensors of the text model in multimodal releases."""
INV_FREQ = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Names of buffers with rotary frequencies. config.json determines their values, and transformers ignores them."""


@contextlib.contextmanager
def open_files(folder: str | Path, described: Described) -> Iterator[Folder]:
    """Open the files of a folder, without rotary buffers and with one copy of a tied embedding table."""
    with Folder(folder, block=described.block) as files:
        files.entries = {name: entry for name, entry in files.entries.items() if not INV_FREQ.fullmatch(name)}
        if described.family.wrapper is not None and any(name.startswith(TEXT_PREFIX) for name in files.entries):
            for name in [*files.entries]:
                if name.startswith(TEXT_PREFIX):
                    files.rename(name, name.removeprefix(TEXT_PREFIX))
                else:
                    del files.entries[name]
        if described.config.tied_embeddings and HEAD in files.entries:
            if TABLE not in files.entries:
                files.rename(HEAD, TABLE)
            elif not files.are_equal(HEAD, TABLE):
                reason = f"config.json ties it to `{TABLE}` (tie_word_embeddings), which has different values"
                fix = "use the config.json of these files"
                raise problem(f"{files.path}, `{HEAD}`", "read the tensor", reason, fix, code="conflict")
            files.entries.pop(HEAD, None)
        yield files


def widest(files: Folder, described: Described) -> str | None:
    """Return the dtype to which all parameter dtypes in the files promote, so that no parameter is rounded.

    The result is None if the files have no parameters.
    """
    mappings = [mapping for mapping in described.family.tensors(described.config) if not mapping.is_extra]
    names = {name for mapping in mappings for name, _ in mapping.tensors()} & files.entries.keys()
    dtypes = {jnp.dtype(files.entries[name].dtype) for name in names}
    if jnp.dtype("float64") in dtypes:  # without jax_enable_x64, jnp.result_type would return float32
        return "float64"
    return jnp.dtype(jnp.result_type(*dtypes)).name if dtypes else None


def warn_rounded(where: str, files: Folder, like: PyTree) -> None:
    """Warn if float64 tensors are read into arrays of lower precision."""
    has_float64 = any(entry.dtype == "float64" for entry in files.entries.values())
    if has_float64 and all(x.dtype.itemsize < 8 for x in jax.tree.leaves(like)):
        warnings.warn(
            f"{where}: the float64 weights are rounded to the lower precision of the model. To keep all bits, set "
            "jax_enable_x64 and the dtype.",
            stacklevel=3,
        )


def check_dtype(where: str, dtype: str) -> None:
    """Check that a dtype is valid for weights and available in JAX."""
    check_choice(where, "the dtype of the weights", sorted(PARAM_DTYPES), dtype=dtype)
    check_bits(f"{where}(dtype=...)", dtype)


@contextlib.contextmanager
def checked_files(folder: str | Path) -> Iterator[tuple[Folder, Described]]:
    """Open the files of a folder that contain exactly the tensors of its family, with their shapes."""
    described = describe(Path(folder))
    with open_files(folder, described) as files:
        _check(files, described)
        yield files, described


def _check(files: Folder, described: Described) -> None:
    config, family, document = described[:3]
    entries = files.entries
    expected = _shapes(family.tensors(config), len(entries), files.path)
    extra = _shapes(family.extra_tensors(config, document), len(entries), files.path)
    expected |= extra if extra.keys() & entries.keys() else {}  # transformers omits these tensors when it saves a model
    for name in (*expected, *entries):
        shape, fix = entries[name].shape if name in entries else None, "use the config.json of these files"
        if shape == expected.get(name):
            continue
        if shape is None:
            code, reason, fix = "not-found", "the files have no such tensor", near(name, entries)
        elif name not in expected:
            code, reason = "unknown-name", f"`{family.model_type}` with this config.json has no such tensor"
            fix += "; remove the tensor only if the model's code does not read it"
        else:
            code, reason = "wrong-shape", f"the shape is {list(shape)}, and by config.json {list(expected[name])}"
        raise problem(f"{files.path}, `{name[:100]}`", "read the tensor", reason, fix, code)


def _shapes(tensors: Iterable[WeightMapping], limit: int, path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in the files. Check that there are at most `limit` before listing them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for mapping in tensors:
        if mapping.num_tensors > limit:
            reason = f"config.json describes {mapping.num_tensors:,} such tensors"
            where, fix = f"{path}, `{mapping.template}`", "use the config.json of these files"
            raise problem(where, f"find them among {limit} tensors", reason, fix, code="not-found")
        shapes |= {name: mapping.file_shape for name, _ in mapping.tensors()}
    return shapes


@clear_context_mesh()
def _load(files: Folder, described: Described, setup: Setup, key: jax.Array | int) -> TrainState:
    tensors = described.family.tensors(described.config)
    like = setup.abstract
    param_mappings = {mapping.path: mapping for mapping in tensors if not mapping.is_extra}
    extra_mappings = {mapping.path: mapping for mapping in tensors if mapping.is_extra}
    shapes = {path: leaf.shape for path, leaf in tree_leaves_with_paths(like.params) if not of_pair(path)}
    file_shapes = {path: mapping.shape for path, mapping in param_mappings.items()}
    pairs = fresh_pairs(setup, key)
    for path in sorted(shapes.keys() | file_shapes.keys()):
        if shapes.get(path) != file_shapes.get(path):
            reason = f"the shape is {shapes.get(path)} in the model and {file_shapes.get(path)} in the files"
            fix = "build the model from config_of(folder, ...)"
            raise problem(f"load_hf, `{path}`", "load the weights", reason, fix, code="wrong-shape")

    def param(path: str, leaf: Any) -> jax.Array:
        return pairs[path] if path in pairs else read_sharded(files, param_mappings[path], leaf)

    def extra(path: str, leaf: Any) -> jax.Array:
        mapping = next((mapping for suffix, mapping in extra_mappings.items() if path.endswith(suffix)), None)
        if mapping is not None:
            return read_sharded(files, mapping, leaf)
        return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding)  # counts since the last step

    params, variables = (
        jax.tree_util.tree_map_with_path(lambda path, leaf, read=read: read(path_str(path), leaf), tree)
        for read, tree in ((param, like.params), (extra, like.extra))
    )
    return setup.begin(params, variables, key)


def read_sharded(files: Folder, tensor: WeightMapping, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Read a sharded array from the files, one shard at a time."""
    owners: dict[Any, list[jax.Device]] = {}
    assert like.sharding is not None
    for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
        assert index is not None
        bounds = tuple(dim.indices(size)[:2] for dim, size in zip(index, like.shape, strict=True))
        owners.setdefault(bounds, []).append(device)
    shards, read = [], _reader(files, like.dtype)
    for bounds, devices in owners.items():
        part = tensor.read(tuple(slice(*dim) for dim in bounds), like.dtype, read)
        shards += jax.block_until_ready([jax.device_put(part, device) for device in devices])
        del part
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def _reader(files: Folder, dtype: Any) -> Any:
    """Return a function that reads slices of tensors and checks that their values are finite in this dtype."""
    limit = float(jnp.finfo(dtype).max)

    def read(name: str, slices: tuple[slice, ...]) -> np.ndarray:
        part = files.read(name, slices)
        where = f"{files.path}, `{name}`"
        if not np.isfinite(part).all():
            reason, fix = "some values are nan or infinite", "download the files of the release again"
            raise problem(where, "use it as weights", reason, fix, code="damaged-file")
        if float(jnp.finfo(part.dtype).max) > limit and float(np.abs(part).max(initial=0)) > limit:
            reason, fix = f"some values exceed {limit:.3g}", "choose a dtype with a larger range"
            raise problem(where, f"convert it to {jnp.dtype(dtype).name}", reason, fix, code="wrong-dtype")
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
    fields: Mapping[str, Any] | None = None,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Write a model as a folder with `config.json` and safetensors files, which transformers can load.

    The folder appears when all files are complete. The host buffers the tensors of a single file at a time. If the
    state is sharded over processes, all processes must call this function.
    Process 0 gathers each tensor and writes the files.

    Args:
      state: a state or its parameters. The adapters of a state are merged, with the precision of the new weights.
      config: the config of the model.
      folder: the folder to create.
      like: the folder that the model was loaded from, or `hf` of a run. It determines the family, and the function
        copies from it other fields of config.json, the tokenizer, tensors that the decoders do not use, and the
        assignment of tensors to files. If its weights are quantized, the new weights are not, and
        `quantization_config` is omitted with a warning. `None` means `config.source`.
      dtype: dtype of the weights. `None` means the dtype of each tensor in `like`. If `like` has no weights, it means
        the dtype in its config.json, and without `like` the parameter dtype. Expert biases are always float32.
      fields: values of `TEXT_FIELDS` for config.json, such as `{"eos_token_id": 2, "max_position_embeddings": 4096}`.
        Other values are from `like`; without `like`, token ids are null.
      file_bytes: maximum file size in bytes. A file with a single tensor may be larger.

    Returns:
      The path of the folder.

    Raises:
      ValueError: the folder already exists, no family supports the config, or the parameters do not match it.

    Example:
      >>> mp.interop.to_hf(state, config, "finetuned")  # doctest: +SKIP
    """
    if not isinstance(state, TrainState) and any(of_pair(path) for path, _ in tree_leaves_with_paths(state)):
        reason, fix = "the parameters do not include the scale of the adapters", "pass the TrainState"
        raise problem("to_hf", "merge adapters", reason, fix, code="wrong-type")
    if dtype is not None:
        check_dtype("to_hf", dtype)
    fields = _checked_fields(fields or {}, config)
    origin = source_of(config, like, "to_hf")
    with contextlib.ExitStack() as stack:
        source = None if origin is None else describe(origin)
        family = family_of(config) if source is None else source.family
        has_files = origin is not None and any((origin / name).exists() for name in (SINGLE, INDEX))
        files = stack.enter_context(open_files(origin, source)) if origin and source and has_files else None
        in_files = None if files is None or source is None else widest(files, source)
        default = dtype or in_files or (None if source is None else dtype_in(source.original))
        params, extra = state, {}
        if isinstance(state, TrainState):
            params, extra = merged_params(state, dtype=default), state.extra
        checkpoint = CheckpointTensors(family.tensors(config), params, extra, files, dtype, default)
        new_dtype = None if dtype is None and source is not None and in_files else checkpoint.param_dtype
        document = _document(written(config, family), source, new_dtype) | fields
        unused = [] if source is None else unused_tensor_names(source)
        unused = [name for name in unused if files is not None and name in files.entries]
        sizes = {name: checkpoint.nbytes(name) for name in (*checkpoint.pieces, *unused)}
        spread = hf_files.assigned(sizes.items(), file_bytes)
        if (
            files
            and not (files.float8 or files.packed)
            and {name: entry.nbytes for name, entry in files.entries.items()} == sizes
        ):
            spread = {name: files.entries[name].file for name in sizes}  # the files of the original folder

        def fill(fresh: Path) -> None:
            hf_files.write(fresh, spread, checkpoint, sum(sizes.values()))
            write_json(fresh / CONFIG, document)
            if origin is not None:
                copy_tokenizer(origin, fresh)
            if (generation := fresh / GENERATION_CONFIG).exists() and fields:
                write_json(
                    generation, read_json(generation) | {k: v for k, v in fields.items() if k in TEXT_FIELDS[:3]}
                )

        create_folder(folder, fill, checkpoint, spread)
    return Path(folder)


def create_folder(
    folder: str | Path, fill: Callable[[Path], None], checkpoint: CheckpointTensors, files: Mapping[str, str]
) -> None:
    """Create a folder in process 0, while the other processes send their shards of each tensor.

    If process 0 fails to write the folder, all processes raise an error.
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

    for name in itertools.chain(*hf_files.tensors_by_file(files).values()):
        checkpoint.take_part(name)
    has_failed = multihost_utils.process_allgather(np.array(failure is not None)).any()
    if failure is not None:
        raise failure
    if has_failed:
        fix = "see the error of process 0"
        raise problem(f"folder `{folder}`", "write the model", "process 0 failed", fix, code="write-failed")


def unused_tensor_names(described: Described) -> list[str]:
    """Return the names of tensors that a folder may have but the decoders do not use."""
    config, family, document = described[:3]
    return [name for mapping in family.extra_tensors(config, document) for name, _ in mapping.tensors()]


def copy_tokenizer(like: Path, folder: Path) -> None:
    """Copy the tokenizer and generation files of a Hugging Face folder."""
    for path in itertools.chain.from_iterable(map(like.glob, COPIED_FILES)):
        if path.is_file():
            check_inside(path, like)
            to = folder / path.relative_to(like)
            to.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, to)


def _document(ours: dict[str, Any], source: Described | None, dtype: str | None) -> dict[str, Any]:
    """Return the config.json to write: the document of the source, with our fields if the config differs."""
    if source is None:
        return ours | ({} if dtype is None else {"torch_dtype": dtype})
    is_same = source.config == described(ours).config
    theirs = dict(source.original if is_same else source.document)
    if theirs.pop(CONFIG_FIELD, None) is not None:
        warning = f"to_hf: the weights are not quantized, and config.json is written without `{CONFIG_FIELD}`"
        warnings.warn(warning, stacklevel=3)
    if not is_same:
        drop = {"architectures", "model_type", "num_nextn_predict_layers", *DTYPE_FIELDS, *TEXT_FIELDS}
        for field in source.family.fields:
            theirs.pop(field.also or "", None)
        theirs |= {name: value for name, value in ours.items() if name not in drop}
    if dtype is not None:
        theirs["dtype" if "dtype" in theirs else "torch_dtype"] = dtype
    return theirs


def dtype_in(document: Mapping[str, Any]) -> str | None:
    """Return the dtype of the weights that a config.json states, or None if there is no such field.

    Dtypes of quantized weights also give None.
    """
    dtype = next((document[name] for name in DTYPE_FIELDS if document.get(name) is not None), None)
    return dtype if dtype in PARAM_DTYPES else None


def _checked_fields(fields: Mapping[str, Any], config: TransformerConfig) -> dict[str, Any]:
    """Check the `fields` of `to_hf`."""
    for name, value in fields.items():
        where, requested = f"to_hf(fields=...), `{name}`", f"write {value!r}"[:100]
        if name not in TEXT_FIELDS:
            raise problem(where, requested, "it is not a field about text", near(name, TEXT_FIELDS), "unknown-name")
        limit = 2**31 if name == TEXT_FIELDS[3] else config.vocab_size
        values = value if isinstance(value, list) and name == "eos_token_id" else [value]
        if not all((is_int(x, 0) and x < limit) or (x is None and name != TEXT_FIELDS[3]) for x in values):
            reason, fix = f"it must be an integer from 0 to {limit - 1}", "use a token id of the vocabulary"
            raise problem(where, requested, reason, fix, "out-of-range")
    return dict(fields)


class CheckpointTensors:
    """Callable that assembles each checkpoint tensor from the parameter arrays."""

    def __init__(
        self, tensors: list[WeightMapping], params: PyTree, extra: PyTree, files: Folder | None, dtype: str | None,
        default_dtype: str | None = None,
    ) -> None:  # fmt: skip
        self.files, self.dtype, self._default_dtype = files, dtype, default_dtype
        self._taken: dict[str, int] = {}
        arrays = dict(tree_leaves_with_paths(params))
        extra_arrays = dict(tree_leaves_with_paths(extra))
        self.pieces: dict[str, list[tuple[WeightMapping, Any, tuple[int, ...]]]] = {}
        for mapping in tensors:
            array = arrays.get(mapping.path)
            if mapping.is_extra:
                array = next((x for path, x in extra_arrays.items() if path.endswith(mapping.path)), None)
            if array is None or array.shape != mapping.shape:
                reason = "there is no such array" if array is None else f"its shape is {array.shape}"
                fix = "pass the TrainState of this config" + ", not only its parameters" * mapping.is_extra
                requested = f"write an array of shape {mapping.shape}"
                raise problem(f"to_hf, `{mapping.path}`", requested, reason, fix, code="wrong-shape")
            for name, index in mapping.tensors():
                self.pieces.setdefault(name, []).append((mapping, array, index))

    def dtype_of(self, name: str) -> Any:
        """Return the dtype of a tensor in the file."""
        if self.dtype is None and self.files is not None and name in self.files.entries:
            return jnp.dtype(self.files.entries[name].dtype)
        mapping, array, _ = self.pieces[name][0]
        dtype = self.dtype or self._default_dtype or array.dtype
        return jnp.dtype(dtype) if not mapping.is_extra else jnp.dtype(np.float32)

    @property
    def param_dtype(self) -> str:
        """Dtype to which the dtypes of all parameters promote."""
        names = (name for name, pieces in self.pieces.items() if not pieces[0][0].is_extra)
        return jnp.dtype(functools.reduce(jnp.promote_types, map(self.dtype_of, names))).name

    def nbytes(self, name: str) -> int:
        """Return the size of a tensor in bytes."""
        if name in self.pieces:
            return math.prod(self.pieces[name][0][0].file_shape) * self.dtype_of(name).itemsize
        assert self.files is not None
        return self.files.entries[name].nbytes

    def __call__(self, name: str) -> np.ndarray:
        """Return a tensor as a numpy array."""
        if name not in self.pieces:
            assert self.files is not None
            return self.files.read_full(name)
        pieces = self.pieces[name]
        out = np.zeros(pieces[0][0].file_shape, self.dtype_of(name))  # a piece may fill only a block of the tensor
        for number, (mapping, array, index) in enumerate(pieces, 1):
            self._taken[name] = number  # set before the collective, which must not be repeated if it fails
            mapping.write(_gathered(array, index), out)
        return out

    def take_part(self, name: str) -> None:
        """Take part in the gather of a tensor by process 0.

        Collectives that this process ran before an error are not repeated.
        """
        for _, array, index in self.pieces.get(name, ())[self._taken.get(name, 0) :]:
            _gathered(array, index)


def _gathered(array: Any, index: tuple[int, ...]) -> np.ndarray:
    """Return `array[index]`, with indices of the leading dims, assembled on the host from its shards."""
    if not isinstance(array, jax.Array):
        return np.asarray(array)[index]
    if not array.is_fully_addressable:
        assert isinstance(array.sharding, NamedSharding)
        replicated = NamedSharding(array.sharding.mesh, PartitionSpec())
        return np.asarray(_picked(replicated)(array, [np.int32(i) for i in index]).addressable_data(0))
    out = np.empty(array.shape[len(index) :], array.dtype)
    for shard in array.addressable_shards:
        bounds = [dim.indices(size)[:2] for dim, size in zip(shard.index, array.shape, strict=True)]
        inside = all(low <= i < high for i, (low, high) in zip(index, bounds, strict=False))
        if shard.replica_id or not inside:
            continue
        local = tuple(i - low for i, (low, _) in zip(index, bounds, strict=False))
        # On the CPU np.asarray is a view. On other devices, index first, to transfer only this slice.
        on_host = shard.device.platform == "cpu"
        part = np.asarray(shard.data)[local] if on_host else np.asarray(shard.data[local])
        out[tuple(slice(*dim) for dim in bounds[len(index) :])] = part
    return out


@functools.lru_cache(maxsize=8)
def _picked(replicated: NamedSharding) -> Any:
    """Return a jitted `array[index]` with a replicated result. The index is traced to avoid recompilation."""
    return jax.jit(lambda array, index: array[tuple(index)], out_shardings=replicated)
