"""The reward of recipe=cpu_tool, shaped so that a random model learns within a few steps."""

FOR_A_DIGIT = 0.3
FOR_BEING_CLOSE = 0.4
FURTHEST = 9  # the largest distance between two digits


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """Scores a sum's answer by the response's first character, in verl's custom reward signature.

    The score is 0 if it is not a digit, 1 if it is the answer, whatever follows, and otherwise 0.3 for a digit
    and up to 0.4 for a close one: 0.3 + 0.4 * (1 - |digit - answer| / 9). A random model opens with
    the right digit once in a hundred responses and with some digit once in ten, so that the first
    step has rewards to learn from, and closeness then pulls towards the size of the answer.
    """
    first = solution_str[:1]
    # isdecimal() alone also accepts the digits of other scripts.
    if not (first.isascii() and first.isdecimal()):
        return 0.0
    distance = abs(int(first) - int(ground_truth))
    if distance == 0:
        return 1.0
    return FOR_A_DIGIT + FOR_BEING_CLOSE * (1 - distance / FURTHEST)
