"""Norm classes of ``torch.nn``, by exact class."""

from __future__ import annotations

from diffkern.matching.semantics import Entry, LeftAlone, NormSemantics

_BATCH = LeftAlone("batch normalisation uses running statistics and folds into the layer before it")
_INSTANCE = LeftAlone("instance normalisation works on whole channel planes, not along one dimension")
_LAZY = LeftAlone("a lazy module has no parameters before its first call")
_RESPONSE = LeftAlone("response normalisation works on a window of neighbouring channels")
_PARAMETRIZATION = LeftAlone("a parametrization of another module's weight, not a layer")

_LAYER_NORM = NormSemantics(
    "layer_norm", "input", bias="bias", dim="normalized_shape", layout="contiguous", mixed_dtypes=False
)
_RMS_NORM = NormSemantics("rms_norm", "x", optional_eps=True, dim="normalized_shape", layout="contiguous")

TABLE: dict[str, Entry] = {
    "torch.nn.modules.normalization.LayerNorm": _LAYER_NORM,
    "torch.nn.modules.normalization.RMSNorm": _RMS_NORM,
    "torch.nn.modules.normalization.GroupNorm": LeftAlone(
        "group normalisation works on groups of channels and all positions, not along one dimension"
    ),
    "torch.nn.modules.normalization.LocalResponseNorm": _RESPONSE,
    "torch.nn.modules.normalization.CrossMapLRN2d": _RESPONSE,
    "torch.nn.modules.batchnorm.BatchNorm1d": _BATCH,
    "torch.nn.modules.batchnorm.BatchNorm2d": _BATCH,
    "torch.nn.modules.batchnorm.BatchNorm3d": _BATCH,
    "torch.nn.modules.batchnorm.SyncBatchNorm": _BATCH,
    "torch.nn.modules.batchnorm.LazyBatchNorm1d": _LAZY,
    "torch.nn.modules.batchnorm.LazyBatchNorm2d": _LAZY,
    "torch.nn.modules.batchnorm.LazyBatchNorm3d": _LAZY,
    "torch.nn.modules.instancenorm.InstanceNorm1d": _INSTANCE,
    "torch.nn.modules.instancenorm.InstanceNorm2d": _INSTANCE,
    "torch.nn.modules.instancenorm.InstanceNorm3d": _INSTANCE,
    "torch.nn.modules.instancenorm.LazyInstanceNorm1d": _LAZY,
    "torch.nn.modules.instancenorm.LazyInstanceNorm2d": _LAZY,
    "torch.nn.modules.instancenorm.LazyInstanceNorm3d": _LAZY,
    "torch.nn.utils.parametrizations._SpectralNorm": _PARAMETRIZATION,
    "torch.nn.utils.parametrizations._WeightNorm": _PARAMETRIZATION,
}
