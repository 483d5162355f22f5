"""Iterators of global batches whose order depends only on the seed and the step.

    step ─► indices (grain: shuffled per epoch, endless) ─► local examples of this process ─► global arrays

To resume, an iterator starts at a step. Prefetched batches do not count as served.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int64

from meshpar.data.assembly import Assembly, Batch, Sharding, check_batch_size
from meshpar.data.rows import Rows
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import check_memory

PREFETCH = 2
"""Default number of batches prepared in the background. The second one absorbs variations in reading time."""
_OVERHEAD_BYTES = 1000
"""Host memory that Python and jax need per prefetched batch, in addition to its data."""


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

    Raises:
      MeshparError: there are fewer examples than `batch_size`, or the sharding does not divide the batch.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        batch_size: int,
        seed: int,
        fingerprint: str,
        sharding: Sharding = None,
        prefetch: int = PREFETCH,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        import grain

        self._assembly = Assembly(rows, batch_size, sharding, dataset="training set")
        self.spec = self._assembly.spec
        """Global shape, dtype and sharding of the arrays of a batch."""
        self._identity = {"seed": seed, "batch_size": batch_size, "fingerprint": fingerprint, **(extra or {})}
        # In grain, epoch e of seed s has the order of epoch 0 of seed s + e. Hashed seeds do not share orders.
        hashed = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest(), "big")
        self._order = grain.MapDataset.range(len(rows)).shuffle(seed=hashed).repeat()
        self._batch_size = batch_size
        self._prefetch = prefetch
        batch_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in self.spec.values())
        needed_bytes = prefetch * (batch_bytes + _OVERHEAD_BYTES)
        check_memory("prefetch", f"prepare {prefetch:,} batches", needed_bytes, "use prefetch=2 or prefetch=4")
        self._step = 0
        self._stream: _Stream | None = None
        self._closed = False

    @property
    def step(self) -> int:
        """Index of the next batch."""
        return self._step

    def batch_at(self, step: int) -> Batch:
        """Return the batch of a step. Does not change the position."""
        return self._assembly.batch(lambda start, stop: self.row_numbers(step, start, stop))

    def row_numbers(self, step: int, start: int = 0, stop: int | None = None) -> Int64[np.ndarray, " rows"]:
        """Return the indices of the examples `start` to `stop` (default: all) of a batch."""
        first = step * self._batch_size
        stop = self._batch_size if stop is None else stop
        return np.array([self._order[i] for i in range(first + start, first + stop)], dtype=np.int64)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise problem("Batches", f"return batch {self._step}", "it is closed", "open the data again", "conflict")
        if self._stream is None:
            self._stream = _Stream(self.batch_at, self._step, sys.maxsize // self._batch_size, self._prefetch)
        batch = next(self._stream)
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the step and the values that determine the order, for JSON."""
        return {"step": self._step, **self._identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of a state that `get_state` returned.

        Raises:
          MeshparError: the data, batch size or seed is different, or the state is damaged.
        """
        where, fix = "Batches.set_state", "pass the result of `get_state`"
        for key in ("step", *self._identity):
            if key not in state:
                reason = f"the state has only {', '.join(map(repr, state))}"
                raise problem(where, f"read `{key}`", reason, fix, "unknown-name")
        for key, expected in self._identity.items():
            if state[key] != expected:
                restored = "restore the data (files, tokenizer, separator, split)"
                change = restored if key == "fingerprint" else f"set {key} to {state[key]}"
                requested, reason = f"resume a run with {key} {state[key]!r}", f"this run has {key} {expected!r}"
                raise problem(where, requested, reason, f"{change}, or start a new run", "conflict")
        step = operator.index(state["step"])
        if step < 0:
            raise problem(where, f"continue at step {step}", "steps count from 0", fix, "out-of-range")
        self._stop_stream()
        self._step = step

    def close(self) -> None:
        """Stop prefetching, and wait for the batch in progress. May be called several times."""
        self._closed = True
        self._stop_stream()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _stop_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class ValidBatches:
    """Batches of selected examples, identical in all iterations.

    Args:
      rows: the examples.
      row_numbers: indices of the examples to serve, in order. Their number is a multiple of `batch_size`.
      batch_size: number of examples in a global batch.
      sharding: sharding of the batches.
      prefetch: number of batches prepared in the background.

    Raises:
      MeshparError: there are fewer examples than `batch_size`, or the sharding does not divide the batch.
    """

    def __init__(
        self,
        rows: Rows,
        row_numbers: Int64[np.ndarray, " rows"],
        *,
        batch_size: int,
        sharding: Sharding = None,
        prefetch: int = PREFETCH,
    ) -> None:
        self._assembly = Assembly(rows, batch_size, sharding, dataset="validation set")
        self.spec = self._assembly.spec
        """Global shape, dtype and sharding of the arrays of a batch."""
        assert len(row_numbers) % batch_size == 0, (len(row_numbers), batch_size)
        self._row_numbers = row_numbers.reshape(-1, batch_size)
        self._prefetch = prefetch

    def __len__(self) -> int:
        return len(self._row_numbers)

    def __iter__(self) -> Iterator[Batch]:
        with contextlib.closing(_Stream(self._batch_at, 0, len(self), self._prefetch)) as stream:
            yield from stream

    def _batch_at(self, step: int) -> Batch:
        return self._assembly.batch(lambda start, stop: self._row_numbers[step, start:stop])


def spread_evenly(num_rows: int, batch_size: int, num_batches: int | None) -> Int64[np.ndarray, " rows"]:
    """Return the indices of up to `num_batches` full batches (None: all), spread evenly over the examples.

    Raises:
      MeshparError: there are fewer examples than `batch_size`.
    """
    check_batch_size(batch_size, num_rows, "validation set")
    num_full = num_rows // batch_size
    count = batch_size * (num_full if num_batches is None else min(num_batches, num_full))
    return np.arange(count, dtype=np.int64) * num_rows // count


class _Stream(Iterator[Batch]):
    """The results of `make(step)` for the steps `start` to `stop`, prefetched by a grain thread."""

    def __init__(self, make: Callable[[int], Batch], start: int, stop: int, prefetch: int) -> None:
        import grain

        self._make = make
        self._lock = threading.Lock()
        self._closed = False
        # grain keeps the order with any number of threads, but the lock makes more than one useless.
        options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
        self._batches = iter(grain.MapDataset.range(start, stop).map(self._make_locked).to_iter_dataset(options))

    def __next__(self) -> Batch:
        return next(self._batches)

    def _make_locked(self, step: int) -> Batch | None:
        with self._lock:
            return None if self._closed else self._make(step)

    def close(self) -> None:
        self._closed = True
        self._batches.close()
        # grain does not wait for the batch in progress, but no device work may outlive the run.
        with self._lock:
            pass
