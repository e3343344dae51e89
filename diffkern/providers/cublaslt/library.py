"""The functions of cublasLt that a product needs, in the library that torch has loaded.

Constants and structures are those of NVIDIA's documentation of cublasLt, the same in its versions 12 and 13
(https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import torch

_SIZE = ctypes.c_size_t
_POINTER = ctypes.c_void_p

#: cudaDataType_t
DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
#: cublasComputeType_t: sums in float32.
COMPUTE_FLOAT32 = 68
#: cublasOperation_t
TRANSPOSED = 1

#: cublasLtMatmulDescAttributes_t
DESCRIPTION_TRANSPOSE_A, DESCRIPTION_EPILOGUE, DESCRIPTION_BIAS = 3, 7, 8
DESCRIPTION_SCALES, DESCRIPTION_SCALE_MODES = (17, 18), (31, 32)
DESCRIPTION_FAST_SUMS, DESCRIPTION_BIAS_TYPE = 25, 26
#: cublasLtMatmulMatrixScale_t: a float32 for each row of the first and each column of the second operand.
SCALE_PER_ROW = 3
#: cublasLtEpilogue_t. The GELU is the tanh form.
EPILOGUE_NONE, EPILOGUE_BIAS, EPILOGUE_GELU, EPILOGUE_GELU_BIAS = 1, 4, 32, 36
#: cublasLtMatmulPreferenceAttributes_t: the alignment of the four matrices.
PREFERENCE_ALIGNMENTS = (5, 6, 7, 8)


class Algorithm(ctypes.Structure):
    """``cublasLtMatmulAlgo_t``."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Proposal(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``: an algorithm, the bytes of workspace it takes, and whether it can be had."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", _SIZE),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )

    @property
    def address(self) -> int:
        """Where the algorithm lies: it is the first field."""
        return ctypes.addressof(self)


#: Arguments of the functions without their prefix ``cublasLt``. All return a status.
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "Create": (_POINTER,),
    "MatmulDescCreate": (_POINTER, ctypes.c_int, ctypes.c_int),
    "MatmulDescSetAttribute": (_POINTER, ctypes.c_int, _POINTER, _SIZE),
    "MatmulDescDestroy": (_POINTER,),
    "MatrixLayoutCreate": (_POINTER, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "MatrixLayoutDestroy": (_POINTER,),
    "MatmulPreferenceCreate": (_POINTER,),
    "MatmulPreferenceSetAttribute": (_POINTER, ctypes.c_int, _POINTER, _SIZE),
    "MatmulPreferenceDestroy": (_POINTER,),
    "MatmulAlgoGetHeuristic": (*[_POINTER] * 7, ctypes.c_int, _POINTER, _POINTER),
    "Matmul": (*[_POINTER] * 14, _SIZE, _POINTER),
}


class CublasLtError(RuntimeError):
    """A function of cublasLt refused."""


class Library:
    """cublasLt. Every function of :data:`_ARGUMENTS` is an attribute, and raises :class:`CublasLtError`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._handles: dict[int, ctypes.c_void_p] = {}
        self.matmul: Callable[..., int] = self._function("Matmul")

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function.

        Raises:
            CublasLtError: it returned another status than success.
        """
        status = self._function(name)(*arguments)
        if status:
            raise CublasLtError(f"cublasLt{name} returned status {status}")

    def created(self, kind: str, *arguments: object) -> ctypes.c_void_p:
        """Returns a new object: ``kind`` names the function without ``Create``."""
        made = ctypes.c_void_p()
        self.call(f"{kind}Create", ctypes.byref(made), *arguments)
        return made

    def handle(self, device: int) -> ctypes.c_void_p:
        """The library's state for a device, which is never given back: it lives as long as the process."""
        if device not in self._handles:
            with torch.cuda.device(device):
                self._handles[device] = self.created("")
        return self._handles[device]

    def _function(self, name: str) -> Callable[..., int]:
        function = self._library[f"cublasLt{name}"]
        function.argtypes, function.restype = _ARGUMENTS[name], ctypes.c_int
        return function


@cache
def find() -> Library | str:
    """Returns the library that torch works with, or why there is none."""
    if torch.version.cuda is None:
        return "cublasLt is NVIDIA's, and this torch is not built for CUDA"
    major = torch.version.cuda.partition(".")[0]
    name = f"cublasLt64_{major}.dll" if sys.platform == "win32" else f"libcublasLt.so.{major}"
    try:
        return Library(ctypes.CDLL(name))  # by its name alone, the one that is loaded
    except (OSError, AttributeError) as error:
        return f"{name} cannot be used ({error}), which torch should have loaded"
