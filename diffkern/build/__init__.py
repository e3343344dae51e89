"""Builds the compiled kernels, in the layout of a Hub kernel.

:func:`build_kernels` is what ``diffkern build`` and the installation call. Nothing here is imported for
the sake of running kernels but :mod:`diffkern.build.installed`, which finds what was built.
"""

from diffkern.build.archs import ArchError
from diffkern.build.compiling import BuildError, OutputError
from diffkern.build.driver import BuildResult, available_backends, build_kernels
from diffkern.build.installed import Build, failure_reason, find_builds, search_directories
from diffkern.build.toolchain import ToolchainError
from diffkern.build.variant import Variant

__all__ = [
    "ArchError",
    "Build",
    "BuildError",
    "BuildResult",
    "OutputError",
    "ToolchainError",
    "Variant",
    "available_backends",
    "build_kernels",
    "failure_reason",
    "find_builds",
    "search_directories",
]
