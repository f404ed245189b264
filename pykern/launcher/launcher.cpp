// The launcher: the C++ implementation of every pykern op, and the two microseconds between torch's dispatcher and a
// kernel. It has no per-op code: Python registers an op into a slot with a string that describes its arguments; a call
// turns its arguments' metadata into a key of int64 words, finds the launch record for that key (or asks Python to plan
// one, once) and launches. Uses only the C shims of torch's stable ABI and a few functions of CPython's stable ABI.
#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/version.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host/abi.h"
#include "memo.h"
#include "python.h"
#include "record.h"
#ifdef USE_CUDA
#include "cuda_launch.h"
#endif

namespace {

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

using RunSequence = int (*)(const PkLaunch*, const PkEntry*, void***, int);

Op g_ops[kSlots];
Memo g_memo;
PyObject* g_planner = nullptr;     // (slot, key bytes) -> record bytes
PyObject* g_raise = nullptr;       // (kind, message) raises
PyObject* g_on_checked = nullptr;  // (slot, failed) after every checked host run; raises on findings
RunSequence g_run_sequence = nullptr;
// Writes the host backend's 128-byte tensor map (dims and box in elements, contiguous axis first).
int (*g_host_map)(void* map, void* base, int elem_bytes, const uint64_t* dims, uint64_t row_bytes, const uint32_t* box,
                  int swizzle) = nullptr;
const char* (*g_host_error)() = nullptr;
TorchLibraryHandle g_lib[2];
bool (*g_requires_grad)(const void*) = nullptr;  // c10::TensorImpl::requires_grad, where the process has it

thread_local PkOptions t_host{0, 0, 0, 0, 0, 4};
thread_local int64_t t_host_word = 0;  // part of the key of CPU calls: arch and check mode

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
  bool grad = false;

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
    if (g_requires_grad && !grad) grad = g_requires_grad(*reinterpret_cast<void**>(t));
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

[[noreturn]] void raise_python(const char* kind, const std::string& message) {
  Gil gil;
  PyRef k(PyUnicode_FromString(kind)), m(PyUnicode_FromString(message.c_str()));
  PyRef r(PyObject_CallFunctionObjArgs(g_raise, k.p, m.p, nullptr));
  throw_python();
}

int64_t itemsize(int32_t dtype) {
  static const int64_t bytes[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 1, 1, 4, 2};
  return dtype >= 0 && dtype < 16 ? bytes[dtype] : 1;  // the 8-bit floats come after
}

// Bytes from element 0 to the end of the last element.
int64_t extent(int64_t ndim, const int64_t* size, const int64_t* stride, int64_t item) {
  int64_t last = 0;
  for (int64_t d = 0; d < ndim; ++d) {
    if (size[d] == 0) return 0;
    last += (size[d] - 1) * stride[d];
  }
  return (last + 1) * item;
}

// Outputs that overlap an input would be read after they were written: refused, unless they are the same view and the
// op says that is fine.
void check_overlaps(const Op& op, const Record& rec, const Call& c) {
  for (const Overlap& o : rec.overlaps) {
    const int a = o.out, b = o.other;
    if (!c.ptr[a] || !c.ptr[b]) continue;
    const auto a0 = reinterpret_cast<uintptr_t>(c.ptr[a]), b0 = reinterpret_cast<uintptr_t>(c.ptr[b]);
    const int64_t an = extent(c.ndim[a], c.size[a], c.stride[a], itemsize(c.dtype[a]));
    const int64_t bn = extent(c.ndim[b], c.size[b], c.stride[b], itemsize(c.dtype[b]));
    if (!an || !bn || a0 + an <= b0 || b0 + bn <= a0) continue;
    if (o.same_ok && a0 == b0 && c.dtype[a] == c.dtype[b] && c.ndim[a] == c.ndim[b] &&
        !memcmp(c.size[a], c.size[b], 8 * c.ndim[a]) && !memcmp(c.stride[a], c.stride[b], 8 * c.ndim[a]))
      continue;
    raise_python("argument", op.name + ": " + rec.names[a] + " overlaps " + rec.names[b] +
                                 " in memory, allowed: tensors that do not overlap");
  }
}

const Record* plan(int slot, uint64_t h, const Call& c) {
  std::unique_ptr<Record> rec;
  {
    Gil gil;  // never while the memo's lock is held
    PyRef s(PyLong_FromLong(slot));
    PyRef k(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(c.key), static_cast<ssize_t>(c.nk * 8)));
    PyRef r(s.p && k.p ? PyObject_CallFunctionObjArgs(g_planner, s.p, k.p, nullptr) : nullptr);
    char* data;
    ssize_t n;
    if (!r.p || PyBytes_AsStringAndSize(r.p, &data, &n)) throw_python();
    rec = decode(reinterpret_cast<const int64_t*>(data), static_cast<size_t>(n) / 8);
  }
#ifdef USE_CUDA
  if (c.dev_type == 1) {
    for (Launch& l : rec->launches) {
      const std::string e = cuda_prepare(l);
      if (!e.empty()) raise_python("kernel", g_ops[slot].name + ": " + l.kernel + " cannot be prepared: " + e);
    }
  }
#endif
  return g_memo.publish(h, c.key, c.nk, std::move(rec));
}

// Null on success, else what is wrong with the descriptor.
const char* host_map(void* storage, const MapSpec& m, void* base) {
  const uint64_t dims[2] = {static_cast<uint64_t>(m.cols), static_cast<uint64_t>(m.rows)};
  const uint32_t box[2] = {static_cast<uint32_t>(m.box_cols), static_cast<uint32_t>(m.box_rows)};
  const int swizzle = m.swizzle == 128 ? 3 : m.swizzle == 64 ? 2 : m.swizzle == 32 ? 1 : 0;
  const int bad =
      g_host_map(storage, base, static_cast<int>(m.elem_bytes), dims, static_cast<uint64_t>(m.row_bytes), box, swizzle);
  return bad ? g_host_error() : nullptr;
}

// Counters are zero at rest: the kernel that uses them resets them. One set per device and stream, and one per captured
// graph (a graph's replays may overlap with eager calls), zeroed once; in a graph by its own first node.
void* counters(int dev_type, int32_t dev, void* stream, int index, int64_t nbytes) {
  unsigned long long graph = 0;
#ifdef USE_CUDA
  if (dev_type == 1) graph = capture_id(stream);
#endif
  using Key = std::tuple<int, int32_t, void*, unsigned long long, int, int64_t>;
  static std::mutex lock;
  static auto* all = new std::map<Key, Tensor>();  // never destroyed: the CUDA context may be gone at exit
  static thread_local char host_thread;            // CPU calls on different threads run at the same time
  if (dev_type == 0) stream = &host_thread;
  const int64_t size = (nbytes + 4095) / 4096 * 4096;
  std::lock_guard<std::mutex> guard(lock);
  Tensor& t = (*all)[Key{dev_type, dev, stream, graph, index, size}];
  void* p;
  if (!t) {
    AtenTensorHandle h;
    CK(aoti_torch_empty_strided(1, &size, &kOne, aoti_torch_dtype_uint8(), dev_type, dev, &h));
    t.reset(h);
    CK(torch_get_mutable_data_ptr(h, &p));
    if (dev_type == 0) memset(p, 0, static_cast<size_t>(size));
#ifdef USE_CUDA
    if (dev_type == 1) cudaMemsetAsync(p, 0, static_cast<size_t>(size), static_cast<cudaStream_t>(stream));
#endif
    return p;
  }
  CK(torch_get_mutable_data_ptr(t.get(), &p));
  return p;
}

struct Buffers {
  Tensor out[kMaxOut], ws[kMaxOut];
  void* optr[kMaxOut];
  void* wptr[kMaxOut];
};

void run_host(int slot, const Record& rec, const Call& c, const Buffers& b, void*** argv,
              const int16_t (*region_of)[kMaxArgs]) {
  PkLaunch launch[kMaxLaunches];
  PkEntry entry[kMaxLaunches];
  std::vector<PkRegion> regions;
  std::vector<int32_t> arg_region;
  const bool check = t_host.check != 0;
  if (check) {  // describe every tensor, so that the checker can fence it and name it
    for (int k = 0; k < c.nt; ++k) {
      const int64_t item = c.ptr[k] ? itemsize(c.dtype[k]) : 1;
      regions.push_back({c.ptr[k], c.ptr[k] ? extent(c.ndim[k], c.size[k], c.stride[k], item) : 0, rec.names[k].c_str(),
                         rec.roles[k], static_cast<int32_t>(item), static_cast<int32_t>(c.ndim[k]), c.size[k],
                         c.stride[k], 0});
    }
    for (size_t k = 0; k < rec.outs.size(); ++k) {
      const Out& o = rec.outs[k];
      const int64_t item = itemsize(o.dtype), d = static_cast<int64_t>(o.size.size());
      regions.push_back({b.optr[k], extent(d, o.size.data(), o.stride.data(), item), rec.names[c.nt + k].c_str(),
                         PK_ROLE_OUTPUT, static_cast<int32_t>(item), static_cast<int32_t>(d), o.size.data(),
                         o.stride.data(), 0});
    }
    for (size_t k = 0; k < rec.ws.size(); ++k) {
      const WorkspaceSpec& w = rec.ws[k];
      regions.push_back({b.wptr[k], w.nbytes, w.counter ? "counters" : "workspace", PK_ROLE_WORKSPACE, 1, 1, &w.nbytes,
                         &kOne, w.counter ? PK_REGION_INITIALISED : 0});
    }
  }
  const size_t n = rec.launches.size();
  arg_region.reserve(n * kMaxArgs);
  for (size_t j = 0; j < n; ++j) {
    const Launch& l = rec.launches[j];
    PkLaunch& p = launch[j];
    memset(&p, 0, sizeof p);
    for (int a = 0; a < 3; ++a) {
      p.grid[a] = l.grid[a];
      p.block[a] = l.block[a];
      p.cluster[a] = l.cluster[a];
    }
    p.flags = static_cast<uint32_t>(l.flags);
    p.smem = l.smem;
    p.kernel = l.kernel.c_str();
    p.nargs = static_cast<int32_t>(l.args.size());
    p.options = &t_host;
    if (check) {
      p.nregions = static_cast<int32_t>(regions.size());
      p.regions = regions.data();
      p.arg_region = arg_region.data() + arg_region.size();
      for (size_t a = 0; a < l.args.size(); ++a) arg_region.push_back(region_of[j][a]);
    }
    entry[j] = reinterpret_cast<PkEntry>(const_cast<void*>(l.fn));
  }
  const int failed = g_run_sequence(launch, entry, argv, static_cast<int>(n));
  if (check) {
    Gil gil;
    PyRef s(PyLong_FromLong(slot)), bad(PyLong_FromLong(failed));
    PyRef r(PyObject_CallFunctionObjArgs(g_on_checked, s.p, bad.p, nullptr));
    if (!r.p) throw_python();
  }
  if (failed) raise_python("kernel", g_ops[slot].name + ": " + (g_host_error ? g_host_error() : "host kernel failed"));
}

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
  if (c.grad && aoti_torch_grad_mode_is_enabled()) raise_python("gradient", op.name);
  c.put(c.dev_type == 0 ? t_host_word : 0);
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
            if (c.dev_type == 0) {
              const char* e = host_map(storage, m, base);
              if (e) raise_python("kernel", op.name + ": tensor map of " + l.kernel + ": " + e);
            } else {
#ifdef USE_CUDA
              const std::string e = cuda_map(storage, m, base);
              if (!e.empty()) raise_python("kernel", op.name + ": tensor map of " + l.kernel + ": " + e);
#endif
            }
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

// Called once from Python with the GIL held (ctypes.PyDLL).
API void pkl_init(PyObject* planner, PyObject* raiser, PyObject* on_checked, void* run_sequence, void* host_error,
                  void* host_map) {
  Py_IncRef(planner);
  Py_IncRef(raiser);
  Py_IncRef(on_checked);
  g_planner = planner;
  g_raise = raiser;
  g_on_checked = on_checked;
  g_run_sequence = reinterpret_cast<RunSequence>(run_sequence);
  g_host_error = reinterpret_cast<const char* (*)()>(host_error);
  g_host_map = reinterpret_cast<decltype(g_host_map)>(host_map);
  // The stable shims cannot read requires_grad; libc10 has exported this member since torch 1.x. Without it a gradient
  // asked of an op is refused only by torch's own warning.
  if (void* c10 = dlopen("libc10.so", RTLD_NOLOAD | RTLD_LAZY))
    g_requires_grad = reinterpret_cast<bool (*)(const void*)>(dlsym(c10, "_ZNK3c1010TensorImpl13requires_gradEv"));
}

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

// Options of host launches made by the calling thread; `word` tells plans made under different options apart.
API void pkl_host_options(int check, int trace, int threads, uint64_t seed, int async_order, int sms, int64_t word) {
  t_host = PkOptions{};
  t_host.check = check || trace;  // the traffic table is the checker's; Python raises only on what it was asked to
  t_host.trace = trace;
  t_host.threads = threads;
  t_host.seed = seed;
  t_host.async_order = async_order;
  t_host.sms = sms;
  t_host_word = word;
}

API void pkl_bump_epoch() { g_memo.bump(); }
API int64_t pkl_misses() { return g_memo.misses(); }
API int64_t pkl_memo_size() { return g_memo.size(); }
API int pkl_has_grad_check() { return g_requires_grad != nullptr; }
