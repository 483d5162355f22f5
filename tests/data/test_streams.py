"""Token streams: what is in them, what is kept, and how little memory that takes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
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
from meshpar.data.token_file import TokenFile
from meshpar.data.tokens import ByteTokenizer, HuggingFaceTokenizer
from meshpar.sharding.types import MeshparError
from tests.grid import cases


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Files of all kinds, with empty documents and one that is no text; and the documents, by name and in order."""
    folder, said = tmp_path_factory.mktemp("corpus"), random.Random(0)
    texts = {
        f"{number}": " ".join(said.choice("aäbcxyz") * said.randint(1, 9) for _ in range(60)) for number in range(40)
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
    """A tokenizer of 300 and more words, so of tokens in two bytes."""
    vocab = {"[SEP]": 0} | {letter * times: 0 for letter in "aäbcxyz" for times in range(1, 60)}
    vocab = {word: number for number, word in enumerate(vocab)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[SEP]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(tmp_path_factory.mktemp("words") / "tokenizer.json"))
    return model, str(tmp_path_factory.getbasetemp() / "words0" / "tokenizer.json")


def in_memory(documents, fraction, encode):
    """What the streams must be, made from all documents at once: training, held out."""
    ranked = sorted(documents, key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())
    rank = {name: hashlib.blake2b(name.encode(), digest_size=8).digest() for name in documents}
    below = sum(int.from_bytes(rank[name], "big") / 2**64 < fraction for name in ranked)
    held = ranked[: min(max(below, 1), len(ranked) - 1)]
    sides = [[text for name, text in documents.items() if (name in held) == side] for side in (False, True)]
    return [[token for text in side for token in encode(text)] for side in sides]


def in_parts(monkeypatch):
    """Plain files are read in many parts."""
    monkeypatch.setattr(text_files, "_BYTES_AT_ONCE", 50)
    monkeypatch.setattr(streams, "_SEAM_CHARS", 40)


def made(folder, tokenizer=None, *, fraction=0.2, cache=None, **options):
    reading = Reading(files=find([str(folder)]), **options)
    return token_streams(reading, tokenizer or ByteTokenizer(), valid_fraction=fraction, cache=cache)


@pytest.mark.parametrize(
    ("kind", "fraction"),
    cases(
        ("memory", 0.2), ("disk", 1e-9), ("cache", 1 - 1e-9),
        grid=itertools.product(["memory", "disk", "cache"], [0.2, 1e-9, 1 - 1e-9]),
    ),
)  # fmt: skip
def test_streams_are_those_of_all_documents_at_once(corpus, words, tmp_path, monkeypatch, kind, fraction):
    folder, documents = corpus
    in_parts(monkeypatch)
    monkeypatch.setattr(streams, "_BYTES_AT_ONCE", 1000)
    if kind == "disk":
        monkeypatch.setattr(streams, "_IN_MEMORY_BYTES", 100)
    model, file = words
    for tokenizer, encode in (
        (ByteTokenizer(), lambda text: [*text.encode(), 0]),
        (HuggingFaceTokenizer(file), lambda text: [*model.encode(text).ids, 0]),
    ):
        found = made(folder, tokenizer, fraction=fraction, cache=str(tmp_path) if kind == "cache" else None)
        expected = in_memory(documents, fraction, encode)
        for side, tokens, name in zip((found.train, found.valid), expected, streams.SIDES, strict=True):
            assert np.asarray(side).tolist() == tokens
            assert found.facts[name]["tokens"] == len(tokens)
            expected_type = {"memory": np.ndarray, "disk": np.memmap, "cache": TokenFile}[kind]
            assert type(side) is expected_type
        assert found.facts["skipped"] == 1
        assert sum(found.facts[name]["bytes"] for name in streams.SIDES) == sum(
            len(x.encode()) for x in documents.values()
        )


@pytest.fixture(scope="module")
def merges(tmp_path_factory):
    """A tokenizer that merges bytes, over words and, as SentencePiece's, over the whole text."""
    files = []
    for before in (tokenizers.pre_tokenizers.ByteLevel(), tokenizers.pre_tokenizers.Sequence([])):
        model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[SEP]"))
        model.pre_tokenizer = before
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["[SEP]"])
        model.train_from_iterator([argparse.__doc__, json.__doc__], trainer)
        files.append(str(tmp_path_factory.mktemp("merges") / "tokenizer.json"))
        model.save(files[-1])
    return files


@pytest.mark.parametrize("max_bytes", [None, 3001, 49])
def test_one_long_document_in_parts_has_the_tokens_of_the_whole(words, merges, tmp_path, monkeypatch, max_bytes):
    file = tmp_path / "long.txt"
    file.write_text((os.__doc__ + "é" * 77 + json.__doc__) * 3, encoding="utf-8")
    all_ = [ByteTokenizer(), *(HuggingFaceTokenizer(name) for name in (words[1], *merges))]
    for tokenizer in all_:
        whole = made(file, tokenizer, max_bytes=max_bytes, fraction=0.3)
        with monkeypatch.context() as patch:
            in_parts(patch)
            parts = list(Reading(files=find([str(file)]), max_bytes=max_bytes))
            assert len(parts) > 1 or max_bytes == 49
            assert [part.goes_on for part in parts] == [True] * (len(parts) - 1) + [False]
            found = made(file, tokenizer, max_bytes=max_bytes, fraction=0.3)
        assert found.facts == whole.facts
        assert (found.train.tolist(), found.valid.tolist()) == (whole.train.tolist(), whole.valid.tolist())


def test_a_long_run_of_one_character_is_cut_as_in_the_whole(tmp_path, monkeypatch):
    class Fours(ByteTokenizer):
        """Groups of four characters from the left."""

        def encode_many(self, texts):
            groups = [[text[at : at + 4] for at in range(0, len(text), 4)] for text in texts]
            return [np.array([sum(group.encode()) % 250 for group in one], np.uint8) for one in groups]

    (tmp_path / "long.txt").write_text("x" + "=" * 401)
    expected = made(tmp_path, Fours()).train.tolist()
    in_parts(monkeypatch)
    assert made(tmp_path, Fours()).train.tolist() == expected


def test_where_no_seam_is_found_the_whole_document_is_taken(tmp_path, monkeypatch):
    class Last(ByteTokenizer):
        """Each token depends on all text behind it."""

        def encode_many(self, texts):
            return [np.full(len(text), hash(text) % 200, np.uint8) for text in texts]

    (tmp_path / "long.txt").write_text("word " * 99)
    expected = made(tmp_path, Last()).train.tolist()
    in_parts(monkeypatch)
    assert made(tmp_path, Last()).train.tolist() == expected


def test_a_long_file_that_is_no_text_at_its_end_is_left_out_whole(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text " * 40)
    (tmp_path / "b.txt").write_bytes(b"text " * 40 + b"\xff")
    expected = made(tmp_path).train.tolist()
    in_parts(monkeypatch)
    assert made(tmp_path).train.tolist() == expected
    with pytest.raises(MeshparError, match=r"not UTF-8 .* position 0.*counted from byte 200 of the file"):
        made(tmp_path / "b.txt")


def test_a_run_goes_on_over_the_kept_tokens(corpus, words, tmp_path, monkeypatch):
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


def test_the_cache_knows_what_it_depends_on(corpus, words, tmp_path):
    folder, _ = corpus
    for number in range(2):
        made(folder, cache=str(tmp_path))
        made(folder, fraction=0.3, cache=str(tmp_path))
        made(folder, max_bytes=1000, cache=str(tmp_path))
        made(folder, HuggingFaceTokenizer(words[1]), cache=str(tmp_path))
        made(folder, HuggingFaceTokenizer(words[1], separator=""), cache=str(tmp_path))
        assert len([one for one in tmp_path.iterdir() if one.is_dir()]) == 5, number
    other = shutil.copytree(folder, tmp_path / "other")
    made(other, cache=str(tmp_path))
    assert len(list(tmp_path.glob("*/about.json"))) == 5  # the same files elsewhere
    (other / "a00.txt").write_text("changed")
    made(other, cache=str(tmp_path))
    assert len(list(tmp_path.glob("*/about.json"))) == 6


@pytest.mark.parametrize(
    ("name", "damage"),
    [("train.tokens", lambda file: file.write_bytes(file.read_bytes()[:-4])), ("valid.tokens", os.remove),
     ("about.json", lambda file: file.write_text('{"train": {}}')), ("about.json", lambda file: file.write_text("?")),
     ("about.json", lambda file: file.write_text(file.read_text().replace('"documents"', '"x"', 1))),
     ("about.json", lambda file: file.write_text(file.read_text().replace("held_out", "x"))),
     ("about.json", lambda file: file.write_text(file.read_text().replace('"digests"', '"x"'))),
     ("about.json", lambda file: file.write_text(file.read_text().replace('"digests": [', '"digests": ["",'))),
     ("about.json", lambda file: file.write_text(file.read_text().replace('"digests": ["', '"digests": ["0'))),
     ("valid.tokens", lambda file: file.write_bytes(bytes(file.stat().st_size))),
     ("train.tokens", lambda file: file.write_bytes(file.read_bytes()[::-1])),
     ("train.tokens", lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?")),
     ("valid.tokens", lambda file: file.write_bytes(b"?" + file.read_bytes()[1:]))],
)  # fmt: skip
def test_a_damaged_cache_is_named(corpus, tmp_path, name, damage):
    made(corpus[0], cache=str(tmp_path))
    (file,) = tmp_path.glob(f"*/{name}")
    damage(file)
    with pytest.raises(MeshparError, match=f"Delete {file.parent}"):
        made(corpus[0], cache=str(tmp_path))


def failing(monkeypatch, error):
    """The disk or the user ends it when all is written but its name."""

    def fsync(_):
        raise error

    monkeypatch.setattr(os, "fsync", fsync)


def test_what_was_interrupted_is_not_taken_for_whole(corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            made(corpus[0], cache=str(tmp_path))
    with monkeypatch.context() as patch:
        failing(patch, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(MeshparError, match=r"No space left.*Free some room"):
            made(corpus[0], cache=str(tmp_path))
    assert not [one for one in tmp_path.iterdir() if one.is_dir()]
    whole = made(corpus[0], cache=str(tmp_path)).train[:].tolist()
    (kept,) = (one for one in tmp_path.iterdir() if one.is_dir())
    partial = kept.rename(f"{kept}.x.partial")  # a killed process leaves that
    (partial / "train.tokens").write_bytes(b"half")
    assert made(corpus[0], cache=str(tmp_path)).train[:].tolist() == whole
    assert [one for one in tmp_path.iterdir() if one.is_dir()] == [kept]


def test_a_file_that_changes_meanwhile_is_named(corpus, tmp_path):
    folder = shutil.copytree(corpus[0], tmp_path / "corpus")

    class Slow(ByteTokenizer):
        def encode_many(self, texts):
            (folder / "b.jsonl").write_text('{"text": "other"}')
            return super().encode_many(texts)

    with pytest.raises(MeshparError, match=r"b.jsonl.*changed while it was read"):
        made(folder, Slow(), cache=str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("*/about.json"))


def test_of_several_one_tokenizes_and_the_others_wait(corpus, tmp_path):
    began, times, found = threading.Event(), [], []

    class Slow(ByteTokenizer):
        def encode_many(self, texts):
            times.append(len(texts))
            began.set()
            time.sleep(0.05)
            return super().encode_many(texts)

    def make():
        found.append(made(corpus[0], Slow(), cache=str(tmp_path)))

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
        began.wait(10)
    for thread in threads:
        thread.join(10)
    assert times == [40]
    assert len(found) == 3
    assert len({one.train[:].tobytes() for one in found}) == 1


def test_a_stopped_builder_is_named(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "_LOCK_LIMIT_S", 0.5)
    made(corpus[0], cache=str(tmp_path))
    (kept,) = tmp_path.glob("*/about.json")
    shutil.rmtree(kept.parent)
    (lock,) = tmp_path.glob(".*.lock")
    with lock.open("r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(b'{"host": "node7", "pid": 4321}')  # and no sign of life after that
        began_s = time.monotonic()
        with pytest.raises(MeshparError, match=r"process 4321 on node7 holds the lock.*Continue or end that process"):
            made(corpus[0], cache=str(tmp_path))
        assert time.monotonic() - began_s < 20
    assert len(made(corpus[0], cache=str(tmp_path)).train)


def test_a_slow_builder_is_waited_for(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "_LOCK_LIMIT_S", 1.0)
    monkeypatch.setattr(streams, "_BEAT_S", 0.05)
    began = threading.Event()

    class Slow(ByteTokenizer):
        def encode_many(self, texts):
            began.set()
            time.sleep(3)
            return super().encode_many(texts)

    thread = threading.Thread(target=made, args=(corpus[0], Slow()), kwargs={"cache": str(tmp_path)})
    thread.start()
    began.wait(10)
    assert len(made(corpus[0], cache=str(tmp_path)).train)
    thread.join(10)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_lock_that_is_no_file_is_an_error(corpus, tmp_path, kind):
    made(corpus[0], cache=str(tmp_path / "cache"))
    (lock,) = (tmp_path / "cache").glob(".*.lock")
    shutil.rmtree(next((tmp_path / "cache").glob("*/about.json")).parent)
    lock.unlink()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    {"link": lambda: lock.symlink_to(victim), "pipe": lambda: os.mkfifo(lock), "folder": lock.mkdir}[kind]()
    with pytest.raises(MeshparError, match=r"\.lock: cannot write to it: it is a"):
        made(corpus[0], cache=str(tmp_path / "cache"))
    assert victim.read_text() == "mine"


def test_a_tokenizer_that_returns_ids_outside_its_vocabulary_is_refused(corpus, tmp_path):
    class Wrong(ByteTokenizer):
        vocab_size = 100

    with pytest.raises(MeshparError, match="returns id 1.., and its vocabulary has 100 tokens"):
        made(corpus[0], Wrong(), cache=str(tmp_path))


def test_a_cache_that_shrinks_while_a_run_reads_it_is_an_error(corpus, tmp_path):
    data = TextData(files=(str(corpus[0]),), seq_len=16, valid_fraction=0.2, cache=str(tmp_path), prefetch=0)
    source = data.open(batch_size=4, seed=0)
    with source.train() as batches:
        next(batches)
        os.truncate(next(tmp_path.glob("*/train.tokens")), 0)
        with pytest.raises(MeshparError, match=r"train.tokens.*it has 0 bytes"):
            next(batches)
    with pytest.raises(MeshparError, match="ends at byte 0"):
        source.baseline()


@pytest.mark.parametrize("name", [3, "", "a\0b", "n" * 300, "~nobody-here/x"])
def test_a_cache_that_no_folder_can_be_is_named(corpus, name):
    with pytest.raises(MeshparError, match=r"`TextData.cache`.*Name a folder"):
        made(corpus[0], cache=name)


# ---- A corpus that is larger than memory may be ----------------------------------------------------------------------

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
    next(batches)  # what is imported and started in any case
if bound and not files.endswith("parquet"):  # whose library reserves a gigabyte, and takes little of it
    most = kilobytes("VmData") * 1024 + int(bound)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
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
print(json.dumps({"peak": peak * 1024, "rows": rows, "told": source.describe()}))
"""


@contextlib.contextmanager
def child(*arguments):
    """Run `CHILD`; kill it if it is still there when the context ends."""
    code = textwrap.dedent(CHILD)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def large(folder, kind, num_bytes):
    """A file of so much text, in documents of 5 kB."""
    said, file = random.Random(0), folder / f"large.{kind}"
    texts = (said.randbytes(2500).hex() for _ in range(num_bytes // 5000))
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
    """A folder that goes with the test: pytest keeps its own for a while."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_a_large_corpus_takes_little_memory(scratch, kind, kept):
    num_bytes, bound = 300_000_000, 200_000_000
    file = large(scratch, kind, num_bytes)
    with child(file, scratch / "cache" if kept else "", bound) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    told = json.loads(out.splitlines()[-1])
    print(f"{kind}, {num_bytes / 1e6:.0f} MB of text: {told['peak'] / 1e6:.0f} MB of memory")
    assert told["peak"] < bound
    more = 2 if kind == "txt" else 0  # a separator behind each of the two sides, where a space stands for the others
    assert told["told"]["train"]["tokens"] + told["told"]["valid"]["tokens"] == num_bytes + num_bytes // 5000 + more


@pytest.mark.matrix
def test_processes_that_are_killed_while_they_tokenize(scratch):
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
            found = json.loads(process.communicate(timeout=300)[0].splitlines()[-1])
            assert (found["rows"], found["told"]) == (expected["rows"], expected["told"])
    assert [one.name for one in cache.iterdir() if one.is_dir()] == [
        one.parent.name for one in cache.glob("*/about.json")
    ]
