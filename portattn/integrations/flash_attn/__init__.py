"""flash_attn's module over portattn: `from portattn.integrations.flash_attn import flash_attn_func`, and so on.

The functions of FlashAttention-2 are here and in `flash_attn_interface`, `bert_padding` beside them, as in flash_attn;
`portattn.integrations.flash_attn_interface` has FlashAttention-3's.

`__version__` is the version of flash_attn that these functions follow, for code that asks for a minimum of it;
portattn's own is `portattn.__version__`.
"""

from portattn.integrations.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.3"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
