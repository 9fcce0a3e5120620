"""Errors that the workers raise for a batch's top tokens, and their position among a micro-batch's tokens."""

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.support.micro_batches import nested
from verl_ext.base.errors import BatchError
from verl_ext.base.names import TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS
from verl_ext.workers.top_tokens import TopTokenReader, TopTokenUse, _token_layout

CPU = torch.device("cpu")
LENGTHS = [(2, 3), (1, 2)]  # prompt and response of each trajectory
V, K = 7, 2
VERLS = torch.zeros(())


class Engine:
    """Calls as verl's: with the logits of each token, and with what came of them."""

    def __init__(self, logits):
        self.logits, self.given = logits, []

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        names = ("distillation_use_topk", "distillation_only")
        self.given.append([tu.get_non_tensor_data(data, name, default=None) for name in names])
        if not self.given[-1][0]:
            return None
        found = loss_function(student_logits=self.logits[None], data=data)
        offsets = data["input_ids"].offsets()
        output = {name: torch.nested.nested_tensor_from_jagged(value[0], offsets) for name, value in found.items()}
        entropy = torch.distributions.Categorical(logits=self.logits).entropy()
        output["entropy"] = torch.nested.nested_tensor_from_jagged(entropy, offsets)
        if not self.given[-1][1]:
            output["log_probs"] = VERLS
        loss_function(model_output=output, data=data, dp_group=None)
        return output


def batch(**changed):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, V, (sum(pair),), generator=generator) for pair in LENGTHS]
    log_q = [torch.randn(response, K, generator=generator).log_softmax(1) for _, response in LENGTHS]
    fields = {
        "input_ids": rows,
        "response_mask": [torch.ones(response, dtype=torch.long) for _, response in LENGTHS],
        TOP_TOKEN_IDS: [torch.stack([torch.randperm(V, generator=generator)[:K] for _ in row]).int() for row in log_q],
        TOP_TOKEN_LOG_PROBS: log_q,
    }
    data = TensorDict({name: nested(value) for name, value in (fields | changed).items()}, batch_size=len(LENGTHS))
    tu.assign_non_tensor(data, calculate_entropy=True)
    return data


def run(data, use, forward_only=True):
    engine = Engine(torch.randn(sum(map(sum, LENGTHS)), V, generator=torch.Generator().manual_seed(1)))
    reader = TopTokenReader(engine)
    reader.use = use
    return engine, engine.forward_backward_batch(data, None, forward_only)


def test_top_tokens_stand_at_the_token_before_their_own():
    data = batch()
    engine, output = run(data, TopTokenUse(truncated=True))
    l_own = output["log_probs"].values()
    start = 0
    for ids, tokens, log_q in zip(
        data["input_ids"].unbind(), data[TOP_TOKEN_IDS].unbind(), data[TOP_TOKEN_LOG_PROBS].unbind(), strict=True
    ):
        response = len(tokens)
        for j in range(response):
            row = start + len(ids) - response + j - 1
            token = ids[row - start + 1]
            kept = sorted({*tokens[j].tolist(), int(token)})
            expected = engine.logits[row, kept].log_softmax(0)[kept.index(int(token))]
            assert l_own[row].item() == pytest.approx(expected.item(), abs=1e-5)
        assert log_q.isfinite().all()
        start += len(ids)


def test_without_top_tokens_the_entropy_is_the_vocabularys():
    data = batch()
    lost = [row.clone() for row in data[TOP_TOKEN_LOG_PROBS].unbind()]
    lost[0][1] = -torch.inf
    data = batch(**{TOP_TOKEN_LOG_PROBS: lost})
    engine, output = run(data, TopTokenUse(truncated=True))
    found, row = output["entropy"].values(), LENGTHS[0][0]  # of the logits that predict the second response token
    whole = torch.distributions.Categorical(logits=engine.logits.double()).entropy()
    assert found[row].item() == pytest.approx(whole[row].item(), abs=1e-5)
    assert found[row].item() > found[row - 1].item() + 0.1, "over the kept tokens, where they are known"
    assert found.isfinite().all()


def test_for_the_kl_alone_verl_computes_its_own_log_probs():
    engine, output = run(batch(), TopTokenUse())
    assert engine.given == [[True, False]]
    assert sorted(output) == ["entropy", "log_probs", "top_token_sums"] and output["log_probs"] is VERLS
    engine, _ = run(batch(), TopTokenUse(), forward_only=False)  # an update, which reads none
    assert engine.given == [[None, None]]


def test_a_token_outside_the_vocabulary_is_named():
    ids = [torch.full((response, K), V).int() for _, response in LENGTHS]
    with pytest.raises(BatchError, match=f"names token {V}, and the training engine's vocabulary has {V}"):
        run(batch(**{TOP_TOKEN_IDS: ids}), TopTokenUse())


def test_a_row_that_verl_has_added_needs_no_top_tokens_of_its_length():
    """A copy of a trajectory with fields of one response token, but for those that verl does not know."""
    whole = batch()
    mask = [torch.ones(LENGTHS[0][1], dtype=torch.long), torch.zeros(1, dtype=torch.long)]
    input_ids = [whole["input_ids"].unbind()[0], torch.zeros(3, dtype=torch.long)]
    added = batch(response_mask=mask, input_ids=input_ids)
    expected = batch(
        response_mask=mask,
        input_ids=input_ids,
        **{
            name: [whole[name].unbind()[0], whole[name].unbind()[1][:1] * 0]
            for name in (TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS)
        },
    )
    sampled, top = _token_layout(added, CPU)
    _, wanted = _token_layout(expected, CPU)
    assert len(sampled) == 8
    assert torch.equal(top.ids, wanted.ids) and torch.equal(top.log_q, wanted.log_q)


def test_top_tokens_of_other_tokens_are_named():
    short = [torch.zeros(response - 1, K).int() for _, response in LENGTHS]
    with pytest.raises(BatchError, match=r"top_token_ids is \(3, 2\).*5 response tokens"):
        run(batch(**{TOP_TOKEN_IDS: short}), TopTokenUse())
