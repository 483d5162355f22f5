"""Mixtures of sources: the order in which training examples are drawn from several sources.

    weights ─► Mixture ─► index of an example ─► (source, index in the source) ─► row
                                                  each source repeats in a new order per epoch

The order is a function of the seed and the index of the example. Processes, meshes and restarts do not change it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Int64

from meshpar.data.batches import RowOrder, Sharding, Shuffled, ValidBatches, spread_evenly
from meshpar.data.rows import JoinedRows
from meshpar.data.source import TokenSource, checked_files
from meshpar.data.text import find
from meshpar.sharding.errors import MeshparError, check_number, near, problem


class Mixture:
    """Interleaving of sources in exact proportion to their weights, which can be used as a selection map of grain.

    In the first `n` examples, the first source has `n` times its weight, rounded up. The remaining examples are divided
    among the other sources by the same rule. `grain.MapDataset.mix` has the same order, but it rounds weights to 1 % of
    the smallest weight and does not count examples.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(float(weight))) for weight in weights]  # 0.7 means 7/10, not its nearest binary fraction
        scale = math.lcm(*(weight.denominator for weight in exact))
        integers = [int(weight * scale) for weight in exact]
        divisor = math.gcd(*integers)
        self.weights = tuple(weight // divisor for weight in integers)
        """The weights as integers without a common divisor."""

    def counts(self, num_examples: int) -> list[int]:
        """Return how many of the first `num_examples` examples are from each source."""
        counts, remaining_weight = [], sum(self.weights)
        for weight in self.weights:
            count = -(-num_examples * weight // remaining_weight)
            counts.append(count)
            num_examples, remaining_weight = num_examples - count, remaining_weight - weight
        return counts

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        before, after = self.counts(index), self.counts(index + 1)
        source = next(i for i, count in enumerate(before) if after[i] != count)
        return source, before[source]


@dataclasses.dataclass(frozen=True)
class _MixedOrder:
    """The orders of several sources, interleaved by a mixture."""

    mixture: Mixture
    orders: Sequence[RowOrder]

    def __getitem__(self, position: int) -> int:
        source, index = self.mixture[position]
        return self.orders[source][index]


class MixedSource(TokenSource):
    """A weighted mixture of sources of the same kind, returned by `open` of data with `sources`.

    Each source is split into a training set and a validation set. Batches are drawn from the training sets in
    proportion to the weights. Validation reads up to `valid_batches` batches of each source.
    """

    def __init__(self, data: Any, parts: Mapping[str, TokenSource], *, batch_size: int, seed: int) -> None:
        names = sorted(parts)  # so that the order of the sources in a recipe has no effect
        self.parts = {name: parts[name] for name in names}
        self.mixture = Mixture([data.sources[name] for name in names])
        self.shares = {name: x / sum(self.mixture.weights) for name, x in zip(names, self.mixture.weights, strict=True)}
        """Weights of the sources, normalized to a sum of 1."""
        train = JoinedRows([part.train_rows for part in self.parts.values()])
        valid = JoinedRows([part.valid_rows for part in self.parts.values()])
        self._served_by_source: dict[str, Int64[np.ndarray, " rows"]] = {}
        for (name, part), start in zip(self.parts.items(), valid.starts, strict=True):
            with _source_in_errors(name):
                served = spread_evenly(len(part.valid_rows), batch_size, data.valid_batches)
                self._served_by_source[name] = start + served
        super().__init__(data, parts[names[0]].tokenizer, train, valid, batch_size=batch_size, seed=seed)
        self.served = np.concatenate([*self._served_by_source.values()])
        self._starts = train.starts

    @property
    def fingerprint(self) -> str:
        """Hash of the names, weights and fingerprints of the sources."""
        entries = zip(self.parts.items(), self.mixture.weights, strict=True)
        identity = [(name, weight, part.fingerprint) for (name, part), weight in entries]
        return hashlib.blake2b(f"mixture {identity}".encode(), digest_size=16).hexdigest()

    def order(self) -> RowOrder | None:
        """Return the infinite order of the training rows: sources in proportion to their weights, each shuffled."""
        parts = zip(self.parts.items(), self._starts, strict=True)
        orders = [
            Shuffled(start, start + len(part.train_rows), seed=f"{self.seed} {name}") for (name, part), start in parts
        ]
        return _MixedOrder(self.mixture, orders)

    def valid_by_source(self, sharding: Sharding = None) -> dict[str, ValidBatches]:
        """Return batches of each validation set, identical in all iterations."""
        options = {"batch_size": self.batch_size, "prefetch": self.data.prefetch, "sharding": sharding}
        return {
            name: ValidBatches(self.valid_rows, served, **options) for name, served in self._served_by_source.items()
        }

    def progress(self, step: int) -> dict[str, dict[str, float]]:
        """Return the number of examples of each source in the first `step` batches, their share, and the epochs."""
        total = step * self.batch_size
        return {
            name: {"examples": count, "share": count / max(total, 1), "epochs": count / len(part.train_rows)}
            for (name, part), count in zip(self.parts.items(), self.mixture.counts(total), strict=True)
        }

    def describe(self) -> dict[str, Any]:
        """Return the weight and description of each source, and the sums of their counts."""
        sources = {}
        for name, part in self.parts.items():
            description, num_rows = part.describe(), len(self._served_by_source[name])
            served = {"batches": num_rows // self.batch_size, "served_tokens": num_rows * self.data.seq_len}
            valid = {**description["valid"], **served}
            sources[name] = {"weight": self.shares[name], **description, "valid": valid}
        totals: dict[str, Any] = {}
        for key in ("train", "valid", "unused_fields"):
            totals[key] = dict(sum((Counter(source.get(key, {})) for source in sources.values()), Counter()))
        for key in ("in_parts", "unended_answers"):
            totals[key] = sum(source.get(key, 0) for source in sources.values())
        return {"sources": sources, **totals, "fingerprint": self.fingerprint}


def check_sources(data: Any, *, default: tuple[str, ...], example: str) -> None:
    """Check the fields `files` and `sources`, and convert paths to tuples and weights to floats.

    Args:
      data: the description of the data.
      default: the default of `files`, which data with `sources` may keep. An equal tuple of the user is a conflict.
      example: an entry of `files` for the error message.
    """
    where, files, sources = type(data).__name__, data.files, data.sources
    if not isinstance(sources, Mapping):
        fix = 'write sources={"web": 0.7, "code": 0.3}'
        raise problem(
            f"`{where}.sources`", f"read {sources!r}"[:100], "it must map names to weights", fix, "wrong-type"
        )
    weights: dict[str, float] = {}
    for name, weight in sources.items():
        if not isinstance(name, str) or not name:
            fix = "use the name of a file or folder, or a name in `files`"
            raise problem(
                f"`{where}.sources`", f"name a source {name!r}", "names must be non-empty strings", fix, "wrong-type"
            )
        check_number(f"`{where}.sources[{name!r}]`", "0.5", weight=weight)
        weights[name] = float(weight)
    if isinstance(files, Mapping):
        for name in sorted({*files} ^ {*weights}):
            field, other, other_names = ("files", "sources", weights) if name in files else ("sources", "files", files)
            reason, fix = (
                f"`{other}` does not contain this name",
                f"use the same names in both fields ({near(name, other_names)})",
            )
            raise problem(f"`{where}.{field}`", f"use the source `{name}`", reason, fix, "unknown-name")
        files = {name: (entry,) if isinstance(entry, str) else entry for name, entry in files.items()}
        files = {name: checked_files(f"`{where}.files[{name!r}]`", x, example) for name, x in files.items()}
    elif not weights:
        files = checked_files(f"`{where}.files`", files, example)
    elif files and files is not default:
        reason, fix = f"`files` is {files!r}"[:200], 'write files={"name": "path", ...}, or name the paths in `sources`'
        raise problem(f"`{where}.sources`", "use it with a list of files", reason, fix, "conflict")
    object.__setattr__(data, "files", files)
    object.__setattr__(data, "sources", weights)


def open_mixture(data: Any, suffixes: Sequence[str], *, batch_size: int, seed: int) -> MixedSource:
    """Open each source of the data, and mix them. A file that belongs to two sources is an error."""
    entries = data.files if isinstance(data.files, Mapping) else {name: (name,) for name in data.sources}
    owners: dict[str, str] = {}
    for name, paths in entries.items():
        with _source_in_errors(name):
            for file in find(paths, suffixes):
                owner = owners.setdefault(os.path.realpath(file.path), name)
                if owner != name:  # a document could be trained on and validated on
                    requested, reason = f"read {file.path}", f"the source `{owner}` has the same file"
                    raise problem("`sources`", requested, reason, "use each file in a single source", "conflict")
    parts = {}
    for name, paths in entries.items():
        with _source_in_errors(name):
            part = dataclasses.replace(data, files=paths, sources={})
            parts[name] = part.open(batch_size=1, seed=seed)  # a small source may have fewer rows than a batch
    return MixedSource(data, parts, batch_size=batch_size, seed=seed)


@contextlib.contextmanager
def _source_in_errors(name: str) -> Iterator[None]:
    try:
        yield
    except MeshparError as error:
        where = f"source `{name}`, {error.where}"
        raise problem(where, error.requested, error.reason, error.fix, error.code) from error
