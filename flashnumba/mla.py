"""Multi-head latent attention in the shape of FlashMLA: decoding on a paged cache, prefill, a cache, and the schedule.

>>> import numpy as np
>>> from flashnumba import mla
>>> rng = np.random.default_rng(0)
>>> cache = mla.MLACache(pages=8, requests=2, most_tokens=128, like=np.empty(0, np.float16))
>>> cache.append(rng.standard_normal((2, 70, 576)).astype(np.float16))
>>> cache.lengths.tolist(), cache.pages_in_use
([70, 70], 4)
>>> q = rng.standard_normal((2, 1, 16, 576)).astype(np.float16)
>>> out, lse = cache.decode(q, softmax_scale=192**-0.5)
>>> out.shape, lse.shape
((2, 1, 16, 512), (2, 16, 1))

Beside FlashMLA::

    FlashMLA                                        here
    get_mla_metadata(cache_seqlens, n, h_kv)        plan(cache_seqlens, n, h_kv)
    flash_mla_with_kvcache(q, k_cache, ...)         mla_decode(q, k_cache, ...), the same names in the same order
    is_fp8_kvcache=True: e4m3, 656 bytes a token    the same; fmt="e5m2" too
    softmax_scale=None is 576^-0.5                  the same; a model's own is often (128 + 64)^-0.5
    causal: bottom-right aligned                    the same
    lse [B, H, S], +inf where no key is seen        lse [B, H, S], -inf there, as everywhere in flashnumba
    metadata: an internal format                    int32 [parts, 8], see flashnumba.stages.flash_mla.schedule
    indices: sparse attention                       not here
    sm_90a and later                                sm_80 and later, and the emulator

Arrays are NumPy's, torch's, CuPy's, or what offers ``__cuda_array_interface__`` or DLPack; results are of q's kind.
Source: DeepSeek, FlashMLA, README; DeepSeek-V2, arXiv 2405.04434.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from flashnumba.machine.arrays import describe, empty_like_kind
from flashnumba.machine.streams import stream_handle
from flashnumba.stages.flash_mla import cache as writing
from flashnumba.stages.flash_mla import checks, host
from flashnumba.stages.flash_mla.sizes import DV, PAGE, D, token_bytes
from flashnumba.stages.host import check_machine, library_stream, machine_of, refuse_gradients

__all__ = ["MLACache", "Plan", "mla_decode", "mla_prefill", "plan"]


class Plan(NamedTuple):
    """What :func:`plan` gives, to be unpacked: both int32, beside ``cache_seqlens``."""

    tile_scheduler_metadata: Any
    num_splits: Any


def plan(
    cache_seqlens: Any, num_q_tokens_per_head_k: int, num_heads_k: int = 1, *, is_fp8_kvcache: bool = False,
    machine: str = "auto",
) -> Plan:  # fmt: skip
    """Cut requests into parts of equal work; once for all layers of a step, as long as lengths stay the same.

    Args:
        cache_seqlens: int32 ``[B]``, tokens of each request. On a GPU the host waits for them.
        num_q_tokens_per_head_k: query tokens times heads.
        num_heads_k: 1.
        is_fp8_kvcache: what :func:`mla_decode` will be told.
        machine: ``"cuda"``, ``"emulator"`` or ``"auto"``.

    Returns:
        (tile_scheduler_metadata ``[parts, 8]``, num_splits ``[B + 1]``).

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    if isinstance(num_heads_k, bool) or num_heads_k != 1:
        raise ValueError(f"num_heads_k is {num_heads_k!r}; latent attention has one head of keys")
    return Plan(*host.make_plan(cache_seqlens, num_q_tokens_per_head_k, _code("e4m3", is_fp8_kvcache), machine))


def mla_decode(
    q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int = DV,
    tile_scheduler_metadata: Any = None, num_splits: Any = None, softmax_scale: float | None = None,
    causal: bool = False, *, is_fp8_kvcache: bool = False, fmt: str = "e4m3", machine: str = "auto", stream: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Attention of a few query tokens to latent rows in pages, of which the first 512 columns are V too.

    Args:
        q: ``[B, S, H, 576]`` float16 or bfloat16: queries in latent space beside their rotated part.
        k_cache: ``[pages, 64, 1, 576]`` of q's type; or uint8 ``[pages, 64, 1, 656]``, see :class:`MLACache`.
        block_table: int32 ``[B, most pages]``: each request's pages in order; those beyond its length are not read.
        cache_seqlens: int32 ``[B]``; a request without tokens has out = 0 and lse = -inf.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: of :func:`plan` for these lengths. With None it is called, which on a GPU
            means to wait for the lengths.
        softmax_scale: of the scores, finite; None is ``576^-0.5``.
        causal: token s of S sees the request's keys up to ``cache_seqlens - S + s``.
        is_fp8_kvcache, fmt: whether the cache is in 8 bits, and its format, ``"e4m3"`` or ``"e5m2"``.
        machine: ``"cuda"``, ``"emulator"``, or ``"auto"``: where the arrays are, else a GPU if there is one.
        stream: for a GPU; None follows the current stream of q's library.

    Returns:
        (out ``[B, S, H, 512]``, lse ``[B, H, S]`` float32, the natural logarithm), packed, of q's kind. The same bits
        for the same plan, wherever pages lie.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched. Numbers in ``block_table`` and
            ``cache_seqlens`` are looked at in host memory alone; on a GPU wrong ones are read as they are.
    """
    checks.check_dv(head_dim_v)
    return host.prepare_decode(
        q, k_cache, block_table, cache_seqlens, tile_scheduler_metadata, num_splits, scale=softmax_scale,
        causal=causal, code=_code(fmt, is_fp8_kvcache), machine=machine, stream=stream,
    ).run()  # fmt: skip


def mla_prefill(
    q: Any, kv: Any, head_dim_v: int = DV, softmax_scale: float | None = None, causal: bool = True, *,
    machine: str = "auto", stream: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Attention of many query tokens to latent rows that lie one after the other.

    Args:
        q: ``[B, S, H, 576]`` float16 or bfloat16.
        kv: ``[B, N, 1, 576]`` of q's type.
        head_dim_v, softmax_scale, machine, stream: as :func:`mla_decode`.
        causal: token s sees keys up to ``N - S + s``.

    Returns:
        (out, lse) as :func:`mla_decode`.

    Raises:
        TypeError, ValueError: an argument does not fit, before anything is launched.
    """
    checks.check_dv(head_dim_v)
    return host.prefill(q, kv, scale=softmax_scale, causal=causal, machine=machine, stream=stream)


def _code(fmt: str, eight: bool) -> str:
    if not isinstance(eight, bool | np.bool_):
        raise TypeError(f"is_fp8_kvcache is {eight!r}; it must be True or False")
    if not isinstance(fmt, str) or fmt not in host.CODES:
        raise ValueError(f"fmt is {fmt!r}; it must be one of {', '.join(host.CODES)}")
    return host.CODES[fmt] if eight else ""


class MLACache:
    """Pages of latent rows, and whose they are: requests grow page by page, and give all back at once.

    The host keeps the lengths, so a :func:`plan` waits for nothing, and is made once for lengths that stay the same. In
    8 bits a token is 512 codes, a float32 scale for each 128 of them, and the 64 rotated numbers in 16 bits.

    Args:
        pages: of 64 tokens, for all requests together.
        requests: B.
        most_tokens: that a request may have.
        like: any float16 or bfloat16 array: the library, place and type of what the cache holds.
        fmt: ``"e4m3"`` or ``"e5m2"`` for 8 bits; None for 16.
        machine: as :func:`mla_decode`.

    Attributes:
        k_cache, block_table, cache_seqlens: as :func:`mla_decode` takes them.
        lengths: int64 ``[B]`` on the host, a copy.
        pages_in_use: of all.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    def __init__(
        self, pages: int, requests: int, most_tokens: int, *, like: Any, fmt: str | None = None, machine: str = "auto"
    ) -> None:
        check_machine(machine)
        for name, value in (("pages", pages), ("requests", requests), ("most_tokens", most_tokens)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
        self._like = describe(like, "like")
        if self._like.element not in checks.HALVES:
            raise TypeError(f"like has elements of type {self._like.element}; it must be {' or '.join(checks.HALVES)}")
        self.fmt, self._machine = fmt, machine
        self._code = _code("e4m3" if fmt is None else fmt, fmt is not None)
        shape = (int(pages), PAGE, 1, token_bytes() if fmt else D)
        self.k_cache = empty_like_kind(like, shape, "uint8" if fmt else None)
        self._free = list(range(int(pages)))[::-1]
        self._table = np.zeros((int(requests), -(-int(most_tokens) // PAGE)), np.int32)
        self._lengths, self._most = np.zeros(int(requests), np.int64), int(most_tokens)
        self._plans: dict[int, Plan] = {}
        self._upload()

    @property
    def lengths(self) -> np.ndarray:
        return self._lengths.copy()

    @property
    def pages_in_use(self) -> int:
        return int((-(-self._lengths // PAGE)).sum())

    def _upload(self) -> None:
        self.block_table = host.placed(self._table.copy(), self._like)
        self.cache_seqlens = host.placed(self._lengths.astype(np.int32), self._like)
        self._plans.clear()

    def _in_use(self, stream: Any, *more: Any) -> None:
        """Tables are replaced while a stream may still read them: torch's allocator is told, which else gives their
        memory to the next who asks on the current stream; with CuPy the host waits for the stream."""
        if stream is None or self._like.kind not in ("torch-cuda", "cupy"):
            return
        with library_stream(self._like, stream):
            if self._like.kind == "cupy":
                sys.modules["cupy"].cuda.get_current_stream().synchronize()
                return
            here = sys.modules["torch"].cuda.current_stream(self._like.device)
            for table in (self.block_table, self.cache_seqlens, *more):
                table.record_stream(here)

    def append(self, rows: Any, *, stream: Any = None) -> None:
        """Put new tokens behind those of each request.

        Args:
            rows: ``[B, S, 576]`` of the cache's type, packed: latent rows beside their rotated part.
            stream: as :func:`mla_decode`.

        Raises:
            TypeError, ValueError: rows do not fit, a request would have more than ``most_tokens``, or pages run out;
                the cache is then as it was.
        """
        refuse_gradients(rows=rows)
        found = describe(rows, "rows")
        if stream is not None:
            stream_handle(stream)
        if found.element != self._like.element:
            raise TypeError(f"rows have elements of type {found.element}; this cache holds {self._like.element}")
        if len(found.shape) != 3 or (found.shape[0], found.shape[2]) != (len(self._lengths), D):
            raise ValueError(f"rows have shape {found.shape}; it must be [{len(self._lengths)}, new tokens, {D}]")
        if not found.contiguous or found.pointer % 16:
            raise ValueError(f"rows have strides {found.strides}; they must be packed, at a multiple of 16 bytes")
        if found.device != self._like.device:
            raise ValueError(f"rows lie on device {found.device} and the cache on {self._like.device}")
        grown = self._lengths + found.shape[1]
        if grown.max() > self._most:
            raise ValueError(
                f"rows bring {found.shape[1]} tokens to {int(self._lengths.max())}; a request may have {self._most}"
            )
        before, after = -(-self._lengths // PAGE), -(-grown // PAGE)
        if (after - before).sum() > len(self._free):
            raise ValueError(f"rows need {int((after - before).sum())} new pages; {len(self._free)} are free")
        table, free = self._table.copy(), self._free.copy()  # the cache's own when all has gone well
        for b, (old, new) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
            for at in range(old, new):
                table[b, at] = free.pop()
        machine, arch = machine_of(self._machine, self._like, "rows")
        cache = host.without_heads(self.k_cache, describe(self.k_cache))
        writing.append(
            rows, cache, host.placed(table, self._like, stream), self.cache_seqlens, code=self._code, machine=machine,
            arch=arch, stream=stream,
        )  # fmt: skip
        self._in_use(stream)
        self._table, self._free, self._lengths = table, free, grown
        self._upload()

    def free(self, request: int) -> None:
        """Give a request's pages back; it has no tokens then.

        Raises:
            TypeError, ValueError: there is no such request.
        """
        if isinstance(request, bool) or not isinstance(request, int | np.integer):
            raise TypeError(f"request is {request!r}; it must be a whole number")
        if not 0 <= request < len(self._lengths):
            raise ValueError(f"request is {request!r}; it must be 0 to {len(self._lengths) - 1}")
        count = -(-int(self._lengths[request]) // PAGE)
        self._free.extend(self._table[request, :count][::-1].tolist())
        self._table[request], self._lengths[request] = 0, 0
        self._upload()

    def plan(self, num_q_tokens_per_head_k: int) -> Plan:
        """:func:`plan` for the lengths that there are; the host waits for nothing."""
        host.check_planned(num_q_tokens_per_head_k)
        if num_q_tokens_per_head_k not in self._plans:
            made = host.make_plan(self.cache_seqlens, num_q_tokens_per_head_k, self._code, self._machine, self._lengths)
            self._plans[num_q_tokens_per_head_k] = Plan(*made)
        return self._plans[num_q_tokens_per_head_k]

    def decode(
        self, q: Any, softmax_scale: float | None = None, causal: bool = False, *, stream: Any = None
    ) -> tuple[Any, Any]:
        """:func:`mla_decode` on this cache."""
        found = describe(q, "q")
        checks.check_q(found)
        made = self.plan(max(1, found.shape[1] * found.shape[2]))
        results = mla_decode(
            q, self.k_cache, self.block_table, self.cache_seqlens, DV, *made, softmax_scale, causal,
            is_fp8_kvcache=self.fmt is not None, fmt=self.fmt or "e4m3", machine=self._machine, stream=stream,
        )  # fmt: skip
        self._in_use(stream, *made)
        return results
