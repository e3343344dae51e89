"""Writes the reference of the public functions and classes as HTML, from their docstrings.

python scripts/write_api_reference.py build/api
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

import pdoc

MODULES = ("diffkern", "diffkern.ops", "diffkern.providers", "diffkern.hub")


def write(directory: Path) -> None:
    """Writes ``index.html`` and a page for each public module; a warning is an error."""
    for name in MODULES:
        module = importlib.import_module(name)
        # pdoc looks into the module's dict, and lazy names get there by being asked for.
        vars(module).update({each: getattr(module, each) for each in module.__all__})
    pdoc.render.configure(docformat="google", math=True, show_source=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pdoc.pdoc(*MODULES, output_directory=directory)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
