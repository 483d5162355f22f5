"""Numbers with SI prefixes: formatting and parsing."""

from __future__ import annotations

import pytest

from meshpar.sharding.units import (
    human_bytes,
    human_count,
    human_flops,
    human_time,
    parse_bytes,
    parse_count,
    prefix_of,
    si,
)
from tests.errors import raises


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (human_bytes, 0, "0 B"),
        (human_bytes, 12.7, "13 B"),
        (human_bytes, 999, "999 B"),
        (human_bytes, 1000, "1 kB"),
        (human_bytes, 999_600, "1 MB"),
        (human_bytes, 2**20, "1.05 MB"),
        (human_bytes, 1.5e9, "1.5 GB"),
        (human_bytes, 4.2e15, "4.2 PB"),
        (human_time, 1.2499, "1.25 s"),
        (human_time, 0.038, "38 ms"),
        (human_flops, 312.4e12, "312 TFLOP"),
        (human_count, 0.25, "0.25"),
        (human_count, 999.7, "1k"),
        (human_count, 41_234, "41.2k"),
        (human_count, 3e12, "3T"),
    ],
)
def test_formatters_write_three_digits(write, value, text):
    assert write(value) == text


def test_prefix_of():
    assert prefix_of(999.99) == ("k", 1e3)
    assert prefix_of(999.99, digits=15) == ("", 1.0)
    assert prefix_of(0.002, minimum=0.0) == ("m", 1e-3)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (27.5625e9, "B", "27.56 GB"),
        (0, "s", "0 s"),
        (1.9e-6, "s", "1.9 µs"),
        (2.2222e-12, "s", "2.222 ps"),
        (999.99e-6, "s", "1 ms"),
        (0.5, "B", "0.5 B"),
        (12, "B", "12 B"),
        (4.5e11, "B/s", "450 GB/s"),
        (float("inf"), "B/s", "inf B/s"),
        (12345e12, "B", "12.35 PB"),
    ],
)
def test_si(value, unit, text):
    assert si(value, unit) == text


@pytest.mark.parametrize(
    ("text", "value"), [("14e9", 14e9), ("14GB", 14e9), ("256 kB", 256e3), ("1.5m", 1.5e6), ("-5", -5), ("8B", 8)]
)
def test_parse_bytes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "x", "4KiB", "1.2.3", "GB", "1e", "1e400", "1e308", "nan"])
def test_parse_bytes_refuses_other_texts(text):
    with raises("bad-syntax", f"`{text}`"):
        parse_bytes(text)


def test_parse_bytes_refuses_values_below_the_minimum():
    with raises("bad-syntax", "`0`"):
        parse_bytes("0", minimum=1)


@pytest.mark.parametrize(("text", "count"), [("64", 64), (70e9, 70 * 10**9), ("1.1B", 1_100_000_000), ("4k", 4000)])
def test_parse_count(text, count):
    assert parse_count(text, "x") == count


@pytest.mark.parametrize("text", ["", "0", "1.5", "1e19", "-1", "1..2", 2.5])
def test_parse_count_refuses_other_values(text):
    with raises("not-an-int", "x"):
        parse_count(text, "x")
