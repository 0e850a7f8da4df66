// Runs a Compressor bundle of a language model without Python: token ids in, the likeliest next ids out.
//
// It follows compressor_runtime (export/python): the same checks in the same order, the same exit codes, nearly the
// same words.  docs/bundle.md describes what it reads, "The entry" there what it calls.

#include <charconv>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "early.h"
#include "manifest.h"
#include "session.h"
#include "speculation/engine.h"
#include "speculation/kinds/registry.h"

namespace {

using namespace runner;

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
