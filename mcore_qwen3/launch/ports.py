"""TCP ports on this machine: one that is free, or why a given one is not."""

from __future__ import annotations

import errno
import random
import socket

# Below what Linux and others give to outgoing connections (32768 and up), above what services have by custom.
_OWN_RANGE = range(20000, 29500)


def free_port() -> int:
    """A port number that nothing on this machine listens on now.

    Nothing holds it until torchrun binds it. It is none that the system could give to a connection until then, and chosen
    at random, so that two jobs that start together hardly get the same.
    """
    chance = random.SystemRandom()
    while why_not_usable(port := chance.choice(_OWN_RANGE)) is not None:
        pass
    return port


def why_not_usable(port: int) -> str | None:
    """Why torch could not listen on `port` of this machine, or None when it could.

    torch's store listens on all interfaces, IPv6 and IPv4 alike, so a listener on any one of them is in its way.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # this machine has no such protocol, so nobody can be in the way there
            continue
        with probe:
            # Connections of an earlier job that are still being closed must not make the port look busy.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(("", port))
                probe.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return "it is in use on this machine"
                if error.errno != errno.EADDRNOTAVAIL:  # not available: IPv6 is compiled in but switched off
                    return str(error.strerror)
    return None
