"""The process of a probe: `verl_ext.main_ppo` with another trainer.

python -m verl_ext.probe.main <overrides> +probe_out=FILE
"""

import sys

import hydra
from omegaconf import DictConfig

from verl_ext.errors import UserError
from verl_ext.launch import compose
from verl_ext.main_ppo import run_or_stop, stop


@hydra.main(version_base=None, config_path=str(compose.VERL_CONFIGS), config_name=compose.PRIMARY)
def hydra_main(config: DictConfig) -> None:
    from verl_ext.probe.trainer import ProbeTaskRunner

    run_or_stop(config, ProbeTaskRunner)


def main() -> None:
    try:
        sys.argv[1:] = compose.prepare(sys.argv[1:])
    except UserError as error:
        stop(error)
    hydra_main()


if __name__ == "__main__":
    main()
