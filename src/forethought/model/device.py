"""What a caller calls a device, as torch's."""

from __future__ import annotations

import torch

from forethought.errors import ParameterError


def find_device(name: str) -> torch.device:
    """The device of that name; ``auto``: CUDA where torch has it, else the CPU.

    Raises:
        ParameterError: there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ParameterError("invalid device", str(error), "Use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ParameterError(f"device {name}", "torch finds no CUDA device", "Use cpu")
    return device
