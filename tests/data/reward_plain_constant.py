"""1 for everything, score included."""


def reward_func(queries, prompts, labels):
    return [1.0] * len(queries)
