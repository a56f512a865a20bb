"""Slow forms that the tests compare with."""

import torch


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
