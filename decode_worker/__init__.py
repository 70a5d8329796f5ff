"""The decode worker: fetches a prompt's KV from a prefill worker and generates the rest of the tokens."""
