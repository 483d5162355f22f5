"""`meshpar bench collectives`: rows, checks, tables, profiles and pictures; no time is asserted."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest

from meshpar import bench, plots
from meshpar.bench import collective_timing as kernels
from meshpar.hardware import cost_model as cost
from meshpar.hardware.clusters import Cluster, Link, Links, parse_cluster, parse_profile
from meshpar.hardware.collective_results import XLA, CollectiveRow, Collectives
from meshpar.hardware.link_fit import Fit
from tests.errors import raises

LINK = Link(alpha_s=2e-6, bytes_per_s=1e11)
QUICK = {"repeats": 2, "target_s": 1e-4}


def made(devices="cpu", **changes) -> Collectives:
    """A measurement whose times are the model's."""
    rows = [
        CollectiveRow(
            axis="data", num_ranks=8, collective=name, algorithm=algorithm, size_bytes=size, count=size // 4,
            dtype="float32", time_s=form(size, 8).time_s(LINK),
            low_s=0.9 * form(size, 8).time_s(LINK), high_s=1.5 * form(size, 8).time_s(LINK),
            ratio=None if algorithm == XLA else 2.5, wrong=0, max_error=0.0, predicted_s=form(size, 8).time_s(LINK),
        )
        for name, algorithms in {
            "all_reduce": {XLA: cost.ring_all_reduce, "ring": cost.ring_all_reduce, "tree": cost.tree_all_reduce},
            "all_gather": {XLA: cost.ring_all_gather, "ring": cost.ring_all_gather},
        }.items()
        for size in (10_000, 1_000_000, 100_000_000)
        for algorithm, form in algorithms.items()
    ]  # fmt: skip
    fits = [
        Fit(axis="data", of=of, link=LINK, typical_error=0.1, worst_error=0.5, num_points=9)
        for of in ("permutes", "axes")
    ]
    whole = {"mesh": {"data": 8, "tensor": 1}, "rows": tuple(rows), "fits": tuple(fits), "repeats": 5}
    return Collectives(**{"devices": devices, "notes": ("a note",), **whole, **changes})


@pytest.fixture(scope="module")
def measured():
    """Every collective by its quickest algorithms, over two devices."""
    return bench.collectives("data=2", algorithms=("ring", "recursive_doubling"), min_bytes=100, max_bytes=100, **QUICK)


def test_bench_has_a_row_for_each_algorithm_and_xla(measured):
    found = {(row.collective, row.algorithm, row.size_bytes) for row in measured.rows}
    ours = {
        "all_reduce": ("ring", "recursive_doubling"),
        "all_gather": ("ring", "recursive_doubling"),
        "reduce_scatter": ("ring",),
        "all_to_all": ("direct",),
    }
    sizes = 96, 104  # 100 bytes are 12.5 float32 per rank, which are rounded
    assert {(name, algorithm) for name, algorithm, _ in found} == {
        (name, algorithm) for name, algorithms in ours.items() for algorithm in (XLA, *algorithms)
    }
    assert {size for _, _, size in found} <= {*sizes}
    assert len(found) == len(measured.rows) == 3 + 3 + 2 + 2


def test_bench_rows_have_consistent_figures(measured):
    for row in measured.rows:
        assert (row.axis, row.num_ranks, row.dtype) == ("data", 2, "float32")
        assert 0 < row.low_s <= row.time_s <= row.high_s
        assert (row.ratio is None) == (row.algorithm == XLA)
        assert row.wrong == 0
        assert row.size_bytes == 4 * row.count
        assert row.algorithm_bytes_per_s == pytest.approx(row.size_bytes / row.time_s)
        factor = {"all_reduce": 1.0}.get(row.collective, 0.5)  # 2(N-1)/N and (N-1)/N for two ranks
        assert row.bus_bytes_per_s == pytest.approx(factor * row.algorithm_bytes_per_s)


def test_bench_fits_a_link_for_each_use(measured):
    assert [(fit.axis, fit.of) for fit in measured.fits] == [("data", "permutes"), ("data", "axes")]
    assert [fit.num_points for fit in measured.fits] == [6, 4]
    assert measured.devices == "cpu"
    assert any("share the cores" in note for note in measured.notes)


@pytest.mark.matrix
def test_bench_measures_joint_axes_and_two_levels():
    found = bench.collectives(
        "data=2,tensor=2", axes=["data*tensor"], names=["all_reduce", "all_to_all"], algorithms=["ring"],
        min_bytes=400, max_bytes=400, dtype="int32", **QUICK,
    )  # fmt: skip
    assert [(row.collective, row.algorithm) for row in found.rows] == [
        ("all_reduce", XLA), ("all_reduce", "ring"), ("all_reduce", "hierarchical"),
        ("all_to_all", XLA), ("all_to_all", "direct"), ("all_to_all", "hierarchical"),
    ]  # fmt: skip
    assert {(row.axis, row.num_ranks, row.wrong, row.max_error) for row in found.rows} == {("data*tensor", 4, 0, 0.0)}
    assert [fit.num_points for fit in found.fits] == [2, 2]  # two levels are two kinds of link


def test_bench_counts_wrong_values(monkeypatch):
    broken = {"all_reduce": lambda x, *, axis, algorithm: x * 1.5}
    monkeypatch.setattr(kernels.kernels, "all_reduce", broken["all_reduce"])
    found = bench.collectives("data=2", names=["all_reduce"], algorithms=["ring"], min_bytes=80, max_bytes=80, **QUICK)
    xla, ring = found.rows
    assert xla.wrong == 0
    assert ring.wrong > 20  # of 2 devices' 20 elements each
    assert ring.max_error > 0.1
    assert "1 rows have wrong values" in found.notes


def test_bench_rotates_the_first_algorithm():
    order = []

    def run(name):
        return lambda times: order.append((name, times)) or 1.0 + times

    found = kernels._in_turn({name: run(name) for name in "abc"}, repeats=3, target_s=0.0)
    rounds = [name for name, _ in order[-9:]]
    assert rounds == [*"abc", *"bca", *"cab"]
    assert {len(times) for times in found.values()} == {3}
    times = order[-1][1]
    # The time of a run without the collective is subtracted.
    assert found["a"] == [pytest.approx((1.0 + times - 1.0) / times)] * 3


def test_bench_sizes_grow_geometrically():
    assert kernels._sizes(1e3, 1e6, 10) == [1000, 10000, 100000, 1000000]
    assert kernels._sizes(8, 8, 2) == [8]
    assert kernels._sizes(1e3, 5e3, 2) == [1000, 2000, 4000]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"axes": ["dat"]}, "unknown-axis"),
        ({"axes": ["tensor"]}, "out-of-range"),
        ({"axes": ["data*data"]}, "axis-used-twice"),
        ({"names": ["all_gather"], "algorithms": ["tree"]}, "unknown-choice"),
        ({"mesh": "data=1"}, "out-of-range"),
        ({"names": ["all_reduced"]}, "unknown-choice"),
        ({"algorithms": ["rings"]}, "unknown-choice"),
        ({"dtype": "float31"}, "unknown-choice"),
        *((sizes, "out-of-range") for sizes in ({"min_bytes": 0}, {"min_bytes": 10, "max_bytes": 5}, {"factor": 1})),
        ({"max_bytes": 1e15}, "out-of-memory"),
    ],
)
def test_bench_rejects_invalid_arguments(options, code):
    with raises(code):
        bench.collectives(**{"mesh": "data=2", "repeats": 1, **options})


def test_profile_of_unknown_devices_has_links_only():
    profile = made().profile()
    assert isinstance(profile, Links)
    assert (profile.axes, profile.permutes) == ({"data": LINK}, {"data": LINK})
    assert "8 cpu devices, data=8" in profile.source
    assert "data permutes 10%" in profile.source


def test_profile_of_known_gpus_is_a_cluster():
    profile = made(devices="NVIDIA H100 80GB HBM3").profile()
    assert isinstance(profile, Cluster)
    assert (profile.name, profile.axes["data"]) == ("h100:1x8", LINK)
    assert profile.inside == parse_cluster("h100:1x8").inside


def test_profile_drops_links_without_a_fit():
    good, bad = made().fits
    bad = dataclasses.replace(bad, typical_error=3.0)
    profile = made(fits=(good, bad)).profile()
    assert (profile.axes, profile.permutes) == ({}, {"data": LINK})
    assert "along `data` (XLA's collectives), the typical error is 300%" in made(fits=(good, bad)).poor
    assert made().poor == ""
    for worse in (bad, dataclasses.replace(good, link=None)):
        with raises("bad-fit"):
            made(fits=(worse,)).profile()


def test_bench_prints_tables_and_json():
    found = made()
    shown = str(found)
    words = ("all_reduce over data=8", "all_gather over data=8", "2.50", "100 GB/s", "good", "a note", "1.76 MB")
    for word in words:
        assert word in shown
    data = json.loads(json.dumps(found.to_json()))
    assert len(data["rows"]) == len(found.rows)
    assert data["rows"][0]["bus_bytes_per_s"] == pytest.approx(found.rows[0].bus_bytes_per_s)
    assert data["crossover_bytes"] == {"data": cost.ring_tree_crossover_bytes(8, LINK)}
    assert data["fits"][0]["link"] == {"alpha_s": 2e-6, "bytes_per_s": 1e11}
    wrong = made(rows=(dataclasses.replace(found.rows[0], wrong=7, predicted_s=None),))
    assert " 7 " in str(wrong)


def test_bench_plot_shows_times_model_and_crossover():
    found = made()
    figure = plots.collectives(found)
    reduce, gather = figure.axes
    assert [panel.get_title("left") for panel in figure.axes] == ["all_reduce over data=8", "all_gather over data=8"]
    names = [text.get_text() for text in reduce.get_legend().get_texts()]
    assert names == [XLA, "ring", "tree"]
    ring = [row for row in found.rows if (row.collective, row.algorithm) == ("all_reduce", "ring")]
    lines = [np.asarray(line.get_xydata()) for line in reduce.lines]
    assert any(np.array_equal(line, [(row.size_bytes, row.time_s) for row in ring]) for line in lines)
    crossover = cost.ring_tree_crossover_bytes(8, LINK)
    assert any(np.allclose(line[:, 0], crossover) for line in lines)
    assert not any(np.allclose(line.get_xydata()[:, 0], crossover) for line in gather.lines)
    assert (reduce.get_xscale(), reduce.get_yscale()) == ("log", "log")
    assert any("1.76 MB" in text.get_text() for text in reduce.texts)
    far = made(fits=(dataclasses.replace(found.fits[0], link=Link(alpha_s=1.0, bytes_per_s=1e11)),))
    assert not plots.collectives(far).axes[0].texts


@pytest.fixture
def command(meshpar):
    return functools.partial(meshpar, "bench", "collectives")


def test_bench_command_forwards_its_options(command, monkeypatch, tmp_path):
    asked = {}

    def measure(mesh, **options):
        asked.update(options, mesh=mesh)
        return made()

    monkeypatch.setattr(kernels, "collectives", measure)
    profile, plot = tmp_path / "my.json", tmp_path / "plot.png"
    code, out, error = command(
        "--mesh", "data=2,tensor=4", "--axis", "data", "--axis", "data*tensor", "--collective", "all_reduce",
        "--algorithm", "ring", "--min-bytes", "4kB", "--max-bytes", "1MB", "--factor", 4, "--dtype", "bfloat16",
        "--repeats", 3, "--save", profile, "--plot", plot, "--json",
    )  # fmt: skip
    assert code == 0
    del asked["progress"]
    assert asked == {
        "mesh": "data=2,tensor=4", "axes": ("data", "data*tensor"), "names": ("all_reduce",), "algorithms": ("ring",),
        "min_bytes": 4e3, "max_bytes": 1e6, "factor": 4.0, "dtype": "bfloat16", "repeats": 3,
    }  # fmt: skip
    assert json.loads(out) == made().to_json()
    assert parse_profile(str(profile)) == made().profile()
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "saved" in error
    assert "model" not in error


def test_bench_warns_of_poor_fits_and_drops_useless_ones(command, monkeypatch, tmp_path):
    good, other = made().fits
    for typical_error, code, said in ((0.6, 0, "the typical error is 60%"), (2.0, 2, "no fit is usable")):
        fits = tuple(dataclasses.replace(fit, typical_error=typical_error) for fit in (good, other))
        monkeypatch.setattr(kernels, "collectives", lambda mesh, fits=fits, **options: made(fits=fits))
        profile = tmp_path / f"{code}.json"
        found_code, out, error = command("--save", profile)
        assert (found_code, profile.exists()) == (code, code == 0)
        assert said in error
        assert "all_reduce over data=8" in out  # the finished measurements are printed


def test_bench_command_runs_on_devices(command):
    code, out, _ = command(
        "--mesh", "data=2", "--collective", "all_gather", "--algorithm", "ring", "--min-bytes", 80, "--max-bytes", 80,
        "--repeats", 1, "--json",
    )  # fmt: skip
    assert code == 0
    assert [row["algorithm"] for row in json.loads(out)["rows"]] == [XLA, "ring"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--min-bytes", "x"], "not a number of bytes up to"),
        (["--save", "nowhere/my.json"], "there is no folder"),
        (["--save", "links"], "its name must end in .json. Name it links.json"),
        (["--plot", "times.foo"], "Name it times.png"),
        (["--mesh", "data=2", "--axis", "dat"], "Did you mean `data`"),
    ],
)
def test_bench_command_errors_are_one_paragraph(command, monkeypatch, tmp_path, args, says):
    monkeypatch.chdir(tmp_path)
    code, out, error = command(*args)
    assert (code, out) == (2, "")
    assert says in error


def test_explain_rejects_a_profile_without_a_gpu(meshpar, tmp_path):
    made().profile().save(tmp_path / "my.json")
    code, _, error = meshpar("explain", "none.py", "--cluster", tmp_path / "my.json")
    assert code == 2
    assert "links measured on `cpu` devices, and no GPU" in error
