"""vLLM uses Triton only where there is one GPU, or none may be seen: then its kernels can be interpreted."""

import importlib.util
import os

import torch

if importlib.util.find_spec("vllm") is not None and not torch.cuda.is_available():
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
