"""Never works."""


def reward_func(queries, prompts, labels, **kwargs):
    raise RuntimeError("the reward is broken")
