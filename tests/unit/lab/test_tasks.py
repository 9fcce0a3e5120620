"""The lab's tasks: which answers are right, and how far."""

import pytest
import torch

from verl_ext.lab.tasks import ASK, BASE, END, TASKS, TaskSettings, draw, rewards


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("answer", [0, 3, 11])
def test_a_drawn_answer_is_right_and_a_wrong_token_ends_the_reward(name, answer):
    task = TaskSettings(name, 4, answer)
    prompts, answers = draw(task, 50, torch.Generator().manual_seed(0))
    length = answer or 4
    assert prompts.shape == (50, 5) and (prompts[:, -1] == ASK).all()
    assert answers.shape == (50, length + 1) and (answers[:, -1] == END).all()
    assert (rewards(task, prompts, answers) == 1).all()
    assert (rewards(task, prompts, torch.cat([answers, answers], 1)) == 1).all(), "what follows does not matter"
    for wrong in range(length + 1):
        broken = answers.clone()
        broken[:, wrong] = ASK
        torch.testing.assert_close(rewards(task, prompts, broken), torch.full((50,), wrong / (length + 1)))


def test_a_longer_answer_is_of_the_prompts_digits_repeated():
    task = TaskSettings("prefix_sums", 3, 7)
    _, answers = draw(task, 20, torch.Generator().manual_seed(1))
    digits, _ = draw(TaskSettings("prefix_sums", 3), 20, torch.Generator().manual_seed(1))
    expected = [
        [sum(row[t % 3] for t in range(until + 1)) % BASE for until in range(7)] for row in digits[:, :3].tolist()
    ]
    assert answers[:, :7].tolist() == expected


def test_any_digit_of_the_prompt_is_right_and_no_other():
    task = TaskSettings("any_of", 2, 4)
    prompts = torch.tensor([[3, 7, ASK]] * 3)
    responses = torch.tensor([[7, 7, 3, 7, END], [3, 3, 3, 4, END], [3, END, 3, 3, END]])
    torch.testing.assert_close(rewards(task, prompts, responses), torch.tensor([1.0, 0.6, 0.2]))
