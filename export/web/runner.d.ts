/** What went wrong, in words, with what to do about it. */
export class BundleError extends Error {
  code: "no-webgpu" | "no-wasm" | "missing" | "damaged" | "memory" | "lost" | "insecure" | "request";
}

export interface LoadOptions {
  /** Called as the weights arrive, from the network or from the browser's cache. Bytes. */
  onProgress?: (progress: { loaded: number; total: number; file: string }) => void;
  /** Tokens that a session has room for when none are asked for; at most the model's positions. Default 2048. */
  context?: number;
  /** Ends the loading with an AbortError. */
  signal?: AbortSignal;
  /** What computes. Default `auto`: WebGPU, and WebAssembly where that is missing, has too little memory, or is only
      software on the processor, which WebAssembly uses better. */
  device?: "auto" | "webgpu" | "wasm";
  /** What WebGPU's linears multiply floats in. Default `f32`, which is what the bundle's figures are of; `f16` where the
      device has `shader-f16`, see `Model.precision`. Sums are float32 either way. */
  precision?: "f32" | "f16";
  /** How many threads WebAssembly computes with, 1 to 32; the results are the same to the bit. Default: half of the logical
      processors, at most 8, and one where a page is not cross-origin isolated, or workers cannot be started. */
  threads?: number;
  /** Another WebGPU than the browser's. */
  gpu?: GPU;
}

/** Load the bundle at `url` (default: the page's folder; in Node a folder, too). Throws BundleError, or AbortError. */
export function load(url?: string | URL, options?: LoadOptions): Promise<Model>;

export interface GenerateOptions {
  /** At most so many new tokens. Default 64; fewer where the session has no more room. */
  maxTokens?: number;
  /** 0, the default, takes the likeliest token; above, samples. */
  temperature?: number;
  /** Sample among so many likeliest tokens; 0, the default: all. */
  topK?: number;
  /** Sample among the fewest tokens whose probabilities reach this together. Default 1. */
  topP?: number;
  /** Makes sampling repeatable. */
  seed?: number;
  /** `lookup` drafts tokens from the text itself, and verifies several in one step where that is expected to be faster; the
      text is the same. `off` does not. Default: as the bundle's recipe says, where `Model.verifies`. */
  speculate?: "lookup" | "off";
  /** Called when a text begins that is drafted; the object is kept up to date. */
  onSpeculation?: (counts: Speculation) => void;
  /** Ends the text after the current token. */
  signal?: AbortSignal;
  /** Go on with this sequence (not of an encoder-decoder); otherwise one is made for this call, and given back after it. */
  session?: Session;
}

/** What drafts did for a text: acceptance is `accepted / drafted`, and a verification gives one token and those accepted. */
export interface Speculation {
  readonly kind: "lookup";
  readonly verifications: number;
  readonly drafted: number;
  readonly accepted: number;
  /** Without a draft. */
  readonly steps: number;
  /** But the first, which the prompt's own step gives. */
  readonly tokens: number;
  /** Of drafts, steps and verifications. */
  readonly ms: number;
}

export interface Tokenizer {
  encode(text: string): { ids: number[] };
  decode(ids: number[]): string;
}

export class Model {
  /** The manifest. */
  readonly manifest: any;
  /** Facts about the model: name, vocab_size, max_positions, eos_ids, ... */
  readonly info: any;
  readonly device: "webgpu" | "wasm";
  /** What computes, in words. */
  readonly adapter: string;
  /** What linears multiply floats in. */
  readonly precision: "f32" | "f16";
  /** Whether there are kernels here that verify drafted tokens: if the recipe says `speculate`. */
  readonly verifies: boolean;
  /** Why WebAssembly computes in place of WebGPU, in words. */
  readonly fallback?: string;
  tokenizer(): Promise<Tokenizer>;
  /** What turns token ids that come one after another into text. */
  textStream(prompt?: number[]): Promise<TextStream>;
  /** An encoder's last hidden states of a text or of token ids, special tokens included: [tokens, width], row by row. */
  encode(input: string | number[]): Promise<{ data: Float32Array; shape: [number, number] }>;
  /** A text's embedding: the mean of its last hidden states, scaled to length 1. */
  embed(input: string | number[]): Promise<Float32Array>;
  /** What an image classifier computes of `batch` inputs, by default one, which lie one after another in `values`. */
  run(values: Float32Array | number[], batch?: number): Promise<{ data: Float32Array; shape: number[] }>;
  /** Continue text or token ids; yields pieces of text. Several at once take turns. An encoder-decoder reads the prompt
      as its source, and yields what its decoder says to it. */
  generate(prompt: string | number[], options?: GenerateOptions): AsyncGenerator<string>;
  /** The same in token ids. */
  generateIds(prompt: number[], options?: GenerateOptions): AsyncGenerator<number>;
  /** A new sequence of tokens. An encoder-decoder's comes after a source, text or token ids, which is encoded here, once;
      its first tokens are `info.encoder_source.start_ids`. */
  session(capacity?: number, source?: string | number[]): Promise<Session>;
  /**
   * Try other constants for the heavy kernels, and keep those that are faster here, in this model and in local storage.
   * What is kept is found again by later pages. In WebAssembly there is nothing to tune.
   */
  tune(options?: TuneOptions): Promise<TuneReport>;
  /** Give all memory back. */
  destroy(): void;
}

export interface TuneOptions {
  /** At most so many ms. Default 5000. */
  budget?: number;
  /** Called before each variant. Ms. */
  onProgress?: (progress: { elapsed: number; budget: number; kernel: string }) => void;
}

export interface TuneReport {
  adapter: string;
  seconds: number;
  /**
   * Of each kernel ms a call: as shipped, as it is now, and with the worst constants that were tried; how many tokens it
   * was timed with, and how many calls such a step has.
   */
  kernels: {
    name: string; tokens: number; calls: number; tried: number; default_ms: number; tuned_ms: number; worst_ms: number;
    constants: Record<string, number>;
  }[];
}

export class Session {
  readonly capacity: number;
  /** Tokens so far; set it back to forget what came after. */
  position: number;
  /** Take tokens; logits of the last [vocab_size]. */
  logits(ids: number[]): Promise<Float32Array>;
  /** Take tokens; the likeliest token after them, picked where it was computed. */
  likeliest(ids: number[]): Promise<number>;
  /** Take tokens; what one of the `count` likeliest tokens after them is drawn from: token and logit of each of these and
      perhaps more, found where they were computed; or all logits, where `count` is 0 or too large for that. */
  candidates(ids: number[], count: number): Promise<Float32Array | [number, number][]>;
  /** Logits after each of up to 32 tokens [tokens, vocab_size], as single steps give them, to the bit; none is appended. Where
      `Model.verifies`. */
  verify(ids: number[]): Promise<Float32Array>;
  /** The same, but the likeliest token after each, picked where they were computed. */
  likeliestOf(ids: number[]): Promise<Uint32Array>;
  /** Append the first `count` of the tokens that were just verified, or the next of them. */
  accept(count: number): void;
  destroy(): void;
}

/** Text of a growing sequence of tokens after a prompt: what is certain, as soon as it is; made by `Model.textStream`. */
export interface TextStream {
  /** The text that one more token makes certain; empty while a character is incomplete. */
  push(id: number): string;
  /** What is left. */
  end(): string;
}
