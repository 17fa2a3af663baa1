"""1 for the right sum, 0.2 for another number, else 0."""


def reward_func(queries, prompts, labels, **kwargs):
    answers = [query[len(prompt) :].strip() for query, prompt in zip(queries, prompts, strict=True)]
    right = [float(answer == label) for answer, label in zip(answers, labels, strict=True)]
    number = [float(answer.isdigit()) for answer in answers]
    rewards = [max(r, 0.2 * n) for r, n in zip(right, number, strict=True)]
    return {"rewards": rewards, "scores": right, "extra_logs": {"number": number}}
