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

from meshpar.data.tokens import load_tokenizer
from meshpar.interop.files import SINGLE, read_json, write, write_json
from meshpar.interop.hf import CONFIG, config_of, copy_tokenizer, describe, from_hf, open_files, unused_tensor_names
from meshpar.loop.checkpoint import Checkpoints
from meshpar.models.config import TransformerConfig
from meshpar.parallel import Strategy
from meshpar.runs.folder import CHECKPOINTS, RunFolder
from meshpar.runs.plain import from_plain
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import check_inside
from meshpar.sharding.rules import Rules
from meshpar.training.lora import Lora, merged_params
from meshpar.training.state import TrainState, make_setup

SOURCE_FOLDER = "hf"
"""Subfolder of a run with the config and tokenizer files that `to_hf` copies."""
RUN_MODE = 0o700
"""Mode of a new run folder, before the umask: no other user can read it or create links in it."""
SOURCE = "source.json"
"""File in `SOURCE_FOLDER` that records the path and the fingerprint of the original folder."""
_SAMPLE_BYTES = 2**20


def keep_source_files(source: str | Path, run: Path) -> Path:
    """Copy into a run the files that `to_hf` needs from the original folder, and replace earlier copies."""
    target = run / SOURCE_FOLDER
    check_inside(Path(source) / CONFIG, Path(source))
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copyfile(Path(source) / CONFIG, target / CONFIG)
    copy_tokenizer(Path(source), target)
    described = describe(Path(source))
    with open_files(source, described) as files:
        names = [name for name in unused_tensor_names(described) if name in files.entries]
        write(target, dict.fromkeys(names, SINGLE), files.read_full)
    write_json(target / SOURCE, {"folder": str(source), "fingerprint": fingerprint_of(source)})
    return target


def check_source(source: str | Path, run: Path) -> None:
    """Check that a run's model was loaded from this folder."""
    record = run / SOURCE_FOLDER / SOURCE
    if Path(source).resolve() == record.parent.resolve():
        return
    saved = read_json(record) if record.exists() else {}
    if not record.parent.exists() or (saved and saved.get("fingerprint") != fingerprint_of(source)):
        start = f"the weights of {saved.get('folder')}"[:200] if saved else "random weights"
        fix = "resume it from the same weights, choose a new --name, or replace this run with --fresh"
        raise problem(f"--from-hf {source}", f"resume {run}", f"the run started with {start}", fix, code="conflict")


def fingerprint_of(source: str | Path) -> str:
    """Return a hash of the names and sizes of the safetensors files and of samples of their bytes."""
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
    """Return the `like` folder of a run for `to_hf`, or None if the run did not start from a Hugging Face folder."""
    return run / SOURCE_FOLDER if (run / SOURCE_FOLDER / CONFIG).exists() else None


def text_fields(run: Path) -> dict[str, Any]:
    """Return the `fields` of `to_hf` for a run on `TextData`: the separator ends a text of at most `seq_len` tokens."""
    data = read_json(run / "recipe.json").get("data") if (run / "recipe.json").exists() else None
    if not isinstance(data, Mapping) or data.get("type") != "TextData":
        return {}
    tokenizer = load_tokenizer(data["tokenizer"], separator=data.get("separator"))
    return {"eos_token_id": tokenizer.separator_id, "max_position_embeddings": data["seq_len"]}


def opened(
    folder: str | Path | RunFolder,
    *,
    mesh: Mesh,
    strategy: Strategy | Rules,
    dtype: str | None = None,
    step: int | None = None,
    merge: bool = True,
) -> tuple[TransformerConfig, TrainState]:
    """Load the model of a run or of a Hugging Face folder, without an optimizer. LoRA adapters of a run are merged.

    With `merge=False`, the adapters stay separate, for `to_hf`, which merges them with the precision of its weights.

    If a run averages its parameters (`AdamW(ema=0.999)`), the averages are loaded.
    """
    run = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))
    path, is_run = run.local, run.has_checkpoints()
    if not is_run and (path / CONFIG).exists():
        return from_hf(path, mesh=mesh, strategy=strategy, dtype=dtype)
    if is_run and dtype is not None:
        reason = "a run is loaded in the dtype of its checkpoint"
        fix = "omit --dtype, or convert the run with to-hf first"
        raise problem(f"run `{run}`", f"load the model in {dtype}", reason, fix, code="conflict")
    config, state = restored_run(run, mesh=mesh, strategy=strategy, step=step)
    return config, merged(state, config) if merge else state


def merged(state: TrainState, config: TransformerConfig) -> TrainState:
    """Return the state with LoRA adapters merged into the matrices, without an optimizer."""
    if state.setup.model.lora is None:
        return state
    setup = make_setup(config.build(), optax.identity(), mesh=state.setup.given_mesh, strategy=state.setup.strategy)
    return setup.begin(merged_params(state), state.extra, 0)


def restored_run(
    run: RunFolder, *, mesh: Mesh, strategy: Strategy | Rules, step: int | None = None
) -> tuple[TransformerConfig, TrainState]:
    """Load the model of a run, with LoRA adapters kept separate."""
    path = run.local
    if not run.has_checkpoints():
        reason, fix = f"it has neither {CHECKPOINTS}/ nor {CONFIG}", "pass runs/<name> or a Hugging Face folder"
        raise problem(f"folder `{run}`", "load a model", reason, fix, code="missing-file")
    recipe = read_json(path / "recipe.json") if (path / "recipe.json").exists() else {}
    is_converted = not recipe and like_of(path) is not None
    config = config_of(path / SOURCE_FOLDER) if is_converted else from_plain(recipe.get("model"), TransformerConfig)
    if not isinstance(config, TransformerConfig):
        reason = "the model of the run is not a TransformerConfig"
        fix = "build the model and restore its state with Checkpoints"
        raise problem(f"run `{run}`", "load the model", reason, fix, code="unsupported-feature")
    with Checkpoints(run.checkpoints) as checkpoints:
        table, lora = checkpoints.stored(step)["params/embed/embedding"], from_plain(recipe.get("lora"), Lora)
        source = like_of(path)
        config = dataclasses.replace(
            config, param_dtype=table["dtype"], source=None if source is None else str(source.resolve())
        )
        model = config.build() if lora is None else lora(config.build())
        setup = make_setup(model, optax.identity(), mesh=mesh, strategy=strategy)
        restored = checkpoints.restore(setup, step, weights_only="averaged")
        assert restored is not None
        return config, restored.state
