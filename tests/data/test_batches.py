"""Tests of the order of batches, of resuming, and of global arrays."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar
from meshpar.data.batches import Batches, Shuffled, ValidBatches, spread_evenly
from tests.errors import raises
from tests.pod.pods import free_port, run_together

PATIENCE_S = 600
"""Timeout for hanging tests, long enough for a busy machine."""
PREFETCHES = pytest.mark.parametrize("prefetch", [0, 1, 3])


class Numbered:
    """Rows that contain their index. Records the indices that are read."""

    def __init__(self, num_rows: int, width: int = 4) -> None:
        self.num_rows, self.width, self.reads = num_rows, width, []

    def __len__(self) -> int:
        return self.num_rows

    def read(self, indices):
        self.reads.append(indices.tolist())
        data = np.broadcast_to(indices[:, None] * self.width, (len(indices), self.width)) + np.arange(self.width)
        return {"number": indices.astype(np.int32), "data": data.astype(np.int32)}


def batches(rows=20, *, batch_size=4, seed=0, fingerprint="f", **options) -> Batches:
    rows = Numbered(rows) if isinstance(rows, int) else rows
    return Batches(rows, batch_size=batch_size, seed=seed, fingerprint=fingerprint, **options)


def flat(lists) -> list[int]:
    return list(itertools.chain(*lists))


def numbers(it: Batches, count: int) -> list[list[int]]:
    return [next(it)["number"].tolist() for _ in range(count)]


@settings(max_examples=8)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**40))
def test_epoch_has_each_row_once(num_rows, batch_size, seed):
    batch_size = min(batch_size, num_rows)
    with batches(num_rows, batch_size=batch_size, seed=seed, prefetch=0) as it:
        epochs = 3
        served = np.concatenate([it.row_numbers(step) for step in range(-(-epochs * num_rows // batch_size))])
    for epoch in served[: epochs * num_rows].reshape(epochs, num_rows):
        assert sorted(epoch.tolist()) == list(range(num_rows))


@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 2), (5, 37), (3, 2**20 + 1)])
def test_order_is_that_of_grain(start, length):
    order = Shuffled(start, start + length, seed="3")
    dataset = grain.MapDataset.range(start, start + length).shuffle(seed=order.seed).repeat()
    for position in [*range(80), 5 * length - 1, 5 * length, 10**12]:
        assert order[position] == dataset[position]


def test_order_depends_on_epoch_and_seed():
    orders = [
        tuple(batches(50, batch_size=50, seed=seed, prefetch=0).row_numbers(epoch).tolist())
        for seed in (0, 1, 2, -1, 2**70)
        for epoch in range(4)
    ]
    assert len(set(orders)) == len(orders)
    assert tuple(range(50)) not in orders


@PREFETCHES
def test_batch_at_matches_iteration(prefetch):
    with batches(prefetch=prefetch) as it:
        for step in range(12):
            assert it.step == step
            expected = it.row_numbers(step).tolist()
            assert it.batch_at(step)["number"].tolist() == expected
            batch = next(it)
            assert batch["number"].tolist() == expected
            assert batch["data"].tolist() == [[4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3] for n in expected]


@settings(max_examples=5)
@given(st.integers(0, 15), st.integers(0, 15), st.sampled_from([0, 2, 5]))
def test_resuming_at_any_step_is_exact(stop_at, elsewhere, prefetch):
    with batches(seed=3, prefetch=0) as uninterrupted:
        expected = numbers(uninterrupted, stop_at + 6)
    with batches(seed=3, prefetch=prefetch) as first:
        assert numbers(first, stop_at) == expected[:stop_at]
        state = json.loads(json.dumps(first.get_state()))
    with batches(seed=3, prefetch=prefetch) as second:
        numbers(second, elsewhere)  # moves the position
        second.set_state(state)
        assert second.step == stop_at
        assert numbers(second, 6) == expected[stop_at:]


def test_state_does_not_count_prefetched_batches():
    rows = Numbered(20)
    with batches(rows, prefetch=4) as it:
        expected = it.row_numbers(2).tolist()
        numbers(it, 2)
        deadline_s = time.monotonic() + PATIENCE_S
        while it.row_numbers(5).tolist() not in rows.reads:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert it.get_state() == {"step": 2, "seed": 0, "batch_size": 4, "fingerprint": "f"}
        assert numbers(it, 1) == [expected]


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 5}, {"fingerprint": "x"}, {"extra": {"seq_len": 16}}])
def test_set_state_rejects_another_run(change):
    state = batches(extra={"seq_len": 8}).get_state()
    with raises("conflict", "set_state"):
        batches(**{"extra": {"seq_len": 8}, **change}).set_state(state)


@pytest.mark.parametrize(
    ("broken", "code"), [({}, "not-an-int"), ({"step": -1}, "not-an-int"), ({"step": 3}, "conflict")]
)
def test_set_state_rejects_damaged_states(broken, code):
    with raises(code, "set_state"):
        batches().set_state(broken)


def test_close_stops_the_prefetch_thread():
    before = set(threading.enumerate())
    rows = Numbered(20)
    it = batches(rows, prefetch=4)
    numbers(it, 2)
    (worker,) = set(threading.enumerate()) - before
    it.close()
    reads = len(rows.reads)
    worker.join(timeout=PATIENCE_S)
    assert not worker.is_alive()
    assert len(rows.reads) == reads
    it.close()


def test_close_waits_for_the_batch_in_progress():
    entered, leave = threading.Event(), threading.Event()
    rows = Numbered(20)
    it, read = batches(rows, prefetch=1), rows.read

    def slow(indices):
        entered.set()
        assert leave.wait(PATIENCE_S)
        return read(indices)

    numbers(it, 1)
    rows.read = slow
    threading.Thread(target=numbers, args=(it, 1), daemon=True).start()
    assert entered.wait(PATIENCE_S)
    closing = threading.Thread(target=it.close, daemon=True)
    closing.start()
    closing.join(timeout=0.2)
    assert closing.is_alive()
    leave.set()
    closing.join(timeout=PATIENCE_S)
    assert not closing.is_alive()


def test_reading_error_reaches_the_loop():
    rows = Numbered(20)
    with batches(rows, prefetch=2) as it:
        rows.read = lambda indices: {}["gone"]
        with pytest.raises(KeyError, match="gone"):
            next(it)


@pytest.mark.parametrize(("batch_size", "code"), [(21, "out-of-range"), (0, "not-an-int"), (-3, "not-an-int")])
def test_batch_size_must_fit_the_data(batch_size, code):
    with raises(code, "batch_size"):
        batches(20, batch_size=batch_size)
    with raises(code, "batch_size"):
        spread_evenly(20, batch_size, 3)


# Global arrays


def test_sharded_batches_match_host_batches(mesh8):
    sharding = NamedSharding(mesh8, P("fsdp"))
    with batches(batch_size=8, prefetch=0) as host, batches(batch_size=8, sharding=sharding) as it:
        for expected, batch in zip([next(host) for _ in range(5)], it, strict=False):
            assert isinstance(batch["data"], jax.Array)
            for name in ("number", "data"):
                spec = it.spec[name]
                assert batch[name].sharding == spec.sharding == sharding
                assert (batch[name].shape, batch[name].dtype) == (spec.shape, spec.dtype)
                np.testing.assert_array_equal(batch[name], expected[name])
            assert {shard.data.shape for shard in batch["data"].addressable_shards} == {(2, 4)}
            assert len(batch["data"].addressable_shards) == 8


AXES = ("data", "fsdp", "tensor")
ENTRIES = st.permutations(AXES).flatmap(
    lambda axes: st.integers(0, 3).map(lambda count: tuple(axes[:count]) if count else None)
)


@settings(max_examples=20)
@given(st.sampled_from([(1, 1, 8), (2, 2, 2), (8, 1, 1), (1, 4, 2), (2, 1, 4)]), ENTRIES, st.integers(1, 3))
def test_reads_partition_the_batch(shape, entry, per_device):
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3)
    batch_size = 8 * per_device
    rows = Numbered(50)
    with batches(rows, batch_size=batch_size, prefetch=0, sharding=NamedSharding(mesh, P(entry))) as it:
        rows.reads.clear()
        batch = next(it)
        assert sorted(flat(rows.reads)) == sorted(it.row_numbers(0).tolist())
        np.testing.assert_array_equal(batch["number"], it.row_numbers(0))


def test_batches_can_be_sharded_over_the_sequence(mesh8):
    shardings = {"number": NamedSharding(mesh8, P("fsdp")), "data": NamedSharding(mesh8, P("fsdp", "tensor"))}
    with batches(batch_size=8, prefetch=0) as host, batches(batch_size=8, sharding=shardings) as it:
        batch, expected = next(it), next(host)
        np.testing.assert_array_equal(batch["data"], expected["data"])
        assert {shard.data.shape for shard in batch["data"].addressable_shards} == {(2, 2)}


@pytest.mark.parametrize(
    ("sharding", "code", "where"),
    [
        (lambda m: NamedSharding(m, P(("fsdp", "tensor"))), "indivisible", "dim 0 (batch_size 12)"),
        (lambda m: NamedSharding(m, P("fsdp", "tensor")), "wrong-shape", "number"),
        (lambda m: {"number": NamedSharding(m, P())}, "unknown-name", "sharding"),
        (lambda m: dict.fromkeys(("number", "data", "date"), NamedSharding(m, P())), "unknown-name", "sharding"),
        (lambda m: {"number": None, "data": NamedSharding(m, P(None, AXES[1:]))}, "indivisible", "dim 1"),
    ],
)
def test_batches_reject_shardings_that_do_not_fit(mesh8, sharding, code, where):
    with raises(code, where):
        batches(batch_size=12, sharding=sharding(mesh8))


def test_prefetch_thread_keeps_float64(mesh8):
    class Float64(Numbered):
        def read(self, indices):
            return {"x": indices / 3}

    with jax.enable_x64(True):
        sharding = NamedSharding(mesh8, P("fsdp"))
        with batches(Float64(20), batch_size=8, sharding=sharding) as it:
            batch = next(it)
            assert batch["x"].dtype == it.spec["x"].dtype == np.float64
            np.testing.assert_array_equal(batch["x"], it.row_numbers(0) / 3)


# Held-out batches


@given(st.integers(1, 200), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 12)))
def test_spread_evenly_has_nearly_equal_steps(num_rows, batch_size, num_batches):
    if batch_size > num_rows:
        return
    rows = spread_evenly(num_rows, batch_size, num_batches)
    num_full = num_rows // batch_size
    assert len(rows) == batch_size * (num_full if num_batches is None else min(num_batches, num_full))
    steps = np.diff([*rows.tolist(), num_rows])
    assert rows[0] == 0
    assert steps.min() >= 1
    assert steps.max() - steps.min() <= 1


@PREFETCHES
def test_valid_batches_repeat_exactly(mesh8, prefetch):
    rows = Numbered(30)
    valid = ValidBatches(
        rows, spread_evenly(30, 8, 2), batch_size=8, sharding=NamedSharding(mesh8, P("fsdp")), prefetch=prefetch
    )
    assert len(valid) == 2
    first, second = ([batch["number"].tolist() for batch in valid] for _ in range(2))
    assert first == second
    assert flat(first) == [i * 30 // 16 for i in range(16)]
    assert valid.spec["number"].shape == (8,)


def test_valid_batches_stop_their_thread_early():
    before = set(threading.enumerate())
    valid = ValidBatches(Numbered(30), np.arange(20), batch_size=4)
    for _ in valid:
        break
    for worker in set(threading.enumerate()) - before:
        worker.join(timeout=PATIENCE_S)
        assert not worker.is_alive()


# Several processes


def run_processes(program, count, *args):
    """Run processes that share 4 host devices, and return the JSON output of each process."""
    environment = {
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // count}",
        "PYTHONPATH": str(Path(meshpar.__file__).parents[1]),
        "PORT": str(free_port()),
    }
    envs = [{**environment, "NUMBER": str(number)} for number in range(count)]
    finished = run_together(program, envs, *map(str, args))
    assert [process.returncode for process in finished] == [0] * count, finished
    return [json.loads(re.search(r"\{.*\}", process.stdout)[0]) for process in finished]  # gloo prints there too


LEG = """
import json, os, sys
import grain
import jax
count, steps, state = map(json.loads, sys.argv[1:])
jax.distributed.initialize(f"127.0.0.1:{os.environ['PORT']}", count, int(os.environ["NUMBER"]))
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshpar.data import ArrayData, ChatData, TextData

mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
source = DATA.open(batch_size=8, seed=1)
values = []
with source.train(NamedSharding(mesh, P("fsdp"))) as it:
    if state:
        it.set_state(state)
    read, num_read = source.train_rows.read, []
    source.train_rows.read = lambda indices: (num_read.append(len(indices)), read(indices))[1]
    for _ in range(steps):
        rows = next(iter(next(it).values()))
        values += [str(row) for shard in rows.addressable_shards for row in shard.data.tolist()]
    print(json.dumps({"values": values, "state": it.get_state(), "rows": len(source.train_rows),
                      "num_read": sum(num_read)}))
"""

DATA = {
    "arrays": 'ArrayData(arrays={"x": np.arange(96)}, valid_fraction=0.2, prefetch=0)',
    "text": 'TextData(files=("FOLDER/text.jsonl",), seq_len=32, valid_fraction=0.2, cache="FOLDER/cache", prefetch=0)',
    "conversations": 'ChatData(files=("FOLDER/chats.jsonl",), tokenizer="bytes", template="FOLDER/template.jinja", '
    "seq_len=64, valid_fraction=0.2, prefetch=0)",
}


@pytest.mark.matrix
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_restarts_on_other_process_counts_keep_the_order(tmp_path, data):
    texts = [f"{number:02} is the question, and {99 - number} is the answer" for number in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": words}) + "\n" for words in texts))
    chats = [[{"role": "user", "content": t[:15]}, {"role": "assistant", "content": t[15:]}] for t in texts]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    leg = LEG.replace("DATA", data.replace("FOLDER", str(tmp_path)))
    state, values, num_rows = None, [], 0
    for count, steps in ((2, 3), (4, 2), (1, 4), (2, 11)):
        results = run_processes(leg, count, count, steps, json.dumps(state))
        assert all(result["state"] == results[0]["state"] for result in results)
        shares = [len(result["values"]) for result in results]
        assert shares == [8 * steps // count] * count
        assert [result["num_read"] for result in results] == shares  # each process reads only its local examples
        for step in range(steps):
            local = slice(step * 8 // count, (step + 1) * 8 // count)
            values += [x for result in results for x in result["values"][local]]
        state, num_rows = results[0]["state"], results[0]["rows"]
    assert len(values) == 160 >= 2 * num_rows
    assert len(set(values[:num_rows])) == len(set(values[num_rows : 2 * num_rows])) == num_rows
    assert set(values[:num_rows]) == set(values[num_rows : 2 * num_rows])
