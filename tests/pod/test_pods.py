"""Test that losses do not depend on the number of processes, nor on restarts."""

from __future__ import annotations

import json
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pod import pods

RECIPE = textwrap.dedent("""
    import os
    import numpy as np
    import meshpar as mp
    from meshpar.data import ArrayData
    from meshpar.models import TransformerConfig, next_token_loss
    from meshpar.moe.layer_config import MoEConfig
    from meshpar.moe.routing import Routing

    STAGES = mp.pipeline_parallel(stages=2, microbatches=4, schedule="zb-h1")
    LAYOUTS = {
        "fsdp and tensor": (mp.MeshSpec(fsdp=4, tensor=2), mp.fsdp() | mp.tensor_parallel()),
        "pipeline": (mp.MeshSpec(stage=2, fsdp=2, tensor=2), mp.fsdp() | mp.tensor_parallel() | STAGES),
        "experts": (mp.MeshSpec(fsdp=4, expert=2), mp.fsdp() | mp.expert_parallel()),
        "data": (mp.MeshSpec(data=8), mp.ddp()),
    }

    def arrays():
        tokens = np.random.default_rng(0).integers(0, 32, (160, 17), dtype=np.int32)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def recipe():
        name = os.environ.get("LAYOUT", "fsdp and tensor")
        mesh, strategy = LAYOUTS[name]
        moe = MoEConfig(routing=Routing(num_experts=4, top_k=2), mlp_dim=32) if name == "experts" else None
        model = TransformerConfig(
            vocab_size=32, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=32, moe=moe
        )
        return mp.Recipe(
            name="pod", mesh=mesh, strategy=strategy, model=model, loss=next_token_loss, data=ArrayData(arrays=arrays),
            optimizer=mp.AdamW(lr=1e-2), steps=6, batch_size=16, checkpoint_every=2,
        )
""")

Train = Callable[..., list[float]]


@pytest.fixture
def train(tmp_path: Path, child_env: dict[str, str]) -> Train:
    """Train with a number of processes, and return the losses of the run. Later calls resume it."""
    (tmp_path / "recipe.py").write_text(RECIPE)

    def run(
        processes: int, *args: str, out: str = "runs", layout: str = "fsdp and tensor", stop_at: int | None = None
    ) -> list[float]:
        path, log, env = tmp_path / out / "pod" / "metrics.jsonl", tmp_path / "log", {**child_env, "LAYOUT": layout}
        command = ["--processes", str(processes), "--devices", "8", "--out", out]
        with pods.start(tmp_path, *command, *args, **env) as process:
            try:
                if stop_at is not None:
                    pods.wait_until(lambda: len(pods.losses(path)) >= stop_at, process, log)
                    process.terminate()
                process.wait(pods.PATIENCE_S)
            finally:
                process.terminate()
        assert process.returncode in (0, 128 + signal.SIGTERM), log.read_text()
        assert "Traceback" not in log.read_text(), log.read_text()
        return pods.losses(path)

    return run


@pytest.mark.matrix
def test_any_number_of_processes_gives_the_same_losses(train: Train) -> None:
    alone = train(1, out="1")
    assert len(alone) == 6
    assert train(2, out="2") == alone
    assert train(4, out="4") == alone


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["pipeline", "experts"])
def test_layouts_run_over_two_processes(train: Train, layout: str) -> None:
    alone = train(1, out="1", layout=layout)
    assert len(alone) == 6
    assert train(2, out="2", layout=layout) == alone


@pytest.mark.matrix
def test_a_run_resumes_with_other_processes_and_meshes(train: Train) -> None:
    whole = train(1, "--set", "steps=60", out="whole")
    begun = train(2, "--set", "steps=60", stop_at=5)
    assert 5 <= len(begun) < 60
    more = train(4, "--set", "steps=60", stop_at=len(begun) + 5)
    assert len(begun) < len(more) < 60
    assert more == whole[: len(more)]  # the same mesh: to the bit
    mesh = ("--set", "mesh=data=2,fsdp=4", "--set", "strategy=hsdp()")
    assert train(2, "--set", "steps=60", *mesh) == pytest.approx(whole, rel=1e-5)


SLOW = textwrap.dedent("""
    import dataclasses, os, time
    import jax, numpy as np, optax
    import jax.numpy as jnp
    import meshpar as mp
    from meshpar.data import ArrayData
    from meshpar.pod import pace, watchdog

    SLEEPS = {"healthy": (0, ()), "slow": (0.15, range(1000)), "once": (5.0, (30,))}
    pace.WINDOW_STEPS, watchdog.WINDOW_STEPS, watchdog.BEAT_S = 20, 20, 0.5

    class Data(ArrayData):
        def open(self, **options):
            source = super().open(**options)
            read, (seconds, calls), count = source.train_rows.read, SLEEPS[os.environ["CASE"]], [0]

            def delayed(indices):
                count[0] += len(indices) > 0
                time.sleep(seconds if jax.process_index() == 2 and len(indices) and count[0] in calls else 0.0)
                return read(indices)

            source.train_rows.read = delayed
            return source

    def recipe():
        return mp.Recipe(
            name="pod", mesh=mp.MeshSpec(data=3), strategy=mp.ddp(), steps=50, batch_size=6,
            loss=lambda model, batch, key: (1.0 * jnp.mean((model(batch["x"]) - 1.0) ** 2), {}),
            model=mp.from_functions(lambda key: {"w": jnp.ones((4, 8))}, lambda p, x: x @ p["w"]),
            data=Data(arrays={"x": np.ones((60, 4), np.float32)}),
            optimizer=mp.Optax(make=lambda steps: optax.sgd(1e-3)),
        )
""")


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["slow", "healthy", "once"])
def test_process_with_slow_data_is_named(tmp_path: Path, child_env: dict[str, str], case: str) -> None:
    (tmp_path / "recipe.py").write_text(SLOW)
    with pods.start(tmp_path, "--processes", "3", "--devices", "3", **child_env, CASE=case) as process:
        try:
            process.wait(pods.PATIENCE_S)
        finally:
            process.terminate()
    log = (tmp_path / "log").read_text()
    assert process.returncode == 0, log
    named = [line for line in log.splitlines() if "slows down all processes" in line]
    lines = [json.loads(line) for line in (tmp_path / pods.METRICS).read_text().splitlines()]
    slow = [line["slow_processes"] for line in lines if "slow_processes" in line]
    assert len(named) == (case == "slow"), log
    assert bool(slow) == (case == "slow")
    if case == "slow":
        assert "process 2 of 3" in named[0]
        assert all(x.keys() == {"2"} and x["2"] > 0.08 for x in slow)
