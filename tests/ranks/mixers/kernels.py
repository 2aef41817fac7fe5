"""Kernels with the signatures of flash-linear-attention and mamba-ssm, token by token. As those do, they compute inputs
of 16 bits and return their states in float32; other inputs in their dtype."""

from __future__ import annotations

import functools

import torch


def in_float32(kernel):
    @functools.wraps(kernel)
    def run(*args, **kwargs):
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.ndim > 2]
        if given[0].dtype.itemsize > 2:
            return kernel(*args, **kwargs)
        args = [x.float() if isinstance(x, torch.Tensor) else x for x in args]
        wide = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
        out = kernel(*args, **wide)
        return (out[0].to(given[0].dtype), *out[1:]) if isinstance(out, tuple) else out.to(given[0].dtype)

    return run


@in_float32
def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, **kwargs,
):  # fmt: skip
    """S_t = (1 - beta k k') exp(g) S_{t-1} + beta k v', out_t = S_t' q. g [B, L, H], or [B, L, H, K] as in KDA."""
    heads = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(heads, 2) for x in (q, k))
    state = k.new_zeros(*v.shape[:1], v.shape[2], k.shape[3], v.shape[3]) if initial_state is None else initial_state
    state = state.mT if state_v_first and initial_state is not None else state
    outs = []
    for t in range(v.shape[1]):
        decay = g[:, t, ..., None] if g.ndim == 4 else g[:, t, :, None, None]
        state = decay.exp() * state
        delta = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + k[:, t, ..., None] * delta[..., None, :]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    out, state = torch.stack(outs, 1), state.mT if state_v_first else state
    return out * (k.shape[3] ** -0.5 if scale is None else scale), state if output_final_state else None


@in_float32
def chunk_gla(
    q, k, v, g, scale=None, initial_state=None, output_final_state=False, state_v_first=False, cu_seqlens=None
):
    """S_t = diag(exp(g)) S_{t-1} + k v', out_t = S_t' q."""
    state = k.new_zeros(*v.shape[:1], v.shape[2], k.shape[3], v.shape[3]) if initial_state is None else initial_state
    outs = []
    for t in range(v.shape[1]):
        state = g[:, t, ..., None].exp() * state + k[:, t, ..., None] * v[:, t, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1), state if output_final_state else None


@in_float32
def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, return_varlen_states=False,
):  # fmt: skip
    """S_t = exp(dt A) S_{t-1} + dt x B', out_t = S_t C + D x, times silu(z)."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = torch.nn.functional.softplus(dt) if dt_softplus else dt
    B, C = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (B, C))
    state = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[3]) if initial_states is None else initial_states
    outs = []
    for t in range(x.shape[1]):
        decay = (dt[:, t] * A).exp()[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        outs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
    out = torch.stack(outs, 1)
    out = out if D is None else out + D[:, None] * x
    out = out if z is None else out * torch.nn.functional.silu(z)
    return (out, state) if return_final_states else out


@in_float32
def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):  # fmt: skip
    """Mamba-1, for each channel: S_t = exp(dt A) S_{t-1} + dt B u, out_t = S_t C + D u, times silu(z)."""
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    delta = torch.nn.functional.softplus(delta) if delta_softplus else delta
    state, outs = u.new_zeros(*u.shape[:2], A.shape[1]), []
    for t in range(u.shape[2]):
        state = (delta[..., t, None] * A).exp() * state + (delta[..., t] * u[..., t])[..., None] * B[:, None, :, t]
        outs.append((state * C[:, None, :, t]).sum(-1))
    out = torch.stack(outs, 2)
    out = out if D is None else out + D[:, None] * u
    out = out if z is None else out * torch.nn.functional.silu(z)
    return (out, state) if return_last_state else out


@in_float32
def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None,
):  # fmt: skip
    """Of the package causal-conv1d: x [B, C, L], weight [C, W]."""
    padded = torch.nn.functional.pad(x, (weight.shape[1] - 1, 0))
    out = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=x.shape[1])
    return torch.nn.functional.silu(out) if activation == "silu" else out


@in_float32
def causal_conv1d(
    x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None, **kwargs
):
    """Of flash-linear-attention: x [B, L, C], and it returns a state too."""
    return causal_conv1d_fn(x.mT, weight, bias, activation=activation).mT, None


def mamba_split_conv1d_scan_combined(*args, **kwargs):
    """Of mamba-ssm: convolution and scan in one."""
    raise AssertionError("it would run on a part")
