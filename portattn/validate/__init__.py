"""From a caller's arguments to a Call with its Problem. Every complaint names the argument, the value and the limit.

checks.py    what one tensor or number must be
features.py  windows, caps, slopes, sinks, biases and masks, which most ops take
values.py    what lengths, page ids and indices must be, where they are read back
dense.py, varlen.py, paged.py, sparse.py, latent.py   one builder an op
"""

from portattn.validate.checks import wants_gradients
from portattn.validate.dense import attention_call
from portattn.validate.latent import mla_call
from portattn.validate.paged import paged_call
from portattn.validate.sparse import sparse_call
from portattn.validate.varlen import varlen_call

__all__ = ["attention_call", "mla_call", "paged_call", "sparse_call", "varlen_call", "wants_gradients"]
