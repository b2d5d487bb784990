"""An orders service behind `pgonce gateway`: the order and its answer commit in one transaction.

    DATABASE_URL=postgres://… python orders.py PORT
    pgonce gateway --listen 127.0.0.1:8080 --upstream http://127.0.0.1:PORT --require-key --stale rerun
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import psycopg
from psycopg_pool import ConnectionPool

from crash import crash_at  # for the tests: see crash.py

BODY_BYTES_MAX = 64 * 1024


class Claim(NamedTuple):
    """The intent that a request runs for, as the gateway names it."""

    tenant: str
    scope: str
    key: str
    claim_id: str


class Answer(NamedTuple):
    status: int
    headers: list
    body: bytes


def create_order(pool, claim, request):
    """Inserts the order, and with it the answer that the gateway gives to this request and to every repetition."""
    crash_at("before_effect")
    with pool.connection() as conn:  # one transaction: committed at the end, rolled back by an exception
        order = insert_order(conn, claim, request)
        crash_at("after_effect")
        headers = [["content-type", "application/json"], ["location", f"/orders/{order['id']}"]]
        answer = Answer(201, headers, json.dumps(order).encode())
        if claim:
            succeed(conn, claim, answer)
        crash_at("after_succeed")
    crash_at("after_commit")
    return answer


def insert_order(conn, claim, request):
    """The effect. It knows nothing of idempotency."""
    order_id = conn.execute(
        "INSERT INTO gateway_orders (tenant, customer, amount) VALUES (%s, %s, %s) RETURNING id",
        (claim.tenant if claim else "", request["customer"], request["amount"]),
    ).fetchone()[0]
    return {"id": str(order_id), "customer": request["customer"], "amount": request["amount"]}


def succeed(conn, claim, answer):
    """The outcome. The last statement before COMMIT: it locks the intent's row, which the gateway's renewals need.

    Raises P4010 where the claim is not the current one any more: somebody else runs this intent, or ran it.
    """
    conn.execute(
        "SELECT once.succeed(p_tenant => %s, p_scope => %s, p_key => %s, p_claim_id => %s,"
        " p_response_code => %s, p_response_headers => %s::jsonb, p_response_body => %s)",
        (*claim, answer.status, json.dumps(answer.headers), answer.body),
    )


def answer_to(pool, claim, body):
    request = parse(body)
    if request is None:
        return problem(400, "an order is {customer: text, amount: a whole number from 1}")
    try:
        return create_order(pool, claim, request)
    except psycopg.Error as error:
        if error.sqlstate == "P4010":
            return problem(409, "this attempt came too late and did nothing: another has the request, or it is done")
        # Also a COMMIT that was not answered. The gateway asks the intent's row, which waits for the transaction's
        # end: if it did commit, the client gets the answer all the same.
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return problem(503, "the database did not do it")


def parse(body):
    try:
        request = json.loads(body)
        customer, amount = request["customer"], request["amount"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if not isinstance(customer, str) or not 1 <= len(customer) <= 200 or not customer.isprintable():
        return None
    if type(amount) is not int or not 1 <= amount <= 10**12:
        return None
    return request


def problem(status, title):
    body = json.dumps({"title": title, "status": status}).encode()
    return Answer(status, [["content-type", "application/problem+json"]], body)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # the gateway keeps its connections
    wbufsize = -1  # head and body leave together
    timeout = 60  # for a connection on which nothing comes

    def do_POST(self):
        length = self.headers["Content-Length"] or ""
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            return self.refuse(problem(411, "Content-Length is missing"))
        if int(length) > BODY_BYTES_MAX:
            return self.refuse(problem(413, f"the limit is {BODY_BYTES_MAX} bytes"))
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True  # whoever sent this is gone, and meant to say more
        elif self.path != "/orders":
            self.answer(problem(404, "there are orders here, nothing else"))
        else:
            self.answer(answer_to(self.server.pool, self.claim(), body))

    def claim(self):
        """None where the service is called directly: then nobody deduplicates."""
        if "Pgonce-Claim" not in self.headers:
            return None
        # A header's bytes come as Latin-1; the gateway sent UTF-8.
        names = ("Pgonce-Tenant", "Pgonce-Scope", "Pgonce-Key", "Pgonce-Claim")
        return Claim(*(self.headers.get(name, "").encode("latin-1").decode() for name in names))

    def refuse(self, answer):
        """Answers without having read the body, so the connection cannot go on."""
        self.close_connection = True
        self.answer(answer)

    def answer(self, answer):
        crash_at("before_answer")
        self.send_response(answer.status)
        for name, value in [*answer.headers, ["content-length", str(len(answer.body))]]:
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        half = len(answer.body) // 2
        self.wfile.write(answer.body[:half])
        crash_at("in_answer", self.wfile.flush)
        self.wfile.write(answer.body[half:])

    def log_message(self, *_):
        pass  # a line a request is too much


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # 5 are too few for a gateway's burst
    daemon_threads = True


def setup(pool):
    with pool.connection() as conn:
        conn.execute(
            "CREATE TABLE IF NOT EXISTS gateway_orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,"
            " tenant text NOT NULL, customer text NOT NULL, amount bigint NOT NULL)"
        )


def main():
    url = os.environ.get("DATABASE_URL")
    if not url or len(sys.argv) != 2 or not sys.argv[1].isdigit():
        sys.exit("usage: DATABASE_URL=postgres://… python orders.py PORT")
    # The gateway's own database: the claim is there, and the order has to be where the claim is.
    with ConnectionPool(url, min_size=1, max_size=10, timeout=10, open=True) as pool:
        setup(pool)
        server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
        server.pool = pool
        print(f"ready http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
