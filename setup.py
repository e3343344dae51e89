"""Builds the kernels into the wheel where there is a torch and a compiler, and a pure Python wheel elsewhere.

Everything else about the package is in pyproject.toml. What is built, and whether a failure matters, is
decided by ``setup_kernels.py``, from ``DIFFKERN_BUILD`` and what this machine has.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    raise SystemExit(
        "diffkern: this setuptools is too old, and --no-build-isolation uses the one you have: "
        "pip install 'setuptools>=77'"
    ) from None

ROOT = Path(__file__).resolve().parent
NO_TORCH = (
    "torch was not there when diffkern was installed, since pip builds packages in isolation: "
    "run `diffkern build`, or install with --no-build-isolation"
)
SWITCHED_OFF = "DIFFKERN_BUILD=0 left them out of the wheel or the installation"


class BuildWithKernels(build_py):
    """Copies the kernels' sources into the package, and compiles them if that is possible."""

    def run(self):
        super().run()
        # An editable install runs from the checkout: the sources lie beside the package, the build in it.
        package = ROOT / "diffkern" if self.editable_mode else Path(self.build_lib, "diffkern").absolute()
        if not self.editable_mode:
            shutil.copytree(ROOT / "csrc", package / "csrc", dirs_exist_ok=True)
        build_kernels(package / "_kernels")


class WheelWithKernels(bdist_wheel):
    """Tags the wheel by what is in it: the binaries serve any Python, on one platform."""

    def run(self):
        # What an earlier build in this folder left, its kernels above all, is not of this wheel.
        for folder in (self.get_finalized_command("build").build_lib, self.bdist_dir):
            shutil.rmtree(folder, ignore_errors=True)
        self.run_command("build")
        package = Path(self.get_finalized_command("build").build_lib, "diffkern")
        self.libraries = sorted(package.glob("_kernels/build/*/*.so"))
        self.root_is_pure = not self.libraries
        self.distribution.has_ext_modules = lambda: not self.root_is_pure
        super().run()

    def get_tag(self):
        if self.root_is_pure:
            return ("py3", "none", super().get_tag()[2])
        from diffkern.build.platform_tag import platform_tag, widest  # its package is on the path since the build

        return ("py3", "none", widest(platform_tag(library) for library in self.libraries))


def build_kernels(output):
    try:
        import torch  # noqa: F401
    except ImportError:
        if "require" in os.environ.get("DIFFKERN_BUILD", ""):
            raise SystemExit(f"DIFFKERN_BUILD requires the kernels, but {NO_TORCH}") from None
        output.mkdir(parents=True, exist_ok=True)
        reason = SWITCHED_OFF if os.environ.get("DIFFKERN_BUILD") == "0" else NO_TORCH
        reasons = dict.fromkeys(("cpu", "cuda", "rocm"), reason)
        (output / "build_log.json").write_text(json.dumps(reasons, indent=2) + "\n", encoding="utf-8")
        print(f"diffkern: pure Python only: {reason}")
        return
    sys.path.insert(0, str(ROOT))
    from setup_kernels import build_for_installation

    build_for_installation(output)


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithKernels})
