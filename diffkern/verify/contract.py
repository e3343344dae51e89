"""The constants of the numerical contract, which every proof keeps."""

from __future__ import annotations

import torch

#: error(fused) may be this much of error(stock), ...
RATIO = 1.05
#: ... plus this much, relative.
SLACK = 1e-6
#: Rows from which on the ratio means something; with fewer, one rounding of the dtype is allowed instead.
ROWS = 64
#: What products in fp8 may add to the error: they are off by 3.7 % of their root mean square. (In a
#: block the residual, which most of the result is, is off by nothing.)
FP8_ALLOWANCE = 0.04
#: The same of two products, one after the other.
FP8_ALLOWANCE_OF_TWO = 0.06
#: With fewer rows the stated error of fp8, which is an average, may be exceeded by this share of it.
FEW_ROWS = 0.25
#: The same for single numbers, as in the gradient of a weight.
ENOUGH = 4096

#: Elements of a proof of bit identity of a norm, where one differing element decides.
EXACT_ELEMENTS = 1 << 18

#: Tokens of each sample of a block, in ordinary proofs and in the one of a short call.
TOKENS, FEW_TOKENS = 45, 5

#: How far the stock forward of a norm may be in float32 from what its class is known to compute, relative.
SEMANTIC_TOLERANCE = 1e-5
#: How far the stock result and gradients may be from the exact ones. More means that the exact ones are of something
#: else.
SANE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
