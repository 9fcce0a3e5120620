"""Copies of earlier weights, with verl's own handlers on a real FSDP2 shard on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch

from verl_ext.workers.actor import LOSS_WORKERS, ROUTING_WORKERS, VersionsMixin


class Worker(VersionsMixin, DetachActorWorker):
    """verl's copying, without the rest of a worker."""

    def __init__(self, module):
        self.config = SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2"))
        self.actor = SimpleNamespace(engine=SimpleNamespace(module=module))
        self._strategy_handlers = None

    @property
    def weight(self):
        return float(self.actor.engine.module.weight.to_local()[0, 0])

    @weight.setter
    def weight(self, value):
        with torch.no_grad():
            self.actor.engine.module.weight.to_local().fill_(value)


@pytest.fixture
def worker():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    module = torch.nn.Linear(2, 2, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    yield Worker(module)
    torch.distributed.destroy_process_group()


@pytest.mark.shows("rescoring", engine="fsdp2")
def test_steps_keep_the_weights_of_the_last_versions(worker):
    """Calls come in the order of `rescore` and verl: a copy made at the start of a step is kept in the next, under its
    version."""
    kept = []
    for step in range(1, 6):
        worker.weight = step - 1  # what the step before left: its number is the version
        kept.append(worker.keep_version(step - 2, oldest=step - 1 - 2))
        worker.save_model_to_cpu(0)
    assert kept == [[], [0], [0, 1], [1, 2], [2, 3]]
    worker.save_model_to_cpu("now")
    for version in (2, 3):
        worker.use_version(version)
        assert worker.weight == version
    worker.restore_model_from_cpu("now")
    assert worker.weight == 4
    with pytest.raises(KeyError, match="the weights of version 1 are not kept"):
        worker.use_version(1)


def test_a_copy_stays_what_it_was_when_the_weights_change(worker):
    """verl's copy of a shard on the CPU is the shard: this fails where the mixin has nothing more to do."""
    worker.weight = 1.0
    worker.save_model_to_cpu(0)
    alias = DetachActorWorker.copy_handler.fget(worker)(worker.actor.engine.module)[0]["weight"][0]
    worker.weight = 2.0
    assert alias[0, 0] == 2
    worker.restore_model_from_cpu(0)
    assert worker.weight == 1


@pytest.mark.parametrize("workers", [LOSS_WORKERS, ROUTING_WORKERS])
def test_the_workers_of_separate_async_keep_versions_on_all_ranks(workers):
    worker = workers[DetachActorWorker]
    for name in ("keep_version", "kept_versions", "use_version"):
        assert getattr(getattr(worker, name), MAGIC_ATTR)["dispatch_mode"] is Dispatch.ONE_TO_ALL
