"""Whether verl runs on CPU cores here: development, tests and the quick start. Package `cpu` has what that needs."""

import os


def requested() -> bool:
    """Whether verl is to run on CPU cores here: VERL_PLATFORM=cpu, verl's own switch."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"
