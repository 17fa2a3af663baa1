"""Evaluation of a policy: n samples a held-out prompt, pass@1, pass@n, lengths, truncation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from openrlhf_like.observe import Timer
from openrlhf_like.pipeline.rollout_phase import RolloutPhase
from openrlhf_like.types import Prompt, SamplingSpec, TrajectorySummary


class Evaluator:
    """Evaluates on a schedule. Prompts are grouped by the data set they came from."""

    def __init__(self, cfg: Any, phase: RolloutPhase, prompts: Sequence[Prompt], timer: Timer) -> None:
        self.cfg, self.phase, self.prompts, self.timer = cfg, phase, list(prompts), timer
        self.samples = cfg.eval.n_samples_per_prompt
        self.sampling = SamplingSpec(
            max_tokens=cfg.rollout.max_new_tokens or 0,
            temperature=cfg.eval.temperature,
            top_p=cfg.rollout.top_p if cfg.eval.temperature > 0 else 1.0,
            logprobs=False,
        )

    def due(self, step: int, last: bool) -> bool:
        """``--eval.steps``: every so many steps, and after the last one; -1 means after the last one only."""
        if not self.prompts:
            return False
        every = self.cfg.eval.steps
        return last or (every > 0 and step % every == 0)

    def run(self, step: int) -> dict[str, float]:
        """``eval/<data set>/...`` of the weights that the engines hold now."""
        with self.timer("eval"):
            scored = self.phase.score(
                self.phase.generate(self.prompts, self.samples, self.sampling, step, phase="eval")
            )
        summaries = [summary for _, block in scored for summary in block]
        source = {p.prompt_id: p.datasource for p in self.prompts}
        by_source: dict[str, list[TrajectorySummary]] = {}
        for summary in summaries:
            by_source.setdefault(source[summary.group_id], []).append(summary)
        out: dict[str, float] = {}
        for name, rows in by_source.items():
            out.update({f"eval/{name}/{key}": value for key, value in evaluation_metrics(rows, self.samples).items()})
        return out


def evaluation_metrics(rows: Sequence[TrajectorySummary], n: int) -> dict[str, float]:
    """pass1: mean score of a sample; pass<n>: mean over prompts of the best score; lengths in sampled tokens.

    The score is the reward function's ``scores``, or its reward where it gives none. A sample without one counts as 0
    and in ``failed_fraction``: an evaluation must not look better because its verifier crashed.
    """
    groups: dict[str, list[float]] = {}
    failed = 0
    for row in rows:
        value = row.reward if row.score is None else row.score
        usable = row.error is None and math.isfinite(value)
        failed += not usable
        groups.setdefault(row.group_id, []).append(value if usable else 0.0)
    lengths = [row.num_actions for row in rows]
    out = {
        "pass1": sum(sum(g) / len(g) for g in groups.values()) / len(groups),
        "response_length": sum(lengths) / len(rows),
        "truncated_fraction": sum(row.truncated for row in rows) / len(rows),
        "failed_fraction": failed / len(rows),
        "prompts": float(len(groups)),
    }
    if n > 1:
        out[f"pass{n}"] = sum(max(g) for g in groups.values()) / len(groups)
    return out
