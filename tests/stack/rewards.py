"""Reward functions of the whole runs. `compute_score` differs between any two responses: every step has a gradient."""

import os
import time
from pathlib import Path

FILE = "VERL_EXT_TEST_REWARD"  # environment: a file that holds `nan`, `hang`, `raise` or nothing


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    return sum(map(ord, solution_str)) % 10 / 10


def same_for_all(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """A constant reward: nothing can be learnt from it."""
    return 0.5


def faulty(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """`compute_score`, until FILE asks for a fault."""
    file = Path(os.environ[FILE])
    match file.read_text() if file.exists() else "":
        case "nan":
            return float("nan")
        case "hang":
            while file.read_text() == "hang":
                time.sleep(0.1)
        case "raise":
            raise ValueError("the judge does not answer")
    return compute_score(data_source, solution_str, ground_truth)
