"""What `benchmarks.peers` is made of: peers in virtual environments of their own, the same token ids for all, alternating runs, ratios."""
