"""Test the fields, files and optimizers of recipes, and overrides from text."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.data import TextData
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.models.architecture import RopeScaling
from meshpar.optim.matrix_dims import decayed
from meshpar.parallel.strategy import Strategy
from meshpar.runs.optimizers import AdamW, Optax
from meshpar.runs.overrides import override, read
from meshpar.runs.recipe import Recipe, Sample
from meshpar.runs.recipe_file import load_recipe
from meshpar.runs.resuming import REPLAYED, breaks_resuming, changes, defaults_of
from tests.errors import raises

ROOT = Path(__file__).parents[2]


def small(**given: Any) -> Recipe:
    model = TransformerConfig(
        vocab_size=256, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64
    )
    fields = {
        "name": "small",
        "mesh": mp.MeshSpec(fsdp=4, tensor=2),
        "strategy": mp.fsdp() | mp.tensor_parallel(),
        "model": model,
        "loss": next_token_loss,
        "data": TextData(seq_len=16),
        "steps": 10,
        "batch_size": 8,
    }
    return Recipe(**{**fields, **given})


# Overrides -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("steps=20", "steps", 20),
        ("seed=-3", "seed", -3),
        ("optimizer.lr=3e-4", "optimizer.lr", 3e-4),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("model.tied_embeddings=true", "model.tied_embeddings", True),
        ("model.tied_embeddings=off", "model.tied_embeddings", False),
        ("name=other-run", "name", "other-run"),
        ("name='quoted'", "name", "quoted"),
        ("step.remat=dots", "step.remat", "dots"),
        ("step.precision.compute=bfloat16", "step.precision.compute", "bfloat16"),
        ("step.xla.xla_gpu_foo=true", "step.xla", {"xla_gpu_foo": True}),
        ("validate_every=None", "validate_every", None),
        ("optimizer.clip_norm=none", "optimizer.clip_norm", None),
        ("data.files=a.txt,b/*.py", "data.files", ("a.txt", "b/*.py")),
        ("data.files=('a b.txt',)", "data.files", ("a b.txt",)),
        ("mesh.fsdp=8", "mesh", mp.MeshSpec(fsdp=8, tensor=2)),
        ("mesh.data=-1", "mesh", mp.MeshSpec(data=-1, fsdp=4, tensor=2)),
        ("mesh=data=2,fsdp=4", "mesh", mp.MeshSpec(data=2, fsdp=4)),
        ("mesh=context=2,fsdp=4", "mesh", mp.MeshSpec(context=2, fsdp=4)),
        ("mesh.inside_node=tensor,expert", "mesh", mp.MeshSpec(fsdp=4, tensor=2, inside_node=("tensor", "expert"))),
        ("strategy=hsdp | tensor_parallel()", "strategy.label", "hsdp() | tensor_parallel()"),
        ("sample.num_tokens=20", "sample", Sample(num_tokens=20)),
        ("model.rope_scaling.factor=4", "model.rope_scaling", RopeScaling(factor=4.0)),
        (" steps = 7 ", "steps", 7),
    ],
)  # fmt: skip
def test_override_reads_text_by_the_type_of_the_field(assignment, path, value):
    found: Any = small().override(assignment)
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("1,2", tuple[int, int], (1, 2)),
        ("(1, 2.5)", tuple[int, float], (1, 2.5)),
        ("", tuple[str, ...], ()),
        ("[1, 2]", list[int], [1, 2]),
        ("1,2,3", Sequence[int], (1, 2, 3)),
        ("a,1", tuple, ("a", 1)),
        ("3", int | str, 3),
        ("three", int | str, "three"),
        ("none", str | None, None),
        ("2", Literal[1, 2], 2),
        ("{'a': 1}", dict[str, float], {"a": 1.0}),
        ("some/where", Path, Path("some/where")),
        ("[1, 'a']", Any, [1, "a"]),
        ("plain words", Any, "plain words"),
    ],
)
def test_read_converts_other_types(text, hint, value):
    found = read(text, hint, ("field",))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("assignment", "suggestion"),
    [
        ("stpes=20", "`steps`"),
        ("optimizer.leraning_rate=1", "known: `b1`"),
        ("optimizer.weight_decy=1", "`weight_decay`"),
        ("modle.num_layers=2", "`model`"),
        ("fsdp=8", "`mesh.fsdp`"),
        ("num_layers=8", "`model.num_layers`"),
        ("mesh.fdsp=8", "`fsdp`"),
        ("strategy=fspd()", "`fsdp`"),
        ("optimizer.schedule=cosin", "`cosine`"),
        ("step.remat=dot", "`dots`"),
        ("accumulate=4", "`step.accumulate`"),
        ("precision.compute=bfloat16", "`step.precision`"),
        ("xla.xla_gpu_foo=true", "`step.xla`"),
    ],
)
def test_override_of_an_unknown_name_suggests_names(assignment, suggestion):
    with pytest.raises(mp.MeshparError) as error:
        small().override(assignment)
    assert suggestion in error.value.fix


def test_override_of_a_mixture():
    files = 'data.files={"web": "a", "code": ["b", "c"]}'
    recipe = small().override(files, 'data.sources={"web": 0.7, "code": 1}')
    assert recipe.data == TextData(
        seq_len=16, files={"web": ("a",), "code": ("b", "c")}, sources={"web": 0.7, "code": 1.0}
    )
    assert recipe.override("data.sources.web=2", "data.files.web=d").data.sources == {"web": 2.0, "code": 1.0}
    assert small().override("data.files=a,b").data.files == ("a", "b")
    with raises("out-of-range", "sources['web']"):
        recipe.override("data.sources.web=nan")


@pytest.mark.parametrize(
    ("code", "where", "assignments"),
    [
        ("unknown-name", "`", "steps.x=1 loss.x=1 strategy.params=x step.remat.x=1 step.xla.a.b=1"),
        ("wrong-type", "`", "steps=many steps=2.5 steps=true optimizer.lr=fast optimizer.lr=inf optimizer.eps=nan"),
        (
            "wrong-type",
            "`",
            "model.tied_embeddings=maybe validate_every=often step.nonfinite=explode mesh.fsdp=x step=1",
        ),
        ("wrong-type", "`", "model=big optimizer=sgd optimizer=Muon loss=l2 sample.temperature=1e999 data.files=[[["),
        ("bad-syntax", "override", "steps =3 mesh.=3"),
        ("out-of-range", "Recipe.", "steps=0 steps=2147483648 checkpoint_every=0 checkpoint_retries=-1"),
        ("out-of-range", "Recipe.name", "name=a/b name=.. name=" + "x" * 201),
        ("out-of-range", "AdamW.", "optimizer.warmup_steps=-1 optimizer.lr=0 optimizer.b2=1 optimizer.ema=1"),
        ("out-of-range", "Sample.", "sample.temperature=-1 sample.prompt="),
        ("indivisible", "Recipe.batch_size (6)", "batch_size=6"),
    ],
)
def test_invalid_overrides_are_errors(code, where, assignments):
    for assignment in assignments.split():
        with raises(code, where):
            override(small(step=mp.StepOptions(accumulate=4)), [assignment])


@pytest.mark.parametrize("assignment", ["step.precision.compute=float31", "model.num_kv_heads=3", "data.seq_len=0"])
def test_values_are_checked_by_their_configs(assignment):
    with pytest.raises(mp.MeshparError):
        small().override(assignment)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["lr", "final_lr", "weight_decay", "clip_norm", "eps", "b1", "ema"])
def test_numbers_of_an_optimizer_are_finite(field, value):
    with raises("out-of-range", f"AdamW.{field}"):
        mp.AdamW(**{field: value})


@pytest.mark.parametrize(("make", "field"), [(mp.AdamW, "lr"), (mp.AdamW, "warmup_steps"), (mp.Muon, "rms")])
def test_numbers_of_an_optimizer_are_numbers(make, field):
    for value in ("x", None, True):
        with raises("wrong-type", f"{make.__name__}.{field}"):
            make(**{field: value})


@pytest.mark.parametrize("make", [mp.AdamW, mp.Muon])
def test_optimizer_has_averages_of_parameters(make):
    tx = make(ema=0.5, offload=True, moments="int8").build(steps=10, names={})
    assert jax.eval_shape(tx.init, {"w": jnp.ones((2, 2))}).average["w"].shape == (2, 2)


def test_override_keeps_explicit_axes_of_a_mesh():
    mesh = mp.MeshSpec(data=8, axis_types="explicit")
    assert dataclasses.replace(small(), mesh=mesh).override("mesh.data=4").mesh == mesh.replace(data=4)


def test_override_sets_dependent_fields_together():
    assert small().override("step.accumulate=5", "batch_size=40").batch_size == 40
    assert small().override("model.num_heads=3", "model.num_kv_heads=3").model.num_heads == 3


def test_override_uses_the_last_assignment_of_a_field():
    assert small().override("steps=5", "steps=6").steps == 6
    for pair in (("mesh=fsdp=8", "mesh.tensor=2"), ("mesh.tensor=2", "mesh=fsdp=8")):
        with raises("conflict", "override"):
            small().override(*pair)


def test_override_reports_errors_of_user_dataclasses():
    @dataclasses.dataclass(frozen=True)
    class Foreign:
        size: int = 3

        def __post_init__(self):
            if self.size > 5:
                raise ValueError("too big for me")

        def build(self):
            raise AssertionError("not built here")

    recipe = small(model=Foreign())
    assert recipe.override("model.size=4").model == Foreign(4)
    with pytest.raises(mp.MeshparError, match="too big for me"):
        recipe.override("model.size=6")


# Recipes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("mesh", {"fsdp": 8}, "wrong-type"),
        ("model", TransformerConfig, "wrong-type"),
        ("data", None, "wrong-type"),
        ("optimizer", "adam", "wrong-type"),
        ("loss", 3, "wrong-type"),
        ("sample", 3, "wrong-type"),
        ("steps", True, "out-of-range"),
        ("seed", 1.5, "out-of-range"),
    ],
)
def test_fields_of_a_recipe_are_checked(field, value, code):
    with raises(code, f"Recipe.{field}"):
        small(**{field: value})


def test_bare_rules_are_a_strategy():
    recipe = small(strategy=mp.Rules(embed="fsdp", mlp="tensor"))
    assert isinstance(recipe.strategy, Strategy)


def test_json_of_a_recipe_is_plain_data():
    found = json.loads(json.dumps(small().to_json()))
    assert found["mesh"] == {"data": 1, "stage": 1, "fsdp": 4, "expert": 1, "tensor": 2}
    assert found["strategy"] == "fsdp() | tensor_parallel()"
    assert found["model"]["type"] == "TransformerConfig"
    assert found["model"]["embed_dim"] == 32
    assert found["loss"] == "meshpar.models.token_loss.next_token_loss"
    assert found["data"]["files"] == ["stdlib"]
    assert found["optimizer"]["type"] == "AdamW"


def test_changes_lists_fields_that_break_resuming():
    before = small().to_json()
    after = small().override("steps=20", "mesh.fsdp=2", "optimizer.lr=0.1", "sample.num_tokens=5").to_json()
    changed = changes(before, after)
    assert changed["steps"] == (10, 20)
    assert changed["optimizer.lr"] == (3e-4, 0.1)
    assert [path for path in changed if breaks_resuming(path)] == ["optimizer.lr"]
    assert not changes(before, before)


def test_changes_uses_defaults_for_missing_fields():
    recipe = small()
    now = recipe.to_json()
    before = json.loads(json.dumps(now))
    del before["step"]["accumulate"], before["model"]["moe"]
    assert set(changes(before, now)) == {"step.accumulate", "model.moe"}
    assert not changes(before, now, defaults_of(recipe))
    other = recipe.override("step.accumulate=2")
    assert changes(before, other.to_json(), defaults_of(other)) == {"step.accumulate": (1, 2)}
    # Defaults do not apply to a config that was None.
    sampled = recipe.override("sample.num_tokens=5")
    assert any(
        path.startswith("sample") for path in changes(now | {"sample": None}, sampled.to_json(), defaults_of(sampled))
    )


def test_runs_from_before_a_field_existed_resume_with_another_value_of_it():
    """The old program is lowered with the default of the field."""
    recipe = small().override("model.unroll=2", "allow=unfused-attention")
    before = json.loads(json.dumps(small().to_json()))
    del before["model"]["unroll"], before["allow"]
    changed = changes(before, recipe.to_json(), defaults_of(recipe))
    assert changed["model.unroll"] == (1, 2)
    assert not [path for path in changed if breaks_resuming(path)]
    assert recipe.override(*(f"{path}={changed[path][0]}" for path in set(changed) & set(REPLAYED))).model.unroll == 1


def test_changes_reads_step_options_of_an_earlier_version():
    """Earlier versions stored the step options next to the other fields of the recipe."""
    recipe = small(step=mp.StepOptions(accumulate=2, xla={"xla_gpu_foo": 1}))
    now = recipe.to_json()
    before = {name: value for name, value in now.items() if name != "step"} | now["step"]
    assert not changes(before, now)
    assert changes(before, recipe.override("step.accumulate=4").to_json()) == {"step.accumulate": (2, 4)}


def test_only_listed_fields_may_change_on_resume():
    assert not breaks_resuming("mesh.fsdp")
    assert breaks_resuming("meshes")
    assert breaks_resuming("data.seq_len")


# Recipe files --------------------------------------------------------------------------------------------------------

FILE = """
from __future__ import annotations
import meshpar as mp
from meshpar.data import TextData
from meshpar.models import TransformerConfig, next_token_loss

def recipe(devices: int = 4) -> mp.Recipe:
    model = TransformerConfig(
        vocab_size=256, num_layers=1, embed_dim=8, num_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8
    )
    return mp.Recipe(
        name="file", mesh=mp.MeshSpec(fsdp=devices), model=model, loss=next_token_loss, data=TextData(), steps=1,
        batch_size=devices,
    )

def fixed() -> mp.Recipe:
    return recipe(2)

def wrong():
    return 3
"""


@pytest.mark.parametrize(
    ("field", "value", "code", "fix"),
    [
        ("remat", "dots", "unknown-name", "step=mp.StepOptions(remat=...)"),
        ("step_size", 1, "unknown-name", "`steps`"),
        ("optimizer", optax.sgd(0.1), "wrong-type", "mp.Optax(make="),
    ],
)
def test_misplaced_fields_are_errors_with_a_fix(field, value, code, fix):
    with raises(code, f"Recipe{'.' if field == 'optimizer' else '('}{field}") as error:
        small(**{field: value})
    assert fix in error.value.fix


def test_load_recipe_passes_the_number_of_devices(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert load_recipe(file).mesh["fsdp"] == 4
    assert load_recipe(file, devices=16).mesh["fsdp"] == 16
    assert load_recipe(f"{file}:fixed", devices=16).mesh["fsdp"] == 2


def test_load_recipe_finds_installed_recipes_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_recipe("digits_linen", devices=4).mesh == load_recipe(ROOT / "recipes/digits_linen.py", devices=4).mesh
    Path("digits_linen").write_text(FILE)  # a file of the user has priority
    with raises("wrong-type"):
        load_recipe("digits_linen")


def test_wheel_contains_the_recipes():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"recipes": "meshpar/recipes"}


@pytest.mark.parametrize(
    ("path", "code", "word"),
    [
        ("recipes/gpt_stdlib.py", "missing-file", "the installed recipe `gpt_stdlib`"),
        ("gpt_stdlip", "missing-file", "`gpt_stdlib`"),
        ("mine.py:recipes", "not-found", "did you mean `recipe`"),
        ("mine.py:wrong", "wrong-type", "return mp.Recipe"),
        ("mien.py", "missing-file", "`mine.py`"),
    ],
)
def test_load_recipe_rejects_invalid_files(tmp_path, monkeypatch, path, code, word):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FILE)
    with raises(code, path.partition(":")[0]) as error:
        load_recipe(path)
    assert word in error.value.fix


# The optimizer -------------------------------------------------------------------------------------------------------


def test_learning_rate_has_warmup_and_decay():
    rate = AdamW(lr=1.0, warmup_steps=4, final_lr=0.1).learning_rate(14)
    assert [float(rate(step)) for step in (0, 1, 3)] == pytest.approx([0.25, 0.5, 1.0])
    assert float(rate(4)) == pytest.approx(1.0)
    assert float(rate(9)) == pytest.approx(0.55)  # half way down the cosine
    assert float(rate(14)) == pytest.approx(0.1)
    assert float(AdamW(lr=1.0, schedule="linear", final_lr=0.5).learning_rate(10)(5)) == pytest.approx(0.75)
    assert float(AdamW(lr=1.0, schedule="constant").learning_rate(10)(99)) == 1.0


def test_schedule_steps_do_not_depend_on_the_run():
    short, long = (AdamW(schedule_steps=100).learning_rate(steps) for steps in (10, 50))
    assert float(short(7)) == float(long(7))


def test_warmup_must_be_shorter_than_the_schedule():
    with raises("out-of-range", "AdamW.warmup_steps"):
        AdamW(warmup_steps=5, schedule_steps=5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_run_shorter_than_warmup_starts_like_a_longer_run(schedule):
    optimizer = AdamW(lr=1.0, warmup_steps=50, schedule=schedule)
    with pytest.warns(UserWarning, match="longer than the run of 20 steps; the learning rate reaches 40% of 1"):
        short = optimizer.learning_rate(20)
    long, equal = optimizer.learning_rate(1000), optimizer.learning_rate(50)
    for step in (0, 7, 19):
        assert float(short(step)) == float(long(step)) == float(equal(step)) == pytest.approx((step + 1) / 50)
    assert np.isfinite(float(short(60)))


def test_weight_decay_excludes_norms():
    params = {
        "embed": {"embedding": jnp.ones((4, 2))},
        "layers": {
            "up": {"kernel": jnp.ones((3, 2, 4)), "bias": jnp.ones((3, 4))},
            "norm": {"scale": jnp.ones((3, 2))},
        },
        "gain": jnp.ones((3, 2)),
    }
    names = {"layers/up/kernel": ("layers", "embed", "mlp"), "gain": ("layers", "embed")}
    wanted = {
        "embed": {"embedding": True},
        "layers": {"up": {"kernel": True, "bias": False}, "norm": {"scale": False}},
        "gain": False,
    }
    assert decayed(names)(params) == wanted
    tx = AdamW(lr=0.5, schedule="constant", weight_decay=0.1, clip_norm=None).build(steps=1, names=names)
    zeros = {path: jnp.zeros_like(x) for path, x in params["layers"]["up"].items()}
    updates, _ = tx.update({"up": zeros}, tx.init({"up": params["layers"]["up"]}), {"up": params["layers"]["up"]})
    np.testing.assert_allclose(updates["up"]["kernel"], -0.05, rtol=1e-6)
    np.testing.assert_array_equal(updates["up"]["bias"], 0)


def test_gradients_are_clipped_to_the_norm():
    params = {"w": jnp.zeros((2, 2))}
    build = {"lr": 1.0, "schedule": "constant", "b1": 0.0, "weight_decay": 0.0, "eps": 1.0}

    def update(clip):
        tx = AdamW(**build, clip_norm=clip).build(steps=1, names={})
        return tx.update({"w": jnp.full((2, 2), 50.0)}, tx.init(params), params)[0]["w"]

    # Adam with eps=1 is g / (|g| + 1). It is 50/51 for 50, and 0.5/1.5 after clipping to 0.5.
    np.testing.assert_allclose(update(None), -50 / 51, rtol=1e-5)
    np.testing.assert_allclose(update(1.0), -0.5 / 1.5, rtol=1e-5)


def test_optax_accepts_any_optimizer():
    recipe = small(optimizer=Optax(make=lambda steps: optax.sgd(1 / steps)))
    tx = recipe.optimizer.build(steps=4, names={})
    params = {"w": jnp.ones(3)}
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.25)
    assert recipe.to_json()["optimizer"]["type"] == "Optax"


def test_renamed_option_is_named_in_the_error() -> None:
    for call in (lambda: mp.StepOptions(interleave=2), lambda: small().override("step.interleave=2")):
        with raises("unknown-name") as error:
            call()
        assert error.value.fix == "it is now `batch_slices`"


def test_recipe_of_an_earlier_run_has_the_earlier_name_of_an_option() -> None:
    recipe = small(step=mp.StepOptions(batch_slices=2))
    before = recipe.to_json()
    before["step"]["interleave"] = before["step"].pop("batch_slices")
    assert changes(before, recipe.to_json(), defaults_of(recipe)) == {}
    assert changes(before, small().to_json(), defaults_of(recipe)) == {"step.batch_slices": (2, 1)}


def test_a_recipe_whose_module_is_missing_needs_a_path(tmp_path):
    (tmp_path / "adopted.py").write_text("import no_such_package_\n")
    with raises("error-in-recipe") as error:
        load_recipe(tmp_path / "adopted.py")
    assert "PYTHONPATH" in error.value.fix
