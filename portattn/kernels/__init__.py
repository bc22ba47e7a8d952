"""The core kernels: one Triton source each, specialised by Lowering choices. Import needs Triton and nothing else.

tiles.py     named primitives that take the choices; softmax.py: the softmax
score_program.py  score and mask functions as Triton functions
records.py   jit: records as arguments; arguments.py: the records
attend.py    the loop over key tiles that the kernels with matrix products share
dense.py     dense_forward: dense and packed tensors
dequantize.py  formats of caches; Q·Kᵀ and P·V of int4, nvfp4 and fp8_ds_mla rows, which are no tiles of numbers
attend_packed16.py, attend_packed16_swap_ab.py   that loop over a quantised cache's rows as 16-bit words:
             paged_addressing.py finds and loads them, unpack_int4.py makes numbers of them
decode.py    decode_split: contiguous, paged and latent caches
warp_split.py  warps_apart: the same for plain problems of few rows, with each warp at keys of its own; and small dense
             problems of float32
sparse.py    sparse_split: chosen tokens
combine.py   store_rows: how these two store their results; combine: merges split keys' shares;
             merge_rows, merge_parts: results of several ranks
row_gradients.py, key_gradients.py, gradients.py   gradients; gradients.py has the formulas and the bias's gradient
write.py, quantize.py   write_cache: appends rows to caches, quantized if asked; quantise_rows: SAGE's numbers
"""
