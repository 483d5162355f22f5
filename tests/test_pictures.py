"""Figures of the notebooks show the points and devices of their data."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import matplotlib
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp

sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))
import pictures

MESH = mp.MeshSpec(fsdp=4, tensor=2)


def texts(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def devices_named(figure) -> list[int]:
    """Every device number written on a picture, in order."""
    return sorted(int(number) for text in texts(figure) for number in re.findall(r"\d+", text))


@pytest.mark.parametrize(
    ("spec", "shape"),
    [(P("fsdp", "tensor"), (8, 6)), (P(None, "tensor"), (4, 4)), (P(), (4, 4)), (P("fsdp"), (8,)), (P(), ())],
)
def test_every_device_is_shown_once(spec, shape):
    figure = pictures.sharding(spec, shape, MESH.abstract())
    assert devices_named(figure) == list(range(8))


def test_devices_are_at_the_position_of_their_shard():
    mesh = MESH.build()
    spec, shape = P(("tensor", "fsdp"), None), (16, 4)
    rows_of = {
        device.id: index[0].start for device, index in NamedSharding(mesh, spec).devices_indices_map(shape).items()
    }
    figure = pictures.sharding(spec, shape, mesh)
    for text in figure.axes[0].texts:
        (device,) = map(int, re.findall(r"\d+", text.get_text()))
        assert rows_of[device] == int(text.get_position()[1]) * 2  # eight pieces of two rows


def test_a_cell_lists_the_devices_of_other_sharded_dims():
    mesh = mp.MeshSpec(data=2, fsdp=2, tensor=2).abstract()
    figure = pictures.sharding(P("data", "fsdp", "tensor"), (4, 8, 8), mesh, names=("batch", "seq", "act_embed"))
    (axes,) = figure.axes
    assert devices_named(figure) == list(range(8))
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("seq (8) over fsdp", "act_embed (8) over tensor")


def test_many_devices_are_counted_instead_of_named():
    figure = pictures.sharding(P("fsdp"), (512,), mp.MeshSpec(fsdp=32, tensor=8).abstract())
    assert set(texts(figure)) == {"8 dev."}


def test_pictures_have_one_style_and_can_be_saved(tmp_path):
    with matplotlib.rc_context({"axes.titlecolor": "red"}):
        figure = pictures.sharding(P("fsdp", "tensor"), (8, 6), MESH.abstract())
    assert not figure.axes[0].spines["top"].get_visible()
    assert figure.axes[0].xaxis.label.get_color() == pictures.INK
    figure.savefig(tmp_path / "shards.png")
    assert (tmp_path / "shards.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("log", [False, True])
def test_curves_are_the_values_given(log):
    measured, expected = {"fixed": [1.0, 2.0], "capacity": [3.0, 4.0]}, {"fixed": [1.5, 2.5], "ragged": [0.5, 0.6]}
    figure = pictures.curves(
        [1, 2], measured, expected, x_label="k", y_label="bytes", title="sent", healthy=1.3, log=log, x_unit="B",
        marks={"capacity = fixed": 1.5},
    )  # fmt: skip
    (axes,) = figure.axes
    *lines, mark = axes.lines
    drawn = {line.get_label(): list(line.get_ydata()) for line in lines}
    assert drawn == measured | {"_fixed, by formula": [1.5, 2.5], "ragged, by formula": [0.5, 0.6]}
    assert lines[0].get_color() == lines[2].get_color()
    assert list(mark.get_xdata()) == [1.5, 1.5]
    assert "capacity = fixed\n1.5 B" in texts(figure)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fixed", "capacity", "ragged, by formula"]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title("left")) == ("k", "bytes", "sent")
    assert axes.get_xscale() == axes.get_yscale() == ("log" if log else "linear")
    (band,) = axes.patches
    assert band.get_y() + band.get_height() == 1.3


def test_curves_of_schedules_share_a_name_where_they_coincide():
    curves = {"gpipe": [0.4, 0.3], "1f1b": [0.4, 0.3], "zb-v": [0.1, 0.0], "mine": [0.1, 0.001]}
    figure = pictures.schedule_curves([4, 8], {"bubble": curves, "memory": {"1f1b": [4, 4]}})
    bubble, memory = figure.axes
    assert [list(line.get_ydata()) for line in bubble.get_lines()] == [[0.4, 0.3], [0.1, 0.0], [0.1, 0.001]]
    assert [text.get_text() for text in bubble.get_legend().get_texts()] == ["gpipe, 1f1b", "zb-v", "mine"]
    assert memory.get_title(loc="left") == "memory"
