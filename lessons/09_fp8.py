# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 9. FP8: attention in eight bits
#
# Half the bytes of float16, and on some tensor cores twice the products. What is left of a number are two or three bits
# of mantissa. This lesson builds the formats from nothing, does what has to be done that attention survives them, and
# measures each measure.
#
# ## What you will be able to do
#
# - encode and decode e4m3 and e5m2 by hand, ties, subnormal numbers and NaN included;
# - say what a scale for a tensor, a head, a block buys, and when signs and a Hadamard matrix do more;
# - keep the weights of a row parts of one whole although each is rounded;
# - read a kernel that multiplies codes, and one that only stores them;
# - tell from machine code whether a GPU computes in FP8 or pretends to.

# %%
from functools import partial

import matplotlib.pyplot as plt
import numpy as np

from flashnumba import fp8, lesson
from flashnumba.compare import compare
from flashnumba.data import load_minilm
from flashnumba.ladder import find, measure
from flashnumba.machine.emulator import Fault, launch
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import bits_to_f32
from flashnumba.machine.numba import cuda, uint32
from flashnumba.machine.occupancy import budget
from flashnumba.stages import fp8_heads
from flashnumba.stages.chained_gemm.layouts import accumulators, operands, senders, unit
from flashnumba.stages.flash_forward.reference import dense
from flashnumba.stages.fp8 import codec, count, mma, panels, reference, scales, study
from flashnumba.tiles import fp8 as by_columns
from flashnumba.tiles import fp8_convert, fp8_halves
from flashnumba.tiles.descale import make_descales
from flashnumba.tiles.sizes import AttentionTiles

lesson.style()
stage = find("fp8")
machine = lesson.machine()
print(f"kernels run on: {machine}")

# %% [markdown]
# ## The idea
#
# ### Two formats
#
# A code is a sign, $E$ bits of exponent and $M$ of mantissa:
#
# $$\Big(1 + \frac{m}{2^M}\Big)\, 2^{e-b} \quad (e > 0), \qquad \frac{m}{2^M}\, 2^{1-b} \quad (e = 0).$$
#
# **Predict.** With 4 and 3 bits and $b = 7$: what is the largest number, if all ones is NaN and nothing is infinity?

# %%
rows = []
for form in codec.FORMATS.values():
    numbers = int(np.isfinite(form.values).sum())
    rows.append((form.name, form.bias, form.largest, form.smallest_normal, form.step, numbers))
lesson.table(("format", "bias", "largest", "smallest normal", "step below it", "finite codes"), rows)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(2, 1, figsize=(11, 4))
panels.draw_number_lines(axes[0])
panels.draw_number_lines(axes[1], near=1.05)
plt.show()

# %% [markdown]
# 448, which is $1.75 \cdot 2^8$. On a logarithmic line the numbers are evenly dense: eight to an octave in e4m3, four
# in e5m2, which has twice as many octaves. Below the smallest normal number steps stop shrinking.
#
# e5m2 is the upper byte of a float16. Its codes are decoded by a shift, on any machine; that is worth remembering.
#
# **Predict.** 17 lies between 16 and 18, 19 between 18 and 20. To which of them is each rounded?

# %%
for x in (17, 19, 464, 465, 2.0**-10, 3 * 2.0**-10):
    kept, wild = (fp8.decode(fp8.encode(np.float32(x), "e4m3", saturate), "e4m3") for saturate in (True, False))
    print(f"{x:12g}  ->  {kept:g}" + ("" if kept == wild else f", not saturated {wild}"))

# %% [markdown]
# Ties go to the even code. 464 is a tie too, between 448 and the number that would be 480 and is NaN; hardware
# saturates instead.
#
# ### Rounded twice is not rounded once
#
# A GPU without the conversion goes by float16. $1 + 2^{-4} + 2^{-13}$ lies above the middle of 1 and 1.125; float16
# rounds it *to* the middle, and the tie goes down.

# %%
x = np.random.default_rng(0).standard_normal(10**6).astype(np.float32)
odd = np.float32(1 + 2**-4 + 2**-13)
print(
    "once:",
    fp8.decode(fp8.encode(odd, "e4m3"), "e4m3"),
    " twice:",
    fp8.decode(codec.encode_by_float16(odd, "e4m3"), "e4m3"),
)
print({fmt: f"{study.twice_rounded(x, fmt):.2%} of a million normal numbers differ" for fmt in codec.FORMATS})

# %% [markdown]
# ## The reference
#
# The codec is integers and one addition. Seen as integers, positive floats are in order, so a carry out of the mantissa
# does what it should; and below the smallest normal number an addition rounds:

# %%
lesson.show_source(codec._encoded)

# %% [markdown]
# ### What rounding does to real numbers

# %% jupyter={"source_hidden": true} tags=["hide-input"]
data = load_minilm()
real = {name: getattr(data, name)[0].astype(np.float32) for name in "qkv"}  # [12, 512, 32]
figure, ax = plt.subplots(figsize=(10, 3.6))
panels.draw_histogram(ax, real)
plt.show()

# %% [markdown]
# The error of e4m3 ends at $2^{-4}$, that of e5m2 at $2^{-3}$ (thin lines); a few small numbers fall into the subnormal
# steps and lose more.
#
# ### Attention, every rounding in place
#
# Q, K and V are quantised with scales; the weights are rounded as well, because they are multiplied. They lie between 0
# and 1, where e4m3 has nothing below $2^{-9}$, so they are multiplied by $2^8$ first. And the sum that divides O is
# taken of what is multiplied, after rounding:

# %%
lesson.show_source(reference.attention, first="for first in range", last="m, unit = top")

# %%
lesson.show_source(reference.rounded)

# %% [markdown]
# **Predict.** V is all ones. What is O, if weights are rounded and the sum is taken before, and what if after?

# %%
q, k, v = (real[name][2:3] for name in "qkv")  # [1, 512, 32]
codes, descales = zip(*(scales.quantize(x, "e4m3") for x in (q, k, np.ones_like(v))), strict=True)
o, _ = reference.attention(*codes, "e4m3", q_descale=descales[0], k_descale=descales[1], v_descale=descales[2])
p = np.exp(study.scores_of(q, k)) * 2.0**8
before = reference.rounded(p.astype(np.float32), "e4m3").sum(-1) / p.sum(-1)
print(f"after: all 1: {bool((o.astype(np.float32) == 1).all())}; before: {before.min():.4f} to {before.max():.4f}")

# %% [markdown]
# ### What each scale buys
#
# $$\text{scale} = \max|x| \,/\, \text{largest}, \qquad x \approx \text{scale} \cdot \text{code}.$$
#
# One scale for a tensor, for each head, for each block of 64 rows. Left: real heads. Right: normal numbers, and on top
# of one in a thousand an outlier ten times as large, as FlashAttention-3's authors tried.
#
# **Predict.** Which of the two needs finer scales?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
with lesson.timed("24 attentions"):
    three = [real[name][:3] for name in "qkv"]
    of_real = study.rmse_table(*three, befores=("", "incoherent"))
    outliers = reference.fa3_inputs(512, 128)
    of_outliers = study.rmse_table(*outliers, befores=("", "incoherent"))
figure, axes = plt.subplots(1, 2, figsize=(13, 3.8))
panels.draw_bars(axes[0], {"real": of_real}, "three real heads")
panels.draw_bars(axes[1], {"outliers": of_outliers}, "normal numbers with outliers")
plt.show()

# %% [markdown]
# Real heads of this model have no outliers, and no scale beats one for all: floating point brings its own scale for
# every number. (Signed bytes do not, see below.) With outliers, scales of blocks help some, and something else more.
#
# e5m2 costs about a factor of two everywhere, a bit of mantissa. It is better where numbers differ by more than
# $2^{15}$ under one scale, as gradients do, and scores do not.
#
# ### Outliers, spread
#
# $(QM)(KM)^T = QK^T$ for an orthogonal $M$. Random signs and a Hadamard matrix, $D \log_2 D$ additions a row, turn one
# large number into many small ones:

# %%
lesson.show_source(scales.hadamard)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
spread_q, spread_k = scales.incoherent(outliers[0], outliers[1])
figure, ax = plt.subplots(figsize=(9, 3))
panels.draw_columns(ax, outliers[1][0, :64], spread_k[0, :64], "the largest number of each column of 64 keys")
plt.show()

# %%
paper = study.FA3_RMSE
lesson.table(
    ("e4m3, outliers", "here, 512 tokens of 128", "FlashAttention-3's paper"),
    [
        (
            f"{scaling}{', ' + before if before else ''}",
            of_outliers["e4m3", scaling, before],
            paper["e4m3", scaling, before],
        )
        for scaling in ("tensor", "block")
        for before in ("", "incoherent")
    ],
    "The paper does not say its sizes. With 2048 tokens, 128 columns: 0.0135, 0.0072, 0.0119 and 0.0066.",
)

# %% [markdown]
# Ours are below the paper's in each row. Spreading outliers does most, here as there; scales of blocks add a little.
#
# ### Signed bytes, beside
#
# The notes chose FP8 and not INT8: converting was too dear, and FP8 had tensor cores. Precision is a third matter:

# %%
rng = np.random.default_rng(1)
plain = [rng.standard_normal((1, 256, 64)).astype(np.float32) for _ in range(2)]
wild = [plain[0], plain[1] + 30 * (rng.random((1, 256, 64)) < 0.001).astype(np.float32)]
lesson.table(
    ("error of the scores", "int8", "e4m3", "e5m2"),
    [
        (f"{what}, by {scaling}", *(study.score_errors(*pair, fmt, scaling) for fmt in (scales.INT8, *codec.FORMATS)))
        for what, pair in (("normal", plain), ("with outliers", wild), ("real", three[:2]))
        for scaling in ("tensor", "token")
    ],
)

# %% [markdown]
# 255 even steps are the better ruler for numbers that fill it evenly, with a scale for each row. One outlier under a
# common scale, and they are the worse.
#
# ## The kernels
#
# ### Conversions
#
# From sm_89 on an instruction converts two numbers. Without it there are integers; e5m2 to float16 is a mask, e4m3 a
# shift and a scale that is paid later:

# %%
lesson.show_source(fp8_convert.make_halves, first="def e5m2(word)", last="return e4m3_pair(uint32(word << uint32(8)))")

# %%
code = count.recorded()
ways = {
    "e4m3 by instruction": "encode instructions float8_e4m3fn", "e4m3 in integers": "encode integers float8_e4m3fn",
    "e5m2 by instruction": "encode instructions float8_e5m2", "e5m2 in integers": "encode integers float8_e5m2",
    "e5m2 by float16's upper byte": "encode upper_byte float8_e5m2", "int8, rounded by adding": "encode added int8",
    "int8, converted": "encode converted int8",
}  # fmt: skip
measured = lesson.results("fp8")
seconds = {f"encode {row['way']} {row['to']}": row["seconds"] for row in (measured or {}).get("conversions", [])}


def instructions(name: str, arch: str) -> int | str:
    of_kernel = code["conversions"][arch].get(name, {})
    return sum(of_kernel.values()) - of_kernel.get("NOP", 0) or "-"


lesson.table(
    ("four float32 to", "instructions, sm_75", "sm_89", "2^26 on an H200, us"),
    [(words, *(instructions(name, arch) for arch in ("75", "89")),
      f"{seconds[name] * 1e6:.0f}" if name in seconds else "-")
     for words, name in ways.items()],
    "Instructions of a whole kernel that loads, converts and stores four numbers; recorded with nvdisasm.",
)  # fmt: skip

# %% [markdown]
# The notes are right on a machine with the instruction. Without it signed bytes are cheaper, and e5m2's upper byte
# saves little, as numbers beyond the largest and NaN have to be seen to. In time a kernel that does nothing else hides
# most of it behind memory.
#
# ### Products of 32
#
# `mma.m16n8k32` takes four neighbours of a register, along the sum. For Q and K these are neighbours in a row. For P
# they are four neighbouring *keys*, and the first product leaves two and two (lesson 5). K is copied in another order,
# and nothing has to move:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(11, 4))
panels.draw_permutation(ax, {"K as it is": range(16), "K in the order QUADS": panels.quads()})
plt.show()

# %%
exchange = senders(accumulators(unit("m16n8k32"), 32), operands(unit("m16n8k32"), 32))
print(f"K as it is: of {exchange.stay + exchange.move} weights {exchange.move} are another lane's")

# %% [markdown]
# For V the four are keys of one column, so V has to lie by columns. The product with a column of quarters is the sum
# over what is multiplied; four lanes get it, and add it up to one:

# %%
lesson.show_source(by_columns.with_values_by_columns, first="def multiply_pv")

# %%
lesson.show_source(mma.make_forward, first="def forward(q, k, v")

# %% [markdown]
# ### Products of float16
#
# A GPU without FP8 can still store it. A word of K becomes two words of float16 between `ldmatrix` and `mma`. Of a
# transposed V it holds two columns of two keys, and the two words go to two products: V lies by rows, as everybody has
# it.

# %%
lesson.show_source(fp8_halves.with_halves, first="def multiply_columns", last="multiply(acc, at + 4")

# %% [markdown]
# ### Scales, once
#
# A head's scale is part of the factor that scores are multiplied with anyway. A block's multiplies S; V's is the unit
# in which O is kept, and O is rescaled where the unit changes, as it is for a new maximum:

# %%
small = AttentionTiles(64, 32, 64, warps=2, slots=2, nbytes=1)
lesson.show_source(make_descales(small, "block").tile)

# %% [markdown]
# **Predict.** What do the scales of blocks cost, beside those of a head, for each score?
#
# One product. Registers tell the rest:

# %%
names = ("k32 e4m3fn d 64, tiles for sm_90a", "emulated e4m3fn d 64, tiles for sm_89")
found = {name: lesson.resources(f"fp8.{name}") for name in names}
print("measured" if all(fresh for _, fresh in found.values()) else "no compiler here: from lessons/resources.json")
lesson.table(
    ("kernel, on sm_90a", "threads", "registers a thread", "spilled bytes", "shared, KB", "blocks a multiprocessor"),
    [
        (name, r.threads, r.registers, r.spills, f"{r.shared / 1024:.0f}",
         budget("90", threads=r.threads, registers=r.registers, shared=r.shared).blocks)
        for name, (r, _) in found.items()
    ],
)  # fmt: skip

# %% [markdown]
# ### Does it compute in FP8?
#
# The same PTX, `mma.sync.m16n8k32...e4m3`, assembled for sm_89 and for sm_90, around the first product of the loop:

# %%
for arch, name in (("89", "sm_89"), ("90a", "sm_90")):
    print(f"{name}\n  " + "\n  ".join(code["excerpts"][arch]) + "\n")

# %% [markdown]
# On sm_89 QMMA multiplies bytes. On sm_90 the assembler unpacks them to float16 (F2FP) and multiplies these (HMMA),
# twice for each. An H200 computes in FP8 by `wgmma` alone; here it only checks that results are right.
#
# **Predict.** For one product of float16's depth: how many instructions more does that take?

# %%
shown = ("HMMA", "QMMA", "F2FP", "LDSM", "PRMT", "LOP3", "MUFU", "all")
rows = []
for loop in code["loops"]:
    products = 2 * loop["rows"] * loop["keys"] * 128 / (16 * 8 * 16)
    each = (f"{loop['opcodes'].get(name, 0) / products:.2f}" for name in shown)
    rows.append((f"sm_{loop['arch'].rstrip('a')}", loop["kernel"], loop["element"], *each))
lesson.table(("", "kernel", "elements", *shown), rows, "Instructions of the loop for each 16 x 8 x 16 multiplications.")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(10, 3.4))
kinds = {"products": ("HMMA", "QMMA"), "conversions": ("F2FP",), "ldmatrix": ("LDSM",), "bits": ("PRMT", "LOP3", "SHF"),
         "floats": ("FMUL", "FFMA", "FADD", "FMNMX", "MUFU")}  # fmt: skip
for y, loop in enumerate(code["loops"]):
    products, left = 2 * loop["rows"] * loop["keys"] * 128 / (16 * 8 * 16), 0.0
    for i, (kind, names) in enumerate(kinds.items()):
        width = sum(loop["opcodes"].get(name, 0) for name in names) / products
        ax.barh(y, width, left=left, color=f"C{i}", label=kind if y == 0 else None)
        left += width
names = [
    f"sm_{loop['arch'].rstrip('a')} {loop['kernel']} {loop['element'].replace('float8_', '')}" for loop in code["loops"]
]
ax.set_yticks(range(len(names)), names)
ax.invert_yaxis()
ax.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
ax.set(xlabel="instructions for each product 16 deep")
plt.show()

# %% [markdown]
# Half the products on sm_89, and conversions for P alone. On sm_90 there are as many products as for float16, and
# conversions on top: prefill can only lose there. By how much the counts tell nearly:

# %%
of_loop = {(loop["kernel"], loop["element"]): loop for loop in code["loops"] if loop["arch"] == "90a"}
prefill = [s for s in (measured or {}).get("sizes", []) if s["what"] == "prefill" and not s["causal"]]


def for_each_score(loop: dict) -> float:
    return loop["opcodes"]["all"] / (loop["rows"] * loop["keys"])


rows = []
for (name, element), loop in of_loop.items():
    label = f"fp8.{name}, {element.removeprefix('float8_').removesuffix('fn')}"
    speeds = [m["of_float16"] for s in prefill for m in s["measured"] if m["name"] == label and m["of_float16"]]
    if speeds:
        counted = for_each_score(of_loop["mma", "float16"]) / for_each_score(loop)
        rows.append((label, counted, f"{min(speeds):.2f} to {max(speeds):.2f}"))
lesson.table(("kernel", "float16's instructions / its", "its measured speed / float16's"), rows)

# %% [markdown]
# What is left there is memory.
#
# ## On real data
#
# Each kernel on one head of the real data (on a GPU, on all 36). The judge is float64 with what the codes stand for:
# what quantising lost is not a kernel's fault.

# %%
with lesson.timed(f"all on the {machine}"):
    results = [
        measure(stage, rung, case, machine)
        for case in stage.cases(machine, False)
        for rung in stage.rungs
        if rung.takes(case)
    ]
lesson.table(
    ("kernel", "machine", "problem", "largest error", "budget", "verdict"),
    [
        (
            r.rung.name,
            r.machine,
            f"{r.case.size}, {r.case.name.split(', ')[-1]}",
            r.comparison.error,
            r.comparison.budget,
            r.verdict,
        )
        for r in results
    ],
)

# %%
stage.draw(results)

# %% [markdown]
# ## Who reads what
#
# One new token reads all keys and values once, and computes next to nothing: decoding is bytes.
#
# **Predict.** 16 sequences of 8192 keys, 8 heads of 128 columns, at 4 TB/s: how long, in float16 and in eight bits?

# %%
elements = 2 * 16 * 8 * 8192 * 128
rows = [
    (f"{bits} bits", f"{elements * bits / 8 / 2**20:.0f} MB", f"{elements * bits / 8 / 4e12 * 1e6:.0f} us")
    for bits in (16, 8)
]
print(lesson.table(("K and V", "bytes", "at 4 TB/s"), rows))
for size in (measured or {}).get("sizes", []):
    if size.get("what") == "decode":
        print(f"\nmeasured, {size['batch']} x {size['n']} keys:")
        base = next(m["seconds"] for m in size["measured"] if m["name"] == "flash_forward.split, float16")
        for m in size["measured"]:
            if m["seconds"]:
                print(f"  {m['name']:32} {m['seconds'] * 1e6:8.1f} us  {base / m['seconds']:.2f} of float16's speed")

# %% [markdown]
# A cache of keys is read by rows, as it grows by rows, so decoding takes the kernel that converts. Scales of a block
# cost 4 bytes for 64 rows of 128.
#
# ## Break it
#
# Four faults that a GPU would not report: numbers come out, and look like attention. The judge is the reference with
# every rounding in place, so the budget is not the format's error but what is left beside it.

# %%
rng = np.random.default_rng(5)
q, k, v = (rng.standard_normal((1, 1, rows, 64)).astype(np.float32) for rows in (24, 150, 150))
k[..., 70:, :] *= 3  # the greatest scores come late
quantised = [scales.quantize(x, "e4m3") for x in (q, k, v)]
codes = [one[0] for one in quantised]
descales = dict(zip(("q_descale", "k_descale", "v_descale"), (one[1] for one in quantised), strict=True))
values = [scales.dequantize(*one, "e4m3") for one in quantised]
ideal, rounded_o = dense(*values)[0], reference.attention(*codes, "e4m3", **descales)[0]


def go(broken: str = "") -> np.ndarray:
    plan = partial(mma.plan_k32, tiles=small, broken=broken)
    return fp8_heads.forward(*codes, plan, fmt="e4m3", **descales, machine="emulator")[0]


print(f"whole: {compare(go(), ideal, rounded_o)}")

# %% [markdown]
# **A scale twice**, **K in an order that P does not know**, **weights times $2^{10}$**, which saturate at 448, and **a
# maximum that stays the first tile's**, which is exact in float16 and not here. **Predict.** Which has the smallest
# error?

# %% tags=["break-it"]
for broken in ("twice", "order", "saturate", "stale"):
    print(f"{broken}: {compare(go(broken), ideal, rounded_o)}")

# %% [markdown]
# Saturated weights are summed saturated, so even these rows add up to one: attention with a flattened maximum.
#
# ### O over K
#
# O is 16 bits an element and takes twice the room of Q, so it is written over K. Someone may still read that.

# %% tags=["break-it"]
try:
    go("o_barrier")
except Fault as fault:
    print(fault)

# %% [markdown]
# ## Exercises
#
# ### 1. A scale for each column of V
#
# One column of V is much larger than the others. A scale for each column, which SageAttention uses, saves them; and it
# multiplies O's columns at the end, once. Return codes `[N, D]` in e4m3, and scales `[D]`.


# %%
def by_column(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``v [N, D]`` float32."""
    # your code


# %% tags=["exercise"]
def by_column_is_right() -> bool:
    x = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32) * np.float32(0.001)
    x[:, 3] *= 1e7
    codes_of, scale = by_column(x)
    lost = np.abs(fp8.decode(codes_of, "e4m3") * scale - x)
    return scale.shape == (8,) and bool((lost <= 1.001 * np.maximum(np.abs(x) / 16, scale * 2.0**-10)).all())


lesson.check("by_column", by_column_is_right, "The largest |v| of each column over 448; fp8.encode(v / scale, ...).")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def by_column(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = (np.abs(v).max(0) / 448).astype(np.float32)
    scale[scale == 0] = 1
    return fp8.encode(v / scale, "e4m3"), scale


lesson.check("by_column", by_column_is_right)

# %% [markdown]
# ### 2. e4m3 to float32 in integers
#
# A kernel for any GPU: code `codes[i]` to `out[i]`. Where in a float32 do the seven bits below the sign belong, and
# with what is the result to be multiplied? All codes but the two NaNs will be tried. `bits_to_f32(uint32)` is the
# float32 of given bits.


# %%
@kernel(threads=32)
def decode_e4m3(codes, out):
    """``codes`` uint8 ``[n]``, ``out`` float32 ``[n]``."""
    # your code


# %% tags=["exercise"]
def decode_e4m3_is_right() -> bool:
    every = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    out = np.full(len(every), np.nan, np.float32)
    launch(decode_e4m3, -(-len(every) // 32), 32, (every, out))
    return bool((out == fp8.decode(every, "e4m3")).all())


lesson.check(
    "decode_e4m3", decode_e4m3_is_right, "Sign to bit 31, the rest shifted left by 20; times 2^120, in two products."
)


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
@kernel(threads=32)
def decode_e4m3(codes, out):
    i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if i < codes.shape[0]:
        code = uint32(codes[i])
        sign, size = (code & uint32(0x80)) << uint32(24), (code & uint32(0x7F)) << uint32(20)
        out[i] = bits_to_f32(uint32(sign | size)) * bits_to_f32(uint32(0x7B800000))  # 2^120


lesson.check("decode_e4m3", decode_e4m3_is_right)

# %% [markdown]
# The exponent's bias is 127 instead of 7, so the number is $2^{120}$ times too small; subnormal codes become subnormal
# float32, and the product makes them normal.
#
# ## Two machines, side by side
#
# | | the notes' machine | sm_80 | sm_89, sm_120 | sm_90 |
# | --- | --- | --- | --- | --- |
# | float32 to FP8 | the notes: fewer instructions than to INT8 | integers | one for two numbers | one for two numbers |
# | e5m2 to float16 | the upper byte | the upper byte | the upper byte | the upper byte |
# | products | matrix instructions | of float16 | `mma.sync`, QMMA | `wgmma`; `mma.sync` is unpacked |
# | what FP8 brings | the notes: 25 % with e5m2 | half the bytes | half the bytes and products | half the bytes |
#
# The notes' 25 % are for products in FP8. On Hopper those are `wgmma`'s to show.
#
# ## Limits
#
# - Real data here are of one small model, whose heads are tame. Large models have columns of outliers; the artificial
#   numbers stand for them.
# - sm_89 keeps 13 bits behind the point inside a product. Long sums lose there; SageAttention2 adds up in two levels.
#   The emulator and an H200 do not show it.
# - Scales of tokens are in the table of what is possible, and not in the kernels.
# - `k32` wants v by columns. A v by rows is turned once a call.
# - Instruction counts are of one compiler version, recorded.
#
# ## What next
#
# Blocks of keys that matter little can be left out: sparsity. And a cache of latent keys and values in FP8 is what
# FlashMLA reads.
