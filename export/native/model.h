// What a manifest says of its model.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "early.h"
#include "manifest.h"
#include "speculation/counts.h"
#include "speculation/kinds/registry.h"

namespace runner {

constexpr int64_t kMostLayers = 4096;
constexpr const char* kLogits = "logits";  // what the last part gives

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
inline std::vector<Part> read_parts(const json::Object& manifest, const json::Object& facts, int64_t layers) {
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
inline early::Facts read_exits(const json::Object& facts, size_t parts) {
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
inline std::vector<speculation::Subset> read_subsets(const json::Object& facts, const std::vector<Part>& parts) {
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

inline std::optional<speculation::Lossy> read_lossy(const json::Object& facts, const std::string& speculate) {
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

inline Model read_model(const fs::path& root, const json::Object& manifest) {
  if (auto kind = field<ffi::String>(manifest, "kind"); kind != "decoder") {
    fail(kBadRequest, root.string(), ": holds a ", kind, "; only a decoder generates");
  }
  auto facts = field<json::Object>(manifest, "model");
  if (facts.count(ffi::String("states")) != 0) {
    fail(kBadRequest, root.string(),
         ": has recurrent layers, whose states this runner does not keep; run it from Python");
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

inline void check_ids(const Model& model, const Sizes& ids) {
  auto [least, most] = std::minmax_element(ids.begin(), ids.end());
  if (*least < 0 || *most >= model.vocabulary) {  // the kernels would read outside the table
    fail(kBadRequest, "token ids from ", *least, " to ", *most, ": the model knows 0 to ", model.vocabulary - 1,
         "; does the tokenizer belong to this model?");
  }
}

// Of tokens behind others of a text, all together more than the model has positions.
[[noreturn]] inline void refuse_length(const Model& model, int64_t count, int64_t others) {
  fail(kBadRequest, count, " tokens after ", others, " others: the model ends at ", model.limit,
       " positions; give fewer tokens");
}

inline void check_prompt(const Model& model, const Sizes& ids) {
  check_ids(model, ids);
  if (int64_t count = int64_t(ids.size()); count > model.limit) refuse_length(model, count, 0);
}

}  // namespace runner
