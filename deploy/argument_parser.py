"""argparse, with options between the positional arguments too: `baton chat URL --seed 1 PROMPT`."""

from __future__ import annotations

import argparse
from typing import Any


class IntermixedParser(argparse.ArgumentParser):
    """For commands: argparse has intermixed parsing for a whole command line only, and fills optional positionals too early without it."""

    _is_nested = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `parse_known_intermixed_args`, which calls this again for its two passes."""
        if self._is_nested or {"-h", "--help"} & set(args):  # the first pass hides the positionals, and their defaults
            return super().parse_known_args(args, namespace)
        self._is_nested = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_nested = False
