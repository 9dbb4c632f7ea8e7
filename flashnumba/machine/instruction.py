"""How an instruction is declared: once, for the GPU, the emulator, the documentation and the conformance test.

A declaration holds the PTX text with named operands (``%name``), the operands themselves, the smallest architecture,
the group of threads that executes it together, and a function that does to NumPy arrays what the hardware does to
registers. From it come a Numba intrinsic (inline assembly), the emulator's behaviour, a row of the instruction table,
and a test.

Inside a kernel a scalar operand is one argument. A *fragment* (several registers of a thread) is two: a local array and
the index of its first register, so that one array can hold many fragments::

    ldmatrix_x4(frag, 0, address)                 # frag[0:4] = four 8x8 matrices
    mma_m16n8k16_f16(acc, 4 * n, a, 0, b, 0)      # acc[4n:4n+4] += a[0:4] b[0:2]
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from keyword import iskeyword
from typing import Any

import numpy as np

from flashnumba.machine.numba import intrinsic, ir, types

__all__ = ["REGISTRY", "Fragment", "Instruction", "Scalar", "instruction", "register_dtype", "runs_on"]


@dataclass(frozen=True)
class RegisterType:
    """A PTX register class: its Numba, LLVM and NumPy types and its inline-assembly constraint."""

    name: str
    numba: Any
    llvm: Any
    numpy: Any
    constraint: str


_TYPES = {
    t.name: t
    for t in (
        RegisterType("f32", types.float32, ir.FloatType(), np.dtype(np.float32), "f"),
        RegisterType("f64", types.float64, ir.DoubleType(), np.dtype(np.float64), "d"),
        RegisterType("u16", types.uint16, ir.IntType(16), np.dtype(np.uint16), "h"),
        RegisterType("u32", types.uint32, ir.IntType(32), np.dtype(np.uint32), "r"),
        RegisterType("i32", types.int32, ir.IntType(32), np.dtype(np.int32), "r"),
        RegisterType("u64", types.uint64, ir.IntType(64), np.dtype(np.uint64), "l"),
        RegisterType("i64", types.int64, ir.IntType(64), np.dtype(np.int64), "l"),
        # A truth value: the PTX leaves 0 or 1 in a 32-bit register.
        RegisterType("pred", types.boolean, ir.IntType(32), np.dtype(np.bool_), "r"),
    )
}
_ANY32 = {types.float32: "f32", types.int32: "i32", types.uint32: "u32"}


@dataclass(frozen=True)
class Scalar:
    """One register, read. ``type`` is a register type, ``b32`` (float32, int32 or uint32, as the caller has it), or
    ``array`` (an array argument, handed over as the 64-bit address of its first element)."""

    name: str
    type: str


@dataclass(frozen=True)
class Fragment:
    """``count`` registers of a local array from a given index on; ``role`` is in, out or inout."""

    name: str
    type: str
    count: int
    role: str


Operand = Scalar | Fragment


@dataclass(frozen=True, eq=False)
class Instruction:
    """One machine instruction. Use :func:`instruction` to declare one.

    Attributes:
        name: as kernels call it.
        ptx: assembly text; ``%operand`` stands for a register, ``{%fragment}`` for a list of them.
        operands: in the order of the call.
        returns: register type of the value returned, ``b32`` for that of the first ``b32`` operand, or None.
        arch: smallest compute capability; with a trailing ``a``, that architecture alone.
        group: who executes it together: thread, warp or warpgroup.
        effect: none (registers only), memory, or control (it may wait or order other threads).
        emulate: the behaviour, see :mod:`flashnumba.machine.emulator.execution`.
        family: the file it is declared in, for the documentation's table.
        doc: what it does, with the layout where there is one.
        quick: ``emulate`` for one thread's plain numbers, without NumPy's overhead; None where there is no need.
    """

    name: str
    ptx: str
    operands: tuple[Operand, ...]
    returns: str | None
    arch: str
    group: str
    effect: str
    emulate: Callable[..., Any]
    family: str
    doc: str
    quick: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        raise TypeError(
            f"{self.name} is an instruction: it runs inside a kernel, not on the host, and there by its own name: "
            f"from flashnumba.machine.instructions import {self.name}"
        )

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        return self.doc

    @cached_property
    def signature(self) -> str:
        """How a kernel calls it, e.g. ``ldmatrix_x4(frag, frag_at, addr)``."""
        return f"{self.name}({', '.join(self.arguments)})"

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        names: list[str] = []
        for operand in self.operands:
            names.append(operand.name)
            if isinstance(operand, Fragment):
                names.append(f"{operand.name}_at")
        return tuple(names)

    @cached_property
    def intrinsic(self) -> Any:
        """The Numba intrinsic: typed, checked, and lowered to inline assembly."""
        return _make_intrinsic(self)


REGISTRY: dict[str, Instruction] = {}
"""Every declared instruction by name; factories enter theirs as they are made."""


def instruction(
    name: str,
    ptx: str,
    operands: tuple[Operand, ...] = (),
    *,
    returns: str | None = None,
    arch: str | int = "75",
    group: str = "thread",
    effect: str = "none",
    doc: str = "",
    quick: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Callable[[Callable[..., Any]], Instruction]:
    """Declare an instruction by decorating its emulation; the emulation's docstring is the documentation.

    ``quick`` makes the form for one thread's plain numbers from the emulation, to which it leaves uncommon values.

    Raises:
        ValueError: the text names an operand that is not declared, or the other way round; the name is taken; a type,
            role, group, effect or architecture is unknown; or nothing would come of executing it.
    """
    if group not in ("thread", "warp", "warpgroup"):
        raise ValueError(f"group of {name} is {group!r}; it must be thread, warp or warpgroup")
    if effect not in ("none", "memory", "control"):
        raise ValueError(f"effect of {name} is {effect!r}; it must be none, memory or control")
    if not re.fullmatch(r"\d{2,3}a?", str(arch)):
        raise ValueError(f"arch of {name} is {arch!r}; it must be a compute capability such as 80 or '90a'")
    _check_operands(name, operands, returns)
    if effect == "none" and not returns and all(isinstance(o, Scalar) or o.role == "in" for o in operands):
        raise ValueError(f"{name} has no output and no effect, so the compiler would drop it; declare its effect")
    declared = {o.name for o in operands} | ({"result"} if returns else set())
    named = set(re.findall(r"%([a-z_0-9]+)\b", ptx)) - _SPECIAL
    if named != declared:
        raise ValueError(f"{name}: the PTX names {sorted(named)}, the operands are {sorted(declared)}")

    def declare(emulate: Callable[..., Any]) -> Instruction:
        if name in REGISTRY:
            raise ValueError(f"an instruction named {name} is declared already")
        made = Instruction(
            name, ptx, operands, returns, str(arch), group, effect, emulate,
            family=emulate.__module__.rsplit(".", 1)[-1], doc=(doc or emulate.__doc__ or "").strip(),
            quick=quick(emulate) if quick else None,
        )  # fmt: skip
        REGISTRY[name] = made
        return made

    return declare


_SPECIAL = {"laneid", "clock", "clock64", "globaltimer", "smid", "warpid", "tid", "ntid", "ctaid", "nctaid"}


def _check_operands(name: str, operands: tuple[Operand, ...], returns: str | None) -> None:
    names = [n for o in operands for n in ((o.name, f"{o.name}_at") if isinstance(o, Fragment) else (o.name,))]
    for given in (name, *names):
        if not isinstance(given, str) or not given.isidentifier() or iskeyword(given) or given == "typingctx":
            raise ValueError(f"{name}: {given!r} cannot be a name in a kernel's source")
    if len(set(names)) < len(names) or "result" in names:
        raise ValueError(f"{name}: operand names must differ from one another and from 'result', not {names}")
    for operand in operands:
        if isinstance(operand, Scalar):
            known: set[str] = {*_TYPES, "b32", "array"}
        else:
            known = {*_TYPES} - {"pred"}
            if operand.role not in ("in", "out", "inout"):
                raise ValueError(f"{name}: role of {operand.name} is {operand.role!r}; it must be in, out or inout")
            if operand.count < 1:
                raise ValueError(f"{name}: {operand.name} has {operand.count} registers; it needs at least 1")
        if operand.type not in known:
            raise ValueError(f"{name}: type of {operand.name} is {operand.type!r}; it must be one of {sorted(known)}")
    if returns == "b32" and not any(o.type == "b32" for o in operands):
        raise ValueError(f"{name}: it returns the type of its first b32 operand, but has none")
    if returns is not None and returns not in {*_TYPES, "b32"}:
        raise ValueError(f"{name}: it returns {returns!r}; it must be one of {sorted({*_TYPES, 'b32'})}")


def register_dtype(name: str) -> np.dtype | None:
    """NumPy dtype of a register type; None where the caller's own type is kept (``b32``) or an array is passed."""
    return _TYPES[name].numpy if name in _TYPES else None


def runs_on(arch: str, needed: str) -> bool:
    """Whether a GPU of compute capability ``arch`` (e.g. ``"90a"``) has what needs ``needed``.

    >>> runs_on("90a", "80"), runs_on("90", "90a"), runs_on("100a", "90a"), runs_on("75", "80")
    (True, False, False, False)
    """
    if needed.endswith("a"):
        return arch == needed
    return int(arch.rstrip("a")) >= int(needed)


def _address(builder: Any, pointer: Any) -> Any:
    return builder.ptrtoint(pointer, ir.IntType(64))


def _make_intrinsic(declared: Instruction) -> Any:
    """Build the Numba intrinsic: numba wants a function with one named parameter an argument."""

    def typing(typingctx: Any, *args: Any) -> tuple[Any, Any]:
        return _typed(declared, args)

    names = ", ".join(("typingctx", *declared.arguments))
    source = f"def {declared.name}({names}):\n    return typing({names})\n"
    scope: dict[str, Any] = {"typing": typing}
    exec(source, scope)
    return intrinsic(scope[declared.name])


def _typed(declared: Instruction, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Numba's view of a call: the signature arguments are cast to, and the code generator."""
    given, wanted, registers = iter(args), [], []
    generic: str | None = None
    for operand in declared.operands:
        arg = next(given)
        if isinstance(operand, Fragment):
            at = next(given)
            element = _TYPES[operand.type]
            if not isinstance(arg, types.Array) or arg.dtype != element.numba or (arg.ndim, arg.layout) != (1, "C"):
                raise TypeError(
                    f"{declared.name}: {operand.name} must be a local array of {element.numba} with one axis, not {arg}"
                )
            if not isinstance(at, types.Integer):
                raise TypeError(f"{declared.name}: {operand.name}_at must be an integer, not {at}")
            wanted += [arg, types.int64]
            registers.append(element)
        elif operand.type == "array":
            if not isinstance(arg, types.Array):
                raise TypeError(f"{declared.name}: {operand.name} must be an array, not {arg}")
            wanted.append(arg)
            registers.append(_TYPES["u64"])
        elif operand.type == "b32":
            plain = types.unliteral(arg)
            if plain not in _ANY32:
                raise TypeError(f"{declared.name}: {operand.name} must be float32, int32 or uint32, not {plain}")
            generic = generic or _ANY32[plain]
            wanted.append(plain)
            registers.append(_TYPES[_ANY32[plain]])
        else:
            register = _TYPES[operand.type]
            # Numba would convert a float to an integer without a word.
            whole = (types.Integer, types.Boolean)
            if not isinstance(arg, whole if isinstance(register.numba, whole) else (types.Float, *whole)):
                raise TypeError(f"{declared.name}: {operand.name} must be {register.numba}, not {arg}")
            wanted.append(register.numba)
            registers.append(register)
    name = generic if declared.returns == "b32" else declared.returns
    result = _TYPES[name] if name else None
    signature = (result.numba if result else types.void)(*wanted)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return _assemble(declared, registers, result, context, builder, sig, values)

    return signature, generate


def _assemble(
    declared: Instruction, registers: list[RegisterType], result: RegisterType | None,
    context: Any, builder: Any, sig: Any, values: Any,
) -> Any:  # fmt: skip
    """Emit the inline assembly: outputs first, then inputs that share a register with one, then plain inputs."""
    outputs: list[tuple[RegisterType, Any]] = []  # register type and where it is stored, the result nowhere
    tied: list[tuple[int, Any]] = []
    inputs: list[tuple[RegisterType, Any]] = []
    text: dict[str, list[tuple[str, int]]] = {}
    if result:
        outputs.append((result, None))
        text["result"] = [("out", 0)]
    at = 0
    for operand, register in zip(declared.operands, registers, strict=True):
        if isinstance(operand, Fragment):
            array = context.make_array(sig.args[at])(context, builder, values[at])
            pointers = [
                builder.gep(array.data, [builder.add(values[at + 1], ir.Constant(ir.IntType(64), i))])
                for i in range(operand.count)
            ]
            at += 2
            if operand.role == "in":
                text[operand.name] = [("in", len(inputs) + i) for i in range(operand.count)]
                inputs += [(register, builder.load(p)) for p in pointers]
            else:
                text[operand.name] = [("out", len(outputs) + i) for i in range(operand.count)]
                if operand.role == "inout":
                    tied += [(len(outputs) + i, builder.load(p)) for i, p in enumerate(pointers)]
                outputs += [(register, p) for p in pointers]
        else:
            value = values[at]
            if operand.type == "array":
                value = _address(builder, context.make_array(sig.args[at])(context, builder, value).data)
            elif operand.type == "pred":
                value = builder.zext(value, ir.IntType(32))
            at += 1
            text[operand.name] = [("in", len(inputs))]
            inputs.append((register, value))

    first_input = len(outputs) + len(tied)
    number = {"out": 0, "in": first_input}

    def spelled(match: re.Match[str]) -> str:
        places = text.get(match.group(1))
        return match.group(0) if places is None else ", ".join(f"${number[kind] + i}" for kind, i in places)

    assembly = re.sub(r"%([a-z_0-9]+)\b", spelled, declared.ptx)
    constraints = [f"={r.constraint}" for r, _ in outputs]
    constraints += [str(i) for i, _ in tied] + [r.constraint for r, _ in inputs]
    if declared.effect != "none":
        constraints.append("~{memory}")
    kinds = [r.llvm for r, _ in outputs]
    returned = ir.VoidType() if not kinds else kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
    passed = [v for _, v in tied] + [v for _, v in inputs]
    function = ir.FunctionType(returned, [v.type for v in passed])
    lasting = declared.effect != "none"
    # What a warp executes together must not be moved under a condition that only some of its threads meet.
    together = () if declared.group == "thread" else ("convergent",)
    asm = ir.InlineAsm(function, assembly, ",".join(constraints), side_effect=lasting)
    called = builder.call(asm, passed, attrs=together)
    answer = context.get_dummy_value()
    for i, (register, pointer) in enumerate(outputs):
        value = called if len(outputs) == 1 else builder.extract_value(called, i)
        if pointer is not None:
            builder.store(value, pointer)
        elif register.name == "pred":
            answer = builder.icmp_unsigned("!=", value, ir.Constant(ir.IntType(32), 0))
        else:
            answer = value
    return answer
