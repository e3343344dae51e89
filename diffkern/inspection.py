"""Models from a name, a configuration or a folder, and proofs of them as a whole: ``diffkern inspect``, ``verify``."""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from diffkern.bench.environment import dtype_argument
from diffkern.bench.models import DENOISERS, NO_DOWNLOAD
from diffkern.bench.steps import first_tensor
from diffkern.hub.config import KernelConfig
from diffkern.injection import InjectionReport, inject_optimized_kernels
from diffkern.injection.components import is_denoiser
from diffkern.injection.fp8_fusion import OP, kind_of
from diffkern.verify.measures import relative_error

#: What is proven runs fused, also where it gains nothing.
_UNTIMED = KernelConfig(measure=False)
#: Entries of configurations that say how many layers a model has.
_LAYERS = ("num_layers", "num_single_layers", "n_layers", "num_hidden_layers", "num_refiner_layers")
#: What a pipeline is called with for the inputs of its denoiser: sides that every model takes, and frames of a video.
_CALL = {"prompt": "a lighthouse in a storm", "num_inference_steps": 2, "height": 128, "width": 128, "num_frames": 9}
#: Steps of a short run in fp8: differences have grown by then, and it takes no longer than the proofs.
STEPS = 4
#: Decibels below which such a run is called poor: differences are visible from about here.
POOR = 30.0
#: How many kinds of layers are named.
_NAMED = 3
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin")


class ModelError(ValueError):
    """There is no such model, or its configuration cannot be used. Says why."""


def load_model(
    name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, layers: int | None = None
) -> nn.Module | SimpleNamespace:
    """Builds a model, or the models of a pipeline as an object with ``components``.

    Args:
        name: A name of :data:`diffkern.bench.models.DENOISERS`, a ``config.json``, the folder of a model, or that of a
            pipeline, or its ``model_index.json``. Weights beside the configuration are loaded; without any, or on
            ``meta``, they are random.
        device: Where the models are made.
        dtype: Of their weights.
        layers: How many layers to keep of each kind; weights are random then.

    Raises:
        ModelError: there is no such model, or it cannot be built.
    """
    path = Path(name)
    path = path.parent if path.name == "model_index.json" else path
    if name in DENOISERS:
        denoiser = DENOISERS[name]
        if layers is not None:
            denoiser = replace(denoiser, layers=_cut(_defaults(denoiser.class_name), layers))
        return denoiser.build(device, dtype)
    if not path.exists():
        raise ModelError(
            f"{name}: not found. It is no file or folder, and none of {', '.join(DENOISERS)}. {NO_DOWNLOAD}"
        )
    index = path / "model_index.json"
    if not index.is_file():
        if path.is_dir() and not (path / "config.json").exists():
            raise ModelError(f"{path}: config.json not found, nor a pipeline's model_index.json: name another folder")
        return _build(path / "config.json" if path.is_dir() else path, device, dtype, layers)
    folders = [folder for folder in _read(index) if (path / folder / "config.json").is_file()]
    if not folders:
        raise ModelError(f"{index} names no folder with a config.json")
    found = {folder: _build(path / folder / "config.json", device, dtype, layers) for folder in folders}
    # A report names the class of what it is about.
    pipeline: Any = type(str(_read(index).get("_class_name", "pipeline")), (SimpleNamespace,), {})
    made: SimpleNamespace = pipeline(components=found)
    return made


def read_inputs(path: Path, device: torch.device) -> dict[str, Any]:
    """Reads the keyword arguments of a call, a dict that ``torch.save`` wrote.

    Raises:
        ModelError: there is no such file, or something else in it.
    """
    try:
        inputs = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise ModelError(f"--inputs {path}: not found") from None
    except Exception as error:  # torch.load raises whatever it meets in a file
        raise ModelError(f"--inputs {path} is no file of tensors by torch.save, or holds more than these") from error
    if not isinstance(inputs, dict) or not all(isinstance(name, str) for name in inputs):
        raise ModelError(f"--inputs {path} holds no dict of keyword arguments, but {type(inputs).__name__}")
    return inputs


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: not found") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is no JSON that can be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no configuration, but {type(content).__name__}")
    return content


def _build(path: Path, device: torch.device, dtype: torch.dtype, layers: int | None) -> nn.Module:
    config = _read(path)
    weights = device.type != "meta" and layers is None and any(any(path.parent.glob(kind)) for kind in _WEIGHTS)
    name = config.get("_class_name") or next(iter(config.get("architectures") or ()), None)
    if name is None:
        raise ModelError(f"{path} has neither _class_name (diffusers) nor architectures (transformers): no model")
    if "_class_name" in config:
        import diffusers as library
    else:
        import transformers as library
    kind: Any = getattr(library, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ModelError(f"{path}: {library.__name__} {library.__version__} has no model {name}")
    config = {**config, **_cut(config, layers)}
    make: Any = kind  # mypy takes it for a plain module after the check above
    default = torch.get_default_dtype()
    try:
        if weights:
            model = make.from_pretrained(str(path.parent), **dtype_argument(dtype))
        else:
            torch.set_default_dtype(dtype)
            with torch.device(device):
                made = config if "_class_name" in config else library.AutoConfig.for_model(**config)
                model = make.from_config(made) if "_class_name" in config else make(made)
    except Exception as error:  # whatever a constructor makes of a configuration
        raise ModelError(f"{path}: {name} cannot be built: {type(error).__name__}: {error}") from error
    finally:
        torch.set_default_dtype(default)
    built: nn.Module = nn.Module.to(model, device, dtype).eval().requires_grad_(False)
    return built


def _cut(config: Mapping[str, Any], layers: int | None) -> dict[str, int]:
    """The entries of a configuration that say how many layers there are, with at most ``layers`` of each kind."""
    if layers is None:
        return {}
    return {name: min(layers, config[name]) for name in _LAYERS if isinstance(config.get(name), int)}


def _defaults(class_name: str) -> dict[str, Any]:
    import diffusers

    parameters = inspect.signature(getattr(diffusers, class_name).__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def expected_gain(name: str, model: nn.Module | SimpleNamespace, dtype: torch.dtype, card: str) -> str:
    """Says what fusing the glue of one step of a denoiser, on the meta device, can gain on a card, by bytes.

    Raises:
        ModelError: the inputs are not known, or the step cannot be run without data.
    """
    from diffkern.bench.estimate import estimate

    if name not in DENOISERS or not isinstance(model, nn.Module):
        raise ModelError(f"{name}: the inputs of a step are known for names alone: {', '.join(DENOISERS)}")
    try:
        return estimate(model, DENOISERS[name].step(torch.device("meta"), dtype)).sentence(card)
    except (RuntimeError, NotImplementedError) as error:
        raise ModelError(f"{name}: a step reads values, so it cannot be estimated: {error}") from error


@dataclass(frozen=True)
class Trajectory:
    """What became of a short run.

    Attributes:
        steps: Of the run; 1 where a model's output is no change of its input.
        psnr: Peak signal-to-noise ratio of its end against that of stock, in decibels.
        without: Of a poor run, the same with one kind of layer left in its dtype, by the pattern that names it, the
            one that helps most first.
    """

    steps: int
    psnr: float
    without: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"after {self.steps} step{'s' if self.steps > 1 else ''}: {self.psnr:.1f} dB against stock"
        if self.psnr >= POOR or not self.without:
            return text
        named = dict(list(self.without.items())[:_NAMED])
        each = ", ".join(f"{pattern} ({psnr:.1f} dB without it)" for pattern, psnr in named.items())
        return f"{text}, which may be seen. Most comes from {each}: KernelConfig(fp8_exclude={list(named)})"


def follow(model: nn.Module, inputs: Mapping[str, Any], config: KernelConfig) -> Trajectory:
    """Runs a few Euler steps of a denoiser stock and in fp8, and if they end far apart, without each kind of layer.

    The steps change the first tensor of the inputs, which are keyword arguments of one call.
    """
    name = next(name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point())

    def run() -> tuple[Tensor, int]:
        arguments = copy.deepcopy(dict(inputs))
        x = arguments[name]
        with torch.no_grad():
            for _ in range(STEPS):
                y = first_tensor(model(**arguments))
                if y.shape != x.shape:
                    return y.clone(), 1
                arguments[name] = x = x - y / STEPS
        return x, STEPS

    def in_fp8(*exclude: str) -> tuple[float, list[str]]:
        own = replace(config, fp8_exclude=(*config.fp8_exclude, *exclude))
        report = inject_optimized_kernels(model, numerics="fp8", config=own, cuda_graph=False)
        try:
            kinds = dict.fromkeys(kind_of(site.path) for site in report.patched if site.op == OP)
            return _psnr(run()[0], stock), list(kinds)
        finally:
            report.restore()

    stock, steps = run()
    psnr, kinds = in_fp8()
    without = {kind: in_fp8(kind)[0] for kind in kinds} if psnr < POOR else {}
    return Trajectory(steps, psnr, dict(sorted(without.items(), key=lambda item: -item[1])))


def _psnr(y: Tensor, stock: Tensor) -> float:
    """The range of stock's values over the root mean square of the difference, in decibels."""
    y, stock = y.double(), stock.double()
    difference = float((y - stock).square().mean().sqrt())
    peak = float(stock.max() - stock.min())
    return math.inf if difference == 0 else 20 * math.log10(peak / difference) if peak > 0 else -math.inf


@dataclass
class Verification:
    """What a model computes with kernels, beside what it computes without.

    Attributes:
        report: Of the injection with the contract that was asked for; its sites have their proofs.
        fused: Error of the output of the whole model against float64, or None where none was computed.
        stock: The same of the stock model.
        exact: Whether ``numerics="exact"`` gave the bits of stock, or None.
        restored: Whether the restored model gave them, or None.
        what: What ran as a whole: the model, or the denoiser of a pipeline.
        remark: Why the whole model did not run, or "".
        trajectory: How far a short run in fp8 ends from stock's; None for other contracts.
    """

    report: InjectionReport
    fused: float | None = None
    stock: float | None = None
    exact: bool | None = None
    restored: bool | None = None
    what: str = "whole model"
    remark: str = ""
    trajectory: Trajectory | None = None

    @property
    def broken(self) -> list[str]:
        """What does not hold, one sentence each. What ``"exact"`` finds to have other bits stays stock: that holds."""
        sites = [site for site in self.report.failed if site.broken and self.report.numerics != "exact"]
        wrong = [f"{site.path or 'the module itself'}: {site.reason}" for site in sites]
        wrong += ["numerics='exact' does not give the bits of stock"] if self.exact is False else []
        return wrong + (["the restored model does not give the bits of stock"] if self.restored is False else [])

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data."""
        names = ("what", "fused", "stock", "exact", "restored", "remark", "broken")
        own = {name: getattr(self, name) for name in names}
        trajectory = None if self.trajectory is None else asdict(self.trajectory)
        return {**own, "trajectory": trajectory, "report": self.report.to_dict()}

    def __str__(self) -> str:
        lines = [str(self.report)]
        if self.fused is not None:
            lines.append(f"{self.what} against float64: error {self.fused:.1e}, stock {self.stock:.1e}")
        for what, equal in (("numerics 'exact'", self.exact), ("restored", self.restored)):
            if equal is not None:
                lines.append(f"{what}: {'' if equal else 'not '}bit-identical to stock")
        lines += [f"{self.what}: {self.remark}"] if self.remark else []
        lines += [f"{self.what}, {self.trajectory}"] if self.trajectory is not None else []
        proven = sum(bool(site.measurements) for site in self.report.patched)
        holds = f"{proven} of {len(self.report.patched)} patched modules have proofs, and every contract holds"
        return "\n".join([*lines, *([f"broken: {what}" for what in self.broken] or [holds])])


class _FirstCallError(BaseException):
    """Ends the call of a pipeline, past all that catches errors, at the first call of a denoiser; has its arguments."""


def first_call(folder: Path, models: SimpleNamespace, dtype: torch.dtype) -> tuple[str, dict[str, Any]]:
    """Calls a saved pipeline with a prompt, up to its denoiser; returns the name of this, and its keyword arguments.

    The folder, or the ``model_index.json`` in it, has tokenizers and scheduler; the models are those that
    :func:`load_model` returns.

    Raises:
        ModelError: it does not run on a prompt alone.
    """
    from diffusers import DiffusionPipeline

    def stop(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
        raise _FirstCallError(name, {key: value for key, value in list(bound.items())[1:]})

    denoisers = {name: model for name, model in models.components.items() if is_denoiser(name)}
    hooks = [
        model.register_forward_pre_hook(partial(stop, name), with_kwargs=True) for name, model in denoisers.items()
    ]
    try:
        pipe: Any = DiffusionPipeline.from_pretrained(
            folder.parent if folder.is_file() else folder,
            local_files_only=True,
            **models.components,
            **dtype_argument(dtype),
        )
        pipe.register_modules(**models.components)  # diffusers loads optional ones again
        pipe.set_progress_bar_config(disable=True)
        known = inspect.signature(pipe.__call__).parameters
        with torch.no_grad():
            call = {**_CALL, "generator": torch.Generator("cpu").manual_seed(0)}
            pipe(**{name: value for name, value in call.items() if name in known})
    except _FirstCallError as call:
        name, arguments = call.args
        return name, arguments
    except Exception as error:  # pipelines raise what they like at what they are called with
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"not run: the pipeline does not run on a prompt alone ({reason}); pass --inputs") from error
    finally:
        for hook in hooks:
            hook.remove()
    raise ModelError("not run: the pipeline calls no denoiser; pass --inputs for a model of it")


def verify_model(
    model: nn.Module | SimpleNamespace,
    inputs: Mapping[str, Any] | None,
    numerics: str = "fast",
    float64: bool = True,
    component: str = "",
) -> Verification:
    """Proves every site of a model, and runs the model as a whole: stock, injected, exact, restored.

    Args:
        model: As :func:`load_model` returns it.
        inputs: Keyword arguments of one call, or None to prove sites alone.
        numerics: The contract of the injection.
        float64: Whether the whole model also runs in float64, which takes four times its memory.
        component: Of a pipeline, the model that takes the inputs; the first denoiser if none is named.
    """
    if isinstance(model, nn.Module):
        part: nn.Module | None = model
    else:
        component = component or next(filter(is_denoiser, model.components), "")
        part = model.components.get(component)
    if part is None or inputs is None:
        report = inject_optimized_kernels(model, numerics=numerics, config=_UNTIMED)
        result = Verification(copy.deepcopy(report), remark="not run, since there are no inputs for it: pass --inputs")
        report.restore()
        return result

    def run(part: nn.Module, arguments: Mapping[str, Any] = inputs) -> Tensor:
        with torch.no_grad():
            return first_tensor(part(**copy.deepcopy(dict(arguments)))).clone()

    stock = run(part)
    report = inject_optimized_kernels(model, numerics=numerics, config=_UNTIMED)
    fused = run(part)
    result = Verification(copy.deepcopy(report), what=component or "whole model")
    report.restore()
    result.restored = torch.equal(run(part), stock)
    exact = inject_optimized_kernels(model, numerics="exact", config=_UNTIMED)
    result.exact = torch.equal(run(part), stock)
    exact.restore()
    if numerics == "fp8" and result.report.patched:
        result.trajectory = follow(part, inputs, _UNTIMED)
    if float64:
        try:
            wide = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, dict(inputs))
            reference = run(_in_float64(part), wide)
            result.fused, result.stock = relative_error(fused, reference), relative_error(stock, reference)
        except (RuntimeError, TypeError) as error:
            result.remark = f"has no float64 reference: {str(error).strip().partition(chr(10))[0]}"
    return result


def _in_float64(model: nn.Module) -> nn.Module:
    """A copy in float64, without one in the model's dtype on the way."""
    wide: dict[int, Any] = {id(tensor): tensor.double() for tensor in model.buffers() if tensor.is_floating_point()}
    for tensor in model.parameters():
        if tensor.is_floating_point():
            wide[id(tensor)] = nn.Parameter(tensor.detach().double(), requires_grad=False)
    return copy.deepcopy(model, wide).double()
