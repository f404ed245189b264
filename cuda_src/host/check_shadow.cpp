// One access: is it within a tensor or the block's shared memory, aligned, allowed by the tensor's role and
// the rules of dependent launches, of bytes that hold something, and ordered against every other access to
// those bytes?
#include <algorithm>

#include "host/checker.h"

namespace pk::host {

// ---- Knowledge
Knowledge::Entry& Knowledge::at(uint32_t block, uint32_t era) {
  for (Entry& e : entries) {
    if (e.block != block) continue;
    if (e.era < era) {
      e.era = era;
      e.clock.clear();
    }
    return e;
  }
  entries.push_back(Entry{block, era, {}});
  return entries.back();
}

void Knowledge::set(uint32_t block, uint32_t era, uint32_t index, uint32_t clock) {
  Entry& e = at(block, era);
  if (e.era != era) return;  // knows more already
  if (e.clock.size() <= index) e.clock.resize(index + 1, 0);
  e.clock[index] = std::max(e.clock[index], clock);
}

void Knowledge::join(const Knowledge& other) {
  for (const Entry& o : other.entries) {
    Entry& e = at(o.block, o.era);
    if (e.era != o.era) continue;
    if (e.clock.size() < o.clock.size()) e.clock.resize(o.clock.size(), 0);
    for (size_t i = 0; i < o.clock.size(); ++i) e.clock[i] = std::max(e.clock[i], o.clock[i]);
  }
}

bool Knowledge::covers(uint32_t block, uint32_t era, uint32_t index, uint32_t clock) const {
  for (const Entry& e : entries) {
    if (e.block != block) continue;
    return era < e.era || (era == e.era && index < e.clock.size() && e.clock[index] >= clock);
  }
  return false;
}

void release_into(Knowledge* to, const Fiber* f) {
  BlockCheck* b = check_of(f->block);
  ThreadCheck& t = check_of(f);
  to->join(t.know);
  to->join(b->shared);
  to->set(b->uid, b->era, f->linear, t.clock);
  ++t.clock;
}

namespace {

bool knows(const BlockCheck* b, const ThreadCheck& t, uint32_t block, uint32_t era, uint32_t index,
           uint32_t clock) {
  return (block == b->uid && era < b->era) || t.know.covers(block, era, index, clock) ||
         b->shared.covers(block, era, index, clock);
}

// The phase of an mbarrier of block `home`, by a thread that may be of another block of the cluster.
bool knows_phase(const BlockCheck* b, const ThreadCheck& t, const BlockCheck* home, uint32_t bar,
                 uint32_t phase) {
  const uint32_t index = static_cast<uint32_t>(home->threads.size()) + bar;
  const auto& acquired = home->mbarriers[bar].acquired_era;
  const uint32_t era = phase < acquired.size() ? acquired[phase] : UINT32_MAX;
  if (b == home && era < b->era) return true;
  for (const Knowledge* k : {&t.know, &b->shared}) {
    for (const Knowledge::Entry& e : k->entries) {
      if (e.block != home->uid) continue;
      if (era < e.era || (index < e.clock.size() && e.clock[index] > phase)) return true;
    }
  }
  return false;
}

template <class F>
bool all_lanes(uint32_t lanes, F f) {
  for (; lanes != 0; lanes &= lanes - 1) {
    if (!f(static_cast<uint32_t>(__builtin_ctz(lanes)))) return false;
  }
  return true;
}

const char* verb(uint8_t flags) { return flags & kAtomic ? "atomic" : flags & kWrite ? "write" : "read"; }

std::string size_text(const Access& a) {
  return std::string(verb(a.flags)) + " of " + std::to_string(a.bytes) + " bytes";
}

}  // namespace

// Whether everything node n stands for happens before access a. *pending: it is asynchronous and has not
// been waited for.
bool Check::ordered(const Access& a, const Node& n, BlockCheck* home, bool* pending) const {
  const BlockCheck* b = check_of(a.f->block);
  const ThreadCheck& t = check_of(a.f);
  *pending = false;
  if (n.flags & kLoad) {
    if (knows_phase(b, t, home, n.warp, n.clock)) return true;
    *pending = true;
    return false;
  }
  if (n.flags & kOp) {
    const AsyncOp& op = ops[n.clock];
    if (!op.done) {
      *pending = true;
      return false;
    }
    return (op.block == b->uid && op.thread == a.f->linear) ||
           knows(b, t, op.block, op.era, op.thread, op.clock);
  }
  if (n.block == b->uid && n.era < b->era) return true;
  return all_lanes(n.lanes, [&](uint32_t lane) {
    const uint32_t thread = n.warp * 32u + lane;
    return (n.block == b->uid && thread == a.f->linear) || knows(b, t, n.block, n.era, thread, n.clock);
  });
}

// Whether the async proxy sees the generic write n: its writer has fenced since, or the thread that now
// starts the asynchronous access fenced after it knew of the write, or someone did before the latest full
// barrier.
bool Check::fenced(const Access& a, const Node& n) const {
  const BlockCheck* b = check_of(a.f->block);
  const ThreadCheck& t = check_of(a.f);
  uint32_t era = n.era, clock = n.clock, fences = n.fences;
  auto covered = [&](uint32_t thread) {
    if (n.block == b->uid && era < b->proxy_cover) return true;
    if (n.block == b->uid && thread < b->threads.size() && b->threads[thread].proxy_fences > fences)
      return true;
    if (t.proxy_fences == 0) return false;
    return (n.block == b->uid && era < t.proxy_era) || t.proxy_know.covers(n.block, era, thread, clock);
  };
  if (n.flags & kOp) {
    const AsyncOp& op = ops[n.clock];
    era = op.era;
    clock = op.clock;
    fences = op.fences;
    return covered(op.thread);
  }
  return all_lanes(n.lanes, [&](uint32_t lane) { return covered(n.warp * 32u + lane); });
}

uint32_t Check::take_node() {
  if (free_node == 0) {
    nodes.emplace_back();
    return static_cast<uint32_t>(nodes.size() - 1);
  }
  const uint32_t at = free_node;
  free_node = nodes[at].next;
  return at;
}

void Check::give_node(uint32_t at) {
  nodes[at].next = free_node;
  free_node = at;
}

void Check::drop_nodes(Cell& c) {
  for (uint32_t i = c.head; i != 0;) {
    const uint32_t next = nodes[i].next;
    give_node(i);
    i = next;
  }
  c.head = 0;
}

// Access a and node n touch the same bytes, one of them writes, and nothing orders them. pending: n is asynchronous
// and has not been waited for.
void Check::report_race(const Access& a, const Node& n, bool in_shared, bool pending, const std::string& name,
                        int64_t offset) {
  const std::string does = verb(a.flags);
  if (pending) {
    const char* what = n.flags & kLoad ? "a TMA load" : ops[n.clock].what;
    report("missing_wait", a, name, offset,
           does + " of bytes that " + what + " still " + (n.flags & kWrite ? "writes" : "reads") +
               (n.flags & kLoad ? ": no wait on its mbarrier orders them" : ": nothing has waited for it"),
           &n);
    return;
  }
  const bool other_block = !(n.flags & (kOp | kLoad)) && n.block != check_of(a.f->block)->uid;
  report(in_shared ? "shared_race" : "global_race", a, name, offset,
         does + " not ordered against the " + verb(n.flags) + " by " + thread_text(n) +
             (other_block ? " (blocks are not ordered)" : ""),
         &n);
}

// The common case: one more lane of a warp that reads what nobody has written in this era. `like` is the node the
// access would make; false if there is more to it.
bool Check::join_read(const Access& a, const Cell& c, const Node& like, bool in_shared) {
  Node* same = nullptr;
  for (uint32_t k = c.head; k != 0; k = nodes[k].next) {
    Node& n = nodes[k];
    const bool settled =
        in_shared && n.block == like.block && n.era < like.era && !(n.flags & (kOp | kLoad));
    if ((n.flags & (kWrite | kOp | kLoad)) && !settled) return false;
    if (n.warp == like.warp && n.flags == 0 && n.bytes == like.bytes && n.clock == like.clock &&
        n.era == like.era && n.block == like.block && n.launch == like.launch && n.grid_era == like.grid_era)
      same = &n;
  }
  if (same == nullptr) return false;
  same->lanes |= like.lanes;
  same->pc = a.pc;
  return true;
}

// What becomes of node n, of the same bytes as access a, now that a has come.
Check::Fate Check::absorb(const Access& a, Node& n, const Node& like) {
  if (a.flags & kWrite) return (n.bytes & ~like.bytes) == 0 ? Fate::kGone : Fate::kStays;
  if ((a.flags & kOp) && (n.flags & (kOp | kWrite)) == kOp && n.bytes == like.bytes) {
    const AsyncOp& op = ops[n.clock];  // complete no later than this one, if the same thread issued it
    return op.block == check_of(a.f->block)->uid && op.thread == a.f->linear ? Fate::kGone : Fate::kStays;
  }
  const bool plain_read = !(n.flags & (kWrite | kOp | kLoad)) && !(a.flags & kOp);
  if (!plain_read || n.warp != like.warp || n.block != check_of(a.f->block)->uid) return Fate::kStays;
  if (n.clock == like.clock && n.era == like.era && n.bytes == like.bytes) {
    n.lanes |= like.lanes;
    n.pc = a.pc;
    return Fate::kTookIn;
  }
  if ((n.bytes & ~like.bytes) != 0) return Fate::kStays;
  n.lanes &= ~like.lanes;  // this read comes later in the same thread and says as much
  return n.lanes == 0 ? Fate::kGone : Fate::kStays;
}

void Check::touch_cells(const Access& a, Cell* cells, size_t first_byte, BlockCheck* home, bool initialised,
                        const Tensor* tensor, int64_t offset) {
  const BlockCheck* b = check_of(a.f->block);
  const ThreadCheck& t = check_of(a.f);
  const bool write = a.flags & kWrite, reads = !write || (a.flags & kAtomic), in_shared = home != nullptr;
  const bool tma = a.flags & kLoad;
  const auto launch = static_cast<uint16_t>(a.f->block->grid->index);
  auto name = [tensor] { return tensor ? tensor->name : std::string("shared"); };
  Node like{0,
            tma ? home->uid : b->uid,
            b->era,
            a.flags & (kOp | kLoad) ? a.clock : t.clock,
            tma ? 0u : 1u << a.f->lane,
            static_cast<uint16_t>(tma ? a.owner : a.f->linear / 32),
            launch,
            0,
            a.flags,
            grid_era[launch],
            t.proxy_fences,
            a.pc};
  bool uninitialised = false, race = false;
  for (size_t byte = first_byte, end = first_byte + a.bytes; byte < end;) {
    const size_t index = byte / 4;
    like.bytes = 0;
    for (; byte < end && byte / 4 == index; ++byte) like.bytes = static_cast<uint8_t>(like.bytes | 1u << byte % 4);
    Cell& c = cells[index];
    if (reads && !initialised && !uninitialised && (c.written & like.bytes) != like.bytes) {
      uninitialised = true;
      report(in_shared ? "uninitialised_shared" : "uninitialised_global", a, name(), offset,
             "reads bytes that nothing has written");
    }
    if (a.flags == 0 && !a.proxy && join_read(a, c, like, in_shared)) continue;
    bool merged = false;
    for (uint32_t* link = &c.head; *link != 0;) {
      Node& n = nodes[*link];
      const bool stale = n.launch != launch || n.grid_era < like.grid_era ||
                         (in_shared && !(n.flags & (kOp | kLoad)) && a.f->block->cluster_n == 1 &&
                          n.era < b->era && !(n.flags & kGeneric));
      Fate fate = stale ? Fate::kGone : Fate::kStays;
      if (!stale && (n.bytes & like.bytes)) {
        const bool conflict = (write || (n.flags & kWrite)) && !(a.flags & n.flags & kAtomic);
        bool pending = false;
        if (conflict && !race && !ordered(a, n, home, &pending)) {
          race = true;
          report_race(a, n, in_shared, pending, name(), offset);
        }
        if (a.proxy && !race && (n.flags & kGeneric) && reads && !fenced(a, n)) {
          race = true;
          report("missing_proxy_fence", a, name(), offset,
                 "the async proxy reads bytes written by " + thread_text(n) +
                     " without fence_proxy_async in between",
                 &n);
        }
        fate = absorb(a, n, like);
      }
      merged = merged || fate == Fate::kTookIn;
      if (fate == Fate::kGone) {
        const uint32_t gone = *link;
        *link = n.next;
        give_node(gone);
      } else {
        link = &n.next;
      }
    }
    if (write) c.written |= like.bytes;
    if (merged) continue;
    const uint32_t at = take_node();
    nodes[at] = like;
    nodes[at].next = c.head;
    c.head = at;
  }
}

void Check::shared(const Access& a, Block* owner) {
  const auto offset = static_cast<size_t>(a.address - reinterpret_cast<uintptr_t>(owner->smem));
  const bool foreign = owner->check == nullptr || owner->cluster != a.f->block->cluster;
  const bool gone = owner->live == 0 && owner != a.f->block;
  if (foreign || gone || offset + a.bytes > owner->smem_used) {
    const std::string why =
        foreign ? " of a block outside the cluster"
        : gone  ? " of a block that has returned"
                : "; the block has " + std::to_string(owner->smem_used) + " bytes of shared memory";
    fatal("out_of_bounds", a, "shared", static_cast<int64_t>(offset),
          size_text(a) + " at smem+" + std::to_string(offset) + why);
  }
  BlockCheck* home = check_of(owner);
  if (home->smem.size() < (owner->smem_used + 3) / 4)
    home->smem.resize((owner->smem_used + 3) / 4, Cell{0, 0});
  touch_cells(a, home->smem.data(), offset, home, false, nullptr, static_cast<int64_t>(offset));
}

// An access of group g that is in none of its tensors: `bad` is the first byte, from the group's start, that is not.
void Check::outside(const Access& a, const Group& g, int64_t first, int64_t bad) {
  const Tensor* nearest = &tensors[static_cast<size_t>(g.tensors[0])];
  int64_t distance = INT64_MAX;
  for (int i : g.tensors) {
    const Tensor& t = tensors[static_cast<size_t>(i)];
    const int64_t base = t.mapped - g.mapped;
    const int64_t d = bad < base ? base - bad : bad >= base + t.bytes ? bad - base - t.bytes + 1 : 0;
    if (d < distance) nearest = &t, distance = d;
  }
  const int64_t at = first - (nearest->mapped - g.mapped);
  const std::string where =
      at < 0                          ? std::to_string(-at) + " bytes before " + nearest->name
      : at >= nearest->bytes          ? std::to_string(at - nearest->bytes) + " bytes past the end of " + nearest->name
      : at + a.bytes > nearest->bytes ? "across the end of " + nearest->name
                                      : "between the elements of " + nearest->name;
  fatal("out_of_bounds", a, nearest->name, at,
        size_text(a) + " " + where + " (" + std::to_string(nearest->bytes) + " bytes)");
}

// Notes which bytes of the tensor the launch has read and written.
void Check::count_bytes(const Access& a, int tensor, int64_t offset) {
  const int64_t bytes = tensors[static_cast<size_t>(tensor)].bytes;
  auto mark = [&](std::vector<uint64_t>& bits) {
    if (bits.empty()) bits.resize(static_cast<size_t>(bytes + 63) / 64, 0);
    for (int64_t i = offset; i < offset + a.bytes && i < bytes; ++i) {
      if (i >= 0) bits[static_cast<size_t>(i) / 64] |= uint64_t{1} << i % 64;
    }
  };
  auto& touched = totals[static_cast<size_t>(a.f->block->grid->index)].touched[tensor];
  const bool write = a.flags & kWrite;
  if (write) mark(touched.second);
  if (!write || (a.flags & kAtomic)) mark(touched.first);
}

void Check::global(const Access& a) {
  Group* g = group_at(a.address);
  if (g == nullptr) fatal("out_of_bounds", a, "", 0, size_text(a) + " near no tensor");
  const int64_t first =
      static_cast<int64_t>(a.address) - static_cast<int64_t>(reinterpret_cast<uintptr_t>(g->mapped));
  if (first < 0 || first + a.bytes > g->bytes) outside(a, *g, first, first);
  for (int64_t i = first + a.bytes; !g->owner.empty() && i-- > first;) {
    if (g->owner[static_cast<size_t>(i)] == 0) outside(a, *g, first, i);
  }
  const uint16_t owner = g->owner.empty() ? g->simple : g->owner[static_cast<size_t>(first)];
  const OwnerSet& set = owners[owner];
  const Tensor& t = tensors[static_cast<size_t>(set.tensors[0])];
  const int64_t offset = first - (t.mapped - g->mapped);
  const int role = roles[static_cast<size_t>(a.f->block->grid->index)][owner];
  if (role < 0) {
    fatal("out_of_bounds", a, t.name, offset,
          size_text(a) + " of " + t.name + ", which is no argument of this launch");
  }
  const bool write = a.flags & kWrite;
  if (write && (role == PK_ROLE_INPUT || role == PK_ROLE_WEIGHT)) {
    report("write_to_input", a, t.name, offset,
           "writes " + t.name + ", which is " + (role == PK_ROLE_WEIGHT ? "a weight" : "an input"));
  }
  if (a.f->block->grid->pdl && !a.f->waited) {
    if (write) {
      report("pdl_write_before_wait", a, t.name, offset, "writes " + t.name + " before grid_wait()");
    } else if (role != PK_ROLE_WEIGHT) {
      report("pdl_read_before_wait", a, t.name, offset,
             "reads " + t.name + ", which is no weight, before grid_wait()");
    }
  }
  count_bytes(a, set.tensors[0], offset);
  if (g->shadowed) {
    // Cells follow the address, so that a 4-byte word is one cell whatever the tensor's alignment.
    const auto skew = static_cast<size_t>(reinterpret_cast<uintptr_t>(g->mapped) % 4);
    touch_cells(a, g->cells, static_cast<size_t>(first) + skew, nullptr, set.initialised, &t, offset);
  }
}

void Check::misaligned(const Access& a, const Block* owner) {
  const Group* g = owner ? nullptr : group_at(a.address);
  const std::string name = owner ? "shared" : g ? tensors[static_cast<size_t>(g->tensors[0])].name : "";
  const void* start = owner ? static_cast<const void*>(owner->smem) : g ? g->mapped : nullptr;
  fatal("misaligned", a, name, static_cast<int64_t>(a.address - reinterpret_cast<uintptr_t>(start)),
        size_text(a) + " at an address that is " + std::to_string(a.address % a.bytes) +
            " beyond a multiple of that");
}

// Seconds of checking; a thread of a kernel that ends makes far fewer.
constexpr uint32_t kMostAccesses = 1u << 25;

void Check::touch(const Access& a) {
  // A lane that runs away alone also fills the trace, which waits for the others.
  const uint32_t most = options.trace ? kMostAccesses >> 4 : kMostAccesses;
  if (++check_of(a.f).accesses > most) {
    fatal("endless", a, "", 0,
          "after " + std::to_string(most) + " accesses by one thread: a loop without an end, or one that waits for "
          "another thread by plain loads, which lets no other run (use spin_until_ge or ld_acquire)");
  }
  Block* owner = block_of(worker, reinterpret_cast<const void*>(a.address));
  const bool one_access = a.bytes > 0 && a.bytes <= 16 && (a.bytes & (a.bytes - 1)) == 0;
  if (one_access && a.address % a.bytes != 0) misaligned(a, owner);
  if (owner) {
    shared(a, owner);
  } else {
    global(a);
  }
}

}  // namespace pk::host
