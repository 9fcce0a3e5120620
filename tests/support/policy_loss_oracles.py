"""The policy losses in float64, written from the papers, and batches to compare them on."""

import torch


def loss_batch(seed, rows=3, length=7):
    torch.manual_seed(seed)
    old = -torch.rand(rows, length) * 3
    new = (old + torch.randn(rows, length) * 0.3).requires_grad_()
    mask = torch.rand(rows, length) < 0.8
    mask[:, 0] = True
    return old, new, torch.randn(rows, length), mask, torch.exp(torch.randn(rows, length) * 1.5)


def clipped(leaf, old, advantages, low=0.2, high=0.28, dual=3.0):
    """Per token min(r A, clip(r) A), with PPO's dual clip for A < 0."""
    ratio = torch.exp(leaf - old)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)


def icepop_loss_oracle(old, new, advantages, mask, k, alpha, beta):
    """(loss, gradient) of -1/N sum over tokens of M(k) min(r A, clip(r) A), in float64."""
    leaf = new.detach().double().requires_grad_()
    k = k.double()
    weight = torch.where((k >= alpha) & (k <= beta), k, 0.0)
    loss = -(clipped(leaf, old.double(), advantages.double()) * weight)[mask].sum() / mask.sum()
    loss.backward()
    return loss.item(), leaf.grad


def opsm_loss_oracle(leaf, old, advantages, mask, l_infer, delta):
    """(loss, which tokens it keeps, the divergence of each row), DeepSeek-V3.2 eq. 9."""
    gap = ((l_infer.double() - leaf.detach()) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    keep = ~((advantages < 0) & (gap > delta))
    return -(clipped(leaf, old.double(), advantages.double()) * keep)[mask].sum() / mask.sum(), keep, gap


def llds_loss_oracle(leaf, old, advantages, mask, coef):
    """(loss, penalty), LLDS with the gate over responses."""
    fall = (old.double() - leaf) * (mask & (advantages >= 0))
    gate = fall.detach().sum(1, keepdim=True) > 0
    penalty = (fall.clamp(min=0) * gate).sum() / mask.sum()
    return -clipped(leaf, old.double(), advantages.double())[mask].sum() / mask.sum() + coef * penalty, penalty
