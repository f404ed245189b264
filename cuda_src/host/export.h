// The host backend's PK_VARIANT: one exported symbol per variant, as on CUDA.
#pragma once
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>

#include "host/device.h"

namespace pk::host {

#ifdef PK_CHECK
constexpr bool kChecked = true;
#else
constexpr bool kChecked = false;
#endif

// The checker keeps a guarded copy of every tensor: pointers and tensor maps follow, other arguments stay as
// they are.
template <class T>
inline void relocate(T&) {}
template <class T>
inline void relocate(T*& p) {
  p = static_cast<T*>(pkh_relocate(static_cast<const void*>(p)));
}
inline void relocate(TensorMap& map) { map.base = pkh_relocate(map.base); }

// The launcher packs arguments without regard to their alignment (a tensor map wants 64 bytes).
template <class T>
T argument(const void* packed) {
  union Storage {
    T value;
    Storage() {}
  } s;
  memcpy(static_cast<void*>(&s.value), packed, sizeof(T));
  return s.value;
}

template <class... P, size_t... I>
int launch_packed(void (*kernel)(P...), const PkLaunch* launch, void** args, std::index_sequence<I...>) {
  using Args = std::tuple<std::decay_t<P>...>;
  using Closure = std::pair<void (*)(P...), Args>;
  Closure closure{kernel, Args(argument<std::decay_t<P>>(args[I])...)};
  if constexpr (kChecked) (relocate(std::get<I>(closure.second)), ...);
  auto thunk = [](const void* p) {
    const Closure& c = *static_cast<const Closure*>(p);
    std::apply(c.first, c.second);
  };
  return pkh_run(launch, thunk, &closure, sizeof(closure), static_cast<int>(sizeof...(P)), kChecked);
}

template <class... P>
int launch_packed(void (*kernel)(P...), const PkLaunch* launch, void** args) {
  constexpr int kCount = static_cast<int>(sizeof...(P));
  // With another number of arguments none of them may be looked at: the run refuses them by name.
  if (launch->nargs > 0 && launch->nargs != kCount) return pkh_run(launch, nullptr, "", 0, kCount, kChecked);
  return launch_packed(kernel, launch, args, std::index_sequence_for<P...>{});
}

}  // namespace pk::host

#define PK_VARIANT(...)                                                      \
  static int pk_variant_run_(const PkLaunch* launch, void** args) {          \
    return ::pk::host::launch_packed(&__VA_ARGS__, launch, args);            \
  }                                                                          \
  extern "C" __attribute__((visibility("default"))) const void* pk_entry() { \
    return reinterpret_cast<const void*>(&pk_variant_run_);                  \
  }
