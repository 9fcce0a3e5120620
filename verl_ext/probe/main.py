"""The process of a probe: `verl_ext.main_ppo` with another trainer.

python -m verl_ext.probe.main <overrides> +probe_out=FILE
"""

import hydra
from omegaconf import DictConfig

from verl_ext.launch import compose
from verl_ext.trainer.start import run_or_stop, start


@hydra.main(version_base=None, config_path=str(compose.VERL_CONFIGS), config_name=compose.PRIMARY)
def probe_main(config: DictConfig) -> None:
    run_or_stop(config, probe_task_runner)


def probe_task_runner() -> type:
    from verl_ext.probe.trainer import ProbeTaskRunner

    return ProbeTaskRunner


def main() -> None:
    start(probe_main)


if __name__ == "__main__":
    main()
