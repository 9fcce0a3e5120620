"""Replaces `verl.trainer.main_ppo`: takes the same overrides, and `stability=`.

    python -m verl_ext.main_ppo stability=icepop <your overrides for verl.trainer.main_ppo>

If no feature of `stability` is on, verl runs unchanged.
"""

import hydra
from omegaconf import DictConfig

from verl_ext.launch import compose
from verl_ext.start import run_or_stop, stability_task_runner, start


@hydra.main(version_base=None, config_path=str(compose.VERL_CONFIGS), config_name=compose.PRIMARY)
def hydra_main(config: DictConfig) -> None:
    run_or_stop(config, stability_task_runner)


def main() -> None:
    start(hydra_main)


if __name__ == "__main__":
    main()
