// The per-line table. Accesses of a warp are one request when they come from the same instruction for the
// n-th time since the lanes last converged. Costs follow what Nsight Compute counts: 32-byte sectors for
// global memory; for shared memory passes over 32 banks of 4 bytes, 32 lanes at a time for accesses of up to
// 4 bytes, 16 for 8, 8 for 16.
#include <algorithm>

#include "host/checker.h"

namespace pk::host {
namespace {

// Lanes served together. Loads in which lane pairs (or pairs of lanes two apart) share their address take
// twice as many; a lane whose partner is not active is such a pair.
int phase_lanes(const PcLog& p, const PcLog::Request& r) {
  const int lanes = p.bytes <= 4 ? 32 : p.bytes == 8 ? 16 : 8;
  if (p.op != kLogLoad || p.bytes < 8) return lanes;
  for (int partner = 1; partner <= 2; ++partner) {
    bool paired = true;
    for (int l = 0; l < 32 && paired; ++l) {
      if (!(r.mask >> l & 1)) continue;
      const int other = l ^ partner;
      paired = !(r.mask >> other & 1) || r.address[other] == r.address[l];
    }
    if (paired) return lanes * 2;
  }
  return lanes;
}

void shared_cost(const PcLog& p, const PcLog::Request& r, PcStats* s) {
  const int step = std::min(32, phase_lanes(p, r));
  for (int first = 0; first < 32; first += step) {
    std::vector<uintptr_t> words[32];
    bool any = false;
    for (int l = first; l < first + step; ++l) {
      if (!(r.mask >> l & 1)) continue;
      any = true;
      for (uintptr_t w = r.address[l] / 4; w <= (r.address[l] + p.bytes - 1) / 4; ++w) {
        auto& bank = words[w % 32];
        if (std::find(bank.begin(), bank.end(), w) == bank.end()) bank.push_back(w);
      }
    }
    size_t worst = 0;
    for (auto& bank : words) worst = std::max(worst, bank.size());
    s->wavefronts += worst;
    s->ideal_wavefronts += any;
  }
}

}  // namespace

void Check::request(const PcLog& p, const PcLog::Request& r, const void* pc) {
  PcStats& s = lines[pc];
  s.space = p.shared ? "shared" : "global";
  static const struct {
    const char *op, *by;
  } kNames[] = {{"load", ""},        {"store", ""},        {"atomic", ""},       {"load", "matrix"},
                {"store", "matrix"}, {"load", "cp.async"}, {"store", "cp.async"}};  // by LogOp
  s.op = kNames[p.op].op;
  s.by = kNames[p.op].by;
  s.bytes = p.bytes;
  ++s.requests;
  s.lanes += static_cast<uint64_t>(__builtin_popcount(r.mask));
  std::vector<std::pair<uint64_t, uint32_t>> sectors;  // and which of their bytes
  for (int l = 0; l < 32; ++l) {
    if (!(r.mask >> l & 1)) continue;
    for (uintptr_t b = r.address[l]; b < r.address[l] + p.bytes;) {
      const uint64_t sector = b / 32;
      const uintptr_t end = std::min<uintptr_t>((sector + 1) * 32, r.address[l] + p.bytes);
      const auto bits = static_cast<uint32_t>(((uint64_t{1} << (end - b)) - 1) << b % 32);
      auto at =
          std::find_if(sectors.rbegin(), sectors.rend(), [sector](auto& x) { return x.first == sector; });
      if (at == sectors.rend()) {
        sectors.push_back({sector, bits});
      } else {
        at->second |= bits;
      }
      b = end;
    }
  }
  uint64_t bytes = 0;
  for (auto& [sector, bits] : sectors) {
    bytes += static_cast<uint64_t>(__builtin_popcount(bits));
    s.unique[sector] |= bits;
  }
  if (p.shared) {
    shared_cost(p, r, &s);
  } else {
    s.sectors += sectors.size();
    s.ideal_sectors += (bytes + 31) / 32;
  }
}

void Check::log(const Access& a, bool shared_space, LogOp op) {
  if (!options.trace) return;
  Block* b = a.f->block;
  Warp* w = a.f->warp;
  // cp.async is a load and a store in one instruction: two rows of one line.
  const void* pc = op == kLogCopyStore ? static_cast<const char*>(a.pc) - 1 : a.pc;
  PcLog& p = b->check->log[w->index][pc];
  p.bytes = a.bytes;
  p.shared = shared_space;
  p.op = op;
  const uint32_t n = p.count[a.f->lane]++ - p.base;
  while (p.open.size() <= n) p.open.emplace_back();
  PcLog::Request& r = p.open[n];
  r.mask |= 1u << a.f->lane;
  r.address[a.f->lane] = shared_space ? a.address - reinterpret_cast<uintptr_t>(b->smem) : a.address;
  while (!p.open.empty() && p.open.front().mask == w->live) {
    request(p, p.open.front(), pc);
    p.open.pop_front();
    ++p.base;
  }
}

// The lanes of the warp have converged: what is still open was issued by some of them.
void Check::flush(Block* b, int warp) {
  if (!options.trace) return;
  for (auto& [pc, p] : b->check->log[warp]) {
    for (const PcLog::Request& r : p.open) {
      if (r.mask != 0) request(p, r, pc);
    }
    p.open.clear();
    p.base = 0;
    std::fill(p.count, p.count + 32, 0u);
  }
}

}  // namespace pk::host
