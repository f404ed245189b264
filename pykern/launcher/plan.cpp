// The parts of a call that only some calls need: planning it, checking what may overlap, counters, tensor maps, running
// on the CPU, raising. A file of its own, so that the two compile side by side.
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "call.h"
#include "host/abi.h"
#include "python.h"
#ifdef USE_CUDA
#include "cuda_launch.h"
#endif

bool (*g_requires_grad)(const void*) = nullptr;

namespace {

using RunSequence = int (*)(const PkLaunch*, const PkEntry*, void***, int);

PyObject* g_planner = nullptr;     // (slot, key bytes) -> record bytes
PyObject* g_raise = nullptr;       // (kind, message) raises
PyObject* g_on_checked = nullptr;  // (slot, failed) after every checked host run; raises on findings
RunSequence g_run_sequence = nullptr;
// Writes the host backend's 128-byte tensor map (dims and box in elements, contiguous axis first).
int (*g_host_map)(void* map, void* base, int elem_bytes, const uint64_t* dims, uint64_t row_bytes, const uint32_t* box,
                  int swizzle) = nullptr;
const char* (*g_host_error)() = nullptr;

thread_local PkOptions t_host{0, 0, 0, 0, 0, 4};
thread_local int64_t t_host_word = 0;

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

std::unique_ptr<Record> decode(const int64_t* p, size_t n) {
  const int64_t* end = p + n;
  auto r = std::make_unique<Record>();
  auto get = [&] {
    if (p == end) throw std::runtime_error("launch record too short");
    return *p++;
  };
  auto text = [&] {
    const auto len = static_cast<size_t>(get());
    std::string s(len, '\0');
    for (size_t i = 0; i < len; i += 8) {
      const int64_t w = get();
      memcpy(&s[i], &w, len - i < 8 ? len - i : 8);
    }
    return s;
  };
  if (get() != kMagic) throw std::runtime_error("launch record of another version");
  for (auto k = get(); k--;) {
    Out o;
    o.dtype = static_cast<int32_t>(get());
    const auto d = get();
    for (auto i = d; i--;) o.size.push_back(get());
    for (auto i = d; i--;) o.stride.push_back(get());
    r->outs.push_back(std::move(o));
  }
  for (auto k = get(); k--;) {
    const int64_t bytes = get();
    r->ws.push_back({bytes, get() != 0});
  }
  for (auto k = get(); k--;) r->names.push_back(text());
  for (auto k = get(); k--;) r->roles.push_back(static_cast<int32_t>(get()));
  for (auto k = get(); k--;) {
    const int a = static_cast<int>(get()), b = static_cast<int>(get());
    r->overlaps.push_back({a, b, get() != 0});
  }
  for (auto k = get(); k--;) {
    MapSpec m;
    m.kind = static_cast<ArgKind>(get());
    for (int64_t* f :
         {&m.index, &m.dtype, &m.elem_bytes, &m.rows, &m.cols, &m.row_bytes, &m.box_rows, &m.box_cols, &m.swizzle})
      *f = get();
    r->maps.push_back(m);
  }
  for (auto k = get(); k--;) {
    Launch l;
    l.fn = reinterpret_cast<const void*>(get());
    l.kernel = text();
    for (uint32_t* a : {l.grid, l.block, l.cluster})
      for (int i = 0; i < 3; ++i) a[i] = static_cast<uint32_t>(get());
    l.smem = static_cast<uint64_t>(get());
    l.flags = get();
    for (auto a = get(); a--;) {
      const auto kind = static_cast<ArgKind>(get());
      l.args.push_back({kind, get()});
    }
    r->launches.push_back(std::move(l));
  }
  if (p != end) throw std::runtime_error("launch record too long");
  if (r->outs.size() > 8 || r->ws.size() > 8 || r->launches.size() > 8)
    throw std::runtime_error("launch record too big");
  for (const Launch& l : r->launches)
    if (l.args.size() > 64) throw std::runtime_error(l.kernel + ": more than 64 kernel arguments");
  return r;
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

}  // namespace

[[noreturn]] void raise_python(const char* kind, const std::string& message) {
  Gil gil;
  PyRef k(PyUnicode_FromString(kind)), m(PyUnicode_FromString(message.c_str()));
  PyRef r(PyObject_CallFunctionObjArgs(g_raise, k.p, m.p, nullptr));
  throw_python();
}

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

void tensor_map(const Op& op, const Launch& l, int dev_type, void* storage, const MapSpec& m, void* base) {
  std::string error;
  if (dev_type == 0) {
    if (const char* e = host_map(storage, m, base)) error = e;
  } else {
#ifdef USE_CUDA
    error = cuda_map(storage, m, base);
#endif
  }
  if (!error.empty()) raise_python("kernel", op.name + ": tensor map of " + l.kernel + ": " + error);
}

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

int64_t host_word() { return t_host_word; }

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
