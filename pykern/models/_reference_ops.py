"""The decoder's ops in plain PyTorch: what tests compare pykern's kernels with.

Same signatures as the public ops, as far as the decoder uses them; maths in the dtype of the inputs, except where
a reduction is kept in float32. Slow and short on purpose.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pykern.models.gguf import TYPES
from pykern.models.weights import Blocks, dequantize_blocks


def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows ``ids`` of ``table``."""
    return table[ids]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x wᵀ + bias + residual."""
    y = F.linear(x, w, bias)
    return y if residual is None else y + residual


def quant_linear(
    x: torch.Tensor,
    planes: list[torch.Tensor],
    layout: str,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same with ``w`` in GGUF blocks."""
    (kind,) = [t for t in TYPES.values() if t.name.lower() == layout]
    blocks = Blocks(kind, planes[0], (len(planes[0]), x.shape[-1]))
    return linear(x, dequantize_blocks(blocks).to(x.dtype), bias=bias, residual=residual)


def rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotation of ``x`` [tokens, heads, head_dim]."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rope_append_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotated ``q``; rotated ``k``, and ``v``, are written to their slots of the caches."""
    k_cache.view(-1, *k_cache.shape[2:])[slots] = rope(k, positions, cos_sin)
    v_cache.view(-1, *v_cache.shape[2:])[slots] = v
    return rope(q, positions, cos_sin)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    page_table: torch.Tensor,
    causal: bool = True,
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(head_dim)) v per sequence over its pages; causal masks are bottom-right aligned."""
    groups = q.shape[1] // k.shape[2]
    outs = []
    for s, length in enumerate(kv_lens.tolist()):
        queries = q[cu_q[s] : cu_q[s + 1]].float().transpose(0, 1)  # [heads, tokens, head_dim]
        pages = page_table[s].long()
        keys, values = (
            cache[pages].flatten(0, 1)[:length].float().transpose(0, 1).repeat_interleave(groups, dim=0)
            for cache in (k, v)
        )
        scores = queries @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        if causal:
            rows = torch.arange(queries.shape[1], device=q.device)[:, None] + length - queries.shape[1]
            scores = scores.masked_fill(torch.arange(length, device=q.device) > rows, float("-inf"))
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outs).to(q.dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu of the first half of the last axis, times the second half."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Column of the largest value of each row, the lowest of equals."""
    return logits.argmax(-1)
