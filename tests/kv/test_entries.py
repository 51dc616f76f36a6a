"""Keys and values in int8 are within half a step of the numbers, per token and head."""

from __future__ import annotations

import pytest
import torch

from forethought.kv.entries import from_entries, to_entries
from forethought.kv.storage import KvStorage, LayerShape


def test_an_int8_entry_is_within_half_a_step_of_its_numbers() -> None:
    x = torch.randn(50, 3, 24) * torch.logspace(-30, 30, 50)[:, None, None]
    found = from_entries(to_entries(x, torch.int8), torch.float32)
    half_a_step = x.abs().amax(-1, keepdim=True) / 127 / 2
    assert ((found - x).abs() <= half_a_step * (1 + 1e-4)).all()


def test_an_entry_of_zeros_is_read_as_zeros() -> None:
    assert not from_entries(to_entries(torch.zeros(2, 8), torch.int8), torch.float32).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_int8_entry_that_is_not_finite_is_read_as_nan_and_others_are_not(bad: float) -> None:
    x = torch.ones(2, 8)
    x[0, 3] = bad
    found = from_entries(to_entries(x, torch.int8), torch.float32)
    assert found[0].isnan().all()
    assert torch.equal(found[1], x[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_what_is_gathered_is_what_was_written_but_for_its_rounding(dtype: torch.dtype) -> None:
    storage = KvStorage([LayerShape(2, 8, 6)], 3, 4, stored_dtype=dtype)
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 6)
    storage.write(0, torch.arange(4, 8), k, v)
    keys, values = storage.gather(torch.tensor([1]))
    for found, x in ((keys[0], k), (values[0], v)):
        assert found.dtype == torch.float32
        assert torch.equal(found, from_entries(to_entries(x, dtype), torch.float32))


def test_a_page_in_int8_takes_a_byte_per_number_and_four_per_head() -> None:
    storage = KvStorage([LayerShape(2, 8, 6)], 3, 4, stored_dtype=torch.int8)
    assert storage.bytes_per_page == 4 * 2 * ((8 + 4) + (6 + 4))
    assert storage.bytes_per_page * 3 == storage.keys[0].nbytes + storage.values[0].nbytes
