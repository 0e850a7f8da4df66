"""Serve a device to another machine that compresses for it: time kernels here, and run bundles.

TVM's RPC protocol carries the calls (its tracker knows such a server as any other); nothing but TVM's run-time library,
apache-tvm-ffi and numpy is needed.  In a bundle's folder: ``python -m compressor_runtime.remote --port 9090``.

Invariant: whatever comes over the network runs in a process of its own, so that the server outlives it.
"""
