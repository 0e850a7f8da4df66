"""Write bundles, whole or not at all.

Invariant: writes what it is given; knows neither passes nor TVM.
"""
