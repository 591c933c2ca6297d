"""CPython's `multiprocessing.resource_sharer`: its thread and its socket stay after the first use; no leak."""

import socket
from multiprocessing import reduction


def test_send_socket():
    a, b = socket.socketpair()
    with a, b, socket.socket(fileno=reduction.DupFd(a.fileno()).detach()):
        pass
