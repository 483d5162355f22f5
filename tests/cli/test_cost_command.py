"""Test the output, links and errors of `meshpar cost`."""

from __future__ import annotations

import functools
import json

import pytest

from meshpar.hardware.clusters import Link, Links


@pytest.fixture
def meshpar(meshpar):
    return functools.partial(meshpar, "cost")


def quantity(name, code, out, error=""):
    assert (code, error) == (0, "")
    return {row[0]: row[1] for row in json.loads(out)["rows"]}.get(name)


def test_an_algorithm_shows_its_terms(meshpar):
    code, out, error = meshpar("ring", "--ranks", 8, "--bytes", "14e9")
    assert (code, error) == (0, "")
    for shown in (
        "24.5 GB",
        "2(N−1) α + 2(N−1)/N · n β",
        "54.47 ms",
        "within a node",
        "links: h100:8x8, data-sheet links",
    ):
        assert shown in out


def test_json(meshpar):
    code, out, _ = meshpar("ring", "--ranks", 64, "--bytes", "14GB", "--json")
    found = json.loads(out)
    assert code == 0
    values = {name: value for name, value, *_ in found["rows"]}
    assert (values["steps"], values["bytes sent per rank"]) == (126, 27.5625e9)
    assert values["time"] == pytest.approx(values["latency"] + values["bandwidth"])


def test_all_reduce_algorithms_are_compared(meshpar):
    code, out, _ = meshpar("--ranks", 64, "--json")
    names = [name for name, _, _, formula in json.loads(out)["rows"] if "α" in formula]
    assert code == 0
    assert set(names) == {
        "ring", "recursive-doubling", "halving-doubling", "tree", "hierarchical", "root", "parameter-server",
    }  # fmt: skip
    _, out, _ = meshpar("--json")
    assert "hierarchical" not in out  # one node
    _, out, _ = meshpar("--ranks", 12, "--inner", 4, "--alpha", "1e-6", "--bandwidth", "1e9")
    assert "hierarchical" in out


def test_gamma_is_a_number_or_a_gpu(meshpar):
    def reduction_s(*args):
        return quantity("reduction", *meshpar("ring", "--bytes", "8e9", "--cluster", "h100:8", *args, "--json"))

    assert reduction_s() is None
    assert reduction_s("--gamma", "1e-12") == pytest.approx(7e9 * 1e-12)
    assert reduction_s("--gamma", "h100") == pytest.approx(7e9 * 3 / 3.35e12)
    _, out, _ = meshpar("--gamma", "h100")
    assert " γ " in out


def test_links_from_options_and_from_a_profile(meshpar, tmp_path):
    _, out, _ = meshpar("message", "--bytes", "1MB", "--alpha", "1e-3", "--bandwidth", "1e9", "--json")
    assert quantity("time", 0, out) == pytest.approx(2e-3)
    profile = tmp_path / "my.json"
    Links(devices="cpu", axes={"data": Link(alpha_s=3e-3, bytes_per_s=1e9)}).save(profile)
    _, out, _ = meshpar("message", "--bytes", "1MB", "--cluster", profile, "--axis", "data", "--json")
    assert quantity("time", 0, out) == pytest.approx(4e-3)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ring", "--ranks", "0"], "set ranks=0: it is a number of ranks and must be an integer of at least 1"),
        (["ring", "--bytes", "many"], "Write 14e9, 14GB or 256kB"),
        (["rings"], "Did you mean `ring`"),
        (["--ranks", "12", "--inner", "5"], "5 does not divide 12"),
        (["ring", "--alpha", "1e-6"], "only one of them is set"),
        (["ring", "--alpha", "1e-6", "--bandwidth", "1", "--cluster", "h100:8"], "--cluster is also set"),
        (["ring", "--alpha", "-1", "--bandwidth", "1"], "cannot set --alpha=-1.0"),
        (["ring", "--alpha", "1", "--bandwidth", "0"], "cannot set --bandwidth=0.0"),
        (["ring", "--alpha", "1e10", "--bandwidth", "1"], "latencies are from 0 to 1e+09 s"),
        (["ring", "--bytes", "1e308"], "it is not a number of bytes up to 1e+24"),
        (["ring", "--cluster", "h1000:8"], "Did you mean `h100`"),
        (["ring", "--cluster", "none.json"], "Use the path of a saved profile"),
        (["ring", "--inner", "4"], "use --inner: it is an option of hierarchical"),
        (["tree", "--servers", "4"], "use --servers: it is an option of parameter-server"),
        (["ring", "--gamma", "h1000"], "Did you mean `h100`"),
        (["ring", "--gamma", "-1"], "cannot set --gamma=-1.0: it must be a finite number of at least 0"),
        (["ring", "--gamma", "nan"], "cannot set --gamma=nan"),
        (["ring", "--axis", "data"], "only the links of a profile have axes"),
        (["ring", "--cluster", ""], "`--cluster`: cannot use it: its value is empty"),
    ],
)
def test_errors_are_one_line(meshpar, args, message):
    code, out, error = meshpar(*args)
    assert (code, out) == (2, "")
    assert message in error
    assert error.count("\n") == 1
