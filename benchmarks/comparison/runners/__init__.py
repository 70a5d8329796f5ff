"""One module a contestant, run as a process of its own. Those of peers run in the peer's environment and import nothing else of Baton."""
