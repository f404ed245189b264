// Every tensor of a checked run lives in its own mapping, far from the others, so that a pointer that runs
// past one tensor never lands in the next. Tensors that share storage stay together; bytes between the
// elements of a view belong to nobody.
#include <sys/mman.h>

#include <algorithm>

#include "host/checker.h"

namespace pk::host {
namespace {

constexpr int64_t kGap = 64 * static_cast<int64_t>(kMapPage);
constexpr int64_t kPage = 4096;

bool role_writes(int role) {
  return role == PK_ROLE_OUTPUT || role == PK_ROLE_MUTATED || role == PK_ROLE_WORKSPACE;
}
// Whether the tensor means something before the launch.
bool role_holds(int role) { return role != PK_ROLE_OUTPUT && role != PK_ROLE_WORKSPACE; }

bool contiguous(const PkRegion& r) {
  if (r.ndim == 0) return true;
  int64_t elements = 1;
  for (int i = 0; i < r.ndim; ++i) {
    if (r.size[i] > 1 && r.stride[i] <= 0) return false;
    elements *= r.size[i];
  }
  return elements * r.elem_bytes == r.bytes;
}

// Calls f(first byte) for every element.
template <class F>
void each_element(const PkRegion& r, F f) {
  int64_t index[16] = {};
  if (r.ndim > 16) return;
  for (;;) {
    int64_t at = 0;
    for (int i = 0; i < r.ndim; ++i) at += index[i] * r.stride[i];
    f(at * r.elem_bytes);
    int i = r.ndim - 1;
    for (; i >= 0; --i) {
      if (r.stride[i] != 0 && ++index[i] < r.size[i]) break;
      index[i] = 0;
    }
    if (i < 0) return;
  }
}

bool same_place(const Tensor& t, const PkRegion& r) {
  const PkRegion& o = *t.region;
  if (o.base != r.base || o.bytes != r.bytes || o.ndim != r.ndim || o.elem_bytes != r.elem_bytes)
    return false;
  return std::equal(o.size, o.size + (o.size ? o.ndim : 0), r.size) &&
         std::equal(o.stride, o.stride + (o.stride ? o.ndim : 0), r.stride);
}

// The tensors of all launches, each once; returns their roles, [launch][tensor], -1: no argument of it.
std::vector<std::vector<int>> collect_tensors(Check* c) {
  std::vector<std::vector<int>> roles;
  for (const PkLaunch* l : c->launches) {
    auto& here = roles.emplace_back();
    for (int i = 0; i < l->nregions; ++i) {
      const PkRegion& r = l->regions[i];
      if (r.base == nullptr || r.bytes <= 0) continue;
      auto t = std::find_if(c->tensors.begin(), c->tensors.end(), [&](const Tensor& t) { return same_place(t, r); });
      if (t == c->tensors.end()) {
        c->tensors.push_back(Tensor{r.name ? r.name : "?", &r, static_cast<char*>(r.base), nullptr, r.bytes,
                                    std::max(r.elem_bytes, 1)});
        t = c->tensors.end() - 1;
      }
      const auto index = static_cast<size_t>(t - c->tensors.begin());
      if (here.size() <= index) here.resize(index + 1, -1);
      // One tensor in two roles (in place): it may be written, and it holds something.
      here[index] = here[index] < 0 || here[index] == r.role ? r.role : PK_ROLE_MUTATED;
    }
  }
  for (auto& r : roles) r.resize(c->tensors.size(), -1);
  return roles;
}

// Groups of overlapping extents, in address order.
void group_tensors(Check* c) {
  std::vector<int> order(c->tensors.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::sort(order.begin(), order.end(), [c](int a, int b) {
    return c->tensors[static_cast<size_t>(a)].original < c->tensors[static_cast<size_t>(b)].original;
  });
  for (int i : order) {
    const Tensor& t = c->tensors[static_cast<size_t>(i)];
    if (c->groups.empty() || t.original >= c->groups.back().original + c->groups.back().bytes) {
      c->groups.push_back(Group{});
      c->groups.back().original = t.original;
    }
    Group& g = c->groups.back();
    g.tensors.push_back(i);
    g.bytes = std::max<int64_t>(g.bytes, t.original + t.bytes - g.original);
  }
}

// Copies the groups to addresses of their own: gap, group, gap, group, ..., gap. A group keeps its place within the
// page. Returns what went wrong.
std::string map_groups(Check* c) {
  int64_t total = kGap;
  std::vector<int64_t> offsets;
  const auto round = [](int64_t n) {
    return (n + int64_t{kMapPage} - 1) / int64_t{kMapPage} * int64_t{kMapPage};
  };
  for (const Group& g : c->groups) {
    offsets.push_back(total + static_cast<int64_t>(reinterpret_cast<uintptr_t>(g.original) % kPage));
    total += round(g.bytes + kPage) + std::max(kGap, round(g.bytes));
  }
  c->area_bytes = static_cast<size_t>(total);
  void* p = mmap(nullptr, c->area_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    return "no address space for " + std::to_string(c->area_bytes) + " bytes of guarded tensors";
  c->area = static_cast<char*>(p);
  c->page_group.assign(c->area_bytes / kMapPage + 1, -1);
  for (size_t i = 0; i < c->groups.size(); ++i) {
    Group& g = c->groups[i];
    g.mapped = c->area + offsets[i];
    char* page = c->area + offsets[i] / kPage * kPage;
    const size_t length = static_cast<size_t>(g.mapped + g.bytes - page);
    if (mprotect(page, length, PROT_READ | PROT_WRITE) != 0)
      return "no memory for guarded copies of the tensors";
    memcpy(g.mapped, g.original, static_cast<size_t>(g.bytes));
    const auto first = static_cast<size_t>(offsets[i]) / kMapPage;
    const auto last = static_cast<size_t>(offsets[i] + g.bytes - 1) / kMapPage;
    for (size_t k = first; k <= last; ++k) c->page_group[k] = static_cast<int>(i);
    for (int t : g.tensors) {
      Tensor& tensor = c->tensors[static_cast<size_t>(t)];
      tensor.mapped = g.mapped + (tensor.original - g.original);
    }
  }
  return "";
}

// A gap belongs to the group it is nearest to.
void assign_gaps(std::vector<int>* page_group) {
  const size_t pages = page_group->size();
  const std::vector<int> used = *page_group;
  std::vector<size_t> left(pages, pages);  // distance to the nearest page in use
  int group = -1;
  for (size_t k = 0, distance = pages; k < pages; ++k) {
    if (used[k] >= 0) group = used[k];
    distance = used[k] >= 0 ? 0 : group >= 0 ? distance + 1 : pages;
    left[k] = distance;
    (*page_group)[k] = group;
  }
  group = -1;
  for (size_t k = pages, distance = pages; k-- > 0;) {
    if (used[k] >= 0) group = used[k];
    distance = used[k] >= 0 ? 0 : group >= 0 ? distance + 1 : pages;
    if (distance < left[k]) (*page_group)[k] = group;
  }
}

// Who owns which byte.
void find_owners(Check* c) {
  std::map<std::vector<int>, uint16_t> sets;
  auto set_of = [&](const std::vector<int>& members) {
    auto [at, fresh] = sets.try_emplace(members, static_cast<uint16_t>(c->owners.size()));
    if (fresh) {
      OwnerSet s;
      s.tensors = members;
      c->owners.push_back(s);
    }
    return at->second;
  };
  for (Group& g : c->groups) {
    if (g.tensors.size() == 1 && contiguous(*c->tensors[static_cast<size_t>(g.tensors[0])].region)) {
      g.simple = set_of(g.tensors);
      continue;
    }
    g.owner.assign(static_cast<size_t>(g.bytes), 0);
    for (int t : g.tensors) {
      const Tensor& tensor = c->tensors[static_cast<size_t>(t)];
      const int64_t base = tensor.original - g.original;
      auto mark = [&](int64_t first, int64_t bytes) {
        for (int64_t k = first; k < first + bytes && k < g.bytes; ++k) {
          uint16_t& owner = g.owner[static_cast<size_t>(k)];
          std::vector<int> members = c->owners[owner].tensors;
          if (!members.empty() && members.back() == t) continue;
          members.push_back(t);
          owner = set_of(members);
        }
      };
      if (contiguous(*tensor.region)) {
        mark(base, tensor.bytes);
      } else {
        each_element(*tensor.region, [&](int64_t at) { mark(base + at, tensor.elem_bytes); });
      }
    }
  }
}

// Whether some launch says of tensor t that it does hold something (a counter that resets itself).
bool said_to_hold(const Check* c, const Tensor& t) {
  for (const PkLaunch* l : c->launches) {
    for (int i = 0; i < l->nregions; ++i) {
      const PkRegion& r = l->regions[i];
      if (r.base && (r.flags & PK_REGION_INITIALISED) && same_place(t, r)) return true;
    }
  }
  return false;
}

// What each owner set is to each launch, and whether it holds something before the first.
void settle_roles(Check* c, const std::vector<std::vector<int>>& tensor_role) {
  c->roles.assign(c->launches.size(), std::vector<int>(c->owners.size(), -1));
  for (size_t s = 1; s < c->owners.size(); ++s) {
    OwnerSet& set = c->owners[s];
    bool decided = false;
    for (size_t l = 0; l < c->launches.size(); ++l) {
      int role = -1;
      for (int t : set.tensors) {
        const int r = tensor_role[l][static_cast<size_t>(t)];
        if (r >= 0) role = role < 0 || role == r ? r : PK_ROLE_MUTATED;
      }
      c->roles[l][s] = role;
      if (role < 0) continue;
      set.writable = set.writable || role_writes(role);
      if (!decided) set.initialised = role_holds(role);  // the first launch that knows it decides
      decided = true;
    }
    for (int t : set.tensors) {
      if (said_to_hold(c, c->tensors[static_cast<size_t>(t)])) set.initialised = true;
    }
  }
}

// Cells for the groups that somebody may write. Returns what went wrong.
std::string shadow_groups(Check* c) {
  for (Group& g : c->groups) {
    for (int t : g.tensors) {
      for (const OwnerSet& s : c->owners) {
        if (s.writable && std::find(s.tensors.begin(), s.tensors.end(), t) != s.tensors.end()) g.shadowed = true;
      }
    }
    if (!g.shadowed) continue;
    g.cell_bytes = (static_cast<size_t>(g.bytes) + kPage) / 4 * sizeof(Cell);
    void* cells = mmap(nullptr, g.cell_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cells == MAP_FAILED) return "no memory for the checker's shadow of the tensors";
    g.cells = static_cast<Cell*>(cells);
  }
  return "";
}

}  // namespace

std::string Check::open(const std::vector<const PkLaunch*>& all, const PkOptions& o) {
  options = o;
  launches = all;
  const auto tensor_role = collect_tensors(this);
  group_tensors(this);
  std::string error = map_groups(this);
  if (!error.empty()) return error;
  assign_gaps(&page_group);
  find_owners(this);
  settle_roles(this, tensor_role);
  grid_era.assign(launches.size(), 0);
  return shadow_groups(this);
}

void* Check::relocate(const void* p) const {
  const char* at = static_cast<const char*>(p);
  const Group* touching = nullptr;
  for (const Group& g : groups) {
    if (at >= g.original && at < g.original + g.bytes) return g.mapped + (at - g.original);
    if (at == g.original + g.bytes) touching = &g;  // one past the end is a legal pointer
  }
  return touching ? touching->mapped + touching->bytes : const_cast<void*>(p);
}

void Check::close(bool copy_back) {
  for (Group& g : groups) {
    if (copy_back && g.shadowed) {
      if (g.owner.empty()) {
        memcpy(g.original, g.mapped, static_cast<size_t>(g.bytes));
      } else {
        for (int64_t i = 0; i < g.bytes; ++i) {
          if (owners[g.owner[static_cast<size_t>(i)]].writable) g.original[i] = g.mapped[i];
        }
      }
    }
    if (g.cells) munmap(g.cells, g.cell_bytes);
  }
  if (area) munmap(area, area_bytes);
  area = nullptr;
}

Group* Check::group_at(uintptr_t address) {
  const size_t offset = address - reinterpret_cast<uintptr_t>(area);
  if (area == nullptr || offset >= area_bytes) return nullptr;
  const int g = page_group[offset / kMapPage];
  return g < 0 ? nullptr : &groups[static_cast<size_t>(g)];
}

}  // namespace pk::host
