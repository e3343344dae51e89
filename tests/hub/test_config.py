"""What a configuration may say, that it says the same after a file, and what a mistake is answered with."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diffkern import KernelConfig, plan
from diffkern.hub import Mode
from diffkern.hub.reference import KernelReference
from diffkern.hub.rule import DEVICES, Rule, device_name

CPU = torch.device("cpu")


def choice(rules: dict[str, Any], device: str = "cpu", training: bool = False, **options: Any) -> str | None:
    rule = KernelConfig(rules, **options).rule("", "RMSNorm", "rms_norm")
    assert rule is not None
    return rule.at(torch.device(device), training)


# --- references ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("org/repo", ("org/repo", "", "")),
        ("org/repo:Layer", ("org/repo", "", "Layer")),
        ("org/repo@v1.2.0:Layer", ("org/repo", "v1.2.0", "Layer")),
        ("org/repo@>=1.0,<2.0:Layer", ("org/repo", ">=1.0,<2.0", "Layer")),
        ("org/repo@>= 1.0, < 2.0:Layer", ("org/repo", ">=1.0,<2.0", "Layer")),
        ("org/repo@main", ("org/repo", "main", "")),
        ("/a/path:Layer", ("/a/path", "", "Layer")),
        ("/a/path", ("/a/path", "", "")),
        ("./kernel:Layer", ("./kernel", "", "Layer")),
        ("~/kernel", ("~/kernel", "", "")),
    ],
)
def test_references_are_read_and_written(text: str, parts: tuple[str, str, str]) -> None:
    reference = KernelReference.parse(text)
    assert (reference.source, reference.revision, reference.name) == parts
    assert KernelReference.parse(str(reference)) == reference
    assert reference.is_local == (parts[0][0] in "/.~")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("org/repo:Layer@v1", r"the revision comes before the name: org/repo@v1:Layer"),
        ("org/repo@>=x", r"range '>=x': write it like >=1\.0,<2\.0"),
        ("org/", "names no kernel"),
        ("a/b/c", "names no kernel"),
        ("org/repo:not-a-name", "names no kernel"),
    ],
)
def test_a_reference_that_is_none_says_how_to_write_it(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){said}"):
        KernelConfig({"rms_norm": text})


# --- values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["auto", "compiled", "triton", "hub", "eager", "org/repo:Layer", "/a/path:Layer"])
def test_a_value_is_a_provider_or_a_kernel(value: str) -> None:
    assert choice({"rms_norm": value}) == value


@pytest.mark.parametrize("value", ["", None, {"cpu": ""}, {"cpu": None}, {"inference": None}])
def test_nothing_disables(value: Any) -> None:
    assert choice({"rms_norm": value}) is None


def test_several_devices_have_their_own_choices() -> None:
    named = {device: f"a/{device}:L" for device in ("rocm", "metal", "xpu", "npu")}
    rules = {"rms_norm": {**named, "cuda": "triton", "cpu": "eager"}}
    assert choice(rules, "cpu") == "eager"
    assert choice(rules, "mps") == "a/metal:L"
    assert choice(rules, "xpu") == "a/xpu:L"
    assert choice(rules, "cuda") == ("triton" if torch.version.hip is None else "a/rocm:L")
    assert Rule.of(KernelConfig(rules).rules["rms_norm"]).situations["npu", False, False] == "a/npu:L"
    assert choice({"rms_norm": {"metal": "a/b:L"}}, "cpu") == "auto"


def test_mps_is_metal() -> None:
    assert KernelConfig({"rms_norm": {"mps": "a/b"}}) == KernelConfig({"rms_norm": {"metal": "a/b"}})
    assert device_name("mps") == "metal"


def test_torch_calls_an_amd_gpu_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {"rms_norm": {"cuda": "a/cuda:L", "rocm": "a/rocm:L"}}
    for version, expected in ((None, "a/cuda:L"), ("7.1", "a/rocm:L")):
        monkeypatch.setattr(torch.version, "hip", version)
        assert choice(rules, "cuda") == expected


# --- modes ---------------------------------------------------------------------------------------------------


def test_modes_follow_the_training_flag_and_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {"rms_norm": {"training": "eager", "inference": "triton", "inference|torch_compile": "compiled"}}
    assert (choice(rules, training=False), choice(rules, training=True)) == ("triton", "eager")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choice(rules, training=False) == "compiled"
    assert choice(rules, training=True) == "auto"  # a kernel for inference does not train


def test_a_mode_that_is_not_named_takes_one_that_can_do_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice({"rms_norm": {"training": "eager"}}, training=False) == "eager"
    assert choice({"rms_norm": {"inference": "eager"}}, training=True) == "auto"
    assert choice({"rms_norm": {"torch_compile": "eager"}}, training=False) == "eager"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choice({"rms_norm": {"inference": "eager"}}) == "auto"
    assert choice({"rms_norm": {"torch_compile": "eager"}}, training=True) == "eager"


@pytest.mark.parametrize("mode", [Mode.TRAINING, "training"])
def test_a_mode_may_be_set(mode: Any) -> None:
    rules = {"rms_norm": {Mode.TRAINING: "eager", Mode.INFERENCE: "triton"}}
    assert choice(rules, training=False, mode=mode) == "eager"
    assert KernelConfig(mode=Mode.TORCH_COMPILE).mode == Mode.INFERENCE | Mode.TORCH_COMPILE


def test_devices_and_modes_nest_either_way() -> None:
    by_device = {"rms_norm": {"cpu": {"training": "eager", "inference": "triton"}}}
    by_mode = {"rms_norm": {"training": {"cpu": "eager"}, "inference": {"cpu": "triton"}}}
    for training, device in itertools.product((False, True), ("cpu", "mps")):
        assert choice(by_device, device, training) == choice(by_mode, device, training)
    assert choice(by_device, "cpu", True) == "eager"


# --- keys ----------------------------------------------------------------------------------------------------


def test_a_path_wins_over_a_class_over_a_layer_over_an_op() -> None:
    rules = {"rms_norm": "eager", "RMSNorm": "triton", "LlamaRMSNorm": "compiled", "model.*.input_norm": "hub"}
    config = KernelConfig(rules)

    def chosen(path: str, class_name: str, layer: str) -> str | None:
        rule = config.rule(path, class_name, "rms_norm", layer)
        return None if rule is None else rule.at(CPU, False)

    assert chosen("model.0.input_norm", "LlamaRMSNorm", "RMSNorm") == "hub"
    assert chosen("model.0.norm", "LlamaRMSNorm", "RMSNorm") == "compiled"
    assert chosen("model.0.norm", "QwenRMSNorm", "RMSNorm") == "triton"
    assert chosen("model.0.norm", "T5LayerNorm", "") == "eager"
    assert config.rule("x", "y", "layer_norm") is None


def test_of_two_patterns_the_later_one_wins() -> None:
    for order in (("a.*", "*.norm"), ("*.norm", "a.*")):
        config = KernelConfig(dict(zip(order, ("eager", "triton"), strict=True)))
        rule = config.rule("a.norm", "RMSNorm", "rms_norm")
        assert rule is not None and rule.otherwise == "triton"


def test_the_name_of_a_layer_of_transformers_means_its_norms() -> None:
    transformers = pytest.importorskip("transformers.models.llama.modeling_llama")
    model = nn.Sequential(transformers.LlamaRMSNorm(8), nn.RMSNorm(8))
    report = plan(model, config={"RMSNorm": "eager"})
    assert [site.provider for site in report.patched] == ["eager", "eager"]
    report = plan(nn.Sequential(transformers.LlamaRMSNorm(8)), config={"RMSNorm": None})
    assert [site.reason for site in report.skipped] == ["left alone by config"]


# --- mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"rms_norm": "tritn"}, "Did you mean 'triton'"),
        ({"rms_norm": {"cudaa": "eager"}}, "no device and no mode.*Did you mean 'cuda'"),
        ({"rms_norm": {"trainning": "eager"}}, "Did you mean 'training'"),
        ({"rms_norm": {"cpu": "eagre"}}, r"config\['rms_norm'\]\['cpu'\].*Did you mean 'eager'"),
        ({"rms_norm": {}}, "a dict goes from devices to choices"),
        ({"rms_norm": {"cpu": "eager", "training": "eager"}}, "a dict goes from devices to choices"),
        ({"rms_norm": {"cpu": {"cuda": "eager"}}}, "a dict goes from devices to choices"),
        ({"rms_norm": {"inference|training": "eager"}}, "either inference or training"),
        ({"rms_norm": ("org/repo:L", {"version": 2})}, "write the version into the string"),
        ({"rms_norm": 3}, "expected the name of a provider"),
        ({"rms_norm": {"mps": "eager", "metal": ""}}, r"says 'metal' twice, by the keys 'mps' and 'metal'"),
        ({"rms_norm": {"training": "eager", Mode.TRAINING: ""}}, "says 'training' twice"),
        (
            {"rms_norm": {Mode.INFERENCE | Mode.TRAINING: "eager"}},
            r"config\['rms_norm'\].*either inference or training",
        ),
        ({"rms_norm": {Mode(0): "eager"}}, "no device and no mode"),
    ],
)
def test_a_value_that_is_none_is_answered_with_the_nearest(rules: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        KernelConfig(rules)


def test_a_key_that_fits_nothing_is_answered_with_the_nearest() -> None:
    for key, near in (("rms_nrom", "rms_norm"), ("RMSNrom", "RMSNorm"), ("1.norms", "1.norm")):
        model = nn.Sequential(nn.LayerNorm(8), nn.Module())
        model[1].norm = nn.RMSNorm(8)
        with pytest.raises(ValueError, match=f"{key}.*Did you mean '{near}'"):
            plan(model, config={key: "eager"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hub": "atuo"}, "Did you mean 'auto'"),
        ({"hub": True}, "choose 'off' or 'auto'"),
        ({"mode": "train"}, "is no mode"),
        ({"mode": 1}, "pass a Mode, or its name"),
        ({"trust_remote_code": ["org"]}, "names 'org': name repositories, 'org/repo'"),
        ({"trust_remote_code": ["org/repo@v1"]}, "without a revision"),
        ({"mode": Mode.TRAINING | Mode.INFERENCE}, "either inference or training"),
        ({"trust_remote_code": "org/repo"}, "a list of repositories"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        KernelConfig(**options)


# --- files ---------------------------------------------------------------------------------------------------

EVERYTHING = KernelConfig(
    {
        "vae.*": "eager",
        "RMSNorm": {"mps": "org/metal@>=1.0,<2.0:RMSNorm", "cuda": {Mode.TRAINING: "triton", "inference": None}},
        "LayerNorm": None,
        'a "quoted" path\\with\x7f.*': "/a/path:Layer",
    },
    hub="auto",
    mode=Mode.TRAINING | Mode.TORCH_COMPILE,
    trust_remote_code=["me/kernels"],
    lock="diffkern.lock",
)


@pytest.mark.parametrize("config", [KernelConfig(), EVERYTHING, KernelConfig(trust_remote_code=True)])
def test_files_say_the_same(config: KernelConfig, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(config.to_json())
    read = KernelConfig.from_file(tmp_path / "a.json")
    assert read == config == KernelConfig.from_json(config.to_json())
    assert list(read.rules) == list(config.rules)  # of two patterns the later one wins


def test_a_file_may_be_toml(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("""
        hub = "auto"
        trust_remote_code = ["me/kernels"]
        [rules]
        "vae.*" = "eager"
        rms_norm = { cuda = { training = "org/norms@v1:RMSNorm", inference = "" }, mps = "hub" }
        "vae.decoder.*" = ""
    """)
    norms = {"cuda": {"training": "org/norms@v1:RMSNorm", "inference": ""}, "metal": "hub"}
    rules = {"vae.*": "eager", "rms_norm": norms, "vae.decoder.*": None}
    read = KernelConfig.from_file(tmp_path / "a.toml")
    assert read == KernelConfig(rules, hub="auto", trust_remote_code=["me/kernels"])  # type: ignore[arg-type]
    assert list(read.rules) == list(rules)


def test_a_file_with_a_word_too_many_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'rulez' is no part of a configuration.*Did you mean 'rules'"):
        KernelConfig.from_dict({"rulez": {}})


def test_a_file_that_holds_something_else_says_what_it_should_hold() -> None:
    with pytest.raises(ValueError, match="is no configuration: that is a table of rules, hub"):
        KernelConfig.from_json("[]")


def test_every_device_can_be_named() -> None:
    assert set(DEVICES) == {"cuda", "rocm", "metal", "xpu", "npu", "cpu"}
    assert KernelConfig({"rms_norm": dict.fromkeys(DEVICES, "eager")}).references() == ()
    assert list(map(str, EVERYTHING.references())) == ["org/metal@>=1.0,<2.0:RMSNorm", "/a/path:Layer"]
