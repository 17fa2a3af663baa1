"""Records that cross folders. Imports numpy and nothing else of ours."""

from openrlhf_like.types.errors import TrainingAborted, UserError, WaitTimeout
from openrlhf_like.types.plan import UpdatePlan
from openrlhf_like.types.prompt import Completion, Prompt, SamplingSpec
from openrlhf_like.types.trajectory import Segment, Trajectory, TrajectorySummary, TurnParams

__all__ = [
    "Completion",
    "Prompt",
    "SamplingSpec",
    "Segment",
    "TrainingAborted",
    "Trajectory",
    "TrajectorySummary",
    "TurnParams",
    "UpdatePlan",
    "UserError",
    "WaitTimeout",
]
