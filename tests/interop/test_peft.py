"""Adapters in PEFT's format, and runs that train them."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import meshpar as mp
from meshpar.interop import config_of, from_hf, load_peft, lora_of_peft, to_hf, to_peft
from meshpar.runs.recipe_file import load_recipe
from meshpar.runs.training_run import run as train
from meshpar.sharding.types import tree_leaves_with_paths
from tests.errors import raises
from tests.grid import cases
from tests.interop.folders import (
    KINDS,
    assert_same_params,
    edit_json,
    folder_of,
    golden,
    read_header,
    read_single,
    write_header,
)
from tests.interop.test_hf import logits_of
from tests.interop.test_untrusted import broken, check_parts, mutated
from tests.runs.test_saved_run import RECIPE, run, small_folder

EXPERTS = r"layers/(attention/(query|key|value|out)|mlp/(gate|up|down))"
CHOSEN = {
    "deepseek_v3": r"(dense_)?layers/(attention/(?!.*norm).*|mlp/(gate|up|down|shared_.*))",
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
}
"""Adapted matrices: attention and experts, and in DeepSeek-V3 all matrices that may have adapters."""
ATTENTION = r".*/attention/(query|key|value|out)"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULES = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def moved(state):
    """Return the state with adapters that are not zero."""
    leaves = [
        0.1 * jax.random.normal(jax.random.key(i), x.shape, x.dtype) if path.endswith("lora_b") else x
        for i, (path, x) in enumerate(tree_leaves_with_paths(state.params))
    ]
    return state.replace(params=jax.tree.unflatten(jax.tree.structure(state.params), leaves))


@pytest.mark.parametrize("kind", cases("qwen3_moe", grid=KINDS))
def test_to_peft_roundtrips_and_merges_as_peft(kind, tmp_path):
    source = folder_of(kind, tmp_path / "source")
    mesh, strategy = mp.MeshSpec(fsdp=4, tensor=2).build(), mp.fsdp() | mp.tensor_parallel()
    lora = mp.lora(rank=2, alpha=8, modules=CHOSEN.get(kind, ATTENTION))
    config, state = from_hf(source, mesh=mesh, strategy=strategy, lora=lora)
    state = moved(state)
    to_peft(state, config, tmp_path / "adapter", like=source, base="some/model")
    written = load_file(tmp_path / "adapter" / WEIGHTS)
    said = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (2, 8, "some/model")
    named = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in written}
    targets = said["target_modules"] + [name.removesuffix(".weight") for name in said["target_parameters"] or ()]
    modules = {name.removesuffix(".weight") for name in golden(kind)[1]}
    chosen = {name for name in modules for end in targets if f".{name}".endswith(f".{end}")}
    assert {name for name in chosen if kind != "deepseek_v3" or ".layers.2." not in name} == named  # which PEFT has not

    # As PEFT has it: W + alpha / r · B A, with B [out, r] and A [r, in].
    to_hf(state, config, tmp_path / "merged", like=source, dtype="float32")
    merged, (_, before, _, _) = load_file(tmp_path / "merged" / "model.safetensors"), golden(kind)
    for name, weight in before.items():
        pair = [f"base_model.model.{name.removesuffix('weight')}lora_{side}.weight" for side in "BA"]
        more = 4 * written[pair[0]] @ written[pair[1]] if pair[0] in written else 0
        np.testing.assert_allclose(merged[name], np.asarray(weight, np.float32) + more, atol=1e-2, rtol=1e-2)

    again = lora_of_peft(tmp_path / "adapter", config_of(source), like=source)
    _, fresh = from_hf(source, mesh=mp.MeshSpec(data=2).build(jax.devices()[:2]), strategy=mp.ddp(), lora=again)
    assert_same_params(load_peft(fresh, config, tmp_path / "adapter", like=source), state)


def test_adapters_keep_the_family_and_merge_with_the_requested_precision(tmp_path):
    """Phi-3 has fused projections. A sum in bfloat16 would differ by 2e-3."""
    source = folder_of("odd/phi3", tmp_path / "source")
    config, state = read_single(source, lora=mp.lora(rank=2, alpha=8))
    assert state.params["layers"]["attention"]["query"]["kernel"].dtype == "bfloat16"
    state = moved(state)
    pairs = load_file(to_peft(state, config, tmp_path / "adapter") / WEIGHTS)
    assert {name.split(".")[-3] for name in pairs} == {"qkv_proj", "o_proj"}
    merged = load_file(to_hf(state, config, tmp_path / "merged", dtype="float32") / "model.safetensors")
    for name, weight in golden("odd/phi3")[1].items():
        a, b = (pairs.get(f"base_model.model.{name.removesuffix('weight')}lora_{side}.weight", 0.0) for side in "AB")
        np.testing.assert_allclose(merged[name], weight.astype(np.float32) + 4 * np.dot(b, a), rtol=0, atol=1e-6)


def test_wide_pair_has_the_alpha_of_its_rank(tmp_path):
    """If a matrix of the release contains two matrices of the model, its pair has twice the rank."""
    source = folder_of("deepseek_v3", tmp_path / "source")
    config, state = read_single(source, lora=mp.lora(rank=2, alpha=10, modules=CHOSEN["deepseek_v3"]))
    to_peft(state, config, tmp_path / "adapter", like=source)
    said = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    ranks = {name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): len(x)
             for name, x in tensors.items() if name.endswith("lora_A.weight")}  # fmt: skip
    wide = {name for name, rank in ranks.items() if rank == 4}
    assert {name.rpartition(".")[2] for name in wide} == {"kv_b_proj", "kv_a_proj_with_mqa"}
    assert said["rank_pattern"] == dict.fromkeys(wide, 4)
    assert said["alpha_pattern"] == dict.fromkeys(wide, 20.0)
    assert (said["r"], said["lora_alpha"]) == (2, 10)
    assert_same_params(load_peft(state, config, tmp_path / "adapter", like=source), state)
    read = lora_of_peft(tmp_path / "adapter", config, like=source)
    assert (read.rank, read.alpha) == (2, 10)
    pairs = {path.rpartition("/")[0] for path, _ in tree_leaves_with_paths(state.params) if path.endswith("lora_a")}
    assert {path.replace("\\", "") for path in read.modules.split("|")} == {
        path.removesuffix("_pair") for path in pairs
    }


def stacked(adapter: Path) -> None:
    """Stack the adapters of experts, as PEFT does with transformers 5."""
    path, of = adapter / WEIGHTS, {}
    tensors = load_file(path)
    for name in sorted(tensors):
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.lora_([AB])\.weight", name):
            layer, expert, matrix, side = match.groups()
            of.setdefault(layer.replace("block_sparse_moe", "mlp"), {})[matrix, int(expert), side] = tensors.pop(name)
    for layer, pairs in of.items():
        gate, up, down = ("w1", "w3", "w2") if ("w1", 0, "A") in pairs else ("gate_proj", "up_proj", "down_proj")
        for inside, names in ((".base_layer", (gate, up)), ("", (down,))):
            firsts, seconds = [], []
            for expert in range(1 + max(expert for _, expert, _ in pairs)):
                firsts += [pairs[name, expert, "A"] for name in names]
                wide, rank = pairs[names[0], expert, "B"].shape
                second = np.zeros((wide * len(names), rank * len(names)), np.float32)
                for at, name in enumerate(names):
                    second[at * wide : (at + 1) * wide, at * rank : (at + 1) * rank] = pairs[name, expert, "B"]
                seconds.append(second)
            tensors[f"{layer}{inside}.lora_A.weight"] = np.concatenate(firsts)
            second = np.stack(seconds, axis=-1)  # [outputs, rank, experts]
            tensors[f"{layer}{inside}.lora_B.weight"] = second.reshape(len(second), -1)
    save_file(tensors, path)
    edit_json(adapter / CONFIG, {"target_parameters": PARAMETERS})


@pytest.mark.parametrize("kind", cases("qwen3_moe", grid=["deepseek_v3", "mixtral", "qwen3_moe"]))
def test_stacked_pairs_of_experts_are_read(kind, tmp_path):
    source, adapter = folder_of(kind, tmp_path / "source"), tmp_path / "adapter"
    mesh, strategy = mp.MeshSpec(fsdp=2, expert=4).build(), mp.fsdp() | mp.expert_parallel()
    given = {"mesh": mesh, "strategy": strategy}
    config, state = from_hf(source, **given, lora=mp.lora(rank=2, alpha=8, modules=CHOSEN[kind]))
    state = moved(state)
    to_peft(state, config, adapter, like=source)
    stacked(adapter)
    lora = lora_of_peft(adapter, config, like=source)
    found = load_peft(from_hf(source, **given, lora=lora)[1], config, adapter, like=source)
    assert_same_params(found, state)

    tensors = load_file(adapter / WEIGHTS)
    name = next(name for name in tensors if name.endswith("experts.base_layer.lora_B.weight"))
    save_file({**tensors, name: tensors[name] + 1}, adapter / WEIGHTS)  # not block-diagonal
    with raises("unsupported-feature", "base_layer.lora_B"):
        load_peft(found, config, adapter, like=source)
    for targets in (["mlp.gate.up"], "experts"):
        edit_json(adapter / CONFIG, {"target_parameters": targets})
        with raises("unsupported-feature", "`target_parameters`"):
            lora_of_peft(adapter, config, like=source)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")  # of packages that the tests do not install, about each other
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "deepseek_v3", "mixtral", "qwen3_moe"])
def test_live_against_peft(kind, tmp_path):
    why = "compares with them: pip install torch transformers peft"
    torch, transformers, peft = (pytest.importorskip(one, reason=why) for one in ("torch", "transformers", "peft"))
    source = folder_of(kind, tmp_path / "source")
    mesh = mp.MeshSpec(fsdp=4, tensor=2).build()
    lora = mp.lora(rank=2, alpha=8, modules=CHOSEN.get(kind, ATTENTION))
    config, state = from_hf(source, mesh=mesh, strategy=mp.fsdp() | mp.tensor_parallel(), dtype="float32", lora=lora)
    state = moved(state)
    to_peft(state, config, tmp_path / "adapter", like=source)
    to_hf(state, config, tmp_path / "merged", like=source, dtype="float32")
    rows = np.resize(golden(kind)[2], (8, golden(kind)[2].shape[1]))
    ours = logits_of(state, rows)
    base = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        for model in (peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), merged):
            theirs = model.eval()(torch.from_numpy(rows.astype(np.int64))).logits.numpy()
            np.testing.assert_allclose(ours, theirs, atol=1e-4)  # float32, sums in another order

    # Adapters made by PEFT. Experts that transformers 5 stacks are parameters.
    base, names, stacked = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), MODULES, None
    if kind in CHOSEN and transformers.__version__ >= "5":
        names, stacked = [one for one in MODULES if one.startswith(("q_", "kv_", "o_"))], PARAMETERS
    elif kind in CHOSEN:
        names = [*MODULES, "w1", "gate_proj"]
    given = peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, target_modules=names, target_parameters=stacked)
    made = peft.get_peft_model(base, given).eval()
    made.save_pretrained(tmp_path / "theirs")
    lora = lora_of_peft(tmp_path / "theirs", config, like=source)
    _, state = from_hf(source, mesh=mesh, strategy=mp.fsdp() | mp.tensor_parallel(), dtype="float32", lora=lora)
    state = load_peft(state, config, tmp_path / "theirs", like=source)
    with torch.no_grad():
        theirs = made(torch.from_numpy(rows.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(logits_of(state, rows), theirs, atol=1e-4)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ("dense_layers/mlp/(up|down)", ([], ["mlp.down_proj.weight", "mlp.up_proj.weight"])),
        ("layers/mlp/up", ([f"{expert}.up_proj" for expert in range(8)], None)),
        ("layers/(attention/out|mlp/shared_up)", (["1.self_attn.o_proj"], ["shared_experts.up_proj.weight"])),
    ],
)
def test_target_suffixes_match_no_other_module(modules, named, tmp_path):
    config, state = read_single(folder_of("deepseek_v3", tmp_path / "source"), lora=mp.lora(rank=2, modules=modules))
    to_peft(state, config, tmp_path / "adapter")
    said = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert (said["target_modules"], said["target_parameters"]) == named


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return the source folder, config, state with adapters, and adapter folder of a Llama."""
    folder = tmp_path_factory.mktemp("llama")
    source = folder_of("llama", folder / "source")
    config, state = read_single(source, lora=mp.lora(rank=2, alpha=8))
    return source, config, state, to_peft(state, config, folder / "adapter")


@pytest.fixture
def adapter(llama, tmp_path):
    return shutil.copytree(llama[3], tmp_path / "adapter")


def test_models_that_cannot_be_written_raise(llama, tmp_path):
    source, config, state, _ = llama
    with raises("not-found", "to_peft"):
        to_peft(read_single(source)[1], config, tmp_path / "none")
    with raises("wrong-type", "to_hf"):
        to_hf(state.params, config, tmp_path / "none")
    with raises("unknown-choice", "to_peft"):
        to_peft(state, config, tmp_path / "none", dtype="int8")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        ({"peft_type": "IA3"}, "unsupported-feature", "`peft_type`"),
        ({"use_dora": True}, "unsupported-feature", "`use_dora`"),
        ({"bias": "all"}, "unsupported-feature", "`bias`"),
        ({"rank_pattern": {"q": 3}}, "unsupported-feature", "`rank_pattern`"),
        ({"modules_to_save": ["lm_head"]}, "unsupported-feature", "`modules_to_save`"),
        ({"init_lora_weights": "pissa_niter_4"}, "unsupported-feature", "`init_lora_weights`"),
        ({"init_lora_weights": "lora_ga"}, "unsupported-feature", "`init_lora_weights`"),
        ({"alora_invocation_tokens": [5]}, "unsupported-feature", "`alora_invocation_tokens`"),
        ({"use_qalora": True}, "unsupported-feature", "`use_qalora`"),
        ({"kasa_config": {"beta": 1}}, "unsupported-feature", "`kasa_config`"),
        ({"next_years_variant": False}, "unknown-name", "`next_years_variant`"),
        ({"r": 0}, "out-of-range", CONFIG),
        ({"lora_alpha": "x"}, "out-of-range", CONFIG),
        ({"r": 3}, "unsupported-feature", "`r`"),
    ],
)
def test_unsupported_adapter_config(change, code, where, llama, adapter):
    _, config, state, _ = llama
    edit_json(adapter / CONFIG, change)
    with raises(code, where):
        lora_of_peft(adapter, config)
    with pytest.raises(mp.MeshparError):
        load_peft(state, config, adapter)


def test_adapters_of_another_scale_are_not_loaded(llama, adapter):
    edit_json(adapter / CONFIG, {"lora_alpha": 5})
    with raises("conflict", "load_peft"):
        load_peft(llama[2], llama[1], adapter)


def test_all_fields_that_peft_writes_are_known(llama, adapter):
    """The fields of PEFT 0.21.2 with their defaults, and two fields of its first versions."""
    plain = dict.fromkeys(
        ("alora_invocation_tokens", "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config",
         "enable_lora", "eva_config", "exclude_modules", "kasa_config", "layer_replication", "layers_pattern",
         "layers_to_transform", "lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config",
         "revision", "target_parameters", "trainable_token_indices", "use_bdlora", "velora_config"),
    ) | {
        "alpha_pattern": {}, "bias": "none", "ensure_weight_tying": False, "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True, "loftq_config": {}, "lora_alpha": 8, "lora_bias": False,
        "lora_dropout": 0.1, "megatron_core": "megatron.core", "merge_weights": False, "peft_type": "LORA",
        "peft_version": "0.21.2", "qalora_group_size": 16, "r": 2, "rank_pattern": {},
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "task_type": "CAUSAL_LM", "use_dora": False,
        "use_qalora": False, "use_rslora": False,
    }  # fmt: skip
    edit_json(adapter / CONFIG, plain)
    assert lora_of_peft(adapter, llama[1]).scale == 4


def test_pairs_in_some_layers_or_of_several_ranks_raise(llama, adapter):
    config, tensors = llama[1], load_file(adapter / WEIGHTS)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    pair = [f"{module}.lora_{side}.weight" for side in "AB"]
    wide = {name: np.concatenate([tensors[name]] * 2, axis) for axis, name in enumerate(pair)}
    save_file(tensors | wide, adapter / WEIGHTS)
    of_layer = {"rank_pattern": {"layers.0.self_attn.q_proj": 4}, "alpha_pattern": {"layers.0.self_attn.q_proj": 16}}
    edit_json(adapter / CONFIG, of_layer)
    with raises("unsupported-feature", "`r`"):
        lora_of_peft(adapter, config)
    save_file({name: x for name, x in tensors.items() if name not in pair}, adapter / WEIGHTS)
    edit_json(adapter / CONFIG, {"rank_pattern": {}, "alpha_pattern": {}})
    with raises("not-found", "layers.0.self_attn.q_proj.lora_A.weight"):
        lora_of_peft(adapter, config)


@pytest.mark.parametrize("num", cases(20, grid=[20, 1000]))
def test_mutated_adapters_raise_or_are_read(num, llama, adapter):
    rng, fine, (_, config, state, _) = random.Random(num), 0, llama
    for _ in range(num):
        target = adapter / rng.choice([CONFIG, WEIGHTS])
        content = target.read_bytes()
        if target.suffix == ".json":
            new = json.dumps(mutated(rng, json.loads(content))).encode()
            target.write_bytes(new if rng.random() < 0.8 else broken(rng, content))
        else:
            header, rest = read_header(target)
            target.unlink()
            write_header(target, json.dumps(mutated(rng, header)).encode(), rest)
        try:
            if lora_of_peft(adapter, config).rank == 2:
                load_peft(state, config, adapter)
            fine += 1
        except mp.MeshparError as error:
            check_parts(error)
        finally:
            target.write_bytes(content)
    assert 0 < fine < num


@pytest.mark.matrix
def test_recipe_trains_resumes_and_exports_adapters(tmp_path):
    source = small_folder(tmp_path / "source")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 400)
    recipe = load_recipe(RECIPE, devices=8).override(
        "lora.rank=2", "steps=2", "data.seq_len=16", f"data.files={text}", "data.valid_batches=1", "batch_size=8",
        "optimizer.warmup_steps=0", "optimizer.schedule=constant", "optimizer.lr=1e-2", "sample.num_tokens=4",
    )  # fmt: skip
    train(recipe, out=tmp_path, from_hf=source, stream=io.StringIO())
    screen = io.StringIO()
    more = train(recipe.override("steps=4"), out=tmp_path, from_hf=source, stream=screen)
    assert "resuming at step 2 of 4" in screen.getvalue()
    at = str(more.folder)
    run("convert", "to-peft", at, str(tmp_path / "adapter"), "--devices", "2")
    run("convert", "to-hf", at, str(tmp_path / "merged"), "--devices", "2")
    run("convert", "from-hf", str(source), str(tmp_path / "joined"), "--adapter", str(tmp_path / "adapter"))
    run("convert", "to-hf", str(tmp_path / "joined"), str(tmp_path / "again"))
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("source", "merged", "again")]
    changed = {name for name in files[0] if not np.array_equal(files[0][name], files[1][name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    for name, x in files[1].items():
        np.testing.assert_allclose(files[2][name], x, atol=1e-6, err_msg=name)  # float32
    assert Path(at, "checkpoints").is_dir()
