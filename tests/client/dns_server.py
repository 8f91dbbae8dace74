"""A name server on loopback with given SRV records, which may change while it runs."""

from __future__ import annotations

import socket
import threading
from typing import Self

import dns.message
import dns.rcode
import dns.rrset


class DnsServer:
    """Answers over UDP; ``records`` are (port, target) by name; all questions are refused if ``refuses``."""

    def __init__(self) -> None:
        self.records: dict[str, list[tuple[int, str]]] = {}
        self.refuses = False
        self.asked: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join(10)
        self._socket.close()

    def options(self) -> str:
        """For a connection string."""
        return f"dns_nameserver=127.0.0.1&dns_port={self.port}"

    def _serve(self) -> None:
        while True:
            data, peer = self._socket.recvfrom(4096)
            if not data:
                return
            query = dns.message.from_wire(data)
            name = query.question[0].name.to_text()
            self.asked.append(name)
            answer = dns.message.make_response(query)
            records = self.records.get(name)
            if self.refuses:
                answer.set_rcode(dns.rcode.REFUSED)
            elif records is None:
                answer.set_rcode(dns.rcode.NXDOMAIN)
            else:
                texts = [f"0 0 {port} {target}" for port, target in records]
                answer.answer.append(dns.rrset.from_text(name, 60, "IN", "SRV", *texts))
            self._socket.sendto(answer.to_wire(), peer)
