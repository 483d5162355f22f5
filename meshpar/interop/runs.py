"""What a run's folder keeps of the model it began with, and the model of a run or of a folder of Hugging Face's.

runs/<name>/  checkpoints/ · hf/ (config.json, tokenizer, tensors that our decoders do not run)
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
"""Folder of a run that `to_hf` goes by."""
CHECKPOINTS = "checkpoints"
RUN_MODE = 0o700
"""Mode of a new run folder, less the umask: only its owner reads it, and nobody else can put links into it."""
SOURCE = "source.json"
"""In it, which folder that was."""
_LOOKED_AT = 2**20
_PARTS = {
    one.__name__: one
    for one in (LatentAttention, Lora, MoEConfig, RopeScaling, Routing, TransformerConfig, YarnScaling)
}


def keep_beside(source: str | Path, run: Path) -> Path:
    """Keep in a run what `to_hf` needs of the folder that its model came from; what it kept before goes.

    Returns:
      that folder of the run.
    """
    to = run / BESIDE_RUN
    check_inside(Path(source) / CONFIG, Path(source))
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    shutil.copyfile(Path(source) / CONFIG, to / CONFIG)
    copy_beside(source, to)
    described = describe(Path(source))
    with open_files(source, described) as files:
        kept = [name for name in kept_names(described) if name in files.entries]
        if kept:
            total = sum(files.entries[name].nbytes for name in kept)
            write(to, dict.fromkeys(kept, SINGLE), files.read_full, total)
    write_json(to / SOURCE, {"folder": str(source), "fingerprint": fingerprint_of(source)})
    return to


def check_source(source: str | Path, run: Path) -> None:
    """Look whether a folder is the one that a run's model came from.

    Raises:
      ValueError: its files are others, or the run's model came from none.
    """
    kept = run / BESIDE_RUN / SOURCE
    if Path(source).resolve() == kept.parent.resolve():
        return
    if not kept.parent.exists():
        exists = "the run began with weights of its own, which it goes on with"
        fix = "leave --from-hf out, or use --name for a new run beside it, or --fresh to begin anew"
        raise problem(f"--from-hf {source}", f"go on with {run}", exists, fix)
    if kept.exists() and read_json(kept).get("fingerprint") != fingerprint_of(source):
        exists = f"the run began with the weights of another folder ({str(read_json(kept).get('folder'))[:200]})"
        fix = "name that folder, or use --name for a new run beside it, or --fresh to begin anew"
        raise problem(f"--from-hf {source}", f"go on with {run}", exists, fix)


def fingerprint_of(source: str | Path) -> str:
    """Tells folders of weights apart: by the names, sizes and ends of their files, not by all that they hold."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(source).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for at in (0, size // 2, max(size - _LOOKED_AT, 0)):
                file.seek(at)
                digest.update(file.read(_LOOKED_AT))
    return digest.hexdigest()


def like_of(run: Path) -> Path | None:
    """What `to_hf` goes by for a run; None for one whose model began here."""
    return run / BESIDE_RUN if (run / BESIDE_RUN / CONFIG).exists() else None


def opened(
    folder: str | Path, *, mesh: Mesh, strategy: Strategy | Rules, dtype: str | None = None, step: int | None = None
) -> tuple[TransformerConfig, TrainState]:
    """The model of a run, or of a folder of Hugging Face's, without an optimizer; a run's adapters are merged.

    Of a run that averages its parameters (`AdamW(ema=0.999)`) the averages.

    Args:
      folder: of either; a run is one that has `checkpoints/`.
      mesh, strategy: how it is to lie.
      dtype: of the parameters, of a folder of Hugging Face's; None: as the files have them.
      step: of a run, which checkpoint; None: the newest.

    Raises:
      ValueError: neither of them; a dtype for a run; as `from_hf` and `Checkpoints.restore`.
    """
    path = Path(folder)
    if not (path / CHECKPOINTS).is_dir():
        if path.is_dir() and not (path / CONFIG).exists():
            exists = f"it has neither {CHECKPOINTS}/ nor {CONFIG}"
            raise problem(f"folder `{path}`", "open a model", exists, "name runs/<name>, or a folder of Hugging Face's")
        return from_hf(path, mesh=mesh, strategy=strategy, dtype=dtype)
    if dtype is not None:
        exists = "a run is opened in the dtype that it has"
        fix = "leave --dtype out, or convert to-hf first"
        raise problem(f"run `{path}`", f"open its model in {dtype}", exists, fix)
    config, state = restored_run(path, mesh=mesh, strategy=strategy, step=step)
    return config, merged(state, config)


def merged(state: TrainState, config: TransformerConfig) -> TrainState:
    """A decoder's state without adapters, which are in its matrices then, and without an optimizer."""
    if state.setup.model.lora is None:
        return state
    setup = make_setup(config.build(), optax.identity(), mesh=state.setup.given_mesh, strategy=state.setup.strategy)
    return setup.begin(merged_params(state), state.extra, 0)


def restored_run(
    path: Path, *, mesh: Mesh, strategy: Strategy | Rules, step: int | None = None
) -> tuple[TransformerConfig, TrainState]:
    """The model of a run as it trained it, with adapters where it has them; arguments and errors as `opened`."""
    if not (path / CHECKPOINTS).is_dir():
        raise problem(f"run `{path}`", "open its model", f"it has no {CHECKPOINTS}/", "name runs/<name>")
    with Checkpoints(path / CHECKPOINTS) as checkpoints:
        table = checkpoints.stored(step).get("params/embed/embedding")
        if table is None:
            exists, fix = "its model is none of the shipped decoders", "take a run of a TransformerConfig"
            raise problem(f"run `{path}`", "open its model", exists, fix)
        config, lora = config_of_run(path, param_dtype=table["dtype"]), lora_of_run(path)
        model = config.build() if lora is None else lora(config.build())
        setup = make_setup(model, optax.identity(), mesh=mesh, strategy=strategy)
        restored = checkpoints.restore(setup, step, weights_only="averaged")
        assert restored is not None
        return config, restored.state


def lora_of_run(run: Path) -> Lora | None:
    """The adapters that a run trained; None: it trained the whole model."""
    path = run / "recipe.json"
    return _from_plain(read_json(path).get("lora")) if path.exists() else None


def config_of_run(run: Path, **changes: Any) -> TransformerConfig:
    """The decoder that a run trained, by its recipe, or by the folder it was converted from.

    Raises:
      ValueError: the recipe's model is something else.
    """
    if not (run / "recipe.json").exists():
        return config_of(run / BESIDE_RUN, **changes)
    plain = read_json(run / "recipe.json").get("model")
    config = _from_plain(plain)
    if not isinstance(config, TransformerConfig):
        exists = "its recipe's model is no TransformerConfig"
        raise problem(f"run `{run}`", "open its model", exists, "restore it by Checkpoints, with the model itself")
    return dataclasses.replace(config, **changes)


def _from_plain(plain: Any) -> Any:
    """What `Recipe.to_json` made of a config; fields that it did not have then are at their defaults."""
    if not isinstance(plain, Mapping):
        return plain
    kind: Any = _PARTS.get(plain.get("type", ""))
    fields = {name: _from_plain(value) for name, value in plain.items() if name != "type"}
    return fields if kind is None else kind(**fields)
