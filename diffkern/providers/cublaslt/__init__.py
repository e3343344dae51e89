"""Matrix products by NVIDIA's cublasLt, the algorithm chosen by measurement and not by the library's estimate.

Torch asks cublasLt for one algorithm and takes it. On an H100 another one is up to 6 % faster for the products of a
denoiser. Here the library's proposals are timed, at the second product of a kind; only those that give the bits of
torch's result are candidates.

    library    its functions, as torch has loaded them
    product    one kind of product: what the library has to be told, and its algorithms
    choice     which algorithm computes a kind of product
    layers     linear layers made of such products
"""

from diffkern.providers.cublaslt.choice import multiply, serves
from diffkern.providers.cublaslt.library import find

__all__ = ["find", "multiply", "serves"]
