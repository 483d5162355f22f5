"""Test the HTML page of reports: its data, and in a headless browser the views of mesh, timeline and tables."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
from xml.etree import ElementTree

import jax
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar.cli.explain_command import _plots
from meshpar.inspect.page import as_page
from meshpar.inspect.source_scopes import module_path
from meshpar.models import TransformerConfig, next_token_loss
from meshpar.moe.layer_config import MoEConfig
from meshpar.moe.routing import Routing
from meshpar.runs.memory_fit import MemoryChange, MemoryFit
from meshpar.runs.recipe_file import load_recipe
from tests.inspect.saved import ROOT, Compiled
from tests.tools.browser import BROWSER

MOST_S = 2.0
"""Seconds in which the page of the largest recipe opens."""

START = "<head><script>window.problems = []; window.onerror = (...args) => problems.push(args.join(' '))</script>"
USE = """
const result = {};
const root = document.querySelector(".meshpar[data-report]");
const find = selector => root.querySelector(selector), all = selector => [...root.querySelectorAll(selector)];
const move = (node, type, fields) => node.dispatchEvent(new PointerEvent(type, { bubbles: true, ...fields }));

const choice = find("[data-view=mesh] select");
result.tensors = choice.options.length;
result.infos = [...choice.options].map((option, i) => {
  choice.value = i;
  choice.onchange();
  return [option.textContent, find(".info").textContent, all("[data-shard]").length, all("[data-device]").length];
});
choice.value = Number(SHOWN);
choice.onchange();
move(all("[data-device]").at(-1), "pointerover");
result.device = find(".hover").textContent;
result.marked = all("rect.on").length;

const canvas = find("canvas");
if (canvas) {
  const view = () => canvas.dataset.view.split(" ").map(Number), box = canvas.getBoundingClientRect();
  const part = find("[data-view=timeline] select");
  result.parts = [...part.options].map(option => option.textContent);
  result.all = view();
  const point = { clientX: box.left + box.width / 2, clientY: box.top + 40, bubbles: true, cancelable: true };
  canvas.dispatchEvent(new WheelEvent("wheel", { ...point, deltaY: -100 }));
  result.zoomed = view();
  move(canvas, "pointerdown", { clientX: 400 });
  move(canvas, "pointermove", { clientX: 300 });
  move(canvas, "pointerup", { clientX: 300 });
  result.moved = view();
  find("[data-view=timeline] button").click();
  result.reset = view();
  part.value = part.options.length - 1;
  part.onchange();
  result.opened = view();
  const pixels = canvas.getContext("2d").getImageData(0, 22, canvas.width, 88).data;
  result.painted = pixels.some(value => value !== 0);
}

const bars = all(".filters").map(bar => {
  const rows = () => [...bar.nextElementSibling.querySelectorAll("tbody tr")].filter(row => !row.hidden);
  const before = rows().length, selects = [...bar.querySelectorAll("select")];
  const fields = { columns: selects.map(node => node.getAttribute("aria-label")), before };
  if (selects.length) {
    selects[0].selectedIndex = 1;
    bar.oninput();
    fields.selected = rows().map(row => row.textContent);
    fields.value = selects[0].value;
    selects[0].selectedIndex = 0;
  }
  bar.querySelector("input").value = "no such text";
  bar.oninput();
  fields.none = rows().length;
  bar.querySelector("input").value = "";
  bar.oninput();
  fields.again = rows().length;
  const title = /^(time|sent)$/, headings = [...bar.nextElementSibling.querySelectorAll("th")];
  const heading = headings.find(node => title.test(node.textContent));
  if (heading) {
    const column = heading.cellIndex, numbers = () => rows().map(row => numberOf(row.cells[column].textContent));
    heading.onclick();
    fields.sorted = numbers();
  }
  return fields;
});
result.tables = bars;
"""
END = """
<script>
const opened_s = performance.now() / 1000;
try { (() => { USE; window.result = result; })(); } catch (error) { problems.push(error.stack); }
const pre = document.createElement("pre");
pre.id = "result";
pre.textContent = JSON.stringify({ ...window.result, problems, opened_s });
document.body.append(pre);
</script></body>
"""


@pytest.fixture(scope="module")
def report(compiled):
    plant, program = compiled("fsdp_tensor")
    return mp.explain(plant.step, plant.state, plant.batch, plant.cluster, pod=Compiled(program))


def data_of(page: str) -> list[dict]:
    found = re.findall(r'<script type="application/json" id="data-\d+">(.*?)</script>', page, flags=re.DOTALL)
    return [json.loads(text) for text in found]


def test_data_has_each_tensor_and_op(report):
    (data,) = data_of(as_page([("a", report)], title="a title"))
    assert data["mesh"] == dict(report.mesh)
    table = {decision.path: decision for decision in report.shardings.params}
    tensors = [tensor for tensor in data["tensors"] if tensor["group"] == "parameter"]
    assert {tensor["path"] for tensor in tensors} == set(table)
    for tensor in tensors:
        shards = math.prod(data["mesh"][axis] for axes in tensor["spec"] for axis in axes)
        assert shards == table[tensor["path"]].shards
        assert len(tensor["spec"]) == len(tensor["shape"])
        assert tensor["bytes"] * shards == math.prod(tensor["shape"]) * np.dtype(tensor["dtype"]).itemsize
    for segment, drawn in zip(report.timeline.segments, data["segments"], strict=True):
        assert drawn["duration_s"] == segment.duration_s
        for op, (start_s, end_s, lane, kind, label, module, name) in zip(segment.ops, drawn["ops"], strict=True):
            assert (start_s, end_s) == pytest.approx((op.start_s, op.end_s), rel=1e-6)
            assert (lane == 1) == (op.stream == "communication")
            assert [data["strings"][i] for i in (kind, label, module, name)] == [op.kind, op.label, op.module, op.name]


def test_reports_without_a_timeline_have_no_view_of_it(report):
    page = as_page([("a", dataclasses.replace(report, timeline=None)), ("b", report)], title="two")
    assert page.count('data-view="mesh"') == 2
    assert page.count('data-view="timeline"') == 1
    assert page.index("<h1>a</h1>") < page.index("<h1>b</h1>")


def browse(page: str, folder, shown: int = 0) -> dict:
    """Open the page in a browser, use its views, and return the observations of the script `USE`."""
    if not BROWSER:
        pytest.skip("needs a Chromium browser on the PATH")
    script = END.replace("USE;", USE.replace("SHOWN", str(shown)))
    assert page.count("<head>") == page.count("</body>") == 1
    file = folder / "page.html"
    file.write_text(page.replace("<head>", START).replace("</body>", script))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,1000", "--dump-dom")
    command = [BROWSER, *options, f"--user-data-dir={folder / 'profile'}", file.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    (text,) = re.findall(r'<pre id="result">(.*?)</pre>', dom, flags=re.DOTALL)
    result = json.loads(text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert result["problems"] == []
    return result


def decoder(strategy: mp.Strategy, mesh: mp.MeshSpec, **fields):
    config = TransformerConfig(
        vocab_size=512, num_layers=4, embed_dim=128, num_heads=4, num_kv_heads=4, head_dim=32, mlp_dim=256, **fields
    )
    state = mp.abstract_state(config.build(), optax.adam(1e-3), mesh=mesh.abstract(), strategy=strategy)
    batch = {name: jax.ShapeDtypeStruct((32, 128), np.int32) for name in ("inputs", "targets")}
    return mp.train_step(next_token_loss), state, batch


CASES = {
    "dense": lambda: decoder(mp.fsdp(min_bytes=0) | mp.tensor_parallel(), mp.MeshSpec(fsdp=4, tensor=2)),
    "moe": lambda: decoder(
        mp.fsdp(min_bytes=0) | mp.expert_parallel(), mp.MeshSpec(fsdp=2, expert=4),
        moe=MoEConfig(routing=Routing(num_experts=8, top_k=2), mlp_dim=256),
    ),
    "pipeline": lambda: decoder(
        mp.pipeline_parallel(stages=2, microbatches=8, schedule="eager-1f1b") | mp.fsdp(min_bytes=0),
        mp.MeshSpec(stage=2, fsdp=4),
    ),
}  # fmt: skip


@pytest.mark.pod
@pytest.mark.parametrize("name", CASES)
def test_views_in_a_browser(name, pod, tmp_path):
    report = mp.explain(*CASES[name](), cluster="h100:1x8", pod=pod)
    tables = report.shardings
    shown = next(i for i, decision in enumerate(tables.params) if decision.shards > 1 and decision.leaf.shape)
    result = browse(as_page([(name, report)], title=name), tmp_path, shown)

    params = [decision for decision in tables.params if decision.leaf.shape]
    assert [text.removeprefix("parameter: ") for text, *_ in result["infos"][: len(params)]] == [d.path for d in params]
    for decision, (_, info, shards, devices) in zip(params, result["infos"], strict=False):
        assert f"{decision.shards} shard" in info
        assert decision.leaf.dtype.name in info
        assert shards == decision.shards  # no leaf has more than two sharded dims
        assert devices == report.devices
    assert re.fullmatch(r"device .+ has \[.*\d+:\d+.*\]", result["device"])
    coordinates = dict(pair.split("=") for pair in re.findall(r"\w+=\d+", result["device"]))
    assert coordinates == {axis: str(size - 1) for axis, size in report.mesh.items() if size > 1}
    assert result["marked"] == 1 + report.devices // params[shown].shards

    segments = report.timeline.segments
    assert len(result["parts"]) == len(segments)
    assert result["all"] == pytest.approx([0, segments[0].duration_s], rel=1e-4)
    width = result["zoomed"][1] - result["zoomed"][0]
    assert width == pytest.approx(0.8 * segments[0].duration_s, rel=1e-3)
    assert result["moved"][0] > result["zoomed"][0]
    assert result["reset"] == result["all"]
    assert result["opened"] == pytest.approx([0, segments[-1].duration_s], rel=1e-4)
    assert result["painted"]

    filtered = [table for table in result["tables"] if table["columns"]]
    assert any({"kind", "implementation"} <= {*table["columns"]} for table in filtered)
    for table in result["tables"]:
        assert table["none"] == 0
        assert table["again"] == table["before"] > 0
        assert table.get("sorted", [2, 1]) == sorted(table.get("sorted", [2, 1]), reverse=True)
    for table in filtered:
        assert 0 < len(table["selected"]) < table["before"]
        assert all(table["value"] in row for row in table["selected"])


SPECIAL = (
    "</script><script>problems.push(1)</script>", "<!--<script>", "<img src=x onerror='problems.push(2)'>",
    "quote\"'`", "a&amp;b", "日本語", "back\\slash\\u003c", "$x^2$", "${problems.push(3)}", "_hidden",
)  # fmt: skip
"""Names of modules, parameters and reports that HTML, JavaScript, HLO or matplotlib could interpret."""


@pytest.fixture(scope="module")
def special_report():
    def apply(params, x):
        for name in SPECIAL:
            with jax.named_scope(name):
                x = jax.numpy.tanh(x @ params[name]["kernel"])
        return x

    def loss(model, batch, key):
        return jax.numpy.mean(model(batch["x"]) ** 2), {}

    model = mp.from_functions(
        lambda key: {name: {"kernel": jax.numpy.ones((64, 64))} for name in SPECIAL},
        apply, names={f"{name}/kernel": ("embed", "mlp") for name in SPECIAL},
    )  # fmt: skip
    strategy = mp.fsdp(min_bytes=0) | mp.tensor_parallel()
    state = mp.abstract_state(model, optax.sgd(0.1), mesh=mp.MeshSpec(fsdp=4, tensor=2).build(), strategy=strategy)
    return mp.explain(mp.train_step(loss), state, {"x": jax.ShapeDtypeStruct((32, 64), np.float32)})


@pytest.mark.matrix
def test_special_characters_in_names(special_report, tmp_path):
    label = "</script>\"'&日本\\ $x$"
    fit = MemoryFit(
        recipe=label, cluster="h100:1x8", limit_bytes=1, peak_bytes=2, step_s=0.1,
        changes=(MemoryChange(kind=label, settings=(label,), command=label, python=label, fits=False, reason=label),),
    )  # fmt: skip
    pictures = [_plots(label, special_report)] * 2
    reports = [(label, special_report)] * 2
    page = as_page(reports, title=label, pictures=pictures, more=[fit.section])
    result = browse(page, tmp_path)  # it fails if a script of a name runs
    paths = {text.removeprefix("parameter: ").removesuffix("/kernel") for text, *_ in result["infos"]}
    assert paths == {*SPECIAL}
    assert page.count("<script") == 3  # the data of both reports, and page.js
    computations = special_report.program.module.computations.values()
    modules = {module_path(ins.metadata.op_name) for computation in computations for ins in computation}
    assert {f"gradients/{name}" for name in SPECIAL} <= modules
    for picture in pictures[0].values():
        ElementTree.fromstring(picture)


@pytest.mark.matrix
def test_two_reports_side_by_side_in_a_browser(report, tmp_path):
    result = browse(as_page([("a", report), ("b", report)], title="two"), tmp_path)
    assert result["tensors"] > 10


@pytest.mark.pod
def test_the_page_of_the_largest_recipe_opens_quickly(pod, tmp_path):
    from meshpar.runs.recipe import build_model, build_optimizer, build_step

    recipe = load_recipe(ROOT / "recipes" / "llama3_405b.py", devices=1024)
    mesh, model = recipe.mesh.abstract(1024), build_model(recipe)
    state = mp.abstract_state(
        model,
        build_optimizer(recipe, model, mesh),
        mesh=mesh,
        strategy=recipe.strategy,
        precision=recipe.step.precision,
    )
    batch = recipe.data.batch_shapes(recipe.batch_size)
    report = mp.explain(build_step(recipe), state, batch, cluster="h100:128x8", pod=pod)
    result = browse(as_page([("405B", report)], title="405B"), tmp_path)
    assert result["opened_s"] < MOST_S
