"""The page of measured results, from the JSON files that ``flashnumba bench`` writes to ``docs/results``.

The matrix products, attention and decoding get a table with a row a size and a column for each kernel and peer, and
attention a picture; what else a file holds is folded away below. A column of which no size has a figure (a backend that
refused) is left out. Any other file is shown as :mod:`generators.measured` does. What is not there says how to make it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from flashnumba.stages.figures import BLUE, GREEN, GREY, ORANGE, RED
from generators import counters, every_head
from generators.measured import Row, facts_of, folded, section, table
from generators.tables import markdown

__all__ = ["draw_attention", "page"]

BENCHES = (
    "softmax", "gemm", "attention", "chain", "staged", "balance", "backward", "decode", "fp8", "sparsity", "mla",
    "counters",
)  # fmt: skip
"""In the order of the page; each is a command of ``flashnumba bench`` and a file."""
NOT_RESULTS = ("resources", "timeline", "training")
"""Files of ``docs/results`` that are no tables of measurements on a device."""
PICTURE = "attention.svg"
FA2 = "torch, FlashAttention-2"


def page(folder: Path) -> str:
    """A section a file, and one for each bench without a file."""
    files = {path.stem: path for path in sorted(folder.glob("*.json")) if path.stem not in NOT_RESULTS}
    order = [name for name in (*BENCHES, *files) if name in files]
    there = [SECTIONS.get(name, section)(files[name]) for name in dict.fromkeys(order)]
    return "\n".join([*there, *(missing(name) for name in BENCHES if name not in files)])


def missing(name: str) -> str:
    return (
        f"## {name.capitalize()}\n\nNot measured here: no file `docs/results/{name}.json`. "
        f"`flashnumba bench {name}`, on a GPU, writes it.\n"
    )


# -- the three that have tables of their own ---------------------------------------------------------------------------
def gemm(path: Path) -> str:
    """TFLOP/s of every kernel, and of cuBLAS what share."""
    held, _, facts = facts_of(path)

    def cell(one: Row) -> str:
        share = one.get("of_cublas")
        return f"{one['flops_per_second'] / 1e12:.3g}" + (f" ({share:.2f})" if share else "")

    heads = {"element": "element", "M x N x K": _product, "majors": "majors"}
    text = "TFLOP/s; in brackets the share of cuBLAS (`torch.matmul`). Majors: `kn` is both operands row-major.\n\n"
    return f"## Gemm\n\n{facts}\n{text}{pivot(held['sizes'], heads, cell)}{folded(held['sizes'], 'measured')}"


def _product(size: Row) -> str:
    return " x ".join(str(size[name]) for name in "mnk")


def attention(path: Path) -> str:
    """TFLOP/s of every kernel and peer, and a picture of them by length."""
    held, _, facts = facts_of(path)

    def cell(one: Row) -> str:
        share = one.get("of_fa2") if one["ours"] else None
        return f"{one['flops_per_second'] / 1e12:.3g}" + (f" ({share:.2f})" if share else "")

    heads = {"element": "element", "D": "d", "mask": _mask, "B x H x N": _batch}
    text = (
        "Forward, TFLOP/s: 4 B H M N D operations are counted, half of them under a causal mask. In brackets the share "
        "of FlashAttention-2 in torch. `simt` is there to be read and not tuned.\n\n"
    )
    picture = f"\n![TFLOP/s by length, a panel for each D and mask](generated/{PICTURE})\n" if lines(held) else ""
    elements = dict.fromkeys(size["element"] for size in held["sizes"])  # a table each: torch's backends differ
    each = [pivot([size for size in held["sizes"] if size["element"] == e], heads, cell) for e in elements]
    tables = "\n".join(each) + picture + folded(held["sizes"], "measured")
    return f"## Attention\n\n{facts}\n{text}{tables}"


def _mask(size: Row) -> str:
    return "causal" if size["causal"] else "none"


def _batch(size: Row) -> str:
    return " x ".join(str(size[name]) for name in ("batch", "heads", "n"))


def chain(path: Path) -> str:
    """TFLOP/s of the flash forward with P handed over in each way, and of the way through shared memory what share."""
    held, _, facts = facts_of(path)

    def cell(one: Row) -> str:
        share = one.get("of_shared")
        return f"{one['flops_per_second'] / 1e12:.3g}" + (f" ({share:.2f})" if share and one["ours"] else "")

    heads = {"element": "element", "D": "d", "mask": _mask, "B x H x N": _batch}
    text = (
        "The flash forward with three ways for P from one product to the next, and all else equal: TFLOP/s; in "
        "brackets the speed beside the way through shared memory. `detour` is shared memory without need, in whole "
        "words.\n\n"
    )
    return f"## Chain\n\n{facts}\n{text}{pivot(held['sizes'], heads, cell)}{folded(held['sizes'], 'measured')}"


def staged(path: Path) -> str:
    """TFLOP/s of one ring of slots in eight forms, and what a block of each takes."""
    held, _, facts = facts_of(path)

    def cell(one: Row) -> str:
        share = one.get("of_base")
        return f"{one['flops_per_second'] / 1e12:.3g}" + (f" ({share:.2f})" if share and one["ours"] else "")

    heads = {"element": "element", "D": "d", "mask": _mask, "B x H x N": _batch}
    text = (
        "The flash forward with Q in registers, and K and V in one ring of slots: TFLOP/s; in brackets the speed "
        "beside two whole tiles.\n\n"
    )
    takes = {}
    for size in held["sizes"]:
        for one in size["measured"]:
            if one["ours"] and one["seconds"]:
                takes[size["d"], one["name"]] = {
                    "D": size["d"], "kernel": one["name"], "KB of shared memory": f"{one['shared'] / 1024:.1f}",
                    "registers": one["registers"], "blocks a multiprocessor, predicted": one["predicted_blocks"],
                    "by the driver": one["blocks"],
                }  # fmt: skip
    blocks = "\nWhat a block takes, and how many a multiprocessor holds:\n\n" + table(list(takes.values()))
    tables = pivot(held["sizes"], heads, cell) + blocks
    return f"## Staged\n\n{facts}\n{text}{tables}{folded(held['sizes'], 'measured')}"


def backward(path: Path) -> str:
    """TFLOP/s of the gradients by every kernel and peer, and what memory each allocates."""
    held, _, facts = facts_of(path)

    def cell(one: Row) -> str:
        share = one.get("of_fa2") if one["ours"] else None
        return f"{one['flops_per_second'] / 1e12:.3g}" + (f" ({share:.2f})" if share else "")

    def megabytes(one: Row) -> str:
        return "-" if one.get("extra_bytes") is None else f"{one['extra_bytes'] / 2**20:.3g}"

    heads = {"element": "element", "D": "d", "mask": _mask, "B x H x N": _batch}
    text = (
        "The backward alone, TFLOP/s: 10 B H M N D operations are counted, half of them under a causal mask, whatever "
        "a kernel computes again. In brackets the share of FlashAttention-2 in torch, which adds to dQ by atomics, as "
        "`one_pass` does; `mma` gives the same bits every time.\n\n"
    )
    memory = "\nMB that a call allocates at most, beyond dQ, dK and dV:\n\n" + pivot(held["sizes"], heads, megabytes)
    tables = pivot(held["sizes"], heads, cell) + memory
    return f"## Backward\n\n{facts}\n{text}{tables}{folded(held['sizes'], 'measured')}"


def decode(path: Path) -> str:
    """Microseconds of every kernel and peer; of the fastest kernel also the speed beside copies."""
    held, _, facts = facts_of(path)
    heads = {"B": "batch", "N": "n", "MB of K and V": lambda size: f"{size['nbytes'] / 1e6:.4g}"}
    bare = {"element": "element", **heads} if len({size["element"] for size in held["sizes"]}) > 1 else heads
    speeds = []
    for size in held["sizes"]:
        best = min((m for m in size["measured"] if m["ours"] and m["seconds"]), key=lambda m: m["seconds"], default={})
        speeds.append({
            **{head: _value(size, what) for head, what in bare.items()}, "kernel": best.get("name"),
            **{key: best.get(key) for key in ("bytes_per_second", "of_copy", "of_equal_copy", "of_fa2", "of_cudnn")},
        })  # fmt: skip
    text = "One query a head and sequence. Microseconds of a call, inputs from device memory:\n\n"
    text += pivot(held["sizes"], bare, lambda one: f"{one['seconds'] * 1e6:.3g}")
    text += "\nBytes of K and V a second, beside a copy of 1 GiB, a copy that moves as many bytes, and torch:\n\n"
    text += table(speeds)
    host = [(row["q"], row["name"], _us(row["seconds"])) for row in held.get("host", ())]
    if host:
        text += "\nHost time of a call on small tensors:\n\n" + markdown(("q", "call", "us"), host)
    return f"## Decode\n\n{facts}\n{text}{folded(held['sizes'], 'measured')}"


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.3g}"


def mla(path: Path) -> str:
    """Microseconds of latent attention, beside a copy where it reads the cache, and TFLOP/s beside a matrix product."""
    held, _, facts = facts_of(path)
    ours = [{**size, "measured": [m for m in size["measured"] if m["ours"]]} for size in held["sizes"]]
    decoding, prefill = ([size for size in ours if size["prefill"] == which] for which in (False, True))
    gemm = path.with_name("gemm.json")
    product = _largest_product(json.loads(gemm.read_text(encoding="utf-8"))) if gemm.is_file() else None

    def read(one: Row) -> str:
        times = one.get("of_bfloat16")
        return f"{one['seconds'] * 1e6:.4g} ({one['of_copy']:.2f}{f', x {times:.2f}' if times else ''})"

    def multiplied(one: Row) -> str:
        share = f" ({one['flops_per_second'] / product:.2f})" if product else ""
        return f"{one['flops_per_second'] / 1e12:.3g}{share}"

    heads = {"B": "batch", "N": "n", "H": "heads"}
    share = (
        f"; in brackets the share of `gemm mma` on the largest float16 matrices, {product / 1e12:.3g}"
        if product
        else ""
    )
    text = (
        "Decoding, one query token a request, pages in random order, inputs from device memory: microseconds, the "
        "merge of parts included; in brackets bytes of the cache a second beside a copy of 1 GiB, and of a cache in 8 "
        f"bits the speed beside 16 bits:\n\n{pivot(decoding, heads, read)}\nTFLOP/s{share}:\n\n"
        f"{pivot(decoding, heads, multiplied)}"
    )
    if prefill:
        text += f"\nPrefill, causal, TFLOP/s{' with the same share' if product else ''}:\n\n"
        text += pivot(prefill, heads, multiplied)
    text += "\ntorch's FlashAttention-2 and cuDNN take no heads of 576 columns; what they answer is below.\n"
    return f"## Mla\n\n{facts}\n{text}{folded(held['sizes'], 'measured')}"


def _largest_product(held: Mapping[str, Any]) -> float | None:
    """Operations a second of `mma` on the largest float16 matrices."""
    found = {
        size["m"] * size["n"] * size["k"]: m["flops_per_second"]
        for size in held["sizes"] for m in size["measured"]
        if size["element"] == "float16" and m["name"] == "mma" and m["seconds"]
    }  # fmt: skip
    return found[max(found)] if found else None


SECTIONS: Mapping[str, Callable[[Path], str]] = {
    "gemm": gemm,
    "attention": attention,
    "chain": chain,
    "staged": staged,
    "backward": backward,
    "decode": decode,
    "mla": mla,
    "counters": counters.section,
    "every_head": every_head.section,
}
What = str | Callable[[Row], str]


def pivot(sizes: Sequence[Row], heads: Mapping[str, What], cell: Callable[[Row], str]) -> str:
    """A row for each size, a column for everything that has a time on some of them; peers first."""
    names: dict[str, bool] = {}
    for size in sizes:
        names |= {one["name"]: one["ours"] for one in size["measured"] if one["seconds"]}
    columns = sorted(names, key=lambda name: names[name])
    rows = []
    for size in sizes:
        cells = {one["name"]: cell(one) for one in size["measured"] if one["seconds"]}
        rows.append([*(_value(size, what) for what in heads.values()), *(cells.get(name, "-") for name in columns)])
    return markdown([*heads, *columns], rows)


def _value(size: Row, what: What) -> Any:
    return size[what] if isinstance(what, str) else what(size)


# -- the picture -------------------------------------------------------------------------------------------------------
def lines(held: Mapping[str, Any]) -> dict[tuple[int, bool], dict[str, list[tuple[int, float]]]]:
    """(N, TFLOP/s) of each kernel and peer by (D, causal), for 16-bit elements; of several the first measured."""
    sixteen = [size for size in held["sizes"] if size["element"] != "float32"]
    found: dict[tuple[int, bool], dict[str, list[tuple[int, float]]]] = {}
    for size in sixteen:
        if size["element"] != sixteen[0]["element"]:
            continue
        panel = found.setdefault((size["d"], size["causal"]), {})
        for one in size["measured"]:
            if one["seconds"]:
                panel.setdefault(one["name"], []).append((size["n"], one["flops_per_second"] / 1e12))
    return {key: panel for key, panel in found.items() if panel}


def draw_attention(folder: Path, target: Path) -> None:
    """Draw ``attention.json`` of a folder, if it is there, to ``attention.svg`` in another."""
    path = folder / "attention.json"
    found = lines(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    if not found:
        return
    matplotlib.rcParams["svg.hashsalt"] = "flashnumba"
    dims, masks = sorted({d for d, _ in found}), sorted({causal for _, causal in found})
    figure = Figure(figsize=(3.4 * len(dims), 2.7 * len(masks) + 0.5), layout="constrained", facecolor="white")
    panels = figure.subplots(len(masks), len(dims), squeeze=False, sharex=True, sharey=True)
    names = list(dict.fromkeys(name for panel in found.values() for name in panel))
    others = iter((BLUE, RED, GREEN, "#CC79A7", "#56B4E9"))
    colors = {
        name: GREY if name == FA2 else ORANGE if name.startswith("torch") else next(others, BLUE) for name in names
    }
    for (row, causal), (col, d) in product(enumerate(masks), enumerate(dims)):
        axes = panels[row, col]
        for name, points in found.get((d, causal), {}).items():
            n, rate = zip(*sorted(points), strict=True)
            style = "--" if name.startswith("torch") else "-"
            axes.plot(n, rate, style, marker="o", ms=4, color=colors[name], label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({n for panel in found.values() for points in panel.values() for n, _ in points}))
        axes.xaxis.set_major_formatter(lambda n, _: f"{n:g}")
        axes.set_title(f"D = {d}{', causal' if causal else ''}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", lw=0.6)
    panels[0, 0].set_ylim(
        0, 1.05 * max(rate for panel in found.values() for points in panel.values() for _, rate in points)
    )
    for axes in panels[:, 0]:
        axes.set_ylabel("TFLOP/s")
    for axes in panels[-1]:
        axes.set_xlabel("tokens of a sequence")
    handles = {label: h for axes in panels.flat for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles), fontsize=9, frameon=False)
    figure.savefig(target / PICTURE, metadata={"Date": None})
