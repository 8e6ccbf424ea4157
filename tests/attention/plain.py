"""The attention in its plainest form: float64, one sequence and one head at a time, real tokens cut out by hand."""

import torch

from hf_favorpp.features.gerf import oprf_coefficient
from hf_favorpp.features.preconditioning import precondition
from hf_favorpp.features.statistics import sequence_statistics

F64 = torch.float64


def plain_attention(
    query, key, value, omega, *, scaling, key_mask=None, query_mask=None, kernel, preconditioning, omega_key=None
):
    """Feature matrices and a division, over the real tokens only; padded queries get the same treatment."""
    omega_key = omega if omega_key is None else omega_key.detach().to(F64)
    query, key, value, omega = (t.detach().to(F64) for t in (query, key, value, omega))
    batch, heads, num_queries, _ = query.shape
    groups = heads // key.shape[1]
    out = torch.zeros(batch, heads, num_queries, value.shape[-1], dtype=F64)
    for b in range(batch):
        real_k = torch.ones(key.shape[2], dtype=torch.bool) if key_mask is None else key_mask[b]
        real_q = torch.ones(num_queries, dtype=torch.bool) if query_mask is None else query_mask[b]
        for h in range(heads):
            q, k, v = query[b, h], key[b, h // groups, real_k], value[b, h // groups, real_k]
            w, w_key = (t if t.ndim == 2 else t[h] for t in (omega, omega_key))
            if len(k):
                out[b, h, real_q] = _one_head(q[real_q], k, v, w, w_key, scaling, kernel, preconditioning)
    return out


def _one_head(q, k, v, w, w_key, scaling, kernel, preconditioning):
    x, y = scaling**0.5 * q, scaling**0.5 * k
    weight = torch.ones(len(y), dtype=F64)
    if preconditioning == "center":
        mean_x, mean_y = x.mean(0), y.mean(0)
        x, y = x - mean_x, y - mean_y
        weight = torch.exp(y @ mean_x)
    if preconditioning in ("diagonal", "full"):
        change = precondition(sequence_statistics(x[None, None], y[None, None], covariance=True), preconditioning)
        mean_x, mean_y = x.mean(0), y.mean(0)
        x, y = x - mean_x, y - mean_y
        weight = torch.exp(y @ mean_x)
        x, y = x @ change.transform_x[0, 0].T, y @ torch.linalg.inv(change.transform_x[0, 0])
    if kernel == "relu":
        phi_q, phi_k = (q @ w.T).relu(), (k @ w.T).relu()
    elif kernel == "elu":
        phi_q, phi_k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    elif kernel == "uniform":
        phi_q, phi_k = torch.ones(len(q), 1, dtype=F64), torch.ones(len(k), 1, dtype=F64)
    elif kernel == "trig":
        phi_q, phi_k = trig(x, w), trig(y, w)
    elif kernel == "favor+hyperbolic":
        phi_q, phi_k = hyperbolic(x, w), hyperbolic(y, w)
    else:
        A = torch.zeros((), dtype=F64)
        if kernel == "favor++":
            pairs = (x.unsqueeze(1) + y.unsqueeze(0)).square()
            A = oprf_coefficient(pairs.sum(-1).mean(), x.shape[-1])
            if preconditioning in ("diagonal", "full"):
                A = change.coefficient[0, 0]
        phi_q, phi_k = positive(x, w, A), positive(y, w_key, A)
    numerator = phi_q @ (phi_k.T @ (weight.unsqueeze(-1) * v))
    return numerator / (phi_q @ (phi_k.T @ weight)).unsqueeze(-1)


def positive(x, w, A):
    d = x.shape[-1]
    A = A.expand(d)
    log_phi = (A * w.square()).sum(-1) + x @ ((1 - 4 * A).sqrt() * w).T - x.square().sum(-1, keepdim=True) / 2
    return torch.exp(log_phi) * ((1 - 4 * A) ** 0.25).prod()


def hyperbolic(x, w):
    norm = torch.exp(-x.square().sum(-1, keepdim=True) / 2)
    return norm * torch.cat(((x @ w.T).exp(), (-x @ w.T).exp()), dim=-1)


def trig(x, w):
    norm = torch.exp(x.square().sum(-1, keepdim=True) / 2)
    return norm * torch.cat(((x @ w.T).cos(), (x @ w.T).sin()), dim=-1)


def softmax_attention(query, key, value, scaling):
    return torch.softmax(scaling * query.to(F64) @ key.to(F64).mT, dim=-1) @ value.to(F64)
