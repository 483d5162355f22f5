"""Report of a run: summary.json, plots, the sample and the fields on the screen."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from meshpar.data.mixture import MixedSource
from meshpar.data.source import Source
from meshpar.loop import expert_load as experts
from meshpar.loop.fit import (
    FitResult,
)
from meshpar.loop.goodput import Goodput
from meshpar.loop.goodput import words as goodput_words
from meshpar.loop.metrics_file import (
    describe_missing,
    missing_steps,
    missing_validations,
    read_lines,
)
from meshpar.moe.load_metrics import Loads
from meshpar.pod import watchdog as watchdog
from meshpar.runs.folder import RunFolder
from meshpar.runs.plain import json_text
from meshpar.runs.recipe import Recipe
from meshpar.runs.screen import Screen
from meshpar.sharding.errors import problem
from meshpar.sharding.host_resources import replace_file
from meshpar.training.state import TrainState


def report(
    recipe: Recipe,
    result: FitResult,
    source: Source,
    folder: RunFolder,
    screen: Screen,
    *,
    steps_taken: int,
    goodput: Goodput,
    sample: Callable[[TrainState], str] | None,
) -> dict[str, Any]:
    """Write summary.json and the plots of a run, print the result, and return the summary.

    `sample` returns a text for the trained state.

    Raises:
      ValueError: after a complete report, if lines of metrics.jsonl are missing.
    """
    done = result.reason == "done"
    curves = list(read_lines(folder / "metrics.jsonl"))
    layers = next((line[experts.LAYERS] for line in reversed(curves) if experts.LAYERS in line), None)
    loads = None if layers is None else experts.loads_of(layers)
    summary = _summary(recipe, result, source, curves, steps_taken=steps_taken, goodput=goodput)
    if loads is not None:
        summary["experts"] = experts.worst_layer(loads)
    if done:
        summary |= _compare_with_bigrams(source, summary["validation"])
        if sample is not None:
            summary["sample"] = sample(result.state)
    if jax.process_index() != 0:
        return summary
    if done:
        _plot(folder, recipe, curves, summary, loads)
    replace_file(folder / "summary.json", json_text(summary))
    if not done:
        screen.print(
            f"{result.reason} at step {result.step} of {recipe.steps}. The checkpoint is in {folder.checkpoints}. "
            "Repeat the command to resume."
        )
        return summary
    if "sample" in summary:
        screen.text("sample", summary["sample"])
    screen.fields("result", _result(summary, folder))
    if lost := describe_missing(curves, result.step):
        where = f"run {folder}: metrics.jsonl"
        fix = "restore the file from a copy and repeat the command; the checkpoints are complete"
        requested, reason = "report the metrics of all steps", f"the metrics of {lost} are missing"
        raise problem(where, requested, reason, fix, code="damaged-file")
    return summary


def _summary(
    recipe: Recipe,
    result: FitResult,
    source: Source,
    curves: Sequence[Mapping[str, Any]],
    *,
    steps_taken: int,
    goodput: Goodput,
) -> dict[str, Any]:
    validations = (
        {name[4:]: value for name, value in line.items() if name.startswith("val_")}
        for line in curves[::-1]
        # If the last validation has no line, an earlier one does not describe the trained model.
        if result.reason != "done" or line.get("step") == result.step
    )
    summary: dict[str, Any] = {
        "name": recipe.name,
        "reason": result.reason,
        "step": result.step,
        "steps": recipe.steps,
        "steps_taken": steps_taken,
        "num_params": result.state.num_params,
        "seconds": round(result.seconds, 3),
        "tokens_per_s": result.tokens_per_s,
        "mfu": None if result.last is None else result.last.mfu,
        "skipped": result.skipped,
        "validation": next(filter(None, validations), {}),
        "goodput": goodput.share,
        "wall_s": {name: round(seconds, 3) for name, seconds in goodput.seconds.items()},
    }
    missing = {"missing_steps": missing_steps(curves, result.step), "missing_validations": missing_validations(curves)}
    summary |= {name: ranges for name, ranges in missing.items() if ranges}
    if isinstance(source, MixedSource):
        summary["sources"] = source.progress(result.step)
    if unused := source.describe().get("unused_fields"):
        summary["unused_fields"] = unused
    return summary


def _compare_with_bigrams(source: Source, valid: Mapping[str, float]) -> dict[str, Any]:
    """Return bits per byte of the model and of bigram models on the same held-out tokens; empty without text data."""
    if not hasattr(source, "baseline") or not valid.get("loss"):  # a loss of 0 has no ratio to bits per byte
        return {}
    baseline = source.baseline("served")
    bits, fitted = baseline.of(valid["loss"]).bits_per_byte, baseline.fitted.bits_per_byte
    return {
        "bits_per_byte": bits,
        "bigram_bits_per_byte": fitted,
        "bigram_bound_bits_per_byte": baseline.oracle.bits_per_byte,
        "below_bigram_bits_per_byte": fitted - bits,
        "held_out_tokens": baseline.num_tokens,
    }


def import_plots() -> None:
    """Import the modules that draw the plots of a report."""
    for module in ("meshpar.plots.figures", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        importlib.import_module(module)


def _plot(
    folder: RunFolder,
    recipe: Recipe,
    curves: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    loads: Loads | None,
) -> None:
    from meshpar import plots

    has_bits = "bits_per_byte" in summary
    scale = summary["bits_per_byte"] / summary["validation"]["loss"] if has_bits else 1.0
    figures = {
        "loss.png": plots.loss_curve(
            train=[(line["step"], line["loss"] * scale) for line in curves if line.get("loss") is not None],
            valid=[(line["step"], line["val_loss"] * scale) for line in curves if line.get("val_loss") is not None],
            baselines={"bigram model": summary["bigram_bits_per_byte"]} if has_bits else {},
            title=recipe.name,
            unit="bits per byte" if has_bits else "loss",
        )
    }
    if loads is not None:
        title = f"{recipe.name}: load of experts, last steps"
        num_ranks = loads.ranks.tokens.shape[-1]
        figures["experts.png"] = plots.expert_load(loads.experts.tokens, num_ranks=num_ranks, title=title)
    for name, figure in figures.items():
        png = io.BytesIO()
        figure.savefig(png, format="png")
        replace_file(folder / name, png.getvalue())


def _result(summary: Mapping[str, Any], folder: RunFolder) -> dict[str, str]:
    fields = {f"held-out {name}": f"{value:.4f}" for name, value in summary["validation"].items() if value is not None}
    if "bits_per_byte" in summary:
        fields["bits per byte"] = f"{summary['bits_per_byte']:.3f} on {summary['held_out_tokens']:,} held-out tokens"
        fields["bigram model"] = (
            f"{summary['bigram_bits_per_byte']:.3f} on the same tokens (lower bound of bigram models: "
            f"{summary['bigram_bound_bits_per_byte']:.3f})"
        )
        below = summary["below_bigram_bits_per_byte"]
        fields["margin"] = f"{abs(below):.3f} bits per byte {'below' if below > 0 else 'ABOVE'} the bigram model"
    if "experts" in summary:
        worst = summary["experts"]
        fields["experts, worst layer"] = (
            f"largest load of an expert {worst['expert_max_over_mean']:.2f} times the mean, of a rank "
            f"{worst['rank_max_over_mean']:.2f}; {worst['drop_rate']:.2%} of assignments dropped "
            f"({folder}/experts.png)"
        )
    if summary["tokens_per_s"] is not None:
        fields["speed"] = f"{summary['tokens_per_s']:,.0f} tokens/s"
    if summary["mfu"] is not None:
        fields["model FLOP utilisation"] = f"{summary['mfu']:.1%}"
    if summary["skipped"]:
        fields["skipped updates"] = f"{summary['skipped']} (not finite)"
    if summary["steps_taken"]:
        fields["time"] = f"{summary['seconds']:.0f} s for {summary['steps_taken']} steps"
        fields["goodput"] = goodput_words(summary["wall_s"])
    return {**fields, "loss curve": f"{folder}/loss.png"}


def data_line(description: Mapping[str, Any]) -> str:
    """Format the result of `Source.describe` as a line: sizes and warnings of the data."""
    items = []
    for split, purpose in (("train", "training"), ("valid", "validation")):
        counts = description.get(split, {})
        unit = next((unit for unit in ("tokens", "examples") if unit in counts), None)
        items += [f"{counts[unit]:,} {unit} for {purpose}"] if unit else []
    items += [f"{source['weight']:.1%} from {name}" for name, source in description.get("sources", {}).items()]
    parts = [description, *description.get("sources", {}).values()]
    joined = [part["train"] for part in parts if part.get("separate_documents") is False]
    if any(counts["documents"] >= counts["windows"] for counts in joined):
        items.append("the documents in a row attend to each other (data.separate_documents=false)")
    if count := description.get("in_parts"):
        items.append(f"{count:,} conversations in parts, because their template changes earlier turns")
    if count := description.get("unended_answers"):
        items.append(f"{count:,} answers end without a special token (data.stop_tokens)")
    if unused := description.get("unused_fields"):
        counts = ", ".join(f"{name} ({count:,} records)" for name, count in unused.items())
        items.append(f"nothing reads the fields {counts}")
    return ", ".join(items)
