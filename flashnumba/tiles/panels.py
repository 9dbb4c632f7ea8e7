"""A warp's part of a ``wgmma`` product, rounded to 16 bits, to global memory by the copy engine.

Of each 64 rows of a warpgroup's product a warp holds 16. It lays them down in shared memory in panels of 16 rows x 64
columns, 128 bytes a row with the 128-byte swizzle, and one lane hands each panel to the copy engine. Panels are the
warp's own and are taken in turn: before it writes one, the warp waits until the copy engine has read what lay there.

``stmatrix`` writes what ``ldmatrix`` reads: the packed accumulators of 16 x 16 are four 8x8 matrices, and lane l gives
the address of row ``l % 16``, chunk ``l / 16``.

Source: PTX ISA, stmatrix and cp.async.bulk.tensor; CUTLASS, ``include/cutlass/epilogue/collective/sm90_*tma*.hpp``.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, device
from flashnumba.machine.instructions import (
    bulk_commit,
    bulk_wait_read,
    fence_proxy_async,
    pack_bf16x2,
    pack_f16x2,
    stmatrix_x4,
    syncwarp,
    tma_store_2d,
    tma_store_4d,
)
from flashnumba.machine.numba import cuda, uint32
from flashnumba.tiles.swizzle import make_place

__all__ = ["COLUMNS", "PANEL_BYTES", "make_panel_store"]

COLUMNS = 64
"""Columns of a panel: 128 bytes of 16-bit elements."""

PANEL_BYTES = 16 * COLUMNS * 2


@cache
def make_panel_store(element: str, panels: int, broken: str = "", *, batched: bool = False) -> DeviceFunction:
    """``store(acc, at, stage, turn, out, row, col) -> turn``: 16 x 64 from ``acc[at : at + 32]`` on to a tensor map.
    As ``batched`` two arguments more, ``head`` and ``batch``: the map has four axes, and boxes of ``[1, 1, 16, 64]``.

    The map ``out`` has boxes of ``[16, 64]`` with the 128-byte swizzle. ``stage`` is the shared address, a multiple of
    1024, of ``panels * PANEL_BYTES`` bytes of the warp's own, ``turn`` the offset of the panel whose turn it is. What
    lies beyond the tensor's end is not written. At the end lane 0 waits with ``bulk_wait(0)``.

    Args:
        element: float16 or bfloat16.
        panels: of the warp.
        broken: plants a fault: ``"store"`` does not wait for the panel to be free, ``"proxy"`` leaves out the fence
            before the copy engine reads, ``"lanes"`` the warp's barrier there, ``"swizzle"`` writes in plain order.
    """
    pack = {"float16": pack_f16x2, "bfloat16": pack_bf16x2}[element]
    all_but_later, end = bulk_wait_read(panels - 1), panels * PANEL_BYTES
    chunk_at = make_place(COLUMNS // 8, swizzled=broken != "swizzle")
    waits, fences, meets = broken != "store", broken != "proxy", broken != "lanes"

    @device
    def send(out, panel, row, col, place):
        tma_store_2d(out, panel, col, row)

    @device
    def send_batched(out, panel, row, col, place):
        head, batch = place
        tma_store_4d(out, panel, col, row, head, batch)

    send_panel = send_batched if batched else send

    @device
    def store(acc, at, stage, turn, out, row, col, *place):
        lane = uint32(cuda.threadIdx.x & 31)
        panel = uint32(stage + turn)
        mine = chunk_at(lane & uint32(15), lane >> uint32(4))
        words = cuda.local.array(4, uint32)
        if waits:
            if lane == uint32(0):
                all_but_later()
            syncwarp()  # the copy engine has read what lay here
        for j in range(COLUMNS // 16):
            for i in range(4):
                words[i] = pack(acc[at + 8 * j + 2 * i], acc[at + 8 * j + 2 * i + 1])
            stmatrix_x4(panel + (mine ^ uint32(32 * j)), words, 0)  # 16 columns on, the swizzle differs by xor alone
        if fences:
            fence_proxy_async()
        if meets:
            syncwarp()  # all lanes have written, and fenced, before one of them starts the copy
        if lane == uint32(0):
            send_panel(out, panel, row, col, place)
            bulk_commit()
        turn = uint32(turn + uint32(PANEL_BYTES))
        return uint32(0) if turn == uint32(end) else turn

    return store
