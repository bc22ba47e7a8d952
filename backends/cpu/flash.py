"""torch's flash kernel for CPUs (aten::_scaled_dot_product_flash_attention_for_cpu), by the keys that rows see.

Its causal mask is top-left; its maximum passes over NaN, and a row that it takes for empty has output and LSE 0."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from portattn.schema.tensors import collapse_broadcast

# Rows of a block under a window: a block reads as many keys more than its rows see. 128 to 256 took the same time on an
# AVX-512 machine, 512 took a fifth more ((1,8,8192,64), a window of 1024).
WINDOW_ROWS = 256
# Elements of a mask that one call of the kernel is given, 4 bytes each.
MASK_ELEMENTS = 2**20
LEAST_ROWS = 32  # of a block: the kernel's own are no smaller
# Elements of K, or of V, that are held in float32 at a time where 16-bit products are slow.
WIDE_ELEMENTS = 2**19
# Fewer products than this a head are not worth the conversions.
WIDE_PRODUCTS = 2**10
GEMV_ROWS = 4  # fewer query rows to a key head than this are no matrix
# The kernel's maximum passes over NaN in the keys beyond the last whole vector, of 4 to 64 float32 numbers.
VECTOR_KEYS = 64

Result = tuple[torch.Tensor, torch.Tensor]


class NotFinite(ArithmeticError):
    """A row may attend a score of NaN or +inf, or only -inf: torch's kernel may be wrong there."""


def check_rows(
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    idle: torch.Tensor | None = None,
) -> None:
    """Raise NotFinite if the LSE (B,Hq,Sq) is NaN or +inf in a row that is not idle, or 0 and perhaps wrong.

    0 is right for a lone score of 0, but scores all -inf or NaN give it too: then q, k, scale and mask are read. x/x is
    NaN for NaN, +inf and 0: one sum finds it."""
    if lse.is_meta:  # a tensor without numbers
        return
    counted = lse if idle is None else lse.masked_fill(idle, 1.0)
    if math.isfinite((counted / counted).sum().item()):
        return
    if not (counted.isfinite().all() and _has_finite_scores(q, k, scale, mask)):
        raise NotFinite


def _has_finite_scores(q: torch.Tensor, k: torch.Tensor, scale: float, mask: torch.Tensor | None) -> bool:
    """Return whether no score but a masked one can be NaN or infinite, by bounds in one pass per tensor."""
    bound = _largest(q) * _largest(k) * q.shape[3] * max(abs(scale), 1.0)
    if mask is not None:
        bound += _largest(mask.masked_fill(mask == -math.inf, 0.0))
    return bound <= torch.finfo(torch.float32).max  # not if the bound is NaN


def _largest(tensor: torch.Tensor) -> float:
    low, high = tensor.detach().aminmax()
    return max(-low.item(), high.item())


@dataclass(frozen=True, slots=True)
class Sight:
    """Row i sees keys i + shift - left to i + shift + right; an infinite side hides nothing."""

    shift: int
    left: float
    right: float

    def keys(self, first: int, last: int, count: int) -> tuple[int, int]:
        """Return the range [begin, end) of keys that some row of [first, last) sees."""
        begin = max(first + self.shift - self.left, 0)
        end = min(last - 1 + self.shift + self.right + 1, count)
        return int(min(begin, count)), int(max(end, 0))

    def rows(self, rows: int, keys: int) -> tuple[int, int]:
        first = min(max(-self.shift - self.right, 0), rows)
        last = min(max(keys - self.shift + self.left, first), rows)
        return int(first), int(last)

    def hides(self, rows: int, keys: int) -> tuple[bool, bool]:
        """Return whether any key before the rows' visible keys is hidden, and whether any key after them is."""
        return rows - 1 + self.shift - self.left > 0, self.shift + self.right < keys - 1


@dataclass(frozen=True, slots=True)
class Terms:
    """A bias, a mask (True = attend) or both, as (B,Hq,Sq,Sk) views, broadcast by strides of 0."""

    bias: torch.Tensor | None
    mask: torch.Tensor | None

    @property
    def spread(self) -> int:
        """The stored (rows, keys) masks, over batch and heads."""
        return max(math.prod(collapse_broadcast(t).shape[:2]) for t in (self.bias, self.mask) if t is not None)

    def part(self, rows: slice, keys: slice) -> Terms:
        return Terms(*(None if t is None else t[:, :, rows, keys] for t in (self.bias, self.mask)))

    def added(self) -> torch.Tensor:
        """Return the float32 term to add to the scores; a broadcast dimension stays 1 if bias and mask allow it."""
        if self.mask is None:
            assert self.bias is not None
            return collapse_broadcast(self.bias).float().expand(-1, -1, -1, self.bias.shape[3])
        hidden = ~collapse_broadcast(self.mask).expand(-1, -1, -1, self.mask.shape[3])
        if self.bias is None:
            return hidden.new_zeros(hidden.shape, dtype=torch.float32).masked_fill_(hidden, -math.inf)
        bias = collapse_broadcast(self.bias).float()
        return torch.where(hidden, -math.inf, bias)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sight: Sight,
    terms: Terms | None = None,
    wide: bool = False,
) -> Result:
    """Return (out in q's dtype, LSE float32), neither contiguous; rows that see nothing have 0 and -inf.

    `wide` computes in float32: the kernel's LSE of 16-bit tensors is off by 4e-5. Raises NotFinite if scores may not be
    finite, hidden ones too: NaN less infinity is NaN. Keys that no row sees can hold anything."""
    rows, keys = q.shape[2], k.shape[2]
    if terms is None and sight.hides(rows, keys) == (False, False) and rows and keys and q.shape[0]:
        return _seen_by_all(q, k, v, scale, wide)
    first, last = sight.rows(rows, keys)
    begin, end = sight.keys(first, last, keys)
    if first >= last or begin >= end or 0 in q.shape[:2]:
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    if (first, last) != (0, rows):
        some = slice(first, last)
        theirs = None if terms is None else terms.part(some, slice(None))
        inner = attend(q[:, :, some], k, v, scale, Sight(sight.shift + first, sight.left, sight.right), theirs, wide)
        out, lse = q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
        out[:, :, some], lse[:, :, some] = inner
        return out, lse
    if terms is None and not sight.hides(rows, keys)[0]:
        return _causal(q, k[:, :, :end], v[:, :, :end], scale, int(sight.shift + sight.right), wide)
    return _in_blocks(q, k, v, scale, sight, terms, wide)


def attend_in_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sight: Sight,
    chunk: int,
    terms: Terms | None = None,
    wide: bool = False,
) -> Result:
    """Like `attend`, but each row sees only the chunk of its key i + shift: each chunk is its own attention."""
    rows, keys = q.shape[2], k.shape[2]
    out, lse = q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    for begin in range(max(sight.shift, 0) // chunk * chunk, min(keys, sight.shift + rows), chunk):
        some = slice(max(begin - sight.shift, 0), min(begin + chunk - sight.shift, rows))
        seen = slice(begin, min(begin + chunk, keys))
        its_sight = Sight(sight.shift + some.start - begin, sight.left, sight.right)
        theirs = None if terms is None else terms.part(some, seen)
        found = attend(q[:, :, some], k[:, :, seen], v[:, :, seen], scale, its_sight, theirs, wide)
        out[:, :, some], lse[:, :, some] = found
    return out, lse


def _seen_by_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, wide: bool) -> Result:
    """Attend every key: query heads that share keys become rows of one head, and keys are read once."""
    batch, heads, rows, width = q.shape
    group = heads // k.shape[1]
    if group == 1 or rows > WINDOW_ROWS:
        return _wide(q, k, v, scale, wide)
    out, lse = _wide(q.reshape(batch, k.shape[1], group * rows, width), k, v, scale, wide)
    return out.reshape(batch, heads, rows, -1), lse.reshape(batch, heads, rows)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, diagonal: int, wide: bool) -> Result:
    """Attend keys 0 to i + diagonal in row i; diagonal is at least 0."""
    rows, keys = q.shape[2], k.shape[2]
    if diagonal == 0:
        return _wide(q, k, v, scale, wide, causal=True)
    if rows * keys <= MASK_ELEMENTS:
        return _wide(q, k, v, scale, wide, _range_mask(rows, keys, -math.inf, diagonal))
    # The first keys are seen by all rows; the rest have a causal mask that begins at their top left.
    out, lse = _seen_by_all(q, k[:, :, :diagonal], v[:, :, :diagonal], scale, wide)
    recent, recent_lse = _wide(q, k[:, :, diagonal:], v[:, :, diagonal:], scale, wide, causal=True)
    weight = torch.sigmoid(recent_lse - lse)[..., None]
    return torch.lerp(out.float(), recent.float(), weight).to(q.dtype), torch.logaddexp(lse, recent_lse)


def _in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sight: Sight, terms: Terms | None, wide: bool
) -> Result:
    """Attend row blocks in turn, each over its visible keys, under a mask of that size."""
    rows, keys = q.shape[2], k.shape[2]
    out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    reach = min(sight.left + sight.right + WINDOW_ROWS, keys) * (1 if terms is None else terms.spread)
    size = int(min(WINDOW_ROWS, max(MASK_ELEMENTS // reach, LEAST_ROWS)))
    known: tuple[Any, torch.Tensor | None] = None, None
    for first in range(0, rows, size):
        some = slice(first, min(first + size, rows))
        seen = slice(*sight.keys(some.start, some.stop, keys))
        place = (some.stop - first, seen.stop - seen.start, first + sight.shift - seen.start)
        if known[0] != place:  # the same for all blocks but those at the ends
            known = place, _sight_mask(sight, *place)
        mask, its_k, its_v, idle = known[1], k[:, :, seen], v[:, :, seen], None
        if terms is not None:
            added = terms.part(some, seen).added()
            mask = added if mask is None else torch.where(mask == 0.0, added, mask)
            idle, its_k, its_v = _shown(mask, its_k, its_v)
        its_out, its_lse = _wide(q[:, :, some], its_k, its_v, scale, wide, mask, idle=idle)
        if idle is not None:  # the kernel's LSE is 0 there, and NaN in a query of theirs is NaN in the output
            its_out, its_lse = its_out.masked_fill(idle[..., None], 0.0), its_lse.masked_fill(idle, -math.inf)
        out[:, :, some], lse[:, :, some] = its_out, its_lse
    return out, lse


def _sight_mask(sight: Sight, rows: int, keys: int, shift: int) -> torch.Tensor | None:
    """Return the additive mask of a block whose first row stands at its key `shift`; None if it hides nothing."""
    if Sight(shift, sight.left, sight.right).hides(rows, keys) == (False, False):
        return None
    return _range_mask(rows, keys, shift - sight.left, shift + sight.right)


def _range_mask(rows: int, keys: int, first: float, last: float) -> torch.Tensor:
    """Return a mask (1, 1, rows, keys) float32: row i sees keys i + first to i + last."""
    place = torch.arange(keys, dtype=torch.int32, device="cpu")
    place = place - torch.arange(rows, dtype=torch.int32, device="cpu")[:, None]
    return place.new_zeros(place.shape, dtype=torch.float32).masked_fill_((place > last) | (place < first), -math.inf)[
        None, None
    ]


def _shown(mask: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows that see no key, and K and V with 0 at keys that no row sees: they may hold NaN, and 0·NaN is NaN."""
    shown = mask != -math.inf
    seen = shown.any(dim=2)  # (B or 1, Hq or 1, keys)
    if not seen.all():
        if seen.shape[1] > 1:
            seen = seen.unflatten(1, (k.shape[1], -1)).any(dim=2)
        k, v = k.masked_fill(~seen[..., None], 0.0), v.masked_fill(~seen[..., None], 0.0)
    return ~shown.any(dim=3), k, v


def _wide(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    wide: bool,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    idle: torch.Tensor | None = None,
) -> Result:
    """Run the kernel and check its rows; 16-bit tensors in float32, some heads at a time, if asked or faster."""
    if q.dtype is torch.float32 or not (wide or _slow(q, k)):
        out, lse = kernel(q, k, v, scale, mask, causal)
    else:
        out, lse = _in_float32(q, k, v, scale, mask, causal)
    check_rows(lse, q, k, scale, mask, idle)
    return out, lse


def _in_float32(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None, causal: bool
) -> Result:
    batch, heads = k.shape[:2]
    group, each = q.shape[1] // heads, max(WIDE_ELEMENTS // (k.shape[2] * max(k.shape[3], v.shape[3])), 1)
    out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    for b in range(0, batch, max(each // heads, 1)):
        some = slice(b, b + max(each // heads, 1))
        for h in range(0, heads, each):
            own, theirs = slice(h * group, (h + each) * group), slice(h, h + each)
            part = mask
            if mask is not None:
                part = mask[some if mask.shape[0] > 1 else slice(None), own if mask.shape[1] > 1 else slice(None)]
            q_part, k_part = q[some, own].float(), k[some, theirs].float()
            v_part = k_part if v is k else v[some, theirs].float()
            out[some, own], lse[some, own] = kernel(q_part, k_part, v_part, scale, part, causal)
    return out, lse


def _slow(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return whether the kernel is slower in a 16-bit dtype than in float32, conversions included.

    Measured with AVX-512, one thread. Eight heads of causal 1024 × 1024: 40 ms in bf16 and float32, 54 in fp16. 4 × 8
    rows over 2048 keys each: 14 ms in bf16, 21 in fp16, 7 to 8 in float32. Four rows each: 7, 23 and 10 ms. AMX
    computes 16-bit types; machines other than x86 are assumed fast."""
    if q.shape[2] * k.shape[2] < WIDE_PRODUCTS:
        return False
    if q.dtype is torch.bfloat16:
        return q.shape[2] * (q.shape[1] // k.shape[1]) < GEMV_ROWS and _plain_x86()
    return _plain_x86()


@functools.cache
def _plain_x86() -> bool:
    x86 = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2", "AVX512")
    return x86 and not getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()


def kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None, causal: bool
) -> Result:
    """Call torch's kernel as it needs: with a scale above 0, contiguous rows, and V as wide as K."""
    if mask is None and (k.shape[2] < VECTOR_KEYS or _loses_nan()):
        mask = _no_mask()  # the maximum of masked scores does not pass over NaN
    if scale <= 0.0:  # a causal mask would be multiplied by it
        q, scale = (-q, -scale) if scale < 0.0 else (q * 0.0, 1.0)
    width, width_v = q.shape[3], v.shape[3]
    if width < width_v:
        q, k = (torch.nn.functional.pad(t, (0, width_v - width)) for t in (q, k))
    elif width > width_v:
        v = torch.nn.functional.pad(v, (0, width - width_v))
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=causal, attn_mask=mask, scale=scale
    )
    return (out if width <= width_v else out[..., :width_v]), lse


@functools.cache
def _no_mask() -> torch.Tensor:
    """Return a mask that hides nothing, which autograd may save."""
    with torch.inference_mode(False):
        return torch.zeros(1, 1, 1, 1, device="cpu")


@functools.cache
def _loses_nan() -> bool:
    """Return whether this torch's kernel passes over NaN in whole vectors of keys too, as its source of 2.6 does."""
    q = torch.full((1, 1, 1, 4), math.nan, device="cpu")
    k = torch.zeros(1, 1, VECTOR_KEYS, 4, device="cpu")
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)
    return not lse.isnan().all()
