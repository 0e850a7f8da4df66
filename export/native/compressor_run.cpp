// Runs a Compressor bundle of a language model without Python: token ids in, the likeliest next ids out.
//
// It follows compressor_runtime (export/python): the same checks in the same order, the same exit codes, nearly the same words.
// docs/bundle.md describes what it reads, "The entry" there what it calls.

#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <system_error>
#include <thread>
#include <vector>

#include "early.h"
#include "sha256.h"
#include "speculation/engine.h"
#include "speculation/kinds/registry.h"

namespace {

namespace fs = std::filesystem;
namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;
using Sizes = std::vector<int64_t>;

constexpr int64_t kSchemaVersion = 2;
constexpr size_t kPiece = 16 << 20;  // a larger file's entry has `pieces`, the SHA-256 of each so many bytes
constexpr size_t kAlignment = 64;  // the kernels use aligned vector loads: any other address ends the process
constexpr size_t kLargestHeader = 16 << 20, kDeepest = 64, kMostDimensions = 16;
constexpr int64_t kMostLayers = 4096;
constexpr int kShareCores = -3;  // TVM's kSpecifyThreadShareAllCore: threads may run on all given cores, none is pinned
constexpr const char* kPredict = "predict";  // the entry that predicts keys and values of a prompt
constexpr const char *kStream = "stream", *kLogits = "logits";  // what parts give
constexpr const char* kOff = "off";  // no drafts
constexpr const char* kUsage =
    "usage: compressor_run BUNDLE --ids 1,2,3 [--max-tokens N] [--temperature T] [--top-k K] [--top-p P] [--seed S]\n"
    "                      [--threads T] [--speculate KIND] [--draft-tokens N] [--logits FILE]\n"
    "  BUNDLE        the folder that `compress run` wrote\n"
    "  --ids         the prompt's token ids\n"
    "  --max-tokens  at most so many new tokens (default: 64)\n"
    "  --temperature 0 takes the likeliest token (the default), above 0 samples\n"
    "  --top-k       sample among so many likeliest tokens only (default: 0, all)\n"
    "  --top-p       sample among the fewest tokens whose probabilities reach it (default: 1)\n"
    "  --seed        makes sampling repeatable\n"
    "  --threads     threads that check the files and run the kernels (default: the physical cores available)\n"
    "  --speculate   drafts tokens, and verifies several in a step where that is faster: lookup, recycle, heads,\n"
    "                exit, planes, self, sparse, auto, or off (default: as the bundle's recipe says)\n"
    "  --draft-tokens  draft at most so many tokens of each kind, whether that pays or not, to measure\n"
    "  --logits      write the float32 logits after the prompt to FILE, as they are in memory\n";

enum Code { kUnusable = 1, kBadRequest = 2, kDamaged = 4 };  // exit codes

struct Failure : std::runtime_error {
  Failure(Code code, const std::string& message) : std::runtime_error(message), code(code) {}
  Code code;
};

template <class... Parts>
[[noreturn]] void fail(Code code, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Failure(code, text.str());
}

// --- memory and files

using Bytes = std::shared_ptr<uint8_t>;

Bytes zeros(size_t size) {  // aligned; large ones take memory as they are written
  void* raw = std::calloc(size + kAlignment, 1);
  if (raw == nullptr) throw std::bad_alloc();
  Bytes owner(static_cast<uint8_t*>(raw), std::free);
  return Bytes(owner, owner.get() + (kAlignment - reinterpret_cast<uintptr_t>(raw) % kAlignment) % kAlignment);
}

struct File {
  explicit File(const fs::path& path) : path(path) {  // a private, read-only mapping
    int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat facts {};
    void* data = MAP_FAILED;
    if (descriptor >= 0 && fstat(descriptor, &facts) == 0) {
      size = size_t(facts.st_size);
      data = mmap(nullptr, std::max<size_t>(size, 1), PROT_READ, MAP_PRIVATE, descriptor, 0);
    }
    int reason = errno;
    if (descriptor >= 0) close(descriptor);
    if (data == MAP_FAILED) fail(kUnusable, path.string(), ": cannot be read: ", std::strerror(reason));
    bytes = Bytes(static_cast<uint8_t*>(data), [n = std::max<size_t>(size, 1)](uint8_t* p) { munmap(p, n); });
  }
  std::string text(size_t start, size_t count) const {
    return std::string(reinterpret_cast<const char*>(bytes.get()) + start, count);
  }
  fs::path path;
  size_t size = 0;
  Bytes bytes;
};

// The file `name` of the bundle: it must lie inside and be no link, and `name` its only spelling.
fs::path member(const fs::path& root, const std::string& name) {
  std::error_code error;
  bool plain = std::none_of(name.begin(), name.end(), [](unsigned char c) { return c < 32 || c == 127 || c == '\\'; });
  fs::path file = root / name, real = fs::weakly_canonical(file, error);
  if (!plain || error || real.string() != (fs::canonical(root) / name).string()) {
    fail(kDamaged, (root / "manifest.json").string(), ": '", name,
         "' leads outside the bundle, or is not a plain name; do not trust this bundle");
  }
  if (!fs::is_regular_file(real, error)) fail(kDamaged, file.string(), ": missing; copy the bundle again");
  return real;
}

// --- JSON, as the manifest and the weights' header have it

size_t count_pairs(const json::Value& value) {
  size_t count = 0;
  if (auto object = value.as<json::Object>()) {
    for (const auto& [key, inner] : *object) count += 1 + count_pairs(inner);
  } else if (auto list = value.as<json::Array>()) {
    for (const auto& inner : *list) count += count_pairs(inner);
  }
  return count;
}

// tvm-ffi's parser goes down a level with each bracket and lets the last of equal keys win: both are caught here.
json::Object read_json(const fs::path& file, const std::string& text) {
  size_t depth = 0, deepest = 0, pairs = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (c == '"') quoted = !quoted;
    if (quoted) {
      i += c == '\\';
      continue;
    }
    pairs += c == ':';
    if (c == '{' || c == '[') deepest = std::max(deepest, ++depth);
    if ((c == '}' || c == ']') && depth != 0) --depth;
  }
  ffi::String error = deepest > kDeepest ? "nested too deeply" : "";
  json::Value value = deepest > kDeepest ? json::Value() : json::Parse(text, &error);
  if (!error.empty()) fail(kDamaged, file.string(), ": not readable as JSON (", error, "); copy the bundle again");
  if (count_pairs(value) != pairs) fail(kDamaged, file.string(), ": a key is there twice; copy the bundle again");
  auto object = value.as<json::Object>();
  return object ? *object : json::Object();
}

template <class T>
std::optional<T> find(const json::Object& entry, const char* key) {
  auto found = entry.find(ffi::String(key));
  return found == entry.end() ? std::nullopt : (*found).second.template as<T>();
}

template <class T>
T field(const json::Object& entry, const char* key, const std::string& file = "manifest.json") {
  std::optional<T> value = find<T>(entry, key);
  if constexpr (std::is_same_v<T, int64_t>) {
    if (value && *value < 0) value.reset();
  }
  if (!value) fail(kDamaged, file, ": `", key, "` is missing or of another type; copy the bundle again");
  return *value;
}

template <class T>
T field_or(const json::Object& entry, const char* key, const T& otherwise) {
  return entry.count(ffi::String(key)) != 0 ? field<T>(entry, key) : otherwise;
}

template <class T>
std::vector<T> items(const json::Object& entry, const char* key, const std::string& file = "manifest.json") {
  std::vector<T> all;
  for (const json::Value& value : field<json::Array>(entry, key, file)) {
    std::optional<T> item = value.as<T>();
    if (!item) fail(kDamaged, file, ": an item of `", key, "` is of another type; copy the bundle again");
    all.push_back(*item);
  }
  return all;
}

// --- cores

std::vector<int> usable_cpus() {
  cpu_set_t set;
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    }
  }
  if (cpus.empty()) fail(kUnusable, "this process's CPUs cannot be found out: ", std::strerror(errno));
  return cpus;
}

int available_cores() {  // physical ones, by affinity and the control group's quota
  std::set<std::string> cores;
  for (int cpu : usable_cpus()) {
    std::string name = "/sys/devices/system/cpu/cpu" + std::to_string(cpu), siblings;
    std::getline(std::ifstream(name + "/topology/thread_siblings_list"), siblings);
    cores.insert(siblings.empty() ? name : siblings);
  }
  std::string share;
  int64_t quota, period, count = int64_t(cores.size());
  std::ifstream limits("/sys/fs/cgroup/cpu.max");
  if (limits >> share >> period && share != "max" && period > 0) {
    std::istringstream(share) >> quota;
    count = std::max<int64_t>(1, std::min(count, quota / period));
  }
  return int(count);
}

// --- what must hold before anything of the bundle is used

json::Object read_manifest(const fs::path& root) {
  std::error_code error;
  if (!fs::is_regular_file(root / "manifest.json", error)) {
    const char* what = fs::exists(root, error) ? "not a bundle: it has no manifest.json" : "no such folder";
    fail(kUnusable, root.string(), ": ", what, "; give the folder that `compress run` wrote");
  }
  File file(member(root, "manifest.json"));
  if (file.size > kLargestHeader) fail(kDamaged, file.path.string(), ": ", file.size, " bytes are too many");
  json::Object manifest = read_json(file.path, file.text(0, file.size));
  if (find<ffi::String>(manifest, "format").value_or("") != "compressor bundle") {
    fail(kUnusable, root.string(), ": not a Compressor bundle; give the folder that `compress run` wrote");
  }
  if (int64_t version = field<int64_t>(manifest, "schema_version"); version > kSchemaVersion) {
    fail(kUnusable, root.string(), ": schema version ", version, ", this program reads up to ", kSchemaVersion,
         "; build it again from a newer Compressor");
  }
  return manifest;
}

std::string letters(const std::string& feature) {  // Linux and LLVM spell them differently: avx512_vnni, avx512vnni
  std::string found;
  for (unsigned char c : feature) found += std::isalnum(c) ? std::string(1, char(c)) : "";
  return found;
}

std::set<std::string> cpu_flags() {
#if defined(__aarch64__) && defined(__linux__)
  // As in Python: /proc/cpuinfo under an emulator is its host's.  Bits of arch/arm64/include/uapi/asm/hwcap.h.
  unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  std::set<std::string> present;
  if (first >> 1 & 1) present.insert("asimd");
  if (first >> 20 & 1) present.insert("asimddp");
  if (second >> 13 & 1) present.insert("i8mm");
  return present;
#else
  std::ifstream info("/proc/cpuinfo");
  std::set<std::string> present;
  for (std::string line, flag; present.empty() && std::getline(info, line);) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    for (std::istringstream flags(line.substr(line.find(':') + 1)); flags >> flag;) present.insert(letters(flag));
  }
  return present;
#endif
}

// Features that this CPU lacks, or that the system does not let processes use, with commas between them.
std::string missing_features(const std::vector<ffi::String>& required) {
  static const std::set<std::string> present = cpu_flags();
  std::string missing;
  bool tiles = false;
  for (const ffi::String& name : required) {
    if (present.count(letters(name)) == 0) missing += (missing.empty() ? "" : ", ") + std::string(name);
    tiles = tiles || name == "amx_tile";
  }
#if defined(__x86_64__)
  // A process must ask Linux before the first use of AMX's tile registers: ARCH_REQ_XCOMP_PERM, XTILEDATA.
  if (missing.empty() && tiles && syscall(SYS_arch_prctl, 0x1023, 18) != 0) missing = "amx_tile";
#endif
  return missing;
}

// Files of the kernels for each instruction set, the most demanding first; older bundles have one and do not list it.
std::vector<std::pair<std::string, std::vector<ffi::String>>> libraries(const json::Object& manifest) {
  if (manifest.count("libraries") == 0) return {{"model.so", items<ffi::String>(manifest, "cpu_features")}};
  std::vector<std::pair<std::string, std::vector<ffi::String>>> found;
  for (const json::Object& entry : items<json::Object>(manifest, "libraries")) {
    found.emplace_back(field<ffi::String>(entry, "file"), items<ffi::String>(entry, "cpu_features"));
  }
  if (found.empty()) fail(kDamaged, "manifest.json: `libraries` is empty; copy the bundle again");
  return found;
}

std::string choose_library(const fs::path& root, const json::Object& manifest) {
  std::string missing = missing_features(items<ffi::String>(manifest, "cpu_features"));  // what all of them need
  if (missing.empty()) {
    for (const auto& [file, features] : libraries(manifest)) {
      missing = missing_features(features);
      if (missing.empty()) return file;
    }
  }
  fail(kUnusable, root.string(), ": this CPU lacks ", missing, "; compress again for this CPU");
}

struct Span {
  const File* file;
  size_t start, size;
  std::string digest;
};

void check_files(const fs::path& root, const json::Object& manifest, int threads) {
  auto files = field<json::Object>(manifest, "files");
  std::vector<std::string> needed = {"model.so", "weights.safetensors", "lib/libtvm_runtime.so"};
  for (const auto& library : libraries(manifest)) needed.push_back(library.first);
  for (const std::string& name : needed) {
    if (!find<json::Object>(files, name.c_str())) fail(kDamaged, "manifest.json: `files` does not list ", name);
  }
  std::vector<std::unique_ptr<File>> mapped;
  std::vector<Span> spans;
  for (const auto& [key, value] : files) {
    auto name = key.cast<ffi::String>();
    auto entry = field<json::Object>(files, name.c_str());
    int64_t size = field<int64_t>(entry, "bytes");
    auto digest = field<ffi::String>(entry, "sha256");
    const File& file = *mapped.emplace_back(std::make_unique<File>(member(root, name)));
    if (int64_t(file.size) != size) {
      fail(kDamaged, file.path.string(), ": ", file.size, " bytes in place of ", size, "; copy the bundle again");
    }
    if (entry.count("pieces") == 0) {  // a small file, or an older bundle's
      spans.push_back({&file, 0, file.size, digest});
      continue;
    }
    auto pieces = items<ffi::String>(entry, "pieces");
    size_t expected = (file.size + kPiece - 1) / kPiece;
    if (pieces.size() != expected) {
      fail(kDamaged, "manifest.json: `pieces` of ", name, ": ", pieces.size(), " of them, ", size, " bytes have ",
           expected, " of ", kPiece, "; copy the bundle again");
    }
    for (size_t i = 0; i < expected; ++i) {
      spans.push_back({&file, i * kPiece, std::min(kPiece, file.size - i * kPiece), pieces[i]});
    }
  }
  std::atomic<size_t> next = 0, wrong = spans.size();  // wrong: the first that is not what the manifest says
  auto check = [&] {
    for (size_t i; (i = next++) < wrong;) {
      const auto& [file, start, size, digest] = spans[i];
      if (digest == sha256::hex(file->bytes.get() + start, size)) continue;
      for (size_t first = wrong; i < first && !wrong.compare_exchange_weak(first, i);) continue;
    }
  };
  std::vector<std::thread> helpers;
  try {
    while (helpers.size() + 1 < std::min(size_t(threads), spans.size())) helpers.emplace_back(check);
  } catch (const std::system_error&) {  // no more threads: those that are there do it
  }
  check();
  for (std::thread& helper : helpers) helper.join();
  if (wrong == spans.size()) return;
  const auto& [file, start, size, digest] = spans[wrong];
  fail(kDamaged, file->path.string(), ": its SHA-256 is not the manifest's (bytes ", start, " to ", start + size,
       "); copy the bundle again");
}

// A part of what verifies tokens: an entry, the names of its arguments and of its results, and the axis along which
// tokens lie in each of these, -1 where it is the same for all.
struct Part {
  std::string entry;
  std::vector<ffi::String> takes, gives;
  Sizes axes;
};

struct Model {
  int64_t vocabulary, layers, limit, row_bytes;  // row: keys, or values, of one token and head
  std::vector<int64_t> heads;  // of keys, by layer
  bool dense_cache;
  std::vector<int64_t> ends;
  std::string speculate;  // drafts that the recipe asks for; empty for none
  std::vector<Part> parts = {};
  std::optional<early::Facts> exits = {};  // where tokens leave early
  std::vector<speculation::Subset> subsets = {};  // of the parts between the first and the last, which draft
  std::optional<speculation::Lossy> lossy = {};  // where the drafts that the recipe asks for change greedy texts
  int64_t predicts = 0;  // layers whose caches the entry `predict` takes as scratch; 0 where there is none
};

// Parts that are entries and fit together, as `Model::parts`.
std::vector<Part> read_parts(const json::Object& manifest, const json::Object& facts, int64_t layers) {
  std::vector<Part> parts;
  if (facts.count(ffi::String("parts")) == 0) return parts;
  auto entries = field<json::Object>(manifest, "entries");
  std::set<std::string> known = {"ids", "position", "keep", "parent", "slot", "row"};
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (const char* name : {"k_cache_", "v_cache_"}) known.insert(name + std::to_string(layer));
  }
  bool fits = true;
  for (const json::Object& part : items<json::Object>(facts, "parts")) {
    Part read{field<ffi::String>(part, "entry"), items<ffi::String>(part, "takes"), items<ffi::String>(part, "gives"),
              items<int64_t>(part, "axes")};
    fits = fits && entries.count(ffi::String(read.entry)) != 0 && !read.gives.empty();
    fits = fits && read.axes.size() == read.gives.size();
    for (const ffi::String& name : read.takes) fits = fits && known.count(name) != 0;
    known.insert(read.gives.begin(), read.gives.end());
    parts.push_back(std::move(read));
  }
  fits = fits && parts.size() > 1;
  if (!fits || std::count(parts.back().gives.begin(), parts.back().gives.end(), kLogits) == 0) {
    fail(kDamaged, "manifest.json: `parts` has a value that cannot be; copy the bundle again");
  }
  return parts;
}

// Where tokens leave, behind parts between the first and the last, of which the last has no exit behind it.
early::Facts read_exits(const json::Object& facts, size_t parts) {
  auto stated = field<json::Object>(facts, "exits");
  early::Facts exits{items<int64_t>(stated, "blocks"), field<int64_t>(stated, "of"), items<double>(stated, "thresholds"),
                     field<double>(stated, "give_up"), size_t(field<int64_t>(stated, "window"))};
  bool rises = !exits.blocks.empty() && exits.blocks.front() > 0 && exits.blocks.back() < exits.of &&
               std::is_sorted(exits.blocks.begin(), exits.blocks.end());
  if (!rises || exits.thresholds.size() != exits.blocks.size() || parts != exits.blocks.size() + 3) {
    fail(kDamaged, "manifest.json: `exits` has a value that cannot be; copy the bundle again");
  }
  return exits;
}

// Subsets of the parts between the first and the last that draft.
std::vector<speculation::Subset> read_subsets(const json::Object& facts, const std::vector<Part>& parts) {
  std::vector<speculation::Subset> subsets;
  if (facts.count(ffi::String("skips")) == 0) return subsets;
  bool fits = parts.size() > 1;
  for (const json::Object& stated : items<json::Object>(facts, "skips")) {
    speculation::Subset read{{}, field<double>(stated, "agreement"), field<double>(stated, "cost")};
    std::set<std::string> without;
    for (const ffi::String& name : items<ffi::String>(stated, "without")) without.insert(name);
    for (size_t i = 1; i + 1 < parts.size(); ++i) {
      if (without.erase(parts[i].entry) == 0) read.kept.push_back(i);
    }
    fits = fits && without.empty() && read.agreement >= 0 && read.cost >= 0 && std::isfinite(read.cost) &&
           std::isfinite(read.agreement);
    subsets.push_back(std::move(read));
  }
  if (!fits || subsets.empty()) {
    fail(kDamaged, "manifest.json: `skips` has a value that cannot be; copy the bundle again");
  }
  return subsets;
}

std::optional<speculation::Lossy> read_lossy(const json::Object& facts, const std::string& speculate) {
  if (facts.count(ffi::String("lossy")) == 0) return std::nullopt;
  auto stated = field<json::Object>(facts, "lossy");
  speculation::Lossy lossy{field<double>(stated, "tolerance")};
  if (stated.count(ffi::String("lossless_agreement")) != 0) {
    lossy.measured = {field<double>(stated, "lossless_agreement"), field<double>(stated, "lossy_perplexity"),
                      field<double>(stated, "lossless_perplexity")};
  }
  if (speculate != speculation::kSparse || !(lossy.tolerance > 0 && lossy.tolerance <= 1)) {
    fail(kDamaged, "manifest.json: `lossy` has a value that cannot be; copy the bundle again");
  }
  return lossy;
}

Model read_model(const fs::path& root, const json::Object& manifest) {
  if (auto kind = field<ffi::String>(manifest, "kind"); kind != "decoder") {
    fail(kBadRequest, root.string(), ": holds a ", kind, "; only a decoder generates");
  }
  auto facts = field<json::Object>(manifest, "model");
  if (facts.count(ffi::String("states")) != 0) {
    fail(kBadRequest, root.string(), ": has recurrent layers, whose states this runner does not keep; run it from Python");
  }
  Model model{field<int64_t>(facts, "vocab_size"), field<int64_t>(facts, "layers"),
              field<int64_t>(facts, "max_positions"), 0, {}, true, items<int64_t>(facts, "eos_ids"),
              field_or<ffi::String>(facts, "speculate", "")};
  if (!model.speculate.empty() && !speculation::is_kind(model.speculate)) {
    fail(kDamaged, "manifest.json: `speculate` has a value that cannot be; copy the bundle again");
  }
  model.lossy = read_lossy(facts, model.speculate);
  model.predicts = field_or<int64_t>(facts, "predicts", 0);
  if (model.predicts < 0 || (model.predicts != 0 && model.predicts >= model.layers)) {
    fail(kDamaged, "manifest.json: `predicts` has a value that cannot be; copy the bundle again");
  }
  if (model.limit == 0) model.limit = INT64_MAX;  // the model states none
  // Bundles from before caches had formats do not mention them.
  model.dense_cache = field_or<ffi::String>(facts, "cache_format", "FP32") == "FP32";
  int64_t rows = 0, dense_bytes, head_dim = field<int64_t>(facts, "head_dim");
  bool fits = model.vocabulary > 0 && model.layers > 0 && model.layers <= kMostLayers && head_dim > 0;
  if (fits && facts.count(ffi::String("uneven_heads")) != 0) {
    model.heads = items<int64_t>(facts, "uneven_heads");
    fits = int64_t(model.heads.size()) == model.layers;
  } else if (fits) {
    model.heads.assign(size_t(model.layers), field<int64_t>(facts, "kv_heads"));
  }
  for (int64_t heads : model.heads) fits = fits && heads > 0 && !__builtin_add_overflow(rows, heads, &rows);
  fits = fits && !__builtin_mul_overflow(rows, int64_t(2), &rows) &&
              !__builtin_mul_overflow(rows, head_dim, &dense_bytes) &&
              !__builtin_mul_overflow(dense_bytes, int64_t(sizeof(float)), &dense_bytes);
  int64_t bytes = fits ? field_or<int64_t>(facts, "cache_bytes_per_token", dense_bytes) : 0;
  if (!fits || bytes <= 0 || (model.dense_cache ? bytes != dense_bytes : bytes % rows != 0)) {
    fail(kDamaged, "manifest.json: sizes of `model` cannot be; copy the bundle again");
  }
  model.row_bytes = bytes / rows;
  model.parts = read_parts(manifest, facts, model.layers);
  model.subsets = read_subsets(facts, model.parts);
  if (!model.parts.empty() && facts.count(ffi::String("exits")) != 0) {
    model.exits = read_exits(facts, model.parts.size());
  }
  return model;
}

// --- parameters

const std::map<std::string, DLDataType> kTypes = {
    {"F16", {kDLFloat, 16, 1}}, {"F32", {kDLFloat, 32, 1}}, {"F64", {kDLFloat, 64, 1}}, {"I8", {kDLInt, 8, 1}},
    {"I16", {kDLInt, 16, 1}},   {"I32", {kDLInt, 32, 1}},   {"I64", {kDLInt, 64, 1}},   {"U8", {kDLUInt, 8, 1}},
    {"U16", {kDLUInt, 16, 1}},  {"U32", {kDLUInt, 32, 1}},  {"U64", {kDLUInt, 64, 1}},  {"BOOL", {kDLBool, 8, 1}},
    {"BF16", {kDLUInt, 16, 1}},  // the kernels take the bits
};

struct Lent {  // tvm-ffi's allocator: memory that is there already
  Bytes bytes;
  void AllocData(DLTensor* tensor) { tensor->data = bytes.get(); }
  void FreeData(DLTensor*) {}
};

ffi::Tensor tensor(const Bytes& bytes, const Sizes& shape, DLDataType type) {
  return ffi::Tensor::FromNDAlloc(Lent{bytes}, ffi::ShapeView(shape.data(), shape.size()), type, DLDevice{kDLCPU, 0});
}

ffi::Tensor tensor(const Sizes& values) {
  Bytes bytes = zeros(values.size() * sizeof(int64_t));
  std::memcpy(bytes.get(), values.data(), values.size() * sizeof(int64_t));
  return tensor(bytes, {int64_t(values.size())}, {kDLInt, 64, 1});
}

int64_t product(const Sizes& sizes, size_t begin, size_t end) {
  return std::accumulate(sizes.begin() + int64_t(begin), sizes.begin() + int64_t(end), int64_t(1),
                         std::multiplies<int64_t>());
}

// Several tensors as one, each behind the one before along an axis.
ffi::Tensor joined(const std::vector<ffi::Tensor>& pieces, size_t axis) {
  Sizes shape(pieces[0].shape().begin(), pieces[0].shape().end());
  bool fits = axis < shape.size();
  auto rest = [axis](ffi::ShapeView sizes) {
    Sizes others(sizes.begin(), sizes.end());
    if (axis < others.size()) others[axis] = 0;
    return others;
  };
  for (size_t i = 1; i < pieces.size() && fits; ++i) {
    fits = pieces[i].dtype() == pieces[0].dtype() && rest(pieces[i].shape()) == rest(pieces[0].shape());
    if (fits) shape[axis] += pieces[i].shape()[axis];
  }
  for (const ffi::Tensor& piece : pieces) fits = fits && piece.IsContiguous();
  if (!fits) fail(kUnusable, "model.so: what its parts return does not fit together; compress again");
  int64_t outer = product(shape, 0, axis);
  int64_t inner = product(shape, axis + 1, shape.size()) * (pieces[0].dtype().bits / 8);
  Bytes bytes = zeros(size_t(outer * shape[axis] * inner));
  uint8_t* target = bytes.get();
  for (int64_t row = 0; row < outer; ++row) {
    for (const ffi::Tensor& piece : pieces) {
      size_t size = size_t(piece.shape()[axis] * inner);
      std::memcpy(target, static_cast<const uint8_t*>(piece.data_ptr()) + size_t(row) * size, size);
      target += size;
    }
  }
  return tensor(bytes, shape, pieces[0].dtype());
}

// One of several tokens' values, which lie along an axis.
ffi::Tensor one_of(const ffi::Tensor& all, size_t axis, size_t place, size_t count) {
  Sizes shape(all.shape().begin(), all.shape().end());
  if (axis >= shape.size() || shape[axis] != int64_t(count) || !all.IsContiguous()) {
    fail(kUnusable, "model.so: what its parts return does not fit together; compress again");
  }
  size_t outer = size_t(product(shape, 0, axis));
  size_t inner = size_t(product(shape, axis + 1, shape.size()) * (all.dtype().bits / 8));
  Bytes bytes = zeros(outer * inner);
  auto* source = static_cast<const uint8_t*>(all.data_ptr());
  for (size_t row = 0; row < outer; ++row) {
    std::memcpy(bytes.get() + row * inner, source + (row * count + place) * inner, inner);
  }
  shape[axis] = 1;
  return tensor(bytes, shape, all.dtype());
}

struct Entry {
  int64_t start, end;
  std::string name, type;
  Sizes shape;
};

// Tensors of a safetensors file by name, mapped; what does not begin at a multiple of 64 bytes is copied.
std::map<std::string, ffi::Tensor> read_safetensors(const fs::path& path) {
  File file(path);
  uint64_t header_bytes = 0;
  if (file.size >= 8) std::memcpy(&header_bytes, file.bytes.get(), 8);  // low byte first, as all targets have it
  if (file.size < 8 || header_bytes > std::min<uint64_t>(kLargestHeader, file.size - 8)) {
    fail(kDamaged, path.string(), ": not a valid safetensors file (its header); copy the bundle again");
  }
  std::vector<Entry> entries;
  for (const auto& [key, value] : read_json(path, file.text(8, header_bytes))) {
    auto name = key.cast<ffi::String>();
    if (name == "__metadata__") continue;
    auto facts = value.as<json::Object>().value_or(json::Object());
    auto type = field<ffi::String>(facts, "dtype", path);
    Sizes offsets = items<int64_t>(facts, "data_offsets", path), shape = items<int64_t>(facts, "shape", path);
    if (offsets.size() != 2) offsets = {-1, -1};  // found to be wrong below
    entries.push_back({offsets[0], offsets[1], name, type, shape});
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return std::tie(a.start, a.end) < std::tie(b.start, b.end); });
  std::map<std::string, ffi::Tensor> tensors;
  int64_t cursor = 0, data_bytes = int64_t(file.size - 8 - header_bytes);
  for (const Entry& entry : entries) {
    auto type = kTypes.find(entry.type);
    bool whole = type != kTypes.end() && entry.start == cursor && entry.shape.size() <= kMostDimensions;
    int64_t size = whole ? type->second.bits / 8 : 0;
    for (int64_t n : entry.shape) whole = whole && n >= 0 && !__builtin_mul_overflow(size, n, &size);
    if (!whole || size > data_bytes - cursor || entry.end != cursor + size) {
      fail(kDamaged, path.string(), ": type, shape or offsets of ", entry.name, " cannot be; copy the bundle again");
    }
    Bytes bytes(file.bytes, file.bytes.get() + 8 + header_bytes + cursor);
    if (reinterpret_cast<uintptr_t>(bytes.get()) % kAlignment != 0) {
      Bytes copy = zeros(size_t(size));
      std::memcpy(copy.get(), bytes.get(), size_t(size));
      bytes = copy;
    }
    tensors.emplace(entry.name, tensor(bytes, entry.shape, type->second));
    cursor = entry.end;
  }
  if (cursor != data_bytes) fail(kDamaged, path.string(), ": ", data_bytes, " bytes of data, ", cursor, " described");
  return tensors;
}

constexpr int64_t kTileRows = 16;

// In the entry's order, each with the type and shape that the kernels were made for.
ffi::Array<ffi::Tensor> read_parameters(const fs::path& root, const json::Object& manifest, int64_t vocabulary) {
  fs::path file = member(root, "weights.safetensors");
  auto stored = read_safetensors(file);
  auto names = items<ffi::String>(manifest, "parameters");
  bool stated = field<int64_t>(manifest, "schema_version") > 1 || find<json::Array>(manifest, "parameter_types");
  auto types = stated ? items<json::Object>(manifest, "parameter_types") : std::vector<json::Object>();
  if (stated && names.size() != types.size()) {
    fail(kDamaged, "manifest.json: ", names.size(), " `parameters`, ", types.size(), " `parameter_types`");
  }
  ffi::Array<ffi::Tensor> parameters;
  int64_t largest_table = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    auto found = stored.find(names[i]);
    if (found == stored.end()) fail(kDamaged, file.string(), ": lacks ", names[i], "; copy the bundle again");
    ffi::ShapeView shape = found->second.shape();
    if (stated) {
      auto type = kTypes.find(field<ffi::String>(types[i], "dtype"));
      Sizes expected = items<int64_t>(types[i], "shape");
      if (type == kTypes.end() || type->second != found->second.dtype() ||
          !std::equal(shape.begin(), shape.end(), expected.begin(), expected.end())) {
        fail(kDamaged, file.string(), ": ", names[i], " is not of the type and shape that the kernels take");
      }
    }
    if (shape.size() == 2) largest_table = std::max(largest_table, shape[0]);
    bool is_codes = shape.size() == 4 && shape[3] == kTileRows;  // of a packed table: its kernel keeps ids inside
    if (is_codes) largest_table = std::max(largest_table, kTileRows * shape[0]);
    parameters.push_back(found->second);
  }
  if (vocabulary > largest_table) {  // the kernels do not check ids
    fail(kDamaged, "manifest.json: `vocab_size` exceeds the rows of every table in weights.safetensors");
  }
  return parameters;
}

// Of each entry function, the indices of its parameters; bundles that verify no drafted tokens have `main` alone.
std::map<std::string, Sizes> read_entries(const json::Object& manifest, size_t parameters) {
  if (manifest.count("entries") == 0) {
    Sizes all(parameters);
    std::iota(all.begin(), all.end(), 0);
    return {{"main", all}};
  }
  auto listed = field<json::Object>(manifest, "entries");
  std::map<std::string, Sizes> entries;
  bool predicts = field<json::Object>(manifest, "model").count("predicts") != 0;
  std::set<std::string> names = {"main", predicts ? kPredict : speculation::kVerify};
  for (const auto& [key, indices] : listed) {
    if (!predicts) names.insert(key.cast<ffi::String>());
  }
  for (const std::string& name : names) {
    for (int64_t index : entries[name] = items<int64_t>(listed, name.c_str())) {
      if (index >= 0 && index < int64_t(parameters)) continue;
      fail(kDamaged, "manifest.json: `entries` names parameters that are not there; copy the bundle again");
    }
  }
  return entries;
}

// --- the kernels

// An idle worker of TVM's yields so often before it sleeps.  Its own 300,000 times take minutes where other processes
// want the processor, and the end of a process waits for them; these are half a millisecond where none does.
constexpr const char* kSpins = "1000";

void configure_threads(int threads) {
  setenv("TVM_THREAD_POOL_SPIN_COUNT", kSpins, 0);
  std::vector<int> cpus = usable_cpus();
  ffi::Array<ffi::String> names;  // TVM makes a pool as large as this list when it makes one
  while (names.size() < size_t(threads)) {
    for (int cpu : cpus) names.push_back(std::to_string(cpu));
  }
  ffi::Function::GetGlobalRequired("runtime.config_threadpool")(kShareCores, threads, names);
}

class Kernels {
 public:
  Kernels(const fs::path& root, const json::Object& manifest, const std::string& library,
          const ffi::Array<ffi::Tensor>& parameters, int threads)
      : library_(member(root, library)) {
    for (const auto& [name, indices] : read_entries(manifest, parameters.size())) {
      for (int64_t index : indices) entries_[name].parameters.push_back(parameters[index]);
    }
    fs::path runtime = member(root, "lib/libtvm_runtime.so");
    if (dlopen(runtime.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      auto versions = find<json::Object>(manifest, "versions").value_or(json::Object());
      fail(kUnusable, runtime.string(), ": cannot be loaded (", dlerror(), "); build this program with apache-tvm-ffi ",
           find<ffi::String>(versions, "apache-tvm-ffi").value_or("as the bundle's README.md says"));
    }
    try {
      configure_threads(threads);
      ffi::Module module = ffi::Module::LoadFromFile(library_.string());
      machine_ = module->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
      (*machine_)->GetFunction("vm_initialization").value()(1, 0, 2);  // one device: CPU 0, pooled allocator
      for (auto& [name, entry] : entries_) entry.function = (*machine_)->GetFunction(name).value();
    } catch (const std::exception& error) {
      fail(kUnusable, library_.string(), ": cannot be loaded: ", error.what());
    }
  }

  bool has(const std::string& entry) const { return entries_.count(entry) != 0; }

  // At least so many results.
  std::vector<ffi::Tensor> results(const std::string& name, std::vector<ffi::Any> arguments, size_t least) const {
    const Entry& entry = entries_.at(name);
    arguments.push_back(entry.parameters);
    std::vector<ffi::AnyView> views(arguments.begin(), arguments.end());
    ffi::Any result;
    try {
      entry.function.value().CallPacked(views.data(), int32_t(views.size()), &result);
      auto several = result.as<ffi::Array<ffi::Tensor>>();
      if (!several) several = ffi::Array<ffi::Tensor>{result.cast<ffi::Tensor>()};
      if (several->size() < least) throw std::runtime_error("an entry gives too few results");
      return std::vector<ffi::Tensor>(several->begin(), several->end());
    } catch (const std::exception& error) {
      fail(kUnusable, library_.string(), ": does not take what manifest.json describes: ", error.what());
    }
  }

 private:
  struct Entry {
    ffi::Array<ffi::Tensor> parameters;
    std::optional<ffi::Function> function;
  };

  fs::path library_;
  std::optional<ffi::Module> machine_;
  std::map<std::string, Entry> entries_;
};

// Tokens, a number of each for each, by the names of the entries' inputs.
struct Rows {
  Sizes ids, position, parent, slot, row;
};

// Keys and values of the tokens seen so far.
class Session : public speculation::Target {
 public:
  Session(const Kernels& kernels, const Model& model, int64_t capacity) : kernels_(kernels), model_(model) {
    resize(std::min(capacity, model.limit));
  }

  // Appends the tokens that a text begins with; logits [V] after the last.  Where the bundle predicts caches, the others
  // leave predicted keys and values.
  std::vector<float> prompt(const Sizes& ids) {
    if (!kernels_.has(kPredict) || ids.size() < 2) return append(ids);
    predict(Sizes(ids.begin(), ids.end() - 1));
    return append({ids.back()});
  }

  std::vector<float> step(int64_t token) override {
    if (!std::exchange(wants_hidden_, false)) return append({token});
    hidden_.clear();
    std::vector<float> logits = verified(speculation::kVerify, in_a_row(make_room({token}), {token}));
    accept({0});
    return logits;
  }

  std::vector<float> draft(const std::string& entry, int64_t token, size_t ahead) override {
    drafted_.clear();  // it writes over what the first part left
    return verified(entry, in_a_row(make_room({token}, int64_t(ahead)), {token}));
  }

  std::vector<float> draft_first(int64_t token, size_t ahead) override {
    part(0, in_a_row(make_room({token}, int64_t(ahead)), {token}));
    drafted_.resize(ahead);
    drafted_.push_back({token, {}});
    for (const ffi::String& name : model_.parts[0].gives) drafted_.back().values.emplace(name, values_.at(name));
    part(model_.parts.size() - 1, {});
    return floats(values_.at(kLogits));
  }

  std::vector<float> draft_through(const std::vector<size_t>& parts, int64_t token, size_t ahead) override {
    drafted_.clear();  // a verification runs the whole in one entry: an embedding is not worth its parts' calls
    Rows rows = in_a_row(make_room({token}, int64_t(ahead)), {token});
    part(0, rows);
    for (size_t index : parts) part(index, rows);
    part(model_.parts.size() - 1, {});
    return floats(values_.at(kLogits));
  }

  std::vector<float> verify(const Sizes& ids, const Sizes& parents) override {
    Rows rows = behind(ids, parents);
    if (!go_on_from_draft(rows)) return verified(speculation::kVerify, rows);
    for (size_t index = 1; index < model_.parts.size(); ++index) part(index, rows);
    given_.reset();
    return floats(values_.at(kLogits));
  }

  void accept(const std::vector<size_t>& path) override {
    for (size_t i = 0; i < path.size(); ++i) {  // a row moves towards the front, behind those that are there
      if (path[i] != i) move_row(position_ + int64_t(path[i]), position_ + int64_t(i));
    }
    wants_hidden_ = false;
    hidden_.clear();
    if (given_) {
      int64_t width = given_->shape()[2];
      auto* row = static_cast<const float*>(given_->data_ptr()) + int64_t(path.back()) * width;
      hidden_.assign(row, row + width);
    }
    advance(int64_t(path.size()));
  }

  std::vector<speculation::Logits> heads(int64_t following) override {
    wants_hidden_ = true;
    std::vector<speculation::Logits> found;
    if (hidden_.empty()) return found;
    Bytes bytes = zeros(hidden_.size() * sizeof(float));
    std::memcpy(bytes.get(), hidden_.data(), hidden_.size() * sizeof(float));
    ffi::Tensor state = tensor(bytes, {1, 1, int64_t(hidden_.size())}, {kDLFloat, 32, 1});
    std::vector<ffi::Any> arguments = {state, tensor(Sizes{following}).as_strided({1, 1}, {1, 1})};
    ffi::Tensor logits = kernels_.results(speculation::Heads::kName, std::move(arguments), 1)[0];
    std::vector<float> all = floats(logits);
    if (logits.shape().size() != 4) fail(kUnusable, "model.so: its entry `heads` returns no rows; compress again");
    for (auto width = logits.shape()[3], head = int64_t(0); head < logits.shape()[2]; ++head) {
      found.emplace_back(all.begin() + head * width, all.begin() + (head + 1) * width);
    }
    return found;
  }

  int64_t left() const { return model_.limit - position_; }

  // Appends a token that is read in stages; its position.
  int64_t advance_in_stages(int64_t token) {
    int64_t position = make_room({token});
    advance(1);
    return position;
  }

  // The stages of tokens that are appended already.
  early::Stages stages() {
    auto put = [this](const early::Rows& rows, size_t count) {
      Bytes bytes = zeros(rows.size() * sizeof(float));
      std::memcpy(bytes.get(), rows.data(), rows.size() * sizeof(float));
      values_[kStream] = tensor(bytes, {1, int64_t(count), int64_t(rows.size() / count)}, {kDLFloat, 32, 1});
    };
    auto begin = [this](const Sizes& ids, int64_t first) {
      part(0, in_a_row(first, ids));
      begun_ = ids, first_ = first;
      return floats(values_.at(kStream));
    };
    auto run = [this, put, begin](size_t number, const Sizes& ids, int64_t first, const early::Rows& stream) {
      if (ids != begun_ || first != first_) begin(ids, first);  // what stages share depends on the places
      put(stream, ids.size());
      part(1 + number, in_a_row(first, ids));
      return floats(values_.at(kStream));
    };
    auto end = [this, put](const early::Rows& row) {
      put(row, 1);
      part(model_.parts.size() - 1, {});
      return floats(values_.at(kLogits));
    };
    return {begin, run, end};
  }

 private:
  using Values = std::map<std::string, ffi::Tensor>;

  // A drafted token, and what the first part gave of it.
  struct Drafted {
    int64_t token;
    Values values;
  };

  static std::vector<float> floats(const ffi::Tensor& rows) {
    if (rows.dtype() != DLDataType{kDLFloat, 32, 1} || !rows.IsContiguous() || rows.numel() == 0) {
      fail(kUnusable, "model.so: one of its entries returns no float32 rows; compress again");
    }
    auto* data = static_cast<const float*>(rows.data_ptr());
    return std::vector<float>(data, data + rows.numel());
  }

  // Tokens one behind another, each behind the rows of the cache: no tree.
  static Rows in_a_row(int64_t position, const Sizes& ids) {
    Sizes positions(ids.size());
    std::iota(positions.begin(), positions.end(), position);
    return {ids, positions, Sizes(ids.size(), speculation::kRoot), Sizes(ids.size()), positions};
  }

  // Trees of tokens behind the stored ones, which have room then.
  Rows behind(const Sizes& ids, const Sizes& parents) {
    check(ids);
    Rows rows{ids, {}, parents, Sizes(ids.size()), Sizes(ids.size())};
    for (int64_t parent : parents) {
      rows.position.push_back(parent == speculation::kRoot ? position_ : rows.position[size_t(parent)] + 1);
    }
    std::iota(rows.row.begin(), rows.row.end(), position_);
    int64_t deepest = *std::max_element(rows.position.begin(), rows.position.end());
    reserve(deepest + 1 - position_, int64_t(ids.size()));
    return rows;
  }

  // Brings tokens to where the first part ends, with what a draft left of those that it has read at the same places
  // behind the same tokens; false where it has read none.
  bool go_on_from_draft(const Rows& rows) {
    size_t count = rows.ids.size();
    std::vector<const Values*> found(count);
    std::vector<size_t> fresh, places(count);  // tokens that no draft has read, and the place of each among them
    for (size_t t = 0; t < count; ++t) {
      size_t place = size_t(rows.row[t] - position_), parent = size_t(rows.parent[t]);
      bool follows = place == 0 ? rows.parent[t] < 0 : rows.parent[t] >= 0 && found[parent] != nullptr;
      bool same = place < drafted_.size() && drafted_[place].token == rows.ids[t] && rows.row[t] == rows.position[t];
      if (same && follows) found[t] = &drafted_[place].values;
      if (found[t] == nullptr) places[t] = fresh.size(), fresh.push_back(t);
    }
    if (fresh.size() == count) {
      drafted_.clear();
      return false;
    }
    if (!fresh.empty()) {
      Rows own;
      for (size_t t : fresh) {
        // One whose parent was read before follows rows of the cache, as behind a shorter text.
        bool is_own = rows.parent[t] >= 0 && found[size_t(rows.parent[t])] == nullptr;
        own.ids.push_back(rows.ids[t]), own.position.push_back(rows.position[t]), own.slot.push_back(0);
        own.parent.push_back(is_own ? int64_t(places[size_t(rows.parent[t])]) : speculation::kRoot);
        own.row.push_back(rows.row[t]);
      }
      part(0, own);
    }
    const Part& first = model_.parts[0];
    for (size_t i = 0; i < first.gives.size(); ++i) {
      if (first.axes[i] < 0) continue;  // the same for all
      size_t axis = size_t(first.axes[i]);
      std::vector<ffi::Tensor> pieces;
      for (size_t t = 0; t < count; ++t) {
        pieces.push_back(found[t] != nullptr ? found[t]->at(first.gives[i])
                                             : one_of(values_.at(first.gives[i]), axis, places[t], fresh.size()));
      }
      values_[first.gives[i]] = joined(pieces, axis);
    }
    drafted_.clear();
    return true;
  }

  // Runs a part of the model on tokens, or on the stream alone; what it gives is kept by name.
  void part(size_t index, const Rows& rows) {
    const Part& facts = model_.parts[index];
    int64_t count = int64_t(rows.ids.size());
    std::vector<ffi::Any> arguments;
    for (const ffi::String& given : facts.takes) {
      std::string name = given;
      if (size_t digits = name.find("_cache_"); digits == 1) {
        size_t layer = size_t(std::stoll(name.substr(8))), cache = layer + (name[0] == 'v' ? size_t(model_.layers) : 0);
        arguments.push_back(cache_tensor(caches_[cache], heads_of(cache)));
      } else if (auto value = values_.find(name); value != values_.end()) {
        arguments.push_back(value->second);
      } else if (name == "ids") {
        arguments.push_back(tensor(rows.ids).as_strided({1, count}, {count, 1}));
      } else {
        arguments.push_back(tensor(name == "parent" ? rows.parent
                                   : name == "slot" ? rows.slot
                                   : name == "row"  ? rows.row
                                   : name == "keep" ? every_row()
                                                    : rows.position));
      }
    }
    std::vector<ffi::Tensor> found = kernels_.results(facts.entry, std::move(arguments), facts.gives.size());
    for (size_t i = 0; i < facts.gives.size(); ++i) values_[facts.gives[i]] = found[i];
  }

  Sizes every_row() const {  // of the stream [1, T, C]
    ffi::ShapeView shape = values_.at(kStream).shape();
    Sizes rows(shape.size() < 2 ? 0 : size_t(shape[1]));
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }

  // Appends the first tokens with predicted keys and values: float32 [2 * layers, 1, heads, tokens, width].
  void predict(const Sizes& ids) {
    Rows places = in_a_row(make_room(ids), ids);
    int64_t count = int64_t(ids.size()), bytes = count * model_.row_bytes;
    std::vector<ffi::Any> arguments = {tensor(ids).as_strided({1, count}, {count, 1}), tensor(places.position)};
    for (int64_t first : {int64_t(0), model_.layers}) {
      for (size_t i = size_t(first); i < size_t(first + model_.predicts); ++i) {
        arguments.push_back(cache_tensor(caches_[i], heads_of(i)));
      }
    }
    ffi::Tensor rows = kernels_.results(kPredict, std::move(arguments), 1)[0];
    if (rows.dtype() != DLDataType{kDLFloat, 32, 1} || !rows.IsContiguous() || !model_.dense_cache ||
        rows.numel() * 4 != 2 * std::accumulate(model_.heads.begin(), model_.heads.end(), int64_t(0)) * bytes) {
      fail(kUnusable, "model.so: its entry `predict` returns no keys and values; compress again");
    }
    auto* source = static_cast<const unsigned char*>(rows.data_ptr());
    for (size_t i = 0; i < caches_.size(); ++i) {
      for (int64_t head = 0; head < heads_of(i); ++head, source += bytes) {
        std::memcpy(row(i, head, 0), source, size_t(bytes));
      }
    }
    advance(count);
  }

  void check(const Sizes& ids) const {
    auto [least, most] = std::minmax_element(ids.begin(), ids.end());
    if (*least < 0 || *most >= model_.vocabulary) {  // the kernels would read outside the table
      fail(kBadRequest, "token ids from ", *least, " to ", *most, ": the model knows 0 to ", model_.vocabulary - 1,
           "; does the tokenizer belong to this model?");
    }
  }

  // The position of the first of some tokens that come next, behind the stored ones and some drafted ones.
  int64_t make_room(const Sizes& ids, int64_t drafted = 0) {
    check(ids);
    int64_t count = drafted + int64_t(ids.size());
    reserve(count, count);
    return position_ + drafted;
  }

  // Makes room for so many positions behind the stored tokens, and for so many rows, of which a tree needs more.
  void reserve(int64_t positions, int64_t rows) {
    if (positions > left()) {
      fail(kBadRequest, positions, " tokens after ", position_, " others: the model ends at ", model_.limit,
           " positions; give fewer tokens");
    }
    if (position_ + rows > capacity_) resize(std::max(position_ + rows, std::min(model_.limit, 2 * capacity_)));
  }

  void advance(int64_t count) {
    position_ += count;
    drafted_.clear();
  }

  // Appends tokens; logits [V] after the last of them.
  std::vector<float> append(const Sizes& ids) {
    Rows places = in_a_row(make_room(ids), ids);
    std::vector<float> logits = floats(call("main", ids, {places.position, {int64_t(ids.size()) - 1}})[0]);
    hidden_.clear();
    advance(int64_t(ids.size()));
    return logits;
  }

  // Logits [T, V] by an entry for drafted tokens.  Where heads draft, it also gives the hidden states that they read.
  std::vector<float> verified(const std::string& entry, const Rows& rows) {
    Sizes order(rows.ids.size());
    std::iota(order.begin(), order.end(), 0);
    std::vector<ffi::Tensor> found = call(entry, rows.ids, {rows.position, order, rows.parent, rows.slot, rows.row});
    given_.reset();
    if (found.size() > 1) {
      ffi::ShapeView shape = found[1].shape();
      bool fits = shape.size() == 3 && shape[1] == int64_t(order.size()) && floats(found[1]).size() > 0;
      if (!fits) fail(kUnusable, "model.so: its entry `", entry, "` returns no hidden states; compress again");
      given_ = found[1];
    }
    return floats(found[0]);
  }

  std::vector<ffi::Tensor> call(const std::string& entry, const Sizes& ids, const std::vector<Sizes>& places) {
    int64_t count = int64_t(ids.size());
    std::vector<ffi::Any> arguments = {tensor(ids).as_strided({1, count}, {count, 1})};
    for (const Sizes& values : places) arguments.push_back(tensor(values));
    for (size_t i = 0; i < caches_.size(); ++i) arguments.push_back(cache_tensor(caches_[i], heads_of(i)));
    return kernels_.results(entry, std::move(arguments), 1);
  }

  int64_t heads_of(size_t cache) const { return model_.heads[cache % model_.heads.size()]; }  // keys, then values

  uint8_t* row(size_t cache, int64_t head, int64_t place) const {
    return caches_[cache].get() + (head * capacity_ + place) * model_.row_bytes;
  }

  void move_row(int64_t from, int64_t to) {
    for (size_t i = 0; i < caches_.size(); ++i) {
      for (int64_t head = 0; head < heads_of(i); ++head) {
        std::memcpy(row(i, head, to), row(i, head, from), size_t(model_.row_bytes));
      }
    }
  }

  ffi::Tensor cache_tensor(const Bytes& cache, int64_t heads) const {
    int64_t width = model_.dense_cache ? model_.row_bytes / 4 : model_.row_bytes;
    DLDataType type = model_.dense_cache ? DLDataType{kDLFloat, 32, 1} : DLDataType{kDLUInt, 8, 1};
    return tensor(cache, {1, heads, capacity_, width}, type);
  }

  void resize(int64_t capacity) {
    int64_t head_bytes, total, memory = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGE_SIZE);
    int64_t all = 2 * std::accumulate(model_.heads.begin(), model_.heads.end(), int64_t(0));  // checked by read_model
    if (__builtin_mul_overflow(capacity, model_.row_bytes, &head_bytes) ||
        __builtin_mul_overflow(head_bytes, all, &total) || total > memory) {
      fail(kBadRequest, capacity, " tokens: their keys and values take more than this machine's memory; give fewer");
    }
    caches_.resize(size_t(2 * model_.layers));
    for (size_t i = 0; i < caches_.size(); ++i) {  // at most one is held twice
      Bytes grown = zeros(size_t(heads_of(i) * head_bytes));
      for (int64_t head = 0; head < heads_of(i) && capacity_ != 0; ++head) {  // with rows of drafted tokens
        std::memcpy(grown.get() + head * head_bytes, row(i, head, 0), size_t(capacity_ * model_.row_bytes));
      }
      caches_[i] = grown;
    }
    capacity_ = capacity;
  }

  const Kernels& kernels_;
  const Model& model_;
  std::vector<Bytes> caches_;
  int64_t position_ = 0, capacity_ = 0;
  Values values_;  // that parts gave, by name
  std::vector<Drafted> drafted_;  // by the first part, behind the stored tokens, one behind another
  std::optional<ffi::Tensor> given_;  // hidden states [1, T, D] of the tokens that were verified last
  std::vector<float> hidden_;  // of the last token; empty where it was not kept
  bool wants_hidden_ = false;  // the next step is to keep it
  Sizes begun_;  // tokens that the first stage read last, from this position on
  int64_t first_ = 0;
};

// --- the command

struct Options {
  fs::path bundle, logits;
  Sizes ids;
  int64_t max_tokens = 64;
  sampling::Options sampling;
  std::optional<int64_t> threads, draft_tokens;
  std::string speculate;  // empty: as the bundle's recipe says
};

int64_t number(const std::string& option, std::string_view text) {
  int64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    fail(kBadRequest, option, ": '", text, "' is no whole number");
  }
  return value;
}

double real(const std::string& option, const std::string& text) {
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != 0 || !std::isfinite(value)) {
    fail(kBadRequest, option, ": '", text, "' is not a finite number");
  }
  return value;
}

Sizes numbers(const std::string& option, const std::string& text) {
  Sizes found;
  std::istringstream list(text);
  for (std::string one; std::getline(list, one, ',');) found.push_back(number(option, one));
  return found;
}

void check(const Options& options) {
  const sampling::Options& chosen = options.sampling;
  if (options.bundle.empty()) fail(kBadRequest, "no bundle is given; `compressor_run --help` shows how");
  if (options.ids.empty()) fail(kBadRequest, "no token ids are given: --ids 1,2,3");
  if (options.max_tokens < 0) fail(kBadRequest, "--max-tokens ", options.max_tokens, ": must be at least 0");
  if (chosen.temperature < 0) fail(kBadRequest, "--temperature ", chosen.temperature, ": must be at least 0");
  if (!(chosen.top_p > 0 && chosen.top_p <= 1)) {
    fail(kBadRequest, "--top-p ", chosen.top_p, ": must be above 0, at most 1");
  }
  if (options.threads && (*options.threads < 1 || *options.threads > CPU_SETSIZE)) {
    fail(kBadRequest, "--threads ", *options.threads, ": must be from 1 to ", CPU_SETSIZE);
  }
  if (!options.speculate.empty() && options.speculate != kOff && !speculation::is_kind(options.speculate)) {
    fail(kBadRequest, "--speculate '", options.speculate, "': give ", speculation::quoted(speculation::every_kind()),
         " or '", kOff, "'");
  }
  if (int64_t most = speculation::kMostNodes, count = options.draft_tokens.value_or(1); count < 1 || count > most) {
    fail(kBadRequest, "--draft-tokens ", count, ": must be from 1 to ", most);
  }
}

Options read_options(const std::vector<std::string>& arguments) {
  Options options;
  auto at_least_0 = [](const std::string& name, const std::string& text) {
    int64_t value = number(name, text);
    if (value < 0) fail(kBadRequest, name, " ", value, ": must be at least 0");
    return size_t(value);
  };
  using Read = std::function<void(const std::string& name, const std::string& text)>;
  const std::map<std::string, Read> known = {
      {"--ids", [&](auto& name, auto& text) { options.ids = numbers(name, text); }},
      {"--max-tokens", [&](auto& name, auto& text) { options.max_tokens = number(name, text); }},
      {"--temperature", [&](auto& name, auto& text) { options.sampling.temperature = real(name, text); }},
      {"--top-k", [&](auto& name, auto& text) { options.sampling.top_k = at_least_0(name, text); }},
      {"--top-p", [&](auto& name, auto& text) { options.sampling.top_p = real(name, text); }},
      {"--seed", [&](auto& name, auto& text) { options.sampling.seed = at_least_0(name, text); }},
      {"--threads", [&](auto& name, auto& text) { options.threads = number(name, text); }},
      {"--speculate", [&](auto&, auto& text) { options.speculate = text; }},
      {"--draft-tokens", [&](auto& name, auto& text) { options.draft_tokens = number(name, text); }},
      {"--logits", [&](auto&, auto& text) { options.logits = text; }},
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i];
    if (name.rfind("--", 0) != 0 && options.bundle.empty()) {
      options.bundle = name;
      continue;
    }
    auto option = known.find(name);
    if (option == known.end()) fail(kBadRequest, "unknown argument '", name, "'; `compressor_run --help` names all");
    if (++i == arguments.size()) fail(kBadRequest, name, ": no value is given; `compressor_run --help` shows how");
    option->second(name, arguments[i]);
  }
  check(options);
  return options;
}

// What drafts: the kind that is asked for, or that the recipe asks for, and the kinds that it stands for, none without
// drafts.
struct Drafting {
  std::string kind;
  std::vector<const speculation::Kind*> members;
  std::optional<speculation::Lossy> lossy;  // only greedy texts are
};

Drafting read_drafting(const Options& options, const Model& model, const Kernels& kernels) {
  Drafting found{options.speculate.empty() ? model.speculate : options.speculate, {}, {}};
  const std::string& kind = found.kind;
  if (kind.empty() || kind == kOff) {
    if (options.draft_tokens) fail(kBadRequest, "--draft-tokens: nothing drafts; give --speculate and a kind");
    return found;
  }
  auto served = speculation::served([&](const char* entry) { return kernels.has(entry); }, !model.subsets.empty());
  for (const speculation::Kind* one : served) {
    if (kind == speculation::kAuto || kind == one->name) found.members.push_back(one);
  }
  if (served.empty()) {
    fail(kBadRequest, "speculate='", kind, "': ", options.bundle.string(), " has no kernels that verify drafted ",
         "tokens; make it with `speculate: ", kind, "` in its recipe (target x86)");
  }
  if (found.members.empty()) {
    fail(kBadRequest, "speculate='", kind, "': ", options.bundle.string(), " has no kernels that draft so, only for ",
         speculation::quoted(served), "; make it with `speculate: ", kind, "` in its recipe");
  }
  if (kind == speculation::kSparse && options.sampling.temperature == 0) found.lossy = model.lossy;
  if (found.lossy && options.draft_tokens) {
    fail(kBadRequest, "--draft-tokens: lossy texts depend on how many tokens are drafted; leave it out");
  }
  return found;
}

// Generates with drafts, of which `text` has none yet.
void generate_with_drafts(Session& session, const Model& model, const Options& options, const Drafting& drafting,
                          const std::vector<float>& logits, double prompt_s, speculation::Text& text) {
  speculation::Counts counts{drafting.kind, drafting.lossy};
  if (drafting.lossy) text.lenience = {drafting.lossy->tolerance, session.left() + 1 - text.left};
  if (options.draft_tokens) text.most = size_t(*options.draft_tokens);
  auto pace = options.draft_tokens || drafting.lossy ? std::make_unique<speculation::Always>()
                                                     : std::make_unique<speculation::Pace>();
  speculation::Acceptance acceptance(speculation::prior);
  speculation::Shared shared{session, size_t(model.vocabulary), model.subsets, *pace, acceptance};
  for (const speculation::Kind* kind : drafting.members) text.drafts.push_back(kind->make(shared));
  pace->wait(prompt_s);
  text.choose(logits.data(), logits.size());
  speculation::Engine(session, *pace, acceptance, counts).run(text);
  std::cout << std::endl;
  std::cerr << counts.text() << std::endl;
}

// Where tokens leave early, texts may end by `hopeless`.
void generate(Session& session, std::vector<float> logits, early::Exits* exits, speculation::Text& text) {
  text.choose(logits.data(), logits.size());
  while (!text.is_ended) {
    int64_t token = text.tokens.back();
    if (exits != nullptr) {
      logits = exits->step(token, session.advance_in_stages(token));
      if (exits->hopeless()) break;
    } else {
      logits = session.step(token);
    }
    text.choose(logits.data(), logits.size());
  }
  std::cout << std::endl;
  if (exits != nullptr) std::cerr << exits->report() << std::endl;
}

void run(const Options& options) {
  const fs::path& root = options.bundle;
  json::Object manifest = read_manifest(root);
  std::string library = choose_library(root, manifest);
  int threads = options.threads ? int(*options.threads) : available_cores();
  check_files(root, manifest, threads);
  Model model = read_model(root, manifest);
  Kernels kernels(root, manifest, library, read_parameters(root, manifest, model.vocabulary), threads);
  int64_t prompt = int64_t(options.ids.size());
  Session session(kernels, model, prompt + std::min<int64_t>(options.max_tokens, 256));
  Drafting drafting = read_drafting(options, model, kernels);
  auto begin = speculation::Clock::now();
  std::vector<float> logits = session.prompt(options.ids);
  double seconds = speculation::since(begin);
  if (!options.logits.empty()) {
    std::ofstream file(options.logits, std::ios::binary);
    file.write(reinterpret_cast<const char*>(logits.data()), std::streamsize(logits.size() * sizeof(float)));
    if (!file.flush()) fail(kUnusable, options.logits.string(), ": cannot be written; choose another place");
  }
  bool is_first = true;
  auto show = [&is_first](int64_t token) {
    std::cout << (std::exchange(is_first, false) ? "" : ",") << token << std::flush;
  };
  sampling::Sampler sampler(options.sampling);
  int64_t left = std::min(options.max_tokens - 1, session.left()) + 1;  // the last token needs no position
  speculation::Text text{options.ids, sampler, model.ends, left, show};
  if (left == 0) {
    std::cout << std::endl;
  } else if (!drafting.members.empty()) {
    generate_with_drafts(session, model, options, drafting, logits, seconds, text);
  } else {
    std::optional<early::Exits> exits;
    if (model.exits) exits.emplace(session.stages(), *model.exits);
    generate(session, std::move(logits), exits ? &*exits : nullptr, text);
  }
  if (!std::cout) fail(kUnusable, "standard output cannot be written");
}

int report(Code code, std::string message) {  // in one line that no terminal would obey
  std::replace_if(message.begin(), message.end(), [](unsigned char c) { return c < 32 || c == 127; }, ' ');
  std::cerr << "error: " << message << std::endl;
  return code;
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<std::string> given(arguments + 1, arguments + std::max(count, 1));
  if (std::count(given.begin(), given.end(), "--help") != 0) {
    std::cout << kUsage;
    return 0;
  }
  try {
    run(read_options(given));
  } catch (const Failure& failure) {
    return report(failure.code, failure.what());
  } catch (const std::bad_alloc&) {
    return report(kUnusable, "not enough memory; give fewer tokens, or use a machine that has more");
  } catch (const std::exception& error) {
    return report(kUnusable, error.what());
  }
  return 0;
}
