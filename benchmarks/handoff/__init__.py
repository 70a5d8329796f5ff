"""What a KV handoff costs: the wires it goes over by themselves, and what a client sees of it."""
