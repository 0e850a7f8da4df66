// Tensors, and the weights of a bundle.
#pragma once

#include <tvm/ffi/container/tensor.h>

#include <charconv>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "files.h"
#include "speculation/kinds/registry.h"

namespace runner {

constexpr size_t kMostDimensions = 16;
constexpr const char* kPredict = "predict";  // the entry that predicts keys and values of a prompt

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

inline ffi::Tensor tensor(const Bytes& bytes, const Sizes& shape, DLDataType type) {
  return ffi::Tensor::FromNDAlloc(Lent{bytes}, ffi::ShapeView(shape.data(), shape.size()), type, DLDevice{kDLCPU, 0});
}

inline ffi::Tensor tensor(const Sizes& values) {
  Bytes bytes = zeros(values.size() * sizeof(int64_t));
  std::memcpy(bytes.get(), values.data(), values.size() * sizeof(int64_t));
  return tensor(bytes, {int64_t(values.size())}, {kDLInt, 64, 1});
}

inline int64_t product(const Sizes& sizes, size_t begin, size_t end) {
  return std::accumulate(sizes.begin() + int64_t(begin), sizes.begin() + int64_t(end), int64_t(1),
                         std::multiplies<int64_t>());
}

// Several tensors as one, each behind the one before along an axis.
inline ffi::Tensor joined(const std::vector<ffi::Tensor>& pieces, size_t axis) {
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
inline ffi::Tensor one_of(const ffi::Tensor& all, size_t axis, size_t place, size_t count) {
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
inline std::map<std::string, ffi::Tensor> read_safetensors(const fs::path& path) {
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
inline ffi::Array<ffi::Tensor> read_parameters(const fs::path& root, const json::Object& manifest, int64_t vocabulary) {
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
inline std::map<std::string, Sizes> read_entries(const json::Object& manifest, size_t parameters) {
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

}  // namespace runner
