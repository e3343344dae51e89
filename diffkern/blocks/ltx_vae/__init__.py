"""The autoencoder of LTX-Video: its residual blocks, its upsamplers, and the convolutions around them.

Stock, a residual block walks over its hidden states some 40 times besides the two convolutions (in units of one read
or write of them): the norm over channels with float32 copies, SiLU, the frames that pad each convolution, by a copy of
everything, the biases, and the sum. Fused it is 7 times: what a convolution reads is written in one pass, with the
bias of the convolution before and the padding frames.

On CUDA in half precision the hidden states are in channels-last order from the first convolution on, which is what
tensor cores read; in the other order cuDNN brings them into it and back at each convolution. Weights stay as they are:
each is brought into that order when it is used, which is one read of it.
"""
