"""A reward that differs between any two responses, so that every step of a test run has a gradient."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    return sum(map(ord, solution_str)) % 10 / 10


def same_for_all(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """A constant reward: nothing can be learnt from it."""
    return 0.5
