"""Record what a GPU does: inputs and outputs of every instruction, for the emulator to reproduce.

    python tests/machine/conformance/record.py tests/machine/conformance/vectors.npz [--only NAME ...]

needs a GPU and numba-cuda. Each instruction gets a kernel of its own, made from its declaration and launched by plain
Numba. Instructions are spread over several processes: one that faults or hangs is reported, and costs no other.
``--compile-only ARCH`` compiles the kernels and needs no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from flashnumba.machine.instruction import REGISTRY, Fragment, Instruction, runs_on
from flashnumba.machine.instructions import global_address, shared_address
from flashnumba.machine.numba import cuda, types
from tests.machine.conformance import cases

NUMBA = {kind: "boolean" if kind == "pred" else name for kind, name in cases.DTYPES.items()}


def outputs_of(declared: Instruction, groups: int) -> dict[str, np.ndarray]:
    """Empty arrays for what the instruction writes."""
    lanes, made = cases.lanes_of(declared), {}
    if declared.returns:
        made["result"] = np.zeros((groups, lanes), cases.dtype_of(declared.returns))
    for o in declared.operands:
        if isinstance(o, Fragment) and o.role != "in":
            made[o.name] = np.zeros((groups, lanes, o.count), cases.dtype_of(o.type))
    return made


def kernel_of(declared: Instruction, numba: bool = True) -> tuple[Any, list[str]]:
    """(function, names of its array arguments): one block a group, one call a thread; for Numba or for the emulator."""
    space, lanes = cases.space_of(declared), cases.lanes_of(declared)
    reads = [f"in_{o.name}" for o in declared.operands if not (isinstance(o, Fragment) and o.role == "out")]
    writes = (["out_result"] if declared.returns else []) + [
        f"out_{o.name}" for o in declared.operands if isinstance(o, Fragment) and o.role != "in"
    ]
    parameters = reads + writes + (["memory"] if space else [])
    words = cases.BYTES // 4
    body = ["g, t = cuda.blockIdx.x, cuda.threadIdx.x"]
    if space == "shared":
        body += [
            f"smem = cuda.shared.array({words}, uint32)",
            f"for i in range(t, {words}, {lanes}):",
            "    smem[i] = memory[g, i]",
            "cuda.syncthreads()",
            "base = shared_address(smem)",
        ]
    elif space == "global":
        body += [f"base = global_address(memory) + uint64(g) * uint64({cases.BYTES})"]
    call = []
    for o in declared.operands:
        if isinstance(o, Fragment):
            body += [f"{o.name} = cuda.local.array({o.count}, {NUMBA[o.type]})"]
            if o.role != "out":
                body += [f"for i in range({o.count}):", f"    {o.name}[i] = in_{o.name}[g, t, i]"]
            call += [o.name, "0"]
        else:
            call += [f"base + in_{o.name}[g, t]" if o.name == "addr" else f"in_{o.name}[g, t]"]
    body += [f"{'out_result[g, t] = ' if declared.returns else ''}instruction({', '.join(call)})"]
    for o in declared.operands:
        if isinstance(o, Fragment) and o.role != "in":
            body += [f"for i in range({o.count}):", f"    out_{o.name}[g, t, i] = {o.name}[i]"]
    if space == "shared":
        body += ["cuda.syncthreads()", f"for i in range(t, {words}, {lanes}):", "    memory[g, i] = smem[i]"]
    source = f"def kernel({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in body)
    scope = {name: getattr(types, name) for name in set(NUMBA.values())}
    named = {"instruction": declared, "shared_address": shared_address, "global_address": global_address}
    scope |= {"cuda": cuda, **{name: one.intrinsic if numba else one for name, one in named.items()}}
    exec(source, scope)
    return scope["kernel"], parameters


def arguments(declared: Instruction) -> dict[str, np.ndarray]:
    inputs = cases.inputs_of(declared)
    groups = len(next(iter(inputs.values())))
    made = {f"in_{name}": values for name, values in inputs.items()}
    made |= {f"out_{name}": values for name, values in outputs_of(declared, groups).items()}
    if cases.space_of(declared):
        made["memory"] = cases.memory_before(groups).copy().view(np.uint32)
    return made


def signature(declared: Instruction, parameters: list[str]) -> Any:
    given = arguments(declared)
    kinds = [types.Array(getattr(types, "boolean" if x.dtype == bool else x.dtype.name), x.ndim, "C")
             for x in (given[name] for name in parameters)]  # fmt: skip
    return types.void(*kinds)


def run(declared: Instruction) -> dict[str, np.ndarray]:
    """Launch the instruction's kernel; all arguments as they are afterwards."""
    function, parameters = kernel_of(declared)
    given = arguments(declared)
    on_device = {name: cuda.to_device(np.ascontiguousarray(given[name])) for name in parameters}
    cuda.jit(function)[len(next(iter(given.values()))), cases.lanes_of(declared)](*on_device.values())
    cuda.synchronize()
    return {name: array.copy_to_host() for name, array in on_device.items()}


def work(names: list[str], folder: Path) -> None:
    """A worker: one file an instruction, written when done; the first fault ends it, as the device is then lost."""
    for name in names:
        try:
            arrays = run(REGISTRY[name])
        except Exception as error:
            (folder / f"{name}.error").write_text(f"{type(error).__name__}: {str(error)[-600:]}")
            if "CUDA_ERROR" in str(error) or "CudaAPIError" in type(error).__name__:
                return
        else:
            np.savez(folder / f"{name}.tmp.npz", **arrays)
            (folder / f"{name}.tmp.npz").rename(folder / f"{name}.npz")


def record(names: list[str], folder: Path, workers: int, patience: float) -> dict[str, str]:
    """Run all instructions in worker processes; returns why any is missing."""
    left, failed = list(names), {}
    while left:
        shares = [left[i::workers] for i in range(workers) if left[i::workers]]
        running = [
            (share, subprocess.Popen([sys.executable, __file__, str(folder), "--worker", "--only", *share]))
            for share in shares
        ]
        deadline = time.monotonic() + patience
        left = []
        for share, process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            missing = [n for n in share if not (folder / f"{n}.npz").exists() and not (folder / f"{n}.error").exists()]
            broken = [n for n in share if (folder / f"{n}.error").exists()]
            failed |= {n: (folder / f"{n}.error").read_text() for n in broken}
            if missing and not (set(broken) & set(share)):  # it ended without a word: the next in line did it
                failed[missing[0]] = f"the process hung or ended (exit code {process.returncode})"
                missing = missing[1:]
            left += missing
            for n in broken:
                (folder / f"{n}.error").rename(folder / f"{n}.reported")
    return failed


def save(path: Path, names: list[str], folder: Path, about: dict[str, Any]) -> None:
    """One compressed file, with what is said ``about`` it; an array that occurs twice is held once."""
    held: dict[str, np.ndarray] = {}

    def keep(values: np.ndarray) -> str:
        key = hashlib.sha256(f"{values.dtype}{values.shape}".encode() + values.tobytes()).hexdigest()[:12]
        held[key] = values
        return key

    index: dict[str, Any] = {}
    for name in names:
        if not (folder / f"{name}.npz").exists():
            continue
        arrays, entry = np.load(folder / f"{name}.npz"), {"inputs": {}, "outputs": {}}
        for key in arrays.files:
            if key != "memory":
                kind, operand = key.split("_", 1)
                entry["inputs" if kind == "in" else "outputs"][operand] = keep(arrays[key])
        if "memory" in arrays.files:
            after = arrays["memory"].view(np.uint8)
            entry |= {"before": keep(cases.memory_before(len(after))), "after": keep(after)}
        index[name] = entry
    np.savez_compressed(path, index=np.array(json.dumps({**about, "instructions": index})), **held)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="record these instructions")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--patience", type=float, default=90, help="seconds after which a process counts as hung")
    parser.add_argument("--compile-only", metavar="ARCH", help="compile every kernel for e.g. 90a; no GPU is needed")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.only, options.path)
        return 0
    names = options.only or [i.name for i in cases.recorded_instructions()]
    if options.compile_only:
        from tests.machine.conformance import offline

        failed = offline.compile_all([REGISTRY[n] for n in names], options.compile_only)
        print(f"{len(names) - len(failed)} of {len(names)} kernels compile for sm_{options.compile_only}")
    else:
        device = cuda.get_current_device()
        number = "".join(map(str, device.compute_capability))
        arch = number + "a" if int(number) >= 90 else number
        names = [n for n in names if runs_on(arch, REGISTRY[n].arch)]
        with tempfile.TemporaryDirectory() as folder:
            failed = record(names, Path(folder), options.workers, options.patience)
            name = device.name.decode() if isinstance(device.name, bytes) else device.name
            save(options.path, names, Path(folder), {"device": name, "arch": arch, "failed": failed})
        print(f"{len(names) - len(failed)} of {len(names)} instructions recorded, {options.path.stat().st_size} bytes")
    for name, why in failed.items():
        print(f"FAILED {name}: {why}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
