// What the launcher's two files share: a call's arguments, decoded, and the parts of a call that only some calls need.
#pragma once
#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "memo.h"
#include "record.h"

constexpr int kSlots = 256;      // ops and their .out forms; each needs its own boxed entry, hence a template limit
constexpr int kMaxTensors = 48;  // tensors of one call, lists flattened
constexpr int kMaxScalars = 32;
constexpr int kMaxWords = 640;  // 48 tensors of 6 dimensions
constexpr int kMaxOut = 8;
constexpr int kMaxArgs = 64;     // arguments of one kernel
constexpr int kMaxLaunches = 8;  // kernels of one call
constexpr int kMaxMaps = 4;      // tensor maps of one kernel

#define CK(call)                                                                           \
  do {                                                                                     \
    if ((call) != 0) throw std::runtime_error(std::string("torch shim failed: ") + #call); \
  } while (0)

struct TensorFree {
  void operator()(AtenTensorOpaque* t) const { aoti_torch_delete_tensor_object(t); }
};
using Tensor = std::unique_ptr<AtenTensorOpaque, TensorFree>;

struct Op {
  std::string name;
  std::vector<std::string> names;  // of the arguments
  std::string args;       // one letter per argument: T tensor, O optional, L list, f/i/b/s scalar (capital: in the key)
  std::vector<int> rets;  // -1: a new output; k >= 0: argument k itself
};

extern Op g_ops[kSlots];
extern Memo g_memo;
extern bool (*g_requires_grad)(const void*);  // c10::TensorImpl::requires_grad, where the process has it

// Tensors and scalars of one call, decoded from the boxed stack.
struct Call {
  int nt = 0, ns = 0;
  size_t nk = 0;
  Tensor own[kMaxTensors];
  void* ptr[kMaxTensors];
  int64_t ndim[kMaxTensors];
  const int64_t* size[kMaxTensors];
  const int64_t* stride[kMaxTensors];
  int32_t dtype[kMaxTensors];
  double f[kMaxScalars];
  int64_t i[kMaxScalars];
  int at[64];  // first flat tensor of argument k
  int64_t key[kMaxWords];
  int dev_type = 0;
  int32_t dev = 0;
  bool have_dev = false;
  int grad = -1;     // first flat tensor that requires a gradient

  void put(int64_t v) {
    if (nk == kMaxWords) throw std::runtime_error("got more metadata than one call may have, allowed: 640 words");
    key[nk++] = v;
  }

  void tensor(StableIValue v) {
    auto t = reinterpret_cast<AtenTensorHandle>(v);
    if (nt == kMaxTensors) {
      aoti_torch_delete_tensor_object(t);
      throw std::runtime_error("got too many tensors, allowed: 48 in one call");
    }
    const int k = nt++;
    own[k].reset(t);
    ptr[k] = nullptr;
    ndim[k] = 0;
    // A required tensor given as None arrives as an undefined one, which has no device.
    int32_t type = 0, index;
    if (t && aoti_torch_get_device_type(t, &type)) throw std::runtime_error("got None, allowed: a tensor");
    if (!t) {
      put(-1);
      return;
    }
    int64_t d, *sz, *sr;
    const void* p;
    CK(aoti_torch_get_dtype(t, &dtype[k]));
    CK(aoti_torch_get_device_index(t, &index));
    CK(aoti_torch_get_dim(t, &d));
    CK(aoti_torch_get_sizes(t, &sz));
    CK(aoti_torch_get_strides(t, &sr));
    CK(torch_get_const_data_ptr(t, &p));
    ptr[k] = const_cast<void*>(p);
    ndim[k] = d;
    size[k] = sz;
    stride[k] = sr;
    if (!have_dev) {
      dev_type = type;
      dev = index;
      have_dev = true;
    }
    if (g_requires_grad && grad < 0 && g_requires_grad(*reinterpret_cast<void**>(t))) grad = k;
    const int64_t align = __builtin_ctzll(reinterpret_cast<uintptr_t>(p) | 256);
    put(dtype[k] | d << 16 | static_cast<int64_t>(type) << 24 | static_cast<int64_t>(index & 0xff) << 32 | align << 40);
    int64_t numel = p || type > 1 ? 0 : 1;  // of a null pointer on the CPU (0) or a CUDA device (1)
    for (int64_t j = 0; j < d; ++j) {
      put(sz[j]);
      numel *= sz[j];
    }
    for (int64_t j = 0; j < d; ++j) put(sr[j]);
    // A storage of 0 bytes (resize_(0), as sharded training does) keeps the tensor's sizes.
    if (numel)
      throw std::runtime_error("got a tensor without memory (its storage is empty), allowed: one with its data");
  }

  void scalar(double fv, int64_t iv) {
    if (ns == kMaxScalars) throw std::runtime_error("too many scalars in one call");
    f[ns] = fv;
    i[ns++] = iv;
  }

  // Takes ownership of argument `v`; on an exception whatever was taken is released by ~Call.
  void argument(char kind, StableIValue v) {
    switch (kind) {
      case 'T':
        tensor(v);
        break;
      case 'O': {
        auto* box = reinterpret_cast<StableIValue*>(v);
        StableIValue inner = 0;
        if (box) {
          inner = *box;
          delete box;
        }
        tensor(inner);
        break;
      }
      case 'L': {
        struct List {
          StableListHandle h;
          ~List() { torch_delete_list(h); }
        } list{reinterpret_cast<StableListHandle>(v)};
        size_t n = 0;
        CK(torch_list_size(list.h, &n));
        put(static_cast<int64_t>(n));
        for (size_t j = 0; j < n; ++j) {
          StableIValue item = 0;
          CK(torch_list_get_item(list.h, j, &item));
          tensor(item);
        }
        break;
      }
      case 'f':
      case 'F': {
        double d;
        memcpy(&d, &v, 8);
        if (kind == 'F') put(static_cast<int64_t>(v));
        const bool fits = d > -9.2e18 && d < 9.2e18;
        scalar(d, fits ? static_cast<int64_t>(d) : 0);
        break;
      }
      case 'i':
      case 'I':
        if (kind == 'I') put(static_cast<int64_t>(v));
        scalar(static_cast<double>(static_cast<int64_t>(v)), static_cast<int64_t>(v));
        break;
      case 'b':
      case 'B': {
        const int64_t b = static_cast<int64_t>(v & 0xff);
        if (kind == 'B') put(b);
        scalar(static_cast<double>(b), b);
        break;
      }
      case 'S': {
        struct Str {
          StringHandle h;
          ~Str() { torch_delete_string(h); }
        } s{reinterpret_cast<StringHandle>(v)};
        size_t n = 0;
        const char* c = "";
        CK(torch_string_length(s.h, &n));
        CK(torch_string_c_str(s.h, &c));
        if (n > 256)
          throw std::runtime_error("got a text of " + std::to_string(n) + " bytes, allowed: one of its few words");
        put(static_cast<int64_t>(n));
        for (size_t j = 0; j < n; j += 8) {
          int64_t w = 0;
          memcpy(&w, c + j, n - j < 8 ? n - j : 8);
          put(w);
        }
        scalar(0, 0);
        break;
      }
      default:
        throw std::runtime_error(std::string("unknown argument kind ") + kind);
    }
  }
};

struct Buffers {
  Tensor out[kMaxOut], ws[kMaxOut];
  void* optr[kMaxOut];
  void* wptr[kMaxOut];
};

// ---- plan.cpp: what a call needs once, or on the CPU, or when it fails

[[noreturn]] void raise_python(const char* kind, const std::string& message);

// Asks Python for the plan of a call that has none yet, and keeps it.
const Record* plan(int slot, uint64_t h, const Call& c);

// Outputs that overlap an input would be read after they were written: refused, unless they are the same view and the
// op says that is fine.
void check_overlaps(const Op& op, const Record& rec, const Call& c);

// Counters are zero at rest: the kernel that uses them resets them. One set per device and stream, and one per captured
// graph (a graph's replays may overlap with eager calls), zeroed once; in a graph by its own first node.
void* counters(int dev_type, int32_t dev, void* stream, int index, int64_t nbytes);

// Writes a tensor map of the call's device to 128 bytes of storage; raises where it cannot.
void tensor_map(const Op& op, const Launch& l, int dev_type, void* storage, const MapSpec& m, void* base);

// Launches a record on the CPU. region_of: each argument's tensor, or -1.
void run_host(int slot, const Record& rec, const Call& c, const Buffers& b, void*** argv,
              const int16_t (*region_of)[kMaxArgs]);

// Part of the key of CPU calls: architecture and check mode, of the calling thread.
int64_t host_word();
