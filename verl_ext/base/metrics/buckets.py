"""The buckets of a breakdown, and their names in metrics; apart from it, so that the report needs no torch."""

PROBABILITY_EDGES = (0.0, 0.01, 0.1, 0.5, 0.9)  # of exp(l_infer); the last bucket ends at 1
ENTROPY_EDGES = (0.0, 0.1, 0.5, 1.0, 2.0)  # of the training policy, in nats
POSITION_EDGES = (0, 256, 1024, 4096, 16384)  # of the response, tool output counted
TURNS = 8  # the last bucket holds all later turns
LAG_EDGES = (0, 1, 2, 3, 4, 8)  # of weight versions behind the policy; trajectories that span versions stand apart


def bucket_names(edges: tuple[float, ...]) -> list[str]:
    """`low-high` for each bucket; the last one is open: `low-`."""
    ends = [f"{edge:g}" for edge in edges[1:]] + [""]
    return [f"{low:g}-{high}" for low, high in zip(edges, ends, strict=True)]


NAMES = {
    "prob": bucket_names(PROBABILITY_EDGES),
    "entropy": bucket_names(ENTROPY_EDGES),
    "position": bucket_names(POSITION_EDGES),
    "turn": [f"{turn:02d}" for turn in range(TURNS - 1)] + [f"{TURNS - 1:02d}-"],
    "lag": ["0", "1", "2", "3", "4-7", "8-", "span"],
}
