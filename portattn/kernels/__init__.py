"""The core kernels: one Triton source each, specialised by Lowering choices. Import needs Triton and nothing else.

tiles.py     named primitives that take the choices
blockptr.py, descriptor.py   constructs that not every toolchain has
dense.py     dense_forward
decode.py    decode_split, decode_combine
"""
