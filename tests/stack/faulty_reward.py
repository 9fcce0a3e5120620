"""`dense_reward`, until a file asks for a fault: a user's reward function that fails."""

import os
import time
from pathlib import Path

from tests.stack import dense_reward

FILE = "VERL_EXT_TEST_REWARD"  # environment: a file that holds `nan`, `hang` or `raise`


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    file = Path(os.environ[FILE])
    match file.read_text() if file.exists() else "":
        case "nan":
            return float("nan")
        case "hang":
            while file.read_text() == "hang":
                time.sleep(0.1)
        case "raise":
            raise ValueError("the judge does not answer")
    return dense_reward.compute_score(data_source, solution_str, ground_truth)
