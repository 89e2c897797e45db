"""Randomness as a function of what it is for."""

import hashlib
import random

import numpy as np
import torch


def seed_from(*parts: str | int) -> int:
    """Hashes what identifies a random draw, e.g. ("augment", seed, epoch), to 63 bits."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds torch's, Python's and NumPy's generators, torch's on the CPU and on `device`.

    The same draws as after torch.manual_seed, which also takes a note of where it was called from,
    once for each kind of device that is not there (_lazy_call in torch/cuda, xpu and mtia): 0.1 ms.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
