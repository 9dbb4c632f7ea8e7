"""Kernels as data, and the copy of a function that a target gets."""

from __future__ import annotations

import math

import pytest

from flashnumba.machine.function import DeviceFunction, Kernel, device, exchange, kernel, named_values, source_names

FACTOR = 3
OTHER = 5


def double_integers(value):
    return value * 2 if isinstance(value, int) and not isinstance(value, bool) else value


def uses_a_global(x):
    return x * FACTOR


def test_a_global_is_exchanged_and_the_original_is_left_alone():
    clone = exchange(uses_a_global, double_integers)
    assert clone(10) == 60
    assert uses_a_global(10) == 30
    assert FACTOR == 3
    assert clone.__code__ is uses_a_global.__code__


def test_only_what_the_function_names_is_exchanged():
    clone = exchange(uses_a_global, double_integers)
    assert clone.__globals__["FACTOR"] == 6
    assert clone.__globals__["OTHER"] == 5
    assert clone.__globals__["math"] is math


def test_a_closure_is_exchanged_and_the_original_is_left_alone():
    def factory(tile):
        def scaled(x):
            return x + tile

        return scaled

    function = factory(8)
    assert exchange(function, double_integers)(1) == 17
    assert function(1) == 9


def test_several_closure_variables_keep_their_places():
    def factory(a, b, c):
        def joined():
            return (c, a, b, FACTOR)

        return joined

    assert exchange(factory(1, 2, 4), double_integers)() == (8, 2, 4, 6)


def test_a_nested_function_sees_the_exchanged_globals_and_closure():
    def factory(offset):
        def outer(x):
            def inner(y):
                return y * FACTOR + offset

            return inner(x)

        return outer

    function = factory(1)
    assert source_names(function.__code__) == {"FACTOR"}
    assert exchange(function, double_integers)(10) == 62
    assert function(10) == 31


def test_a_comprehension_is_searched_too():
    def listed(n):
        return [FACTOR * i for i in range(n)]

    assert exchange(listed, double_integers)(3) == [0, 6, 12]


def test_defaults_and_keyword_defaults_are_kept_as_they_are():
    def with_defaults(x, y=4, *, z=5):
        return x + y + z

    clone = exchange(with_defaults, double_integers)
    assert clone(1) == 10
    assert clone.__defaults__ == (4,)
    assert clone.__kwdefaults__ == {"z": 5}


def test_the_copy_has_the_name_module_and_docstring():
    def documented():
        """What it does."""

    clone = exchange(documented, double_integers)
    assert clone.__name__ == "documented"
    assert clone.__qualname__ == documented.__qualname__
    assert clone.__module__ == __name__
    assert clone.__doc__ == "What it does."


def test_extra_globals_fill_in_but_do_not_replace():
    def asks(x):
        return max(x, FACTOR)

    clone = exchange(asks, lambda v: v, {"max": lambda a, b: ("my max", a, b), "FACTOR": -1})
    assert clone(1) == ("my max", 1, 3)


def test_named_values_are_the_globals_and_then_the_closure():
    local = 7

    def names(x):
        return x + OTHER + local + FACTOR

    assert list(named_values(names)) == [("FACTOR", 3), ("OTHER", 5), ("local", 7)]


def test_a_closure_variable_without_a_value_is_named():
    def factory():
        def calls_later():
            return later()

        refused = pytest.raises(ValueError, match="calls_later names later, which its enclosing function never set")
        with refused:
            exchange(calls_later, double_integers)
        later = int
        return exchange(calls_later, lambda v: float if v is int else v)

    assert isinstance(factory()(), float)


def test_a_device_function_that_calls_a_device_function_is_exchanged_by_the_substitute():
    @device
    def low(x):
        return x + FACTOR

    @device
    def high(x):
        return low(x) * OTHER

    @kernel(threads=32)
    def top(x):
        return high(x)

    def substitute(value):
        return exchange(value.function, substitute) if isinstance(value, DeviceFunction) else double_integers(value)

    assert exchange(top.function, substitute)(1) == (1 + 6) * 10
    with pytest.raises(TypeError, match="high is a device function: it runs inside a kernel"):
        top.function(1)


def test_a_kernel_records_its_options():
    @kernel(threads=128, min_blocks=2, arch=80, fastmath=True, concurrent=True, name="mine")
    def plain(x):
        """Its documentation."""

    assert isinstance(plain, Kernel)
    assert (plain.threads, plain.min_blocks, plain.arch) == (128, 2, "80")
    assert (plain.fastmath, plain.concurrent) == (True, True)
    assert plain.__name__ == "mine"
    assert plain.__doc__ == "Its documentation."
    assert plain.cache == {}


def test_two_kernels_of_one_function_are_two_kernels():
    def body(x):
        x[0] = 1

    one, two = kernel(threads=32)(body), kernel(threads=32)(body)
    assert one != two
    one.cache["key"] = 1
    assert two.cache == {}


def test_a_kernel_called_on_the_host_says_what_to_do():
    @kernel(threads=32)
    def nothing(x):
        x[0] = 1

    with pytest.raises(TypeError, match=r"nothing is a kernel: launch it with flashnumba\.machine\.launcher\.launch"):
        nothing([0])
