// Keeps the page and the run-time for offline use: the network first, what was kept where there is none.  The weights
// are kept by runner.js, which checks them.

const CACHE = "compressor-pages";

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));
self.addEventListener("fetch", (event) => {
  const url = new URL(event.request.url);
  if (event.request.method !== "GET" || url.origin !== location.origin || url.pathname.includes("/weights/")) return;
  event.respondWith((async () => {
    const store = await caches.open(CACHE);
    try {
      const response = await fetch(event.request);
      if (response.ok) await store.put(event.request, response.clone());
      return response;
    } catch (error) {
      const kept = await store.match(event.request, { ignoreSearch: true });
      if (kept) return kept;
      throw error;
    }
  })());
});
