// Findings, and the report as JSON.
#include <algorithm>

#include "host/checker.h"

namespace pk::host {
namespace {

std::string quoted(const std::string& s) {
  std::string out = "\"";
  for (const char ch : s) {
    if (ch == '"' || ch == '\\') {
      out += '\\';
      out += ch;
    } else if (static_cast<unsigned char>(ch) < 0x20) {
      char code[8];
      snprintf(code, sizeof code, "\\u%04x", ch);
      out += code;
    } else {
      out += ch;
    }
  }
  return out + "\"";
}

std::string number(const void* p) { return std::to_string(reinterpret_cast<uintptr_t>(p)); }

std::string triple(const uint3& v) {
  return "[" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + "]";
}

std::string place(const uint3& v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

uint64_t count_bits(const std::vector<uint64_t>& bits) {
  uint64_t n = 0;
  for (const uint64_t b : bits) n += static_cast<uint64_t>(__builtin_popcountll(b));
  return n;
}

uint3 thread_index(const dim3& d, uint32_t linear) {
  return {linear % d.x, linear / d.x % d.y, linear / d.x / d.y};
}

// ,"key":value
std::string field(const char* key, uint64_t value) {
  return std::string(",\"") + key + "\":" + std::to_string(value);
}
std::string field(const char* key, const std::string& text) { return std::string(",\"") + key + "\":" + quoted(text); }

std::string finding_json(const Finding& f) {
  std::string out = "{\"kind\":" + quoted(f.kind) + field("kernel", f.kernel) + ",\"pc\":" + number(f.pc) +
                    ",\"other_pc\":" + number(f.other_pc);
  if (!f.file.empty()) out += field("file", f.file) + ",\"line\":" + std::to_string(f.line);
  return out + ",\"block\":" + triple(f.block) + ",\"thread\":" + triple(f.thread) + field("address", f.address) +
         field("tensor", f.tensor) + ",\"offset\":" + std::to_string(f.offset) + field("message", f.message) + "}";
}

std::string line_json(const void* pc, const PcStats& s) {
  uint64_t unique = 0;
  for (const auto& u : s.unique) unique += static_cast<uint64_t>(__builtin_popcount(u.second));
  return "{\"pc\":" + number(pc) + field("space", std::string(s.space)) + field("op", std::string(s.op)) +
         field("by", std::string(s.by)) + field("bytes", s.bytes) + field("requests", s.requests) +
         field("lanes", s.lanes) + field("sectors", s.sectors) + field("ideal_sectors", s.ideal_sectors) +
         field("wavefronts", s.wavefronts) + field("ideal_wavefronts", s.ideal_wavefronts) +
         field("unique_bytes", unique) + "}";
}

std::string launch_json(const LaunchTotals& t, const std::vector<Tensor>& tensors) {
  uint64_t read = 0, written = 0;
  std::string each;
  for (const auto& [index, bits] : t.touched) {
    const Tensor& tensor = tensors[static_cast<size_t>(index)];
    const uint64_t r = count_bits(bits.first), w = count_bits(bits.second);
    read += r;
    written += w;
    each += std::string(each.empty() ? "" : ",") + "{\"name\":" + quoted(tensor.name) +
            field("bytes", static_cast<uint64_t>(tensor.bytes)) + field("unique_bytes_read", r) +
            field("unique_bytes_written", w) + "}";
  }
  return "{\"kernel\":" + quoted(t.kernel) + field("blocks", t.blocks) + field("threads", t.threads) +
         field("smem_static", t.smem) + field("unique_bytes_read", read) + field("unique_bytes_written", written) +
         ",\"tensors\":[" + each + "]}";
}

}  // namespace

std::string Check::thread_text(const Node& n) const {
  if (n.flags & kLoad) return "a TMA load";
  uint32_t block = n.block,
           thread = n.warp * 32u + (n.lanes ? static_cast<uint32_t>(__builtin_ctz(n.lanes)) : 0u);
  if (n.flags & kOp) {
    block = ops[n.clock].block;
    thread = ops[n.clock].thread;
  }
  const BlockName& name = block_names[block];
  return "thread " + place(thread_index(name.dim, thread)) + " of block " + place(name.index);
}

void Check::report(const char* kind, const Access& a, const std::string& tensor, int64_t offset,
                   const std::string& message, const Node* other) {
  if (seen[{a.pc, kind}]++ > 0 || findings.size() >= kMaxFindings) return;
  Finding f;
  f.kind = kind;
  f.kernel = a.f->block->grid->name;
  f.pc = a.pc;
  f.other_pc = other ? other->pc : nullptr;
  f.file = base_name(a.file);
  f.line = a.line;
  f.block = a.f->block->index;
  f.thread = a.f->index;
  const Group* g = const_cast<Check*>(this)->group_at(a.address);
  // The address the caller knows, not that of the guarded copy.
  f.address =
      g ? reinterpret_cast<uintptr_t>(g->original) + (a.address - reinterpret_cast<uintptr_t>(g->mapped))
        : a.address;
  f.tensor = tensor;
  f.offset = offset;
  f.message = tensor + (tensor.empty() ? "" : "+" + std::to_string(offset) + ": ") + message + " [" +
              describe_thread(a.f) + "]";
  findings.push_back(std::move(f));
}

void Check::fatal(const char* kind, const Access& a, const std::string& tensor, int64_t offset,
                  const std::string& message) {
  report(kind, a, tensor, offset, message);
  worker->failed = true;
  fiber_abandon(a.f);
}

// What the runtime itself found: divergence, deadlock, misuse. The text starts with file:line where that is
// known.
void Check::failure(const std::string& text) {
  Finding f;
  f.kind = text.rfind("deadlock", 0) == 0                 ? "deadlock"
           : text.find("divergence") != std::string::npos ? "divergence"
           : text.find("reads lane") != std::string::npos ? "inactive_lane"
                                                          : "misuse";
  f.message = text;
  f.kernel = worker->failed_kernel;
  f.file = worker->failed_file;
  f.line = worker->failed_line;
  f.block = worker->failed_block;
  f.thread = worker->failed_thread;
  f.pc = worker->failed_pc;
  findings.push_back(std::move(f));
}

std::string Check::first_words() const {
  const Finding& f = findings.front();
  std::string text = f.kind + " in " + f.kernel + ": ";
  if (!f.file.empty()) text += f.file + ":" + std::to_string(f.line) + ": ";
  text += f.message;
  if (findings.size() > 1) text += " (and " + std::to_string(findings.size() - 1) + " more)";
  return text;
}

std::string Check::json() const {
  std::string out = "{\"findings\":[";
  const char* comma = "";
  for (const Finding& f : findings) {
    out += comma + finding_json(f);
    comma = ",";
  }
  out += "],\"lines\":[";
  comma = "";
  for (const auto& [pc, s] : lines) {
    out += comma + line_json(pc, s);
    comma = ",";
  }
  out += "],\"launches\":[";
  comma = "";
  for (const LaunchTotals& t : totals) {
    out += comma + launch_json(t, tensors);
    comma = ",";
  }
  return out + "]}";
}

}  // namespace pk::host
