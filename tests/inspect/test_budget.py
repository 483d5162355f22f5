"""Budgets: saved fields, exceeded limits, and refused comparisons."""

from __future__ import annotations

import dataclasses
import json

import pytest

import meshpar as mp
from meshpar.inspect.budget import SLACK_BYTES, Budget, BudgetCheck, BudgetChecks, Difference
from meshpar.inspect.comparison import Comparison, Row, _changed
from meshpar.inspect.render import text_of
from meshpar.inspect.source_scopes import module_path
from meshpar.sharding.printing import flat
from tests.errors import raises


@pytest.fixture(scope="module")
def report(planted):
    plant = planted.nothing().on_cpu
    return mp.explain(plant.step, plant.state, plant.batch)


@pytest.fixture(scope="module")
def budget(report):
    return Budget.of(report, "decoder")


def differences(budget: Budget, report) -> tuple[Difference, ...]:
    return budget.differences(Budget.of(report, "decoder"))


def scaled(budget: Budget, axes: str, kind: str, field: str, factor: float) -> Budget:
    total = budget.totals[axes][kind]
    kinds = {**budget.totals[axes], kind: {**total, field: total[field] * factor}}
    return dataclasses.replace(budget, totals={**budget.totals, axes: kinds})


def with_bytes(budget: Budget, axes: str, kind: str, factor: float) -> Budget:
    return scaled(budget, axes, kind, "bytes_sent_per_device", factor)


def test_budget_round_trips_and_its_report_meets_it(report, budget, tmp_path):
    budget.save(tmp_path / "budget.json")
    again = Budget.load(tmp_path / "budget.json")
    assert again == budget
    assert differences(again, report) == ()
    assert len((tmp_path / "budget.json").read_text()) < 8000


@pytest.mark.parametrize(("factor", "over"), [(0.5, True), (0.98, True), (0.995, False), (1.005, False)])
def test_bytes_above_the_tolerance_exceed_the_budget(report, budget, factor, over):
    found = differences(with_bytes(budget, "fsdp", "all-gather", factor), report)
    assert any(one.is_over for one in found) is over
    assert all("all-gather over fsdp sends more" in one.text for one in found if one.is_over)


def test_fewer_bytes_are_reported_but_not_over(report, budget):
    (found,) = differences(with_bytes(budget, "fsdp", "all-gather", 2.0), report)
    assert found.text.startswith("all-gather over fsdp sends less")
    assert not found.is_over


@pytest.mark.parametrize(("factor", "over"), [(0.5, True), (0.995, False), (1.0, False), (2.0, False)])
def test_more_collectives_exceed_the_budget(report, budget, factor, over):
    saved = scaled(budget, "fsdp", "all-gather", "count_per_step", factor)
    found = differences(saved, report)
    assert [one.is_over for one in found] == ([over] if factor != 1 else [])
    often = "more" if factor < 1 else "less"
    assert all(f"all-gather over fsdp runs {often} often" in one.text for one in found)


def test_a_kind_that_sends_a_few_bytes_disappears(report, budget):
    few = {"all-to-all": {"count_per_step": 11, "bytes_sent_per_device": 77.0}}
    saved = dataclasses.replace(budget, totals={**budget.totals, "fsdp": {**budget.totals["fsdp"], **few}})
    (found,) = differences(saved, report)
    assert found.text == "all-to-all over fsdp runs less often: 11 → 0 per step (77 B → 0 B per device)"
    assert not found.is_over


def test_fewer_bytes_in_more_collectives_exceed_the_budget(report, budget):
    saved = scaled(with_bytes(budget, "fsdp", "all-gather", 2.0), "fsdp", "all-gather", "count_per_step", 0.5)
    (found,) = differences(saved, report)
    assert found.text.startswith("all-gather over fsdp sends less")
    assert found.is_over


def test_tolerance_field(report, budget):
    tight = with_bytes(dataclasses.replace(budget, tolerance=0.6), "fsdp", "all-gather", 0.7)
    assert not any(one.is_over for one in differences(tight, report))


def test_new_kind_exceeds_the_budget_unless_small(report, budget):
    kinds = dict(budget.totals["fsdp"])
    sent = kinds.pop("all-gather")["bytes_sent_per_device"]
    assert sent > SLACK_BYTES
    found = differences(dataclasses.replace(budget, totals={"fsdp": kinds}), report)
    assert [one.is_over for one in found] == [True]
    assert "0 B →" in found[0].text
    # An additional metric sends a few bytes.
    one = report.collectives[0]
    metric = dataclasses.replace(
        one.collective, kind="all-to-all", bytes_sent_per_device=8.0, count_per_step=1, loops=()
    )
    more = dataclasses.replace(report, collectives=(*report.collectives, dataclasses.replace(one, collective=metric)))
    assert not any(one.is_over for one in differences(budget, more))


def test_memory_strategy_and_version(report, budget):
    other = dataclasses.replace(budget, peak_bytes=budget.peak_bytes // 2, strategy="ddp()", jax_version="0.0.1")
    found = differences(other, report)
    assert found[0].is_over
    assert found[0].quantity == "peak memory"
    assert found[0].text.endswith("higher")
    texts = [one.text for one in found[1:]]
    assert not any(one.is_over for one in found[1:])
    assert "strategy was ddp() and is fsdp()" in texts
    assert any(text.startswith("jax was 0.0.1") for text in texts)


@pytest.mark.parametrize("change", [{"name": "x"}, {"target": "h100:1x8"}, {"mesh": {"data": 8}}])
def test_other_steps_are_refused(budget, change):
    step = {"name": budget.name, "target": budget.target, "mesh": budget.mesh}
    budget.check_comparable("b.json", **step)
    with raises("conflict", "b.json"):
        budget.check_comparable("b.json", **{**step, **change})


@pytest.mark.parametrize("text", ["[]", "{}", '{"name": 3}', "null"])
def test_load_refuses_other_files(tmp_path, text):
    (tmp_path / "b.json").write_text(text)
    with raises("damaged-file", "b.json"):
        Budget.load(tmp_path / "b.json")


@pytest.mark.parametrize(
    "invalid",
    [
        {"tolerence": 0.1},
        {"totals": {"data": {"all-reduce": {}}}},
        {"totals": {"data": 8}},
    ],
)
def test_load_refuses_invalid_and_unknown_fields(budget, tmp_path, invalid):
    (tmp_path / "budget.json").write_text(json.dumps({**budget.to_json(), **invalid}))
    with raises("damaged-file") as error:
        Budget.load(tmp_path / "budget.json")
    assert next(iter(invalid)) in error.value.reason


def test_load_refuses_tolerances_that_are_not_numbers(budget, tmp_path):
    (tmp_path / "budget.json").write_text(json.dumps({**budget.to_json(), "tolerance": "5 %"}))
    with raises("out-of-range", "tolerance"):
        Budget.load(tmp_path / "budget.json")


def test_comparison_of_two_reports(report, planted):
    plant = planted.plant(strategy=mp.zero1()).on_cpu
    other = mp.explain(plant.step, plant.state, plant.batch)
    comparison = Comparison(first=report, second=other, labels=("fsdp()", "zero1()"))
    rows = {row.quantity.strip(): row for row in comparison.rows}
    assert len(rows) == len(comparison.rows)
    assert rows["state"].difference == other.memory.state_bytes - report.memory.state_bytes > 0
    assert rows["strategy"].difference is None
    for kind in ("all-gather over fsdp", "all-reduce over fsdp"):
        assert {rows[kind].first, rows[kind].second} != {0.0}
    sent = sum(one.collective.bytes_sent_per_step for one in report.collectives)
    assert rows["total sent"].first == pytest.approx(sent)
    json.dumps(comparison.to_json())
    text = text_of(comparison)
    assert "fsdp()" in text
    assert "predicted step" not in text  # both lack it
    same = Comparison(first=report, second=report, labels=("a", "b"))
    assert all(not row.difference for row in same.rows)
    assert "differs" not in text_of(same)


@pytest.mark.parametrize(("second", "text"), [(0.4, "−10 points"), (0.503, "less than a point"), (0.5, "same")])
def test_shares_differ_by_points(second, text):
    assert _changed(Row(quantity="communication hidden", unit="fraction", first=0.5, second=second)) == text


def test_a_change_names_the_module_and_line_that_changed_most(report, budget):
    quantity = "all-gather over fsdp"
    modules = budget.sources[quantity]
    module = max(modules, key=lambda name: modules[name][0])
    changed = {**modules, module: [modules[module][0] / 4, *modules[module][1:]]}
    saved = with_bytes(dataclasses.replace(budget, sources={quantity: changed}), "fsdp", "all-gather", 0.5)
    (found,) = differences(saved, report)
    assert (found.quantity, found.is_over) == (quantity, True)
    assert found.where == f"{module} · {modules[module][2]}"
    assert modules[module][2].rpartition(":")[2].isdigit()


def test_combined_collectives_are_assigned_to_the_modules_of_their_arrays(report, budget):
    combined = [sent.collective for sent in report.collectives if len(sent.collective.parts) > 1]
    assert combined
    for collective in combined:
        modules = budget.sources[f"{collective.kind} over {collective.axes_label}"]
        assert modules.keys() >= {module_path(part.op_name) for part in collective.parts}
    for (axes, kind), total in flat(budget.totals).items():
        nbytes, counts, _ = zip(*budget.sources[f"{kind} over {axes}"].values(), strict=True)
        assert sum(nbytes) == pytest.approx(total["bytes_sent_per_device"])
        assert sum(counts) == pytest.approx(total["count_per_step"], abs=0.01)


@pytest.mark.parametrize("nbytes", [10**6, -(10**6)])
def test_a_change_of_peak_memory_names_the_module_that_changed_most_in_the_same_direction(report, budget, nbytes):
    modules = budget.sources["peak memory"]
    assert modules["state and batch"][0] == report.program.argument_bytes
    assert modules["layers/mlp"][2].startswith("tests/inspect/planted.py:")
    changed = {
        module: [modules[module][0] + factor * nbytes, 0, modules[module][2]]
        for module, factor in {"layers/mlp": 3, "state and batch": 1, "update": -3.5}.items()
    }
    sources = {"peak memory": {**modules, **changed}}
    (found,) = budget.differences(
        dataclasses.replace(budget, sources=sources, peak_bytes=budget.peak_bytes + nbytes // 2)
    )
    assert (found.quantity, found.is_over) == ("peak memory", nbytes > 0)
    assert found.where == f"layers/mlp · {modules['layers/mlp'][2]}"


@pytest.mark.parametrize(
    ("fields", "quantity", "is_over"),
    [
        ({"flops_per_device": 1.0}, "FLOPs per device", True),
        ({"flops_per_device": 1e18}, "FLOPs per device", False),
        ({"step_s": 1.0}, "simulated step", True),
        ({"step_s": 3.0}, "simulated step", False),
        ({"unexpected": 0}, "unexpected collectives", True),
        ({"kernels": {"attention (cuDNN, bf16)": 3}}, "attention (cuDNN, bf16)", False),
        ({"fingerprint": "0123", "digest": "4567"}, "program", False),
    ],
)
def test_compute_and_program(budget, fields, quantity, is_over):
    now = dataclasses.replace(budget, step_s=2.0, unexpected=3, kernels={"attention (XLA matmuls, f32)": 3})
    found = {one.quantity: one for one in dataclasses.replace(now, **fields).differences(now)}
    assert found.pop(quantity).is_over is is_over
    assert set(found) <= {"attention (XLA matmuls, f32)"}


def test_budgets_of_programs_without_a_simulation_are_compared(budget):
    old = dataclasses.replace(budget, flops_per_device=None, step_s=None, unexpected=None, kernels=None, digest="")
    assert old.differences(dataclasses.replace(budget, step_s=1.0, kernels={"norm (, f32)": 1})) == ()


def test_a_program_has_changed_if_both_its_lowered_and_its_compiled_form_differ(budget):
    module = "gradients/layers/mlp"
    assert budget.modules[module][0] > 0
    changes = {
        "fingerprint": "0123",
        "digest": "4567",
        "opcodes": {**budget.opcodes, "add": budget.opcodes["add"] + 3, "fft": 1},
        "modules": {**budget.modules, module: (1, "0a"), "update": (budget.modules["update"][0], "0b")},
    }
    now = dataclasses.replace(budget, **changes)
    (found,) = budget.differences(now)
    assert (found.quantity, found.is_over, found.where) == ("program", False, module)
    old = budget.opcodes["add"]
    assert (found.before, found.after) == (f"{old} add, 0 fft", f"{old + 3} add, 1 fft")
    for same in ("fingerprint", "digest"):
        assert budget.differences(dataclasses.replace(now, **{same: getattr(budget, same)})) == ()
    other = {name: [budget.modules[name][0], "0c"] for name in ("gradients", module, "update")}
    changes["modules"] = {**budget.modules, **other}
    (found,) = budget.differences(dataclasses.replace(budget, **{**changes, "opcodes": budget.opcodes}))
    assert found.where == module
    assert found.after == "the same opcodes with other constants, shapes, operands or order"


def test_table_of_several_programs(budget, report):
    over = differences(with_bytes(budget, "fsdp", "all-gather", 0.5), report)
    checks = BudgetChecks(
        checks=(
            BudgetCheck(file="a.json", program="a on cpu", differences=over),
            BudgetCheck(file="b.json", program="b on cpu"),
            BudgetCheck(file="c.json", program="c on cpu", error="recipe c.py: no such file |\n"),
        )
    )
    assert checks.is_over
    assert checks.verdict == "1 of 3 programs exceeds the budget, 1 could not be compared"
    table = [line for line in checks.markdown.splitlines() if line.startswith("|")]
    assert table[0] == "| program | changed | budget | now | where |"
    assert {line.count("|") - line.count(r"\|") for line in table} == {6}
    assert table[2].startswith("| a on cpu | ✘ all-gather over fsdp | ")
    assert "Unchanged: b on cpu." in checks.markdown
    text = text_of(checks)
    assert "b on cpu" in text
    assert "no such file" in text
    assert json.loads(json.dumps(checks.to_json()))["checks"][0]["is_over"] is True
