"""Files that a run opens: its model, data, reward functions, and configs of tools and agent loops."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.base.errors import Problem
from verl_ext.features.verl_config import MODEL, ROLLOUT, is_folder_path, is_unknown, value_of
from verl_ext.launch.packages import package_folder

# Source: verl 0.9.1. `load_module` of utils/import_utils.py reads code, also from `file://`.
CODE = (
    "reward.custom_reward_function.path",
    "reward.reward_manager.module.path",
    "data.custom_cls.path",
    "trainer.v1.sampler.custom_sampler.path",
)
# `resolve_config_path` of the same file also looks next to verl and in it.
BESIDE_VERL = (
    f"{ROLLOUT}.multi_turn.tool_config_path",
    f"{ROLLOUT}.multi_turn.function_tool_path",
    f"{ROLLOUT}.agent.agent_loop_config_path",
    f"{ROLLOUT}.router_config_path",
)
MODELS = (f"{MODEL}.path", f"{MODEL}.tokenizer_path")  # folders, or names on the Hugging Face Hub
DATA = ("data.train_files", "data.val_files")  # `RLHFDataset._download` of utils/dataset/rl_dataset.py


READ = (".parquet", ".json", ".jsonl")  # `_read_files_and_tokenize` of the same file


def data_problems(config: DictConfig) -> Iterator[Problem]:
    """Yields a problem for each data file whose ending verl's data set does not read."""
    for setting in () if _has_own_data(config) else DATA:
        for path in _values(config, setting):
            if not path.endswith(READ):
                why = f"verl's data set reads only {', '.join(READ)}"
                yield Problem(f"{setting}={path} is no data file", why, otherwise="name the files")


def file_problems(config: DictConfig) -> Iterator[Problem]:
    """Yields a problem for each file that the run opens and that is not on this machine."""
    for file in missing_files(config):
        yield Problem(f"{file} does not exist", "every node that opens it needs it", otherwise="correct the path")


def missing_files(config: DictConfig) -> Iterator[str]:
    """Yields `setting=path` of each of these that is not on this machine. Remote paths and the Hub's names are left to
    verl."""
    verl = package_folder("verl")
    beside_verl = [verl.parent, verl] if verl else []
    for setting in (*MODELS, *(() if _has_own_data(config) else DATA), *CODE, *BESIDE_VERL):
        folders = [Path(), *(beside_verl if setting in BESIDE_VERL else ())]
        for path in _values(config, setting):
            file = os.path.expanduser(path.removeprefix("file://"))
            is_local = is_folder_path(path) if setting in MODELS else "://" not in file
            if is_local and not any((folder / file).exists() for folder in folders):
                yield f"{setting}={path}"


def _has_own_data(config: DictConfig) -> bool:
    """Whether a data set class of the user reads the data, or a file may be a name on the Hugging Face Hub."""
    return any(_values(config, name) for name in ("data.custom_cls.path", "data.use_shm"))


def _values(config: DictConfig, setting: str) -> list[str]:
    value: Any = None if is_unknown(config, setting) else value_of(config, setting)
    return [str(one) for one in (value if OmegaConf.is_list(value) else [value]) if one]
