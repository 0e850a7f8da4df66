// The one list of the kinds of drafts: compressor_runtime/speculation/kinds/registry.py, with layers.py, planes.py and
// sparse.py, whose drafts are chains of a step of the model.
#pragma once

#include <memory>
#include <string>

#include "heads.h"
#include "lookup.h"
#include "recycling.h"
#include "skips.h"

namespace speculation {

constexpr const char *kVerify = "verify", *kBegin = "begin", *kEnd = "end";  // entries of a library
constexpr const char* kAuto = "auto";  // all kinds that a bundle serves, merged into one tree
constexpr const char* kSparse = "sparse";  // of few inputs; the kind that may be lossy

// What the drafts of a text are made of.
struct Shared {
  Target& target;
  size_t vocabulary;
  const std::vector<Subset>& subsets;  // of the model's parts that draft
  Pace& pace;
  const Acceptance& acceptance;
};

struct Kind {
  Name name;
  std::function<std::unique_ptr<Draft>(const Shared&)> make;
  double (*prior)(const Source&);
  std::vector<const char*> needs;  // entries, beside the one that verifies
  bool needs_subsets = false;
};

// Drafts that are chains by an entry of the kind's name, which takes what `verify` does and reads less.
inline Kind kind_of_entry(const char* name) {
  auto make = [name](const Shared& shared) {
    auto step = [name, &target = shared.target](int64_t token, size_t ahead) {
      return target.draft(name, token, ahead);
    };
    return std::make_unique<Chain>(name, step, shared.pace, shared.acceptance);
  };
  return {name, make, Chain::prior, {name}};
}

inline const std::vector<Kind>& kinds() {
  auto lookup = [](const Shared& shared) { return std::make_unique<Lookup>(shared.acceptance); };
  auto recycling = [](const Shared& shared) {
    return std::make_unique<Recycling>(shared.vocabulary, shared.acceptance);
  };
  auto heads = [](const Shared& shared) {
    return std::make_unique<Heads>(shared.target, shared.pace, shared.acceptance);
  };
  auto first_layers = [](const Shared& shared) {
    auto step = [&target = shared.target](int64_t token, size_t ahead) { return target.draft_first(token, ahead); };
    return std::make_unique<Chain>("exit", step, shared.pace, shared.acceptance);
  };
  auto skipping = [](const Shared& shared) {
    return std::make_unique<Skipping>(shared.target, shared.subsets, shared.pace, shared.acceptance);
  };
  static const std::vector<Kind> all = {
      {Lookup::kName, lookup, Lookup::prior, {}},
      {Recycling::kName, recycling, Recycling::prior, {}},
      {Heads::kName, heads, Heads::prior, {Heads::kName}},
      {"exit", first_layers, Chain::prior, {kBegin, "rest", kEnd}},
      kind_of_entry("planes"),
      {Skipping::kName, skipping, Chain::prior, {kBegin, kEnd}, true},
      kind_of_entry(kSparse),
  };
  return all;
}

// The kinds that a library with these entries serves; none where nothing verifies.
template <class Has>
std::vector<const Kind*> served(const Has& has_entry, bool has_subsets) {
  std::vector<const Kind*> found;
  for (const Kind& kind : kinds()) {
    bool fits = has_entry(kVerify) && (has_subsets || !kind.needs_subsets);
    for (const char* entry : kind.needs) fits = fits && has_entry(entry);
    if (fits) found.push_back(&kind);
  }
  return found;
}

// Names in quotes, with commas between them, and `auto` behind them.
inline std::string quoted(const std::vector<const Kind*>& listed) {
  std::string names;
  for (const Kind* kind : listed) names += "'" + std::string(kind->name) + "', ";
  return names + "'" + kAuto + "'";
}

inline std::vector<const Kind*> every_kind() {
  return served([](const char*) { return true; }, true);
}

inline bool is_kind(const std::string& name) {
  auto same = [&name](const Kind& kind) { return kind.name == name; };
  return name == kAuto || std::any_of(kinds().begin(), kinds().end(), same);
}

// How often a guess is right before any was seen.
inline double prior(const Source& source) {
  for (const Kind& kind : kinds()) {
    if (kind.name == source.kind) return kind.prior(source);
  }
  return 0;
}

}  // namespace speculation
