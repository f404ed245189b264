"""What is read from a kernel's text: names, namespaces, overloads, conditionals, aliases; and a missing brace."""

from __future__ import annotations

import pytest

from pykern.errors import ArgumentError
from pykern.jit import declarations, raw, signature


def read(text: str, instance: str = "k", defines: tuple[str, ...] = ()) -> str:
    """``qualified(parameters)`` of a kernel, as a raw kernel resolves it."""
    name, arguments = signature.parse_instance(instance)
    qualified, found = raw._chosen(declarations.declarations(text, defines), name, arguments, instance)
    return f"{qualified}({', '.join(map(str, signature.parameters_of(found, arguments)))})"


K = "__global__ void k"


@pytest.mark.parametrize(
    ("text", "instance", "reads"),
    [
        (f"namespace a::b {{ {K}(int* x) {{}} }}", "a::b::k", "a::b::k(int* x)"),
        (f"namespace a::b {{ {K}(int* x) {{}} }}", "k", "a::b::k(int* x)"),
        (f"namespace a::b {{ {K}(int* x) {{}} }}", "b::k", "a::b::k(int* x)"),
        (f"namespace {{ inline namespace v1 {{ {K}(int* x) {{}} }} }}", "k", "k(int* x)"),
        (f'extern "C" {{ using t = int; {K}(t* x) {{}} }}', "k", "k(int* x)"),
        (f"namespace a {{ {K}(int* x) {{}} }} namespace b {{ {K}(float* x) {{}} }}", "b::k", "b::k(float* x)"),
        (f"namespace a {{ {K}(int* x) {{}} }} {K}(float* x) {{}}", "k", "k(float* x)"),
        (f"NS_BEGIN {K}(int* x) {{}}", "ns::k", "ns::k(int* x)"),
        (f"struct S {{ int v; }}; enum E {{ A }}; {K}(S* s, E e) {{}}", "k", "k(S* s, int e)"),
        (f"enum class E : uint8_t {{ A }}; {K}(E e) {{}}", "k", "k(uint8_t e)"),
        (f"using real = float; typedef const real* in; {K}(in x, real y) {{}}", "k", "k(const float* x, float y)"),
        (f"void f() {{ using real = double; }} using real = float; {K}(real y) {{}}", "k", "k(float y)"),
        (f"#define ARGS float* x, int n\n{K}(ARGS) {{}}", "k", "k(float* x, int n)"),
        ("#define KERNEL static __global__ void\nKERNEL k(int n) {}", "k", "k(int n)"),
        (f"#define A B\n#define B A\n{K}(A n) {{}}", "k", "k(A n)"),
        ("template <class T = float, int N = 2> __global__ void k(T* x) {}", "k", "k(float* x)"),
        (
            "template <class T, int N = 2> __global__ void k(T*); template <class U, int N> __global__ void k(U* x) {}",
            "k<int>",
            "k(int* x)",
        ),
        (
            "template <class T> __global__ void k(T* x) {} template <> __global__ void k<float>(float* y) {}"
            "template __global__ void k<int>(int*);",
            "k<float>",
            "k(float* x)",
        ),
        (f"template <class T> {K}(T* x) {{}} {K}(int* x, int n) {{}}", "k<int>", "k(int* x)"),
        (f"{K}(const float* __restrict__ x, int a[]); {K}(const float* y, int* b);", "k", "k(const float* y, int* b)"),
    ],
)  # fmt: skip
def test_names_and_parameters(text: str, instance: str, reads: str) -> None:
    assert read(text, instance) == reads


def test_every_spelling_of_an_integer_has_its_size() -> None:
    (declared,) = declarations.declarations(
        f"{K}(unsigned long int a, long unsigned b, signed c, std::int32_t d, long long int e, short int f,"
        "signed char g, char unsigned h, unsigned i, __half2* j, long double k)"
    )["k"]
    found = [p.dtype for p in signature.parameters_of(declared, [])]
    assert found == [
        "uint64", "uint64", "int32", "int32", "int64", "int16", "int8", "uint8", "uint32", "float16", None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "defines", "reads"),
    [
        (f"{K}(int* x\n#ifdef BIAS\n, int b\n#endif\n) {{}}", (), "k(int* x)"),
        (f"{K}(int* x\n#ifdef BIAS\n, int b\n#endif\n) {{}}", ("BIAS",), "k(int* x, int b)"),
        (f"#define BIAS\n{K}(int* x\n#if defined(BIAS)\n, int b\n#endif\n) {{}}", (), "k(int* x, int b)"),
        (f"#if 0\n{K}(int* x);\n#elif N\n{K}(int n);\n#else\n{K}(float y);\n#endif", ("N=1",), "k(int n)"),
        (f"#if 0\n{K}(int* x);\n#elif N\n{K}(int n);\n#else\n{K}(float y);\n#endif", ("N=0",), "k(float y)"),
        (f"#ifndef A\n#ifdef B\n{K}(int x) {{}}\n#else\n{K}(float y) {{}}\n#endif\n#endif", (), "k(float y)"),
    ],
)
def test_conditionals_that_the_text_decides(text: str, defines: tuple[str, ...], reads: str) -> None:
    assert read(text, "k", defines) == reads


@pytest.mark.parametrize(
    ("text", "instance"),
    [
        (f"{K}(float* x) {{}} {K}(int* x) {{}}", "k"),
        (f"{K}(float* x) {{}} {K}(float* x, int n) {{}}", "k"),
        (f"template <class T> {K}(T* x) {{}} {K}(int* x, int n) {{}}", "k"),
        (f"namespace a {{ {K}(int* x) {{}} }} namespace b {{ {K}(int* x) {{}} }}", "k"),
        (f'#include "x.cuh"\n#ifdef A\n{K}(float* x) {{}}\n#else\n{K}(int* x) {{}}\n#endif', "k"),
    ],
)
def test_a_name_of_several_kernels_is_refused(text: str, instance: str) -> None:
    """Taking the first would pass its arguments to the other."""
    with pytest.raises(ArgumentError, match=r"^kernel: got 'k', allowed: a name that one kernel has, .*; "):
        read(text, instance)


@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        ("int& n", "no references"),
        ("const float4& v", "no references"),
        ("int&& n", "no references"),
        ("float (&x)[4]", "no references"),
        ("float (*f)(float)", "a pointer to numbers"),
        ("float (*x)[4]", "`T* x` for an array of arrays"),
        ("float x[2][4]", "`T* x` for an array of arrays"),
        ("auto n", "a named type"),
    ],
)
def test_parameters_that_no_launch_can_pass(parameter: str, says: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        read(f"{K}(float* y, {parameter}) {{}}")
    assert str(caught.value).startswith(f"k: parameter 2: got `{parameter}`, allowed: ") and says in str(caught.value)


def test_a_pack_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^k: template: got `T...`, allowed: a fixed list"):
        read("template <class... T> __global__ void k(T... t) {}", "k<int, float>")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("void f() {\n}\n", None),
        ("void f() {\n", (1, 1)),
        ("a\nvoid f() {\n  if (1) {\n}\n\n\n", (2, 4)),
        ("// {\n/* {\n{ */ \"{\" '{' R\"x({)\" {)x\" {}\n", None),
        ("int a = 1'000; char c = '\\''; {", (1, 1)),
        ("}{", (1, 1)),
    ],
)
def test_the_brace_that_is_missing(text: str, found: tuple[int, int] | None) -> None:
    assert declarations.unclosed(text) == found


def test_stripped_text_keeps_its_lines() -> None:
    text = 'a /* 1\n2 */ b // c\n"d" R"(\n)" e'
    assert declarations.strip_comments(text).count("\n") == text.count("\n")
    assert "c" not in declarations.strip_comments(text) and "d" not in declarations.strip_comments(text)
