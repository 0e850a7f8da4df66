"""WebGPU: kernels in WGSL, and the program of buffers and steps that a browser runs."""
