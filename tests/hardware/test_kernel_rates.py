"""Interpolation of kernel rates, and the rates of the catalogue against tokamax's tuning files."""

from __future__ import annotations

from importlib import metadata

import pytest

from meshpar.hardware.catalogue import GPUS
from meshpar.hardware.grouped_kernels import BY_GENERATION, fastest
from meshpar.hardware.kernel_rates import AttentionSize, attention_rate, interpolated
from tests.measure import kernel_rates as script


def test_rates_are_linear_in_the_logarithm_and_constant_beyond_the_sizes():
    rates = {1024: 2.0, 4096: 6.0}
    assert [interpolated(rates, size) for size in (1, 1024, 2048, 4096, 10**9)] == pytest.approx([2, 2, 4, 6, 6])


def test_rate_of_the_other_mask_is_corrected_by_mosaics_ratio():
    reference = {"mosaic forward causal 128": {1024: 3.0}, "mosaic forward full 128": {1024: 4.0}}
    table, size = {"cudnn forward full 128": {1024: 8.0}}, AttentionSize(128, 1024)
    assert attention_rate(table, "cudnn", "forward", size, reference) == 6.0
    assert attention_rate(table, "cudnn", "forward", size, {}) == 8.0
    assert attention_rate(table, "cudnn", "backward", size, reference) is None


def test_table_of_kernels_has_the_fastest_of_an_h100():
    """All medians of the tuning files agree with the table."""
    assert fastest(GPUS["h100"].grouped) == BY_GENERATION[9]._asdict()


def test_catalogue_has_the_rates_of_tokamax():
    pytest.importorskip("tokamax", reason="needs Python 3.12 and `pip install tokamax`")
    text = script.FILE.read_text(encoding="utf-8")
    if f"tokamax {metadata.version('tokamax')}," not in text:
        pytest.skip("another version of tokamax")
    assert script.written() == text
