"""Compares the shift of Megatron's routers in verl's engine with each sequence by itself, in float64."""

import torch

from tests.support.closeness import close
from tests.support.megatron_cpu import OnCPU, infer
from tests.support.recorded_routes import LENGTHS, TOP_K, batch, nested
from verl_ext.base.names import SHIFT_EXPERTS, SHIFT_SCORES
from verl_ext.routing.router_shift import MegatronShiftRecorder

FLOAT16 = 1e-3  # of a log-probability: twice the rounding of float16


def routers_of(engine):
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for module in engine.module[0].modules() if isinstance(module, TopKRouter)]


def move_routers(engine):
    """The routers after an update, alike on each rank and in each engine."""
    generator = torch.Generator().manual_seed(3)
    for router in routers_of(engine):
        router.weight.data += 0.05 * torch.randn(router.weight.shape, generator=generator)


@torch.no_grad()
def sequence_scores(engine):
    """[r, L, E] log-probabilities of the routers of each sequence by itself, from the routers' inputs: the oracle."""
    found = []
    for index, (prompt, response) in enumerate(LENGTHS):
        seen = []

        def keep(router, args, output, seen=seen):
            seen.append((args[0].flatten(0, 1).double() @ router.weight.double().T).log_softmax(-1))

        handles = [router.register_forward_hook(keep) for router in routers_of(engine)]
        with OnCPU(), engine.eval_mode():
            engine.infer_batch(batch([index]))
        for handle in handles:
            handle.remove()
        found.append(torch.stack(seen, dim=1)[prompt - 1 : prompt + response - 1])
    return found


def check_shift(engine, old, current):
    """Checks that compute_log_prob records `old` (the engine as it is), and that the update gets how far `current` is.

    Args:
        old, current: `sequence_scores` of the same weights in one process, before and after `move_routers`.
    """
    recorder = MegatronShiftRecorder(engine)
    recorder.enabled = True
    output = infer(engine)(batch())
    experts = [scores.topk(TOP_K).indices for scores in old]
    if output is not None:
        for row, (scores, ids) in enumerate(zip(old, experts, strict=True)):
            assert output[SHIFT_EXPERTS].unbind()[row].tolist() == ids.tolist()
            found = output[SHIFT_SCORES].unbind()[row]
            assert found.dtype == torch.float16
            close(found, scores.gather(2, ids), FLOAT16)
    reference = infer(engine)(batch(calculate_entropy=False))
    assert reference is None or SHIFT_SCORES not in set(reference.keys())
    move_routers(engine)
    data = batch(use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    data[SHIFT_EXPERTS] = nested([ids.to(torch.int16) for ids in experts])
    data[SHIFT_SCORES] = nested([s.gather(2, ids).half() for s, ids in zip(old, experts, strict=True)])
    seen = []

    def loss(model_output, data, dp_group=None):
        seen.append(data["router_deviation"].values().double())
        return model_output["log_probs"].values().sum(), {}

    with OnCPU():
        engine.forward_backward_batch(data, loss)
    expected = [
        (now - then).abs().gather(2, ids).mean((1, 2)) for now, then, ids in zip(current, old, experts, strict=True)
    ]
    scale = max(float(s.gather(2, ids).abs().max()) for s, ids in zip(old, experts, strict=True))
    assert torch.cat(expected).mean() > 10 * FLOAT16 * scale, "routers that moved"
    close(torch.cat(seen), torch.cat(expected), FLOAT16, scale=scale)
