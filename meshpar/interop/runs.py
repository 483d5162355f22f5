"""The model of a training run or a Hugging Face folder, and the files that a run keeps of its source model.

runs/<name>/  checkpoints/ · hf/ (config.json, tokenizer, tensors that the decoder does not use)
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
from meshpar.interop.hf import CONFIG, config_of, copy_beside, describe, from_hf, kept_names, open_files
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

BESIDE_RUN = "hf"
"""Subfolder of a run that is passed to `to_hf(like=...)`."""
CHECKPOINTS = "checkpoints"
RUN_MODE = 0o700
"""Mode of a new run folder, before the umask. Other users cannot read it or create links in it."""
SOURCE = "source.json"
"""File in that subfolder with the path and fingerprint of the source folder."""
_SAMPLE_BYTES = 2**20
_CONFIG_TYPES = {
    config_type.__name__: config_type
    for config_type in (LatentAttention, Lora, MoEConfig, RopeScaling, Routing, TransformerConfig, YarnScaling)
}


def keep_beside(source: str | Path, run: Path) -> Path:
    """Copy the files that `to_hf` needs from the source folder of a model into a run, replacing earlier ones.

    Returns:
      the subfolder of the run.
    """
    to = run / BESIDE_RUN
    check_inside(Path(source) / CONFIG, Path(source))
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    shutil.copyfile(Path(source) / CONFIG, to / CONFIG)
    copy_beside(source, to)
    described = describe(Path(source))
    with open_files(source, described) as files:
        names = [name for name in kept_names(described) if name in files.entries]
        if names:
            total = sum(files.entries[name].nbytes for name in names)
            write(to, dict.fromkeys(names, SINGLE), files.read_full, total)
    write_json(to / SOURCE, {"folder": str(source), "fingerprint": fingerprint_of(source)})
    return to


def check_source(source: str | Path, run: Path) -> None:
    """Check that a folder is the source of a run's model.

    Raises:
      ValueError: the files differ, or the run's model did not come from a folder.
    """
    saved = run / BESIDE_RUN / SOURCE
    if Path(source).resolve() == saved.parent.resolve():
        return
    where, requested = f"--from-hf {source}", f"continue {run}"
    new_run = "use --name for a new run, or --fresh to start again"
    if not saved.parent.exists():
        reason = "the run began with randomly initialized weights"
        raise problem(where, requested, reason, f"omit --from-hf, or {new_run}", code="conflict")
    if saved.exists() and read_json(saved).get("fingerprint") != fingerprint_of(source):
        reason = f"the run began with the weights of another folder ({str(read_json(saved).get('folder'))[:200]})"
        raise problem(where, requested, reason, f"use that folder, or {new_run}", code="conflict")


def fingerprint_of(source: str | Path) -> str:
    """Hash the names, sizes and samples (start, middle, end) of the weight files in a folder."""
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
    """Return the folder for `to_hf(like=...)`, or None if the run began with random weights."""
    return run / BESIDE_RUN if (run / BESIDE_RUN / CONFIG).exists() else None


def opened(
    folder: str | Path, *, mesh: Mesh, strategy: Strategy | Rules, dtype: str | None = None, step: int | None = None
) -> tuple[TransformerConfig, TrainState]:
    """Load the model of a run or of a Hugging Face folder, without an optimizer. Adapters are merged.

    If the run averages its parameters (`AdamW(ema=0.999)`), the averages are loaded.

    Args:
      folder: a run (a folder with `checkpoints/`), or a Hugging Face folder.
      mesh, strategy: how the model is sharded.
      dtype: dtype of the parameters, for a Hugging Face folder only. None: the dtype of the files.
      step: checkpoint of a run. None: the newest.

    Raises:
      ValueError: another kind of folder; a dtype for a run; as `from_hf` and `Checkpoints.restore`.
    """
    path = Path(folder)
    if not (path / CHECKPOINTS).is_dir():
        if path.is_dir() and not (path / CONFIG).exists():
            reason, fix = f"it has neither {CHECKPOINTS}/ nor {CONFIG}", "use runs/<name>, or a Hugging Face folder"
            raise problem(f"folder `{path}`", "open a model", reason, fix, code="missing-file")
        return from_hf(path, mesh=mesh, strategy=strategy, dtype=dtype)
    if dtype is not None:
        reason, fix = "a run is loaded in the dtype of its checkpoint", "omit --dtype, or convert to-hf first"
        raise problem(f"run `{path}`", f"open its model in {dtype}", reason, fix, code="conflict")
    config, state = restored_run(path, mesh=mesh, strategy=strategy, step=step)
    return config, merged(state, config)


def merged(state: TrainState, config: TransformerConfig) -> TrainState:
    """Merge the adapters of a state into its matrices, and drop the optimizer state."""
    if state.setup.model.lora is None:
        return state
    setup = make_setup(config.build(), optax.identity(), mesh=state.setup.given_mesh, strategy=state.setup.strategy)
    return setup.begin(merged_params(state), state.extra, 0)


def restored_run(
    path: Path, *, mesh: Mesh, strategy: Strategy | Rules, step: int | None = None
) -> tuple[TransformerConfig, TrainState]:
    """Load the model of a run without merging its adapters. Arguments and errors are those of `opened`."""
    if not (path / CHECKPOINTS).is_dir():
        raise problem(f"run `{path}`", "open its model", f"it has no {CHECKPOINTS}/", "use runs/<name>", "missing-file")
    with Checkpoints(path / CHECKPOINTS) as checkpoints:
        table = checkpoints.stored(step).get("params/embed/embedding")
        if table is None:
            reason, fix = "its model is not a TransformerConfig's decoder", "use a run of a TransformerConfig"
            raise problem(f"run `{path}`", "open its model", reason, fix, code="unsupported-feature")
        config, lora = config_of_run(path, param_dtype=table["dtype"]), lora_of_run(path)
        model = config.build() if lora is None else lora(config.build())
        setup = make_setup(model, optax.identity(), mesh=mesh, strategy=strategy)
        restored = checkpoints.restore(setup, step, weights_only="averaged")
        assert restored is not None
        return config, restored.state


def lora_of_run(run: Path) -> Lora | None:
    """Return the adapters that a run trained, or None if it trained all parameters."""
    path = run / "recipe.json"
    return _from_plain(read_json(path).get("lora")) if path.exists() else None


def config_of_run(run: Path, **changes: Any) -> TransformerConfig:
    """Return the config of a run's model, from its recipe or from its source folder.

    Raises:
      ValueError: the recipe has another kind of model.
    """
    if not (run / "recipe.json").exists():
        return config_of(run / BESIDE_RUN, **changes)
    plain = read_json(run / "recipe.json").get("model")
    config = _from_plain(plain)
    if not isinstance(config, TransformerConfig):
        reason, fix = "its recipe has no TransformerConfig", "restore the model with Checkpoints"
        raise problem(f"run `{run}`", "open its model", reason, fix, code="unsupported-feature")
    return dataclasses.replace(config, **changes)


def _from_plain(plain: Any) -> Any:
    """Convert the output of `Recipe.to_json` to a config. New fields get their defaults."""
    if not isinstance(plain, Mapping):
        return plain
    config_type: Any = _CONFIG_TYPES.get(plain.get("type", ""))
    fields = {name: _from_plain(value) for name, value in plain.items() if name != "type"}
    return fields if config_type is None else config_type(**fields)
