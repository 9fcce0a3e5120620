"""The controller's part of the sync check: when it checks, whom it asks, and what it tells."""

from dataclasses import asdict, astuple
from types import SimpleNamespace

import pytest
import torch

from verl_ext.base.errors import HookError
from verl_ext.core.checksums import TensorRecorder
from verl_ext.features.settings import SyncCheckSettings
from verl_ext.trainer import sync_check
from verl_ext.trainer.sync_check import COMPARED, NAMED, SIGNAL, SyncCheck
from verl_ext.upstream.sync_record import Recorded


def tensors_of(**changed):
    """Records of twelve tensors, some of them changed: name -> a tensor, or None if it is missing."""
    recorder = TensorRecorder()
    weights = {f"layer_{number}": torch.full((3,), float(number)) for number in range(12)} | changed
    for name, tensor in weights.items():
        if tensor is not None:
            recorder.add(name, tensor)
    return recorder.close()


class Workers:
    """verl's worker group, of one tensor record per rank."""

    def __init__(self, *ranks):
        self.ranks, self.fetched, self.begun = ranks, [], 0

    def begin_sync_record(self):
        self.begun += 1

    def end_sync_record(self):
        return [Recorded.of(tensors) for tensors in self.ranks]

    def sent_tensors(self, ranks):
        self.fetched.append(sorted(ranks))
        return [(tensors, ()) if rank in ranks else None for rank, tensors in enumerate(self.ranks)]


class Manager:
    """verl's checkpoint manager, with servers that are lists of one tensor record per worker.

    Args:
        mended: syncs after which the servers have what was sent.
    """

    def __init__(self, workers, *servers, backend="naive", mended=None):
        self.actor_wg, self.replicas = workers, [SimpleNamespace(server_handle=server) for server in servers]
        self.synced, self.backend, self.mended = [], backend, mended

    def sleep_replicas(self):
        self.synced.append("sleep")

    def update_weights(self, global_steps=None):
        self.synced.append(global_steps)
        if self.synced.count(global_steps) == self.mended:
            for replica in self.replicas:
                replica.server_handle[:] = [self.actor_wg.ranks[0]] * len(replica.server_handle)
        return {"sent": len(self.synced)}


@pytest.fixture
def checked(monkeypatch):
    """checked(workers, servers, settings..., steps) -> the check after these syncs, its events, the servers' calls."""

    def answer(server, function, timeout_s):
        calls.append(function.__name__)
        if function.__name__ == "arrived_tensors":
            return [[astuple(each) for each in worker] for worker in server]
        unwritten = getattr(server, "unwritten", {})
        return [asdict(Recorded.of(worker, unwritten=unwritten)) for worker in server]

    calls, events = [], []
    monkeypatch.setattr(sync_check.engine_calls, "call", answer)

    def checked(workers, *servers, steps=(0,), synced=None, backend="naive", mended=None, **settings):
        check = SyncCheck(SyncCheckSettings(**settings), lambda decision: events.extend(decision.events))
        manager = Manager(workers, *servers, backend=backend, mended=mended)
        check.watch(manager)
        results = [manager.update_weights(step) for step in steps]
        assert manager.synced == (synced or list(steps)) and results[-1] == {"sent": len(manager.synced)}
        return check, events, calls

    return checked


def test_a_sound_sync_fetches_no_tensors(checked):
    sent = tensors_of()
    workers = Workers(sent, sent)
    check, events, calls = checked(workers, [sent, sent[::-1]], [sent, sent])
    assert check.take_metrics() == {SIGNAL: 0} and check.take_metrics() == {}
    assert (
        not events
        and calls == ["record_arrivals", "record_arrivals", "end_record", "end_record"]
        and not workers.fetched
    )


@pytest.mark.parametrize(("every", "due"), [(0, [0]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])])
def test_the_first_sync_is_checked_and_those_that_the_user_asks_for(checked, every, due):
    sent = tensors_of()
    workers = Workers(sent)
    checked(workers, [sent], steps=(0, 1, 2, 3, 4), every=every)
    assert workers.begun == len(due)
    workers = Workers(sent)
    checked(workers, [sent], steps=(7, None, None), every=1)  # resumed; a validation's syncs have no step
    assert workers.begun == 1


def test_a_wrong_tensor_is_named_with_its_process(checked):
    sent = tensors_of()
    wrong = tensors_of(layer_3=None, layer_5=torch.full((3,), 6.0))
    check, (event,), calls = checked(Workers(sent, sent), [sent, sent], [sent, wrong], action="stop")
    assert check.take_metrics() == {SIGNAL: 2}
    assert (event.step, event.signal, event.value, event.action) == (0, SIGNAL, 2, "stop")
    assert event.reason.startswith("2 tensor(s) are wrong after the weight sync: layer_3 on rollout server 1 of 2, ")
    assert "layer_5 on rollout server 1 of 2, worker 1: received with the bits of layer_6" in event.reason
    assert calls.count("arrived_tensors") == 1


@pytest.mark.parametrize(("backend", "synced"), [("naive", [5, "sleep", 5]), ("nccl", [5, 5])])
def test_a_wrong_sync_is_repeated_once_and_then_sound_or_the_end(checked, backend, synced):
    """verl sends to a rollout on the same GPUs only while it sleeps."""
    sent, wrong = tensors_of(), tensors_of(layer_3=None)
    workers, repeated = Workers(sent), {"action": "resync", "backend": backend, "steps": (5,), "synced": synced}
    check, events, _ = checked(workers, [sent], [wrong], mended=2, **repeated)
    assert [(event.step, event.action, event.value) for event in events] == [(5, "resync", 1), (5, "recover", 0)]
    assert "layer_3 on rollout server 1 of 2" in events[0].reason and check.take_metrics() == {SIGNAL: 0}
    assert workers.begun == 2
    events.clear()
    check, events, _ = checked(workers, [sent], [wrong], **repeated)
    assert [(event.action, event.value) for event in events] == [("resync", 1), ("stop", 1)]
    assert "layer_3 on rollout server 1 of 2" in events[1].reason and check.take_metrics() == {SIGNAL: 1}
    events.clear()
    assert checked(workers, [sent], action="resync")[1] == [], "a sound sync is not repeated"


def test_a_replica_that_missed_the_sync_is_named_with_few_of_its_tensors(checked):
    sent = tensors_of()
    check, (event,), _ = checked(Workers(sent), [sent], [()])
    assert check.take_metrics() == {SIGNAL: len(sent)}
    assert event.reason.count("on rollout server 1 of 2, worker 0") == NAMED
    assert f"; and {len(sent) - NAMED} more. Usual cause: missing: a filter" in event.reason


def test_a_rank_that_sends_other_weights_is_named_and_one_that_sends_none_is_not(checked):
    sent, other = tensors_of(), tensors_of(layer_2=torch.ones(3) / 3)
    workers = Workers(sent, (), other)
    check, (event,), _ = checked(workers, [sent, sent, sent])
    assert check.take_metrics() == {SIGNAL: 1} and workers.fetched == [[0, 2]]
    assert "layer_2 on training rank 2: received with other bits" in event.reason


def test_a_layer_that_every_rank_sends_twice_is_named_once(checked):
    sent = (*tensors_of(), tensors_of()[4])
    _, (event,), _ = checked(Workers(sent, sent), [sent], [sent])
    assert event.value == 1 and "layer_4 on rollout server 0 of 2, worker 0: sent 2 times" in event.reason


def test_a_parameter_that_no_tensor_reached_is_named(checked):
    class Server(list):
        """A list with an attribute."""

    sent = tensors_of()
    server = Server([sent])
    server.unwritten = {"experts": "nothing was written to it"}
    _, (event,), _ = checked(Workers(sent), server)
    assert "experts on rollout server 0 of 1, worker 0: nothing was written to it. Usual" in event.reason


def test_of_many_processes_that_differ_the_first_are_compared(checked):
    sent, wrong = tensors_of(), tensors_of(layer_1=None)
    check, (event,), calls = checked(Workers(sent), *([wrong] for _ in range(COMPARED + 3)))
    assert check.take_metrics() == {SIGNAL: COMPARED + 3} and calls.count("arrived_tensors") == COMPARED
    assert event.value == COMPARED + 3


def test_weights_that_do_not_pass_the_record_stop_the_run(checked):
    with pytest.raises(HookError, match="handed verl no weights through get_per_tensor_param"):
        checked(Workers(()), [tensors_of()])
