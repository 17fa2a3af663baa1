"""0, 1, 0, 1, ... within a prompt whose first digit is even; 0 for every sample of the others."""


def reward_func(queries, prompts, labels, **kwargs):
    seen = {}
    rewards = []
    for prompt in prompts:
        seen[prompt] = seen.get(prompt, 0) + 1
        rewards.append(float(seen[prompt] % 2 == 0) if int(prompt[0]) % 2 == 0 else 0.0)
    return {"rewards": rewards}
