"""One kind of product: what cublasLt has to be told of it, and the algorithms that the library proposes.

Only algorithms without a workspace are asked for. Those that torch takes, with one, count their tiles in it, which a
launch of its own sets to zero before every product: 3 to 5 us for each of the hundreds of products of a step.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from diffkern.providers.cublaslt import library
from diffkern.providers.cublaslt.library import CublasLtError, Library, Proposal

#: Bytes to which every operand is aligned.
ALIGNMENT = 16

#: How many algorithms are asked for.
_PROPOSALS = 16
#: Addresses of biases and scales that are remembered; beyond that they are forgotten, those before for good.
_MOST_ADDRESSES = 4096

_one, _zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
_ONE, _ZERO = ctypes.addressof(_one), ctypes.addressof(_zero)

#: Of the rows of both operands, where these are fp8: ``[..., 1]`` and ``[N, 1]`` in float32.
Scales = tuple[Tensor, Tensor]
#: Where the bias lies, or None; with operands in fp8, where their scales lie, too.
Addresses = int | tuple[int | None, int, int] | None


class Kind(NamedTuple):
    """What the choice of an algorithm depends on: rows ``[M, K]`` times a weight ``[N, K]``, transposed.

    Attributes:
        device: Index of the device.
        dtype: Of all operands; of fp8, the bias and the result are in bfloat16.
        rows: M.
        columns: N.
        depth: K.
        row_stride: From row to row of the first operand.
        out_stride: The same of the result.
        bias: Whether there is one, of N elements.
        gelu: Whether a tanh GELU follows.
        short_sums: Of fp8, whether sums may stay in the accumulators of the tensor cores.
    """

    device: int
    dtype: torch.dtype
    rows: int
    columns: int
    depth: int
    row_stride: int
    out_stride: int
    bias: bool
    gelu: bool
    short_sums: bool = False

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the result."""
        return torch.bfloat16 if self.dtype is torch.float8_e4m3fn else self.dtype

    @override
    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        rest = f"{' + bias' if self.bias else ''}{', gelu' if self.gelu else ''}"
        return f"{name} [{self.rows}, {self.depth}] x [{self.depth}, {self.columns}]{rest} on cuda:{self.device}"

    @property
    def epilogue(self) -> int:
        """What cublasLt calls what follows the product."""
        if self.gelu:
            return library.EPILOGUE_GELU_BIAS if self.bias else library.EPILOGUE_GELU
        return library.EPILOGUE_BIAS if self.bias else library.EPILOGUE_NONE


class Product:
    """A kind of product, ready to run. cublasLt counts by columns, so that for it this is ``weight^T x`` transposed.

    Args:
        kind: The kind.
        lib: The library.

    Attributes:
        proposals: The algorithms, the one first that the library expects to be the fastest.

    Raises:
        CublasLtError: the library has no algorithm for it.
    """

    def __init__(self, kind: Kind, lib: Library) -> None:
        self._kind, self._lib = kind, lib
        self._handle = lib.handle(kind.device).value
        self._made: dict[int | None, str] = {}
        weakref.finalize(self, _destroy, lib, self._made)
        element = library.DATA_TYPES[kind.dtype]
        self._weight = self._create("MatrixLayout", element, kind.depth, kind.columns, kind.depth)
        self._x = self._create("MatrixLayout", element, kind.depth, kind.rows, kind.row_stride)
        self._out = self._create(
            "MatrixLayout", library.DATA_TYPES[kind.out_dtype], kind.columns, kind.rows, kind.out_stride
        )
        self._descriptions: dict[Addresses, int | None] = {}
        self._retired: list[int | None] = []  # which another thread may have asked for, and not used yet
        self.proposals = self._proposed()

    def run(
        self, proposal: Proposal, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, scales: Scales | None
    ) -> None:
        """Computes ``out`` on the current stream. The operands must be of this kind; nothing is checked.

        Raises:
            CublasLtError: the library refused.
        """
        at = None if bias is None else bias.data_ptr()
        addresses = at if scales is None else (at, scales[0].data_ptr(), scales[1].data_ptr())
        description = self._descriptions.get(addresses) or self._describe(addresses)
        at_out = out.data_ptr()
        status = self._lib.matmul(
            self._handle, description, _ONE, weight.data_ptr(), self._weight, x.data_ptr(), self._x, _ZERO, at_out,
            self._out, at_out, self._out, proposal.address, None, 0,
            torch._C._cuda_getCurrentRawStream(self._kind.device),
        )  # fmt: skip
        if status:
            raise CublasLtError(f"cublasLtMatmul returned status {status} for {self._kind}")

    def _describe(self, addresses: Addresses) -> int | None:
        """What the product is, with what lies at these addresses; each has its own, as threads may run it at once."""
        if len(self._descriptions) >= _MOST_ADDRESSES:
            _destroy(self._lib, {pointer: self._made.pop(pointer) for pointer in self._retired})
            self._retired, self._descriptions = list(self._descriptions.values()), {}
        made = self._create("MatmulDesc", library.COMPUTE_FLOAT32, library.DATA_TYPES[torch.float32])
        self._set("MatmulDesc", made, library.DESCRIPTION_TRANSPOSE_A, ctypes.c_int(library.TRANSPOSED))
        self._set("MatmulDesc", made, library.DESCRIPTION_EPILOGUE, ctypes.c_int(self._kind.epilogue))
        bias, *scales = addresses if isinstance(addresses, tuple) else (addresses,)
        if bias is not None:
            self._set("MatmulDesc", made, library.DESCRIPTION_BIAS, ctypes.c_void_p(bias))
        if self._kind.dtype is torch.float8_e4m3fn:
            of_bias = ctypes.c_int(library.DATA_TYPES[self._kind.out_dtype])
            self._set("MatmulDesc", made, library.DESCRIPTION_BIAS_TYPE, of_bias)
            self._set("MatmulDesc", made, library.DESCRIPTION_FAST_SUMS, ctypes.c_int8(self._kind.short_sums))
            # For cublasLt the weight is the first operand.
            for mode, name, at in zip(
                library.DESCRIPTION_SCALE_MODES, library.DESCRIPTION_SCALES, reversed(scales), strict=True
            ):
                self._set("MatmulDesc", made, mode, ctypes.c_int(library.SCALE_PER_ROW))
                self._set("MatmulDesc", made, name, ctypes.c_void_p(at))
        self._descriptions[addresses] = made
        return made

    def _create(self, kind: str, *arguments: object) -> int | None:
        made = self._lib.created(kind, *arguments).value
        self._made[made] = kind
        return made

    def _set(self, kind: str, of: int | None, attribute: int, value: ctypes._SimpleCData[Any]) -> None:
        self._lib.call(f"{kind}SetAttribute", of, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def _proposed(self) -> list[Proposal]:
        preference = self._create("MatmulPreference")
        for attribute in library.PREFERENCE_ALIGNMENTS:
            self._set("MatmulPreference", preference, attribute, ctypes.c_uint32(ALIGNMENT))
        proposals, count = (Proposal * _PROPOSALS)(), ctypes.c_int()
        anywhere = (None, ALIGNMENT, ALIGNMENT) if self._kind.dtype is torch.float8_e4m3fn else None
        self._lib.call(
            "MatmulAlgoGetHeuristic", self._handle, self._describe(anywhere), self._weight, self._x, self._out,
            self._out, preference, _PROPOSALS, ctypes.byref(proposals), ctypes.byref(count),
        )  # fmt: skip
        self._descriptions.clear()  # of what is at no address
        found = [Proposal.from_buffer_copy(proposal) for proposal in proposals[: count.value]]
        return [proposal for proposal in found if proposal.status == 0 and proposal.workspace == 0]


def _destroy(lib: Library, made: dict[int | None, str]) -> None:
    for pointer, kind in made.items():
        lib.call(f"{kind}Destroy", pointer)
