"""Models of training runs: load a run or a Hugging Face folder, and keep its config and tokenizer.

A run folder contains `checkpoints/` and, if training started from a Hugging Face folder, `hf/` with the config.json,
the tokenizer and the tensors that meshpar's decoders do not use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optax
from jax.sharding import Mesh

from meshpar.interop.files import SINGLE, read_json, write, write_json
from meshpar.interop.hf import CONFIG, config_of, copy_tokenizer, describe, from_hf, open_files, unused_tensor_names
from meshpar.loop.checkpoint import Checkpoints
from meshpar.models.config import LatentAttention, RopeScaling, TransformerConfig, YarnScaling
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routing
from meshpar.parallel import Strategy
from meshpar.sharding.host_resources import check_inside
from meshpar.sharding.rules import Rules
from meshpar.sharding.types import problem
from meshpar.training.lora import Lora, merged_params
from meshpar.training.state import TrainState, make_setup

SOURCE_FOLDER = "hf"
"""Subfolder of a run with the config and tokenizer files that `to_hf` copies."""
CHECKPOINTS = "checkpoints"
RUN_MODE = 0o700
"""Mode of a new run folder, before the umask: no other user can read it or create links in it."""
SOURCE = "source.json"
"""File in `SOURCE_FOLDER` that records the path and the fingerprint of the original folder."""
_SAMPLE_BYTES = 2**20
_CONFIG_TYPES = {
    cls.__name__: cls
    for cls in (LatentAttention, Lora, MoEConfig, RopeScaling, Routing, TransformerConfig, YarnScaling)
}


def keep_source_files(source: str | Path, run: Path) -> Path:
    """Copy into a run the files that `to_hf` needs from the original folder, and replace earlier copies.

    Args:
      source: the Hugging Face folder that the model was loaded from.
      run: the folder of the run.

    Returns:
      The subfolder of the run with the copies.
    """
    target = run / SOURCE_FOLDER
    check_inside(Path(source) / CONFIG, Path(source))
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copyfile(Path(source) / CONFIG, target / CONFIG)
    copy_tokenizer(source, target)
    described = describe(Path(source))
    with open_files(source, described) as files:
        names = [name for name in unused_tensor_names(described) if name in files.entries]
        if names:
            total = sum(files.entries[name].nbytes for name in names)
            write(target, dict.fromkeys(names, SINGLE), files.read_full, total)
    write_json(target / SOURCE, {"folder": str(source), "fingerprint": fingerprint_of(source)})
    return target


def check_source(source: str | Path, run: Path) -> None:
    """Check that a run's model was loaded from this folder.

    Args:
      source: a Hugging Face folder.
      run: the folder of the run.

    Raises:
      ValueError: the run started from other files, or with random weights.
    """
    record = run / SOURCE_FOLDER / SOURCE
    if Path(source).resolve() == record.parent.resolve():
        return
    if not record.parent.exists():
        reason = "the run started with random weights"
        fix = "omit --from-hf, start another run with --name, or replace this run with --fresh"
        raise problem(f"--from-hf {source}", f"resume {run}", reason, fix, code="conflict")
    if record.exists() and read_json(record).get("fingerprint") != fingerprint_of(source):
        reason = f"the run started with the weights of another folder ({str(read_json(record).get('folder'))[:200]})"
        fix = "pass that folder, start another run with --name, or replace this run with --fresh"
        raise problem(f"--from-hf {source}", f"resume {run}", reason, fix, code="conflict")


def fingerprint_of(source: str | Path) -> str:
    """Return a hash of the names and sizes of the safetensors files and of samples of their bytes.

    Args:
      source: a Hugging Face folder. The first, middle and last MiB of each file are hashed.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(source).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for offset in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def like_of(run: Path) -> Path | None:
    """Return the `like` folder of a run for `to_hf`, or None if the run did not start from a Hugging Face folder.

    Args:
      run: the folder of the run.
    """
    return run / SOURCE_FOLDER if (run / SOURCE_FOLDER / CONFIG).exists() else None


def opened(
    folder: str | Path, *, mesh: Mesh, strategy: Strategy | Rules, dtype: str | None = None, step: int | None = None
) -> tuple[TransformerConfig, TrainState]:
    """Load the model of a run or of a Hugging Face folder, without an optimizer. LoRA adapters of a run are merged.

    If a run averages its parameters (`AdamW(ema=0.999)`), the averages are loaded.

    Args:
      folder: a run (a folder with `checkpoints/`) or a Hugging Face folder.
      mesh: the device mesh.
      strategy: how the parameters are sharded.
      dtype: parameter dtype, for a Hugging Face folder only. `None` means the dtype in the files.
      step: checkpoint of a run. `None` means the latest.

    Returns:
      The config of the model and its state.

    Raises:
      ValueError: the folder is neither a run nor a Hugging Face folder, or `dtype` is set for a run. Also see
        `from_hf` and `Checkpoints.restore`.
    """
    path = Path(folder)
    if not (path / CHECKPOINTS).is_dir():
        if path.is_dir() and not (path / CONFIG).exists():
            reason = f"it has neither {CHECKPOINTS}/ nor {CONFIG}"
            fix = "pass runs/<name> or a Hugging Face folder"
            raise problem(f"folder `{path}`", "load a model", reason, fix, code="missing-file")
        return from_hf(path, mesh=mesh, strategy=strategy, dtype=dtype)
    if dtype is not None:
        reason = "a run is loaded in the dtype of its checkpoint"
        fix = "omit --dtype, or convert the run with to-hf first"
        raise problem(f"run `{path}`", f"load the model in {dtype}", reason, fix, code="conflict")
    config, state = restored_run(path, mesh=mesh, strategy=strategy, step=step)
    return config, merged(state, config)


def merged(state: TrainState, config: TransformerConfig) -> TrainState:
    """Return the state with LoRA adapters merged into the matrices, without an optimizer.

    Args:
      state: the state of a decoder. Without adapters it is returned unchanged.
      config: the config of the decoder.
    """
    if state.setup.model.lora is None:
        return state
    setup = make_setup(config.build(), optax.identity(), mesh=state.setup.given_mesh, strategy=state.setup.strategy)
    return setup.begin(merged_params(state), state.extra, 0)


def restored_run(
    path: Path, *, mesh: Mesh, strategy: Strategy | Rules, step: int | None = None
) -> tuple[TransformerConfig, TrainState]:
    """Load the model of a run, with LoRA adapters kept separate.

    Args:
      path: the folder of the run.
      mesh: the device mesh.
      strategy: how the parameters are sharded.
      step: the checkpoint to load. `None` means the latest.

    Returns:
      The config of the model and its state.

    Raises:
      ValueError: the folder has no checkpoints, or the model is not a meshpar decoder.
    """
    if not (path / CHECKPOINTS).is_dir():
        reason = f"it has no {CHECKPOINTS}/"
        raise problem(f"run `{path}`", "load the model", reason, "pass runs/<name>", code="missing-file")
    with Checkpoints(path / CHECKPOINTS) as checkpoints:
        table = checkpoints.stored(step).get("params/embed/embedding")
        if table is None:
            reason, fix = "the model is not a meshpar decoder", "use a run whose model is a TransformerConfig"
            raise problem(f"run `{path}`", "load the model", reason, fix, code="unsupported-feature")
        config, lora = config_of_run(path, param_dtype=table["dtype"]), lora_of_run(path)
        model = config.build() if lora is None else lora(config.build())
        setup = make_setup(model, optax.identity(), mesh=mesh, strategy=strategy)
        restored = checkpoints.restore(setup, step, weights_only="averaged")
        assert restored is not None
        return config, restored.state


def lora_of_run(run: Path) -> Lora | None:
    """Return the LoRA config of a run, or None if it trained all parameters.

    Args:
      run: the folder of the run.
    """
    path = run / "recipe.json"
    return _from_plain(read_json(path).get("lora")) if path.exists() else None


def config_of_run(run: Path, **changes: Any) -> TransformerConfig:
    """Return the model config of a run, from its recipe or from its copy of config.json.

    Args:
      run: the folder of the run.
      **changes: fields of the config to replace.

    Raises:
      ValueError: the model of the recipe is not a `TransformerConfig`.
    """
    if not (run / "recipe.json").exists():
        return config_of(run / SOURCE_FOLDER, **changes)
    plain = read_json(run / "recipe.json").get("model")
    config = _from_plain(plain)
    if not isinstance(config, TransformerConfig):
        reason = "the model in its recipe is not a TransformerConfig"
        fix = "build the model and restore its state with Checkpoints"
        raise problem(f"run `{run}`", "load the model", reason, fix, code="unsupported-feature")
    return dataclasses.replace(config, **changes)


def _from_plain(plain: Any) -> Any:
    """Invert `Recipe.to_json` for a config. Fields missing from older recipes have their defaults."""
    if not isinstance(plain, Mapping):
        return plain
    kind: Any = _CONFIG_TYPES.get(plain.get("type", ""))
    fields = {name: _from_plain(value) for name, value in plain.items() if name != "type"}
    return fields if kind is None else kind(**fields)
