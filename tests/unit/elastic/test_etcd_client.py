# SPDX-License-Identifier: Apache-2.0
"""The client of etcd's gateway, against a server that answers what it is told to."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from isthmus.elastic.journal.etcd import EtcdAccess, EtcdClient
from isthmus.elastic.journal.etcd_wire import RangeAnswer

ANSWER = b'{"kvs": [{"key": "YQ==", "value": "Yg=="}]}'


class _Gateway(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(ANSWER)))
        self.send_header("Connection", self.server.connection)
        self.end_headers()
        self.wfile.write(ANSWER)

    def log_message(self, *_):
        """Nobody reads it."""


@pytest.fixture
def gateway():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gateway)
    serving = threading.Thread(target=server.serve_forever, args=(0.01,))
    serving.start()
    yield server
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
def test_a_server_may_close_the_connection_behind_each_answer(gateway, connection):
    # Found before: of one that does, as a node that is being shut down or a proxy, the second call raised
    # AttributeError, which ended the coordinator.
    gateway.connection = connection
    client = EtcdClient(EtcdAccess(endpoints=(f"127.0.0.1:{gateway.server_port}",)))
    for _ in range(3):
        (found,) = client.call("kv/range", {"key": b"a"}, RangeAnswer, timeout_s=5.0).kvs
        assert (found.key, found.value) == (b"a", b"b")
    client.close()
