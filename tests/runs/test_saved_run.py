"""Commands that convert Hugging Face folders and train from them."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import meshpar as mp
from meshpar.cli import main as cli
from meshpar.cli.convert_command import _suggest_layouts
from meshpar.interop import load_hf, to_hf
from meshpar.interop.files import whole_folder
from meshpar.loop.checkpoint import Checkpoints
from meshpar.models import TransformerConfig
from meshpar.models.architecture import LayerKind
from meshpar.pod.signals import scratch
from meshpar.runs.folder import run_folder
from meshpar.runs.plain import from_plain
from meshpar.runs.recipe_file import load_recipe
from meshpar.runs.saved_run import (
    SOURCE_FOLDER,
    check_source,
    keep_source_files,
    like_of,
    opened,
    text_fields,
)
from meshpar.runs.training_run import run as train
from meshpar.sharding.errors import check_divides
from meshpar.training.state import init_state
from tests.errors import raises
from tests.grid import cases
from tests.interop.folders import KINDS, assert_same_params, folder_of, read_single

RECIPE = Path(__file__).parents[2] / "recipes" / "finetune_hf.py"


def run(*args: str) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(list(args))
    assert not end.value.code


@pytest.mark.parametrize("kind", cases("qwen3", grid=KINDS))
def test_convert_roundtrips_a_folder(kind, tmp_path):
    source = folder_of(kind, tmp_path / "source")
    layout = ("--mesh", "fsdp=4,tensor=2", "--strategy", "fsdp() | tensor_parallel()", "--devices", "8")
    run("convert", "from-hf", str(source), str(tmp_path / "run"), *layout)
    run("convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "back"), "--mesh", "data=2", "--strategy", "ddp()",
        "--devices", "2")  # fmt: skip
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_shard_and_explain_read_the_folder_config(tmp_path, capsys):
    source = folder_of("qwen3", tmp_path / "source")
    (source / "tokenizer.json").unlink()
    run("shard", str(RECIPE), "--from-hf", str(source), "--devices", "4", "--json")
    leaves = json.loads(capsys.readouterr().out)["leaves"]
    assert [24, 16] in [leaf["shape"] for leaf in leaves]
    assert any(leaf["path"] == "layers/attention/query_norm/scale" for leaf in leaves)
    from meshpar.cli.explain_command import Subject

    subject = Subject.of(str(RECIPE), None, layout=(), assignments=(), shapes=None, from_hf=str(source))
    assert subject.recipe.model.qk_norm
    assert subject.against("fsdp=4,data=2").recipe.model.qk_norm
    with pytest.raises(mp.MeshparError, match="the folder sets this field"):
        Subject.of(str(RECIPE), None, layout=(), assignments=("model.num_layers=3",), shapes=None, from_hf=str(source))


@pytest.mark.parametrize("mesh", [None, "fsdp=8"])
def test_indivisible_sizes_suggest_fewer_devices(mesh):
    @_suggest_layouts
    def command(**_):
        check_divides("`embed`", "shard it over `fsdp` (8)", 12, 8)

    with raises("indivisible") as caught:
        command(mesh=mesh, strategy=None)
    assert getattr(caught.value, "__notes__", []) == (
        [] if mesh else ["use fewer devices with --mesh fsdp=N, or a single device with --devices 1"]
    )


def test_wrong_or_damaged_source_raises_before_writing(tmp_path):
    source, other = small_folder(tmp_path / "source"), tmp_path / "other"
    shutil.copytree(source, other)
    kept = tmp_path / "run"
    keep_source_files(source, kept)
    check_source(source, kept)
    check_source(kept / SOURCE_FOLDER, kept)
    with raises("conflict", "--from-hf"):
        check_source(source, tmp_path / "another run")
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "model.safetensors").write_bytes(content)
    with raises("conflict", "--from-hf"):
        check_source(other, kept)
    (other / "model.safetensors").write_bytes(content[:-8])
    recipe = load_recipe(RECIPE, devices=8).override("sample=none")
    with raises("damaged-file", "model.safetensors"):
        train(recipe, out=tmp_path / "runs", from_hf=other, stream=io.StringIO())
    assert not (tmp_path / "runs").exists()


def test_run_in_a_bucket_is_opened_like_its_source(bucket, tmp_path):
    source = folder_of("llama", tmp_path / "source")
    _, state = read_single(source)
    with run_folder(f"{bucket}/run", write=True) as folder:
        keep_source_files(source, folder.local)
        with Checkpoints(folder.checkpoints) as checkpoints:
            checkpoints.save(state, wait=True)
    with run_folder(f"{bucket}/run") as folder:
        _, again = opened(folder, mesh=mp.MeshSpec(fsdp=2).build(jax.devices()[:2]), strategy=mp.fsdp())
        assert_same_params(again, state)
        assert like_of(folder.local) is not None
    with raises("missing-file"), run_folder(f"{bucket}/none") as folder:
        opened(folder, mesh=mp.MeshSpec().build(jax.devices()[:1]), strategy=mp.ddp())


def test_text_fields_are_the_separator_and_the_length_of_the_data(tmp_path):
    recipe = load_recipe(RECIPE.parent / "gpt_stdlib.py")
    assert text_fields(tmp_path) == {}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_json()))
    assert text_fields(tmp_path) == {"eos_token_id": 0, "max_position_embeddings": 256}
    (tmp_path / "recipe.json").write_text(json.dumps({"data": {"type": "ArrayData"}}))
    assert text_fields(tmp_path) == {}


def test_float64_weights_are_rounded_with_a_warning(tmp_path):
    source = folder_of("llama", tmp_path / "source")
    path = source / "model.safetensors"
    save_file({name: x.astype(np.float64) for name, x in load_file(path).items()}, path)
    with pytest.raises(mp.MeshparError, match="float64.*jax_enable_x64"):
        read_single(source)
    config, state = read_single(source, dtype="float32")
    assert config.param_dtype == "float32"
    with pytest.warns(UserWarning, match="float64 weights are rounded"):
        load_hf(source, state.setup)


def test_whole_folder_follows_links_or_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("there")
    monkeypatch.chdir(tmp_path)
    for at in ("link", "dangling", "new"):
        with pytest.raises(KeyError), whole_folder(at) as fresh:  # noqa: PT012  (what fails in it)
            assert fresh in scratch
            raise KeyError
        with whole_folder(at) as fresh:
            (fresh / "weights").touch()
        assert [path.name for path in Path(at).iterdir()] == ["weights"]
        (Path(at) / "weights").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "empty", "link", "new", "there"]
    assert not scratch
    monkeypatch.chdir("empty")  # a rename would remove the current folder
    with raises("already-exists", "."), whole_folder("."):
        pass


def small_folder(path: Path) -> Path:
    """A Qwen3 over bytes."""
    config = TransformerConfig(
        vocab_size=256, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=16, qk_norm=True,
        norm_eps=1e-6,
    )  # fmt: skip
    mesh = mp.MeshSpec().build(jax.devices()[:1])
    state = init_state(config.build(), optax.identity(), mesh=mesh, strategy=mp.ddp(), key=3)
    return to_hf(state, config, path)


@pytest.mark.parametrize("name", ["llama3_8b", "mixtral_8x7b", "deepseek_v3", "layer kinds"])
def test_recipe_json_restores_the_model_config(name):
    recipe = load_recipe(RECIPE.parent / f"{'llama3_8b' if name == 'layer kinds' else name}.py")
    if name == "layer kinds":
        recipe = recipe.replace(model=mp.models.llama3_8b(layer_pattern=(LayerKind(window=512), LayerKind())))
    assert from_plain(json.loads(json.dumps(recipe.to_json()))["model"], TransformerConfig) == recipe.model


@pytest.mark.matrix
def test_training_starts_from_a_folder_and_exports_one(tmp_path, capsys):
    source = small_folder(tmp_path / "source")
    recipe = load_recipe(RECIPE, devices=2).override(
        "steps=1", "data.seq_len=16", "data.max_bytes=60000", "data.valid_fraction=0.2", "data.valid_batches=1",
        "optimizer.warmup_steps=0", "sample=none", "step.precision.compute=none", "optimizer.lr=1e-30",
    )  # fmt: skip
    given = {"out": tmp_path, "devices": jax.devices()[:2], "stream": io.StringIO()}
    damaged = shutil.copytree(source, tmp_path / "damaged")
    weights = load_file(damaged / "model.safetensors")
    save_file({**weights, "model.norm.weight": np.full(16, 3.4e38, np.float32)}, damaged / "model.safetensors")
    with raises("wrong-dtype", "model.norm.weight"):
        train(recipe.override("model.param_dtype=bfloat16"), from_hf=damaged, **given)
    left = sorted(path.name for path in (tmp_path / recipe.name).iterdir())
    assert not {"recipe.json", "sharding.json", "hf"} & set(left), left
    outcome = train(recipe, from_hf=source, **given)
    assert json.loads((outcome.folder / "recipe.json").read_text())["model"]["qk_norm"] is True
    kept = outcome.folder / SOURCE_FOLDER  # named again, it is not taken for another's and removed
    (kept / "config.json").write_text(json.dumps({**json.loads((kept / "config.json").read_text()), "bos_token_id": 7}))
    again = train(recipe, from_hf=kept, **given)
    assert again.summary["steps_taken"] == 0
    train(recipe, from_hf=source, **given)
    assert json.loads((kept / "config.json").read_text())["bos_token_id"] == 7
    run("convert", "to-hf", str(outcome.folder), str(tmp_path / "back"), "--devices", "2")
    (config, before), (again, after) = map(read_single, (source, tmp_path / "back"))
    assert config == again
    assert_same_params(after, before)  # the learning rate is too small to change them
    recipe = recipe.override("name=averages", "steps=2", "optimizer.lr=0.1", "optimizer.ema=0.9999999")
    averages = train(recipe, from_hf=source, **given)
    run("convert", "to-hf", str(averages.folder), str(tmp_path / "averages home"), "--devices", "2")
    assert_same_params(read_single(tmp_path / "averages home")[1], before, atol=1e-6)  # almost constant averages
    assert averages.summary["validation"]["loss"] == pytest.approx(outcome.summary["validation"]["loss"], rel=1e-5)
    capsys.readouterr()
    texts = []
    for folder in (source, averages.folder):
        args = ("--prompt", "def f", "--tokens", "16", "--temperature", "0", "--tokenizer", "bytes", "--devices", "2")
        run("generate", str(folder), *args, "--json")
        texts.append(json.loads(capsys.readouterr().out))
    assert texts[0] == texts[1], "continued by the averages"


FIELD = "the folder sets this field"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("convert from-hf nowhere out", "there is no such file"),
        ("convert to-hf nowhere out", "it has neither checkpoints/ nor config.json"),
        ("convert to-peft recipes out", "it has neither checkpoints/ nor config.json"),
        ("convert from-hf recipes file/out", "file: cannot use it: that failed ("),
        ("convert from-hf recipes " + "o" * 300, "File name too long"),
        ("convert to-hf recipes file", "it exists already"),
        ("train recipes/digits_linen.py --from-hf x", "the model of the recipe is a ClassifierConfig"),
        ("train recipes/finetune_hf.py --from-hf x --set model.num_layers=3", FIELD),
        ("train recipes/finetune_hf.py --from-hf . --tokenizer bytes", FIELD),
        ("train recipes/finetune_hf.py --from-hf . --set data.tokenizer=bytes", FIELD),
    ],
)
def test_invalid_arguments(args, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "recipes").symlink_to(RECIPE.parent)
    monkeypatch.chdir(tmp_path)
    for name in ("file", "tokenizer.json"):
        Path(name).write_text("{}")
    with pytest.raises(SystemExit) as end:
        cli.main(args.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err
