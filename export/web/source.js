// What an encoder-decoder reads: a source, which its encoder computes once, and whose keys and values every step reads.

import { BundleError, bytesOf, cachesOf, entryOf, memoryOf } from "./program.js";

/** A state for steps after a source, token ids; with what each step is given of the source. */
export async function encoded(model, capacity, ids) {
  const { engine, info } = model;
  const { max_positions: most } = info.encoder_source;
  if (!ids.length || (most && ids.length > most)) {
    throw new BundleError("request", `a source of ${ids.length} tokens; the model takes between 1 and ${most || "any number"}`);
  }
  const sizes = { B: 1, N: ids.length };
  const memory = memoryOf(engine.program);
  const state = await engine.state([...cachesOf(engine.program), ...memory], { ...sizes, T: capacity });
  const mask = ids.map(() => 1);
  await model.exclusively(async () => {
    const encoder = entryOf(engine, "encode");
    const own = await encoder.state([], sizes);
    try {
      await encoder.run(own, { source: ids, source_mask: mask }, sizes);
      encoder.program.outputs.forEach(({ buffer }, i) =>
        encoder.copy(own, buffer, state.buffers[memory[i].name], bytesOf(memory[i], sizes)));
    } finally {
      encoder.release(own);
    }
  }).catch((error) => { engine.release(state); throw error; });
  return { state, inputs: { source_mask: mask }, sizes: { N: ids.length } };
}
