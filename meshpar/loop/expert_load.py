"""Hook that reports the load of experts in each layer, and advice if a layer is imbalanced.

    metrics of a step ─► ExpertLoad ─┬─► metrics of the worst layer, for each line of metrics.jsonl and the progress bar
                                     ├─► periodically: metrics of all layers, for metrics.jsonl
                                     └─► periodically: advice, if a metric is outside its healthy range

The load of a single step is noisy, so periodic reports use all steps since the previous report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

import jax
import numpy as np

from meshpar.loop.fit import Hook, Record, Run
from meshpar.moe.load_metrics import Loads, advice, loads, scalars
from meshpar.sharding.errors import check_positive_int

LAYERS = "moe/layers"
"""Key in a line of metrics.jsonl for the metrics of all layers, the result of `layer_numbers`."""

_COUNTS = ("moe/load", "moe/rank_load")
_SHARES = ("moe/drop_rate", "moe/router_entropy")


class ExpertLoad(Hook):
    """Hook that accumulates the load of experts and prints advice. It ignores models without experts.

    Pass `line` to `MetricsFile(path, also=...)` and `words` to `ProgressBar(also=...)`. Each kind of advice is printed
    when it first applies, and again only after a report to which it did not apply.
    """

    order = -1  # before the hooks that call `line` and `words`

    def __init__(self, *, every: int, stream: IO[str] | None = None) -> None:
        check_positive_int("ExpertLoad", "the number of steps between two reports", every=every)
        self._every, self._stream = every, stream
        self._sums: dict[str, np.ndarray] = {}
        self._num_steps = 0
        self._previous_advice: frozenset[str] = frozenset()
        self._step: Loads | None = None
        self._report: Loads | None = None

    def on_record(self, run: Run, record: Record) -> None:
        self._step, self._report = loads(record.arrays), None
        if self._step is None:
            return
        for name in (*_COUNTS, *_SHARES):
            value = np.asarray(record.arrays[name], np.float64)
            self._sums[name] = self._sums[name] + value if self._num_steps else value
        self._num_steps += 1
        if record.step % self._every == 0 or record.step == run.steps:
            means = {name: self._sums[name] / self._num_steps for name in _SHARES}
            self._report, self._num_steps = loads({**self._sums, **means}), 0
            assert self._report is not None
            items = advice(self._report)
            for item in items if self._stream is not None and jax.process_index() == 0 else ():
                if item.kind not in self._previous_advice:
                    print(f"step {record.step}: {item.text}", file=self._stream, flush=True)
            self._previous_advice = frozenset(item.kind for item in items)

    def line(self, record: Record) -> dict[str, Any]:
        """Return values for the line of the last step: the worst layer, and after a report all layers."""
        if self._step is None:
            return {}
        worst = {f"moe/{name}": value for name, value in worst_layer(self._step).items()}
        return worst | ({} if self._report is None else {LAYERS: layer_numbers(self._report)})

    def words(self, record: Record) -> list[str]:
        """Return texts for the progress bar: the worst layer and rank of the last step."""
        if self._step is None:
            return []
        worst = worst_layer(self._step)
        dropped = [f"{worst['drop_rate']:.1%} dropped"] if worst["drop_rate"] else []
        busiest = "busiest expert {expert_max_over_mean:.2f}x, rank {rank_max_over_mean:.2f}x"
        return [busiest.format(**worst), *dropped]


def layer_numbers(loads: Loads) -> dict[str, Any]:
    """Return the metrics of all layers as lists: tokens and imbalance of experts and ranks; see `Loads`.

    Values that are not finite, for example after a step with invalid router scores, are None.
    """
    metrics: dict[str, Any] = {"drop_rate": loads.drop_rate, "router_entropy": loads.router_entropy}
    for prefix, load in (("expert", loads.experts), ("rank", loads.ranks)):
        metrics |= {f"{prefix}_{field}": value for field, value in load._asdict().items()}
    return {name: np.where(np.isfinite(value), value, np.array(None)).tolist() for name, value in metrics.items()}


def loads_of(numbers: Mapping[str, Any]) -> Loads:
    """Return the `Loads` that `layer_numbers` converted to lists for metrics.jsonl."""
    names = {"moe/load": "expert_tokens", "moe/rank_load": "rank_tokens"}
    names |= {f"moe/{name}": name for name in ("drop_rate", "router_entropy")}
    parsed = loads({metric: np.array(numbers[name], np.float64) for metric, name in names.items()})
    assert parsed is not None
    return parsed


def worst_layer(loads: Loads) -> dict[str, float]:
    """Return the worst value of each metric over the layers: the maximum, for the entropy the minimum."""
    return {name: float(value) for name, value in scalars(loads, prefix="").items()}
