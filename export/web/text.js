// Tokens as text while they come.

/** Text of a growing sequence of tokens: what is certain, as soon as it is; made by `Model.textStream`. */
export class TextStream {
  constructor(tokenizer, prompt = []) {
    this.tokenizer = tokenizer;
    this.ids = [...prompt];
    this.shown = prompt.length ? tokenizer.decode(this.ids) : "";
  }

  push(id) {
    this.ids.push(id);
    const text = this.tokenizer.decode(this.ids);
    if (text.endsWith("\ufffd")) return ""; // half a character
    const piece = text.slice(this.shown.length);
    this.shown = text;
    return piece;
  }

  end() {
    return this.ids.length ? this.tokenizer.decode(this.ids).slice(this.shown.length) : "";
  }
}
