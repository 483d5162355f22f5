"""Assertions about errors that users see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from meshpar.sharding.errors import MeshparError


@contextlib.contextmanager
def raises(code: str, where: str = "") -> Iterator[pytest.ExceptionInfo[MeshparError]]:
    """Check that a block raises a `MeshparError` with this code, whose `where` contains a text."""
    with pytest.raises(MeshparError) as error:
        yield error
    assert error.value.code == code, f"{error.value.code}: {error.value}"
    assert where in error.value.where, str(error.value)
    assert all((error.value.where, error.value.requested, error.value.reason, error.value.fix))
