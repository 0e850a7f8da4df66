// Runs a Compressor bundle of a language model without Python: token ids in, the likeliest next ids out.
//
// It follows compressor_runtime (export/python): the same checks in the same order, the same exit codes, nearly the
// same words.  docs/bundle.md describes what it reads, "The entry" there what it calls.

#include <iostream>
#include <string>
#include <vector>

#include "generate.h"
#include "manifest.h"

namespace {

using namespace runner;

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

void run(const Options& options) {
  const fs::path& root = options.bundle;
  json::Object manifest = read_manifest(root);
  std::string library = choose_library(root, manifest);
  int threads = options.threads ? int(*options.threads) : available_cores();
  check_files(root, manifest, threads);
  Model model = read_model(root, manifest);
  Kernels kernels(root, manifest, library, read_parameters(root, manifest, model.vocabulary), threads);
  Drafting drafting = read_drafting(options, model, kernels);
  Generation(options, model, kernels, drafting).run();
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
