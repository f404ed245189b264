// What a raw kernel (pykern.compile, pykern.load) is compiled after: the dialect, and the question whether the compiler
// sees the parameters that pykern read from the text. Were they to differ, a launch would pass garbage.
#pragma once
#include "core/target.cuh"

namespace pk {
namespace detail {

struct Anything {};    // a parameter that pykern passes nothing for
struct AnyPointer {};  // to void, or to a type of the kernel's own
template <int Bytes>
struct Pointer {};  // to so many bytes
template <int Bytes>
struct Float {};
template <int Bytes>
struct Bool {};
template <int Bytes>
struct Bits {};  // integers, enumerations and 16-bit floating-point numbers

template <class T>
constexpr bool kFloating = false;
template <>
inline constexpr bool kFloating<float> = true;
template <>
inline constexpr bool kFloating<double> = true;

template <class T, class Read>
constexpr bool kFits = false;
template <class T>
inline constexpr bool kFits<T, Anything> = true;
template <class T>
inline constexpr bool kFits<T*, Anything> = true;
template <class T>
inline constexpr bool kFits<T*, AnyPointer> = true;
template <class T, int N>
inline constexpr bool kFits<T*, Pointer<N>> = sizeof(T) == N;
template <int N>
inline constexpr bool kFits<bool, Bool<N>> = true;
template <class T, int N>
inline constexpr bool kFits<T, Float<N>> = kFloating<T> && sizeof(T) == N;
template <class T, int N>
inline constexpr bool kFits<T*, Float<N>> = false;
template <class T, int N>
inline constexpr bool kFits<T, Bits<N>> = !kFloating<T> && sizeof(T) == N;
template <class T, int N>
inline constexpr bool kFits<T*, Bits<N>> = false;
template <int N>
inline constexpr bool kFits<bool, Bits<N>> = false;

template <class... T>
struct Types {};

template <class Seen, class Read>
constexpr bool kAllFit = false;
template <>
inline constexpr bool kAllFit<Types<>, Types<>> = true;
template <class T, class... Ts, class R, class... Rs>
inline constexpr bool kAllFit<Types<T, Ts...>, Types<R, Rs...>> = kFits<T, R> && kAllFit<Types<Ts...>, Types<Rs...>>;

// Whether a kernel of type Kernel, void (*)(...), has the parameters Read.
template <class Kernel, class... Read>
constexpr bool kTakes = false;
template <class... P, class... Read>
inline constexpr bool kTakes<void (*)(P...), Read...> = kAllFit<Types<P...>, Types<Read...>>;

}  // namespace detail
}  // namespace pk
