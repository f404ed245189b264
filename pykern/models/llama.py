"""A Llama-family decoder, built only from pykern's ops.

Shapes: T tokens of a ragged batch of S sequences, H hidden, Q and K query and key/value heads of D dimensions,
I intermediate, V vocabulary. One pass appends to the paged cache and gives the logits that follow each sequence's
last token; prefill, chunks of it, decoding, and any mix of them in one batch are the same code.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from pykern.models.cache import Batch, PagedCache
from pykern.models.config import LlamaConfig
from pykern.models.rope import cos_sin_table
from pykern.models.weights import Layer, Weights

Ops = ModuleType | SimpleNamespace


class Llama:
    """``weights`` are on one device; ``ops`` is pykern, or a stand-in with the same functions (tests, metering)."""

    def __init__(self, config: LlamaConfig, weights: Weights, ops: Ops, longest: int | None = None) -> None:
        self.config, self.weights, self.ops = config, weights, ops
        table = cos_sin_table(config, longest or config.context, weights.rope_factors)
        self.cos_sin = table.to(weights.norm.device)

    def __call__(self, batch: Batch, cache: PagedCache) -> torch.Tensor:
        """Logits [S, V] in the activations' dtype. The tokens' keys and values are in ``cache`` afterwards."""
        ops, w, eps = self.ops, self.weights, self.config.norm_eps
        x = ops.embedding(batch.ids, w.embed)  # [T, H]
        for layer, k_cache, v_cache in zip(w.layers, cache.k, cache.v, strict=True):
            h = ops.rms_norm(x, layer.attn_norm, eps)
            x = self.attend(layer, h, x, batch, k_cache, v_cache)
            h = ops.rms_norm(x, layer.mlp_norm, eps)
            x = self.feed_forward(layer, h, x)
        if batch.last is not None:
            x = ops.embedding(batch.last, x)  # rows by number: only these need logits  [S, H]
        return self.project(ops.rms_norm(x, w.norm, eps), w.head)

    def attend(
        self,
        layer: Layer,
        h: torch.Tensor,
        x: torch.Tensor,
        batch: Batch,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """x + Wo attention(rope(Wq h), rope(Wk h), Wv h) over the cache, this pass's tokens included.  [T, H]"""
        c = self.config
        qkv = self.project(h, layer.qkv, layer.qkv_bias)  # [T, (Q + 2 K) D]
        heads = qkv.view(len(qkv), c.q_heads + 2 * c.kv_heads, c.head_dim)
        q, k, v = heads.split([c.q_heads, c.kv_heads, c.kv_heads], dim=1)
        q = self.ops.rope_append_kv(q, k, v, batch.positions, self.cos_sin, k_cache, v_cache, batch.slots)
        o = self.ops.attention(
            q,
            k_cache,
            v_cache,
            cu_q=batch.cu_q,
            kv_lens=batch.kv_lens,
            page_table=batch.page_table,
            causal=True,
        )
        return self.project(o.view(len(o), c.q_size), layer.o, layer.o_bias, residual=x)

    def feed_forward(self, layer: Layer, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x + Wd (silu(Wg h) * Wu h).  [T, H]"""
        gate_up = self.project(h, layer.gate_up, layer.gate_up_bias)  # [T, 2 I]
        return self.project(self.ops.silu_and_mul(gate_up), layer.down, layer.down_bias, residual=x)

    def project(
        self, x: torch.Tensor, w: Any, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x wᵀ + bias + residual, for a plain or a packed ``w`` [out, in]."""
        if isinstance(w, torch.Tensor):
            return self.ops.linear(x, w, bias=bias, residual=residual)
        return self.ops.quant_linear(x, list(w.planes.values()), w.layout, bias=bias, residual=residual)
