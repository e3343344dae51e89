"""Every command with good and bad input: what it prints, where, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import FluxTransformer2DModel

from diffkern import __version__, cli_options, inspection
from diffkern.bench.models import AUTOENCODERS, DENOISERS
from diffkern.cli_options import NAMES, VAES
from diffkern.injection import report as reports
from diffkern.inspection import ModelError, first_call, load_model, verify_model
from tests.injection.models import ltx_inputs, tiny_ltx
from tests.package.test_cli import invoke
from tests.pipelines import tiny

TINY_FLUX = {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (8, 12, 12),
}
COMMANDS = [
    [],
    ["inspect"],
    ["verify"],
    ["doctor"],
    ["build"],
    *(["bench", name] for name in ("", "ops", "step", "pipeline", "attention")),
    *(["hub", name] for name in ("", "lock", "download", "list", "verify", "package")),
]


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model without weights."""
    folder = tmp_path_factory.mktemp("flux")
    FluxTransformer2DModel(**TINY_FLUX).save_config(folder)
    return folder


def test_help_needs_neither_torch_nor_anything_slow() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom diffkern.cli import app\n"
        f"for command in {[[part for part in command if part] for command in COMMANDS]!r}:\n"
        "    result = CliRunner().invoke(app, [*command, '--help'], env={'COLUMNS': '80'})\n"
        "    assert result.exit_code == 0, result.output\n"
        "    assert 'Exit codes: 0 done; 1 failed; 2' in result.output, command\n"
        "    assert max(map(len, result.output.splitlines())) <= 80\n"
        "    group = command in ([], ['bench'], ['hub'])\n"
        "    assert group or all(name in result.output for name in ('--json', '--quiet')), command\n"
        "    assert command[:1] != ['bench'] or group or '--plot' in result.output, command\n"
        "    assert group or 'Examples:\\n    diffkern ' + ' '.join(command) in result.output, result.output\n"
        "    assert 'Commands:' not in result.output or '...' not in result.output.split('Commands:')[1]\n"
        "print(sorted({'torch', 'diffusers', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr[-2000:]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["inspect", "flux3"], 2, "flux3: not found. It is no file or folder, and none of flux, flux2"),
        (["inspect", "EMPTY"], 2, "config.json not found, nor a pipeline's model_index.json: name another folder"),
        (["inspect", "BROKEN"], 2, "broken.json is no JSON that can be read"),
        (["inspect", "LIST"], 2, "list.json holds no configuration, but list"),
        (["inspect", "NAMELESS"], 2, "neither _class_name (diffusers) nor architectures (transformers)"),
        (["inspect", "UNKNOWN"], 2, "has no model NoSuchModel"),
        (["inspect", "WRONG"], 2, "FluxTransformer2DModel cannot be built: TypeError"),
        (["inspect", "sana", "--numerics", "faster"], 2, "choose one of exact, fast, fp8"),
        (["inspect", "sana", "--dtype", "int8"], 2, "dtype='int8': choose bfloat16, float16 or float32"),
        (["inspect", "sana", "--card", "H1000"], 2, "card 'H1000' is not known: choose from T4, A100"),
        (["inspect", "FLUX", "--card", "H100"], 2, "the inputs of a step are known for names alone: flux"),
        (["inspect", "sana", "--explain", "nowhere"], 2, "looked at nothing at 'nowhere'"),
        (["verify", "flux3"], 2, "flux3: not found"),
        (["verify", "FLUX", "--inputs", "no.pt"], 2, "--inputs no.pt: not found"),
        (["verify", "FLUX", "--inputs", "BROKEN"], 2, "broken.json is no file of tensors by torch.save"),
        (["verify", "FLUX", "--inputs", "TENSOR"], 2, "tensor.pt holds no dict of keyword arguments, but Tensor"),
        (["verify", "sana", "--device", "gpu"], 2, "--device 'gpu' is no device of torch"),
        (["bench", "step", "--device", "gpu"], 2, "--device 'gpu' is no device of torch"),
        (["bench", "step", "--arm", "slow"], 2, "arm 'slow' is not known: choose from stock"),
        (
            ["bench", "pipeline", "nowhere"],
            2,
            "model_index.json: not found: name the folder of a saved pipeline. Nothing is",
        ),
        (
            ["bench", "pipeline", "NOPIPE"],
            2,
            "cannot be loaded: AttributeError: module diffusers has no attribute NoPipe",
        ),
        (["bench", "pipeline", "nowhere", "--arm", "slow"], 2, "arm 'slow' is not known: choose from stock"),
        (["bench", "step", "--json", "EMPTY"], 2, "is a folder: name a file in it"),
        (["bench", "step", "--plot", "no/folder/bars.png"], 2, "cannot be written: the folder no/folder was not found"),
        (["bench", "pipeline", "nowhere", "--json", "no/x.json"], 2, "no/x.json: cannot be written: the folder no"),
        (["bench", "attention", "--shape", "1x2x2x8", "--json", "no/x.json"], 2, "the folder no was not found"),
        (["hub", "lock", "org/repo", "--lock", "no/my.lock"], 2, "--lock no/my.lock: cannot be written: the folder"),
        (["bench", "pipeline", "nowhere", "--json", "BROKEN/x.json"], 2, "broken.json/x.json: cannot be written"),
        (["bench", "attention", "--shape", "1x2x2x8", "--json", "EMPTY"], 2, "is a folder: name a file in it"),
        (["bench", "attention"], 2, "--shape"),
        (["doctr"], 2, "No such command"),
        (["hub", "list", "--lock", "no.lock"], 2, "no.lock: not found: write it with `diffkern hub lock`"),
        (["hub", "lock", "--config", "no.toml"], 2, "no.toml: not found"),
    ],
)
def test_wrong_command_lines_end_with_2_and_say_why(
    arguments: list[str], code: int, said: str, tmp_path: Path, flux: Path
) -> None:
    files = {
        "broken": "{",
        "list": "[]",
        "nameless": "{}",
        "unknown": '{"_class_name": "NoSuchModel"}',
        "wrong": '{"_class_name": "FluxTransformer2DModel", "num_layers": "many"}',
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(content)
    paths = {name.upper(): str(tmp_path / f"{name}.json") for name in files}
    torch.save(torch.ones(1), tmp_path / "tensor.pt")
    paths |= {"TENSOR": str(tmp_path / "tensor.pt"), "BROKEN/x.json": str(tmp_path / "broken.json" / "x.json")}
    (tmp_path / "nopipe").mkdir()
    (tmp_path / "nopipe" / "model_index.json").write_text('{"_class_name": "NoPipe"}')
    paths |= {"EMPTY": str(tmp_path), "FLUX": str(flux), "NOPIPE": str(tmp_path / "nopipe")}
    result = invoke(*(paths.get(argument, argument) for argument in arguments))
    assert result.exit_code == code and " ".join(said.split()) in " ".join(result.output.split())
    assert "Errno" not in result.output and "Traceback" not in result.output
    assert not Path("no").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
@pytest.mark.parametrize("command", ["verify sana", "bench step", "bench attention --shape 1x2x2x8"])
def test_a_machine_without_a_gpu_is_said_in_one_line(command: str) -> None:
    result = invoke(*command.split(), "--device", "cuda")
    assert result.exit_code == 1 and "--device cuda: this machine has none" in result.output
    assert len(result.output.splitlines()) == 1
    assert "sees no CUDA or ROCm GPU" in invoke("bench", "ops").output


@pytest.mark.parametrize("command", ["verify huge", "bench step --model huge"])
def test_a_model_that_finds_no_room_is_refused_before_it_is_made(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    width = {"joint_attention_dim": 10**9}  # 6 TB of weights
    huge = replace(DENOISERS["flux"], config=width, layers={"num_layers": 1, "num_single_layers": 1})
    monkeypatch.setitem(DENOISERS, "huge", huge)
    result = invoke(*command.split(), "--device", "cpu", "--quiet")
    assert result.exit_code == 1 and len(result.output.splitlines()) == 1
    assert f"diffkern {command}: its weights take 614" in result.output and "GB, and cpu has" in result.output


@pytest.mark.parametrize(
    "command", ["inspect flux", "verify FOLDER", "bench step --model sana", "bench pipeline examples/ltx_video/tiny"]
)
def test_a_package_that_a_command_needs_is_named_in_one_line(
    command: str, flux: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)  # as if it were not there
    result = invoke(*command.replace("FOLDER", str(flux)).split(), "--quiet")
    said = f"diffkern {command.split()[0]}: diffusers is not installed: pip install diffusers transformers accelerate"
    assert (result.exit_code, result.output.strip()) == (1, said)


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli_options, "find_spec", lambda name: None)
    plot = str(tmp_path / "bars.png")
    result = invoke(
        "bench", "attention", "--shape", "1x2x2x8", "--backend", "native", "--device", "cpu", "--plot", plot
    )
    assert result.exit_code == 1 and "not installed: pip install matplotlib" in result.output


def test_the_names_that_help_lists_are_those_of_the_models() -> None:
    assert (", ".join(DENOISERS), ", ".join(AUTOENCODERS)) == (NAMES, VAES)
    assert invoke("--version").output.split() == ["diffkern", __version__]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_pipeline_none_of_whose_arms_runs_here_is_a_failure() -> None:
    result = invoke("bench", "pipeline", "examples/ltx_video/tiny", "--arm", "fp8", "--quiet")
    assert result.exit_code == 1 and "fp8: " in result.output


def test_inspect_reads_a_configuration_and_needs_no_weights(flux: Path) -> None:
    result = invoke("inspect", str(flux / "config.json"))
    assert result.exit_code == 0 and "would patch" in result.output and "FluxTransformer2DModel" in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    planned = json.loads(invoke("inspect", str(flux), "--json").output)
    assert planned["dry_run"] and "norm_modulate" in {site["op"] for site in planned["patched"]}
    said = invoke("inspect", str(flux), "--explain", "transformer_blocks.0.norm1").output
    assert said.startswith("transformer_blocks.0.norm1 (AdaLayerNormZero) would be patched")
    assert invoke("inspect", str(flux), "--quiet").output == ""


def test_inspect_reads_pipelines_and_models_of_transformers(flux: Path, tmp_path: Path) -> None:
    config = (flux / "config.json").read_text()
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(config)
    (tmp_path / "text_encoder").mkdir()
    t5 = {"architectures": ["T5EncoderModel"], "model_type": "t5", "d_model": 32, "d_ff": 64, "num_layers": 1}
    (tmp_path / "text_encoder" / "config.json").write_text(json.dumps(t5))
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline", "transformer": [], "text_encoder": []}')
    planned = json.loads(invoke("inspect", str(tmp_path / "model_index.json"), "--json").output)
    assert planned["target"] == "FluxPipeline"
    assert {site["path"].partition(".")[0] for site in planned["patched"]} == {"transformer", "text_encoder"}


def test_verify_proves_sites_and_the_whole_model(tmp_path: Path) -> None:
    model = tiny_ltx()
    model.save_pretrained(tmp_path)
    torch.save(ltx_inputs(), tmp_path / "step.pt")
    result = invoke("verify", str(tmp_path), "--dtype", "float32", "--inputs", str(tmp_path / "step.pt"))
    assert result.exit_code == 0, result.output
    for said in ("whole model against float64", "numerics 'exact': bit-identical", "restored: bit-identical", "holds"):
        assert said in result.output
    alone = json.loads(invoke("verify", str(tmp_path), "--dtype", "float32", "--json").output)
    assert alone["fused"] is None and "pass --inputs" in alone["remark"] and alone["broken"] == []
    assert invoke("verify", str(tmp_path), "--dtype", "float32", "--quiet").output == ""


def test_verify_reads_the_errors_of_the_whole_model() -> None:
    model, inputs = tiny_ltx(), ltx_inputs()
    result = verify_model(model, inputs)
    assert result.fused is not None and result.stock is not None
    assert 0 < result.fused < 1e-5 and 0 < result.stock < 1e-5
    assert result.exact is True and result.restored is True and result.broken == []


def test_verify_runs_the_denoiser_of_a_pipeline_on_what_a_prompt_gives_it(tmp_path: Path) -> None:
    pipe, _ = tiny.build("wan")
    pipe.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), torch.device("cpu"), torch.float32)
    name, inputs = first_call(tmp_path, loaded, torch.float32)
    transformer = loaded.components["transformer"]
    assert name == "transformer" and not transformer._forward_pre_hooks
    assert {"hidden_states", "encoder_hidden_states", "timestep"} <= inputs.keys()
    assert torch.equal(inputs["hidden_states"], first_call(tmp_path, loaded, torch.float32)[1]["hidden_states"])
    result = verify_model(SimpleNamespace(components={"transformer": transformer}), inputs)
    assert result.restored and result.exact and result.fused and result.stock and not result.broken
    assert "transformer against float64: error" in str(result)
    assert transformer.dtype == torch.float32, "the reference is of a copy"
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
    (tmp_path / "scheduler" / "scheduler_config.json").unlink()
    with pytest.raises(ModelError, match=r"does not run on a prompt alone .*; pass --inputs"):
        first_call(tmp_path, loaded, torch.float32)


def test_what_exact_leaves_stock_is_nothing_broken() -> None:
    differs = reports.Measurement("cpu", "float32", "compiled", 1e-7, 1e-7, False, False, "not bit-identical to stock")
    site = reports.Site("norm_out", "torch.nn.LayerNorm", reason="not bit-identical", measurements=[differs])
    told = {numerics: reports.InjectionReport("Model", numerics, _rejected=[site]) for numerics in ("fast", "exact")}
    assert inspection.Verification(told["fast"]).broken == ["norm_out: not bit-identical"]
    assert inspection.Verification(told["exact"]).broken == []


def test_verify_ends_with_1_where_a_contract_is_broken(monkeypatch: pytest.MonkeyPatch, flux: Path) -> None:
    broken = reports.Measurement("cpu", "float32", "compiled", 1.0, 1e-7, False, False, "error 1.0 is above 1.05 times")

    def wrong(model: object, *rest: object) -> inspection.Verification:
        result = verify_model(load_model(str(flux), torch.device("cpu"), torch.float32), None)
        site = reports.Site("norm_out", "torch.nn.LayerNorm", reason="too far", measurements=[broken])
        result.report._rejected.append(site)
        return result

    monkeypatch.setattr(inspection, "verify_model", wrong)
    result = invoke("verify", str(flux))
    assert result.exit_code == 1 and "broken: norm_out: too far" in result.output


def test_verify_says_that_nothing_was_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"_class_name": "AutoencoderTiny", "encoder_block_out_channels": [8, 8, 8, 8]}
    config |= {"decoder_block_out_channels": [8, 8, 8, 8], "num_encoder_blocks": [1] * 4, "num_decoder_blocks": [1] * 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = invoke("verify", str(tmp_path))
    assert result.exit_code == 1 and "nothing was patched, so there is nothing to verify" in result.output
