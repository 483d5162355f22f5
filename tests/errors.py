"""Assertions about errors that users see."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshpar.sharding.errors import MeshparError

CODES = tomllib.loads((Path(__file__).parents[1] / "docs" / "error_codes.toml").read_text())
"""Cause and fix of each error code."""


@contextlib.contextmanager
def raises(code: str, where: str = "") -> Iterator[pytest.ExceptionInfo[MeshparError]]:
    """Check that a block raises a `MeshparError` with this code, whose `where` contains a text."""
    with pytest.raises(MeshparError) as error:
        yield error
    assert code in CODES, f"describe {code} in docs/error_codes.toml"
    assert error.value.code == code, f"{error.value.code}: {error.value}"
    assert where in error.value.where, str(error.value)
    assert all((error.value.where, error.value.reason, error.value.fix))
