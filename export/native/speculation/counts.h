// What drafts did, up to now: compressor_runtime/speculation/counts.py.
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

namespace speculation {

// Of drafts that change texts, what the manifest says: the tolerance, and what was measured by the bundle's kernels.
struct Lossy {
  struct Measured {
    double lossless_agreement, lossy_perplexity, lossless_perplexity;
  };
  double tolerance;
  std::optional<Measured> measured = {};
};

struct Counts {
  std::string kind;
  std::optional<Lossy> lossy = {};  // none where the text is the model's own
  int64_t tokens = 0;  // but the prompt's own
  int64_t drafted = 0, accepted = 0, lenient = 0;  // verified; taken; of those, not the model's choice
  int64_t tried = 0, matched = 0;  // places where a drafted token stood, and those where one of them was right
  int64_t verifications = 0, steps = 0;
  double seconds = 0;  // of drafts, steps and verifications

  std::string text() const {
    return kind + loss() +
           line(": acceptance %.2f, %.2f tokens a verification, %lld verifications, %lld tokens drafted, "
                "%lld accepted, %lld plain steps, %.1f tokens/s",
                tried == 0 ? 0.0 : double(matched) / double(tried),
                verifications == 0 ? 1.0 : 1 + double(accepted) / double(verifications), (long long)verifications,
                (long long)drafted, (long long)accepted, (long long)steps,
                seconds > 0 ? double(tokens) / seconds : 0.0);
  }

 private:
  template <class... Figures>
  static std::string line(const char* words, Figures... figures) {
    char found[300];
    std::snprintf(found, sizeof found, words, figures...);
    return found;
  }

  std::string loss() const {  // that the text is lossy, and what was measured of such texts
    if (!lossy) return "";
    std::string said = line(", lossy (tolerance %g, %lld of the tokens are not the model's choice", lossy->tolerance,
                            (long long)lenient);
    if (lossy->measured) {
      auto [agreement, own, other] = *lossy->measured;
      said += line("; measured: %.0f%% of a text as without tolerance, perplexity %.3g in place of %.3g",
                   100 * agreement, own, other);
    }
    return said + ")";
  }
};

}  // namespace speculation
