"""Runs as a spawned rank of test_gate_ranks.py: verl's real FSDP2 engine, two mini-batches of two trajectories."""

import torch
import torch.distributed as dist

from tests.support.fsdp_ranks import batch_of, join_ranks, training_worker

LENGTHS = [(3, 5), (2, 4), (4, 6), (3, 3)]  # prompt and response, of the trajectories of one rank
BYPASS = {"corrections": {"icepop": {"alpha": 0.5, "beta": 5.0}}}
CASES = {
    "no limits": ({}, {}),
    "within": ({"vllm_kl": 0.5, "policy_kl": 10.0, "grad_norm": 1e6}, {}),
    "mismatch": ({"vllm_kl": 0.5}, {"gap": 3.0}),
    "nan": ({"policy_kl": 10.0}, {"gap": float("nan")}),
    "infinite": ({"policy_kl": 10.0}, {"gap": float("-inf")}),
    "moved": ({"policy_kl": 1e-9}, {}),
    "steep": ({"grad_norm": 1e-6}, {}),
}


# Ranks whose tokens OPSM drops, the advantage of all tokens, and settings of the actor.
DROPPING_CASES = {
    "all dropped": ((0, 1), -1.0, {}),
    "dropped on one rank": ((1,), -1.0, {}),
    "all dropped, with a KL": ((0, 1), -1.0, {"use_kl_loss": True, "kl_loss_type": "k1"}),
    "no advantage": ((0, 1), 0.0, {}),
}
BYPASS_CASES = {"bypass": {}, "bypass, a gap": {"gap": 3.0, "first": True}, "bypass, later": {"gap": 3.0}}


def batch(rank, gap=0.0, first=False):
    """Builds a batch; rank 1 adds `gap` to l_infer of its last two trajectories, or with `first` of its first two."""
    generator = torch.Generator().manual_seed(rank)
    rows = [torch.randint(5, 90, (prompt + response,), generator=generator) for prompt, response in LENGTHS]
    old = [torch.full((response,), -4.5) for _, response in LENGTHS]
    off = [gap if rank == 1 and (index < 2) == first else 0.0 for index in range(len(LENGTHS))]
    fields = {
        "old_log_probs": old,
        "rollout_log_probs": [row + shift for row, shift in zip(old, off, strict=True)],
        "advantages": [torch.ones(response) for _, response in LENGTHS],
    }
    sizes = {"global_batch_size": 4, "mini_batch_size": 4}
    return batch_of(rows, LENGTHS, fields, temperature=1.0, calculate_entropy=False, **sizes)


def build_worker(folder, **engine):
    torch.manual_seed(0)
    return training_worker(folder, **engine)


def set_loss(worker, gate, wanted, **settings):
    from verl.workers.config import FSDPActorConfig

    from verl_ext.workers.worker_loss import build_worker_loss

    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    worker.set_loss_fn(build_worker_loss(config, wanted, gate, gate.first_pass)[0])


def weights_of(worker):
    return torch.cat([p.detach().full_tensor().flatten().cpu() for p in worker.engine.module.parameters()])


def run(case, rank, folder):
    """Makes an update; returns its number of optimizer steps, the weights, and the metrics on this rank."""
    from tensordict import NonTensorData
    from verl.utils import tensordict_utils as tu

    from verl_ext.guard.guard import Limit
    from verl_ext.guard.rules import Rule
    from verl_ext.workers.first_pass import FirstPass
    from verl_ext.workers.gate import Gate
    from verl_ext.workers.worker_loss import LossSettings

    bypasses = case in BYPASS_CASES
    limits, settings = ({}, BYPASS_CASES[case]) if bypasses else CASES[case]
    worker = build_worker(folder)
    steps = []
    verls = worker.engine.optimizer_step
    worker.engine.optimizer_step = lambda: steps.append(verls()) or steps[-1]
    gate = Gate(worker)
    wanted = LossSettings.from_dict({"mini_batch": limits, "first_pass": BYPASS if bypasses else None})
    gate.limits = wanted.mini_batch
    if wanted.first_pass is not None:
        gate.first_pass = FirstPass(wanted.first_pass)
    set_loss(worker, gate, wanted)
    data = batch(rank, **settings)
    if bypasses:  # as the trainer sends it, through TransferQueue
        limits = (Limit(Rule("gap", "vllm_kl/k3", 0.5), 0.5),)
        data["first_pass"] = NonTensorData({"narrowed": False, "limits": limits})
    output = worker.train_mini_batch(data=data)
    return {"steps": len(steps), "weights": weights_of(worker), "metrics": dict(tu.get(output, "metrics"))}


def everything(worker):
    """Copies all that a step changes: weights, the optimizer's moments, its settings, the schedule. Compared bit for
    bit."""
    import copy

    engine = worker.engine
    shards = [p.detach().to_local().clone() for p in engine.module.parameters()]
    moments = [
        value.to_local().clone() if hasattr(value, "to_local") else copy.copy(value)
        for p in engine.module.parameters()
        for _, value in sorted(engine.optimizer.state.get(p, {}).items())
    ]
    groups = [{name: value for name, value in g.items() if name != "params"} for g in engine.optimizer.param_groups]
    return copy.deepcopy((shards, moments, groups, engine.lr_scheduler.state_dict()))


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


UNDO_CASES = {
    "undo": {},
    "undo, offloaded": {"param_offload": True, "optimizer_offload": True},
    "undo, offload_policy": {"offload_policy": True},
}


def take_back_updates(gate, rank, everything=everything, weights_of=weights_of, again=4):
    """Makes updates of two mini-batches each, takes them back and makes them again.

    Args:
        gate: the gate around verl's training worker; it keeps updates from now on.
        rank: the number of the data-parallel rank; ranks with the same number have the same batch.
        again: trajectories to score again; they become four.
        everything, weights_of: read from the worker what an update changes, and its weights in one row.
    """
    from verl_ext.workers.undo import keep_updates_of
    from verl_ext.workers.worker_loss import LossSettings

    worker = gate.worker
    shares = worker.engine.get_data_parallel_size()
    gate.undo, gate.after_update = keep_updates_of(worker.engine), again  # of two ranks, two of each
    set_loss(worker, gate, LossSettings())

    def update(step, lr_scale=1.0):
        return update_once(worker, rank, step, lr_scale)

    def restored(before, step):
        return gate.undo.take_back(step - 1) == step and equal(everything(worker), before)

    found, start = {}, everything(worker)
    first = update(1)
    found["the first, before which the optimizer held nothing"] = restored(start, 1)
    found["made again, it is the same"] = same_metrics(update(2), first)
    before, weights = everything(worker), weights_of(worker)
    second = update(3)
    moved = weights_of(worker) - weights
    found["after_update"] = second.get("after_update/policy_kl"), second.get("after_update/vllm_kl")
    # After a forward pass, the root's parameters of FSDP2 are gathered.
    found["independently"] = scored_again(worker, rank, 4 // shares)
    found["one with moments"] = restored(before, 3)
    update(4, lr_scale=0.5)
    found["moved at half the rate"] = float((weights_of(worker) - weights).norm() / moved.norm())
    found["rate"] = worker.engine.optimizer.param_groups[0]["lr"]
    found["given up before"] = gate.undo.take_back(4) is None
    found["nothing is kept"] = gate.undo.take_back(0) is None
    return found


def drop_tokens(gate, rank, weights_of=weights_of):
    """Makes an update that gives the optimizer its moments, then one of each of DROPPING_CASES.

    Args:
        rank: the number of the data-parallel rank.

    Returns case -> whether the weights moved, and whether a step was reported; None where the rank reports nothing.
    """
    from tensordict import NonTensorData
    from verl.utils import tensordict_utils as tu

    from verl_ext.workers.worker_loss import LossSettings

    worker, opsm = gate.worker, LossSettings.from_dict({"corrections": {"opsm": {"delta": 0.1}}})
    gate.undo, gate.after_update = None, 0
    set_loss(worker, gate, opsm)
    update_once(worker, rank, 1)
    shares, found = worker.engine.get_data_parallel_size(), {}
    for step, (case, (ranks, advantage, settings)) in enumerate(DROPPING_CASES.items(), start=2):
        set_loss(worker, gate, opsm, **settings)
        data = batch(rank)
        tu.assign_non_tensor(data, mini_batch_size=2 * shares, global_batch_size=2 * shares)
        data["advantages"] = data["advantages"] * advantage
        # So far above any l_theta that OPSM drops a response, or so far below that it keeps it.
        data["rollout_log_probs"] = data["rollout_log_probs"] + (99.0 if rank in ranks else -99.0)
        data["ref_log_prob"] = data["old_log_probs"]
        data["guarded_update"] = NonTensorData({"step": step, "lr_scale": 1.0})
        before = weights_of(worker)
        output = worker.train_mini_batch(data=data)
        reported = None if output is None else "grad_norm" in tu.get(output, "metrics")
        found[case] = not torch.equal(weights_of(worker), before), reported
    return found


def reuse_log_probs(gate, rank, weights_of=weights_of):
    """Takes a step with l_old of a pass before it, takes it back, and takes it with l_old of its own pass.

    Returns "weights", whether both lead to the same, bit for bit, and differ from those before; "metrics", those of the
    second step beside what the first is measured to be; {} where the rank has none; "self_gap", of the first step.
    """
    from tensordict import NonTensorData
    from verl.utils import tensordict_utils as tu

    from verl_ext.core.measure import measure
    from verl_ext.core.tokens import Tokens
    from verl_ext.workers.first_pass import FirstPass
    from verl_ext.workers.undo import keep_updates_of
    from verl_ext.workers.worker_loss import LossSettings

    worker, corrections = gate.worker, BYPASS["corrections"]
    gate.undo, gate.after_update = keep_updates_of(worker.engine), 0
    whole = len(LENGTHS) * worker.engine.get_data_parallel_size()

    def step(number, data, wanted):
        gate.first_pass = wanted.first_pass and FirstPass(wanted.first_pass)
        set_loss(worker, gate, wanted)
        tu.assign_non_tensor(data, mini_batch_size=whole, global_batch_size=whole)
        update = {"step": number, "lr_scale": 1.0, "has_l_old": wanted.first_pass is None}
        data["guarded_update"] = NonTensorData(update)
        output = worker.train_mini_batch(data=data)
        return dict(tu.get(output, "metrics")) if output is not None else {}

    start, scored = weights_of(worker), batch(rank)
    tu.assign_non_tensor(scored, compute_loss=False)
    output = worker.infer_batch(scored)
    found = [None] * dist.get_world_size()
    own = output["log_probs"].unbind() if output is not None else ()
    own = [row[prompt - 1 : prompt + n - 1] for row, (prompt, n) in zip(own, LENGTHS, strict=False)]
    dist.all_gather_object(found, (rank, own))
    l_old = torch.nested.as_nested_tensor(next(rows for of, rows in found if of == rank and rows), layout=torch.jagged)
    before = batch(rank)
    tokens = (before["rollout_log_probs"].values(), l_old.values(), before["response_mask"].values().bool())
    measured = measure(Tokens(*tokens, before["response_mask"].offsets()), corrections)
    before["old_log_probs"] = l_old
    before["rollout_is_weights"] = torch.nested.nested_tensor_from_jagged(measured.weight, l_old.offsets())
    first = step(1, before, LossSettings())
    moved = weights_of(worker)
    gate.take_back(0)
    after = batch(rank)
    del after["old_log_probs"]
    after["first_pass"] = NonTensorData({"narrowed": False, "limits": ()})
    wanted = {"reuses": True, "first_pass": {"corrections": corrections, "as_mask": False}}
    second = step(2, after, LossSettings.from_dict(wanted))
    same = torch.equal(weights_of(worker), moved) and not torch.equal(start, moved)
    gate.first_pass = None
    names = ("grad_norm", "actor/pg_loss", "actor/ppo_kl")
    return {
        "weights": same,
        "metrics": {name: (second[name], first[name]) for name in names if name in first},
        "k3": second.get("vllm_kl/k3"),
        "self_gap": first.get("self_gap"),
        "dropped": second.get("correction/dropped"),
    }


def update_once(worker, rank, step, lr_scale=1.0):
    """The metrics of an update of two mini-batches; {} where the rank has none."""
    from tensordict import NonTensorData
    from verl.utils import tensordict_utils as tu

    shares = worker.engine.get_data_parallel_size()
    data = batch(rank)
    tu.assign_non_tensor(data, mini_batch_size=2 * shares, global_batch_size=2 * shares)
    data["guarded_update"] = NonTensorData({"step": step, "lr_scale": lr_scale})
    output = worker.train_mini_batch(data=data)
    return dict(tu.get(output, "metrics")) if output is not None else {}


def same_metrics(one, other):
    names = ("grad_norm", "after_update/policy_kl", "actor/pg_loss")
    return one.keys() == other.keys() and all(one[name] == other[name] for name in names if one)


def scored_again(worker, rank, count):
    """Returns the sum of k3 of l_old against the current policy over the first trajectories, and their tokens."""
    from verl.utils import tensordict_utils as tu

    rows = tu.index_select_tensor_dict(batch(rank), list(range(count)))
    tu.assign_non_tensor(rows, compute_loss=False)
    output = worker.infer_batch(rows)
    total = tokens = 0
    scored_rows = output["log_probs"].unbind() if output is not None else ()
    for scored, (prompt, response) in zip(scored_rows, LENGTHS, strict=False):
        x = scored[prompt - 1 : prompt + response - 1].double() + 4.5
        total += float((x.exp() - 1 - x).sum())
        tokens += response
    return total, tokens


def rank_main(rank, ranks, folder, address, results):
    from verl_ext.workers.gate import Gate

    join_ranks(rank, ranks, address)
    found = {case: run(case, rank, folder) for case in (*CASES, *BYPASS_CASES)}
    for case, engine in UNDO_CASES.items():
        found[case] = take_back_updates(Gate(build_worker(folder, **engine)), rank)
    found["dropping"] = drop_tokens(Gate(build_worker(folder)), rank)
    found["reuse"] = reuse_log_probs(Gate(build_worker(folder)), rank)
    torch.save(found, f"{results}/{rank}.pt")
    dist.destroy_process_group()
