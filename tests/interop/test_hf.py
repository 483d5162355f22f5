"""Folders of Hugging Face's: the same logits as transformers, the same bytes back, no matter which mesh."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import traverse_util
from safetensors.numpy import load_file, save_file

import meshpar as mp
from meshpar.interop import config_of, from_hf, load_hf, to_hf
from meshpar.interop.files import Folder
from meshpar.interop.hf import CheckpointTensors, copy_tokenizer, described, family_of, written
from meshpar.models import next_token_loss
from meshpar.runs.saved_run import keep_source_files
from meshpar.training.state import make_setup
from tests.data.test_batches import run_processes
from tests.equal import mesh_of, model_of
from tests.errors import raises
from tests.grid import cases
from tests.interop.folders import (
    GOLDEN,
    KINDS,
    ROUTER_CASES,
    assert_same_params,
    edit_json,
    folder_of,
    golden,
    read_single,
    router_folder,
    router_tokens,
)

TOLERANCE = 1e-4
"""Of float32 logits, all below 20: the two libraries sum in other orders."""


def logits_of(state, tokens) -> np.ndarray:
    setup = state.setup

    def run(state, tokens):
        with mp.use_rules(setup.mesh, setup.strategy):
            return state.bound()(tokens)

    rows = np.resize(np.arange(len(tokens)), 8)  # divisible by all meshes in this file
    return np.asarray(jax.jit(run)(state, tokens.astype(np.int32)[rows]))[: len(tokens)]


MOE_KINDS = ("deepseek_v3", "mixtral", "qwen3_moe")


@pytest.mark.parametrize("kind", cases("deepseek_v3", "qwen3_moe", grid=KINDS))
def test_logits_equal_transformers_and_bytes_roundtrip(kind, tmp_path, mesh8):
    source = folder_of(kind, tmp_path / "source", files=3)
    strategy = mp.fsdp() | mp.tensor_parallel()
    config, state = from_hf(source, mesh=mesh8, strategy=strategy, dtype="float32", attention="xla")
    _, _, tokens, logits = golden(kind)
    np.testing.assert_allclose(logits_of(state, tokens), logits, atol=TOLERANCE)
    assert config.num_params == state.num_params

    back = to_hf(state, config, tmp_path / "back", like=source)
    names = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in back.iterdir()) == names
    for name in names:
        if name.endswith(".safetensors"):
            assert (back / name).read_bytes() == (source / name).read_bytes(), name
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())


LAYOUTS = {
    "stages": (
        mp.MeshSpec(stage=2, fsdp=2, tensor=2),
        mp.fsdp() | mp.tensor_parallel() | mp.pipeline_parallel(stages=2, microbatches=4, schedule="1f1b"),
    ),
    "experts": (mp.MeshSpec(fsdp=2, expert=4), mp.fsdp() | mp.expert_parallel()),
    "fsdp": (mp.MeshSpec(fsdp=8), mp.zero3()),
}


@pytest.mark.parametrize(
    ("kind", "layout", "dtype"),
    cases(
        ("mixtral", "experts", "bfloat16"),
        grid=[
            (kind, layout, dtype)
            for kind in KINDS for layout in ("stages", "experts", "fsdp") for dtype in ("float32", "bfloat16")
            if layout != "experts" or kind in MOE_KINDS
        ],
    ),
)  # fmt: skip
def test_bytes_roundtrip_over_meshes(kind, layout, dtype, tmp_path):
    source, (spec, strategy) = folder_of(kind, tmp_path / "source"), LAYOUTS[layout]
    if layout == "stages" and config_of(source).num_moe_layers == 1:
        strategy, spec = mp.fsdp(), mp.MeshSpec(fsdp=8)  # a single layer cannot have two stages
    if layout == "fsdp":
        strategy = mp.zero2() if kind == "deepseek_v3" else strategy
    config, state = from_hf(source, mesh=mesh_of(spec), strategy=strategy, dtype=dtype)
    back = to_hf(state, config, tmp_path / "back", like=source)
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.matrix
@pytest.mark.parametrize("kind", cases("llama", grid=KINDS))
def test_linen_decoder_has_the_same_logits(kind, tmp_path, mesh8):
    source = folder_of(kind, tmp_path / "source")
    _, _, tokens, logits = golden(kind)
    model = model_of("linen", config_of(source, attention="xla"), 8, tokens.shape[1])
    setup = make_setup(model, optax.identity(), mesh=mesh8, strategy=mp.fsdp() | mp.tensor_parallel())
    np.testing.assert_allclose(logits_of(load_hf(source, setup), tokens), logits, atol=TOLERANCE)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_installed_transformers(kind, tmp_path, mesh8):
    pytest.importorskip("torch", reason="compares with transformers itself: pip install torch transformers")
    pytest.importorskip("transformers", reason="compares with it: pip install torch transformers")
    from tests.interop.make_golden import logits_of as theirs
    from tests.interop.make_golden import made

    model = made(kind, tmp_path / "source")
    tokens = np.random.default_rng(1).integers(0, 24, (8, 20))
    config, state = from_hf(tmp_path / "source", mesh=mesh8, strategy=mp.fsdp() | mp.tensor_parallel())
    np.testing.assert_allclose(logits_of(state, tokens), theirs(model, tokens), atol=TOLERANCE)
    back = to_hf(state, dataclasses.replace(config, source=None), tmp_path / "back")  # without a folder to go by
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(back, attn_implementation="eager").eval()
    np.testing.assert_allclose(theirs(again, tokens), theirs(model, tokens), atol=1e-6)


PROCESS = """
import json, sys
import jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
import meshpar as mp
from meshpar.interop import from_hf, to_hf

source, to = sys.argv[3:]
mesh, strategy = mp.MeshSpec(fsdp=2, expert=2).build(), mp.fsdp() | mp.expert_parallel()
config, state = from_hf(source, mesh=mesh, strategy=strategy)
assert not state.params["embed"]["embedding"].is_fully_addressable
to_hf(state, config, to, like=source)
to_hf(state, config, to + "-small", file_bytes=8000)
try:
    to_hf(state, config, to)
except ValueError as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.mark.matrix
def test_two_processes_write_one_folder(tmp_path):
    source = folder_of("qwen3_moe", tmp_path / "source", files=3)
    first, second = run_processes(PROCESS, 2, source, tmp_path / "back")
    assert "exists already" in first["error"]
    assert "process 0 failed" in second["error"]
    for name in sorted(path.name for path in source.iterdir()):
        if name.endswith(".safetensors"):
            assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes(), name
    _, weights, _, _ = golden("qwen3_moe")
    with Folder(tmp_path / "back-small") as small:
        assert len({entry.file for entry in small.entries.values()}) > 1
        for name, x in weights.items():
            np.testing.assert_array_equal(small.read_full(name), x, err_msg=name)


def test_failed_tensor_sends_its_other_pieces_once(monkeypatch):
    config, family, *_ = described(golden("deepseek_v3")[0])
    tensors = [one for one in family.tensors(config) if not one.is_extra]
    params = traverse_util.unflatten_dict({tuple(x.path.split("/")): np.zeros(x.shape, np.float32) for x in tensors})
    made, taken = CheckpointTensors(tensors, params, {}, None, None), []
    name = next(name for name, pieces in made.pieces.items() if len(pieces) > 1)
    monkeypatch.setattr("meshpar.interop.hf._gathered", lambda array, at: taken.append(at) or array[at])
    monkeypatch.setattr("meshpar.interop.weight_mapping.WeightMapping.write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made(name)
    assert len(taken) == 1
    for each in made.pieces:
        made.take_part(each)
    assert len(taken) == sum(map(len, made.pieces.values()))


def test_to_hf_writes_another_dtype_in_several_files(tmp_path):
    source = folder_of("llama", tmp_path / "source")
    config, state = read_single(source)
    back = to_hf(state, config, tmp_path / "back", dtype="float32", file_bytes=10_000)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    sizes = [(back / file).stat().st_size for file in set(index["weight_map"].values())]
    assert len(sizes) > 1
    assert len({path.stat().st_mode for path in back.iterdir()}) == 1  # weights are as readable as config.json
    assert sum(sizes) > 2 * (source / "model.safetensors").stat().st_size * 0.8
    again, other = read_single(back)
    assert again == dataclasses.replace(config, param_dtype="float32")
    assert_same_params(other, state)


def test_models_without_a_source_have_null_token_ids_and_the_dtype_of_their_tensors(tmp_path):
    """The default ids of a family may exceed the vocabulary: transformers cannot load Phi-3 with 29 tokens."""
    config, state = read_single(folder_of("odd/phi3", tmp_path / "source"), dtype="float32")
    config = dataclasses.replace(config, source=None, param_dtype="bfloat16")
    text = {"eos_token_id": [3, 28], "max_position_embeddings": 96}
    for fields, expected in (None, [None, None, None]), (text, [None, [3, 28], None]):
        back = to_hf(state, config, tmp_path / f"{fields is None}", fields=fields)
        document = json.loads((back / "config.json").read_text())
        assert [document[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")] == expected
        assert document["torch_dtype"] == "float32"
        assert {x.dtype for x in load_file(back / "model.safetensors").values()} == {np.dtype(np.float32)}
        assert document.get("max_position_embeddings") == (fields or {}).get("max_position_embeddings")
    for name, value in ("pad_token_id", 29), ("eos_token_id", True), ("max_position_embeddings", None), ("eos", 1):
        with raises("unknown-name" if name == "eos" else "out-of-range", name):
            to_hf(state, config, tmp_path / "none", fields={name: value})


def test_exports_of_runs_have_the_dtype_and_the_token_ids_of_the_source(tmp_path):
    """`hf` of a run has no weights. The run trains in float32, and config.json of the source says bfloat16."""
    source = folder_of("llama", tmp_path / "source")
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 5], "top_k": 7}')
    kept = keep_source_files(source, tmp_path / "run")
    _, state = read_single(source, dtype="float32")
    back = to_hf(state, config_of(kept), tmp_path / "back")
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    for name in "config.json", "generation_config.json":
        assert json.loads((back / name).read_text()) == json.loads((source / name).read_text())
    other = to_hf(state, config_of(kept), tmp_path / "other", fields={"eos_token_id": 3})
    for name, expected in ("config.json", golden("llama")[0]), ("generation_config.json", {"top_k": 7}):
        assert json.loads((other / name).read_text()) == expected | {"eos_token_id": 3}
    shutil.rmtree(kept)
    with raises("missing-file", "to_hf"):
        to_hf(state, dataclasses.replace(config_of(source), source=str(kept)), tmp_path / "none")


@pytest.mark.parametrize("is_on", [True, False])
def test_negative_router_coefficients_are_rejected(is_on):
    document = golden("mixtral")[0] | {"router_aux_loss_coef": -0.02, "output_router_logits": is_on}
    with raises("unsupported-feature", "router_aux_loss_coef"):
        described(document)


@pytest.mark.parametrize("kind", KINDS)
def test_config_roundtrips(kind):
    document, *_ = golden(kind)
    config, family, *_ = described(document)
    again = described(written(config, family)).config
    assert dataclasses.replace(again, moe=config.moe) == config
    assert family_of(config) is family
    # As transformers 5 writes it.
    newer = {name: value for name, value in document.items() if name not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {"rope_theta": document.get("rope_theta", 1e4), **(document.get("rope_scaling") or {})}
    if kind == "qwen3_moe":
        newer["num_local_experts"] = newer.pop("num_experts")
    if config.moe is not None:
        newer["output_router_logits"] = False
    assert described(newer).config == config


def test_config_of_no_family_raises(tmp_path):
    source = folder_of("llama", tmp_path / "source")
    config, state = read_single(source)
    with raises("unsupported-feature", "logits_cap"):
        to_hf(state, dataclasses.replace(config, logits_cap=30.0), tmp_path / "back")
    moe = described(golden("mixtral")[0]).config
    assert moe.moe is not None
    scored = dataclasses.replace(moe.moe, routing=dataclasses.replace(moe.moe.routing, score="sigmoid"))
    with raises("unsupported-feature", "moe.routing.score ('sigmoid')"):
        written(dataclasses.replace(moe, moe=scored), family_of(moe))
    assert not (tmp_path / "back").exists()
    with raises("already-exists", "source"):
        to_hf(state, config, source)


def changed(source: Path, change) -> Path:
    """Change the tensors of the only weight file of a folder."""
    tensors = dict(load_file(source / "model.safetensors"))
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("head", ["identical", "alone"])
def test_tied_model_with_a_head_in_its_files(head, tmp_path, monkeypatch):
    monkeypatch.setattr("meshpar.interop.files._COMPARE_BYTES", 1000)  # compare tables in several blocks
    source = folder_of("qwen3", tmp_path / "source")
    plain = (source / "model.safetensors").read_bytes()
    take = dict.__getitem__ if head == "identical" else dict.pop
    changed(source, lambda tensors: tensors.update({HEAD: take(tensors, TABLE)}))
    config, state = read_single(source, dtype="float32", attention="xla")
    _, _, tokens, logits = golden("qwen3")
    np.testing.assert_allclose(logits_of(state, tokens), logits, atol=TOLERANCE)
    assert config.tied_embeddings
    back = to_hf(state, config, tmp_path / "back", like=source)
    assert (back / "model.safetensors").read_bytes() == plain
    if head == "identical":

        def other(tensors):
            tensors[HEAD] = tensors[HEAD].copy()
            tensors[HEAD][-1, -1] += 1

        with raises("conflict", "`lm_head.weight`"):
            read_single(changed(source, other))


def test_rotary_frequency_buffers_are_ignored(tmp_path):
    source, frequencies = folder_of("llama", tmp_path / "source"), np.ones(2, np.float32)
    plain = (source / "model.safetensors").read_bytes()
    names = ["model.rotary_emb.inv_freq", *(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2))]
    changed(source, lambda tensors: tensors.update(dict.fromkeys(names, frequencies)))
    config, state = read_single(source)
    assert config.param_dtype == "bfloat16"
    assert (to_hf(state, config, tmp_path / "back", like=source) / "model.safetensors").read_bytes() == plain
    changed(source, lambda tensors: tensors.update({"model.layers.0.mlp.inv_freq": frequencies}))
    with raises("unknown-name", "mlp.inv_freq"):
        read_single(source)


def test_tokenizers_and_all_templates_are_copied(tmp_path):
    source = folder_of("llama", tmp_path / "source")
    names = ("tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja")
    (source / "additional_chat_templates").mkdir()
    for name in names:
        (source / name).write_text(name)
    (tmp_path / "back").mkdir()
    copy_tokenizer(source, tmp_path / "back")
    assert [(tmp_path / "back" / name).read_text() for name in names] == list(names)


def test_alternative_field_name_is_read(tmp_path):
    source = folder_of("qwen3_moe", tmp_path / "source")
    document = json.loads((source / "config.json").read_text())
    with raises("conflict", "`num_experts`"):
        described({**document, "num_local_experts": 5})
    edit_json(source / "config.json", lambda d: d.update(num_local_experts=d.pop("num_experts")))
    config, state = read_single(source)
    config = dataclasses.replace(config, rope_theta=500.0)
    back = json.loads((to_hf(state, config, tmp_path / "back", like=source) / "config.json").read_text())
    assert back["num_experts"] == 4
    assert "num_local_experts" not in back


ROUTER_LOSSES = json.loads((GOLDEN / "router_loss.json").read_text())
"""Coefficient times loss in transformers, by family and depth: of all layers pooled, and as mean over layers."""


def router_loss_of(source: Path) -> float:
    """Return the auxiliary loss of the routers in a step."""
    _, state = read_single(source, dtype="float32", attention="xla")
    tokens = router_tokens().astype(np.int32)
    _, metrics = mp.train_step(next_token_loss)(state, {"inputs": tokens, "targets": tokens})
    return float(metrics["moe/aux_loss"])


@pytest.mark.parametrize(("kind", "layers"), cases(("qwen3_moe", 6), grid=ROUTER_CASES))
def test_router_losses_equal_transformers(kind, layers, tmp_path):
    pooled, mean = ROUTER_LOSSES[f"{kind} {layers}"]
    found = router_loss_of(router_folder(kind, layers, tmp_path / "source"))
    np.testing.assert_allclose(found, mean, rtol=2e-5)  # of float32, over up to 32 layers
    np.testing.assert_allclose(found, pooled, rtol=2e-3)  # experts are nearly balanced, to which the coefficient refers


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_router_loss_fields_roundtrip(kind, tmp_path):
    document, *_ = golden(kind)
    document |= {"num_hidden_layers": 6, "router_aux_loss_coef": 0.02}
    for switch, weight in (({"output_router_logits": True}, 0.02 * 2 / 6), ({"output_router_logits": False}, 0.0)):
        config, family, *_ = described({**document, **switch})
        assert config.moe.auxiliary_weight == weight
        again = written(config, family)
        assert again["output_router_logits"] == switch["output_router_logits"]
        assert again.get("router_aux_loss_coef") == (0.02 if weight else None)
    assert described({name: x for name, x in document.items() if "router" not in name}).config.moe.auxiliary_weight == 0
    # A changed weight is written. The other fields of config.json stay the same.
    source = folder_of(kind, tmp_path / "source")
    config, state = read_single(source)
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, auxiliary_weight=0.03))
    to_hf(state, config, tmp_path / "back", like=source)
    after = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (after["output_router_logits"], after["router_aux_loss_coef"]) == (True, 0.03)
    assert described(after).config == config_of(source, moe=config.moe)


TRANSFORMERS = {
    "deepseek_v3": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "n_group": 8, "topk_group": 4,
                    "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    "llama": {"rms_norm_eps": 1e-6, "rope_theta": 1e4},
    "odd/gemma2": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
                   "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True},
    "odd/gemma3_text": {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
                        "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": None,
                        "final_logit_softcapping": None, "tie_word_embeddings": True},
    "odd/granite": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
                    "residual_multiplier": 1.0, "attention_multiplier": 1.0},
    "odd/olmo2": {"rms_norm_eps": 1e-5, "rope_theta": 1e4},
    "odd/phi3": {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "sliding_window": None, "partial_rotary_factor": 1.0},
    "odd/qwen2": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "use_sliding_window": False, "sliding_window": 4096,
                  "layer_types": None},
    "odd/smollm3": {"rms_norm_eps": 1e-6, "rope_theta": 2e6, "attention_bias": False, "tie_word_embeddings": True},
    "mistral": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": 4096},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "num_experts_per_tok": 2},
    "qwen3": {"rms_norm_eps": 1e-6, "rope_theta": 1e4},
    "qwen3_moe": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "norm_topk_prob": False},
}  # fmt: skip
"""Values of transformers 5.24 for fields that a config.json leaves out, where the shapes of tensors do not tell."""


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_left_out_field_has_the_default_of_transformers(kind):
    document, *_ = golden(kind)
    defaults = {"tie_word_embeddings": False, **TRANSFORMERS[kind]}
    if kind == "deepseek_v3":
        document |= {"n_routed_experts": 16}  # eight groups need two experts each
    shorter = {name: x for name, x in document.items() if name not in {*defaults, "rope_scaling", "rope_parameters"}}
    assert described(shorter).config == described({**shorter, **defaults}).config


def test_trained_weights_are_float32(tmp_path):
    source = folder_of("llama", tmp_path / "source")
    config, state = read_single(source, tx=optax.adamw(1e-5))
    assert config.param_dtype == "float32"
    before, step = jax.device_get(state.params), mp.train_step(next_token_loss)
    tokens = np.resize(np.arange(8, dtype=np.int32), (2, 9))
    state, metrics = step(state, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    kernel = ("layers", "mlp", "up", "kernel")
    changed = traverse_util.flatten_dict(state.params)[kernel] != traverse_util.flatten_dict(before)[kernel]
    assert np.mean(changed) > 0.9
    assert "lost_updates" not in metrics


def test_frozen_weights_keep_the_dtype_of_the_files(tmp_path):
    source = folder_of("llama", tmp_path / "source")
    _, state = read_single(source, tx=optax.adamw(1e-5), lora=mp.lora(rank=2))
    dtypes = (
        {d.leaf.dtype.name for d in state.table.params if d.leaf.is_trained},
        {d.leaf.dtype.name for d in state.table.params if not d.leaf.is_trained},
    )
    assert dtypes == ({"float32"}, {"bfloat16"})
    assert read_single(source)[0].param_dtype == "bfloat16"
    assert read_single(source, tx=optax.adamw(1e-5), dtype="bfloat16")[0].param_dtype == "bfloat16"


def test_without_a_dtype_no_tensor_is_rounded(tmp_path):
    """A float32 tensor among tensors in bfloat16 makes the parameters float32."""
    source = folder_of("llama", tmp_path / "source")
    assert read_single(source)[0].param_dtype == "bfloat16"
    norm = np.linspace(0.9, 1.1, len(load_file(source / "model.safetensors")["model.norm.weight"]), dtype=np.float32)
    changed(source, lambda tensors: tensors.update({"model.norm.weight": norm}))
    config, state = read_single(source)
    assert config.param_dtype == "float32"
    np.testing.assert_array_equal(state.params["final_norm"]["scale"], norm)


def test_window_null_is_read_as_none():
    document, *_ = golden("mistral")
    assert described({**document, "sliding_window": None}).config.attention_window is None


def test_biases_of_experts_are_written_in_float32(tmp_path):
    source = folder_of("deepseek_v3", tmp_path / "source")
    config, state = read_single(source, dtype="float32")
    back = load_file(to_hf(state, config, tmp_path / "back", dtype="bfloat16") / "model.safetensors")
    biases = [name for name in back if name.endswith("correction_bias")]
    assert biases
    for name in biases:
        assert back[name].dtype == np.float32
        np.testing.assert_array_equal(back[name], load_file(source / "model.safetensors")[name])
    assert back["model.norm.weight"].dtype.name == "bfloat16"
    # The argument overrides the dtype of the original folder.
    like = to_hf(state, config, tmp_path / "like", like=source, dtype="float16") / "model.safetensors"
    assert load_file(like)["model.norm.weight"].dtype == np.float16
