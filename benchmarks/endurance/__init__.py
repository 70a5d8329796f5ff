"""The parts of `python -m benchmarks.soak`: mixed traffic with cancels, what each process holds meanwhile, and whether that grows.

Samples: `roles` (what a process is) → `process_sample` (what it holds now) → `sampler` (over time). Judgement: `trend` → `verdict`.
Traffic: `traffic` (what is asked, and what cancelled) → `senders` (how it is sent) → `load` (when, and the counts).
"""
