"""The loss terms in plain Python floats, written from the papers token by token.

A batch is [l_infer, l_old, l_theta, A, mask], each a [B, T] list of rows.
"""

import math

import torch
from hypothesis import strategies as st

OF_2_17 = st.integers(-100 * 2**17, 0).map(lambda n: n / 2**17)  # float32 holds them, and sums are exact in any order


@st.composite
def batches(draw, rows=4, length=6):
    """Rows of different lengths, whole rows masked among them: [l_infer, l_old, l_theta, A, mask] as [B, T] lists."""
    sizes = draw(st.lists(st.integers(1, length), min_size=1, max_size=rows))

    def table(values):
        return [[draw(values) if t < n else 0 for t in range(length)] for n in sizes]

    return [table(OF_2_17) for _ in range(3)] + [table(st.sampled_from([-1.5, 0.0, 2.0])), table(st.booleans())]


def tensors(batch):
    *floats, mask = batch
    return [torch.tensor(table, dtype=torch.float32) for table in floats] + [torch.tensor(mask) == 1]


def random_batch(seed, rows=5, length=9, scale=0.3):
    torch.manual_seed(seed)
    l_infer = -torch.rand(rows, length) * 3
    l_old = l_infer + torch.randn(rows, length) * scale
    l_theta = l_old + torch.randn(rows, length) * scale
    mask = torch.rand(rows, length) < 0.7
    mask[0] = False  # a row with nothing to learn from
    return [table.tolist() for table in (l_infer, l_old, l_theta, torch.randn(rows, length), mask)]


def mean(values):
    return sum(values) / len(values) if values else 0.0


def opsm_oracle(l_infer, l_theta, advantages, mask, delta):
    """DeepSeek-V3.2 eq. 9 with |o_i| the generated tokens."""
    out = []
    for infer, theta, adv, m in zip(l_infer, l_theta, advantages, mask, strict=True):
        divergence = mean([i - t for i, t, on in zip(infer, theta, m, strict=True) if on])
        out.append([0.0 if a < 0 and divergence > delta else 1.0 for a in adv])
    return out


def m2po_oracle(l_infer, l_theta, advantages, mask, threshold):
    """(weights, the second moment before each drop and after the last): algorithm 1 of arXiv 2510.01161 as a loop.

    The tokens of the trust region are those with A > 0 and r > 1, or A < 0 and r < 1; log r ends at +-20, as any ratio
    here. While their mean of (log r)^2 is above the threshold, the largest goes.
    """
    weights, found = [[1.0] * len(row) for row in l_theta], []
    for b, row in enumerate(l_theta):
        for t, theta in enumerate(row):
            log_r = max(-20.0, min(20.0, theta - l_infer[b][t]))
            if mask[b][t] and advantages[b][t] * log_r > 0:
                found.append((log_r**2, b, t))
    found.sort()
    moments = []
    while found:
        moments.append(math.fsum(square for square, _, _ in found) / len(found))
        if moments[-1] <= threshold:
            break
        _, b, t = found.pop()
        weights[b][t] = 0.0
    return weights, moments


def llds_oracle(l_theta, l_old, advantages, mask, gate):
    """(penalty, gradient by l_theta): the paper's sums, written as loops."""
    penalty = [[0.0] * len(row) for row in l_theta]
    gradient = [[0.0] * len(row) for row in l_theta]
    for b, m in enumerate(mask):
        preserved = [t for t in range(len(m)) if m[t] and advantages[b][t] >= 0]
        units = [preserved]
        if gate == "action":
            units = []
            for t in preserved:
                if units and units[-1][-1] == t - 1:
                    units[-1].append(t)
                else:
                    units.append([t])
        for unit in units:
            if sum(l_old[b][t] - l_theta[b][t] for t in unit) > 0:
                for t in unit:
                    if l_old[b][t] > l_theta[b][t]:
                        penalty[b][t] = l_old[b][t] - l_theta[b][t]
                        gradient[b][t] = -1.0
    return penalty, gradient


def kl_oracle(theta, ref, sampled):
    """(value, d/d theta) of r' (x - log x - 1), DeepSeek-V3.2 eq. 7, in float64: r' (l_theta - l_ref) is its gradient.

    r' ends at e^20 and e^-20, as any importance weight here, and log x at +-20 in the value alone.
    """
    ratio = math.exp(max(-20.0, min(20.0, theta - sampled)))
    log_x = max(-20.0, min(20.0, ref - theta))
    return ratio * (math.expm1(log_x) - log_x), ratio * (theta - ref)
