// A draft, and the model that it guesses for: compressor_runtime/speculation/tree.py.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "../sampling.h"
#include "tree.h"

namespace speculation {

// A token of each of some texts, to be read next: the text's last one, or one that was drafted.
struct Reading {
  Tokens tokens;
  std::vector<size_t> ahead;  // tokens that were drafted before it
  Tokens slots;  // numbers of the texts, which differ
};

// Logits [R, each, V] of the tokens behind each of R that were read.
struct Guesses {
  Logits logits;
  size_t each = 1;
};

// A model that drafts; it may be a part of the model that verifies.
using Stepper = std::function<Guesses(const Reading&)>;

// Of each text the tokens just verified that it keeps: one without a parent, its child, and so on.
using Paths = std::map<int64_t, std::vector<size_t>>;

// The model with what it has read of some texts.
class Target {
 public:
  virtual ~Target() = default;

  virtual size_t texts() const = 0;

  // Appends a token to the only text; logits [V] of what comes after it.
  virtual Logits step(int64_t token) = 0;

  // Logits [T, V] after each of several drafted tokens, none of which is appended; of each the index of the one before
  // it, kRoot for the stored ones, and its text.
  virtual Logits verify(const Tokens& ids, const Tokens& parents, const Tokens& slots) = 0;

  // Appends some of the tokens just verified.
  virtual void accept(const Paths& paths) = 0;

  // Logits [R, V] after drafted tokens: by an entry that takes what `verify` does, by the first layers, from which
  // verified tokens go on, or through some of the parts.
  virtual Logits draft(const std::string& entry, const Reading& next) = 0;
  virtual Logits draft_first(const Reading& next) = 0;
  virtual Logits draft_through(const std::vector<size_t>& parts, const Reading& next) = 0;

  // What each head says of the tokens behind those that follow the last ones read.  None where of some text no hidden
  // state was kept: the next step keeps one.
  virtual Guesses heads(const Reading& following) = 0;
};

// A token that a draft would have a model read next.
struct Wish {
  const Stepper* model;
  int64_t slot, token;
  size_t ahead, most;  // tokens drafted before it, and that the text may draft
  std::vector<double> chances;  // of those it has drafted, falling
  double following;  // probability that the next one is right, given that those before it are
};

using Wishes = std::map<size_t, Wish>;  // by the places of their drafts

struct Room {
  size_t nodes, depth;  // at most so many tokens, and so many behind one another
  double least;  // tokens that are accepted less probably do not pay for their rows
  const sampling::Sampler& sampler;  // chooses the text's tokens
  const Tokens& ends;  // tokens behind which no draft is of use
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

  // Guesses how the text goes on.  A draft that runs a model only begins to: it has wishes then, until it has none or
  // one is not granted.
  virtual void begin(const Room& room) = 0;
  virtual std::optional<Wish> wish() const { return std::nullopt; }

  // Goes on with logits [each, V] of what comes behind the token that it wished for.
  virtual void read(const float*, size_t /*each*/, size_t /*width*/) {}

  // Continuations, none without a guess.
  virtual Tree take() { return std::exchange(tree_, Tree()); }

 protected:
  Tree tree_;
};

}  // namespace speculation
