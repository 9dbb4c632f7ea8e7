# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5. Chained products: one product's result as the next one's operand
#
# Attention is two matrix products with a softmax between them. In lesson 4 the result of the first, still in the
# registers of a warp, was the operand of the second, as it lay. That was luck. A matrix instruction deals its result
# out to the lanes in one way and wants its operand in another; on the machine of the notes three numbers of four are
# then in the wrong lane, and on NVIDIA's, in FP8, three of four again. This lesson is about the way between.
#
# ## What you will be able to do
#
# - read the layout of a matrix instruction, and say for each number which lane has it and which lane wants it;
# - bring P there in three ways, through shared memory, by shuffles, by nothing but names, and say what each costs;
# - choose an order of K's rows under which nothing has to be moved, and prove that it may be chosen;
# - see a wrong permutation, and know which tests would not.

# %%
import matplotlib.pyplot as plt
import numpy as np

from flashnumba import lesson
from flashnumba.compare import compare
from flashnumba.data import load_minilm
from flashnumba.ladder import find, measure
from flashnumba.machine.compiler import why_not
from flashnumba.machine.emulator import Fault, launch
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import shfl_xor
from flashnumba.machine.numba import cuda, float32, int32
from flashnumba.machine.occupancy import NOTES, budget, machine_of
from flashnumba.stages import figures
from flashnumba.stages.chained_gemm import count, layouts, panels, reference
from flashnumba.stages.chained_gemm.layouts import ORDERS, accumulators, fused, operands, order_of, senders, unit
from flashnumba.stages.chained_gemm.mma import make_chained
from flashnumba.stages.figures import BLUE, ORANGE
from flashnumba.stages.flash_forward.reference import dense, low_precision
from flashnumba.tiles import chain
from flashnumba.tiles.attention import make_steps
from flashnumba.tiles.sizes import AttentionTiles

lesson.style()
stage = find("chained_gemm")
machine = lesson.machine()
print(f"kernels run on: {machine}")

# %% [markdown]
# ## The idea
#
# $$S = Q K^T, \qquad P = \operatorname{softmax}(S), \qquad O = P V$$
#
# A matrix instruction computes $C \mathrel{+}= A B$ on small matrices that lie spread over the lanes of a warp. Which
# lane holds which element, in which register, is wired. The notes' machine has warps of 64 lanes and an instruction
# `mmac` for $16 \times 16$ results over a depth of 16. With $c = \text{lane} \bmod 16$ and $h = \lfloor \text{lane} /
# 16 \rfloor$:
#
# | | row | column or depth |
# | --- | --- | --- |
# | A, element $i$ of 4 | $c$ | $k = 4h + i$ |
# | B, element $i$ of 4 | $k = 4h + i$ | $c$ |
# | C, register $v$ of 4 | $c$ | $h + 4v$ |
#
# P is made from S element by element, so it lies as C does, and is to lie as A does. In both, a lane has numbers of row
# $c$. But of that row it *has* every fourth column from $h$ on, and *wants* four neighbours from $4h$ on.
#
# **Predict.** Of the 256 numbers of a tile, how many are already in the lane that wants them?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
mmac = unit("mmac16x16x16")
figure, axes = plt.subplots(figsize=(11, 5.2))
share = np.arange(64) // 16
panels.draw_layouts(axes, accumulators(mmac, 16), operands(mmac, 16), share, "mmac: the lane that holds an element")
plt.show()

# %% [markdown]
# One of four. Row 0 lies in lanes 0, 16, 32 and 48 on both sides; each of them has one number for itself and one for
# each of the others. It is the transposition of a $4 \times 4$ matrix, once for every row.
#
# The same question for NVIDIA's instructions. Two results of `m16n8k16` side by side make one operand; four of
# `m16n8k32`, the one for 8-bit numbers, make one. The function that answers is short:

# %%
lesson.show_source(layouts.senders)

# %%
chains = [
    ("mmac, keys in order", mmac, 16, None),
    ("m16n8k16, keys in order", unit("m16n8k16"), 16, None),
    ("m16n8k32, keys in order", unit("m16n8k32"), 32, None),
    ("m16n8k16, keys in mmac's order", unit("m16n8k16"), 16, order_of(*ORDERS["strided"])),
    ("mmac, the notes' order", mmac, 64, fused()),
    ("m16n8k32, quads", unit("m16n8k32"), 32, order_of(*ORDERS["quads"], columns=32)),
]
sent = {name: senders(accumulators(one, n, order), operands(one, n)) for name, one, n, order in chains}
lesson.table(
    ("", "numbers", "stay in their lane", "have to be sent"),
    [(name, one.stay + one.move, one.stay, one.move) for name, one in sent.items()],
)

# %% [markdown]
# The second line is the luck of lesson 4. The third is why FP8 kernels are not 16-bit kernels with another type. The
# last two have nothing to send, with the same instructions as the first and the third. What changed is the *order*.
#
# ### Why the order may be chosen
#
# Let $\Pi$ be any permutation of keys. Dealing out K's rows in another order gives $Q (\Pi K)^T = S\, \Pi^T$: the same
# numbers in other columns. A row's softmax does not ask for the order of its elements. So whichever key stands in
# column $j$, its weight is right; all that must hold is that the weight of key $n$ meets row $n$ of V. If we choose
# $\Pi$ so that key $n$ falls into the lane, and the register, where the second product wants the weight of key $n$,
# then nothing is left to do.
#
# For `mmac` the notes issue four of them along N and give product $j$ the keys $4c + j$. Its register $v$, in lane
# $(c, h)$, is column $h + 4v$ and so key
#
# $$4 (h + 4 v) + j = 16 v + (4 h + j)$$
#
# which is depth $4h + j$ of the operand for keys $16 v$ to $16 v + 15$: operand $v$ is registers $v$ of the four
# products, in order. A change of names.
#
# **Predict.** In `m16n8k32` a lane has columns $2q$ and $2q+1$ of each of four results, $q = \text{lane} \bmod 4$, and
# wants $4q$ to $4q+3$ of the first 16 keys, and of the next 16. Which key would you put into column $2q + i$ of
# results 0 and 1?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(figsize=(11, 3.6))
shown = {
    "mmac": (sent["mmac, keys in order"], np.arange(4) * 16),
    "m16n8k32": (sent["m16n8k32, keys in order"], np.arange(4)),
    "m16n8k16,\nmmac's order": (sent["m16n8k16, keys in mmac's order"], np.arange(4)),
    "mmac,\nthe notes' order": (sent["mmac, the notes' order"], np.arange(4) * 16),
    "m16n8k32,\nquads": (sent["m16n8k32, quads"], np.arange(4)),
}
panels.draw_senders(axes, shown)
plt.show()

# %% [markdown]
# Key $4q + i$ for result 0 and $4q + 2 + i$ for result 1; then the pair from each makes the four neighbours. The table
# calls it `quads`.
#
# The second and third matrices are alike, and that is no accident. Count in units of 16 bits, which is one float16 or a
# pair of neighbouring FP8 keys: in both, lane $q$ has units $q, q+4, q+8, q+12$ and wants $2q, 2q+1, 2q+8, 2q+9$. One
# exchange serves both.
#
# ## The reference
#
# In NumPy, lane by lane. An instruction sees what the lanes of its warp hold, and nothing else:

# %%
lesson.show_source(reference.multiply)

# %% [markdown]
# ### Through shared memory
#
# Everybody writes what they have, all wait, everybody reads what they want.

# %%
lesson.show_source(reference.through_shared, first="rows, columns =")

# %% [markdown]
# Shared memory has 32 banks of 4 bytes, and lanes that meet in a bank are served one after the other. A tile of 16
# rows of 32 bytes fills the banks once every four rows, so rows 0 and 4 begin at the same bank.
#
# **Predict.** Eight rows are written at a time, 8 bytes of each. How many lanes meet if nothing is done about it?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
held, wanted = accumulators(unit("m16n8k16"), 16, order_of(*ORDERS["strided"])), operands(unit("m16n8k16"), 16)
figure, axes = plt.subplots(1, 2, figsize=(12, 3.2), sharey=True)
for ax, swizzled in zip(axes, (False, True), strict=True):
    row, key = held[:, 0, 0, 0], held[:, 0, 0, 1]
    byte = 2 * key ^ (16 * (row // 4 % 2) if swizzled else 0)
    bank = (32 * row + byte) // 4 % 32
    hits = np.zeros((8, 32))
    np.add.at(hits, (row, bank), 1)
    busy = (hits > 0).sum(0)
    ax.imshow(np.where(hits > 0, busy, np.nan), cmap="YlOrRd", vmin=0, vmax=3, aspect="auto", extent=(0, 32, 8, 0))
    words = "chunks exchanged" if swizzled else "rows as they are"
    ax.set(xlabel="bank", title=f"one store, {words}; at most {int(busy.max())} in a bank", xticks=range(0, 33, 4))
axes[0].set_ylabel("row of P")
plt.show()
rows = []
for words, options in (("rows of 32 bytes", {"swizzled": False}), ("padded to 48", {"pitch": 48}), ("exchanged", {})):
    _, cost = reference.through_shared(np.zeros(held.shape[:3]), held, wanted, **options)
    rows.append((words, cost.stores, cost.loads, cost.shared, cost.conflicts))
lesson.table(("16 queries x 16 keys", "stores", "loads", "bytes", "further cycles for banks"), rows)

# %% [markdown]
# Two. Exchanging the two chunks of 16 bytes in every second four rows costs nothing but an exclusive or, and no bytes.
#
# ### By exchange
#
# In a round, each lane offers one register and reads that of one other lane. Who may read whom at the same time?

# %%
lesson.show_source(reference.by_shuffles)

# %% [markdown]
# `schedule` colours the edges of a graph: an edge from a lane that has something to a lane that wants it, a colour a
# round, no lane with two edges of one colour. König's theorem says how many colours are enough: as many as the busiest
# lane has edges.
#
# ### By names

# %%
lesson.show_source(reference.by_registers)

# %% [markdown]
# What each way takes for 16 queries and 64 keys on the notes' machine, and the whole of attention by it, on a head of a
# trained transformer. `kpack=2` is the notes' other step: since the order along the sum is free too, a lane reads
# eight neighbours at once and feeds two instructions.

# %%
data = load_minilm()
q, k, v = (x[0, 2] for x in (data.q, data.k, data.v))  # layer 0, head 2: [512, 32] each
few = q[330:378], k[250:400], v[250:400]
exact, _ = dense(*few)
rows = []
for way, order in (("shared", None), ("shuffles", None), ("registers", fused())):
    o = reference.attention(*few, mmac, way, order, kpack=2)
    lies = accumulators(mmac, 64, order)
    _, cost = reference.WAYS[way](np.zeros(lies.shape[:3]), lies, operands(mmac, 64))
    rows.append((way, cost.stores, cost.loads, cost.shared, cost.shuffles, f"{np.abs(o - exact).max():.1e}"))
lesson.table(
    ("mmac, 16 queries x 64 keys", "stores", "loads", "bytes of LDS", "rounds of exchange", "error of attention"), rows,
    note="Reads of an operand of Q, kpack 1 and 2: "
    + ", ".join("{} of {} bytes".format(*reference.read_widths(mmac, kpack)) for kpack in (1, 2)),
)  # fmt: skip

# %% [markdown]
# ## The kernels
#
# On NVIDIA the three ways are kernels that differ in nothing else: tiles, copies, schedule, masks are those of lesson
# 4. For 16-bit numbers there is no problem, so one is made: `shared` and `shuffles` copy K's rows into shared memory in
# the order in which `mmac` would leave its columns. That is free; K is copied anyway. `registers` copies them as they
# are, and is the kernel of lesson 4 to the instruction.
#
# The weights come first. A lane packs its four units of a row into two words, units 0 and 2, 1 and 3:

# %%
tiles = AttentionTiles(32, 32, 32, warps=2, slots=2)
ways = {}
for way in chain.WAYS:
    order = chain.order_for(way, 2)
    ways[way] = chain.make_chain(way, tiles, "float16", make_steps(tiles, "float16", order=order))
lesson.show_source(ways["shuffles"].softmax_pv, part="weights", first="for f in range")

# %% [markdown]
# ### shared

# %%
lesson.show_source(ways["shared"].softmax_pv, part="hand_over")

# %% [markdown]
# `kept[0]` is where the lane's first unit goes and `kept[1]` the row that it fetches for `ldmatrix`; both were found
# once, before the loop. There are two tiles, used in turn.
#
# **Predict.** One barrier of the warp lies between the stores and the loads. The next step's stores come right after
# this step's loads, with no barrier between. Why is that no race? And if there were one tile?
#
# ### shuffles
#
# Lane $q$ needs both units that it wants first from lanes $2(q \bmod 2)$ and $2 (q \bmod 2) + 1$. Those two lanes are
# also asked by lane $q \pm 2$, for their *other* word. A shuffle lets a lane offer one register, so there are two
# rounds, and the words go crosswise:

# %%
lesson.show_source(ways["shuffles"].softmax_pv, part="hand_over")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(10, 2.6), sharey=True)
for ax, flip in zip(axes, (0, 1), strict=True):
    for lane in range(4):
        source = (lane >> 1 & 1 | (lane & 1) << 1) ^ flip
        word = (source & 1) ^ flip
        color = (BLUE, ORANGE)[word]
        ax.annotate("", (lane, 0.1), (source, 0.9), arrowprops={"arrowstyle": "->", "color": color, "lw": 2})
    for lane in range(4):
        offered = (lane & 1) ^ flip
        ax.text(lane, 1, f"lane {lane}: word {offered}", ha="center", va="bottom", color=(BLUE, ORANGE)[offered])
        ax.text(lane, 0, f"lane {lane}", ha="center", va="top")
    ax.set(title=f"round {flip + 1}", xlim=(-0.5, 3.5), ylim=(-0.25, 1.3))
    ax.axis("off")
plt.show()

# %% [markdown]
# In lanes 2 and 3 the word of the later unit comes first, so they swap the two before the halves are joined.
#
# ### registers

# %%
lesson.show_source(ways["registers"].softmax_pv)

# %% [markdown]
# Nothing: lesson 4's loop. In FP8 it is not quite nothing, but only packing, as `quads` puts the four numbers of a word
# into one lane. There P is also multiplied by $2^8$ before it is rounded: between 0 and 1 the format would lose
# everything below $2^{-10}$.
#
# ## On real data

# %%
results = [
    measure(stage, rung, case, machine)
    for case in stage.cases(machine, False)[1:]
    for rung in stage.kernels
    if rung.takes(case)
]
lesson.table(
    ("kernel", "case", "verdict", "error", "budget"),
    [
        (r.rung.name, f"{r.case.name}: {r.case.size}", r.verdict, f"{r.comparison.error:.2e}",
         f"{r.comparison.budget:.2e}")
        for r in results
    ],
)  # fmt: skip

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(figsize=(9, 3))
figures.errors(axes, results, label=lambda r: r.rung.name)
plt.show()

# %% [markdown]
# The three agree with one another, in 16 bits and in FP8: what they move is the same numbers. The budget of FP8 is ten
# times wider, as P has three bits behind the leading one.
#
# ## Who reads what
#
# By count, a hand-over of one fragment, 16 queries and 16 keys:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(figsize=(9, 3))
panels.draw_costs(axes)
plt.show()

# %% [markdown]
# and as the compiler has it, for a small tile of 128 queries and 32 keys, where each warp hands over four times:
#
# **Predict.** From the picture: how many more `SHFL` will `shuffles` have than `registers`, and how many more `STS`
# will `shared` have?

# %%
if why_not():
    print(why_not())
else:
    found = count.in_code(32, tiles=AttentionTiles(32, 128, 32))
    names = [name for name in count.OPCODES if any(name in one.opcodes for one in found)]
    print(
        lesson.table(
            ("instruction", "what it does", *(one.way for one in found)),
            [(name, count.OPCODES[name], *(one.opcodes.get(name, 0) for one in found)) for name in names]
            + [("all", "", *(one.opcodes["all"] for one in found))],
        )
    )

# %% [markdown]
# Products and exponentials are the same in all three. Registers and shared memory of the kernels as they are launched;
# all get the same bytes, so that none has more blocks for what it leaves out:

# %%
found = {way: lesson.resources(f"chained_gemm.{way} float16 d 128, tiles for sm_90a")
         for way in ("shared", "shuffles", "registers")}  # fmt: skip
print("measured" if all(fresh for _, fresh in found.values()) else "no compiler here: from lessons/resources.json")
budgets = {n: budget("90", threads=r.threads, registers=r.registers, shared=r.shared) for n, (r, _) in found.items()}
lesson.table(
    ("kernel, D = 128", "registers a thread", "spilled bytes", "shared, KB", "blocks", "limit"),
    [
        (way, r.registers, r.spills, f"{r.shared / 1024:.0f}", budgets[way].blocks, ", ".join(budgets[way].limited_by))
        for way, (r, _) in found.items()
    ],
)

# %% [markdown]
# What was measured on an H200 (`flashnumba bench chain`):

# %%
held_results = lesson.results("chain")
rows = []
for size in held_results["sizes"] if held_results else ():
    for one in size["measured"]:
        if one["ours"] and one["seconds"]:
            beside = "-" if one["of_shared"] is None else f"{one['of_shared']:.2f}"
            mask = "causal" if size["causal"] else "all"
            rate = f"{one['flops_per_second'] / 1e12:.0f}"
            rows.append((size["d"], size["n"], mask, one["name"], rate, beside))
lesson.table(("D", "tokens", "mask", "way", "TFLOP/s", "times shared"), rows)

# %% [markdown]
# `detour` is shared memory at its best: the order of `registers`, so that P could stay where it is, and a lane stores
# whole words. The notes report 18 % for their third way over what they had before, on their machine.
#
# ### Why it is worth more at D = 64
#
# The hand-over is the same for every D: P has as many numbers. The products grow with D. So its share must shrink, and
# it does. But does `shared` lose as much time as it has more to do? The hardware counts (`flashnumba bench counters`):
# instructions; cycles of shared memory; the share of cycles in which an instruction is issued, and in which the tensor
# cores work; and how many warps wait whenever one issues, by reason.
#
# **Predict.** A kernel issues an instruction in four cycles of ten. It gets a third more instructions. Does it take a
# third longer?

# %%
held_counters = lesson.results("counters")
counted = [
    (size["d"], {m["name"]: m for m in size["measured"] if m["seconds"]})
    for size in (held_counters["sizes"] if held_counters else ())
    if size["stage"] == "chained_gemm"
]
rows = []
for d, by_way in counted:
    for way, m in by_way.items():
        least = by_way.get("registers", m)
        more, longer = (m[c] / least[c] - 1 for c in ("instructions", "seconds"))
        rows.append((
            d, way, f"{m['instructions'] / 1e6:.1f}", f"{(m['instructions'] - least['instructions']) / 1e6:.1f}",
            f"{more:.0%}", f"{m['wavefronts'] / least['wavefronts'] - 1:.0%}", f"{longer:.0%}",
            f"{longer / more:.2f}" if more > 0.01 else "-", f"{m['issue']:.0%}", f"{m['tensor']:.0%}",
            f"{m['stall_wait']:.2f}", f"{m['stall_math_pipe_throttle']:.2f}", f"{m['stall_short_scoreboard']:.2f}",
        ))  # fmt: skip
lesson.table(
    ("D", "way", "million instructions", "more than registers", "that is", "shared memory's cycles", "time",
     "time / instructions", "issue", "tensor cores", "wait", "math pipe", "short scoreboard"),
    rows,
    "In per cent: how much more than registers; then shares of cycles. Last, warps that wait whenever one issues: for "
    "a fixed latency, for the tensor cores, for shared memory or an exponential. 2048 tokens, 16 heads, no mask.",
)  # fmt: skip

# %% [markdown]
# What `shared` and `shuffles` execute on top is nearly as much at both D, as it should be; beside more products it is a
# smaller part. And time grows by less than instructions do. All these kernels issue in fewer than half of the cycles,
# and the tensor cores work in about half of them: two blocks of four warps leave each partition of a multiprocessor two
# warps, and in most cycles both wait, most often for the latency of what they issued before ("wait"). So an instruction
# more partly falls into a cycle in which nothing would have been issued. At D = 128 there are more such cycles than at
# D = 64, and a smaller part of the growth arrives in the time. Both together are why the same hand-over costs so much
# less there.
#
# Bank conflicts are no part of it: the file has them at a per cent or so of the loads, in `registers` as in `shared`.
# What `shared` pays for is its stores, its loads and their addresses.
#
# ## Break it
#
# ### No barrier
#
# `shared` without the barrier between stores and loads. The lanes of a warp run together, do they not?

# %% tags=["break-it"]
x, y, z = q[330:362], k[300:377], v[300:377]


def emulate(way, broken="", keys=None, checks=True):
    y_, z_ = (y, z) if keys is None else keys
    made = make_chained(way, tiles, "float16", broken=broken)
    o, lse = np.full((1, 1, *x.shape), np.nan, np.float16), np.full((1, 1, len(x)), np.nan, np.float32)
    args = (x[None, None], y_[None, None], z_[None, None], o, lse, np.float32(32**-0.5), np.int32(0))
    launch(made, 1, tiles.threads, args, shared=tiles.shared + chain.shared_of(way, tiles), checks=checks)
    return o[0, 0]


try:
    emulate("shared", "sync")
except Fault as fault:
    print(fault)

# %% [markdown]
# They need not: since sm_70 lanes have program counters of their own. And even where they do run together, the compiler
# may move a load of one address before a store to another.
#
# ### One tile instead of two
#
# The barrier is there, but every step uses the same tile. Now a quick lane overwrites what a slow one has yet to read:

# %% tags=["break-it"]
try:
    emulate("shared", "overwrite")
except Fault as fault:
    print(fault)

# %% [markdown]
# With two tiles the barrier of one step stands between the loads of the step before and the stores of the step after,
# which was the answer above.
#
# ### A wrong lane
#
# Shuffles order nothing and break nothing; a wrong one just brings a wrong number. Lanes 2 and 3 forget to swap; both
# rounds ask the same lane; K is copied in another order than P believes.
#
# **Predict.** All three are wrong on real data. Is there data on which none is?


# %% tags=["break-it"]
def judged(words, way, broken, keys):
    o = emulate(way, broken, keys, checks=False)
    print(f"{words}, {broken}: {compare(o, dense(x, *keys)[0], low_precision(x, *keys)[0])}")


for way, broken in (("shuffles", "halves"), ("shuffles", "round"), ("registers", "order")):
    judged("real keys", way, broken, (y, z))
alike = np.zeros_like(y[:64]), z[:64]
for way, broken in (("shuffles", "halves"), ("shuffles", "round"), ("registers", "order")):
    judged("keys of zeros", way, broken, alike)

# %% [markdown]
# If all weights are alike it does not matter whose weight one gets. A test with zeros, or with one key, or with equal
# values, says that a wrong permutation is right. Tests of layouts need data in which no two rows, columns or heads are
# alike.
#
# ## Exercises
#
# ### 1. An order for FP8
#
# `m16n8k32` on 32 keys: `accumulators(unit("m16n8k32"), 32, order)` are four results side by side. Write the order
# under which nothing is sent, from the formula and not from `ORDERS`: `order[8 t + 2 q + i]` is the key in column
# $2q + i$ of result $t$.


# %%
def my_order() -> np.ndarray:
    """int ``[32]``."""
    # your code


# %% tags=["exercise"]
def order_is_right() -> bool:
    one = unit("m16n8k32")
    return senders(accumulators(one, 32, np.asarray(my_order())), operands(one, 32)).move == 0


lesson.check("my_order", order_is_right, "Results 2h and 2h + 1 share the sixteen keys from 16 h on.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def my_order() -> np.ndarray:
    t, q_, i = np.ogrid[:4, :4, :2]
    return (16 * (t // 2) + 4 * q_ + 2 * (t % 2) + i).ravel()


lesson.check("my_order", order_is_right)

# %% [markdown]
# ### 2. The exchange of mmac, as a kernel
#
# On `mmac` four lanes exchange a $4 \times 4$ matrix: lane $q$ has four numbers, the $i$-th for lane $i$, and wants
# one from each. Write it for the lanes $4g$ to $4g + 3$ of a warp: `out[4g + q, i] = x[4g + i, q]`. In round $r$ let
# lane $q$ talk to lane $q \oplus r$: `shfl_xor(value, int32(r))` offers `value` and returns that of the other lane.
# Read and write global memory only in your own row.


# %%
@kernel(threads=32)
def regroup(x, out):
    """``x``, ``out`` ``[32, 4]`` float32."""
    lane = cuda.threadIdx.x
    mine = cuda.local.array(4, float32)
    # your code


# %% tags=["exercise"]
def regroup_is_right() -> bool:
    given = np.arange(128, dtype=np.float32).reshape(32, 4)
    out = np.full((32, 4), np.nan, np.float32)
    report = launch(regroup, 1, 32, (given, out))
    right = np.array_equal(out.reshape(8, 4, 4), given.reshape(8, 4, 4).swapaxes(1, 2))
    return bool(right and report.loaded == given.nbytes)


lesson.check("regroup", regroup_is_right, "In round r lane q offers mine[q ^ r], and what it gets is out[lane, q ^ r].")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
@kernel(threads=32)
def regroup(x, out):
    lane = cuda.threadIdx.x
    mine = cuda.local.array(4, float32)
    for i in range(4):
        mine[i] = x[lane, i]
    for r in range(4):
        other = (lane & 3) ^ r
        out[lane, other] = shfl_xor(mine[other], int32(r))


lesson.check("regroup", regroup_is_right)

# %% [markdown]
# On a GPU `mine[other]` would be an array in memory, as registers have no addresses: `other` differs from lane to lane.
# That is what the selects in `shuffles` are for.
#
# ## Two machines, side by side

# %%
natural = {name: senders(accumulators(unit(name), 64), operands(unit(name), 64)) for name in layouts.NAMES}
lds = NOTES.shared_within(3)
lesson.table(
    ("", "m16n8k16", "m16n8k32 (FP8)", "the notes' mmac"),
    [
        ("lanes", 32, 32, 64),
        ("16 x 64 numbers of P, in another lane than wanted", *(natural[name].move for name in layouts.NAMES)),
        ("K's order that mends it", "its own", "4q + i | 4q + 2 + i", "4c + j, four mmacs along N"),
        ("what V must do", "nothing", "lie by columns", "nothing"),
        ("a tile of P for each of 64 queries, two of 32 bytes, of the memory of a block",
         *2 * (f"{64 * 64 / machine_of('90').shared_within(2):.1%}",), f"{64 * 64 / lds:.0%}"),
    ],
    note=f"The notes' blocks have {lds // 1024} KB of LDS if three are to fit; an H200's here 114 KB if two are.",
)  # fmt: skip

# %% [markdown]
# On the notes' machine shared memory is what is scarce; P in it would take a fifth of a block's. There the third way
# saves the exchange, its address arithmetic and its memory at once.
#
# ## Limits
#
# - For 16-bit numbers on NVIDIA the problem is made, by copying K in an order that nobody would choose. It is there to
#   be measured. In FP8 it is real.
# - `mmac` is known from the source of one library; no hardware of that kind was at hand. The NumPy executes its layout,
#   not its arithmetic.
# - `shared` stores 16 bits a lane at a time, as mmac's order has it. sm_90 also has `stmatrix`, which is not used here.
# - The last swap of `shuffles` could be one byte permutation with a selector that differs from lane to lane; the
#   compiler does not find it.
# - On sm_90 `mma.sync` converts FP8 operands to float16 first and gains no speed; its FP8 units answer to `wgmma`
#   alone.
#
# ## What next
#
# P is where it has to be. Next: where K and V are while they wait. Four small slots instead of two large ones, used in
# a ring by both products, as the notes' 21 KB ask for.
