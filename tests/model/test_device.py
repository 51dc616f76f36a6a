"""A device by its name, or the reason why there is none."""

import pytest
import torch

from forethought.errors import ParameterError
from forethought.model.device import find_device


def test_the_cpu_is_always_there():
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type in ("cpu", "cuda")


def test_what_is_no_device_is_refused():
    with pytest.raises(ParameterError, match="Use cpu, cuda or cuda:N"):
        find_device("zzz")


def test_cuda_is_refused_where_torch_finds_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto").type == "cpu"
    with pytest.raises(ParameterError, match="no CUDA device"):
        find_device("cuda:1")
