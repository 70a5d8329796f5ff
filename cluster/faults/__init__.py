"""Faults on purpose, by the rules of the config (`fault_injection`)."""
