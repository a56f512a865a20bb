"""Slow forms that the tests compare with."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def gdn_recurrent(q, k, v, g, beta, state=None):
    """Gated DeltaNet (arXiv 2412.06464, section 3), token by token: slow, and the reference for
    every other form.

    Each head: S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T and o_t = S_t^T q_t, with
    a_t = exp(g_t). q, k (B, T, H, K), L2-normed, q scaled by K**-0.5 too; v (B, T, H, V); g, beta
    (B, T, H), g in nats, <= 0; state S (B, H, K, V) or None for zeros. Returns o (B, T, H, V) in
    v's dtype and the last state, float32 at least.
    """
    dtype, outs = torch.promote_types(v.dtype, torch.float32), []
    state = (
        v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]) if state is None else state
    ).to(dtype)
    # unbind, not x[:, t]: the backward of each select fills a tensor of full size, which makes
    # training O(T^2).
    for q_t, k_t, v_t, g_t, beta_t in zip(
        *(x.to(dtype).unbind(1) for x in (q, k, v, g, beta)), strict=True
    ):
        state = state * g_t.exp()[..., None, None]
        delta = beta_t[..., None] * (v_t - torch.einsum("bhk,bhkv->bhv", k_t, state))
        state = state + k_t[..., None] * delta[..., None, :]
        outs.append(torch.einsum("bhk,bhkv->bhv", q_t, state))
    return torch.stack(outs, 1).to(v.dtype), state


class CountLaunches(TorchDispatchMode):
    """Counts the operations that a GPU would launch: all but views and allocations."""

    FREE = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::_unsafe_view")

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        schema = func._schema
        aliases = [each.alias_info for each in schema.returns if each.alias_info]
        is_view = any(not alias.is_write for alias in aliases)
        self.number += not is_view and schema.name not in self.FREE
        return func(*args, **(kwargs or {}))
