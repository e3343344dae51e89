"""The kernels that ``hub="auto"`` takes, by device and op.

Repositories and versions are those that transformers maps its layers to. Nothing is downloaded because it is listed
here: only where the user says ``hub="auto"``, or names the provider ``"hub"``, and no provider before it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ACTIVATION = "kernels-community/activation@v1"
_ROTARY = "kernels-community/rotary@v2"
_RMSNORM = "kernels-community/rmsnorm@v1"
_LAYER_NORM = "kernels-community/layer-norm@v1"

#: By device, as configurations name it, and op.
DEFAULTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": {"rms_norm": _RMSNORM, "rope": _ROTARY, "glu": _ACTIVATION},
        "cuda": {
            "rms_norm": _LAYER_NORM,
            "layer_norm": _LAYER_NORM,
            "activation": _ACTIVATION,
            "glu": _ACTIVATION,
            "rope": _ROTARY,
        },
        "rocm": {
            "rms_norm": "kernels-community/liger-kernels@v3:LigerRMSNorm",
            "activation": _ACTIVATION,
            "glu": _ACTIVATION,
            "rope": "kernels-community/aiter-rope@v3",
        },
        "metal": {
            "rms_norm": "kernels-community/mlx-rmsnorm@v1",
            "activation": _ACTIVATION,
            "glu": _ACTIVATION,
        },
        "xpu": {"rms_norm": _RMSNORM, "rope": _ROTARY},
    }
)
