"""Tests of weighted mixtures: proportions, order, resuming, validation and bad input."""

from __future__ import annotations

import itertools
import json
import shutil
import sys

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.data import ChatData, Source, TextData
from meshpar.data.mixture import MixedSource, Mixture
from tests.errors import raises

SEQ = 8
WEIGHTS = {"web": 0.7, "code": 0.3}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write a folder `web` with the letter w, and a small folder `code` with the letter c."""
    for name, size in (("web", 400), ("code", 40)):
        (tmp_path / name).mkdir()
        for i in range(10):
            (tmp_path / name / f"{i}.txt").write_text(name[0] * size + f"{i}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(sources=WEIGHTS, *, batch_size=10, seed=0, **options) -> MixedSource:
    options = {"seq_len": SEQ, "valid_fraction": 0.3, "valid_batches": 1} | options
    source = TextData(sources=sources, **options).open(batch_size=batch_size, seed=seed)
    assert isinstance(source, MixedSource)
    return source


def owners(source: MixedSource, steps: int) -> list[list[str]]:
    """Return the source of each example in the first batches, from its row number."""
    names, starts = [*source.parts], source.train_rows.starts
    with source.train() as batches:
        rows = [batches.row_numbers(step) for step in range(steps)]
    return [[names[i] for i in np.searchsorted(starts, row, side="right") - 1] for row in rows]


@settings(max_examples=50)
@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=5), st.integers(0, 300))
def test_mixture_keeps_proportions_in_every_prefix(weights, length):
    mixture = Mixture(weights)
    drawn = [mixture[i] for i in range(length)]
    for source, weight in enumerate(weights):
        indices = [index for number, index in drawn if number == source]
        assert indices == list(range(mixture.counts(length)[source]))
        assert abs(len(indices) - length * weight / sum(weights)) < len(weights)


def test_mixture_is_exact_and_agrees_with_grain():
    assert Mixture([0.7, 0.3]).weights == (7, 3)
    assert Mixture([0.1, 0.2, 0.3]).weights == (1, 2, 3)
    assert Mixture([1 / 3, 1 / 3]).weights == (1, 1)
    assert Mixture([0.7, 0.3]).counts(10**12) == [7 * 10**11, 3 * 10**11]
    parts = [grain.MapDataset.range(start, start + 50) for start in (0, 100, 200)]
    mixed = grain.MapDataset.mix(parts, [2, 1, 1])
    mixture = Mixture([2, 1, 1])
    assert [mixed[i] for i in range(80)] == [parts[source][i] for source, i in (mixture[k] for k in range(80))]


def test_batches_have_the_weights_of_the_sources(folder):
    source = opened()
    order = source.order()
    parts = [grain.MapDataset.range(sys.maxsize).map(shuffled.__getitem__) for shuffled in order.orders]
    selected = grain.MapDataset.select_from_datasets(parts, source.mixture)
    assert [order[i] for i in range(150)] == [selected[i] for i in range(150)]
    assert isinstance(source, Source)
    assert source.shares == {"code": 0.3, "web": 0.7}
    for batch in owners(source, 20):
        assert (batch.count("web"), batch.count("code")) == (7, 3)
    with source.train() as batches:
        letters = np.asarray(next(batches)["inputs"])[:, 0]
    assert sorted(chr(x) for x in letters if chr(x) in "cw") == sorted(chr(x) for x in letters)
    assert (letters == ord("c")).sum() == 3


def test_each_source_repeats_in_a_new_order(folder):
    source = opened()
    with source.train() as batches:
        rows = np.concatenate([batches.row_numbers(step) for step in range(45)])
    start, num_code = source.train_rows.starts[1], len(source.parts["code"].train_rows)
    code = rows[rows < start]
    assert len(code) == 135 > 3 * num_code
    epochs = [code[i : i + num_code].tolist() for i in range(0, 3 * num_code, num_code)]
    assert all(sorted(epoch) == list(range(num_code)) for epoch in epochs)
    assert len({*map(tuple, epochs)}) == 3
    progress = source.progress(45)
    assert progress["code"] == {"examples": 135, "share": 0.3, "epochs": 135 / num_code}
    assert progress["web"]["epochs"] < 1.5
    assert source.progress(0)["web"] == {"examples": 0, "share": 0.0, "epochs": 0.0}


def test_order_depends_on_the_seed_and_not_on_names_order(folder):
    def rows(**options):
        with opened(**options).train() as batches:
            return [batches.row_numbers(step).tolist() for step in range(5)]

    assert rows() == rows(sources={"code": 0.3, "web": 0.7}) == rows(sources={"web": 7, "code": 3})
    assert rows() != rows(seed=1)
    assert list(itertools.chain(*rows())) != list(itertools.chain(*rows(sources={"web": 0.6, "code": 0.4})))


def test_sources_of_equal_size_have_different_orders(folder):
    (folder / "web").rename(folder / "text")
    shutil.copytree(folder / "text", folder / "copy")
    source = opened({"text": 1, "copy": 1}, files={"text": "text", "copy": "copy"})
    rows = source.order()
    first, second = ([rows[i] for i in range(start, 40, 2)] for start in (0, 1))
    assert [row - source.train_rows.starts[1] for row in second] != first


def test_mixture_on_a_mesh_matches_the_host(folder, mesh8):
    source, sharding = opened(batch_size=8), NamedSharding(mesh8, P("fsdp"))
    with source.train(sharding) as on_mesh, source.train() as on_host:
        for _ in range(3):
            np.testing.assert_array_equal(next(on_mesh)["targets"], next(on_host)["targets"])


def test_mixture_resumes_exactly_and_rejects_other_weights(folder):
    with opened().train() as batches:
        expected = [next(batches)["inputs"].tolist() for _ in range(9)]
    with opened().train() as first:
        assert [next(first)["inputs"].tolist() for _ in range(4)] == expected[:4]
        state = json.loads(json.dumps(first.get_state()))
    with opened().train() as second:
        second.set_state(state)
        assert [next(second)["inputs"].tolist() for _ in range(5)] == expected[4:]
    for sources in ({"web": 0.6, "code": 0.4}, {"web": 1.0}, {"./web": 0.7, "code": 0.3}):
        with opened(sources).train() as other, raises("conflict", "set_state"):
            other.set_state(state)


def test_validation_covers_each_source(folder):
    source = opened(batch_size=2, valid_batches=3)
    by_source = source.valid_by_source()
    for name, batches in by_source.items():
        expected = source.parts[name].valid_rows
        served = np.concatenate([batch["inputs"] for batch in batches])
        assert len(served) == 2 * len(batches) == 2 * min(3, len(expected) // 2)
        rows = {tuple(row) for row in expected.read(np.arange(len(expected)))["inputs"].tolist()}
        assert {tuple(row) for row in served.tolist()} <= rows
    everything = [batch["inputs"].tolist() for batch in source.valid()]
    assert everything == [batch["inputs"].tolist() for batches in by_source.values() for batch in batches]


def test_describe_has_each_source_and_sums(folder):
    source = opened(batch_size=2)
    description = source.describe()
    assert description == json.loads(json.dumps(description))
    sources = description["sources"]
    assert {name: entry["weight"] for name, entry in sources.items()} == source.shares
    assert sources["web"]["valid"]["served_tokens"] == 2 * SEQ
    for side in ("train", "valid"):
        assert description[side]["tokens"] == sum(entry[side]["tokens"] for entry in sources.values())
    assert description["fingerprint"] == source.fingerprint


def test_files_give_short_names_to_paths(folder):
    files = {"web": str(folder / "web"), "code": (str(folder / "code" / "[0-4].txt"), str(folder / "code" / "7.txt"))}
    source = opened(files=files)
    assert source.data.files["web"] == (str(folder / "web"),)
    sources = source.describe()["sources"]
    assert sources["code"]["train"]["documents"] + sources["code"]["valid"]["documents"] == 6
    assert sources["web"]["fingerprint"] == opened().describe()["sources"]["web"]["fingerprint"]


@pytest.mark.parametrize(("fields", "code", "where"), [
    ({"sources": {"web": 0.0}}, "out-of-range", "sources['web']"),
    ({"sources": {"web": -1}}, "out-of-range", "sources['web']"),
    ({"sources": {"web": float("nan")}}, "out-of-range", "sources['web']"),
    ({"sources": {"web": float("inf")}}, "out-of-range", "sources['web']"),
    ({"sources": {"web": "0.5"}}, "out-of-range", "sources['web']"),
    ({"sources": ("web", "code")}, "wrong-type", "sources"),
    ({"sources": {3: 0.5}}, "wrong-type", "sources"),
    ({"sources": {"web": 1}, "files": ("code",)}, "conflict", "sources"),
    ({"sources": {"web": 1}, "files": ("stdlib",)}, "conflict", "sources"),
    ({"sources": {"web": 1}, "files": {"wbe": "web"}}, "unknown-name", "TextData"),
    ({"files": {"web": "web"}, "sources": {}}, "unknown-name", "TextData.files"),
    ({"sources": {"web": 1}, "files": {"web": 3}}, "wrong-type", "files['web']"),
    ({"sources": {"web": 0.5, "no_such": 0.5}}, "missing-file", "source `no_such`"),
    ({"sources": {"web": 0.5, "web/3.txt": 0.5}}, "conflict", "source `web/3.txt`"),
    ({"sources": {"web": 0.5, "link": 0.5}}, "conflict", "source `link`"),
    ({"sources": {"web": 0.5, "empty": 0.5}}, "not-found", "source `empty`"),
    ({"sources": WEIGHTS, "seq_len": 300}, "out-of-range", "source `code`"),
    ({"sources": WEIGHTS, "batch_size": 40}, "out-of-range", "source `code`"),
])  # fmt: skip
def test_mixture_rejects_bad_sources(folder, fields, code, where):
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("web")
    with raises(code, where):
        opened(**fields)


def test_small_source_may_have_fewer_rows_than_a_batch(folder):
    source = opened({"web": 0.5, "code": 0.5}, valid_fraction=0.5, batch_size=12)
    assert len(source.parts["code"].train_rows) < 2 * 12
    assert [batch.count("code") for batch in owners(source, 5)] == [6] * 5


def test_chats_are_mixed_by_row(tmp_path):
    pytest.importorskip("jinja2", reason="renders templates: pip install meshpar[hf]")
    (tmp_path / "template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    for name in ("short", "long"):
        chat = [
            {"role": "user", "content": name},
            {"role": "assistant", "content": "yes" * (3 if name == "long" else 1)},
        ]
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"messages": chat, "id": 1}) + "\n") * 60)
    data = ChatData(
        files={"short": str(tmp_path / "short.jsonl"), "long": str(tmp_path / "long.jsonl")},
        sources={"short": 1, "long": 3}, tokenizer="bytes", template=str(tmp_path / "template.jinja"),
        seq_len=64, valid_fraction=0.3,
    )  # fmt: skip
    source = data.open(batch_size=4, seed=0)
    assert isinstance(source, MixedSource)
    with source.train() as batches:
        texts = [source.decode(row) for row in next(batches)["inputs"]]
    assert sum("long" in text for text in texts) == 3
    assert not any("long" in text and "short" in text for text in texts)
    description = source.describe()
    assert description["unused_fields"] == {"id": 120}
    assert description["train"]["conversations"] + description["valid"]["conversations"] == 120
