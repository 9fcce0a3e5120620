"""The reward of the CPU quick start: the share of an answer before its first mistake."""

from itertools import takewhile


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """Returns the share of an answer's places before its first wrong one, in verl's custom reward signature.

    The end token is the last place. verl leaves special tokens out of `solution_str`: the exact answer earns 1, and the
    answer followed by anything else earns one place less.
    """
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(solution_str, ground_truth, strict=False)))
    return (right + (solution_str == ground_truth)) / (len(ground_truth) + 1)
