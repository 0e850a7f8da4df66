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

// What the drafts of texts are made of.
struct Shared {
  Target& target;
  size_t vocabulary;
  const std::vector<Subset>& subsets;  // of the model's parts that draft
  const Pace& pace;
  const Acceptance& acceptance;
};

// Makes the drafts of the text of a number; it holds what those of all texts share.
using Maker = std::function<std::unique_ptr<Draft>(int64_t slot)>;

struct Kind {
  Name name;
  Maker (*start)(Name name, const Shared&);
  double (*prior)(const Source&);
  std::vector<const char*> needs;  // entries, beside the one that verifies
  bool needs_subsets = false;
};

inline Maker chains(Name name, const Acceptance& acceptance, Stepper step) {
  auto guesser = std::make_shared<Guesser>(Guesser{std::move(step)});
  return [=, &acceptance](int64_t slot) { return std::make_unique<Chain>(name, guesser, slot, acceptance); };
}

// Drafts that are chains by an entry of the kind's name, which takes what `verify` does and reads less.
inline Maker chains_of_entry(Name name, const Shared& shared) {
  auto step = [name, &target = shared.target](const Reading& next) {
    return Guesses{target.draft(std::string(name), next)};
  };
  return chains(name, shared.acceptance, step);
}

inline Maker chains_of_first_layers(Name name, const Shared& shared) {
  auto step = [&target = shared.target](const Reading& next) { return Guesses{target.draft_first(next)}; };
  return chains(name, shared.acceptance, step);
}

inline const std::vector<Kind>& kinds() {
  auto lookup = [](Name, const Shared& shared) -> Maker {
    return [&acceptance = shared.acceptance](int64_t) { return std::make_unique<Lookup>(acceptance); };
  };
  auto recycling = [](Name, const Shared& shared) -> Maker {
    auto successors = std::make_shared<Successors>(shared.vocabulary);
    return [successors, &acceptance = shared.acceptance](int64_t) {
      return std::make_unique<Recycling>(successors, acceptance);
    };
  };
  auto heads = [](Name, const Shared& shared) -> Maker {
    auto read = std::make_shared<const Stepper>(
        [&target = shared.target](const Reading& following) { return target.heads(following); });
    return [read, &acceptance = shared.acceptance](int64_t slot) {
      return std::make_unique<Heads>(read, slot, acceptance);
    };
  };
  auto skipping = [](Name, const Shared& shared) -> Maker {
    auto choice = std::make_shared<Choice>(shared.target, shared.subsets, shared.pace);
    return [choice, &acceptance = shared.acceptance](int64_t slot) {
      return std::make_unique<Skipping>(choice, slot, acceptance);
    };
  };
  static const std::vector<Kind> all = {
      {Lookup::kName, lookup, Lookup::prior, {}},
      {Recycling::kName, recycling, Recycling::prior, {}},
      {Heads::kName, heads, Heads::prior, {Heads::kName}},
      {"exit", chains_of_first_layers, Chain::prior, {kBegin, "rest", kEnd}},
      {"planes", chains_of_entry, Chain::prior, {"planes"}},
      {Skipping::kName, skipping, Chain::prior, {kBegin, kEnd}, true},
      {kSparse, chains_of_entry, Chain::prior, {kSparse}},
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
