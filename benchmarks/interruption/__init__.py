"""The parts of `python -m benchmarks.stops`: the same streams with a process that stops and, as the control, without.

`timed_stream` (one answer, and when its tokens came) → `load` (all streams of a run) → `stop` (when the process stood still, and whom that
stopped) → `comparison` (both runs at the same tokens) → `session` (the runs in turn). `memory_watch`: what processes grow by meanwhile.
"""
