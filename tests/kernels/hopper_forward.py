"""A warp-specialised attention forward for Hopper, as a conformance test of the machine: TMA, mbarriers, wgmma,
ping-pong.

One block owns BM = 128 query rows of one head. Its three warpgroups have roles:

    warpgroup 0   producer   moves Q once, then K and V tile by tile, into a ring of STAGES slots
    warpgroup 1   consumer   query rows 0..63
    warpgroup 2   consumer   query rows 64..127

    slot s:   producer --full[s]--> consumers --empty[s]--> producer      (one pair of mbarriers each for K and V)

A consumer keeps two products in flight, S_j = Q K_j^T and O += P_{j-1} V_{j-1}, and works on the softmax of S_j
while the second still runs; two named barriers let the consumers take turns on the tensor cores. No mask, no tails:
M and N are multiples of 128.
"""

from functools import cache

from flashnumba.machine.function import device, kernel
from flashnumba.machine.instructions import (
    bar_arrive,
    bar_sync,
    ex2_approx,
    fence_mbarrier_init,
    global_address,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    pack_f16x2,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shared_address,
    shfl_xor,
    st_global_b32,
    tma_load_3d,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from flashnumba.machine.numba import cuda, float32, int32, uint8, uint32, uint64
from flashnumba.tiles.descriptor import descriptor

D, BM, BN, STAGES = 128, 128, 128, 2
PANEL = 64  # halves in one 128-byte swizzled row
Q_BYTES, TILE_BYTES = BM * D * 2, BN * D * 2
SHARED = 1024 + Q_BYTES + 2 * STAGES * TILE_BYTES + 8 * (1 + 4 * STAGES)
LOG_ZERO = float("-inf")
O_REGS, S_REGS, P_REGS = D // 2, BN // 2, BN // 4
K_FULL, V_FULL, K_EMPTY, V_EMPTY = range(4)


@cache
def make_kernel(broken=""):
    """The kernel; ``broken`` plants a fault, one of the names tested in tests/machine/test_hopper_forward.py."""
    multiply_s = wgmma(BN)
    multiply_o = wgmma(D, a="registers", b_major="mn")
    give, take = setmaxnreg_dec(24), setmaxnreg_inc(240)
    wait_all, wait_but_one = wgmma_wait(0), wgmma_wait(1)
    no_fence = broken == "wgmma_fence"
    no_wait = broken == "wgmma_wait"
    no_full = broken == "full_wait"
    no_empty = broken == "empty_wait"
    early_release = broken == "early_release"
    short_bytes = 16 if broken == "expect_tx" else 0
    no_sync = broken == "init_sync"
    no_init_fence = broken == "init_fence"
    wrong_turn = 1 if broken == "ping_pong" else 0
    no_rescale = broken == "rescale"
    v_stride = 512 if broken == "stride" else 1024

    @device
    def barrier_of(bars, kind, slot):
        """Address of one mbarrier."""
        return bars + uint32(8) + (uint32(kind * STAGES) + slot) * uint32(8)

    @device
    def load_tile(dst, tensor, bar, rows, row0, head):
        """Start the copy of rows x D halves as two swizzled panels; bar counts the bytes."""
        tma_load_3d(dst, tensor, bar, int32(0), int32(row0), int32(head))
        tma_load_3d(dst + uint32(rows * 128), tensor, bar, int32(PANEL), int32(row0), int32(head))

    @device
    def multiply_qk(s, q_tile, k_tile):
        """S = Q K^T for this warpgroup's 64 rows; s is defined after the next wait."""
        for step in range(D // 16):
            within = uint32((step % 4) * 32)
            panel = step // 4
            multiply_s(
                s, 0,
                descriptor(q_tile + uint32(panel * BM * 128) + within, 16, 1024),
                descriptor(k_tile + uint32(panel * BN * 128) + within, 16, 1024),
                int32(1 if step > 0 else 0),
            )  # fmt: skip

    @device
    def multiply_pv(o, p, v_tile):
        """O += P V. P comes from registers: S's accumulators are already in A-operand order."""
        for step in range(BN // 16):
            multiply_o(o, 0, p, 4 * step, descriptor(v_tile + uint32(step * 16 * 128), BN * 128, v_stride), int32(1))

    @device
    def quad_max(x):
        x = max(x, shfl_xor(x, int32(1)))
        return max(x, shfl_xor(x, int32(2)))

    @device
    def quad_sum(x):
        x += shfl_xor(x, int32(1))
        return x + shfl_xor(x, int32(2))

    @device
    def online_softmax(s, m, l, alpha, scale_log2):
        """One step of the recurrence, in place: s becomes P; half 0 of a lane's values is row g, half 1 row g + 8."""
        for half in range(2):
            top = m[half]
            for i in range(BN // 8):
                top = max(top, max(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]))
            top = quad_max(top)
            alpha[half] = ex2_approx((m[half] - top) * scale_log2)
            m[half] = top
            shift = top * scale_log2
            total = l[half] * alpha[half]
            for i in range(BN // 8):
                a = ex2_approx(s[4 * i + 2 * half] * scale_log2 - shift)
                b = ex2_approx(s[4 * i + 2 * half + 1] * scale_log2 - shift)
                s[4 * i + 2 * half] = a
                s[4 * i + 2 * half + 1] = b
                total += a + b
            l[half] = total

    @device
    def rescale(o, alpha):
        for i in range(D // 8):
            for half in range(2):
                o[4 * i + 2 * half] *= alpha[half]
                o[4 * i + 2 * half + 1] *= alpha[half]

    @device
    def pack(p, s):
        """Round P to halves: accumulator order is operand order."""
        for i in range(P_REGS):
            p[i] = pack_f16x2(s[2 * i], s[2 * i + 1])

    @device
    def produce(q_tile, k_ring, v_ring, bars, q, k, v, tiles, row0, head):
        mbarrier_arrive_expect_tx(bars, uint32(Q_BYTES))
        load_tile(q_tile, q, bars, BM, row0, head)
        for j in range(tiles):
            slot = uint32(j % STAGES)
            phase = uint32((j // STAGES) & 1)
            for kind in range(2):
                if not no_empty:
                    mbarrier_wait(
                        barrier_of(bars, K_EMPTY + kind, slot), phase ^ uint32(1)
                    )  # consumers let the slot go
                full = barrier_of(bars, kind, slot)
                mbarrier_arrive_expect_tx(full, uint32(TILE_BYTES + short_bytes))
                if kind == 0:
                    load_tile(k_ring + slot * uint32(TILE_BYTES), k, full, BN, j * BN, head)
                else:
                    load_tile(v_ring + slot * uint32(TILE_BYTES), v, full, BN, j * BN, head)

    @device
    def store_rows(address, o, l, row, row_bytes):
        """Normalise and write this lane's two rows."""
        lane = cuda.threadIdx.x & 31
        for half in range(2):
            norm = float32(1) / quad_sum(l[half])
            dst = address + uint64((row + 8 * half) * row_bytes + (lane & 3) * 4)
            for i in range(D // 8):
                st_global_b32(
                    dst + uint64(i * 16), pack_f16x2(o[4 * i + 2 * half] * norm, o[4 * i + 2 * half + 1] * norm)
                )

    @device
    def leader():
        return (cuda.threadIdx.x & 127) == 0

    @kernel(threads=384, min_blocks=1, arch="90a", fastmath=True)
    def hopper_forward(q, k, v, out, tiles, rows, scale_log2):
        smem = cuda.shared.array(0, uint8)
        q_tile = (shared_address(smem) + uint32(1023)) & uint32(0xFFFFFC00)
        k_ring = q_tile + uint32(Q_BYTES)
        v_ring = k_ring + uint32(STAGES * TILE_BYTES)
        bars = v_ring + uint32(STAGES * TILE_BYTES)
        warpgroup = cuda.threadIdx.x >> 7
        head = cuda.blockIdx.y
        row0 = cuda.blockIdx.x * BM
        if cuda.threadIdx.x == 0:
            mbarrier_init(bars, uint32(1))
            for slot in range(STAGES):
                for kind in range(4):
                    mbarrier_init(barrier_of(bars, kind, uint32(slot)), uint32(1 if kind < 2 else 2))
            if not no_init_fence:
                fence_mbarrier_init()
        if not no_sync:
            cuda.syncthreads()  # the mbarriers exist before anyone uses them

        if warpgroup == 0:
            give()
            if cuda.threadIdx.x == 0:
                produce(q_tile, k_ring, v_ring, bars, q, k, v, tiles, row0, head)
        else:
            take()
            mine = warpgroup - 1
            my_q = q_tile + uint32(mine * 64 * 128)
            o = cuda.local.array(O_REGS, float32)
            s = cuda.local.array(S_REGS, float32)
            p = cuda.local.array(P_REGS, uint32)
            m = cuda.local.array(2, float32)
            l = cuda.local.array(2, float32)
            alpha = cuda.local.array(2, float32)
            for i in range(O_REGS):
                o[i] = float32(0)
            for half in range(2):
                m[half] = float32(LOG_ZERO)
                l[half] = float32(0)

            mbarrier_wait(bars, uint32(0))  # Q has landed
            mbarrier_wait(barrier_of(bars, K_FULL, uint32(0)), uint32(0))
            if mine == 1:
                bar_arrive(1, 256)  # consumer 0 goes first
            wgmma_fence()
            multiply_qk(s, my_q, k_ring)
            wgmma_commit()
            wait_all()
            if leader():
                mbarrier_arrive(barrier_of(bars, K_EMPTY, uint32(0)))
            online_softmax(s, m, l, alpha, scale_log2)
            pack(p, s)
            for j in range(1, tiles):
                slot = uint32(j % STAGES)
                phase = uint32((j // STAGES) & 1)
                before = uint32((j - 1) % STAGES)
                phase_before = uint32(((j - 1) // STAGES) & 1)
                if not no_full:
                    mbarrier_wait(barrier_of(bars, K_FULL, slot), phase)
                bar_sync(1 + (mine ^ wrong_turn), 256)  # ping-pong: my turn on the tensor cores
                if not no_fence:
                    wgmma_fence()
                multiply_qk(s, my_q, k_ring + slot * uint32(TILE_BYTES))
                wgmma_commit()
                mbarrier_wait(barrier_of(bars, V_FULL, before), phase_before)
                multiply_pv(o, p, v_ring + before * uint32(TILE_BYTES))
                wgmma_commit()
                bar_arrive(2 - mine, 256)  # the other consumer's turn
                if not no_wait:
                    wait_but_one()  # S_j is there, P V_{j-1} still runs
                if leader():
                    mbarrier_arrive(barrier_of(bars, K_EMPTY, slot))
                if early_release and leader():
                    mbarrier_arrive(barrier_of(bars, V_EMPTY, before))
                online_softmax(s, m, l, alpha, scale_log2)
                wait_all()
                if leader() and not early_release:
                    mbarrier_arrive(barrier_of(bars, V_EMPTY, before))
                if not no_rescale:
                    rescale(o, alpha)
                pack(p, s)
            last = uint32((tiles - 1) % STAGES)
            mbarrier_wait(barrier_of(bars, V_FULL, last), uint32(((tiles - 1) // STAGES) & 1))
            wgmma_fence()
            multiply_pv(o, p, v_ring + last * uint32(TILE_BYTES))
            wgmma_commit()
            wait_all()
            lane = cuda.threadIdx.x & 31
            warp = (cuda.threadIdx.x & 127) >> 5
            row = head * rows + row0 + mine * 64 + warp * 16 + (lane >> 2)
            store_rows(global_address(out), o, l, row, D * 2)

    return hopper_forward
