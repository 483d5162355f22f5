"""Iterators of global batches whose order depends only on the seed and the step.

    step ─► indices (grain: shuffled per epoch, endless) ─► local examples of this process ─► global arrays

To resume, an iterator starts at a step. Prefetched batches do not count as served.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int64

from meshpar.data.rows import Rows
from meshpar.sharding.errors import check_divides, check_int, check_positive_int, problem
from meshpar.sharding.host_resources import check_memory
from meshpar.sharding.types import spec_axes

Batch: TypeAlias = dict[str, Any]
"""Arrays by name with the same first dim: global `jax.Array`s, or NumPy arrays without a sharding."""
Sharding: TypeAlias = NamedSharding | Mapping[str, NamedSharding] | None
"""Sharding of a batch: a sharding for all arrays, shardings by name, or None for NumPy arrays on the host."""
PREFETCH = 2
"""Default number of batches prepared in the background. Two of them absorb variations in reading time."""


class _Assembly:
    """Builds global batches from indices of examples. Each process reads the examples for its devices."""

    def __init__(self, rows: Rows, batch_size: int, sharding: Sharding, *, dataset: str) -> None:
        check_batch_size(batch_size, len(rows), dataset)
        self._rows, self._batch_size = rows, batch_size
        self._x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        empty = rows.read(np.array([], dtype=np.int64))
        shardings = dict(sharding) if isinstance(sharding, Mapping) else dict.fromkeys(empty, sharding)
        if shardings.keys() != empty.keys():
            reason, fix = f"it has shardings for {', '.join(shardings)}", "use the names of the arrays"
            raise problem("`sharding`", f"shard arrays named {', '.join(empty)}", reason, fix, "unknown-name")
        self.spec: dict[str, jax.ShapeDtypeStruct] = {}
        for name, array in empty.items():
            shape = batch_size, *array.shape[1:]
            _check_shape(name, shape, shardings[name])
            self.spec[name] = jax.ShapeDtypeStruct(shape, array.dtype, sharding=shardings[name])

    def batch(self, row_numbers: Callable[[int, int], Int64[np.ndarray, " rows"]]) -> Batch:
        """Return a batch. `row_numbers(start, stop)` returns the row indices of its examples from `start` to `stop`."""
        cache: dict[tuple[int, int], dict[str, np.ndarray]] = {}

        def shard(name: str, index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(self._batch_size)
            # Read once for all arrays of a batch and for all devices with the same examples.
            if (start, stop) not in cache:
                cache[start, stop] = self._rows.read(row_numbers(start, stop))
            return cache[start, stop][name][:, *index[1:]]

        def array(name: str, spec: jax.ShapeDtypeStruct) -> Any:
            if spec.sharding is None:
                return shard(name, (slice(None),) * len(spec.shape))
            read = functools.partial(shard, name)
            return jax.make_array_from_callback(spec.shape, spec.sharding, read, dtype=spec.dtype)

        # The setting is local to a thread, and a prefetch thread may run this.
        with jax.enable_x64(self._x64):
            return {name: array(name, spec) for name, spec in self.spec.items()}


def check_batch_size(batch_size: int, num_rows: int, dataset: str) -> None:
    """Check that a data set with `num_rows` examples has enough for a batch."""
    check_positive_int("`batch_size`", "the number of examples in a global batch", batch_size=batch_size)
    if batch_size > num_rows:
        requested, reason = f"create batches of {batch_size} examples", f"the {dataset} has {num_rows} examples"
        fix = f"set batch_size to {num_rows} or less, or enlarge the {dataset}: add data, or reduce seq_len"
        raise problem("`batch_size`", requested, reason, fix, "out-of-range")


def _check_shape(name: str, shape: tuple[int, ...], sharding: NamedSharding | None) -> None:
    if sharding is None:
        return
    requested = f"shard it as {sharding.spec}"
    if len(sharding.spec) > len(shape):
        fix = "pass `sharding` as a dict of shardings by name"
        raise problem(f"`{name}` of shape {shape}", requested, f"it has {len(shape)} dims", fix, "wrong-shape")
    for dim, entry in enumerate(sharding.spec):
        shards = math.prod(sharding.mesh.shape[axis] for axis in spec_axes(entry))
        where = f"`{name}` dim {dim} ({'batch_size' if dim == 0 else 'size'} {shape[dim]})"
        check_divides(where, requested, shape[dim], shards)


class Batches(Iterator[Batch]):
    """Endless batches with a new order per epoch. Each example occurs once per epoch.

    A batch may span two epochs, so no example is dropped. `get_state` and `set_state` move the position to another
    process, mesh or machine.

    Args:
      rows: the examples.
      batch_size: number of examples in a global batch.
      seed: determines the order; any integer.
      fingerprint: hash of the examples. States with a different fingerprint are rejected.
      sharding: sharding of the batches. Each process reads only the examples for its devices.
      prefetch: number of batches prepared in the background.
      extra: additional values that a state must match.
      order: the index of the row at each position of the endless stream of examples. By default, all rows are
        shuffled in each epoch.
    """

    def __init__(
        self, rows: Rows, *, batch_size: int, seed: int, fingerprint: str, sharding: Sharding = None,
        prefetch: int = PREFETCH, extra: Mapping[str, Any] | None = None, order: RowOrder | None = None,
    ) -> None:  # fmt: skip
        self._assembly = _Assembly(rows, batch_size, sharding, dataset="training set")
        self.spec = self._assembly.spec
        """Global shape, dtype and sharding of the arrays of a batch."""
        self._identity = {"seed": seed, "batch_size": batch_size, "fingerprint": fingerprint, **(extra or {})}
        self._order = Shuffled(0, len(rows), seed=str(seed)) if order is None else order
        self._batch_size, self._prefetch = batch_size, prefetch
        # Python and jax need about 1000 bytes per batch, in addition to its data.
        needed_bytes = prefetch * (sum(x.size * x.dtype.itemsize for x in self.spec.values()) + 1000)
        check_memory("prefetch", f"prepare {prefetch:,} batches", needed_bytes, "use prefetch=2 or prefetch=4")
        self.step = 0
        """Index of the next batch."""
        self._stream: _Stream | None = None

    def batch_at(self, step: int) -> Batch:
        """Return the batch of a step. Does not change the position."""
        return self._assembly.batch(lambda start, stop: self.row_numbers(step, start, stop))

    def row_numbers(self, step: int, start: int = 0, stop: int | None = None) -> Int64[np.ndarray, " rows"]:
        """Return the row indices of a step's batch. `start` and `stop` limit them to a part of the batch."""
        first = step * self._batch_size
        stop = self._batch_size if stop is None else stop
        return np.array([self._order[i] for i in range(first + start, first + stop)], dtype=np.int64)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        if self._stream is None:
            self._stream = _Stream(self.batch_at, self.step, sys.maxsize // self._batch_size, self._prefetch)
        batch = next(self._stream)
        self.step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the step and the values that determine the order, for JSON."""
        return {"step": self.step, **self._identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of a state that `get_state` returned for the same data, batch size and seed."""
        check_int("Batches.set_state", "the index of the next batch", step=state.get("step"))
        for key, expected in self._identity.items():
            if state.get(key) != expected:
                requested, reason = f"resume a run with {key} {state.get(key)!r}", f"this run has {key} {expected!r}"
                fix = f"set {key} to {state.get(key)}, or start a new run"
                if key == "fingerprint":
                    fix = "restore the data (files, weights, tokenizer, separator, split), or start a new run"
                raise problem("Batches.set_state", requested, reason, fix, "conflict")
        self.close()
        self.step = state["step"]

    def close(self) -> None:
        """Stop prefetching, and wait for the batch in progress. May be called several times."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RowOrder(Protocol):
    """The index of the row at each position of an endless stream of examples, such as a `grain.MapDataset[int]`."""

    def __getitem__(self, position: int, /) -> int: ...


class Shuffled:
    """The indices from `start` to `stop`, repeated endlessly, in a new order per epoch.

    The order is that of `grain.MapDataset.range(start, stop).shuffle(seed).repeat()`. The dataset would also record
    statistics of each element. They need 5 of its 12 µs, and Python code in this thread delays the main thread.
    """

    def __init__(self, start: int, stop: int, *, seed: str) -> None:
        from grain.experimental import index_shuffle

        self._index_shuffle, self._start, self._length = index_shuffle, start, stop - start
        # In grain, epoch e of seed s has the order of epoch 0 of seed s + e. Hashed seeds do not share orders.
        self.seed = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=4).digest(), "big")

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self._length)
        seed = (self.seed + epoch) % 2**32
        return self._start + self._index_shuffle(index, max_index=self._length - 1, seed=seed, rounds=4)


class ValidBatches:
    """Batches of the examples with the indices `row_numbers`, identical in all iterations; see `Batches`.

    The number of indices is a multiple of `batch_size`.
    """

    def __init__(
        self, rows: Rows, row_numbers: Int64[np.ndarray, " rows"], *, batch_size: int, sharding: Sharding = None,
        prefetch: int = PREFETCH,
    ) -> None:  # fmt: skip
        self._assembly = _Assembly(rows, batch_size, sharding, dataset="validation set")
        self.spec = self._assembly.spec
        """Global shape, dtype and sharding of the arrays of a batch."""
        self._row_numbers, self._prefetch = row_numbers.reshape(-1, batch_size), prefetch

    def __len__(self) -> int:
        return len(self._row_numbers)

    def __iter__(self) -> Iterator[Batch]:
        def batch_at(step: int) -> Batch:
            return self._assembly.batch(lambda start, stop: self._row_numbers[step, start:stop])

        with contextlib.closing(_Stream(batch_at, 0, len(self), self._prefetch)) as stream:
            yield from stream


def spread_evenly(num_rows: int, batch_size: int, num_batches: int | None) -> Int64[np.ndarray, " rows"]:
    """Return the indices of up to `num_batches` full batches (None: all), spread evenly over the examples."""
    check_batch_size(batch_size, num_rows, "validation set")
    num_full = num_rows // batch_size
    count = batch_size * (num_full if num_batches is None else min(num_batches, num_full))
    return np.arange(count, dtype=np.int64) * num_rows // count


class _Stream(Iterator[Batch]):
    """The results of `make(step)` for the steps `start` to `stop`, prefetched by a grain thread."""

    def __init__(self, make: Callable[[int], Batch], start: int, stop: int, prefetch: int) -> None:
        import grain

        self._lock, self._closed = threading.Lock(), False

        def make_locked(step: int) -> Batch | None:
            with self._lock:
                return None if self._closed else make(step)

        # grain keeps the order with any number of threads, but the lock makes more than one useless.
        options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
        self._batches = iter(grain.MapDataset.range(start, stop).map(make_locked).to_iter_dataset(options))

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        self._closed = True
        self._batches.close()
        # grain does not wait for the batch in progress, but no device work may outlive the run.
        with self._lock:
            pass
