"""Weights of earlier steps in the host's memory, for rescoring: verl's own copies, kept for longer.

Written for verl 0.9.1, whose `separate_async` copies the weights at the start of each step, to compute all of the
step's l_old with them (`PPOTrainerSeparateAsync._compute_old_log_prob`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl.single_controller.base.decorator import Dispatch, register

if TYPE_CHECKING:
    from verl.experimental.separation.engine_workers import DetachActorWorker as VerlWorker
else:
    VerlWorker = object  # the classes that mix this in name verl's

STEP_START = 0  # verl's key of that copy
SHARDED = ("fsdp2", "veomni")


class VersionsMixin(VerlWorker):
    """Keeps copies by the version that they are of, besides those that verl makes."""

    @property
    def copy_handler(self) -> Callable[[Any], Any]:
        """verl's. Of a shard that is on the CPU already, its copy would be the shard itself, which updates change
        (`fsdp2_sharded_save_to_cpu` of verl 0.9.1)."""
        copied = super().copy_handler
        if self.config.actor.strategy not in SHARDED:
            return copied

        def apart(module: Any) -> Any:
            shards, spec = copied(module)
            if next(module.parameters()).device.type == "cpu":
                shards = {name: (shard.clone(), its_spec) for name, (shard, its_spec) in shards.items()}
            return shards, spec

        return apart

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_version(self, version: int, oldest: int) -> list[int]:
        """Keep verl's copy of the step before, before it makes the next; forget what is older than `oldest`.

        Returns the versions kept, which `use_version` takes.
        """
        saved = self.__dict__.setdefault("cpu_saved_models", {})
        if STEP_START in saved:
            saved[_key(version)] = saved[STEP_START]
        kept = self.kept_versions()
        for old in kept:
            if old < oldest:
                self.clear_cpu_model(_key(old))
        return [one for one in kept if one >= oldest]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kept_versions(self) -> list[int]:
        return sorted(key[1] for key in self.__dict__.get("cpu_saved_models", {}) if isinstance(key, tuple))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_version(self, version: int) -> None:
        """Compute with these weights from now on; KeyError where they are not kept."""
        if _key(version) not in self.cpu_saved_models:
            raise KeyError(f"the weights of version {version} are not kept")
        self.restore_model_from_cpu(_key(version))


def _key(version: int) -> tuple[str, int]:
    return ("version", version)
