"""`measure` in plain Python floats, written from the formulas; and the batches that it is compared on.

A batch is a list of trajectories, a trajectory a list of (l_infer, l_old, m, entropy) that float32 holds exactly. The
agreement of its tokens, one after another, is NaN for a token that was not compared; float64 holds each 1 - agreement.
"""

import bisect
import math

import torch

from verl_ext.core.tokens import Lag, Tokens

# In these two together each correction acts, the same one with different settings in neither.
EVERY = (
    {"icepop": {"alpha": 0.5, "beta": 5.0}, "geo_mask": {"low": 0.7, "high": 1.4}},
    {"kpop": {"phi": 0.3}, "tis": {"cap": 1.5}, "mis": {"cap": 3.0, "weight": "ratio"}, "tis_sequence": {"cap": 2.5}},
)
CHOICES = (
    None,
    {"tis": {"cap": 2.0}},
    {"tis": {"cap": 2.0, "floor": 0.6}},
    {"tis_sequence": {"cap": 2.0}},
    {"tis_sequence": {"cap": 2.0, "floor": 0.6}},
    {"icepop": {"alpha": 0.5, "beta": 5.0}},
    {"kpop": {"phi": 0.1}},
    {"ipo": {"eps": 0.1}},
    {"mis": {"cap": 2.0, "weight": "ratio"}},
    {"mis": {"cap": 2.0, "weight": "one"}},
    {"mis": {"cap": 2.0, "low": 0.5, "weight": "ratio"}},
    {"geo_mask": {"low": 0.7, "high": 1.4}},
    *EVERY,
)


def ratio(log_k):
    return math.exp(max(-20.0, min(20.0, log_k)))


def binary_kl(p, q):
    p, q = (min(max(x, 1e-6), 1 - 1e-6) for x in (p, q))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def bounded(value, low, high, weight):
    return (weight if low <= value <= high else 0.0), value < low, value > high


def cut(value, cap, floor=0.0):
    return min(max(value, floor), cap), value < floor, value > cap


def kpop(x, infer, old, phi):
    p, q = math.exp(old), math.exp(infer)
    out = binary_kl(p, q) > phi or binary_kl(q, p) > phi
    return (0.0 if out else ratio(x)), out and x < 0, out and x >= 0


# Each gives weight, low, high: of (log k, l_infer, l_old) for tokens, of (log rho, log g) for sequences.
OF_TOKENS = {
    "tis": lambda x, infer, old, **bounds: cut(ratio(x), **bounds),
    "icepop": lambda x, infer, old, alpha, beta: bounded(ratio(x), alpha, beta, ratio(x)),
    "kpop": kpop,
    "ipo": lambda x, infer, old, eps: bounded(math.exp(old) - math.exp(infer), -eps, eps, ratio(x)),
}
OF_SEQUENCES = {
    "tis_sequence": lambda rho, g, **bounds: cut(ratio(rho), **bounds),
    "mis": lambda rho, g, cap, weight, low=0.0: bounded(ratio(rho), low, cap, ratio(rho) if weight == "ratio" else 1.0),
    "geo_mask": lambda rho, g, low, high: bounded(ratio(g), low, high, 1.0),
}
AXES = {  # lower edges of all buckets but the first, and the names
    "prob": ((0.01, 0.1, 0.5, 0.9), ("0-0.01", "0.01-0.1", "0.1-0.5", "0.5-0.9", "0.9-")),
    "entropy": ((0.1, 0.5, 1.0, 2.0), ("0-0.1", "0.1-0.5", "0.5-1", "1-2", "2-")),
    "position": ((256, 1024, 4096, 16384), ("0-256", "256-1024", "1024-4096", "4096-16384", "16384-")),
    "turn": (range(1, 8), ("00", "01", "02", "03", "04", "05", "06", "07-")),
    "calls": (range(1, 8), ("00", "01", "02", "03", "04", "05", "06", "07-")),
}


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def records(batch, corrections):
    """One dictionary a counted token, with its place in the packed batch; and per sequence with one, what was found."""
    found, of_sequences, place = [], [], 0
    for row, trajectory in enumerate(batch):
        turn, before, own = -1, False, []
        left = sum(m for _, _, m, _ in trajectory)  # generated tokens from this one on
        for position, (infer, old, m, entropy) in enumerate(trajectory):
            turn += m and not before
            before = m
            if m and math.isfinite(infer) and math.isfinite(old):
                where = {"prob": math.exp(infer), "entropy": entropy, "position": position, "turn": turn}
                own.append(
                    {"place": place, "row": row, "infer": infer, "old": old, "x": old - infer, "left": left} | where
                )
            left -= m
            place += 1
        if not own:
            continue
        for t in own:
            t["calls"] = turn
        rho = math.fsum(t["x"] for t in own)
        whole = {n: OF_SEQUENCES[n](rho, rho / len(own), **corrections[n]) for n in corrections if n in OF_SEQUENCES}
        of_sequences.append(whole)
        for t in own:
            values = (t["x"], t["infer"], t["old"])
            t["by"] = {n: OF_TOKENS[n](*values, **corrections[n]) for n in corrections if n in OF_TOKENS}
            every = [*t["by"].values(), *whole.values()]
            t["w"] = math.prod(w for w, _, _ in every)
            t["low"] = t["w"] == 0 and any(low for _, low, _ in every)
            t["high"] = t["w"] == 0 and not t["low"]
        found += own
    return found, of_sequences


def bucket_of_lag(left, newest, oldest, fresh=0):
    if newest != oldest and left > fresh:
        return "span"
    return "8-" if newest > 7 else "4-7" if newest > 3 else str(newest)


def filled(t):
    return t["infer"] > 1e-3 or (t["infer"] == 0 and math.exp(t["old"]) < 0.5)


def by_row(tokens):
    return [[t for t in tokens if t["row"] == row] for row in {t["row"] for t in tokens}]


def pearson(xs, ys):
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return None
    x_mean, y_mean = mean(xs), mean(ys)
    xs, ys = [x - x_mean for x in xs], [y - y_mean for y in ys]
    x_norm, y_norm = (math.sqrt(math.fsum(v * v for v in values)) for values in (xs, ys))
    return math.fsum(x * y for x, y in zip(xs, ys, strict=True)) / x_norm / y_norm


def oracle(batch, corrections, with_entropy, breakdown=True, lag=None, replica=None, agreement=None):
    tokens, of_sequences = records(batch, corrections or {})
    if not tokens:
        return {}
    k = [ratio(t["x"]) for t in tokens]
    difference = [abs(math.exp(t["infer"]) - math.exp(t["old"])) for t in tokens]
    center = mean(difference)
    gaps = [abs(mean(-t["x"] for t in tokens if t["row"] == row)) for row in {t["row"] for t in tokens}]

    def k3(t):
        bound = max(-20.0, min(20.0, t["x"]))
        return math.expm1(bound) - bound

    metrics = {
        "vllm_kl/k1": mean(-t["x"] for t in tokens),
        "vllm_kl/k3": mean(map(k3, tokens)),
        "vllm_kl/l_old": mean(t["old"] for t in tokens),
        "vllm_kl/prob_diff_mean": center,
        "vllm_kl/prob_diff_max": max(difference),
        "vllm_kl/prob_diff_std": math.sqrt(mean((d - center) ** 2 for d in difference)),
        "vllm_kl/log_ratio_abs_mean": mean(abs(t["x"]) for t in tokens),
        "vllm_kl/log_ratio_abs_max": max(abs(t["x"]) for t in tokens),
        "vllm_kl/ess": math.fsum(k) ** 2 / math.fsum(x * x for x in k) / len(k),
        "vllm_kl/chi2": mean(math.expm1(2 * math.log(x)) for x in k),
        "vllm_kl/sequence_gap_mean": mean(gaps),
        "vllm_kl/sequence_gap_max": max(gaps),
        "vllm_kl/filled": mean(any(map(filled, of_row)) for of_row in by_row(tokens)),
    }
    measures = {"vllm_kl/k1": lambda t: -t["x"], "vllm_kl/k3": k3}
    if corrections:
        zero = {t["row"] for t in tokens} - {t["row"] for t in tokens if t["w"]}
        kinds = {"dropped": [t for t in tokens if not t["w"]], "kept": [t for t in tokens if t["w"]]}
        metrics |= {
            "correction/dropped": len(kinds["dropped"]) / len(tokens),
            "correction/dropped_low": mean(t["low"] for t in tokens),
            "correction/dropped_high": mean(t["high"] for t in tokens),
            "correction/sequences_dropped": len(zero) / len(gaps),
            "correction/weight_mean": mean(t["w"] for t in tokens),
            "correction/weight_max": max(t["w"] for t in tokens),
        }
        if kinds["kept"]:
            metrics["correction/weight_min"] = min(t["w"] for t in kinds["kept"])
        for kind, members in kinds.items():
            if members and with_entropy:
                metrics[f"correction/entropy_{kind}"] = mean(t["entropy"] for t in members)
        for name in corrections:
            every = [t["by"][name] for t in tokens] if name in OF_TOKENS else [found[name] for found in of_sequences]
            metrics[f"correction/{name}/low"] = mean(low for _, low, _ in every)
            metrics[f"correction/{name}/high"] = mean(high for _, _, high in every)
        measures |= {f"correction/dropped_{side}": lambda t, side=side: t[side] for side in ("low", "high")}
    agreed = {t["place"]: agreement[t["place"]] for t in tokens} if agreement else {}
    gap = {
        t["place"]: abs(t["x"]) for t in tokens if not math.isnan(agreed.get(t["place"], math.nan))
    }  # where compared

    def add_bucket(name, inside, of):
        metrics[f"vllm_kl/share/{name}"] = len(inside) / len(tokens)
        metrics.update({f"{measure}/{name}": mean(map(measures[measure], inside)) for measure in of})
        if known := [agreed[t["place"]] for t in inside if t["place"] in gap]:
            metrics[f"router/agreement/{name}"] = mean(known)

    for axis, (edges, names) in AXES.items():
        used = {bisect.bisect_right(edges, t[axis]) for t in tokens}
        if not breakdown or len(used) < 2 or (axis == "entropy" and not with_entropy):
            continue
        for bucket in used:
            add_bucket(
                f"{axis}/{names[bucket]}",
                [t for t in tokens if bisect.bisect_right(edges, t[axis]) == bucket],
                measures,
            )
    measures["vllm_kl/log_ratio_abs_mean"] = lambda t: abs(t["x"])
    by_lag = {}
    for t in tokens if lag else ():
        by_lag.setdefault(bucket_of_lag(t["left"], *lag[t["row"]]), []).append(t)
    for bucket, inside in by_lag.items():
        add_bucket(f"lag/{bucket}", inside, measures)
    if replica and len(used := {replica[t["row"]] for t in tokens}) > 1:
        for bucket in used:
            inside = [t for t in tokens if replica[t["row"]] == bucket]
            add_bucket(f"replica/{bucket:02d}", inside, ("vllm_kl/k3", "vllm_kl/log_ratio_abs_mean"))
    correlation = pearson([1 - agreed[place] for place in gap], [*gap.values()])
    if correlation is not None:
        metrics["router/disagreement_gap_correlation"] = correlation
    for name, inside in (
        ("equal", [gap[place] for place in gap if agreed[place] == 1]),
        ("differs", [gap[place] for place in gap if agreed[place] < 1]),
    ):
        if inside:
            metrics[f"router/gap_{name}"] = mean(inside)
    return metrics


def lag_of(ages):
    """The ages of trajectories: pairs of the newest and the oldest weights', or with the number of fresh tokens."""
    return Lag(*torch.tensor(ages, dtype=torch.long).reshape(len(ages), len(ages[0]) if ages else 2).T)


def pack(batch, with_entropy=True, dtype=torch.float32, lag=None, replica=None, agreement=None):
    tokens = [token for trajectory in batch for token in trajectory]
    infer, old, entropy = (torch.tensor([token[i] for token in tokens], dtype=dtype) for i in (0, 1, 3))
    mask = torch.tensor([m for _, _, m, _ in tokens], dtype=torch.bool)
    offsets = torch.tensor([0, *map(len, batch)]).cumsum(0)
    found = lag_of(lag) if lag is not None else None
    places = {} if replica is None else {"replica": torch.tensor(replica, dtype=torch.long)}
    agreed = None if agreement is None else torch.tensor(agreement, dtype=dtype)
    return Tokens(infer, old, mask, offsets, entropy if with_entropy else None, agreed, lag=found, buckets=places)


def random_batch(rows, longest, seed=0):
    """Multi-turn trajectories of many lengths, near the policy with a few outliers; entries that float32 holds."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for length in torch.randint(0, longest + 1, (rows,), generator=generator).tolist():
        infer = -torch.empty(length).exponential_(1, generator=generator)
        old = infer + torch.randn(length, generator=generator) * torch.tensor(0.3)
        mask = torch.rand(length, generator=generator).sub(0.3).sign().cumsum(0) % 7 > 0
        entropy = torch.rand(length, generator=generator) * 3
        batch.append([*zip(infer.tolist(), old.tolist(), mask.tolist(), entropy.tolist(), strict=True)])
    return batch


def random_agreement(batch):
    """The agreement of the batch's tokens: 1 for small log-ratios, which are most, and lower the larger one is."""
    gaps = [abs(old - infer) for row in batch for infer, old, *_ in row]
    return torch.tensor([1 - round(40 * max(gap - 0.3, 0.0)) / 384 for gap in gaps]).tolist()
