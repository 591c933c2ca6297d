"""dnslib#16: a query that fails leaves its socket open (0.9.14; right in 0.9.26)."""

import dnslib
import pytest

FAILURES = []


def test_refused():
    with pytest.raises(OSError) as info:
        dnslib.DNSRecord.question("example.org").send("127.0.0.1", 1, tcp=True, timeout=1)
    FAILURES.append(info.value)
