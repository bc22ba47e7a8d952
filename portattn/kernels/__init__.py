"""The core kernels: one Triton source each, specialised by Lowering choices. Import needs Triton and nothing else.

tiles.py     named primitives that take the choices
blockptr.py, descriptor.py, programmatic_launch.py   constructs that not every toolchain has
attend.py    the loop over key tiles that the kernels with matrix products share
dense.py     dense_forward: dense and packed tensors
attend_packed16.py that loop over a quantised cache's rows as 16-bit words: paged_addressing.py finds and loads them,
             unpack_int4.py makes numbers of them
decode.py    decode_split: contiguous, paged and latent caches
warp_split.py     warps_apart: the same for plain problems of few rows, with each warp at keys of its own; and small
dense
             problems of float32
results.py   what programs of these two store of their rows
sparse.py    sparse_split: chosen tokens
combine.py   combine: merges what was split
row_gradients.py, key_gradients.py, bias_gradient.py   gradients: gradients.py says what is computed
"""
