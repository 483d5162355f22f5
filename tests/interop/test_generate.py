"""Generated text of a folder's model on a mesh equals greedy decoding with full forward passes."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import meshpar as mp
from meshpar.cli import main as cli
from meshpar.cli.generate_command import stop_ids
from meshpar.runs.sample import continued
from meshpar.runs.saved_run import opened
from tests.interop.folders import KINDS, folder_of, golden
from tests.interop.test_hf import logits_of
from tests.runs.test_saved_run import small_folder

NUM_TOKENS = 8


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token_as_the_full_forward_pass(kind, tmp_path, mesh8):
    source = folder_of(kind, tmp_path / "source")
    _, state = opened(source, mesh=mesh8, strategy=mp.fsdp() | mp.tensor_parallel(), dtype="float32")
    config, _ = opened(source, mesh=mp.MeshSpec().build(jax.devices()[:1]), strategy=mp.ddp(), dtype="float32")
    prompts = golden(kind)[2][:, :9]
    made = np.asarray(continued(state, config, prompts.tolist(), num_tokens=NUM_TOKENS, seed=0, temperature=0))
    np.testing.assert_array_equal(made[:, :9], prompts)
    logits = logits_of(state, made)  # of all positions at once, no cache
    best = np.sort(logits, axis=-1)
    assert (best[..., -1] - best[..., -2])[:, 8:-1].min() > 1e-4, "two tokens as likely: this would test nothing"
    np.testing.assert_array_equal(made[:, 9:], logits.argmax(-1)[:, 8:-1])


@pytest.mark.matrix
def test_generate_command_prints_text(tmp_path, capsys):
    source = small_folder(tmp_path / "source")
    said = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**said, "max_position_embeddings": 4}))
    args = ["generate", str(source), "--prompt", "ab", "--prompt", "c", "--prompt", "xy", "--tokenizer", "bytes"]
    args += ["--tokens", "3", "--top-k", "20", "--top-p", "0.9", "--devices", "2", "--json"]
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    out, err = capsys.readouterr()
    assert not end.value.code, err
    assert "5 tokens exceed the 4 positions" in err
    found = json.loads(out)
    assert [one["prompt"] for one in found] == ["ab", "c", "xy"]
    assert all(len(one["tokens"]) == 3 and one["text"].startswith(one["prompt"]) for one in found)


def test_stop_ids_are_those_of_the_generation_config(tmp_path):
    """Chat models may have more end tokens in generation_config.json than in config.json."""
    assert stop_ids(tmp_path) == []
    for name, document, expected in (
        ("config.json", {"eos_token_id": 3}, [3]),
        ("generation_config.json", {"top_p": 0.9}, [3]),
        ("generation_config.json", {"eos_token_id": [3, 5]}, [3, 5]),
    ):
        (tmp_path / name).write_text(json.dumps(document))
        assert stop_ids(tmp_path) == expected


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return small_folder(tmp_path_factory.mktemp("made") / "source")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--prompt", "a"], "neither the folder nor its recipe has a tokenizer"),
        (["--prompt", "", "--tokenizer", "bytes"], "its value is empty"),
        (["--prompt", "a", "--tokenizer", "bytes", "--top-p", "2"], "generate(top_p=2.0)"),
        (["--prompt", "a", "--tokenizer", "bytes", "--temperature", "nan"], "finite and at least 0"),
        (["--prompt", "a", "--tokenizer", "bytes", "--tokens", "1000000000"], "is not in the range"),
        (["--prompt", "a", "--tokenizer", "bytes", "--seed", "10000000000"], "is not in the range"),
    ],
)
def test_mistakes(args, says, source, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["generate", str(source), *args, "--devices", "1"])
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_missing_run_is_an_error_with_similar_names(source, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["generate", f"{source}s", "--prompt", "a", "--devices", "1"])
    assert end.value.code == 2
    assert f"there is no such folder. Did you mean `{source}`?" in capsys.readouterr().err
