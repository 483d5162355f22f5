"""Draw the pictures of the topic pages: `python -m docs.pictures [NAME ...]` writes docs/images/NAME.svg.

The covers of the notebooks, which other pages show, come from `make notebooks`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import meshpar as mp
from meshpar.inspect.budget import Budget
from meshpar.inspect.memory_timeline import memory_timeline
from meshpar.inspect.proposed_names import propose_names
from meshpar.loop.fit import STEPS_IN_FLIGHT
from meshpar.planner.scaling import grow
from meshpar.plots.style import AXES, FAINT, INK, MEMORY, MORE, OPS, figure_of, styled
from meshpar.sharding.printing import flat
from notebooks.pictures import curves

ROOT = Path(__file__).parents[1]


def pipeline() -> Figure:
    """Draw three schedules for the same number of stages and microbatches."""
    return mp.plots.schedule(*(mp.pipeline.make(name, stages=4, microbatches=8) for name in ("gpipe", "1f1b", "zb-h2")))


def uniform() -> Figure:
    """Draw a schedule in which all stages run the same ops in a tick, and 1F1B."""
    eager = mp.pipeline.make("eager-1f1b", stages=4, microbatches=8, spread_head=True)
    return mp.plots.schedule(eager, mp.pipeline.make("1f1b", stages=4, microbatches=8))


def planning() -> Figure:
    """Draw tokens per second and GPU of the fastest layouts of Llama 3.1 8B."""
    batch = {name: jax.ShapeDtypeStruct((512, 4096), np.int32) for name in ("inputs", "targets")}
    search = mp.plan(mp.models.llama3_8b(), batch, "h100:8x8", top=1).search
    return mp.plots.growth(grow(search.workload, search.cluster, max_gpus=2048))


def training() -> Figure:
    """Draw the learning rates of the three schedules of `mp.AdamW`."""
    steps = np.arange(1000)
    schedules = {
        f'"{name}"': mp.AdamW(lr=3e-4, warmup_steps=100, schedule=name).learning_rate(len(steps))
        for name in ("cosine", "linear", "constant")
    }
    rates = {name: np.asarray([1e4 * float(rate(step)) for step in steps[::10]]) for name, rate in schedules.items()}
    title = "mp.AdamW(lr=3e-4, warmup_steps=100, schedule=...), a run of 1,000 steps"
    return curves(steps[::10], rates, x_label="step", y_label="learning rate, 1e-4", title=title)


def losses() -> Figure:
    """Draw the error of a mean of means over the number of parts, for random masks."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 65, size=(2000, 64))  # tokens with weight in each example
    values = rng.gamma(4.0, 0.5, size=lengths.shape)  # mean loss of each example, nats
    parts = [1, 2, 4, 8, 16, 32, 64]
    totals, weights = lengths * values, lengths
    exact = totals.sum(1) / weights.sum(1)
    means = [(totals.reshape(-1, n, 64 // n).sum(2) / weights.reshape(-1, n, 64 // n).sum(2)).mean(1) for n in parts]
    errors = {
        "mean of the means of the parts": [100 * float(np.sqrt(np.mean((mean / exact - 1) ** 2))) for mean in means],
        "mp.MeanLoss(total, weight)": [0.0] * len(parts),
    }
    labels = {"x_label": "parts of the batch: micro-steps × devices", "y_label": "error of the loss (rms), %"}
    return curves(parts, errors, title="64 sequences of 1 to 64 tokens, random losses", **labels)


@styled
def huggingface() -> Figure:
    """Draw the state of Llama 3.1 8B under AdamW on eight devices, for training of all parameters and of adapters."""
    mesh, model, tx = mp.MeshSpec(fsdp=8).abstract(), mp.models.llama3_8b().build(), optax.adamw(1e-5)
    tables = {
        "all parameters, float32": mp.shardings(model, mesh, mp.fsdp(), tx=tx),
        "LoRA of rank 16,\nfrozen in bfloat16": mp.shardings(
            mp.lora(rank=16)(model), mesh, mp.fsdp(), tx=tx, precision=mp.Precision(params="bfloat16")
        ),
    }
    figure, (panel,) = figure_of(8.0, 2.4)
    for row, table in enumerate(tables.values()):
        start = 0.0
        parts = {"parameters": table.params, "gradients": table.grads, "optimizer state": table.optimizer}
        for name, decisions in parts.items():
            size = sum(decision.bytes_per_device for decision in decisions) / 1e9
            panel.barh(row, size, 0.6, left=start, color=MEMORY[name], label=name if row == 0 else None)
            start += size
        panel.text(start, row, f" {start:.3g}", va="center", fontsize=8)
    panel.set_yticks(range(len(tables)), tables)
    panel.invert_yaxis()
    panel.set(xlabel="GB per device", title="State of Llama 3.1 8B under AdamW on fsdp=8")
    panel.legend()
    return figure


@styled
def performance() -> Figure:
    """Draw the table of simulated steps in docs/performance.md: overlap and memory."""
    text = (ROOT / "docs" / "performance.md").read_text()
    rows = re.findall(r"^\| `(\w+)\.py` \| `([\w:]+)` \| [\d.]+ \| (\d+) % \| (\d+) \|", text, flags=re.MULTILINE)
    figure, panels = figure_of(9.0, 2.8, columns=2, sharey=True)
    for panel, column, color, label, limit in (
        (panels[0], 2, AXES["fsdp"], "overlapped communication, %", 100),
        (panels[1], 3, MEMORY["parameters"], "memory of a device, GB", 80),
    ):
        values = [float(row[column]) for row in rows]
        panel.barh(range(len(rows)), values, 0.6, color=color)
        for row, value in enumerate(values):
            panel.text(value, row, f" {value:g}", va="center", fontsize=8)
        panel.axvline(limit, color=INK, lw=1, ls=(0, (2, 2)))
        panel.set(xlabel=label, xlim=(0, 1.1 * limit))
    panels[0].set_yticks(range(len(rows)), [f"{recipe}, {cluster}" for recipe, cluster, *_ in rows])
    panels[0].invert_yaxis()
    figure.suptitle("Simulated steps on H100s")
    return figure


def _rows(names: list[str], bars: list[tuple[int, float, float, str, str]], **labels: str) -> Figure:
    """Draw bars (row, start, end, text, color) over time."""
    figure, (panel,) = figure_of(10.0, 0.9 + 0.42 * len(names))
    for row, start, end, text, color in bars:
        panel.barh(row, end - start, 0.7, left=start, color=color, edgecolor="white", lw=0.6)
        panel.text((start + end) / 2, row, text, ha="center", va="center", fontsize=8)
    panel.set_yticks(range(len(names)), names)
    panel.tick_params(axis="y", length=0)
    panel.invert_yaxis()
    panel.set(**labels)
    return figure


@styled
def loop() -> Figure:
    """Draw when `fit` dispatches steps, and when hooks receive their records."""
    bars = []
    for step in range(1, 9):
        end = step + 0.2
        waits_until = step - STEPS_IN_FLIGHT - 1 + 0.2 + 0.17 if step > STEPS_IN_FLIGHT + 1 else 0.14 * (step - 1)
        bars += [
            (0, waits_until, waits_until + 0.12, str(step), MORE[5]),
            (1, end - 1, end, f"step {step}", OPS["FB"[step % 2]][0]),
            (2, end, end + 0.15, str(step), AXES["data"]),
        ]
    title = f"The host dispatches up to {STEPS_IN_FLIGHT} steps ahead, so devices do not wait for hooks"
    names = ["host: dispatch", "devices: compute", "hooks: on_record"]
    return _rows(names, bars, xlabel="time, in durations of a step", title=title)


@styled
def pods() -> Figure:
    """Draw a run of four processes with `--restarts`: process 2 dies, and all continue from the checkpoint."""
    join, train, lost, dead = "#c9b6e4", OPS["B"][0], FAINT, "#f4a6a0"
    bars = []
    for process in range(4):
        bars += [(process, 0, 1.3, "join, compare", join), (process, 1.3, 5, "steps 1–400", train)]
        bars += [(process, 5, 6.4, "steps 401–520", lost)]
        bars += [(process, 6.4, 6.8, "dies", dead) if process == 2 else (process, 6.4, 7.6, "stall found", dead)]
        bars += [(process, 7.9, 9.2, "join, restore", join), (process, 9.2, 12, "steps 401–…", train)]
    title = "A lost process ends the run, and --restarts continues it from the checkpoint of step 400"
    figure = _rows([f"process {n}" for n in range(4)], bars, xlabel="time (schematic)", title=title)
    figure.axes[0].set_xticks([])
    return figure


@styled
def budgets() -> Figure:
    """Draw the growth of a decoder's step over its budget under changes of its options, compiled for CPU devices."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # read with the first device
    batch = {name: jax.ShapeDtypeStruct((16, 128), np.int32) for name in ("inputs", "targets")}
    model = mp.models.TransformerConfig(
        vocab_size=256, num_layers=4, embed_dim=128, num_heads=4, num_kv_heads=4, head_dim=32, mlp_dim=512
    ).build()
    mesh = mp.MeshSpec(fsdp=8).build()

    def budget(strategy: str, **options: Any) -> Budget:
        state = mp.abstract_state(model, optax.adam(1e-3), mesh=mesh, strategy=getattr(mp, strategy)())
        return Budget.of(mp.explain(mp.train_step(mp.models.next_token_loss, **options), state, batch), "decoder")

    saved = budget("fsdp")
    changes = {
        "accumulate=2": budget("fsdp", accumulate=2),
        'remat="full"': budget("fsdp", remat="full"),
        "zero1() instead of fsdp()": budget("zero1"),
    }
    quantities = {
        "bytes sent": lambda one: sum(total["bytes_sent_per_device"] for total in flat(one.totals).values()),
        "peak memory": lambda one: one.peak_bytes,
        "FLOPs": lambda one: one.flops_per_device,
    }
    figure, (panel,) = figure_of(8.0, 2.8)
    for at, (name, change) in enumerate(changes.items()):
        growth = [100 * (of(change) / of(saved) - 1) for of in quantities.values()]
        rows = np.arange(len(quantities)) + 0.26 * (at - 1)
        panel.barh(rows, growth, 0.24, color=MORE[at], label=name)
        for row, value in zip(rows, growth, strict=True):
            panel.text(max(value, 0), row, f" {value:+.0f} %", va="center", fontsize=8)
    panel.axvline(0, color=INK, lw=1)
    panel.set_yticks(range(len(quantities)), quantities)
    panel.invert_yaxis()
    panel.set(xlabel="change from the budget, %", title="A decoder of four layers on fsdp=8")
    panel.margins(x=0.15)
    panel.legend(loc="lower right")
    return figure


@styled
def diff() -> Figure:
    """Draw the differences of the equations of the example in docs/diff.md, in the order of the program."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # read with the first device
    example = (ROOT / "docs" / "diff.md").read_text().split("```python\n")[1].split("```")[0]
    namespace: dict[str, Any] = {}
    exec(compile(example, "docs/diff.md", "exec"), namespace)
    deviations = namespace["difference"].deviations
    figure, (panel,) = figure_of(8.0, 2.8)
    for at, phase in enumerate(("forward", "backward", "update")):
        numbers = [number for number, deviation in enumerate(deviations) if deviation.phase == phase]
        ratios = [max(deviations[number].ratio, 1e-3) for number in numbers]
        panel.semilogy(numbers, ratios, "o", ms=4, color=MORE[at], label=phase)
    panel.axhline(1, color=INK, lw=1)
    panel.text(0, 1.3, "tolerance: 4 times the measured rounding error", fontsize=8)
    first = next(number for number, deviation in enumerate(deviations) if deviation.ratio > 1)
    panel.annotate(
        f"first different value: {deviations[first].equation}", (first, deviations[first].ratio), (first + 3, 30),
        fontsize=8, arrowprops={"arrowstyle": "->", "color": INK},
    )  # fmt: skip
    panel.set(xlabel="equation of the step", ylabel="difference / tolerance", title="A missing reduction over tensor=2")
    panel.legend(loc="center right")
    return figure


def out_of_memory() -> Figure:
    """Draw the memory of a decoder's step on eight H100s over time. It needs the `aot` extra."""
    config = mp.models.TransformerConfig(
        vocab_size=32_768, num_layers=8, embed_dim=1024, num_heads=8, num_kv_heads=4, head_dim=128, mlp_dim=4096,
        attention="cudnn",
    )  # fmt: skip
    mesh, options = mp.MeshSpec(fsdp=8).abstract(), {"precision": mp.Precision(compute="bfloat16"), "remat": "minimal"}
    state = mp.abstract_state(config.build(), optax.adamw(1e-3), mesh=mesh, strategy=mp.fsdp(prefetch=1))
    batch = {name: jax.ShapeDtypeStruct((64, 1024), np.int32) for name in ("inputs", "targets")}
    report = mp.explain(mp.train_step(mp.models.next_token_loss, **options), state, batch, "h100:1x8")
    return mp.plots.memory_timeline(memory_timeline(report.program, report.timeline))


@styled
def adopt() -> Figure:
    """Draw the matrices of the example in docs/adopt.md with the borders of their shards."""
    example = (ROOT / "docs" / "adopt.md").read_text().split("```python\n")[1].split("adoption = ")[0]
    namespace: dict[str, Any] = {}
    exec(compile(example, "docs/adopt.md", "exec"), namespace)
    proposed = propose_names(mp.from_nnx(namespace["Net"]), jax.ShapeDtypeStruct((16, 8), np.int32))
    colors = dict(zip(("vocab", "heads", "mlp"), MORE, strict=False))
    figure, (panel,) = figure_of(10.0, 2.8)
    at = 0.0
    leaves = {leaf.path.partition("/")[0]: leaf for leaf in proposed.leaves if len(leaf.shape) == 2}
    for leaf in (leaves[layer] for layer in ("embed", "q", "k", "v", "out", "up", "down", "head")):
        rows, columns = leaf.shape
        name = next(name for name in leaf.names if name in colors)
        panel.add_patch(Rectangle((at, -rows / 2), columns, rows, color=colors[name], alpha=0.25, lw=0))
        for dim, size in enumerate(leaf.shape):
            is_embed = leaf.names[dim] == "embed"
            for line in np.linspace(0, size, 5 if is_embed else 3):
                style = {"color": INK if is_embed else colors[name], "lw": 0.5 if is_embed else 1.5}
                if dim == 0:
                    panel.plot((at, at + columns), (line - rows / 2,) * 2, **style)
                else:
                    panel.plot((at + line,) * 2, (-rows / 2, rows / 2), **style)
        label = f"{leaf.path.removesuffix('/kernel').removesuffix('/embedding')}\n{', '.join(map(str, leaf.names))}"
        panel.text(at + columns / 2, -rows / 2 - 4, label, ha="center", va="bottom", fontsize=7)
        at += max(columns, 56) + 16
    panel.invert_yaxis()
    panel.set_aspect("equal")
    panel.set_axis_off()
    panel.set_title("Thin lines: shards over fsdp=4. Thick lines: shards over tensor=2.", pad=14)
    return figure


PICTURES = {
    draw.__name__: draw
    for draw in (
        *(pipeline, uniform, planning, training, losses, huggingface, performance, loop, pods, budgets, diff),
        out_of_memory,
        adopt,
    )
}


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        with matplotlib.rc_context({"svg.hashsalt": name}):
            PICTURES[name]().savefig(ROOT / "docs" / "images" / f"{name}.svg", metadata={"Date": None})
