"""Which network interface has an address (Linux)."""

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
