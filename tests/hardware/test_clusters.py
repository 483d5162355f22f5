"""Clusters by name and by profile, node crossings, and the catalogue's completeness."""

from __future__ import annotations

import dataclasses
import json
import re
import types

import pytest

from meshpar.hardware import clusters as hardware
from meshpar.hardware.catalogue import GPUS, Gpu
from meshpar.hardware.clusters import Cluster, Link, parse_cluster, peak_flops_per_s
from meshpar.hardware.kernel_rates import AttentionSize
from tests.errors import raises

FIGURES = [
    field.name for field in dataclasses.fields(Gpu) if field.name.endswith(("_per_s", "_bytes")) or field.name == "chip"
]


def test_parse_cluster_reads_gpu_nodes_and_gpus_per_node():
    cluster = parse_cluster("h100:8x4")
    assert (cluster.nodes, cluster.gpus_per_node, cluster.num_devices) == (8, 4, 32)
    assert cluster.name == "h100:8x4"
    assert cluster.inside == Link(alpha_s=1.9e-6, bytes_per_s=450e9)
    assert cluster.across == Link(alpha_s=4.0e-6, bytes_per_s=50e9)
    assert cluster.across.beta_s_per_byte == pytest.approx(2e-11)


def test_parse_cluster_accepts_short_names():
    assert parse_cluster("H200:8").name == "h200:1x8"
    assert parse_cluster("a100:2x8").gpu.name == "a100-80"
    same = parse_cluster("l40s:1x2")
    assert parse_cluster(same) is same


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *((text, "bad-syntax") for text in ("h100", "h100:", "h100:8x", "8x8", "", "h100:8x8x8", "h100:-1x8")),
        ("h100:0x8", "out-of-range"),
        ("h1000:1x8", "unknown-name"),
        *((wrong, "wrong-type") for wrong in (8, None, ("h100", 8))),
        ("nowhere.json", "missing-file"),
    ],
)
def test_parse_cluster_rejects_invalid_clusters(text, code):
    with raises(code):
        parse_cluster(text)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
@pytest.mark.parametrize("figure", FIGURES)
def test_catalogue_figures_have_a_source_and_a_date(gpu, figure):
    assert any(figure in figures.split() for figures, _, _ in gpu.sources), f"{gpu.name}.{figure}"


def test_catalogue_figures_are_consistent_si_units():
    for gpu in GPUS.values():
        assert 1e14 < gpu.bf16_flops_per_s < 1e16
        assert gpu.fp32_flops_per_s < gpu.bf16_flops_per_s
        assert 1e10 < gpu.memory_bytes < 1e12
        assert gpu.nic_bytes_per_s < gpu.link_bytes_per_s < gpu.memory_bytes_per_s
        # The float32 peak is two FLOPs a unit and cycle: the sheet and the chip's description have to agree on it.
        chip = gpu.chip
        assert gpu.fp32_flops_per_s == pytest.approx(2 * chip.num_cores * chip.fpus_per_core * chip.clock_hz, rel=0.02)


def test_peak_flops_of_a_device_kind():
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops_per_s("NVIDIA H200", "float16") == 989.4e12
    assert peak_flops_per_s("NVIDIA A100-SXM4-40GB", "float32") == 19.5e12
    for unknown in ("cpu", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert peak_flops_per_s(unknown) is None
    assert peak_flops_per_s("NVIDIA H200", "int8") is None


def test_groups_cross_node_for_arbitrary_groups():
    cluster = parse_cluster("h100:2x4")
    assert not cluster.groups_cross_node([(0, 3), (4, 7)])
    assert cluster.groups_cross_node([(0, 1), (3, 4)])


SLOW, FAST, MESSAGE = (
    Link(alpha_s=9e-6, bytes_per_s=1e9),
    Link(alpha_s=1e-6, bytes_per_s=9e9),
    Link(alpha_s=5e-6, bytes_per_s=3e9),
)
MEASURED = dataclasses.replace(
    parse_cluster("h100:2x4"), axes={"data": SLOW, "tensor": FAST}, permutes={"tensor": MESSAGE}
)


@pytest.mark.parametrize(
    "cluster",
    [
        MEASURED,
        dataclasses.replace(parse_cluster("h100:8x8"), across=Link(alpha_s=7e-6, bytes_per_s=4.1e10)),
        hardware.cluster_of(
            dataclasses.replace(GPUS["h100"], name="h800", link_bytes_per_s=200e9), nodes=2, gpus_per_node=8
        ),
    ],
)
def test_profile_round_trip(tmp_path, cluster):
    cluster.save(tmp_path / "mine.json")
    found = parse_cluster(str(tmp_path / "mine.json"))
    assert found == cluster
    assert hash(found) == hash(cluster)
    with raises("missing-file"):
        cluster.save(tmp_path / "no" / "where.json")


def test_profile_defaults_come_from_the_catalogue(tmp_path):
    (tmp_path / "c.json").write_text('{"gpu": "h200", "nodes": 4, "gpus_per_node": 8, "across": {"bytes_per_s": 2e10}}')
    cluster = parse_cluster(str(tmp_path / "c.json"))
    assert cluster.across == Link(alpha_s=4e-6, bytes_per_s=2e10)
    assert cluster.inside == parse_cluster("h200:1x8").inside


CLUSTER = {"gpu": "h100", "nodes": 1, "gpus_per_node": 8}


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"acros": {}}, "damaged-file"),
        ({"gpu": 1.9}, "unknown-name"),
        *(({name: 1.9}, "out-of-range") for name in ("nodes", "gpus_per_node")),
        ({"gpu": {"name": "x"}}, "damaged-file"),
        ({"nodes": True}, "out-of-range"),
        ({"gpus_per_node": float("inf")}, "out-of-range"),
        ({"nodes": 10**400}, "out-of-range"),
        ({"gpus_per_node": 1_000_000}, "out-of-range"),
        *(({"across": {"alpha_s": value}}, "out-of-range") for value in (1e308, float("nan"), float("inf"))),
        *(({"across": {"bytes_per_s": value}}, "out-of-range") for value in (0, float("inf"))),
        ({"across": {"bandwidth": 1}}, "damaged-file"),
        ({"across": {"alpha_s": "2e-6"}}, "damaged-file"),
        ({"launch_s": "2e-6"}, "damaged-file"),
        *(({"launch_s": value}, "out-of-range") for value in (2.5, -1e-6)),
        *(({"copy_bytes_per_s": value}, "out-of-range") for value in (-1.0, float("nan"))),
        *(({"products_fp8": {"8192": rate}}, "damaged-file") for rate in (0, -1, float("nan"), "fast")),
        *(
            ({"attention": {key: {"8192": 1e14}}}, "damaged-file")
            for key in ("cudnn", "cudnn forward causal x", "cudnn sideways causal 128")
        ),
        ({"attention": {"cudnn forward causal 128": {}}}, "damaged-file"),
        ({"grouped": {"triton columns": {"2048": 1e14}}}, "damaged-file"),
        *(({"shapes": shapes}, "damaged-file") for shapes in ({"64x32x16": 1e14}, {"16 bits 64x32x16": -1e14})),
    ],
)
def test_cluster_profile_rejects_invalid_fields(wrong, code):
    with raises(code):
        Cluster.from_json({**CLUSTER, **wrong})


def test_older_profile_has_its_rates(tmp_path):
    """Before kernels had rates by size, a GPU in a profile had a pair of rates per library."""
    gpu = json.loads(json.dumps(dataclasses.asdict(GPUS["h100"])))
    for field in ("attention", "grouped", "matmul_rates", "memory_efficiency"):
        del gpu[field]
    gpu |= {"attention_rates": [529e12, 518e12], "mosaic_rates": [620e12, 438e12], "triton_rates": None}
    (tmp_path / "old.json").write_text(json.dumps({**CLUSTER, "gpu": gpu, "products": {"8192": 7e14}}))
    rates = parse_cluster(str(tmp_path / "old.json")).rates
    assert rates.attention_flops_per_s("cudnn") == (529e12, 518e12)
    assert rates.attention_flops_per_s("mosaic") == (620e12, 438e12)
    assert rates.attention_flops_per_s("triton") == GPUS["h100"].attention_flops_per_s("triton")
    assert rates.memory_bytes_per_s == gpu["memory_bytes_per_s"]
    assert rates.share_of_peak(2 * 8192**3, bits=8) == rates.share_of_peak(2 * 8192**3)


@pytest.mark.parametrize(("kernel", "size", "forward", "backward"), [
    ("cudnn", AttentionSize(128, 8192), 629e12, 518e12 * 438 / 488),  # Mosaic's ratio of causal to unmasked
    ("cudnn", AttentionSize(128, 8192, is_causal=False), 692e12, 518e12),
    ("mosaic", AttentionSize(64, 1024), 273e12, 209e12),
    ("mosaic", AttentionSize(96, 1024), 388e12, 288e12),  # the nearest head size is 128
    ("triton", AttentionSize(256, 65_536), 323e12, 208e12),  # beyond the measured lengths
    ("mosaic", AttentionSize(128, 5793), (574e12 + 620e12) / 2, (403e12 + 438e12) / 2),  # √2 times 4,096
])  # fmt: skip
def test_attention_rates_depend_on_length_head_size_and_mask(kernel, size, forward, backward):
    assert GPUS["h100"].attention_flops_per_s(kernel, size) == (
        pytest.approx(forward, rel=2e-3), pytest.approx(backward, rel=2e-3),
    )  # fmt: skip
    b200 = GPUS["b200"]  # without rates, the fractions of the peak of an H100
    scale = b200.bf16_flops_per_s / GPUS["h100"].bf16_flops_per_s
    assert b200.attention_flops_per_s(kernel, size)[0] == pytest.approx(scale * forward, rel=2e-3)
    assert not b200.has_attention_rates(kernel)
    assert GPUS["h100"].has_attention_rates(kernel)


def test_large_matmuls_and_copies_of_an_h100_have_measured_rates():
    gpu, rates = GPUS["h100"], parse_cluster("h100:1x1").rates
    assert rates.memory_bytes_per_s == pytest.approx(3.0e12, rel=1e-3)
    assert gpu.matmul_rates == (798e12, 1507e12)
    assert gpu.fp8_efficiency == pytest.approx((1507 / 1978.8) / (798 / 989.4))
    assert rates.product_flops_per_s(8, 1e12) == pytest.approx(0.65 * gpu.fp8_efficiency * gpu.fp8_flops_per_s)
    best = parse_cluster("h100:1x1").best_rates
    assert best.product_flops_per_s(8, 1e12) == gpu.fp8_flops_per_s
    assert best.memory_bytes_per_s == gpu.memory_bytes_per_s


@pytest.mark.parametrize("text", ["{}", "[1]", '{"gpu": "h100", "nodes": 1}'])
def test_cluster_profile_rejects_missing_fields(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with raises("damaged-file"):
        parse_cluster(str(tmp_path / "c.json"))


def test_measured_returns_the_link_of_an_axis():
    assert MEASURED.measured(["tensor"]) == FAST
    assert MEASURED.measured(["tensor"], permute=True) == MESSAGE
    assert MEASURED.measured(["data"], permute=True) == SLOW  # the link that XLA's collectives measured
    assert MEASURED.measured(["fsdp"]) is None
    assert MEASURED.measured([]) is None


def test_measured_combines_the_slowest_links_of_axes():
    assert MEASURED.measured(["data", "tensor"]) == Link(alpha_s=9e-6, bytes_per_s=1e9)
    assert MEASURED.measured(["data", "fsdp"]) is None
    both = dataclasses.replace(MEASURED, axes={**MEASURED.axes, "data*tensor": MESSAGE})
    assert both.measured(["data", "tensor"]) == MESSAGE


def test_links_profile_is_not_a_cluster(tmp_path):
    path = str(tmp_path / "cpu.json")
    links = hardware.Links(devices="cpu", axes={"data": SLOW}, permutes={"data": MESSAGE})
    links.save(path)
    assert hardware.parse_profile(path) == links
    assert hardware.parse_profile(links) is links
    assert links.measured(["data"], permute=True) == MESSAGE
    for asked in (path, links):
        with raises("wrong-type"):
            parse_cluster(asked)


def test_host_device_links_apply_to_any_axis():
    default = hardware.HOST_DEVICES
    assert default.measured(["data"], permute=True) == default.measured(["a", "b"], permute=True)
    assert hardware.Links.from_json(default.to_json()) == default
    assert re.search(r"meshpar bench collectives .*\d{4}-\d\d-\d\d", default.source)
    own = hardware.Links(devices="cpu", axes={"data": SLOW, hardware.ANY: FAST})
    assert (own.measured(["data"]), own.measured(["tensor"])) == (SLOW, FAST)
    assert own.name == "cpu links of data, any axis"


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"axes": [1]}, "damaged-file"),
        ({"axes": {"data": {"alpha_s": 1e-6}}}, "damaged-file"),
        ({"axes": {"data": 3}}, "damaged-file"),
        ({"permutes": {"data": {"alpha_s": "1", "bytes_per_s": 1e9}}}, "damaged-file"),
        ({"axes": {"data": {"alpha_s": -1, "bytes_per_s": 1e9}}}, "out-of-range"),
        ({"axis": {}}, "damaged-file"),
    ],
)
def test_profile_rejects_malformed_axis_links(wrong, code):
    for kind, data in ((Cluster, CLUSTER), (hardware.Links, {"devices": "cpu"})):
        with raises(code):
            kind.from_json({**data, **wrong})


def test_cluster_layout_counts_nodes_and_ranks_per_node():
    cluster = parse_cluster("h100:2x4")
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    crossing = {axes: cluster.crosses_node(axes.split(), mesh) for axes in ("tensor", "fsdp tensor", "data", "")}
    assert crossing == {"tensor": False, "fsdp tensor": False, "data": True, "": False}
    assert cluster.layout(["tensor"], mesh) == (1, 2)
    assert cluster.layout(["fsdp", "tensor"], mesh) == (1, 4)
    assert cluster.layout(["data"], mesh) == (2, 1)
    assert cluster.layout(["data", "tensor"], mesh) == (2, 2)
    assert parse_cluster("h100:3x2").layout(["tensor"], {"data": 2, "tensor": 3}) == (2, 1)
    # One group is in a node, and the other has one device in the first node.
    assert parse_cluster("h100:2x4").layout(["tensor"], {"data": 2, "tensor": 3}) == (2, 1)
    assert cluster.layout([], mesh) == (1, 1)
    with raises("unknown-axis"):
        cluster.layout(["tensr"], mesh)
    with raises("out-of-range"):
        cluster.layout(["data"], {"data": 16})


def test_local_gpus_have_the_rates_of_a_profile_for_the_same_gpu(tmp_path, monkeypatch):
    file = tmp_path / "my.json"
    profile = dataclasses.replace(parse_cluster("h100:4x8"), products={1024: 3e14}, source="measured")
    profile.save(file)
    monkeypatch.setenv(hardware.VARIABLE, str(file))
    here = {
        name: hardware.cluster_here(
            [types.SimpleNamespace(device_kind=GPUS[name].device_kinds[0], process_index=0)] * 2
        )
        for name in ("h100", "a100")
    }
    assert here["h100"] == dataclasses.replace(profile, nodes=1, gpus_per_node=2)
    assert here["a100"] == parse_cluster("a100:1x2")
    monkeypatch.delenv(hardware.VARIABLE)
    assert hardware.cluster_here([types.SimpleNamespace(device_kind="cpu", process_index=0)]) is None
