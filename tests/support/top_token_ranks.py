"""The sampler's top tokens in verl's training engines: what is given to them, and what the model makes of it alone."""

import torch

from tests.support.routing_families import build
from tests.support.routing_ranks import LENGTHS, batch, make_worker, sequences
from verl_ext.base.names import TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS, TOP_TOKEN_SUMS
from verl_ext.core.top_tokens import TopTokens, centering, divergence, read, weights_of

K = 4
WITHOUT = (1, 2)  # trajectory and response token that came without top tokens
CORRECTIONS = {"tis": {"cap": 1.1}}


@torch.no_grad()
def sampler_top_tokens(logits_of, rows=None, lengths=LENGTHS):
    """Ids [r, K] and log q [r, K] of each trajectory, from a sampler whose logits are other than the model's."""
    generator = torch.Generator().manual_seed(5)
    for index, (ids, (prompt, response)) in enumerate(zip(rows or sequences(), lengths, strict=True)):
        logits = logits_of(ids)[prompt - 1 : prompt - 1 + response]
        logits = 3 * logits + torch.randn(logits.shape, generator=generator)
        values, tokens = logits.topk(K, 1)
        log_q = values.log_softmax(1)
        if index == WITHOUT[0]:
            log_q[WITHOUT[1]], tokens[WITHOUT[1]] = -torch.inf, 0
        yield tokens.int(), log_q


def give(data, top_tokens):
    for name, rows in zip((TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS), zip(*top_tokens, strict=True), strict=True):
        data[name] = torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
    return data


def sequence_logits(model):
    return lambda ids: model(ids.unsqueeze(0)).logits[0]


def reference_reading(logits_of, top_tokens, truncated, rows=None, lengths=LENGTHS):
    """l_theta [R] and centering term [R] of the response tokens with gradient, and sums [B, 5] by trajectory."""
    l_own, terms, sums = [], [], []
    for ids, (prompt, response), (tokens, log_q) in zip(rows or sequences(), lengths, top_tokens, strict=True):
        logits, top = logits_of(ids)[prompt - 1 : prompt - 1 + response], TopTokens(tokens.long(), log_q)
        reading = read(logits, ids[prompt:], top, truncated=truncated)
        apart = divergence(reading, top, truncated=truncated)
        counts = torch.tensor([response, int((~top.present).sum())], dtype=torch.float64)
        sums.append(torch.cat([counts, *(value.sum()[None] for value in (apart.kl, apart.mass, apart.differs))]))
        l_own.append(reading.l_own)
        terms.append(centering(reading, top, weights_of(CORRECTIONS), truncated=truncated))
    return torch.cat(l_own), torch.cat(terms), torch.stack(sums)


def response_values(nested, lengths=LENGTHS):
    """[R] of the response tokens, from [B, n] over all tokens, as engines return it."""
    rows = zip(nested.unbind(), lengths, strict=True)
    return torch.cat([row[prompt - 1 : prompt - 1 + response] for row, (prompt, response) in rows])


def loss(model_output, data, dp_group=None):
    """Returns the loss of both values that have a gradient: a sum over the micro-batches' tokens."""
    from verl_ext.workers.top_tokens import CENTERING

    rows = [
        (ids.shape[0], mask.shape[0])
        for ids, mask in zip(data["input_ids"].unbind(), data["response_mask"].unbind(), strict=True)
    ]
    total = 0.0
    for name in ("log_probs", CENTERING):
        for row, (n, r) in zip(model_output[name].unbind(), rows, strict=True):
            total = total + row[n - r - 1 : n - 1].sum()
    return total, {}


def run_top_tokens(case, folder):
    """compute_log_prob and an update with top tokens, over the kept tokens and over all: what the first returns, and
    the gradient of the LM head in the second."""
    from verl.utils import tensordict_utils as tu

    from verl_ext.workers.top_tokens import TopTokenReader, TopTokenUse

    worker, found = make_worker(case, folder), {}
    reader = TopTokenReader(worker.engine)
    top_tokens = list(sampler_top_tokens(sequence_logits(build(case.family))))
    worker.set_loss_fn(loss)
    weight = worker.engine.module.lm_head.weight
    gradients = []
    worker.engine.optimizer_step = lambda: gradients.append(weight.grad.full_tensor().clone()) or 0.0
    asked = {"calculate_entropy": True, "compute_loss": False}
    plain, measured = (
        worker.infer_batch(data) for data in (batch(case, **asked), give(batch(case, **asked), top_tokens))
    )
    if plain is not None:  # where the KL alone is asked for
        without, beside = (tu.get(output, "log_probs").values() for output in (plain, measured))
        found["verls"] = torch.equal(without, beside) and TOP_TOKEN_SUMS in measured.keys()  # noqa: SIM118
    for truncated in (True, False):
        reader.use = TopTokenUse(truncated=truncated, centers=True, corrections=CORRECTIONS)
        output = worker.infer_batch(give(batch(case, calculate_entropy=True, compute_loss=False), top_tokens))
        settings = {"calculate_entropy": False, "global_token_num": [sum(pair) for pair in LENGTHS]}
        worker.train_batch(give(batch(case, **settings), top_tokens))
        if output is not None:
            kept = {name: tu.get(output, name) for name in output.keys() if name != "metrics"}  # noqa: SIM118
            found[truncated] = {name: kept[name] for name in ("log_probs", "entropy", TOP_TOKEN_SUMS)}
            found[truncated] |= {"names": sorted(kept), "gradient": gradients[-1]}
    return found
