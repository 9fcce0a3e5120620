"""What a launch script has besides the overrides: the machines that it asks for, and overrides that never arrive."""

import re
from collections.abc import Iterable

from verl_ext.base.errors import Problem
from verl_ext.doctor.checks import Context, check, error, warning
from verl_ext.features.verl_config import ROLLOUT
from verl_ext.launch.packages import package_folder, source
from verl_ext.launch.sizes import gpu_pools

CPUS = "ray_kwargs.ray_init.num_cpus"
PER_GPU = re.compile(r"class ResourcePoolManager:.*?max_colocate_count: int = (\d+)", re.DOTALL)
PER_ROLLOUT_GPU = 2  # of servers on GPUs of their own: workers/rollout/replica.py
ADDRESS = "ray_kwargs.ray_init.address"


@check("lost overrides")
def lost_overrides(context: Context) -> Iterable[Problem]:
    """Overrides in a launch script that the shell gives to another command, such as `tee`, or takes for a command: a
    comment between continued lines, or a line without its backslash, ends the launch.

    Source: bash. A backslash joins two lines before comments are read, and none joins a comment to the next line.
    """
    for to in dict.fromkeys((lost := context.launch.lost).values()):
        ends = "; a comment, or a line without a backslash, ended the launch" if to.startswith("a command") else ""
        keys = ", ".join(key for key in lost if lost[key] == to)
        yield warning(f"not part of the launch: {keys}", f"the shell gives them to {to}{ends}")


@check("machine", needs="config")
def machine(context: Context) -> Iterable[Problem]:
    """More GPUs than the script makes visible or asks Slurm for; `ray_kwargs.ray_init.num_cpus` below the CPUs that
    verl reserves beside its GPUs.

    Source: verl/single_controller/ray/base.py: `_check_resource_available` counts GPUs and raises a ValueError;
    `get_placement_groups` asks for `max_colocate_count` CPUs per GPU, all GPUs of a node on one machine, and waits
    without a limit. Ray counts the GPUs that are visible where it starts.
    """
    pools = gpu_pools(context.config)
    most, total = (
        max((gpus for _, gpus in pools.values()), default=0),
        sum(nodes * gpus for nodes, gpus in pools.values()),
    )
    asked = " and ".join(f"{each}.nnodes x n_gpus_per_node={nodes} x {gpus}" for each, (nodes, gpus) in pools.items())
    for said, nodes, gpus in () if context.get(ADDRESS) else context.launch.machines:
        of_slurm = said.startswith("#")
        if not of_slurm and any(many > 1 for many, _ in pools.values()):
            continue  # a cluster runs already
        if nodes is not None and (have := nodes * (gpus or most)) < total:
            why = f"verl stops: it finds {have} GPUs and needs {total}"
        elif gpus is not None and gpus < most:
            why = f"verl waits for ever for a machine with {most} GPUs"
        else:
            continue
        unless = "unless sbatch is called with more" if of_slurm else "unless a Ray with more runs already"
        yield warning(f"{said} with {asked}", f"{why}, {unless}")
    per_gpu = PER_GPU.search(source(package_folder("verl"), "single_controller/ray/base.py"))
    each = int(per_gpu[1] if per_gpu else 1)
    needed = sum(nodes * gpus * (PER_ROLLOUT_GPU if of == ROLLOUT else each) for of, (nodes, gpus) in pools.items())
    given = context.number(CPUS)
    if given is not None and given < needed and context.get("trainer.device") != "cpu":
        why = f"verl reserves {needed} CPUs with its {total} GPUs, and waits for them for ever; Ray only counts them"
        yield error(f"{CPUS}={given}", why, f"{CPUS}=null")
