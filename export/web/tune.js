// Finds the constants with which each heavy kernel is fastest on this device, after nn-JIT.web (Jia et al. 2024, Empowering
// In-Browser Deep Learning Inference on Edge Devices With Just-In-Time Kernel Optimizations, arXiv 2309.08978).
//
// A kernel's `space` lists other constants, the likeliest first by a model of a graphics processor.  Whatever kernel has
// most to gain is tried next, with constants near the best that were found, until the time is up; a winner must compute
// what the shipped constants compute, and be faster in a last comparison, turn about.  Winners are kept in local storage,
// by adapter and kernel.

import { BundleError, cachesOf, entryOf, memoryOf, sha256 } from "./program.js";

const PROMPT = 64; // tokens that kernels for several are timed with
const CAPACITY = 256;
const MEASURED_MS = 2; // at least so much is timed at once: clocks in browsers tick by 0.1 ms
const ENOUGH = 0.97; // a variant that takes a larger share of the time than this is no better
const COMPARISONS = 5;
const SPARE = 0.9; // of the budget that is used, as estimates go
const TOLERANCE = 1e-4; // of the largest output: sums are added in another order

/** Time variants for at most `budget` ms; returns what was found, and keeps it. */
export async function tune(engine, { budget = 5000, onProgress = () => {} } = {}) {
  await Promise.allSettled(Object.values(engine.kernels)); // which belongs to loading, and would disturb the times
  const begin = performance.now();
  const passed = () => performance.now() - begin;
  const caches = cachesOf(engine.program);
  const state = await engine.state([...caches, ...memoryOf(engine.program)], { B: 1, T: CAPACITY, N: PROMPT });
  const clock = new Clock(engine);
  const tasks = [];
  let own; // of the encoder in front of a decoder
  try {
    const text = Array.from({ length: PROMPT }, (_, i) => i % 7);
    const mask = text.map(() => 1);
    if (engine.program.encode) {
      const encoder = entryOf(engine, "encode");
      own = await encoder.state([], {});
      await encoder.run(own, { source: text, source_mask: mask }, { B: 1, N: PROMPT });
      tasks.push(...await collect(encoder, own, { B: 1, N: PROMPT }, clock, new Set()));
    }
    for (const count of caches.length ? [PROMPT, 1] : [PROMPT]) { // encoders never see a single token
      const ids = text.slice(0, count);
      const sizes = { B: 1, S: count, R: 1, T: CAPACITY, ...engine.program.encode ? { N: PROMPT } : {} };
      const ofDecoder = { ids, position: ids.map((_, i) => CAPACITY - PROMPT - 1 + i), keep: [count - 1] };
      if (engine.program.encode) ofDecoder.source_mask = mask;
      await engine.run(state, caches.length ? ofDecoder : { ids, mask }, sizes);
      tasks.push(...await collect(engine, state, sizes, clock, new Set(tasks.map((task) => task.name))));
    }
    for (;;) {
      const reserved = tasks.filter(({ best }) => best).reduce((sum, task) => sum + settling(task), 0);
      const fits = (task) => passed() + task.cost + settling(task) + reserved < budget * SPARE;
      const task = tasks.filter((one) => one.left.length && fits(one)).sort((a, b) => gain(b) - gain(a))[0];
      if (!task) break;
      onProgress({ elapsed: passed(), budget, kernel: task.name });
      const start = performance.now();
      await attempt(engine, clock, task, nearest(task, tasks));
      task.cost = Math.max(task.cost, performance.now() - start);
    }
    for (const task of tasks.filter(({ best }) => best)) {
      if (passed() + 1.2 * settling(task) > budget) continue; // without its comparison a variant is not taken
      onProgress({ elapsed: passed(), budget, kernel: task.name });
      await settle(engine, clock, task, () => passed() > budget);
    }
    outdate(engine);
    const kernels = tasks.map(({ name, tokens, calls, tried, shipped, tuned, worst, constants }) =>
      ({ name, tokens, calls, tried, default_ms: shipped, tuned_ms: tuned, worst_ms: worst, constants }));
    return { adapter: engine.adapter, seconds: passed() / 1000, kernels };
  } finally {
    engine.release(state);
    if (own) engine.release(own);
    clock.destroy();
    tasks.forEach(({ out }) => out.destroy());
  }
}

/** What one more attempt may save of a prompt and as many tokens after it. */
const gain = (task) => task.calls * (PROMPT / task.tokens) * task.found / (1 + task.tried);

/** Kernels of one family have the same shipped constants. */
const kindOf = (record) => JSON.stringify(record.constants);

/** Ms that the last comparison will take. */
const settling = (task) => 2 * COMPARISONS * Math.max(task.found, 2 * MEASURED_MS);

/** Of the constants that are left those that a kernel of the same kind is fastest with; then those that differ by the
    fewest steps from the best, the likeliest of these. */
function nearest(task, tasks) {
  const alike = tasks.filter(({ best, record }) => best && kindOf(record) === kindOf(task.record));
  const places = alike.map(({ best }) => task.left.findIndex((one) => kindOf({ constants: one }) === kindOf(best)));
  const known = places.find((i) => i >= 0);
  if (known !== undefined) return task.left.splice(known, 1)[0];
  const best = task.best?.constants ?? task.record.constants;
  const steps = (one) => Object.keys(best).reduce((sum, name) => sum + Math.abs(Math.log2(one[name] / best[name])), 0);
  const fewest = Math.min(...task.left.map(steps));
  return task.left.splice(task.left.findIndex((one) => steps(one) === fewest), 1)[0];
}

/** The kernels of a run that have a space, with what they read, and the shipped constants' time. */
async function collect(engine, state, sizes, clock, known) {
  const tasks = new Map();
  const { steps } = await engine.plan(state, sizes, false);
  for (const [i, { kernel, numbers }] of steps.entries()) {
    const { name } = kernel;
    if (!kernel.space || known.has(name)) continue;
    if (tasks.has(name)) {
      tasks.get(name).calls += 1;
      continue;
    }
    const record = engine.program.kernels[name];
    const step = engine.program.steps[i];
    const place = record.buffers.indexOf("write");
    const buffers = step.buffers.map((reference) => engine.buffer(state, reference));
    const out = engine.storage(buffers[place].size);
    buffers[place] = out;
    const task = { name, record, numbers, buffers, out, tokens: sizes.S ?? sizes.N, calls: 1, tried: 0 };
    const start = performance.now();
    const isShipped = kindOf(kernel) === kindOf(record);
    task.pipeline = isShipped ? kernel : await engine.pipeline(name, record);
    task.left = record.space.map((values) => named(record, values));
    task.shipped = task.tuned = task.found = task.worst = await clock.time(task, task.pipeline);
    task.cost = performance.now() - start;
    task.expected = new Float32Array(await engine.read(out, out.size));
    task.constants = kernel.constants;
    if (!isShipped) { // an earlier tuning's
      task.found = task.tuned = await clock.time(task, kernel);
      task.best = { pipeline: kernel, constants: kernel.constants };
      task.left = task.left.filter((constants) => kindOf({ constants }) !== kindOf(kernel));
    }
    tasks.set(name, task);
  }
  return [...tasks.values()];
}

const named = (record, values) => Object.fromEntries(Object.keys(record.constants).map((name, i) => [name, values[i]]));

/** Compile, run, compare and time one variant. */
async function attempt(engine, clock, task, constants) {
  task.tried += 1;
  const pipeline = await engine.pipeline(task.name, task.record, constants).catch((error) => {
    if (error instanceof BundleError && error.code === "lost") throw error;
  });
  if (!pipeline) return; // this device does not take it
  const ms = await clock.time(task, pipeline);
  task.worst = Math.max(task.worst, ms);
  if (ms >= task.found * ENOUGH || !same(new Float32Array(await engine.read(task.out, task.out.size)), task.expected)) return;
  Object.assign(task, { found: ms, best: { pipeline, constants } });
}

function same(found, expected) {
  const largest = expected.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  return found.every((value, i) => Math.abs(value - expected[i]) <= TOLERANCE * largest);
}

/** Compare the best variant with the shipped constants once more, turn about; take and keep the faster.  A comparison that
    takes longer than was foreseen, as on a busy machine, ends with the budget, and takes nothing. */
async function settle(engine, clock, task, isLate) {
  const times = { shipped: [], tuned: [] };
  for (let i = 0; i < COMPARISONS; i++) {
    if (isLate()) return;
    times.shipped.push(await clock.repeat(task, task.pipeline, task.shipped));
    times.tuned.push(await clock.repeat(task, task.best.pipeline, task.found));
  }
  const [shipped, tuned] = [median(times.shipped), median(times.tuned)];
  task.shipped = shipped;
  task.worst = Math.max(task.worst, shipped);
  const isFaster = tuned <= shipped * ENOUGH;
  const { pipeline, constants } = isFaster ? task.best : { pipeline: task.pipeline, constants: task.record.constants };
  Object.assign(task, { tuned: isFaster ? tuned : shipped, constants });
  take(engine, task.name, pipeline);
  await keep(engine, task.name, constants);
}

/** Plan anew: what is planned has the old kernels. */
export function outdate(engine) {
  for (const one of [engine, ...Object.values(engine.entries ?? {})]) one.generation += 1;
}

/** Run a kernel as it was compiled with other constants from the next plan on, and what keeps its order with its lanes. */
export function take(engine, name, pipeline) {
  engine.kernels[name] = Promise.resolve(pipeline);
  for (const [other, { order_of }] of Object.entries(engine.program.kernels)) {
    if (order_of === name) delete engine.kernels[other];
  }
}

const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];

/** The time of one dispatch in ms, by the device's clock where it has one. */
class Clock {
  constructor(engine) {
    this.engine = engine;
    this.precise = engine.device.features.has("timestamp-query");
    if (!this.precise) return;
    this.set = engine.device.createQuerySet({ type: "timestamp", count: 2 });
    const usage = GPUBufferUsage.QUERY_RESOLVE | GPUBufferUsage.COPY_SRC;
    this.resolved = engine.device.createBuffer({ size: 16, usage });
  }

  async time(task, kernel) {
    await this.run(task, kernel, 1); // the first run may compile
    const ms = await this.run(task, kernel, 1);
    return ms < MEASURED_MS ? this.repeat(task, kernel, ms) : ms;
  }

  /** The same of a kernel that is known to take about so long. */
  repeat(task, kernel, ms) {
    return this.run(task, kernel, Math.min(64, Math.ceil(MEASURED_MS / Math.max(ms, 0.02))));
  }

  async run(task, kernel, count) {
    const { device, uniforms } = this.engine;
    device.queue.writeBuffer(uniforms, 0, Uint32Array.from(task.numbers));
    const groups = this.engine.groupsOf(kernel, task.numbers);
    const group = this.engine.bind(kernel, task.buffers, 0);
    const encoder = device.createCommandEncoder();
    const timestampWrites = this.precise
      ? { querySet: this.set, beginningOfPassWriteIndex: 0, endOfPassWriteIndex: 1 } : undefined;
    const pass = encoder.beginComputePass({ timestampWrites });
    pass.setPipeline(kernel.pipeline);
    pass.setBindGroup(0, group);
    for (let i = 0; i < count; i++) pass.dispatchWorkgroups(...groups);
    pass.end();
    if (this.precise) encoder.resolveQuerySet(this.set, 0, 2, this.resolved, 0);
    const start = performance.now();
    device.queue.submit([encoder.finish()]);
    if (!this.precise) {
      await device.queue.onSubmittedWorkDone();
      return (performance.now() - start) / count;
    }
    const [first, last] = new BigUint64Array(await this.engine.read(this.resolved, 16));
    return Number(last - first) / 1e6 / count;
  }

  destroy() {
    this.set?.destroy();
    this.resolved?.destroy();
  }
}

async function keyOf(engine, name) {
  const hash = await sha256(new TextEncoder().encode(engine.program.kernels[name].source));
  return `compressor ${engine.adapter} ${engine.precision} ${name} ${hash.slice(0, 24)}`;
}

async function keep(engine, name, constants) {
  try {
    localStorage.setItem(await keyOf(engine, name), JSON.stringify(constants));
  } catch {} // there is none, or no room in it: tuning holds for this page
}

/** The constants that were found for a kernel on this adapter; undefined where there are none, or none of its space. */
export async function kept(engine, name) {
  const record = engine.program.kernels[name];
  try {
    const stored = JSON.parse(localStorage.getItem(await keyOf(engine, name)));
    const values = Object.keys(record.constants).map((key) => stored?.[key]);
    return record.space.some((one) => String(one) === String(values)) ? named(record, values) : undefined;
  } catch {
    return undefined;
  }
}
