"""Compares, tensor by tensor, what training sent in a weight sync with what each process of the rollout received.

Each process returns 64 bits of all its tensors first. Only where these differ from the first training rank's are the
tensors' own records fetched and compared, so that a sound sync costs the controller a few numbers per process.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from verl_ext.base.errors import HookError
from verl_ext.base.patching import wrap
from verl_ext.core.checksums import BITS, CAUSES, UNWRITTEN, SentTensor, WrongTensor, wrong_tensors
from verl_ext.features.settings import RESYNC, SyncCheckSettings
from verl_ext.features.sync_check import WITHOUT_CHECK
from verl_ext.guard.state import Decision, Event
from verl_ext.upstream import engine_calls, sync_record
from verl_ext.upstream.sync_record import Recorded

RULE = "sync_check"  # of its events
SIGNAL = "sync/wrong_tensors"
NAMED = 5  # how many wrong tensors an event names
COMPARED = 8  # processes whose tensors are fetched; the others that differ are counted
TIMEOUT_S = 600.0


class SyncEnd(NamedTuple):
    """A process with a record of the sync.

    Attributes:
        rank: of a training worker.
        server, worker: of a process of the rollout.
    """

    name: str
    record: Recorded
    rank: int | None = None
    server: int = 0
    worker: int = 0


class SyncCheck:
    """Checks the syncs of one of verl's checkpoint managers: the first, and those that `every` says.

    Args:
        tell: takes what each check decides.

    Attributes:
        metrics: what was found since `take_metrics`.
    """

    def __init__(self, settings: SyncCheckSettings, tell: Callable[[Decision], None]) -> None:
        self.metrics: dict[str, float] = {}
        self._settings, self._tell = settings, tell
        self._checks = 0

    def watch(self, manager: Any) -> None:
        """Checks this manager's syncs from now on."""
        wrap("checked_syncs", manager, "update_weights", partial(self._sync, manager), "global_steps")

    def is_due(self, step: int | None) -> bool:
        """Returns True if the sync of this step is to be checked; verl's validation syncs without a step."""
        every = self._settings.every
        return self._checks == 0 or (every > 0 and step is not None and step % every == 0)

    def take_metrics(self) -> dict[str, float]:
        found, self.metrics = self.metrics, {}
        return found

    def _sync(self, manager: Any, verls: Callable[..., Any], global_steps: int | None = None) -> Any:
        if not self.is_due(global_steps):
            return verls(global_steps)
        tell = partial(self._tell_wrong, global_steps or 0)
        result, wrong = _recorded_sync(manager, verls, global_steps)
        self._checks += 1
        if wrong:
            tell(wrong, self._settings.action, described_wrong(wrong))
        if wrong and self._settings.action == RESYNC:
            if manager.backend == "naive":  # verl wakes a sleeping rollout, and SGLang fails if it is awake
                manager.sleep_replicas()
            result, wrong = _recorded_sync(manager, verls, global_steps)
            if wrong:
                tell(wrong, "stop", f"also when sent again, {described_wrong(wrong)}")
            else:
                tell(wrong, "recover", "the weights were sent again, and all tensors arrived")
        self.metrics[SIGNAL] = max(self.metrics.get(SIGNAL, 0.0), float(len(wrong)))
        return result

    def _tell_wrong(self, step: int, wrong: Sequence[WrongTensor], action: str, reason: str) -> None:
        self._tell(Decision((Event(step, RULE, SIGNAL, len(wrong), 0.0, action, reason),)))


def _recorded_sync(
    manager: Any, verls: Callable[..., Any], global_steps: int | None
) -> tuple[Any, Sequence[WrongTensor]]:
    """Syncs, with a record at both ends. Returns verl's result, and what is wrong."""
    workers, servers = manager.actor_wg, [replica.server_handle for replica in manager.replicas]
    workers.begin_sync_record()
    for server in servers:
        engine_calls.call(server, sync_record.record_arrivals, timeout_s=TIMEOUT_S)
    result = verls(global_steps)
    return result, [*find_wrong(workers, servers)]


def find_wrong(workers: Any, servers: Sequence[Any]) -> Iterator[WrongTensor]:
    """Ends the record of a sync everywhere, and yields what is wrong.

    Args:
        workers: verl's worker group of the actor.
        servers: the handles of the rollout's servers.

    Raises:
        HookError: training's weights did not pass our record.
    """
    first, *others = [
        SyncEnd(f"training rank {rank}", record, rank=rank) for rank, record in enumerate(workers.end_sync_record())
    ]
    ends = [engine_calls.call(server, sync_record.end_record, timeout_s=TIMEOUT_S) for server in servers]
    rollout = [
        SyncEnd(f"rollout server {server} of {len(ends)}, worker {worker}", Recorded(**record), None, server, worker)
        for server, records in enumerate(ends)
        for worker, record in enumerate(records)
    ]
    if not first.record.count:
        raise HookError(
            "stability.sync_check: the first training rank handed verl no weights through get_per_tensor_param",
            fix=WITHOUT_CHECK,
        )
    # A rank that sends nothing may leave its part to the first one.
    places = [place for place in others if place.record.count] + rollout
    differing = [place for place in places if place.record.digest != first.record.digest]
    if first.record.twice and not differing:
        differing = rollout[:1]
    yield from _compared(workers, servers, differing)
    for place in rollout:
        for name, found in (place.record.unwritten or {}).items():
            yield WrongTensor(name, place.name, UNWRITTEN, found)


def _compared(workers: Any, servers: Sequence[Any], differing: Sequence[SyncEnd]) -> Iterator[WrongTensor]:
    if not differing:
        return
    compared = differing[:COMPARED]
    sent = workers.sent_tensors([0, *(place.rank for place in compared if place.rank is not None)])
    tensors, before = sent[0]
    for place in compared:
        yield from wrong_tensors(tensors, _tensors_of(place, sent, servers), place.name, before)
    for place in differing[COMPARED:]:
        found = f"differ by their checksum; only the first {COMPARED} processes are compared"
        yield WrongTensor("some tensors", place.name, BITS, found)


def _tensors_of(place: SyncEnd, sent: Sequence[Any], servers: Sequence[Any]) -> Sequence[SentTensor]:
    if place.rank is not None:
        return sent[place.rank][0]
    answers = engine_calls.call(servers[place.server], sync_record.arrived_tensors, timeout_s=TIMEOUT_S)
    return sync_record.read_tensors(answers[place.worker])


def described_wrong(wrong: Sequence[WrongTensor]) -> str:
    named = "; ".join(map(str, wrong[:NAMED]))
    more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    kinds = dict.fromkeys(each.kind for each in wrong[:NAMED])
    causes = "; ".join(f"{kind}: {CAUSES[kind]}" for kind in kinds)
    return f"{len(wrong)} tensor(s) are wrong after the weight sync: {named}{more}. Usual cause: {causes}"
