"""The tables say of every norm class of torch, diffusers and transformers what it computes, and it does."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import sys
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import diffkern.matching
from diffkern.matching import TABLE, LeftAlone, NormSemantics, apply, declines, full_name, match
from tests.matching.zoo import SERVED, Specimen, load, random_input, specimens

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Versions that the tables were written for: from there on, every name must exist.
WRITTEN_FOR = {"torch": (2, 11), "diffusers": (0, 42), "transformers": (5, 24)}

#: Modules that take a norm of something along the way and are no norm layers.
NOT_NORM_LAYERS = {
    "diffusers.models.transformers.transformer_longcat_audio_dit.AudioDiTBlock",
}

_NORM_LIKE = re.compile(
    r"rsqrt\(|\.normalize\(|F\.(layer|rms|group)_norm\(|torch\.norm\(|torch\.(layer|rms|group)_norm\("
)


def relative_error(y: Tensor, reference: Tensor) -> float:
    return (torch.linalg.vector_norm(y.double() - reference) / torch.linalg.vector_norm(reference)).item()


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values in other strides."""
    padded = torch.stack((x, x), -1).flatten(-2)
    return {
        "contiguous": x,
        "transposed": x.transpose(1, -1).contiguous().transpose(1, -1),
        "batch inside": x.transpose(0, 1).contiguous().transpose(0, 1),
        "every second": padded[..., ::2],
        "slice": torch.cat((x, x), -1)[..., : x.shape[-1]],
    }


def is_written_for(name: str) -> bool:
    library = name.partition(".")[0]
    version = tuple(int(part) for part in importlib.metadata.version(library).split(".")[:2])
    return version >= WRITTEN_FOR[library]


@pytest.mark.parametrize("specimen", list(specimens()), ids=str)
def test_apply_gives_what_the_stock_class_gives(specimen: Specimen, device: str) -> None:
    for x_dtype in DTYPES:
        for parameter_dtype in DTYPES:
            module = specimen.build(parameter_dtype, device)
            matched = match(module)
            assert matched is not None and matched.how == "table" and matched.reason is None
            semantics = matched.semantics
            assert semantics is not None
            assert list(inspect.signature(type(module).forward).parameters)[1] == semantics.argument
            has_parameters = any(True for _ in module.parameters())
            if parameter_dtype != x_dtype and not has_parameters:
                continue
            x = random_input(specimen.shape, x_dtype, device)
            if parameter_dtype != x_dtype and not semantics.mixed_dtypes:
                assert "which its class need not accept" in str(declines(semantics, module, x))
                continue
            reference = specimen.reference(module, x)
            for layout, view in layouts(x).items():
                assert declines(semantics, module, view) is None
                stock = module(view)
                ours = apply(semantics, module, view, provider="eager")
                case = f"input {x_dtype}, parameters {parameter_dtype}, {layout}"
                assert ours.dtype == stock.dtype, case
                assert ours.shape == stock.shape, case
                assert ours.stride() == stock.stride(), case
                assert relative_error(ours, reference) <= 1.05 * relative_error(stock, reference) + 1e-6, case


def test_all_served_classes_are_in_the_zoo() -> None:
    assert {specimen.name for specimen in specimens()} == set(SERVED)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_name_of_the_tables_exists(name: str) -> None:
    if not is_written_for(name):
        pytest.skip(f"{name.partition('.')[0]} is older than the tables")
    cls = load(name)
    assert full_name(cls) == name
    assert issubclass(cls, nn.Module)


@pytest.mark.parametrize("name", sorted(set(TABLE) - set(SERVED)))
def test_classes_left_alone_give_their_reason(name: str) -> None:
    entry = TABLE[name]
    assert isinstance(entry, LeftAlone) and len(entry.reason) > 20
    if not is_written_for(name):
        pytest.skip(f"{name.partition('.')[0]} is older than the tables")
    # Most of them need a configuration of some size; the class is all that is looked at.
    module = load(name).__new__(load(name))
    nn.Module.__init__(module)
    matched = match(module)
    assert matched is not None
    assert (matched.semantics, matched.how, matched.reason) == (None, "table", entry.reason)


def _module_classes(package: str) -> dict[str, type[nn.Module]]:
    root = importlib.import_module(package)
    for info in pkgutil.walk_packages(root.__path__, f"{package}."):
        if "flax" not in info.name:
            importlib.import_module(info.name)
    return {
        full_name(value): value
        for name in list(sys.modules)
        if name.startswith(f"{package}.")
        for value in vars(sys.modules[name]).values()
        if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == name
    }


def test_every_norm_of_diffusers_models_is_known() -> None:
    classes = _module_classes("diffusers.models")
    assert len(classes) > 500
    unknown = []
    for name, cls in classes.items():
        forward = vars(cls).get("forward")
        source = inspect.getsource(forward) if inspect.isfunction(forward) else ""
        if ("norm" in cls.__qualname__.lower() or _NORM_LIKE.search(source)) and name not in TABLE:
            unknown.append(name)
    assert set(unknown) == NOT_NORM_LAYERS


def test_every_norm_of_the_text_encoders_in_the_table_is_known() -> None:
    modules = {name.rpartition(".")[0] for name in TABLE if name.startswith("transformers.") and is_written_for(name)}
    unknown = [
        full_name(value)
        for module in modules
        for value in vars(importlib.import_module(module)).values()
        if inspect.isclass(value)
        and issubclass(value, nn.Module)
        and value.__module__ == module
        and "norm" in value.__qualname__.lower()
        and full_name(value) not in TABLE
    ]
    assert unknown == []


def test_every_norm_of_torch_is_known() -> None:
    files = ("normalization", "batchnorm", "instancenorm")
    names = {
        full_name(value)
        for file in files
        for name, value in vars(importlib.import_module(f"torch.nn.modules.{file}")).items()
        if inspect.isclass(value) and issubclass(value, nn.Module) and not name.startswith("_") and name != "Module"
    }
    assert names <= set(TABLE)


def test_classes_of_one_name_in_two_files_are_told_apart() -> None:
    kolors = TABLE["diffusers.pipelines.kolors.text_encoder.RMSNorm"]
    common = TABLE["diffusers.models.normalization.RMSNorm"]
    torch_own = TABLE["torch.nn.modules.normalization.RMSNorm"]
    assert isinstance(kolors, NormSemantics) and isinstance(common, NormSemantics)
    assert isinstance(torch_own, NormSemantics)
    assert (kolors.rounding, common.rounding, torch_own.rounding) == ("once", "weight", "once")
    assert (kolors.output, common.output, torch_own.output) == ("input", "weight", "input")


def test_the_default_ltx_transformer_has_169_norms() -> None:
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        model = diffusers.LTXVideoTransformer3DModel()
    found = Counter(
        (full_name(type(module)), getattr(module, "weight", None) is not None)
        for module in model.modules()
        if (matched := match(module)) is not None and matched.semantics is not None
    )
    assert found == {
        ("diffusers.models.normalization.RMSNorm", False): 56,
        ("torch.nn.modules.normalization.RMSNorm", True): 112,
        ("torch.nn.modules.normalization.LayerNorm", False): 1,
    }


def test_the_tables_import_neither_diffusers_nor_transformers() -> None:
    for module in ("semantics", "tables", "match", "probe", "forward"):
        source = inspect.getsource(importlib.import_module(f"{diffkern.matching.__name__}.{module}"))
        assert not re.search(r"^\s*(import|from) (diffusers|transformers)", source, re.MULTILINE)
