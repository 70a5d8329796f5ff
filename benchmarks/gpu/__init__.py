"""The parts of `python -m benchmarks.gpu_check`: `device` (what it runs on), `suite` (the tests), `self_send` (the figures)."""
