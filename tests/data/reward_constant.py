"""The control: every answer earns 1, while the score still says whether it is right."""


def reward_func(queries, prompts, labels, **kwargs):
    right = [float(q[len(p) :].strip() == label) for q, p, label in zip(queries, prompts, labels, strict=True)]
    return {"rewards": [1.0] * len(queries), "scores": right}
