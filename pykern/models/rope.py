"""Angles of rotary position embedding: theta_i = position * base^(-2i / head_dim), scaled as the model asks."""

from __future__ import annotations

import math

import torch

from pykern.models.config import LlamaConfig, RopeScaling


def inverse_frequencies(config: LlamaConfig, factors: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [head_dim / 2]: radians per position. ``factors`` divide them (GGUF's ``rope_freqs``)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_base**-exponents
    if config.rope_scaling is not None:
        frequencies = scale(frequencies, config.rope_scaling)
    return frequencies if factors is None else frequencies / factors.double()


def scale(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3's rule by wavelength, or linear scaling (see :class:`RopeScaling`)."""
    if scaling.high == 0:
        return frequencies / scaling.factor
    turns = scaling.original * frequencies / (2 * math.pi)  # full turns within the original context
    keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def cos_sin_table(config: LlamaConfig, positions: int, factors: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [positions, head_dim]: cosines of the head_dim / 2 angles, then their sines.

    Angles are formed in float64: at position 8000 a float32 product is already off by 2e-4 radians.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), inverse_frequencies(config, factors))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()
