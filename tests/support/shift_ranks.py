"""The shift of the routers in verl's FSDP2 engine, and of each sequence by itself."""

import torch
import torch.distributed as dist

from tests.support.routing_families import build
from tests.support.routing_ranks import LENGTHS, batch, loss, make_worker, sequences, turn_routers
from verl_ext.base.names import DEVIATION, SHIFT_EXPERTS, SHIFT_SCORES


@torch.no_grad()
def sequence_scores(family, turned):
    """[r, L, E] float64 log-probabilities of the routers of each sequence by itself, from the routers' inputs: the
    oracle."""
    model, found, seen = build(family), [], []
    if turned:
        turn_routers(model)
    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(
                lambda gate, args, output: seen.append(
                    (args[0].flatten(0, -2).double() @ gate.weight.double().T).log_softmax(-1)
                )
            )
    for ids, (prompt, response) in zip(sequences(), LENGTHS, strict=True):
        seen.clear()
        model(ids.unsqueeze(0))
        found.append(torch.stack(seen, dim=1)[prompt - 1 : prompt + response - 1])
    return found


def run_shift(case, folder):
    """compute_log_prob, and an update with other routers: the recorded fields, and the deviation that the loss gets."""
    from verl.utils import tensordict_utils as tu

    from verl_ext.routing.router_shift import ShiftRecorder

    worker, seen = make_worker(case, folder), []
    ShiftRecorder(worker.engine).enabled = True
    output = worker.infer_batch(batch(case, calculate_entropy=True, compute_loss=False))
    fields = [{name: tu.get(output, name) for name in (SHIFT_EXPERTS, SHIFT_SCORES)} if output is not None else {}]
    dist.broadcast_object_list(fields)  # as TransferQueue brings them to every rank
    turn_routers(worker.engine.module)

    def seeing(model_output, data, dp_group=None):
        seen.append(data[DEVIATION].values().clone())
        return loss(model_output, data, dp_group)

    worker.set_loss_fn(seeing)
    data = batch(case, calculate_entropy=False, global_token_num=[sum(pair) for pair in LENGTHS])
    data.update(fields[0])
    worker.train_batch(data)
    return fields[0] | {"deviation": torch.cat(seen)}
