"""A ComfyUI server of its own, on a free port, with a folder of its own for models, nodes and results."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
PACK = REPOSITORY / "integrations" / "comfyui"

#: A node for tests: text embeddings without a text encoder.
_CONDITIONING_NODE = """
from comfy_api.latest import ComfyExtension, io
from tests.comfyui.native import conditioning


class TinyConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TinyConditioning",
            # Another number makes everything after the node run again, on the very same values.
            inputs=[io.Int.Input("seed", default=1), io.Int.Input("run", default=0)],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, seed, run):
        return io.NodeOutput(conditioning(seed))


class Tiny(ComfyExtension):
    async def get_node_list(self):
        return [TinyConditioning]


async def comfy_entrypoint():
    return Tiny()
"""

_START = """
import os, runpy, sys
from tests.comfyui.native import declare_torchvision  # first: ComfyUI has a package "tests" as well
declare_torchvision()
sys.path.insert(0, os.environ["COMFYUI_ROOT"])
os.chdir(os.environ["COMFYUI_ROOT"])
sys.argv = ["main.py", *sys.argv[1:]]
runpy.run_path("main.py", run_name="__main__")
"""


class Server:
    """A running server.

    Args:
        base: An empty folder for everything that it reads and writes.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.models = base / "models" / "diffusion_models"
        self.models.mkdir(parents=True)
        nodes = base / "custom_nodes"
        (nodes / "tiny").mkdir(parents=True)
        (nodes / "tiny" / "__init__.py").write_text(_CONDITIONING_NODE)
        (nodes / "diffkern").symlink_to(PACK, target_is_directory=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.log = base / "server.log"

    def __enter__(self) -> Server:
        paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        command = [
            sys.executable, "-c", _START, "--cpu", "--port", str(self.port), "--base-directory", str(self.base),
            "--disable-api-nodes", "--disable-auto-launch", "--database-url", "sqlite:///:memory:",
            "--use-pytorch-cross-attention",
        ]  # fmt: skip
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, "PYTHONPATH": paths}, stdout=log, stderr=subprocess.STDOUT
            )
        for _ in range(240):
            if self._process.poll() is not None:
                raise RuntimeError(f"the server stopped:\n{self.log.read_text()}")
            try:
                self.get("/system_stats")
                return self
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        raise RuntimeError(f"the server does not answer:\n{self.log.read_text()}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def get(self, path: str) -> Any:
        """Returns what the server answers, from JSON."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return json.load(answer)

    def run(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """Runs a workflow in the form of the API, and returns what its nodes show, by their number."""
        body = json.dumps({"prompt": prompt}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/prompt", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                number = json.load(answer)["prompt_id"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from error
        for _ in range(1200):
            history = self.get(f"/history/{number}")
            if number in history:
                status = history[number]["status"]
                if status["status_str"] != "success":
                    raise RuntimeError(json.dumps(status["messages"], indent=1))
                outputs: dict[str, Any] = history[number]["outputs"]
                return outputs
            time.sleep(0.1)
        raise RuntimeError(f"the workflow does not end:\n{self.log.read_text()}")
