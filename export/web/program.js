// What the engines share: errors in words, and sizes that are expressions.

/** What went wrong, in words; `code` is one of no-webgpu, no-wasm, missing, damaged, memory, lost, insecure, request. */
export class BundleError extends Error {
  constructor(code, message, options) {
    super(message, options);
    this.name = "BundleError";
    this.code = code;
  }
}

/** The value of an expression: a number, a name, or [operator, left, right]. */
export function evaluate(expression, names) {
  if (typeof expression === "number") return expression;
  if (typeof expression === "string") return names[expression];
  const [operator, left, right] = expression;
  const a = evaluate(left, names);
  const b = evaluate(right, names);
  switch (operator) {
    case "+": return a + b;
    case "-": return a - b;
    case "*": return a * b;
    case "//": return Math.floor(a / b);
    case "%": return a - b * Math.floor(a / b);
    case "min": return Math.min(a, b);
    case "max": return Math.max(a, b);
    case "ceil": return Math.ceil(a / b);
    default: throw new BundleError("damaged", `the program has an operator ${operator}; use the bundle's own runner.js`);
  }
}

/** A number from `least` to `most`, whole unless `fraction`. */
export function checkedNumber(name, value, least, most = Infinity, fraction = false) {
  if (!(fraction ? Number.isFinite(value) : Number.isSafeInteger(value)) || value < least || value > most) {
    const range = most === Infinity ? `at least ${least}` : `from ${least} to ${most}`;
    throw new BundleError("request", `${name} ${value}: give a ${fraction ? "" : "whole "}number ${range}`);
  }
  return value;
}

/** The inputs that a session keeps: keys and values. */
export const cachesOf = (program) => program.inputs.filter(({ name }) => /_cache_\d+$/.test(name));

/** The inputs that a source's encoder computes, in the order of its outputs; none where there is no encoder. */
export const memoryOf = ({ inputs, encode }) => (encode?.outputs ?? []).map(({ name }) => inputs.find((input) => input.name === name));

/** What runs another entry of an engine's program: the same engine, with scratch buffers of its own. */
export function entryOf(engine, name) {
  engine.entries ??= {};
  const program = { ...engine.program, ...engine.program[name] };
  return engine.entries[name] ??= Object.assign(Object.create(engine), { program, scratch: [], generation: 0 });
}

/** A state for verifying drafted tokens in what a session's state keeps, with inputs and plans of its own. */
export function chainOf(engine, { buffers }) {
  const shared = cachesOf(engine.program).map(({ name }) => [name, buffers[name]]);
  return { buffers: Object.fromEntries(shared), plans: new Map(), generation: -1 };
}

/** In hexadecimal digits. */
export async function sha256(content) {
  if (!globalThis.crypto?.subtle) {
    throw new BundleError("insecure", "a browser offers SHA-256, which files are checked by, over https and on localhost " +
      "only: serve the bundle over https");
  }
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", content));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

const ARRAYS = { float32: Float32Array, int32: Int32Array };

/** Numbers in the type of the program's input of that name. */
export function typed({ inputs }, name, values) {
  const { dtype } = inputs.find((input) => input.name === name);
  if (dtype !== "int64" && values instanceof ARRAYS[dtype]) return values.slice(); // one by one, it takes milliseconds
  return dtype === "int64" ? BigInt64Array.from(values, (n) => BigInt(n)) : ARRAYS[dtype].from(values);
}

/** Bytes of an input that has this shape. */
export function bytesOf({ shape, dtype }, sizes) {
  return shape.reduce((product, n) => product * evaluate(n, sizes), dtype === "int64" ? 8 : 4);
}

const PLANS = 8; // lengths of texts that are remembered

/** Put one more into a map, in place of the oldest where it is full. */
export function keep(map, key, value) {
  if (map.size >= PLANS) map.delete(map.keys().next().value);
  map.set(key, value);
}
