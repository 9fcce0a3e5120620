"""The only test that would notice a correction without effect: runs that fall without it, and survive with it."""

import orjson
import pytest

from verl_ext.lab import arms

STEPS, SEEDS, LAST = 180, (0, 1), 20
# Of the mean over the seeds. Ten seeds of two implementations have tis 0.2 to 0.5 above none, and exact 0.1 to 0.3
# above tis; another machine's rounding makes another run of the same seed.
SAVED, STILL_BEHIND = 0.15, 0.03


@pytest.mark.slow
def test_stale_rollouts_kill_a_run_and_a_correction_saves_it(tmp_path):
    def final(arm, seed):
        folder = tmp_path / arm.name / f"seed{seed}"
        arms.run_arm(arm, seed, folder, lambda step: None)
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()[-LAST:]
        return sum(orjson.loads(line)["data"]["critic/score/mean"] for line in lines) / LAST

    compared = arms.arms_of("stale", ["none", "tis"], {}, (), steps=STEPS)
    rewards = {arm.name: sum(final(arm, seed) for seed in SEEDS) / len(SEEDS) for arm in compared}
    assert rewards["none"] + SAVED < rewards["tis"] < rewards["exact"] - STILL_BEHIND, rewards
