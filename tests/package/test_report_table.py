"""The printed report fits 80 columns, whatever the paths."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from diffkern.injection.report import InjectionReport, Site
from diffkern.injection.table import Drawing
from diffkern.verify.measures import Measurement

PATHS = [f"vae.encoder.down_blocks.{i}.resnets.{j}.norm{k}" for i in range(3) for j in range(2) for k in (1, 2, 3)]
REASON = "its forward reads more than weight, bias and eps, which is why it was not compared with the candidates " * 2


def report() -> InjectionReport:
    """As an injection makes it: a big group, a refusal with a long reason, and the module itself."""
    proof = Measurement("cpu", "bfloat16", "compiled", 1.6e-3, 1.7e-3, False, True)
    name = "diffusers.models.normalization.RMSNorm"
    patched = [Site(path, name, "rms_norm", "compiled", "table", measurements=[proof]) for path in PATHS]
    patched.append(Site("", "torch.nn.modules.normalization.LayerNorm", "layer_norm", "compiled", "table"))
    skipped = [Site("transformer.time_embed", "diffusers.models.normalization.AdaLayerNormSingle", reason=REASON)]
    return InjectionReport("LTXPipeline", "fast", skipped=skipped, notes=["component 'x': left out"], _accepted=patched)


def draw(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(Drawing(report()))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_piped_report_has_80_columns_and_breaks_no_word() -> None:
    lines = str(report()).splitlines()
    assert max(map(len, lines)) <= 80
    words = {word for line in lines for word in line.split()}
    assert set(REASON.split()) <= words
    assert "vae.encoder.down_blocks.*.resnets.*.norm1" in words


def test_a_group_is_a_line_with_its_places_and_reasons_below() -> None:
    lines = draw(100)
    row = next(index for index, line in enumerate(lines) if "RMSNorm" in line)
    assert lines[row].split() == ["patched", "18", "diffusers.RMSNorm", "compiled", "table", "1.6e-03", "/", "1.7e-03"]
    assert lines[row + 1].strip() == "rms_norm at vae.encoder.down_blocks.*.resnets.*.norm1 and 2 more places"
    assert "         layer_norm at the module itself" in lines
    assert any(line.startswith("         why: its forward reads") for line in lines)
    assert lines[-1] == "note: component 'x': left out"


def test_a_narrow_terminal_costs_the_package_of_the_class_first_and_then_the_last_columns() -> None:
    assert any("AdaLayerNormSingle" in line and "diffusers." not in line for line in draw(75))
    lines = draw(50)
    row = next(index for index, line in enumerate(lines) if "RMSNorm" in line)
    assert lines[row].split() == ["patched", "18", "RMSNorm", "compiled"]
    assert "         match: table; error / stock: 1.6e-03 /" in lines
    assert max(map(len, lines)) <= 50


def test_a_reason_of_several_groups_is_printed_once() -> None:
    whole = report()
    whole.skipped += [Site(f"norm{i}", f"diffusers.models.Norm{i}", reason="its eps is 0") for i in range(5)]
    lines = str(whole).splitlines()
    assert sum("its eps is 0" in line for line in lines) == 1
    assert [line.strip() for line in lines].count("why: note 1") == 5 and "note 1: its eps is 0" in lines
    assert REASON.split()[0] in str(whole), "a reason of one group stays where it is"


def test_what_is_not_proven_yet_is_not_called_decided() -> None:
    whole = report()
    assert "1 to be proven at the first call, and stock if that fails; numerics" in " ".join(str(whole).split())
    assert [line.split()[-3:] for line in draw(100) if " torch.LayerNorm" in line] == [["at", "first", "call"]]
    whole._accepted[-1].measurements.append(whole._accepted[0].measurements[0])
    assert "first call" not in str(whole)
    planned = InjectionReport("Model", "exact", dry_run=True, _accepted=[Site("norm", "torch.nn.RMSNorm", "rms_norm")])
    assert "nothing proven yet: what has other bits than stock here will stay stock" in planned.summary()
    assert "at first call" not in str(planned), "a plan proves nothing"


def test_a_module_is_explained_in_a_sentence() -> None:
    whole = report()
    assert whole.explain(PATHS[0]) == (
        f"{PATHS[0]} (RMSNorm) is patched: compiled computes rms_norm (matched by table), with an error of 1.6e-03 "
        "where stock has 1.7e-03; it was not called itself so far."
    )
    assert whole.explain("transformer.time_embed").startswith(
        "transformer.time_embed (AdaLayerNormSingle) was left alone, because: its forward reads more"
    )
    assert whole.explain("").startswith("The module itself (LayerNorm) is patched, to be proven at its first call")
    assert "inside of this: transformer.time_embed (" in whole.explain("transformer.time_embed.linear")
    with pytest.raises(ValueError, match=r"looked at nothing at 'vae.encoder.norm1'; it did at 'vae.encoder"):
        whole.explain("vae.encoder.norm1")


def test_a_notebook_shows_text_of_paths_and_no_markup_of_theirs() -> None:
    whole = report()
    whole.notes.append("component <b>'x'</b>: left out")
    html = whole._repr_html_()
    assert html.startswith("<pre") and "diffusers.RMSNorm" in html
    assert "<b>" not in html and "&lt;b&gt;" in html


def test_errors_that_are_no_numbers_are_in_no_table_and_in_no_json() -> None:
    """A kernel that raised has no error; ``NaN`` is no JSON, and programs in other languages stop at it."""
    raised = Measurement("cpu", "float32", "compiled", math.nan, math.nan, False, False, "failed: ValueError: no")
    wrong = Measurement("cpu", "float32", "compiled", math.inf, 1e-7, False, False, "wrong", gradients=True)
    proof = Measurement("cpu", "float32", "compiled", 1e-7, 2e-7, False, True)
    site = Site("norm", "torch.nn.RMSNorm", "rms_norm", "compiled", "table", measurements=[raised, proof])
    report = InjectionReport("Model", "fast", _accepted=[site])
    assert "1.0e-07 / 2.0e-07" in str(report)
    site.measurements.append(wrong)
    (data,) = json.loads(report.to_json(), parse_constant=pytest.fail)["patched"]
    assert [m["fused"] for m in data["measurements"]] == [None, 1e-7, None]
    assert [m["gradients"] for m in data["measurements"]] == [False, False, True]
