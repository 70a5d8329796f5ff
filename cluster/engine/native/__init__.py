"""Kernels for x86 CPUs in C++, their builder and their Python wrappers."""
