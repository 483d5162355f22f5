"""Watches the load of experts while a model trains: numbers of every layer for metrics.jsonl, advice, and a picture.

    step's metrics ─► ExpertLoad ─┬─► the worst layer's numbers, in every line of metrics.jsonl and in the live line
                      adds up     ├─► every layer's numbers, in some lines of metrics.jsonl
                      some steps  └─► advice, where a number is past its healthy range

One step's load is mostly chance. What is judged is the load of all steps since the time before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

import jax
import numpy as np

from meshpar.loop.fit import Hook, Record, Run
from meshpar.moe.load_metrics import Advice, Loads, advice, loads, scalars
from meshpar.sharding.types import check_count

LAYERS = "moe/layers"
"""Under this name a line of metrics.jsonl holds what `layer_numbers` gives."""

_COUNTS = ("moe/load", "moe/rank_load")
_SHARES = ("moe/drop_rate", "moe/router_entropy")


class ExpertLoad(Hook):
    """Adds up the load of experts, and says so when it is past its healthy range; on other models it does nothing.

    Give its `line` to `JsonlWriter(path, also=...)`, its `words` to `ProgressBar(also=...)`. Advice of a kind is shown
    when there was none of it the time before, so what stays as it is is said once.

    Args:
      every: steps between two lines with every layer, and two looks at whether all is well.
      stream: where advice is shown; None: nowhere.
    """

    order = -1  # before the hook that writes lines asks for one

    def __init__(self, *, every: int, stream: IO[str] | None = None) -> None:
        check_count(f"ExpertLoad(every={every!r})", "look every so many steps", every)
        self._every, self._stream = every, stream
        self._sums: dict[str, np.ndarray] = {}
        self._num_steps = 0
        self._known: frozenset[str] = frozenset()
        self._step: Loads | None = None
        self._last: Loads | None = None

    def on_record(self, run: Run, record: Record) -> None:
        self._step, self._last = loads(record.arrays), None
        if self._step is None:
            return
        for name in (*_COUNTS, *_SHARES):
            value = np.asarray(record.arrays[name], np.float64)
            self._sums[name] = self._sums[name] + value if self._num_steps else value
        self._num_steps += 1
        if record.step % self._every == 0 or record.step == run.steps:
            self._look(record.step)

    def line(self, record: Record) -> dict[str, Any]:
        """For the line in metrics.jsonl of the last step: the worst layer, and when it is time every layer."""
        if self._step is None:
            return {}
        worst = {f"moe/{name}": value for name, value in worst_layer(self._step).items()}
        return worst | ({} if self._last is None else {LAYERS: layer_numbers(self._last)})

    def words(self, record: Record) -> list[str]:
        """For the live line of the last step: the worst layer, and of ranks since these are what a step waits for."""
        if self._step is None:
            return []
        worst = worst_layer(self._step)
        dropped = [f"{worst['drop_rate']:.1%} dropped"] if worst["drop_rate"] else []
        busiest = "busiest expert {expert_max_over_mean:.2f}x, rank {rank_max_over_mean:.2f}x"
        return [busiest.format(**worst), *dropped]

    def _look(self, step: int) -> None:
        means = {name: self._sums[name] / self._num_steps for name in _SHARES}
        self._last = loads({**self._sums, **means})
        assert self._last is not None
        self._num_steps = 0
        self._say(step, advice(self._last))

    def _say(self, step: int, found: Sequence[Advice]) -> None:
        if self._stream is not None and jax.process_index() == 0:
            for one in found:
                if one.kind not in self._known:
                    print(f"step {step}: {one.text}", file=self._stream, flush=True)
        self._known = frozenset(one.kind for one in found)


def layer_numbers(loads: Loads) -> dict[str, Any]:
    """Every layer's numbers as lists: tokens of every expert and rank, and how even they are; see `moe.metrics.Loads`.

    What is not a finite number, as after a step whose scores were none, is None.
    """
    named: dict[str, Any] = {"drop_rate": loads.drop_rate, "router_entropy": loads.router_entropy}
    for of, load in (("expert", loads.experts), ("rank", loads.ranks)):
        named |= {f"{of}_{field}": value for field, value in load._asdict().items()}
    return {name: np.where(np.isfinite(value), value, np.array(None)).tolist() for name, value in named.items()}


def loads_of(numbers: Mapping[str, Any]) -> Loads:
    """What `layer_numbers` was given, out of a line of metrics.jsonl."""
    read = {name: np.array(value, np.float64) for name, value in numbers.items()}
    names = {"moe/load": "expert_tokens", "moe/rank_load": "rank_tokens"}
    names |= {f"moe/{name}": name for name in ("drop_rate", "router_entropy")}
    found = loads({metric: read[name] for metric, name in names.items()})
    assert found is not None
    return found


def worst_layer(loads: Loads) -> dict[str, float]:
    """Of each number that of the layer where it is worst; of the entropy the lowest."""
    worst = scalars(loads, prefix="")
    return {name: float(value) for name, value in worst.items()}
