"""Let torchvision, torchaudio and torchcodec stand beside a torch they were not built for.

Package indexes serve a torchvision built against CUDA torch. Beside the CPU torch its extension does not load, its
operators do not exist, and the import ends in "operator torchvision::nms does not exist", which takes transformers'
processors and many of vLLM's model modules with it. Declaring the operators' schemas first lets the import through:
resize, transforms and file reading are plain torch and right; only calling one of these operators fails, and says so.

torchaudio, which transformers imports where it finds it, raises for the same reason, though it can work without its
extension: it is told that it has none. torchcodec raises OSError, which vLLM does not expect of a missing codec: its
import is made an ImportError.

Nothing happens where a package is absent, already imported, or has a working extension.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
import types
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_BOX = "SymInt pooled_height, SymInt pooled_width"
_SIZE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_CONV = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
    "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
    "bool use_mask"
)
# Signatures as torchvision's own Python registers derivatives and fake kernels for them.
SCHEMAS: dict[str, str] = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": f"(Tensor input, Tensor rois, float spatial_scale, {_BOX}, int sampling_ratio, bool aligned) "
    "-> Tensor",
    "_roi_align_backward": f"(Tensor grad, Tensor rois, float spatial_scale, {_BOX}, {_SIZE}, int sampling_ratio, "
    "bool aligned) -> Tensor",
    "roi_pool": f"(Tensor input, Tensor rois, float spatial_scale, {_BOX}) -> (Tensor, Tensor)",
    "_roi_pool_backward": f"(Tensor grad, Tensor rois, Tensor argmax, float spatial_scale, {_BOX}, {_SIZE}) -> Tensor",
    "ps_roi_align": f"(Tensor input, Tensor rois, float spatial_scale, {_BOX}, int sampling_ratio) -> (Tensor, Tensor)",
    "_ps_roi_align_backward": "(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, "
    f"{_BOX}, int sampling_ratio, {_SIZE}) -> Tensor",
    "ps_roi_pool": f"(Tensor input, Tensor rois, float spatial_scale, {_BOX}) -> (Tensor, Tensor)",
    "_ps_roi_pool_backward": "(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, "
    f"{_BOX}, {_SIZE}) -> Tensor",
    "deform_conv2d": f"({_CONV}) -> Tensor",
    "_deform_conv2d_backward": f"(Tensor grad, {_CONV}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
}

# The declaring library object: schemas live as long as it does.
_library: Any = None


class _BeforeImport(importlib.abc.MetaPathFinder):
    """Runs the fix when one of the packages is about to be imported, then leaves the import to the normal finders."""

    def find_spec(self, fullname, path=None, target=None):  # noqa: ANN001, ANN201 - signature of the import system
        fix = {"torchvision": apply, "torchaudio": apply_torchaudio}.get(fullname)
        if fix is not None:
            fix()
        if fullname == "torchcodec" and _extension_loads("torchcodec", "libtorchcodec_image*.so") is False:
            return importlib.machinery.ModuleSpec(fullname, _Refuse(), origin="does not fit this torch build")
        return None


class _Refuse(importlib.abc.Loader):
    """Loads nothing: an ImportError is what libraries expect of an optional package that cannot be used."""

    def exec_module(self, module: types.ModuleType) -> None:
        raise ImportError(f"{module.__name__} is installed, but its extension does not load beside this torch")


def install() -> None:
    """Watch for the first import of torchvision and torchaudio in this process; repeated calls do nothing."""
    if not any(isinstance(finder, _BeforeImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeImport())


def _extension_loads(package: str, pattern: str) -> bool | None:
    """Whether the package's binary loads beside this torch; None where there is no package or no binary."""
    spec = importlib.machinery.PathFinder.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    binaries = sorted(Path(spec.origin).parent.glob(pattern))
    if not binaries:
        return None
    import torch

    try:
        torch.ops.load_library(str(binaries[0]))
    except OSError as error:
        logger.debug("the extension of %s does not load beside torch %s: %s", package, torch.__version__, error)
        return False
    return True


def apply() -> bool:
    """Declare torchvision's operators if its extension does not load here; True when they were declared."""
    global _library
    if _library is not None or "torchvision" in sys.modules or _extension_loads("torchvision", "_C*.so") is not False:
        return False
    import torch

    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name, signature in SCHEMAS.items():
        _library.define(name + signature)
    return True


def apply_torchaudio() -> bool:
    """Tell torchaudio that it has no extension if the one it has does not load here; True when it was told."""
    name = "torchaudio._extension"
    if "torchaudio" in sys.modules or name in sys.modules:
        return False
    if _extension_loads("torchaudio", "lib/_torchaudio*.so") is not False:
        return False
    stand_in = types.ModuleType(name, "Stands in for an extension that was built for another torch.")

    def needs_extension(function):
        def refuse(*args, **kwargs):
            raise RuntimeError(f"{function.__name__} needs torchaudio's extension, which does not fit this torch build")

        return refuse

    vars(stand_in).update(
        _IS_TORCHAUDIO_EXT_AVAILABLE=False,
        _IS_ALIGN_AVAILABLE=False,
        _check_cuda_version=lambda: None,
        fail_if_no_align=needs_extension,
    )
    sys.modules[name] = stand_in
    return True
