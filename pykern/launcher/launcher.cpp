// The launcher: the C++ implementation of every pykern op, and the two microseconds between torch's dispatcher and a
// kernel. It has no per-op code: Python registers an op into a slot with a string that describes its arguments; a call
// turns its arguments' metadata into a key of int64 words, finds the launch record for that key (or asks Python to plan
// one, once) and launches. Uses only the C shims of torch's stable ABI and a few functions of CPython's stable ABI.
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/version.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#ifdef USE_CUDA
#include "cuda_launch.h"
#endif

Op g_ops[kSlots];
Memo g_memo;

namespace {

TorchLibraryHandle g_lib[2];

void run(int slot, StableIValue* stack) {
  const Op& op = g_ops[slot];
  Call c;
  c.put(slot | g_memo.epoch() << 16);
  // Take ownership of every argument first, so that an error leaks nothing.
  std::string error;
  for (size_t k = 0; k < op.args.size(); ++k) {
    c.at[k] = c.nt;
    try {
      c.argument(op.args[k], stack[k]);
    } catch (const std::exception& e) {
      if (error.empty()) error = op.names[k] + ": " + e.what();
    }
  }
  if (!error.empty()) raise_python("argument", error);
  if (c.grad >= 0 && aoti_torch_grad_mode_is_enabled()) {
    size_t k = op.args.size() - 1;  // the argument that holds it: the last that starts at or before it
    while (c.at[k] > c.grad) --k;
    raise_python("gradient", op.name + "\n" + op.names[k]);
  }
  c.put(c.dev_type == 0 ? host_word() : 0);
#ifdef USE_CUDA
  DeviceScope scope(c.dev_type == 1 ? c.dev : -1);
#endif
  Memo::Reader reader(g_memo);
  const uint64_t h = Memo::hash(c.key, c.nk);
  const Record* rec = g_memo.find(h, c.key, c.nk);
  if (!rec) rec = plan(slot, h, c);
  if (!rec->overlaps.empty()) check_overlaps(op, *rec, c);

  void* stream = nullptr;
#ifdef USE_CUDA
  if (c.dev_type == 1) CK(aoti_torch_get_current_cuda_stream(c.dev, &stream));
#endif
  Buffers b;
  for (size_t k = 0; k < rec->outs.size(); ++k) {
    const Out& o = rec->outs[k];
    AtenTensorHandle t;
    CK(aoti_torch_empty_strided(static_cast<int64_t>(o.size.size()), o.size.data(), o.stride.data(), o.dtype,
                                c.dev_type, c.dev, &t));
    b.out[k].reset(t);
    CK(torch_get_mutable_data_ptr(t, &b.optr[k]));
  }
  for (size_t k = 0; k < rec->ws.size(); ++k) {
    const WorkspaceSpec& w = rec->ws[k];
    if (w.counter) {
      b.wptr[k] = counters(c.dev_type, c.dev, stream, static_cast<int>(k), w.nbytes);
      continue;
    }
    AtenTensorHandle t;
    CK(aoti_torch_empty_strided(1, &w.nbytes, &kOne, aoti_torch_dtype_uint8(), c.dev_type, c.dev, &t));
    b.ws[k].reset(t);
    CK(torch_get_mutable_data_ptr(t, &b.wptr[k]));
  }

  const size_t n = rec->launches.size();
  if (n) {
    uint64_t value[kMaxLaunches][kMaxArgs];
    void* argp[kMaxLaunches][kMaxArgs];
    void** argv[kMaxLaunches];
    int16_t region_of[kMaxLaunches][kMaxArgs];
    alignas(64) unsigned char maps[kMaxLaunches][kMaxMaps][128];
    for (size_t j = 0; j < n; ++j) {
      const Launch& l = rec->launches[j];
      int nmaps = 0;
      for (size_t a = 0; a < l.args.size(); ++a) {
        const Arg& arg = l.args[a];
        uint64_t v = 0;
        int16_t region = -1;
        float f;
        int32_t w;
        argp[j][a] = &value[j][a];
        switch (arg.kind) {
          case IN_PTR:
            v = reinterpret_cast<uint64_t>(c.ptr[arg.v]);
            region = v ? static_cast<int16_t>(arg.v) : -1;
            break;
          case OUT_PTR:
            v = reinterpret_cast<uint64_t>(b.optr[arg.v]);
            region = static_cast<int16_t>(c.nt + arg.v);
            break;
          case WS_PTR:
            v = reinterpret_cast<uint64_t>(b.wptr[arg.v]);
            region = static_cast<int16_t>(c.nt + rec->outs.size() + arg.v);
            break;
          case I32:
            w = static_cast<int32_t>(arg.v);
            memcpy(&v, &w, 4);
            break;
          case I64:
          case F32:
            v = static_cast<uint64_t>(arg.v);
            break;
          case RUN_F32:
            f = static_cast<float>(c.f[arg.v]);
            memcpy(&v, &f, 4);
            break;
          case RUN_I32:
            w = static_cast<int32_t>(c.i[arg.v]);
            memcpy(&v, &w, 4);
            break;
          case RUN_I64:
            v = static_cast<uint64_t>(c.i[arg.v]);
            break;
          case MAP: {
            if (nmaps == kMaxMaps) throw std::runtime_error("too many tensor maps in one launch");
            const MapSpec& m = rec->maps[arg.v];
            void* base = m.kind == IN_PTR ? c.ptr[m.index] : m.kind == OUT_PTR ? b.optr[m.index] : b.wptr[m.index];
            region =
                static_cast<int16_t>(m.kind == IN_PTR    ? m.index
                                     : m.kind == OUT_PTR ? c.nt + m.index
                                                         : c.nt + static_cast<int64_t>(rec->outs.size()) + m.index);
            unsigned char* storage = maps[j][nmaps++];
            tensor_map(op, l, c.dev_type, storage, m, base);
            argp[j][a] = storage;
            break;
          }
        }
        value[j][a] = v;
        region_of[j][a] = region;
      }
      argv[j] = argp[j];
#ifdef USE_CUDA
      if (c.dev_type == 1) {
        const std::string e = cuda_launch(l, argv[j], stream);
        if (!e.empty()) raise_python("kernel", op.name + ": launch of " + l.kernel + " failed: " + e);
      }
#endif
    }
    if (c.dev_type == 0) run_host(slot, *rec, c, b, argv, region_of);
  }

  size_t k = 0, nres = 0;
  StableIValue res[kMaxOut];
  for (int a : op.rets)
    res[nres++] = reinterpret_cast<StableIValue>(a < 0 ? b.out[k++].release() : c.own[c.at[a]].release());
  for (size_t j = 0; j < nres; ++j) stack[j] = res[j];
}

template <int I>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  run(I, stack);
}
using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);
template <int... I>
Boxed pick(int slot, std::integer_sequence<int, I...>) {
  static const Boxed table[] = {boxed<I>...};
  return table[slot];
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// 0, or a negative number: -1 no slot, -2 no library, -3 torch refused the name.
// `arguments`: the arguments' names, separated by commas.
API int pkl_register(int slot, const char* name, const char* args, const char* arguments, const int* rets, int nrets,
                     int cuda) {
  if (slot < 0 || slot >= kSlots || strlen(args) > 64 || nrets > kMaxOut) return -1;
  std::vector<std::string> names(1);
  for (const char* c = arguments; *c; ++c) {
    if (*c == ',')
      names.emplace_back();
    else
      names.back() += *c;
  }
  g_ops[slot] = Op{name, std::move(names), args, std::vector<int>(rets, rets + nrets)};
  for (int k = 0; k <= cuda; ++k) {
    if (!g_lib[k] && aoti_torch_library_init_impl("pykern", k ? "CUDA" : "CPU", __FILE__, __LINE__, &g_lib[k]))
      return -2;
    if (torch_library_impl(g_lib[k], name, pick(slot, std::make_integer_sequence<int, kSlots>()), TORCH_ABI_VERSION))
      return -3;
  }
  return 0;
}

API void pkl_bump_epoch() { g_memo.bump(); }
API int64_t pkl_misses() { return g_memo.misses(); }
API int64_t pkl_memo_size() { return g_memo.size(); }
API int pkl_has_grad_check() { return g_requires_grad != nullptr; }
