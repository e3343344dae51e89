"""What the commands share: options, how a device is named, and how a command ends.

Exit codes: 0, it is done. 1, it failed: a contract is broken, a build or the network failed, this machine lacks a
device. 2, the command line is wrong, or a file that it names.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    import torch

#: The models whose published configurations and inputs are known, by name.
NAMES = (
    "flux, flux2, chroma, qwen, sd3, sana, z_image, lumina2, wan, wan_14b, hunyuan_video, cogvideox, sdxl, sdxl_512, "
    "sd15, ltx, ltx_long"
)
#: The autoencoders that ``bench step`` decodes or encodes with.
VAES = ", ".join(
    f"{name}_vae, {name}_vae_encode"
    for name in ("sdxl", "sd15", "flux", "wan", "qwen", "hunyuan_video", "cogvideox", "ltx", "ltx2")
)
EXIT_CODES = "Exit codes: 0 done; 1 failed; 2 the command line is wrong, or a file that it names."


def epilog(*examples: str) -> str:
    """Returns the end of a help text: examples, and the exit codes."""
    return "\b\nExamples:\n" + "\n".join(f"  diffkern {example}" for example in examples) + f"\n\n{EXIT_CODES}"


def _silence(context: typer.Context, value: bool) -> bool:
    if value:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # before the libraries are imported that draw them
        nowhere = context.with_resource(open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        context.with_resource(contextlib.redirect_stdout(nowhere))
    return value


Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=_silence, help="Print errors alone.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the results to this file, too; - prints them and no table.")
]
Device = Annotated[str, typer.Option(help="Device; default: the GPU if there is one.")]


def fail(command: str, message: object, code: int = 1) -> NoReturn:
    """Ends the program with one line that says why."""
    typer.echo(f"diffkern {command}: {message}", err=True)
    raise typer.Exit(code)


def device_of(command: str, name: str) -> torch.device:
    """The device that was named, or the likeliest one; ends the program where there is none such."""
    import torch

    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        fail(command, f"--device {name!r} is no device of torch: cpu, cuda, cuda:1, mps and xpu are", 2)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        fail(command, f"--device {name}: this machine has none, or torch is built without it ({_first_line(error)})")
    return device


def room_lacking(model: torch.nn.Module, device: torch.device) -> str:
    """Why the weights of a model, given on the meta device, find no room on a device, or ""."""
    import torch

    meminfo = Path("/proc/meminfo")
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif device.type == "cpu" and meminfo.is_file():  # where an allocation too many has the kernel end processes
        free = 1024 * int(re.findall(r"MemAvailable: +(\d+)", meminfo.read_text())[0])
    else:
        return ""
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    room = f"its weights take {needed / 1e9:.1f} GB, and {device} has {free / 1e9:.1f} GB free"
    return room if needed > free else ""


def dtype_of(command: str, name: str) -> torch.dtype:
    """The dtype that was named; ends the program where there is none such."""
    import torch

    if name not in ("bfloat16", "float16", "float32"):
        fail(command, f"dtype={name!r}: choose bfloat16, float16 or float32", 2)
    found: torch.dtype = getattr(torch, name)
    return found


def require_known(command: str, kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Ends the program where one of the names is none of those that are known."""
    for name in names:
        if name not in known:
            fail(command, f"{kind} {name!r} is not known: choose from {', '.join(known)}", 2)


def require_writable(command: str, **options: Path | None) -> None:
    """Ends the program before it measures anything if it could not write a result.

    Args:
        command: For the message.
        options: The files, by the names of their options; None and ``-``, the standard output, are none.
    """
    for name, path in options.items():
        if path is not None and str(path) != "-" and (reason := unwritable(path)):
            fail(command, f"--{name} {path}: {reason}", 2)
    if options.get("plot") is not None and find_spec("matplotlib") is None:
        fail(command, "--plot draws with matplotlib, which is not installed: pip install matplotlib")


def unwritable(path: Path) -> str | None:
    """Why a file cannot be written, or None. No folder is made: a missing one is more likely misspelled."""
    if path.is_dir():
        return "is a folder: name a file in it"
    try:
        if not path.parent.exists():
            return f"cannot be written: the folder {path.parent} was not found"
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    return "cannot be written: the file is read-only" if path.exists() and not os.access(path, os.W_OK) else None


def say_why(error: Exception) -> str:
    """An error for people: a missing file is "not found", and has no number."""
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename}: not found"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return re.sub(r"\[Errno -?\d+\] ", "", str(error)).strip().partition("\n")[0] or type(error).__name__
