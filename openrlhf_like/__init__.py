"""openrlhf_like: reinforcement learning from human feedback on Ray, DeepSpeed and vLLM.

Importing this package is cheap on purpose: neither torch nor Ray nor vLLM is imported here.
"""

from openrlhf_like import torchvision_compat

__version__ = "0.1.0"

torchvision_compat.install()
