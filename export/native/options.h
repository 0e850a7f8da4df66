// What the command line asks for.
#pragma once

#include <charconv>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cores.h"
#include "files.h"
#include "sampling.h"
#include "speculation/engine.h"
#include "speculation/kinds/registry.h"

namespace runner {

constexpr const char* kOff = "off";  // no drafts
constexpr const char* kUsage =
    "usage: compressor_run BUNDLE --ids 1,2,3 [--ids 4,5 ...] [--max-tokens N] [--temperature T] [--top-k K]\n"
    "                      [--top-p P] [--seed S] [--threads T] [--speculate KIND] [--draft-tokens N] [--logits FILE]\n"
    "  BUNDLE        the folder that `compress run` wrote\n"
    "  --ids         the prompt's token ids; once for each of several texts, which are continued together: a line of\n"
    "                output each, in this order\n"
    "  --max-tokens  at most so many new tokens of each text (default: 64)\n"
    "  --temperature 0 takes the likeliest token (the default), above 0 samples\n"
    "  --top-k       sample among so many likeliest tokens only (default: 0, all)\n"
    "  --top-p       sample among the fewest tokens whose probabilities reach it (default: 1)\n"
    "  --seed        makes sampling repeatable; of several texts each has one more than the one before it\n"
    "  --threads     threads that check the files and run the kernels (default: the physical cores available)\n"
    "  --speculate   drafts tokens, and verifies several in a step where that is faster: lookup, recycle, heads,\n"
    "                exit, planes, self, sparse, auto, or off (default: as the bundle's recipe says)\n"
    "  --draft-tokens  draft at most so many tokens of each kind, whether that pays or not, to measure\n"
    "  --logits      write the float32 logits after each prompt to FILE, as they are in memory\n";

struct Options {
  fs::path bundle, logits;
  std::vector<Sizes> ids;  // of each text
  int64_t max_tokens = 64;
  sampling::Options sampling;
  std::optional<int64_t> threads, draft_tokens;
  std::string speculate;  // empty: as the bundle's recipe says
};

inline int64_t number(const std::string& option, std::string_view text) {
  int64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    fail(kBadRequest, option, ": '", text, "' is no whole number");
  }
  return value;
}

inline double real(const std::string& option, const std::string& text) {
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != 0 || !std::isfinite(value)) {
    fail(kBadRequest, option, ": '", text, "' is not a finite number");
  }
  return value;
}

inline Sizes numbers(const std::string& option, const std::string& text) {
  Sizes found;
  std::istringstream list(text);
  for (std::string one; std::getline(list, one, ',');) found.push_back(number(option, one));
  return found;
}

inline void check_options(const Options& options) {
  const sampling::Options& chosen = options.sampling;
  if (options.bundle.empty()) fail(kBadRequest, "no bundle is given; `compressor_run --help` shows how");
  bool is_any_empty = std::any_of(options.ids.begin(), options.ids.end(), [](auto& ids) { return ids.empty(); });
  if (options.ids.empty() || is_any_empty) fail(kBadRequest, "no token ids are given: --ids 1,2,3");
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

inline Options read_options(const std::vector<std::string>& arguments) {
  Options options;
  auto at_least_0 = [](const std::string& name, const std::string& text) {
    int64_t value = number(name, text);
    if (value < 0) fail(kBadRequest, name, " ", value, ": must be at least 0");
    return size_t(value);
  };
  using Read = std::function<void(const std::string& name, const std::string& text)>;
  const std::map<std::string, Read> known = {
      {"--ids", [&](auto& name, auto& text) { options.ids.push_back(numbers(name, text)); }},
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
  check_options(options);
  return options;
}

}  // namespace runner
