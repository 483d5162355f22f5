"""Batches: rows served as global batches, in an order that a seed and a step number determine.

    step ─► row numbers (grain: shuffled anew every epoch, endless) ─► the rows this process holds ─► global arrays

A batch depends on its step only, so resuming is starting at a step: nothing has to be replayed, and what was
prefetched but not handed out does not count.
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

import jax
import numpy as np
from jaxtyping import Int64

from meshpar.data.assembly import Assembly, Batch, Sharding, check_batch_size
from meshpar.data.rows import Rows
from meshpar.sharding.host_resources import check_memory
from meshpar.sharding.types import problem

PREFETCH = 2
"""Batches made ahead in the background. One hides the making; a second evens out."""
_KEPT_BYTES = 1000


class Batches(Iterator[Batch]):
    """Endless batches of the rows in a new order every epoch; every epoch has each row exactly once.

    A batch may span the end of one epoch and the start of the next, so no row is ever left out. Iterating goes on from
    where it stands; `get_state` and `set_state` move a run to another process, mesh or machine.

    Args:
      rows: what to serve.
      batch_size: rows in a global batch.
      seed: chooses the order; any integer.
      fingerprint: says what the rows hold; a state of other rows is refused.
      sharding: how to lay batches out. Every process then reads only the rows its own devices hold.
      prefetch: batches made ahead in the background; 0 makes each when it is needed.
      extra: further facts that a state must agree on.

    Raises:
      ValueError: a batch larger than the rows, or one that the sharding cannot split.
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
        self._assembly = Assembly(rows, batch_size, sharding, what="training set")
        self._identity = {"seed": seed, "batch_size": batch_size, "fingerprint": fingerprint, **(extra or {})}
        self._order = _order(len(rows), seed)
        self._batch_size = batch_size
        self._prefetch = prefetch
        batch_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in self.spec.values())
        # Beside its rows, a batch that waits takes what Python and jax need for its arrays.
        needed = prefetch * (batch_bytes + _KEPT_BYTES)
        check_memory("prefetch", f"make {prefetch:,} batches ahead", needed, "set it to 2 or 4: more gain nothing")
        self._step = 0
        self._stream: _Stream | None = None
        self._closed = False

    @property
    def step(self) -> int:
        """Batches handed out so far, which is the number of the next one."""
        return self._step

    @property
    def spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Global shape, dtype and sharding of each array of a batch."""
        return self._assembly.spec

    def batch_at(self, step: int) -> Batch:
        """The batch of a step, without moving to it."""
        return self._assembly.batch(lambda start, stop: self.row_numbers(step, start, stop))

    def row_numbers(self, step: int, start: int = 0, stop: int | None = None) -> Int64[np.ndarray, " rows"]:
        """Which rows are the rows `start` to `stop` (default: all) of the batch of a step."""
        first = step * self._batch_size
        stop = self._batch_size if stop is None else stop
        return np.array([self._order[i] for i in range(first + start, first + stop)], dtype=np.int64)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise problem("Batches", f"give batch {self._step}", "it was closed", "open the data again")
        if self._stream is None:
            self._stream = _Stream(self.batch_at, self._step, sys.maxsize // self._batch_size, self._prefetch)
        batch = next(self._stream)
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Where the run stands: `step`, and the facts that make the step mean the same batch; JSON values only."""
        return {"step": self._step, **self._identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to where another run stood.

        Raises:
          ValueError: the state is of another corpus, batch size or seed, or is no such state at all.
        """
        as_returned = "pass what `get_state` returned"
        for key in ("step", *self._identity):
            if key not in state:
                exists = f"the state has only {', '.join(map(repr, state))}"
                raise problem("Batches.set_state", f"read `{key}`", exists, as_returned)
        for key, mine in self._identity.items():
            if state[key] != mine:
                raise _other_run(key, state[key], mine)
        step = operator.index(state["step"])
        if step < 0:
            raise problem("Batches.set_state", f"go to step {step}", "steps count from 0", as_returned)
        self._stop_stream()
        self._step = step

    def close(self) -> None:
        """Ends the background work and waits for what is under way. Closing again does nothing."""
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
    """A finite number of batches of chosen rows, the same in every iteration.

    Args:
      rows: the rows to choose from.
      row_numbers: which of them are served, in order; as many as the batches hold.
      batch_size: rows in a global batch.
      sharding: how to lay batches out.
      prefetch: batches made ahead in the background.

    Raises:
      ValueError: a batch larger than the rows, or one that the sharding cannot split.
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
        self._assembly = Assembly(rows, batch_size, sharding, what="held-out set")
        assert len(row_numbers) % batch_size == 0, (len(row_numbers), batch_size)
        self._row_numbers = row_numbers.reshape(-1, batch_size)
        self._prefetch = prefetch

    @property
    def spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Global shape, dtype and sharding of each array of a batch."""
        return self._assembly.spec

    def __len__(self) -> int:
        return len(self._row_numbers)

    def __iter__(self) -> Iterator[Batch]:
        with contextlib.closing(_Stream(self._batch_at, 0, len(self), self._prefetch)) as stream:
            yield from stream

    def _batch_at(self, step: int) -> Batch:
        return self._assembly.batch(lambda start, stop: self._row_numbers[step, start:stop])


def spread_evenly(num_rows: int, batch_size: int, num_batches: int | None) -> Int64[np.ndarray, " rows"]:
    """Row numbers for up to `num_batches` whole batches (None: as many as there are), spread evenly over all rows.

    Raises:
      ValueError: not one batch can be filled.
    """
    check_batch_size(batch_size, num_rows, "held-out set")
    whole = num_rows // batch_size
    count = batch_size * (whole if num_batches is None else min(num_batches, whole))
    return np.arange(count, dtype=np.int64) * num_rows // count


class _Stream(Iterator[Batch]):
    """What `make` gives for the steps from `start` to `stop`, made ahead by a grain thread."""

    def __init__(self, make: Callable[[int], Batch], start: int, stop: int, prefetch: int) -> None:
        import grain

        self._make = make
        self._making = threading.Lock()
        self._closed = False
        # Results are kept in order however many threads there are; one keeps the lock below without contention.
        options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
        self._batches = iter(grain.MapDataset.range(start, stop).map(self._made).to_iter_dataset(options))

    def __next__(self) -> Batch:
        return next(self._batches)

    def _made(self, step: int) -> Batch | None:
        with self._making:
            return None if self._closed else self._make(step)

    def close(self) -> None:
        self._closed = True
        self._batches.close()
        # grain does not wait for a batch that is being made. We do: no device work may outlive the run.
        with self._making:
            pass


def _order(num_rows: int, seed: int) -> Any:
    """Endless row numbers, shuffled anew every epoch."""
    import grain

    # grain's epoch e of seed s is epoch 0 of seed s + e: hashing keeps neighbouring seeds from sharing their orders.
    mixed = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest(), "big")
    return grain.MapDataset.range(num_rows).shuffle(seed=mixed).repeat()


def _other_run(key: str, theirs: Any, mine: Any) -> ValueError:
    """The error for a state that does not belong to these batches."""
    fix = f"set {key} to {theirs}, or start a new run"
    if key == "fingerprint":
        fix = "bring back the data as it was (files, tokenizer, separator, split), or start a new run"
    return problem("Batches.set_state", f"resume a run with {key} {theirs!r}", f"this one has {key} {mine!r}", fix)
