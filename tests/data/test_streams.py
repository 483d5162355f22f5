"""Tests of token streams, their cache and their memory usage."""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from meshpar.data import TextData, streams
from meshpar.data import text as text_files
from meshpar.data.streams import token_streams
from meshpar.data.text import Reading, find
from meshpar.data.tokens import ByteTokenizer, HuggingFaceTokenizer
from meshpar.sharding.errors import MeshparError
from tests.errors import raises
from tests.grid import cases


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Write files of all formats, including empty documents and a binary file; return the texts by name, in order."""
    folder, rng = tmp_path_factory.mktemp("corpus"), random.Random(0)
    texts = {
        f"{number}": " ".join(rng.choice("aäbcxyz") * rng.randint(1, 9) for _ in range(60)) for number in range(40)
    }
    plain, lines, rows = ([texts[f"{i}"] for i in range(first, 40, 3)] for first in range(3))
    documents = {}
    for number, text in enumerate(plain):
        (folder / f"a{number:02}.txt").write_text(text, encoding="utf-8")
        documents[f"a{number:02}.txt"] = text
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in [*lines, ""]) + "\n\n")
    documents |= {f"b.jsonl:{number}": text for number, text in enumerate(lines, start=1)}
    pyarrow.parquet.write_table(pyarrow.table({"text": ["", *rows]}), folder / "c.parquet", row_group_size=3)
    documents |= {f"c.parquet:{number}": text for number, text in enumerate(rows, start=2)}
    (folder / "d.md").write_bytes(b"\xff")
    (folder / "e.md").write_bytes(b"")
    return folder, documents


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Return a tokenizer with more than 256 tokens, and its file."""
    vocab = {"[SEP]": 0} | {letter * times: 0 for letter in "aäbcxyz" for times in range(1, 60)}
    vocab = {word: number for number, word in enumerate(vocab)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[SEP]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(tmp_path_factory.mktemp("words") / "tokenizer.json"))
    return model, str(tmp_path_factory.getbasetemp() / "words0" / "tokenizer.json")


def in_memory(documents, fraction, encode):
    """Return the expected training tokens and validation tokens."""
    ranked = sorted(documents, key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())
    rank = {name: hashlib.blake2b(name.encode(), digest_size=8).digest() for name in documents}
    below = sum(int.from_bytes(rank[name], "big") / 2**64 < fraction for name in ranked)
    held_out = ranked[: min(max(below, 1), len(ranked) - 1)]
    sides = [[text for name, text in documents.items() if (name in held_out) == side] for side in (False, True)]
    return [[token for text in side for token in encode(text)] for side in sides]


def in_parts(monkeypatch):
    """Read plain files in many parts."""
    monkeypatch.setattr(text_files, "_READ_BYTES", 50)
    monkeypatch.setattr(streams, "_CONTEXT_CHARS", 40)


def make_streams(folder, tokenizer=None, *, fraction=0.2, cache=None, **options):
    reading = Reading(files=find([str(folder)]), **options)
    return token_streams(reading, tokenizer or ByteTokenizer(), valid_fraction=fraction, cache=cache)


@pytest.mark.parametrize(
    ("kind", "fraction"),
    cases(
        ("memory", 0.2), ("disk", 1e-9), ("cache", 1 - 1e-9),
        grid=itertools.product(["memory", "disk", "cache"], [0.2, 1e-9, 1 - 1e-9]),
    ),
)  # fmt: skip
def test_streams_match_tokenizing_all_documents(corpus, words, tmp_path, monkeypatch, kind, fraction):
    folder, documents = corpus
    in_parts(monkeypatch)
    monkeypatch.setattr(streams, "_BATCH_BYTES", 1000)
    if kind != "memory":
        monkeypatch.setattr(streams, "_IN_MEMORY_BYTES", 100)
    model, file = words
    for tokenizer, encode in (
        (ByteTokenizer(), lambda text: [*text.encode(), 0]),
        (HuggingFaceTokenizer(file), lambda text: [*model.encode(text).ids, 0]),
    ):
        result = make_streams(folder, tokenizer, fraction=fraction, cache=str(tmp_path) if kind == "cache" else None)
        expected = in_memory(documents, fraction, encode)
        for side, tokens, name in zip((result.train, result.valid), expected, streams.SIDES, strict=True):
            assert np.asarray(side).tolist() == tokens
            assert result.info[name]["tokens"] == len(tokens)
            assert isinstance(side, np.memmap) == (kind != "memory")
        assert result.info["skipped"] == 1
        assert sum(result.info[name]["bytes"] for name in streams.SIDES) == sum(
            len(x.encode()) for x in documents.values()
        )


@pytest.fixture(scope="module")
def merges(tmp_path_factory):
    """Train two tokenizers: BPE within words, and BPE over the full text like SentencePiece."""
    files = []
    for before in (tokenizers.pre_tokenizers.ByteLevel(), tokenizers.pre_tokenizers.Sequence([])):
        model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[SEP]"))
        model.pre_tokenizer = before
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["[SEP]"])
        model.train_from_iterator([argparse.__doc__, json.__doc__], trainer)
        files.append(str(tmp_path_factory.mktemp("merges") / "tokenizer.json"))
        model.save(files[-1])
    return files


class Fours(ByteTokenizer):
    """Merges groups of four characters."""

    def encode_many(self, texts):
        groups = [[text[i : i + 4] for i in range(0, len(text), 4)] for text in texts]
        return [np.array([sum(group.encode()) % 250 for group in row], np.uint8) for row in groups]


class FullText(ByteTokenizer):
    """Each token depends on the full text, so the text cannot be cut."""

    def encode_many(self, texts):
        return [np.full(len(text), hash(text) % 200, np.uint8) for text in texts]


@pytest.mark.parametrize(("tokenizer", "text"), [(Fours(), "x" + "=" * 401), (FullText(), "word " * 99)])
def test_documents_are_cut_at_token_boundaries_only(tokenizer, text, tmp_path, monkeypatch):
    (tmp_path / "long.txt").write_text(text)
    expected = make_streams(tmp_path, tokenizer).train.tolist()
    in_parts(monkeypatch)
    assert make_streams(tmp_path, tokenizer).train.tolist() == expected


@pytest.mark.parametrize("max_bytes", [None, 3001, 49])
def test_parts_of_a_document_have_the_tokens_of_the_full_text(words, merges, tmp_path, monkeypatch, max_bytes):
    file = tmp_path / "long.txt"
    file.write_text((os.__doc__ + "é" * 77 + json.__doc__) * 3, encoding="utf-8")
    all_tokenizers = [ByteTokenizer(), *(HuggingFaceTokenizer(name) for name in (words[1], *merges))]
    for tokenizer in all_tokenizers:
        expected = make_streams(file, tokenizer, max_bytes=max_bytes, fraction=0.3)
        with monkeypatch.context() as patch:
            in_parts(patch)
            parts = list(Reading(files=find([str(file)]), max_bytes=max_bytes))
            assert len(parts) > 1 or max_bytes == 49
            assert [part.goes_on for part in parts] == [True] * (len(parts) - 1) + [False]
            result = make_streams(file, tokenizer, max_bytes=max_bytes, fraction=0.3)
        assert result.info == expected.info
        assert (result.train.tolist(), result.valid.tolist()) == (expected.train.tolist(), expected.valid.tolist())


def test_file_with_invalid_utf8_at_the_end_is_skipped(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text " * 40)
    (tmp_path / "b.txt").write_bytes(b"text " * 40 + b"\xff")
    expected = make_streams(tmp_path).train.tolist()
    in_parts(monkeypatch)
    assert make_streams(tmp_path).train.tolist() == expected
    with raises("bad-syntax", "b.txt"):
        make_streams(tmp_path / "b.txt")


def test_run_resumes_with_cached_tokens(corpus, words, tmp_path, monkeypatch):
    folder, _ = corpus
    data = {"files": (str(folder),), "seq_len": 16, "valid_fraction": 0.2, "tokenizer": words[1]}
    with TextData(**data).open(batch_size=4, seed=0).train() as batches:
        expected = [next(batches)["targets"] for _ in range(5)]
    data["cache"] = str(tmp_path / "new" / "cache")
    source = TextData(**data).open(batch_size=4, seed=0)
    with source.train() as batches:
        for batch in expected[:3]:
            assert np.array_equal(next(batches)["targets"], batch)
        state = json.loads(json.dumps(batches.get_state()))
    monkeypatch.setattr(HuggingFaceTokenizer, "encode_many", lambda *_: pytest.fail("tokenized again"))
    again = TextData(**data).open(batch_size=4, seed=0)
    assert again.describe() == source.describe()
    with again.train() as batches:
        batches.set_state(state)
        assert [np.array_equal(next(batches)["targets"], batch) for batch in expected[3:]] == [True, True]


def test_cache_of_another_field_is_not_reused(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = [{"question": f"q{i}" * 20, "answer": f"a{i}" * 20} for i in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for field in ("question", "answer"):
        cached = make_streams(folder, text_field=field, cache=str(tmp_path / "cache"))
        assert cached.fingerprint == make_streams(folder, text_field=field).fingerprint


def test_cache_key_depends_on_options_and_contents(corpus, words, tmp_path):
    folder, _ = corpus
    for number in range(2):
        make_streams(folder, cache=str(tmp_path))
        make_streams(folder, fraction=0.3, cache=str(tmp_path))
        make_streams(folder, max_bytes=1000, cache=str(tmp_path))
        make_streams(folder, HuggingFaceTokenizer(words[1]), cache=str(tmp_path))
        make_streams(folder, HuggingFaceTokenizer(words[1], separator=""), cache=str(tmp_path))
        assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 5, number
    other = shutil.copytree(folder, tmp_path / "other")
    make_streams(other, cache=str(tmp_path))
    assert len(list(tmp_path.glob("*/about.json"))) == 5  # the same files in another folder
    (other / "a00.txt").write_text("changed")
    make_streams(other, cache=str(tmp_path))
    assert len(list(tmp_path.glob("*/about.json"))) == 6


@pytest.mark.parametrize(
    ("name", "damage"),
    [("train.tokens", lambda file: file.write_bytes(file.read_bytes()[:-4])), ("valid.tokens", os.remove),
     ("about.json", lambda file: file.write_text('{"train": {}}')), ("about.json", lambda file: file.write_text("?")),
     ("about.json", lambda file: file.write_text(file.read_text().replace('"fingerprint"', '"x"'))),
     ("valid.tokens", lambda file: file.write_bytes(bytes(file.stat().st_size))),
     ("train.tokens", lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?")),
     ("valid.tokens", lambda file: file.write_bytes(b"?" + file.read_bytes()[1:]))],
)  # fmt: skip
def test_damaged_cache_raises_an_error_with_its_folder(corpus, tmp_path, name, damage):
    make_streams(corpus[0], cache=str(tmp_path))
    (file,) = tmp_path.glob(f"*/{name}")
    damage(file)
    with pytest.raises(MeshparError) as error:
        make_streams(corpus[0], cache=str(tmp_path))
    assert error.value.fix == f"delete {file.parent}; the next run creates it again"


def failing(monkeypatch, error):
    """Raise an error after the streams are written and before the folder is renamed."""

    def fsync(_):
        raise error

    monkeypatch.setattr(os, "fsync", fsync)


def test_interrupted_write_leaves_no_cache_folder(corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            make_streams(corpus[0], cache=str(tmp_path))
    with monkeypatch.context() as patch:
        failing(patch, OSError(errno.ENOSPC, "No space left on device"))
        with raises("not-writable", "TextData.cache"):
            make_streams(corpus[0], cache=str(tmp_path))
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    expected = make_streams(corpus[0], cache=str(tmp_path)).train[:].tolist()
    (complete,) = (path for path in tmp_path.iterdir() if path.is_dir())
    partial = complete.rename(f"{complete}.x.partial")  # as a killed process leaves it
    (partial / "train.tokens").write_bytes(b"half")
    assert make_streams(corpus[0], cache=str(tmp_path)).train[:].tolist() == expected
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [complete]


def test_file_modified_while_tokenizing_raises_an_error(corpus, tmp_path):
    folder = shutil.copytree(corpus[0], tmp_path / "corpus")

    class Slow(ByteTokenizer):
        def encode_many(self, texts):
            (folder / "b.jsonl").write_text('{"text": "other"}')
            return super().encode_many(texts)

    with raises("conflict", "b.jsonl"):
        make_streams(folder, Slow(), cache=str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("*/about.json"))


def test_concurrent_runs_tokenize_once(corpus, tmp_path):
    started, batch_sizes, results = threading.Event(), [], []

    class Slow(ByteTokenizer):
        def encode_many(self, texts):
            batch_sizes.append(len(texts))
            started.set()
            time.sleep(0.05)
            return super().encode_many(texts)

    def make():
        results.append(make_streams(corpus[0], Slow(), cache=str(tmp_path)))

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
        started.wait(10)
    for thread in threads:
        thread.join(10)
    assert batch_sizes == [40]
    assert len(results) == 3
    assert len({result.train[:].tobytes() for result in results}) == 1


HOLDER = """
import sys, time
from pathlib import Path
from meshpar.data import streams
streams._BEAT_S = 0.05
with streams._locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_wait_for_the_cache_ends_if_its_holder_is_stopped(corpus, tmp_path, monkeypatch, child_env):
    make_streams(corpus[0], cache=str(tmp_path))
    (lock,) = tmp_path.glob(".*.lock")
    shutil.rmtree(next(path for path in tmp_path.iterdir() if path.is_dir()))
    monkeypatch.setattr(streams, "_STALL_S", 0.5)
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_env) as holder:
        assert holder.stdout.readline() == "locked\n"
        alive_s, start_s = 1.0, time.monotonic()  # longer than the limit, which does not apply to a live process
        stopping = threading.Timer(alive_s, holder.send_signal, [signal.SIGSTOP])
        stopping.start()
        try:
            with raises("conflict", "TextData.cache") as error:
                make_streams(corpus[0], cache=str(tmp_path))
            assert error.value.reason.startswith(f"process {holder.pid} on ")
            assert time.monotonic() - start_s > alive_s
        finally:
            stopping.join()
            holder.kill()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_lock_must_be_a_regular_file(corpus, tmp_path, kind):
    make_streams(corpus[0], cache=str(tmp_path / "cache"))
    (lock,) = (tmp_path / "cache").glob(".*.lock")
    shutil.rmtree(next((tmp_path / "cache").glob("*/about.json")).parent)
    lock.unlink()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    {"link": lambda: lock.symlink_to(victim), "pipe": lambda: os.mkfifo(lock)}[kind]()
    with raises("wrong-type", ".lock"):
        make_streams(corpus[0], cache=str(tmp_path / "cache"))
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(("name", "code"), [(3, "wrong-type"), ("", "wrong-type"), ("n" * 300, "unusable-file")])
def test_cache_must_be_the_path_of_a_folder(corpus, name, code):
    with raises(code, "TextData.cache"):
        make_streams(corpus[0], cache=name)


# ---- Large corpora and memory ----------------------------------------------------------------------------------------

CHILD = """
import json, os, resource, signal, sys, threading, time
import pyarrow.parquet
from meshpar.data import TextData
from meshpar.data.text import Reading

def kilobytes(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

files, cache, bound = sys.argv[1], sys.argv[2] or None, float(sys.argv[3])
data = TextData(files=(files,), seq_len=512, cache=cache)
small = os.path.join(os.path.dirname(files), "small.txt")
with TextData(files=(small,), seq_len=8, valid_batches=1).open(batch_size=1, seed=0).train() as batches:
    next(batches)  # import and start everything before measuring
if bound and not files.endswith("parquet"):  # pyarrow reserves a gigabyte that it does not use
    limit = kilobytes("VmData") * 1024 + int(bound)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
before, peak, over = kilobytes("RssAnon"), 0, threading.Event()

def watch():
    global peak
    while not over.wait(0.005):
        peak = max(peak, kilobytes("RssAnon") - before)

thread = threading.Thread(target=watch, daemon=True)  # ends with the process, also after an error
thread.start()
print("begins", flush=True)
source = data.open(batch_size=16, seed=0)
with source.train() as batches:
    rows = [next(batches)["targets"].tolist() for _ in range(8)]
if files.endswith("jsonl"):
    source.baseline()
over.set()
thread.join()
print(json.dumps({"peak": peak * 1024, "rows": rows, "description": source.describe()}))
"""


@contextlib.contextmanager
def child(*arguments):
    """Run `CHILD`, and kill it when the context ends."""
    code = textwrap.dedent(CHILD)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def large(folder, kind, num_bytes):
    """Write a file with documents of 5 kB."""
    rng, file = random.Random(0), folder / f"large.{kind}"
    texts = (rng.randbytes(2500).hex() for _ in range(num_bytes // 5000))
    if kind == "jsonl":
        with file.open("w") as out:
            out.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    elif kind == "txt":
        with file.open("w") as out:
            out.writelines(f"{text} " for text in texts)
    else:
        table = pyarrow.table({"text": list(texts)})
        pyarrow.parquet.write_table(table, file, row_group_size=table.num_rows)
    (folder / "small.txt").write_text("a few words " * 100)
    return file


@pytest.fixture
def scratch(tmp_path):
    """Return a folder that is deleted after the test. pytest would keep it."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_large_corpus_needs_little_memory(scratch, kind, cached):
    num_bytes, bound = 300_000_000, 200_000_000
    file = large(scratch, kind, num_bytes)
    with child(file, scratch / "cache" if cached else "", bound) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    print(f"{kind}, {num_bytes / 1e6:.0f} MB of text: {result['peak'] / 1e6:.0f} MB of memory")
    assert result["peak"] < bound
    num_separators = num_bytes // 5000 + (2 if kind == "txt" else 0)  # in .txt, spaces separate the texts
    num_tokens = sum(result["description"][side]["tokens"] for side in ("train", "valid"))
    assert num_tokens == num_bytes + num_separators


@pytest.mark.matrix
def test_cache_survives_killed_processes(scratch):
    file, cache = large(scratch, "jsonl", 50_000_000), scratch / "cache"
    with child(file, "", 0) as process:
        expected = json.loads(process.communicate(timeout=300)[0].splitlines()[-1])
    for wait_s in (0.02, 0.2, 0.5):
        with child(file, cache, 0) as process:
            process.stdout.readline()
            time.sleep(wait_s)
            process.send_signal(signal.SIGKILL)
    with child(file, cache, 0) as first, child(file, cache, 0) as second:
        for process in (first, second):
            result = json.loads(process.communicate(timeout=300)[0].splitlines()[-1])
            assert (result["rows"], result["description"]) == (expected["rows"], expected["description"])
    folders = [path for path in cache.iterdir() if path.is_dir()]
    assert folders == [path.parent for path in cache.glob("*/about.json")]
