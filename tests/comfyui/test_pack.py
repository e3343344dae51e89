"""The folder for ``custom_nodes``: what the registry and ComfyUI's loader want of it."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import diffkern
from tests.comfyui.server import PACK, REPOSITORY

_GITHUB, _RAW = "https://github.com", "https://raw.githubusercontent.com"
CODE = sorted((REPOSITORY / "diffkern" / "comfyui").glob("*.py"))
NODES = [
    node for path in CODE if path.name.startswith("nodes_") for node in re.findall(r'node_id="(\w+)"', path.read_text())
]


def configuration() -> dict[str, Any]:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib is part of Python from 3.11 on")
    import tomllib

    return tomllib.loads((PACK / "pyproject.toml").read_text())


def test_the_registry_finds_what_it_wants() -> None:
    project, comfy = configuration()["project"], configuration()["tool"]["comfy"]

    assert "comfyui" not in project["name"].lower() and re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert project["version"] == diffkern.__version__ and project["license"] == {"text": "Apache-2.0"}
    assert (
        comfy["Icon"]
        == f"{_RAW}{project['urls']['Repository'].removeprefix(_GITHUB)}/main/integrations/comfyui/icon.svg"
    )
    assert comfy["PublisherId"] and comfy["DisplayName"] and comfy["requires-comfyui"]
    assert (PACK / "icon.svg").read_text().startswith("<svg")
    assert (PACK / "requirements.txt").read_text().split() == project["dependencies"]


def test_every_node_has_a_help_page_that_names_its_inputs() -> None:
    assert len(NODES) == 8
    for node in NODES:
        page = (PACK / "web" / "docs" / f"{node}.md").read_text()
        assert page.startswith("# ") and ("| `" in page or "No inputs" in page)


@pytest.mark.parametrize("name", ["ltx_video_ab", "flux_ab", "wan_ab"])
def test_example_workflows_come_with_a_picture_and_a_node_to_bypass(name: str) -> None:
    graph = json.loads((PACK / "example_workflows" / f"{name}.json").read_text())
    picture = (PACK / "example_workflows" / f"{name}.jpg").read_bytes()
    (optimize,) = [node for node in graph["nodes"] if node["type"] == "DiffkernOptimizeModel"]

    assert picture[:3] == b"\xff\xd8\xff"
    assert optimize["mode"] == 0 and len(optimize["outputs"][0]["links"]) >= 2
    # A bypassed node hands its input on to outputs of the same type.
    assert optimize["inputs"][0]["type"] == optimize["outputs"][0]["type"] == "MODEL"
    (note,) = [node for node in graph["nodes"] if node["type"] == "MarkdownNote"]
    assert "Ctrl+B" in note["widgets_values"][0]


@pytest.mark.parametrize("name", ["ltx_video_ab", "flux_ab", "wan_ab"])
def test_a_bypassed_group_takes_the_previews_of_its_reports_along(name: str) -> None:
    """A preview whose report comes from a bypassed node has no input, which ComfyUI shows as an error."""
    graph = json.loads((PACK / "example_workflows" / f"{name}.json").read_text())
    nodes = {node["id"]: node for node in graph["nodes"]}
    groups = [{number for number, node in nodes.items() if _is_inside(node, group)} for group in graph["groups"]]
    ours = {number for number, node in nodes.items() if node["type"] in ("DiffkernOptimizeModel", "DiffkernBenchmark")}

    assert [len(group & ours) for group in groups] == [1, 1] and all(len(group) == 2 for group in groups)
    for _, source, _, target, _, kind in graph["links"]:
        for group in groups:
            assert source not in group or target in group or kind == "MODEL"
            assert nodes[source]["mode"] == 0 or nodes[target]["mode"] == nodes[source]["mode"]


def _is_inside(node: dict[str, Any], group: dict[str, Any]) -> bool:
    (x, y, width, height), (left, top) = group["bounding"], node["pos"]
    right, bottom = left + node["size"][0], top + node["size"][1]
    return bool(x <= left and y <= top and right <= x + width and bottom <= y + height)


def test_the_folder_hands_on_the_entrypoint_and_the_help_pages() -> None:
    spec = importlib.util.spec_from_file_location("custom_nodes.diffkern", PACK / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert module.comfy_entrypoint is diffkern.comfyui.comfy_entrypoint
    assert (PACK / module.WEB_DIRECTORY / "docs").is_dir()
    assert not hasattr(module, "NODE_CLASS_MAPPINGS")


def test_without_diffkern_the_folder_says_what_to_run() -> None:
    code = f"import sys, runpy; sys.modules['diffkern'] = None; runpy.run_path({str(PACK / '__init__.py')!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert f"{sys.executable} -m pip install /path/to/diffkern" in result.stderr.splitlines()[-1]


def test_importing_the_package_imports_neither_comfyui_nor_diffusers() -> None:
    code = (
        "import sys, diffkern.comfyui, diffkern.comfyui.optimize\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'comfy', 'comfy_api', 'comfy_kitchen', 'diffusers', 'transformers', 'triton'}, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


@pytest.mark.parametrize("path", [*CODE, PACK / "__init__.py"], ids=lambda path: path.name)
def test_no_code_is_made_of_text_and_nothing_is_installed(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}

    assert not names & {"eval", "exec", "compile", "__import__"}
    assert "subprocess" not in imports and "triton" not in imports


def test_without_diffusers_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffkern.comfyui import doctor

    found = doctor.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "diffusers" else found(name))

    reason = doctor.pipelines_unavailable_reason()
    assert reason is not None and "diffusers not installed" in reason and "pip install" in reason
