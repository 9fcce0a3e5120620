"""unit/ mirrors verl_ext/, stack/ starts the real stack, support/ has the helpers of both."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the repository
