// Fetches a bundle's files, from a server or a folder, and checks them against its manifest.

import { BundleError, sha256 } from "./program.js";

const SCHEMA_VERSION = 1;
const CACHE = "compressor-bundles";

export async function readManifest(base, signal) {
  const manifest = await fetchFile(base, "manifest.json", signal).then((response) => response.json()).catch((error) => {
    if (error instanceof BundleError || error.name === "AbortError") throw error;
    throw new BundleError("damaged", `${base}manifest.json is not readable as JSON; copy the bundle again`);
  });
  if (manifest.format !== "compressor web bundle") {
    throw new BundleError("damaged", `${base} holds no bundle for browsers; make one with \`target: webgpu\``);
  }
  if (manifest.schema_version > SCHEMA_VERSION) {
    throw new BundleError("damaged", `${base} has schema ${manifest.schema_version}, this runner reads up to ` +
      `${SCHEMA_VERSION}; use the runner.js inside the bundle`);
  }
  return manifest;
}

async function fetchFile(base, name, signal) {
  const isLocal = base.protocol === "file:"; // outside of browsers
  const get = isLocal ? async (url) => new Response(await (await import("node:fs/promises")).readFile(url)) : fetch;
  let response;
  try {
    response = await get(new URL(name, base), { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const why = isLocal ? error.message : `no connection to ${base.host}`;
    throw new BundleError("missing", `${name} cannot be fetched: ${why}`, { cause: error });
  }
  if (!response.ok) throw new BundleError("missing", `${name} cannot be fetched: the server says ${response.status}`);
  return response;
}

export async function readFile(base, manifest, name, signal) {
  const content = new Uint8Array(await fetchFile(base, name, signal).then((response) => response.arrayBuffer()));
  await check(name, content, manifest.files[name]);
  return content;
}

/** A shard's bytes, from the browser's cache where it has them, with its SHA-256 compared either way. */
export async function readShard(base, shard, seen, signal) {
  const store = await globalThis.caches?.open(CACHE).catch(() => undefined); // there is none in private windows
  const key = new URL(`${shard.file}?sha256=${shard.sha256}`, base).href;
  const kept = await store?.match(key);
  if (kept) {
    const content = new Uint8Array(await kept.arrayBuffer());
    if (await sha256(content) === shard.sha256) {
      seen(content.length);
      return content;
    }
    await store.delete(key);
  }
  const response = await fetchFile(base, shard.file, signal);
  const content = new Uint8Array(shard.bytes);
  let filled = 0;
  try {
    for (const reader = response.body.getReader(); ;) {
      const { done, value } = await reader.read();
      if (done) break;
      if (filled + value.length <= shard.bytes) content.set(value, filled);
      filled += value.length;
      seen(value.length);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new BundleError("missing", `${shard.file}: the connection broke after ${filled} bytes`, { cause: error });
  }
  if (filled !== shard.bytes) {
    throw new BundleError("damaged", `${shard.file} has ${filled} bytes, the manifest says ${shard.bytes}; copy it again`);
  }
  await check(shard.file, content, shard);
  await store?.put(key, new Response(content)).catch(() => {}); // no room: it is fetched again next time
  return content;
}

async function check(name, content, entry) {
  if (!entry || await sha256(content) !== entry.sha256) {
    throw new BundleError("damaged", `${name} is not what the manifest says (SHA-256 differs); copy it again`);
  }
}
