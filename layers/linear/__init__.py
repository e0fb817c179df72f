"""Linear recurrences: what Gated DeltaNet, Kimi Delta Attention, Mamba-2 and RWKV-7 are made of.

One file an operator, each with a loop for short calls, a chunked form in plain torch (`chunked`), and the
kernels of flash-linear-attention where they can run (`fla`). `hybrid.layers.softmax.force_plain` keeps them
to plain torch.
"""
