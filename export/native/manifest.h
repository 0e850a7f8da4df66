// What must hold before anything of a bundle is used: its manifest, a library for this CPU, files that are whole.
#pragma once

#include <sys/auxv.h>
#include <sys/syscall.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "files.h"
#include "sha256.h"

namespace runner {

constexpr int64_t kSchemaVersion = 2;
constexpr size_t kPiece = 16 << 20;  // a larger file's entry has `pieces`, the SHA-256 of each so many bytes

inline json::Object read_manifest(const fs::path& root) {
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

// Linux and LLVM spell features differently: avx512_vnni, avx512vnni.
inline std::string letters(const std::string& feature) {
  std::string found;
  for (unsigned char c : feature) found += std::isalnum(c) ? std::string(1, char(c)) : "";
  return found;
}

inline std::set<std::string> cpu_flags() {
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
inline std::string missing_features(const std::vector<ffi::String>& required) {
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
inline std::vector<std::pair<std::string, std::vector<ffi::String>>> libraries(const json::Object& manifest) {
  if (manifest.count("libraries") == 0) return {{"model.so", items<ffi::String>(manifest, "cpu_features")}};
  std::vector<std::pair<std::string, std::vector<ffi::String>>> found;
  for (const json::Object& entry : items<json::Object>(manifest, "libraries")) {
    found.emplace_back(field<ffi::String>(entry, "file"), items<ffi::String>(entry, "cpu_features"));
  }
  if (found.empty()) fail(kDamaged, "manifest.json: `libraries` is empty; copy the bundle again");
  return found;
}

inline std::string choose_library(const fs::path& root, const json::Object& manifest) {
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

inline void check_files(const fs::path& root, const json::Object& manifest, int threads) {
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

}  // namespace runner
