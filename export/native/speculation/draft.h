// A draft, and the model that it guesses for: compressor_runtime/speculation/tree.py.
#pragma once

#include <string>

#include "../sampling.h"
#include "tree.h"

namespace speculation {

// The model with what it has read, of one text.
class Target {
 public:
  virtual ~Target() = default;

  // Appends a token; logits [V] of what comes after it.
  virtual Logits step(int64_t token) = 0;

  // Logits [T, V] after each of several drafted tokens, none of which is appended; of each the index of the one before
  // it, kRoot for the stored ones.
  virtual Logits verify(const Tokens& ids, const Tokens& parents) = 0;

  // Appends those of the tokens just verified that the path names: one without a parent, its child, and so on.
  virtual void accept(const std::vector<size_t>& path) = 0;

  // Logits [V] after a drafted token, behind as many other drafted ones: by an entry that takes what `verify` does, by
  // the first layers, from which verified tokens go on, or through some of the parts.
  virtual Logits draft(const std::string& entry, int64_t token, size_t ahead) = 0;
  virtual Logits draft_first(int64_t token, size_t ahead) = 0;
  virtual Logits draft_through(const std::vector<size_t>& parts, int64_t token, size_t ahead) = 0;

  // Logits of the tokens behind the one that follows the last token read, of each head.  None where no hidden state of
  // that was kept: the next step keeps one.
  virtual std::vector<Logits> heads(int64_t following) = 0;
};

struct Room {
  size_t nodes, depth;  // at most so many tokens, and so many behind one another
  double least;  // tokens that are accepted less probably do not pay for their rows
  const sampling::Sampler& sampler;  // chooses the text's tokens
  const Tokens& ends;  // tokens behind which no draft is of use
  size_t rows;  // drafted tokens that may be verified, of all drafts together
};

class Draft {
 public:
  explicit Draft(Name name) : name(name) {}
  virtual ~Draft() = default;

  const Name name;  // the kind's

  // Takes the text as far as it has come; the last token is one that the model has not read.
  virtual void extend(const Tokens& text) = 0;

  // Looks at what the model computed: tokens [T], accepted or not, and logits [T, V] of what comes after each.
  virtual void observe(const Tokens&, const float*, size_t) {}
  virtual bool reads_logits() const { return false; }

  // Continuations, none without a guess.
  virtual Tree propose(const Room& room) = 0;
};

}  // namespace speculation
