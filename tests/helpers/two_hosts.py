"""Two "hosts" on this machine: namespaces with a name and a network of their own, joined by one wire; and one without any.

Made with `unshare` and `ip` (iproute2), as root or, where the kernel lets users have namespaces, as anyone. Where it cannot
be done the tests skip with the reason; where only `ip` is missing they fail, as that can be mended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

_HOLD = "hostname {name} && echo ready && exec cat"  # until its input ends


class Host:
    """One host.

    Attributes:
        name: what `hostname` says there; no other host can look it up.
        address: its IPv4 address on the wire; "" without one.
        prefix: the words before a command that is to run there.
    """

    def __init__(self, name: str, address: str, enter: list[str], unshare: list[str], stack: ExitStack) -> None:
        self.name, self.address = name, address
        holder = stack.enter_context(
            subprocess.Popen(
                [*enter, *unshare, "sh", "-c", _HOLD.format(name=name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
        assert holder.stdin is not None and holder.stdout is not None
        stack.callback(holder.stdin.close)
        assert holder.stdout.readline() == b"ready\n"
        self.pid = holder.pid
        users = ["-U", "--preserve-credentials"] if os.getuid() else []
        self.prefix = ["nsenter", "-t", str(self.pid), *users, "-n", "-u", "--"]

    def ip(self, *words: str) -> None:
        """Run `ip` there."""
        subprocess.run([*self.prefix, "ip", *words], check=True, timeout=60)

    def wire(self, state: str) -> None:
        """`down` cuts the wire of this host, `up` mends it."""
        self.ip("link", "set", "wire", state)


def _unshare() -> list[str]:
    """The command that makes namespaces for a host; skips the test where that is not possible."""
    if not sys.platform.startswith("linux"):
        pytest.skip("network namespaces: Linux only")
    command = ["unshare", *(["-r"] if os.getuid() else []), "-n", "-u"]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no network namespace can be made here: {' '.join(command)}: {tried.stderr.strip()}")
    return command


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """host-a and host-b, with one wire between them."""
    unshare = _unshare()
    assert shutil.which("ip"), "network namespaces can be made here, but not joined: install iproute2"
    with ExitStack() as stack:
        one = Host("host-a", "10.211.7.1", [], unshare, stack)
        # For a user, the second has to belong to the first one's user namespace, or nothing may join the two.
        inner = [word for word in unshare if word != "-r"]
        other = Host("host-b", "10.211.7.2", one.prefix if os.getuid() else [], inner, stack)
        one.ip("link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", str(other.pid))
        for host in (one, other):
            host.ip("address", "add", f"{host.address}/24", "dev", "wire")
            host.ip("link", "set", "lo", "up")
            host.wire("up")
        yield one, other


@contextmanager
def host_without_network() -> Iterator[Host]:
    """Not even its loopback is up."""
    with ExitStack() as stack:
        yield Host("host-alone", "", [], _unshare(), stack)
