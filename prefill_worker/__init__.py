"""The prefill worker: computes prompts and keeps their KV until a decode worker has taken it."""
