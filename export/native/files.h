// Failures, memory, files, and JSON as the manifest and the weights' header have it.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tvm/ffi/extra/json.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace runner {

namespace fs = std::filesystem;
namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;
using Sizes = std::vector<int64_t>;

constexpr size_t kAlignment = 64;  // the kernels use aligned vector loads: any other address ends the process
constexpr size_t kLargestHeader = 16 << 20, kDeepest = 64;

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

using Bytes = std::shared_ptr<uint8_t>;

inline Bytes zeros(size_t size) {  // aligned; large ones take memory as they are written
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
inline fs::path member(const fs::path& root, const std::string& name) {
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

inline size_t count_pairs(const json::Value& value) {
  size_t count = 0;
  if (auto object = value.as<json::Object>()) {
    for (const auto& [key, inner] : *object) count += 1 + count_pairs(inner);
  } else if (auto list = value.as<json::Array>()) {
    for (const auto& inner : *list) count += count_pairs(inner);
  }
  return count;
}

// tvm-ffi's parser goes down a level with each bracket and lets the last of equal keys win: both are caught here.
inline json::Object read_json(const fs::path& file, const std::string& text) {
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

}  // namespace runner
