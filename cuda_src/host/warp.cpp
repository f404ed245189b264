// Warp collectives: shuffles, votes, match, reduce, __syncwarp, and the tensor-core operations of a full
// warp. Lanes leave what they bring; the last to arrive does the work for all.
#include <algorithm>

#include "host/check.h"
#include "host/runtime.h"

namespace pk::host {
namespace {

constexpr const char* kKindNames[] = {"__syncwarp", "a shuffle", "a vote", "a warp reduction",
                                      "a warp operation"};

template <class F>
void each_lane(uint32_t mask, F f) {
  for (; mask != 0; mask &= mask - 1) f(__builtin_ctz(mask));
}

void shuffle(Warp* w, const Collective& c) {
  each_lane(c.arrived, [&](int l) {
    const int s = w->source[l];
    if (!(c.arrived >> s & 1)) {
      const bool gone = !(w->live >> s & 1);
      fail_worker(w->block->worker,
                  "lane " + std::to_string(l) + " reads lane " + std::to_string(s) +
                      (gone ? ", which has returned or does not exist" : ", which does not take part"),
                  w->lane[l], c.file, c.line);
      return;
    }
    w->result[l] = w->value[s];
  });
}

void vote(Warp* w, const Collective& c) {
  if (c.sub == kMatchAny) {
    each_lane(c.arrived, [&](int l) {
      uint32_t same = 0;
      each_lane(c.arrived, [&](int k) { same |= uint32_t{w->value[k] == w->value[l]} << k; });
      w->result[l] = same;
    });
    return;
  }
  uint32_t yes = 0;
  const uint64_t first = w->value[__builtin_ctz(c.arrived)];
  each_lane(c.arrived, [&](int l) {
    yes |= uint32_t{c.sub == kMatchAll ? w->value[l] == first : w->value[l] != 0} << l;
  });
  const bool all = yes == c.arrived;
  const uint32_t r = c.sub == kBallot ? yes
                     : c.sub == kAny  ? yes != 0
                     : c.sub == kAll  ? all
                     : all            ? c.arrived
                                      : 0;
  each_lane(c.arrived, [&](int l) { w->result[l] = r; });
}

uint32_t combine(int kind, bool is_signed, uint32_t a, uint32_t b) {
  const auto sa = static_cast<int32_t>(a), sb = static_cast<int32_t>(b);
  switch (kind) {
    case kAdd:
      return a + b;
    case kMin:
      return is_signed ? static_cast<uint32_t>(std::min(sa, sb)) : std::min(a, b);
    case kMax:
      return is_signed ? static_cast<uint32_t>(std::max(sa, sb)) : std::max(a, b);
    case kAnd:
      return a & b;
    case kOr:
      return a | b;
    default:
      return a ^ b;
  }
}

void reduce(Warp* w, const Collective& c) {
  bool any = false;
  uint32_t r = 0;
  each_lane(c.arrived, [&](int l) {
    const auto v = static_cast<uint32_t>(w->value[l]);
    r = any ? combine(c.sub, c.is_signed, r, v) : v;
    any = true;
  });
  each_lane(c.arrived, [&](int l) { w->result[l] = r; });
}

// Row addresses of ldmatrix and stmatrix, before they are used. A slot starts with the row's address.
void matrix_rows(Warp* w, const Collective& c) {
  for (int l = 0; l < 8 * c.matrices; ++l) {
    const void* row = *static_cast<const void* const*>(w->slot[l]);
    const auto offset = static_cast<size_t>(static_cast<const unsigned char*>(row) - w->block->smem);
    const char* problem = reinterpret_cast<uintptr_t>(row) % 16 != 0 ? "is not aligned to 16 bytes"
                          : offset + 16 > w->block->smem_used        ? "is not in this block's shared memory"
                                                                     : nullptr;
    if (problem != nullptr) {
      fail_worker(w->block->worker,
                  std::string(c.name) + ": the row address of lane " + std::to_string(l) + " " + problem,
                  w->lane[l], c.file, c.line);
      return;
    }
  }
  if (w->block->worker->check) check_matrix(w, c);
}

// Does the work, wakes every lane but `last` (null when a lane's exit completed it) and forgets the
// collective.
void finish(Warp* w, int index, Fiber* last) {
  const Collective c = w->collective[index];
  w->collective[index] = w->collective[--w->pending];
  Worker* worker = w->block->worker;
  switch (c.kind) {
    case kSyncwarp:
      break;
    case kShuffle:
      shuffle(w, c);
      break;
    case kVote:
      vote(w, c);
      break;
    case kReduce:
      reduce(w, c);
      break;
    case kWarpOp:
      if (c.matrices != 0) matrix_rows(w, c);
      if (!worker->failed) c.op(w->slot);
      break;
  }
  if (worker->check) check_warp(w, c.kind, c.arrived);
  ++worker->progress;
  each_lane(c.arrived, [&](int l) {
    if (w->lane[l] != last) worker->wake(w->lane[l]);
  });
  if (worker->failed && last != nullptr) fiber_abandon(last);
}

// Lanes that have returned are not waited for.
bool complete(const Warp* w, const Collective& c) { return c.arrived == (c.mask & w->live); }

// Meets the other lanes of the mask. What the lane brings is in the warp's arrays already.
void meet(Fiber* f, const Collective& mine, const char* file, int line) {
  Warp* w = f->warp;
  if (!(mine.mask >> f->lane & 1)) {
    pkh_fail(file, line, "%s: lane %u calls it with mask %08x, which does not name it", kKindNames[mine.kind],
             f->lane, mine.mask);
  }
  int i = 0;
  for (; i < w->pending; ++i) {
    const Collective& c = w->collective[i];
    const bool place =
        c.line == line || c.kind == kSyncwarp;  // lanes may come to __syncwarp from different branches
    if (c.mask == mine.mask && c.kind == mine.kind && c.sub == mine.sub && c.op == mine.op && place) break;
    // Lanes wait there for this one, which would wait here for them.
    if ((c.mask >> f->lane & 1) && (c.arrived & mine.mask)) {
      pkh_fail(file, line,
               "warp divergence: lane %u is in %s here with mask %08x; lanes %08x wait in %s at %s:%d with "
               "mask %08x",
               f->lane, kKindNames[mine.kind], mine.mask, c.arrived, kKindNames[c.kind], base_name(c.file),
               c.line, c.mask);
    }
  }
  if (i == w->pending) {
    w->collective[i] = mine;
    ++w->pending;
  }
  Collective& c = w->collective[i];
  c.arrived |= 1u << f->lane;
  if (complete(w, c)) {
    finish(w, i, f);
  } else {
    fiber_suspend(f, mine.kind == kWarpOp ? mine.name : kKindNames[mine.kind], file, line);
  }
}

Collective make(uint32_t mask, CollectiveKind kind, const char* file, int line) {
  Collective c;
  c.mask = mask;
  c.kind = kind;
  c.file = file;
  c.line = line;
  return c;
}

// All 32 lanes meet, and the last to come carries `op` out for all. matrices: how many ldmatrix or stmatrix moves.
void meet_whole(Fiber* f, const char* name, void* slot, WarpOp op, int matrices, bool store, const char* file,
                int line) {
  if (f->warp->live != 0xffffffffu) {
    pkh_fail(file, line, "%s needs all 32 lanes; those that exist and have not returned are %08x", name,
             f->warp->live);
  }
  f->warp->slot[f->lane] = slot;
  Collective c = make(0xffffffffu, kWarpOp, file, line);
  c.op = op;
  c.name = name;
  c.matrices = matrices;
  c.store = store;
  meet(f, c, file, line);
}

}  // namespace

void warp_thread_exit(Fiber* f) {
  Warp* w = f->warp;
  for (int i = 0; i < w->pending;) {
    const Collective& c = w->collective[i];
    if (!(c.mask >> f->lane & 1) || c.arrived == 0 || !complete(w, c)) {
      ++i;
      continue;
    }
    if (c.kind == kWarpOp) {
      fail_worker(w->block->worker, std::string(c.name) + " needs all 32 lanes, but this one has returned", f,
                  c.file, c.line);
      return;
    }
    finish(w, i, nullptr);
    i = 0;
  }
}

}  // namespace pk::host

using namespace pk::host;

void pkh_syncwarp(uint32_t mask, const char* file, int line) {
  Fiber* f = current();
  f->pc = PKH_PC;
  meet(f, make(mask, kSyncwarp, file, line), file, line);
}

uint64_t pkh_shuffle(uint32_t mask, uint64_t value, int source, const char* file, int line) {
  Fiber* f = current();
  f->pc = PKH_PC;
  f->warp->value[f->lane] = value;
  f->warp->source[f->lane] = source & 31;
  meet(f, make(mask, kShuffle, file, line), file, line);
  return f->warp->result[f->lane];
}

uint32_t pkh_vote(uint32_t mask, int kind, uint64_t value, int* predicate, const char* file, int line) {
  Fiber* f = current();
  f->pc = PKH_PC;
  f->warp->value[f->lane] = value;
  Collective c = make(mask, kVote, file, line);
  c.sub = kind;
  meet(f, c, file, line);
  const auto r = static_cast<uint32_t>(f->warp->result[f->lane]);
  if (predicate != nullptr) *predicate = r != 0;
  return r;
}

uint32_t pkh_reduce(uint32_t mask, int kind, int is_signed, uint32_t value, const char* file, int line) {
  Fiber* f = current();
  f->pc = PKH_PC;
  f->warp->value[f->lane] = value;
  Collective c = make(mask, kReduce, file, line);
  c.sub = kind;
  c.is_signed = is_signed != 0;
  meet(f, c, file, line);
  return static_cast<uint32_t>(f->warp->result[f->lane]);
}

void pkh_warp_matrix(const char* name, void* slot, WarpOp op, int matrices, int store, const char* file,
                     int line) {
  Fiber* f = current();
  f->pc = PKH_PC;
  meet_whole(f, name, slot, op, matrices, store != 0, file, line);
}

void pkh_warp(const char* name, void* slot, WarpOp op, const char* file, int line) {
  Fiber* f = current();
  f->pc = PKH_PC;
  meet_whole(f, name, slot, op, 0, false, file, line);
}

// Which lanes are converged is not defined on the device either; the honest answer is those that have not
// returned and do not wait in a collective.
uint32_t pkh_activemask(void) {
  const Warp* w = current()->warp;
  uint32_t mask = w->live;
  for (int i = 0; i < w->pending; ++i) mask &= ~w->collective[i].arrived;
  return mask;
}
