// The TMA unit: 2-D tensor loads and stores, 1-D bulk loads. A load in flight sits in the worker's list and
// is carried out at once (eager), when nothing else can run (lazy), or at some switch between fibers
// (random). A store sits in its thread's list and is carried out at once or when a wait forces it.
#include <algorithm>

#include "host/check.h"
#include "host/runtime.h"

namespace pk::host {
namespace {

// Bytes of a row that are permuted among themselves: 16 is none.
uint32_t swizzle_span(const TensorMap& m) { return 16u << m.swizzle; }

// Offset in shared memory of byte `offset` of an unswizzled box: 16-byte chunks are permuted by the row of
// 128 bytes.
uint32_t swizzled(const TensorMap& m, uint32_t offset) {
  return offset ^ (offset >> 7 & (swizzle_span(m) / 16 - 1)) << 4;
}

// Calls f(shared offset, global address or null outside the tensor, bytes of the piece before it, bytes there) for
// every 16-byte piece of the box.
template <class F>
void each_piece(const TensorMap& m, uint32_t smem_offset, int x, int y, F f) {
  const uint32_t row_bytes = m.box[0] * m.elem_bytes;
  for (uint32_t r = 0; r < m.box[1]; ++r) {
    const int64_t gy = int64_t{y} + r;
    const bool row_in = gy >= 0 && gy < static_cast<int64_t>(m.dims[1]);
    for (uint32_t byte = 0; byte < row_bytes; byte += 16) {
      const uint32_t at = swizzled(m, smem_offset + r * row_bytes + byte);
      // Elements of the piece inside the tensor: [low, high)
      const int64_t first = int64_t{x} + byte / m.elem_bytes, count = 16 / m.elem_bytes;
      const int64_t low = std::clamp<int64_t>(-first, 0, count);
      const int64_t high = std::clamp<int64_t>(static_cast<int64_t>(m.dims[0]) - first, 0, count);
      const bool in = row_in && low < high;
      char* row = static_cast<char*>(m.base) + gy * static_cast<int64_t>(m.row_bytes);
      f(at, in ? row + (first + low) * m.elem_bytes : nullptr, static_cast<uint32_t>(low * m.elem_bytes),
        in ? static_cast<uint32_t>((high - low) * m.elem_bytes) : 0u);
    }
  }
}

void load_into(const LoadOp& op, Block* b) {
  if (op.bulk) {
    memcpy(b->smem + op.smem_offset, op.src, op.bytes);
    return;
  }
  each_piece(op.map, op.smem_offset, op.x, op.y,
             [b](uint32_t at, const char* src, uint32_t skip, uint32_t bytes) {
               unsigned char* dst = b->smem + at;
               memset(dst, 0, 16);
               if (bytes) memcpy(dst + skip, src, bytes);
             });
}

void carry_out(Worker* w, LoadOp& op) {
  for (size_t i = 0; i < op.blocks.size(); ++i) {
    load_into(op, op.blocks[i]);
    op.bars[i]->bytes -= op.bytes;
    mbarrier_progress(w, op.blocks[i], op.bars[i]);
  }
  ++w->progress;
}

void issue(Fiber* f, LoadOp op, const void* dst, const void* bar, int mask, const char* file, int line) {
  Worker* w = f->block->worker;
  Block* owner;
  find_mbarrier(w, bar, &owner, file, line);
  Block* b = claimed_block(f, dst, op.bytes, "the destination", file, line);
  if (owner != b) pkh_fail(file, line, "the destination and the mbarrier are in different blocks");
  op.smem_offset = static_cast<uint32_t>(static_cast<const unsigned char*>(dst) - b->smem);
  const auto bar_offset = static_cast<size_t>(static_cast<const unsigned char*>(bar) - b->smem);
  Cluster* c = b->cluster;
  if (mask >= 0 && (mask == 0 || mask >> c->size != 0)) {
    pkh_fail(file, line, "multicast mask %#x for a cluster of %d blocks", static_cast<unsigned>(mask),
             c->size);
  }
  for (int i = 0; i < c->size; ++i) {
    Block* to = c->blocks[static_cast<size_t>(i)].get();
    if (mask < 0 ? to != b : !(mask >> i & 1)) continue;
    if (op.smem_offset + op.bytes > to->smem_used)
      pkh_fail(file, line, "multicast: block %d has not claimed the destination", i);
    op.blocks.push_back(to);
    op.bars.push_back(find_mbarrier(w, to->smem + bar_offset, nullptr, file, line));
  }
  op.issuer = f;
  op.file = file;
  op.line = line;
  if (w->check) check_load_issue(f, op);
  const bool now = w->async_order == PK_ASYNC_EAGER || (w->async_order == PK_ASYNC_RANDOM && w->draw() % 2);
  if (now) {
    carry_out(w, op);
  } else {
    w->loads.push_back(std::move(op));
  }
}

const TensorMap& checked_map(const TensorMap* map, const char* file, int line) {
  if (map->magic != kMapMagic)
    pkh_fail(file, line, "the tensor map was not made by the host backend's encoder");
  return *map;
}

void check_box_place(const TensorMap& m, const void* smem, const char* file, int line) {
  const uint32_t align = std::max(128u, 8 * swizzle_span(m) * (m.swizzle ? 1u : 0u));
  if (smem_u32(smem) % align != 0) {
    pkh_fail(file, line, "TMA: the shared-memory address smem+%u must be aligned to %u bytes", smem_u32(smem),
             align);
  }
}

void store(Fiber* f, StoreOp& op) {
  const auto offset = static_cast<uint32_t>(op.src - f->block->smem);
  unsigned char* smem = f->block->smem;
  each_piece(op.map, offset, op.x, op.y, [smem](uint32_t at, char* dst, uint32_t skip, uint32_t bytes) {
    if (bytes) memcpy(dst, smem + at + skip, bytes);
  });
  op.done = true;
}

}  // namespace

void map_pieces(const TensorMap& m, uint32_t smem_offset, int x, int y,
                const std::function<void(uint32_t, char*, uint32_t, uint32_t)>& f) {
  each_piece(m, smem_offset, x, y, f);
}

bool retire_load(Worker* w) {
  if (w->loads.empty()) return false;
  const size_t i = w->random ? w->draw() % w->loads.size() : 0;
  LoadOp op = std::move(w->loads[i]);
  w->loads.erase(w->loads.begin() + static_cast<ptrdiff_t>(i));
  carry_out(w, op);
  return true;
}

void stores_thread_exit(Fiber* f) {
  if (!f->async || f->async->stores.ops.empty()) return;
  for (StoreOp& op : f->async->stores.ops) {
    if (f->block->worker->check) check_store_left(f, op);
    if (!op.done) store(f, op);
  }
  f->async->stores.clear();
}

// Shared memory must outlive what is still to be written to it.
void loads_block_exit(Block* b) {
  for (const LoadOp& op : b->worker->loads) {
    if (std::find(op.blocks.begin(), op.blocks.end(), b) == op.blocks.end()) continue;
    fail_worker(b->worker, "a block returned while this load into its shared memory was in flight", op.issuer,
                op.file, op.line);
  }
}

}  // namespace pk::host

using namespace pk::host;
using pk::TensorMap;

void pkh_tma_load(void* dst, const TensorMap* map, int x, int y, uint64_t* bar, int mask, const char* file,
                  int line) {
  Fiber* f = current();
  const TensorMap& m = checked_map(map, file, line);
  check_box_place(m, dst, file, line);
  LoadOp op{};
  op.map = m;
  op.bytes = m.box[0] * m.box[1] * m.elem_bytes;
  op.x = x;
  op.y = y;
  op.pc = PKH_PC;
  issue(f, std::move(op), dst, bar, mask, file, line);
}

void pkh_bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* bar, const char* file, int line) {
  Fiber* f = current();
  if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(dst) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(src) % 16 != 0) {
    pkh_fail(file, line, "bulk_load of %u bytes: the size and both addresses must be multiples of 16", bytes);
  }
  LoadOp op{};
  op.bulk = true;
  op.src = static_cast<const unsigned char*>(src);
  op.bytes = bytes;
  op.pc = PKH_PC;
  issue(f, std::move(op), dst, bar, -1, file, line);
}

void pkh_tma_store(const TensorMap* map, const void* src, int x, int y, const char* file, int line) {
  Fiber* f = current();
  Worker* w = f->block->worker;
  const TensorMap& m = checked_map(map, file, line);
  check_box_place(m, src, file, line);
  if (claimed_block(f, src, m.box[0] * m.box[1] * m.elem_bytes, "the source", file, line) != f->block) {
    pkh_fail(file, line, "TMA store: the source is in another block's shared memory");
  }
  StoreOp op{m, static_cast<const unsigned char*>(src), x, y, false, PKH_PC, 0, file, line};
  if (w->check) check_store_issue(f, op);
  if (w->async_order == PK_ASYNC_EAGER || (w->async_order == PK_ASYNC_RANDOM && w->draw() % 2)) store(f, op);
  f->queues().stores.ops.push_back(op);
}

void pkh_tma_store_commit(void) { current()->queues().stores.commit(); }

void pkh_tma_store_wait(int pending, int read_only, const char* file, int line) {
  (void)file, (void)line;
  Fiber* f = current();
  if (!f->async) return;
  OpQueue<StoreOp>& queue = f->async->stores;
  const auto keep = static_cast<size_t>(pending);
  const size_t due = queue.due(keep);
  for (size_t i = 0; i < due; ++i) {
    if (!queue.ops[i].done) store(f, queue.ops[i]);
    if (f->block->worker->check) check_store_done(f, queue.ops[i]);
  }
  if (read_only) return;  // the writes to global memory are still to be waited for
  queue.retire(due, keep);
}

int pkh_tensor_map(void* out, void* base, int elem_bytes, const uint64_t* dims, uint64_t row_bytes,
                   const uint32_t* box, int swizzle) {
  auto refuse = [](const std::string& text) { return set_error("tensor map: " + text); };
  const std::string size = std::to_string(elem_bytes);
  if (elem_bytes != 1 && elem_bytes != 2 && elem_bytes != 4 && elem_bytes != 8)
    return refuse("elements of " + size + " bytes; 1, 2, 4 or 8 are allowed");
  if (swizzle < 0 || swizzle > 3)
    return refuse("swizzle " + std::to_string(swizzle) +
                  "; 0 (none), 1 (32 bytes), 2 (64) or 3 (128) are allowed");
  if (reinterpret_cast<uintptr_t>(base) % 16 != 0)
    return refuse("the base address must be aligned to 16 bytes");
  if (row_bytes % 16 != 0 || row_bytes >= uint64_t{1} << 40)
    return refuse("rows " + std::to_string(row_bytes) +
                  " bytes apart; a multiple of 16 below 2^40 is needed");
  for (int i = 0; i < 2; ++i) {
    if (dims[i] == 0 || dims[i] > uint64_t{1} << 32)
      return refuse("size " + std::to_string(dims[i]) + "; 1 to 2^32 are allowed");
    if (box[i] == 0 || box[i] > 256)
      return refuse("box " + std::to_string(box[i]) + "; 1 to 256 are allowed");
  }
  const uint32_t inner = box[0] * static_cast<uint32_t>(elem_bytes);
  if (inner % 16 != 0)
    return refuse("box rows of " + std::to_string(inner) + " bytes; a multiple of 16 is needed");
  if (swizzle != 0 && inner > 16u << swizzle) {
    return refuse("box rows of " + std::to_string(inner) + " bytes are wider than the swizzle of " +
                  std::to_string(16 << swizzle));
  }
  TensorMap m{};
  m.base = base;
  m.dims[0] = dims[0];
  m.dims[1] = dims[1];
  m.row_bytes = row_bytes;
  m.box[0] = box[0];
  m.box[1] = box[1];
  m.elem_bytes = static_cast<uint32_t>(elem_bytes);
  m.swizzle = static_cast<uint32_t>(swizzle);
  m.magic = kMapMagic;
  memcpy(out, &m, sizeof m);
  return 0;
}
