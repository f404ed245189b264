// Launch records: what one plan means to the launcher. Python packs a plan into int64 words (pykern/launcher/record.py
// is the writer and must agree), decoded once when the plan is made.
#pragma once
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#ifdef USE_CUDA
#include <cuda_runtime_api.h>
#endif

constexpr int64_t kMagic = 0x706b02;
inline const int64_t kOne = 1;

enum ArgKind : int64_t { IN_PTR, OUT_PTR, WS_PTR, I32, I64, F32, RUN_F32, RUN_I32, RUN_I64, MAP };

struct Arg {
  ArgKind kind;
  int64_t v;
};
struct Launch {
  const void* fn;          // the kernel, as the runtime knows it
  void* handle = nullptr;  // and as the driver does, on the plan's device
  std::string kernel;
  uint32_t grid[3], block[3], cluster[3];
  uint64_t smem;
  int64_t flags;  // PK_LAUNCH_*
  std::vector<Arg> args;
};
struct Out {
  int32_t dtype;
  std::vector<int64_t> size, stride;
};
struct WorkspaceSpec {
  int64_t nbytes;
  bool counter;
};
struct MapSpec {
  ArgKind kind;  // IN_PTR, OUT_PTR or WS_PTR
  int64_t index, dtype, elem_bytes, rows, cols, row_bytes, box_rows, box_cols, swizzle;
};
struct Overlap {
  int out, other;
  bool same_ok;
};
struct Record {
  std::vector<Out> outs;
  std::vector<WorkspaceSpec> ws;
  std::vector<std::string> names;  // flat inputs, then outputs
  std::vector<int32_t> roles;      // of the flat inputs
  std::vector<Overlap> overlaps;
  std::vector<MapSpec> maps;
  std::vector<Launch> launches;
};

inline std::unique_ptr<Record> decode(const int64_t* p, size_t n) {
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
