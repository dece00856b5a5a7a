"""A fixture for the mathematics: numbers are float64 unless a test says otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def numbers_of(dtype: torch.dtype) -> Iterator[None]:
    """Numbers are of this type unless a test says otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True, scope="module")
def float64() -> Iterator[None]:
    with numbers_of(torch.float64):
        yield
