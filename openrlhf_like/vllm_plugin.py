"""The hook that vLLM runs in every process it starts (entry point group ``vllm.general_plugins``).

vLLM inspects models, runs its scheduler and runs its workers in processes of its own, where nothing of ours has been
imported: the entry point is how our weight-transfer backend and the torchvision fix get there.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

from openrlhf_like import torchvision_compat

GROUP = "vllm.general_plugins"
NAME = "openrlhf_like"
ENTRY_POINT = "openrlhf_like.vllm_plugin:register"
EARLY_GROUP = "vllm.platform_plugins"
EARLY_ENTRY_POINT = "openrlhf_like.vllm_plugin:prepare"
SHM_BACKEND = "shm"
_BACKEND_MODULE = "openrlhf_like.cluster.transfer.shm"


def prepare() -> None:
    """Watch for torchvision's import. Registered as a platform plugin, it names no platform (returns None).

    vLLM asks platform plugins before it imports transformers, and with it torchvision; general plugins come after.
    """
    torchvision_compat.install()


def register() -> None:
    """Fix torchvision and register the shared-memory weight-transfer backend in this process. Idempotent."""
    torchvision_compat.install()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    # The factories refuse a name they know, and have no public way to ask.
    if SHM_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(SHM_BACKEND, _BACKEND_MODULE, "ShmWeightTransferEngine")
    if SHM_BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(SHM_BACKEND, _BACKEND_MODULE, "ShmTrainerWeightTransferEngine")


def ensure_discoverable() -> None:
    """Make the entry point visible to vLLM's processes where this package runs from a folder without installation.

    Writes a distribution's metadata into a temporary folder and puts it, and the package's own folder, on
    ``PYTHONPATH`` of the processes started from here. Does nothing where the package is installed.
    """
    wanted = ((GROUP, ENTRY_POINT), (EARLY_GROUP, EARLY_ENTRY_POINT))
    if all(any(p.value == value for p in importlib.metadata.entry_points(group=group)) for group, value in wanted):
        return
    root = Path(tempfile.gettempdir()) / f"openrlhf_like-plugin-{os.getuid()}"
    info = root / "openrlhf_like_plugin-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    _write(info / "METADATA", "Metadata-Version: 2.1\nName: openrlhf-like-plugin\nVersion: 0\n")
    _write(
        info / "entry_points.txt",
        f"[{GROUP}]\n{NAME} = {ENTRY_POINT}\n\n[{EARLY_GROUP}]\n{NAME} = {EARLY_ENTRY_POINT}\n",
    )
    package_parent = str(Path(__file__).resolve().parent.parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    added = [p for p in (package_parent, str(root)) if p not in paths]
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, *filter(None, paths)])
    if str(root) not in sys.path:
        sys.path.append(str(root))


def _write(path: Path, text: str) -> None:
    """Write whole or not at all: several engines may start at once."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
