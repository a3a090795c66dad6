"""Few-row products and a fused decoder stack for the CPU, compiled by Numba: no compiler has to be installed."""
