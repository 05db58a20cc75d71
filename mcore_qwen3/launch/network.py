"""Whose an address is: this machine's, and which of its network interfaces'."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface, at byte 20 of a struct ifreq


def interface_of(address: str) -> str | None:
    """The name of this machine's interface with this IPv4 address; None where none is found, or the system is no Linux."""
    try:
        import fcntl

        wanted = socket.inet_aton(address.removeprefix("::ffff:"))
    except (ImportError, OSError):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24] == wanted:
                    return name
    return None


def is_own(address: str) -> bool:
    """Whether a host name or address leads to this machine itself: only then can a socket be bound to it."""
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
                return True
    return False
