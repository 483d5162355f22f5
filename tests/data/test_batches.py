"""Batches: the order, resuming, and global arrays of which each process reads its own part."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar
from meshpar.data.batches import Batches, ValidBatches, spread_evenly
from meshpar.sharding.types import MeshparError

PATIENCE_S = 600
"""With a machine that is busy: what hangs ends a test, not what is slow."""
PREFETCHES = pytest.mark.parametrize("prefetch", [0, 1, 3])


class Numbered:
    """Rows that say their own number, and remember which were read."""

    def __init__(self, num_rows: int, width: int = 4) -> None:
        self.num_rows, self.width, self.reads = num_rows, width, []

    def __len__(self) -> int:
        return self.num_rows

    def read(self, indices):
        self.reads.append(indices.tolist())
        wide = np.broadcast_to(indices[:, None] * self.width, (len(indices), self.width)) + np.arange(self.width)
        return {"number": indices.astype(np.int32), "wide": wide.astype(np.int32)}


def batches(rows=20, *, batch_size=4, seed=0, fingerprint="f", **options) -> Batches:
    rows = Numbered(rows) if isinstance(rows, int) else rows
    return Batches(rows, batch_size=batch_size, seed=seed, fingerprint=fingerprint, **options)


def flat(lists) -> list[int]:
    return list(itertools.chain(*lists))


def numbers(of: Batches, count: int) -> list[list[int]]:
    return [next(of)["number"].tolist() for _ in range(count)]


@settings(max_examples=8)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**40))
def test_an_epoch_has_every_row_once(num_rows, batch_size, seed):
    batch_size = min(batch_size, num_rows)
    with batches(num_rows, batch_size=batch_size, seed=seed, prefetch=0) as of:
        epochs = 3
        served = np.concatenate([of.row_numbers(step) for step in range(-(-epochs * num_rows // batch_size))])
    for epoch in served[: epochs * num_rows].reshape(epochs, num_rows):
        assert sorted(epoch.tolist()) == list(range(num_rows))


def test_every_epoch_and_every_seed_has_its_own_order():
    orders = [
        tuple(batches(50, batch_size=50, seed=seed, prefetch=0).row_numbers(epoch).tolist())
        for seed in (0, 1, 2, -1, 2**70)
        for epoch in range(4)
    ]
    assert len(set(orders)) == len(orders)
    assert tuple(range(50)) not in orders


@PREFETCHES
def test_iterating_and_picking_a_step_agree(prefetch):
    with batches(prefetch=prefetch) as of:
        for step in range(12):
            assert of.step == step
            expected = of.row_numbers(step).tolist()
            assert of.batch_at(step)["number"].tolist() == expected
            batch = next(of)
            assert batch["number"].tolist() == expected
            assert batch["wide"].tolist() == [[4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3] for n in expected]


@settings(max_examples=5)
@given(st.integers(0, 15), st.integers(0, 15), st.sampled_from([0, 2, 5]))
def test_resuming_at_any_step_is_exact(stop_at, elsewhere, prefetch):
    with batches(seed=3, prefetch=0) as whole:
        expected = numbers(whole, stop_at + 6)
    with batches(seed=3, prefetch=prefetch) as first:
        assert numbers(first, stop_at) == expected[:stop_at]
        state = json.loads(json.dumps(first.get_state()))
    with batches(seed=3, prefetch=prefetch) as second:
        numbers(second, elsewhere)  # wherever it was before
        second.set_state(state)
        assert second.step == stop_at
        assert numbers(second, 6) == expected[stop_at:]


def test_what_was_only_prefetched_does_not_count():
    rows = Numbered(20)
    with batches(rows, prefetch=4) as of:
        expected = of.row_numbers(2).tolist()
        numbers(of, 2)
        _wait_until(lambda: of.row_numbers(5).tolist() in rows.reads)
        assert of.get_state()["step"] == 2
        assert numbers(of, 1) == [expected]


def _wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_state_holds_what_makes_it_valid():
    with batches(seed=7, fingerprint="abc", extra={"seq_len": 8}) as of:
        numbers(of, 3)
        assert of.get_state() == {"step": 3, "seed": 7, "batch_size": 4, "fingerprint": "abc", "seq_len": 8}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 1}, "set seed to 0"),
        ({"batch_size": 5}, "set batch_size to 4"),
        ({"fingerprint": "other"}, "bring back the data"),
        ({"extra": {"seq_len": 16}}, "set seq_len to 8"),
    ],
)
def test_a_state_of_another_run_is_refused(change, said):
    state = batches(extra={"seq_len": 8}).get_state()
    with pytest.raises(MeshparError) as error:
        batches(**{"extra": {"seq_len": 8}, **change}).set_state(state)
    assert said in error.value.fix


@pytest.mark.parametrize("broken", [{}, {"step": 3}, {"step": -1, "seed": 0, "batch_size": 4, "fingerprint": "f"}])
def test_what_is_no_state_is_refused(broken):
    of = batches()
    with pytest.raises(MeshparError, match="get_state"):
        of.set_state(broken)
    assert of.step == 0


def test_closing_ends_the_background_work():
    before = set(threading.enumerate())
    rows = Numbered(20)
    of = batches(rows, prefetch=4)
    numbers(of, 2)
    (worker,) = set(threading.enumerate()) - before
    of.close()
    reads = len(rows.reads)
    worker.join(timeout=PATIENCE_S)
    assert not worker.is_alive()
    assert len(rows.reads) == reads
    of.close()
    with pytest.raises(MeshparError, match="it was closed"):
        next(of)


def test_closing_waits_for_the_batch_that_is_being_made():
    entered, leave = threading.Event(), threading.Event()
    rows = Numbered(20)
    of, read = batches(rows, prefetch=1), rows.read

    def slow(indices):
        entered.set()
        assert leave.wait(PATIENCE_S)
        return read(indices)

    numbers(of, 1)
    rows.read = slow
    threading.Thread(target=numbers, args=(of, 1), daemon=True).start()
    assert entered.wait(PATIENCE_S)
    closing = threading.Thread(target=of.close, daemon=True)
    closing.start()
    closing.join(timeout=0.2)
    assert closing.is_alive()
    leave.set()
    closing.join(timeout=PATIENCE_S)
    assert not closing.is_alive()


def test_an_error_while_making_a_batch_reaches_the_loop():
    rows = Numbered(20)
    with batches(rows, prefetch=2) as of:
        rows.read = lambda indices: {}["gone"]
        with pytest.raises(KeyError, match="gone"):
            next(of)


@pytest.mark.parametrize(
    ("batch_size", "said"), [(21, "20 rows in all"), (0, "at least one row"), (-3, "at least one row")]
)
def test_a_batch_that_cannot_be_filled_is_an_error(batch_size, said):
    with pytest.raises(MeshparError, match=said):
        batches(20, batch_size=batch_size)
    with pytest.raises(MeshparError, match=said):
        spread_evenly(20, batch_size, 3)


# Global arrays


def test_batches_on_a_mesh_hold_the_same_as_on_the_host(mesh8):
    sharding = NamedSharding(mesh8, P("fsdp"))
    with batches(batch_size=8, prefetch=0) as host, batches(batch_size=8, sharding=sharding) as of:
        for expected, batch in zip([next(host) for _ in range(5)], of, strict=False):
            assert isinstance(batch["wide"], jax.Array)
            for name in ("number", "wide"):
                assert batch[name].sharding == sharding
                np.testing.assert_array_equal(batch[name], expected[name])
            assert {shard.data.shape for shard in batch["wide"].addressable_shards} == {(2, 4)}
            assert len(batch["wide"].addressable_shards) == 8


def test_devices_with_the_same_rows_share_one_read(mesh8):
    rows = Numbered(20)
    with batches(rows, batch_size=8, prefetch=0, sharding=NamedSharding(mesh8, P("fsdp"))) as of:
        rows.reads.clear()
        next(of)
        # Four row slices for eight devices and two arrays.
        assert [len(read) for read in rows.reads] == [2, 2, 2, 2]
        assert sorted(flat(rows.reads)) == sorted(of.row_numbers(0).tolist())


AXES = ("data", "fsdp", "tensor")
ENTRIES = st.permutations(AXES).flatmap(
    lambda axes: st.integers(0, 3).map(lambda count: tuple(axes[:count]) if count else None)
)


@settings(max_examples=20)
@given(st.sampled_from([(1, 1, 8), (2, 2, 2), (8, 1, 1), (1, 4, 2), (2, 1, 4)]), ENTRIES, st.integers(1, 3))
def test_the_rows_that_are_read_partition_the_batch(shape, entry, per_device):
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3)
    batch_size = 8 * per_device
    rows = Numbered(50)
    with batches(rows, batch_size=batch_size, prefetch=0, sharding=NamedSharding(mesh, P(entry))) as of:
        rows.reads.clear()
        batch = next(of)
        assert sorted(flat(rows.reads)) == sorted(of.row_numbers(0).tolist())
        np.testing.assert_array_equal(batch["number"], of.row_numbers(0))


def test_the_sequence_may_be_split_too(mesh8):
    shardings = {"number": NamedSharding(mesh8, P("fsdp")), "wide": NamedSharding(mesh8, P("fsdp", "tensor"))}
    with batches(batch_size=8, prefetch=0) as host, batches(batch_size=8, sharding=shardings) as of:
        batch, expected = next(of), next(host)
        np.testing.assert_array_equal(batch["wide"], expected["wide"])
        assert {shard.data.shape for shard in batch["wide"].addressable_shards} == {(2, 2)}


def test_the_spec_tells_what_comes(mesh8):
    sharding = NamedSharding(mesh8, P("fsdp"))
    with batches(batch_size=8, sharding=sharding) as of:
        assert {name: (x.shape, x.dtype) for name, x in of.spec.items()} == {
            "number": ((8,), np.dtype("int32")),
            "wide": ((8, 4), np.dtype("int32")),
        }
        batch = next(of)
        for name, spec in of.spec.items():
            assert (batch[name].shape, batch[name].dtype, batch[name].sharding) == (spec.shape, spec.dtype, sharding)
            assert spec.sharding == sharding


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda m: NamedSharding(m, P(("fsdp", "tensor"))),
            r"dim 0 \(batch_size 12\).*not a multiple of 8.*Make it 16",
        ),
        (lambda m: NamedSharding(m, P("fsdp", "tensor")), "`number` of shape.*a dict with one sharding per name"),
        (lambda m: {"number": NamedSharding(m, P())}, "Add one for `wide`"),
        (lambda m: dict.fromkeys(("number", "wide", "wild"), NamedSharding(m, P())), "lay out `wild`.*`wide`"),
        (lambda m: {"number": NamedSharding(m, P()), "wide": NamedSharding(m, P(None, ("fsdp", "tensor")))}, "dim 1"),
    ],
)
def test_a_sharding_that_does_not_fit_is_an_error(mesh8, make, said):
    with pytest.raises(MeshparError, match=said):
        batches(batch_size=12, sharding=make(mesh8))


def test_wide_numbers_survive_the_background_thread(mesh8):
    class Wide(Numbered):
        def read(self, indices):
            return {"x": indices / 3}

    with jax.enable_x64(True):
        sharding = NamedSharding(mesh8, P("fsdp"))
        with batches(Wide(20), batch_size=8, sharding=sharding) as of:
            batch = next(of)
            assert batch["x"].dtype == of.spec["x"].dtype == np.float64
            np.testing.assert_array_equal(batch["x"], of.row_numbers(0) / 3)


# Held-out batches


@given(st.integers(1, 200), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 12)))
def test_held_out_rows_are_spread_evenly(num_rows, batch_size, num_batches):
    if batch_size > num_rows:
        return
    rows = spread_evenly(num_rows, batch_size, num_batches)
    whole = num_rows // batch_size
    assert len(rows) == batch_size * (whole if num_batches is None else min(num_batches, whole))
    steps = np.diff([*rows.tolist(), num_rows])
    assert rows[0] == 0
    assert steps.min() >= 1
    assert steps.max() - steps.min() <= 1


@PREFETCHES
def test_held_out_batches_are_the_same_every_time(mesh8, prefetch):
    rows = Numbered(30)
    valid = ValidBatches(
        rows, spread_evenly(30, 8, 2), batch_size=8, sharding=NamedSharding(mesh8, P("fsdp")), prefetch=prefetch
    )
    assert len(valid) == 2
    first, second = ([batch["number"].tolist() for batch in valid] for _ in range(2))
    assert first == second
    assert flat(first) == [i * 30 // 16 for i in range(16)]
    assert valid.spec["number"].shape == (8,)


def test_held_out_batches_can_be_left_half_way():
    before = set(threading.enumerate())
    valid = ValidBatches(Numbered(30), np.arange(20), batch_size=4)
    for _ in valid:
        break
    for worker in set(threading.enumerate()) - before:
        worker.join(timeout=PATIENCE_S)
        assert not worker.is_alive()


# Several processes

PROCESS = """
import json, sys
import jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshpar.data import ArrayData

mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
source = ArrayData(arrays={"x": np.arange(40) * 10}, valid_fraction=0.5).open(batch_size=4, seed=1)
read, seen = source.train_rows.read, []
source.train_rows.read = lambda indices: (seen.extend(indices.tolist()), read(indices))[1]
with source.train(NamedSharding(mesh, P("fsdp"))) as of:
    seen.clear()  # the fingerprint looks at everything
    batch = of.batch_at(2)["x"]
    held = {str(shard.index[0].start or 0): shard.data.tolist() for shard in batch.addressable_shards}
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(batch)
print(json.dumps({"seen": seen, "rows": of.row_numbers(2).tolist(), "held": held, "total": int(total)}))
"""


def run_processes(program, count, *args):
    """What so many processes of one pod, which share 4 host devices, say at their end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // count}",
        "PYTHONPATH": str(Path(meshpar.__file__).parents[1]),
    }
    command = [sys.executable, "-c", program, str(port)]
    running = [
        subprocess.Popen([*command, str(i), *map(str, args)], env=environment, text=True, stdout=-1, stderr=-1)
        for i in range(count)
    ]
    try:
        finished = [process.communicate(timeout=PATIENCE_S) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * count, finished
    return [json.loads(re.search(r"\{.*\}", out)[0]) for out, _ in finished]  # gloo prints there too


@pytest.mark.matrix
def test_each_process_reads_only_what_its_devices_hold():
    one, two = run_processes(PROCESS, 2)
    # They agree on the batch, and each read its half of it and nothing else.
    assert one["rows"] == two["rows"]
    assert len(set(one["rows"])) == 4
    assert [one["seen"], two["seen"]] == [one["rows"][:2], one["rows"][2:]]
    assert [list(one["held"]), list(two["held"])] == [["0"], ["2"]]
    assert one["total"] == two["total"] == sum(one["held"]["0"] + two["held"]["2"])


LEG = """
import json, sys
import jax
port, number, count, steps, state = int(sys.argv[1]), *map(int, sys.argv[2:5]), json.loads(sys.argv[5])
jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshpar.data import ArrayData, ChatData, TextData

mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
source = DATA.open(batch_size=8, seed=1)
given = []
with source.train(NamedSharding(mesh, P("fsdp"))) as of:
    if state:
        of.set_state(state)
    for _ in range(steps):
        rows = next(iter(next(of).values()))
        given += [str(row) for shard in rows.addressable_shards for row in shard.data.tolist()]
    print(json.dumps({"given": given, "state": of.get_state(), "rows": len(source.train_rows)}))
"""


DATA = {
    "arrays": 'ArrayData(arrays={"x": np.arange(96)}, valid_fraction=0.2)',
    "text": 'TextData(files=("FOLDER/text.jsonl",), seq_len=32, valid_fraction=0.2, cache="FOLDER/cache")',
    "conversations": 'ChatData(files=("FOLDER/chats.jsonl",), tokenizer="bytes", template="FOLDER/template.jinja", '
    "seq_len=64, valid_fraction=0.2)",
}


@pytest.mark.matrix
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_processes_give_every_row_once_an_epoch_however_many_there_are_after_each_restart(tmp_path, data):
    said = [f"{number:02} is said here, and {99 - number} is answered" for number in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": words}) + "\n" for words in said))
    chats = ([{"role": role, "content": words[at]} for at, role in ((slice(15), "user"), (slice(15, 99), "assistant"))]
             for words in said)  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    leg = LEG.replace("DATA", data.replace("FOLDER", str(tmp_path)))
    state, given, num_rows = None, [], 0
    for count, steps in ((2, 3), (4, 2), (1, 4), (2, 11)):
        told = run_processes(leg, count, count, steps, json.dumps(state))
        assert all(one["state"] == told[0]["state"] for one in told)
        shares = [len(one["given"]) for one in told]
        assert shares == [8 * steps // count] * count
        by_step = [[one["given"][at * 8 // count : (at + 1) * 8 // count] for one in told] for at in range(steps)]
        given += [x for parts in by_step for part in parts for x in part]
        state, num_rows = told[0]["state"], told[0]["rows"]
    assert len(given) == 160 >= 2 * num_rows
    assert len(set(given[:num_rows])) == len(set(given[num_rows : 2 * num_rows])) == num_rows
    assert set(given[:num_rows]) == set(given[num_rows : 2 * num_rows])
