"""Attention: its implementations as data, and routes that send a model's calls to the one that suits them."""

from diffkern.attention.backends import BACKENDS, Backend, UnavailableError, backend_of
from diffkern.attention.call import AttentionCall, Signature
from diffkern.attention.hub import find_backend
from diffkern.attention.route import Route

__all__ = [
    "BACKENDS",
    "AttentionCall",
    "Backend",
    "Route",
    "Signature",
    "UnavailableError",
    "backend_of",
    "find_backend",
]
