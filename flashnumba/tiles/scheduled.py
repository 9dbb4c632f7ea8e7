"""The flash forward by a schedule: a kernel that asks which row tiles are its block's, and attends to each.

What a row tile costs and how it is computed is :mod:`flashnumba.tiles.forward`'s affair; which block has which tile is
:mod:`flashnumba.tiles.schedule`'s. Here the two meet, in two kernels: one whose blocks each have a unit of work of
their own, and one whose blocks stay and draw units from a counter.
"""

from __future__ import annotations

from functools import cache

from flashnumba.machine.function import DeviceFunction, Kernel, device, kernel
from flashnumba.machine.instructions import atom_add_acq_rel_gpu_u32, global_address, grid_dependency_wait
from flashnumba.machine.numba import cuda, int32, int64, uint32
from flashnumba.tiles.elements import ITEMSIZE
from flashnumba.tiles.forward import make_attend
from flashnumba.tiles.schedule import SCHEDULES, heads_near
from flashnumba.tiles.sizes import AttentionTiles

__all__ = ["FAULTS", "clear", "make_place", "make_scheduled"]

FAULTS = ("twice", "left_out", "turn_barrier", "ticket_barrier", "partner")
"""What can be planted beside the faults of :mod:`flashnumba.tiles.forward`."""


@device
def nothing():
    pass


@kernel(threads=32, name="causal_balance.clear")
def clear(counter):
    """Set the counter to zero. A launch of its own before the one that draws: the stream orders the two, so no host
    waits, and a CUDA graph repeats both."""
    if cuda.threadIdx.x == 0:
        counter[0] = int32(0)


@cache
def make_place(tiles: AttentionTiles, element: str, piece: DeviceFunction) -> DeviceFunction:
    """``place(q, k, causal, number) -> (batch, head, tile, row tiles of a head)``, int64: where piece ``number`` lies.

    Args:
        piece: of a :class:`~flashnumba.tiles.schedule.Schedule`.
    """
    bm, itemsize = tiles.bm, ITEMSIZE.get(element, 1)  # FP8 has one

    @device
    def place(q, k, causal, number):
        row_tiles, heads = (q.shape[2] + (bm - 1)) // bm, q.shape[0] * q.shape[1]
        near = heads_near(heads, uint32(q.shape[1]) // uint32(k.shape[1]), k.shape[2], q.shape[3] * itemsize)
        head, tile = piece(number, uint32(row_tiles), uint32(heads), near, causal)
        batch, head = uint32(head) // uint32(q.shape[1]), uint32(head) % uint32(q.shape[1])
        return int64(batch), int64(head), int64(tile), row_tiles

    return place


@cache
def make_scheduled(
    tiles: AttentionTiles, element: str, vector: int = 16, arch: str = "80", *, schedule: str = "longest_first",
    even: bool = True, chain: str = "registers", early: bool = False, name: str = "", broken: str = "",
) -> Kernel:  # fmt: skip
    """The kernel ``(q, k, v, o, lse, scale, causal)``; and ``counter``, int32 [1], zero, if the schedule draws.

    Args:
        tiles, element, vector, arch, even, chain: as :func:`flashnumba.tiles.forward.make_attend`.
        schedule: one of :data:`flashnumba.tiles.schedule.SCHEDULES`. The grid has :meth:`~.schedule.Schedule.blocks`
            blocks, or, if it draws, no more than there is room for; one that begins late finds nothing left.
        early: of a schedule that draws, from sm_90 on: it starts while :data:`clear` runs, and waits for it.
        name: of the kernel in tables.
        broken: plants one of :data:`FAULTS`, or of :data:`flashnumba.tiles.forward.FAULTS`.
    """
    chosen = SCHEDULES[schedule]
    turns, place, bm = uint32(chosen.turns), make_place(tiles, element, chosen.piece), tiles.bm
    planted = "" if broken in FAULTS else broken
    attend = make_attend(tiles, element, vector, arch, even=even, chain=chain, broken=planted)
    twice, left_out, shift = broken == "twice", broken == "left_out", int(broken == "partner")
    turn_barrier, ticket_barrier = broken != "turn_barrier", broken != "ticket_barrier"

    @device
    def do(q, k, v, o, lse, scale, causal, number):
        """Piece ``number`` of the work, if it is one."""
        batch, head, tile, row_tiles = place(q, k, causal, number)
        if shift != 0 and number >= cuda.gridDim.x:
            tile += shift
        if left_out and number == 0:
            tile = row_tiles
        if (turns == 1 and not left_out) or tile < row_tiles:
            attend(q, k, v, o, lse, scale, causal, batch, head, tile)
            if twice and number == 0:
                cuda.syncthreads()  # nobody reads the Q, K and V of the first time
                attend(q, k, v, o, lse, scale, causal, batch, head, tile)

    @kernel(threads=tiles.threads, min_blocks=tiles.min_blocks, arch=arch, name=name)
    def one_piece(q, k, v, o, lse, scale, causal):
        do(q, k, v, o, lse, scale, causal, uint32(cuda.blockIdx.x))

    # The body stands once, in a loop that does not unroll; what is kept from turn to turn is the number alone.
    @kernel(threads=tiles.threads, min_blocks=tiles.min_blocks, arch=arch, name=name)
    def several(q, k, v, o, lse, scale, causal):
        number = uint32(cuda.blockIdx.x)
        while number < turns * uint32(cuda.gridDim.x):
            do(q, k, v, o, lse, scale, causal, number)
            if turn_barrier:
                cuda.syncthreads()  # nobody reads the Q, K and V of this piece any more
            number += uint32(cuda.gridDim.x)

    @device
    def draw(counter, ticket):
        """The next number, drawn by one thread for all."""
        if cuda.threadIdx.x == 0:
            ticket[0] = atom_add_acq_rel_gpu_u32(global_address(counter), uint32(1))
        if ticket_barrier:
            # The ticket is there for all, and nobody reads the Q, K and V of the piece before. All will have read the
            # ticket when the next is written: attending has barriers of its own.
            cuda.syncthreads()
        return ticket[0]

    wait_for_clear = grid_dependency_wait if early else nothing

    @kernel(threads=tiles.threads, min_blocks=tiles.min_blocks, arch="90" if early else arch, early=early, name=name)
    def persistent(q, k, v, o, lse, scale, causal, counter):
        ticket = cuda.shared.array(1, uint32)
        wait_for_clear()
        pieces = uint32((q.shape[2] + (bm - 1)) // bm) * uint32(q.shape[0] * q.shape[1])
        number = draw(counter, ticket)
        while number < pieces:
            do(q, k, v, o, lse, scale, causal, number)
            number = draw(counter, ticket)

    if chosen.drawn:
        return persistent
    return several if chosen.turns > 1 else one_piece
