"""Whether a worker keeps to itself: libraries with ports of their own, which ask for no secret, are then kept to loopback too."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether `host`, an address or a name that a worker binds to, is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
