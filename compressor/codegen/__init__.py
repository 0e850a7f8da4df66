"""From a compressed FX graph to a library of kernels: lowering, kernel families, tuning, targets."""
