"""What orders.py promises, tried against a real database: `python orders.py --self-test`."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import orders

CALLERS = 20


def main(url, argv):
    if "--crash-after-insert" in argv:
        crash_after_insert(url, argv[argv.index("--crash-after-insert") + 1])
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # connections are cut here on purpose
    passed = failed = 0
    with orders.connect(url, size=CALLERS) as pool:
        orders.setup(pool)
        for test in TESTS:
            try:
                test(url, pool)
                passed += 1
            except Exception as error:
                failed += 1
                print(f"{test.__name__}: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def expect(condition, what):
    # Not assert: python -O would take it out.
    if not condition:
        raise AssertionError(what)


def expect_raises(kind, call):
    try:
        answer = call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, got {answer!r}")


def fresh(amount=1999):
    """A key and a request of the test's own; the customer's name finds its rows."""
    name = str(uuid.uuid4())
    return f"checkout-{name}", {"customer": name, "amount": amount}


def count(pool, request, table="example_orders"):
    with pool.connection() as conn:
        return conn.execute(f"SELECT count(*) FROM {table} WHERE customer = %s", (request["customer"],)).fetchone()[0]


def as_a_client(call):
    """A client that is told to come again does so."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return call()
        except orders.InProgress as wait:
            expect(time.monotonic() < deadline, "still in progress after 30 s")
            time.sleep(min(wait.retry_after_s, 0.2))


def sequential_duplicates(url, pool):
    key, request = fresh()
    first = orders.create_order(pool, key, request)
    again = orders.create_order(pool, key, dict(reversed(request.items())))  # the same JSON, spelled otherwise
    expect(first == again, "the replay has other bytes")
    expect(count(pool, request) == 1, "not one row")


def twenty_callers_at_once(url, pool):
    key, request = fresh()
    start = threading.Barrier(CALLERS)

    def caller(_):
        start.wait()
        return as_a_client(lambda: orders.create_order(pool, key, request))

    with ThreadPoolExecutor(CALLERS) as threads:
        answers = list(threads.map(caller, range(CALLERS)))
    expect(len(set(answers)) == 1, "different answers")
    expect(count(pool, request) == 1, "not one row")


def same_key_other_payload(url, pool):
    key, request = fresh()
    first = orders.create_order(pool, key, request)
    other = {"customer": str(uuid.uuid4()), "amount": 5}
    expect_raises(orders.Conflict, lambda: orders.create_order(pool, key, other))
    expect(count(pool, other) == 0, "the conflicting request left a row")
    expect(orders.create_order(pool, key, request) == first, "the stored answer changed")


def crash_after_the_business_write(url, pool):
    key, request = fresh()
    child = subprocess.run(
        [sys.executable, orders.__file__, "--crash-after-insert", f"{key} {request['customer']} {request['amount']}"],
        stdout=subprocess.PIPE, timeout=30,
    )
    expect(child.stdout == b"inserted\n" and child.returncode == -signal.SIGKILL, f"the crash did not happen: {child}")
    expect(count(pool, request) == 0, "the crashed attempt left a row")
    answer = as_a_client(lambda: orders.create_order(pool, key, request))
    expect(orders.create_order(pool, key, request) == answer, "the replay has other bytes")
    expect(count(pool, request) == 1, "not one row")


def crash_after_insert(url, what):
    key, customer, amount = what.split(" ")
    request = {"customer": customer, "amount": int(amount)}
    with psycopg.connect(url) as conn:
        expect(orders.claim(conn, "create_order", key, request).kind == "new_claim", "not a new claim")
        orders.insert_order(conn, request)
        print("inserted", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def business_failure_is_final(url, pool):
    key, request = fresh(amount=orders.CREDIT_LIMIT + 1)
    for _ in range(2):
        failure = expect_raises(orders.Failed, lambda: orders.create_order(pool, key, request))
        expect(failure.code == "credit_exceeded" and "limit" in failure.message, f"another failure: {failure}")
        expect(count(pool, request) == 0, "the failed attempt left a row")
    with pool.connection() as conn:
        kind = orders.claim(conn, "create_order", key, request).kind
    expect(kind == "final_failure", f"not recorded: {kind}")


def commit_of_an_aborted_transaction(url, pool):
    with pool.connection() as conn:
        expect_raises(psycopg.errors.DivisionByZero, lambda: conn.execute("SELECT 1/0"))
        error = expect_raises(RuntimeError, lambda: orders.commit(conn))
        expect("ROLLBACK" in str(error), str(error))


def commit_lost(url, pool, answer_only):
    key, request = fresh()
    proxy = CommitCutter(url, answer_only)
    with orders.connect(proxy.url, size=1) as cut:
        answer = as_a_client(lambda: orders.create_order(cut, key, request))
    expect(proxy.cuts == 1, "nothing was cut")
    expect(orders.create_order(pool, key, request) == answer, "not the answer that was stored")
    expect(count(pool, request) == 1, "not one row")


def commit_lost_on_the_way(url, pool):
    commit_lost(url, pool, answer_only=False)


def answer_to_commit_lost(url, pool):
    commit_lost(url, pool, answer_only=True)


def lease_is_held_and_renewed(url, pool):
    key, request = fresh()

    def provider(key, request, renew):
        busy = expect_raises(orders.InProgress, lambda: orders.charge_card(pool, key, request, never))
        expect(busy.retry_after_s > 0, "no retry-after")
        expect(renew() < renew(), "the lease did not grow")
        return "ref-1"

    def never(key, request, renew):
        raise AssertionError("ran a second time")

    first = orders.charge_card(pool, key, request, provider)
    expect(orders.charge_card(pool, key, request, never) == first, "the replay has other bytes")
    expect(count(pool, request, "example_payments") == 1, "not one payment")


def stale_owner_is_fenced(url, pool):
    key, request = fresh()
    takeover = []

    def pausing(key, request, renew):
        # Paused past its lease: meanwhile another caller keeps asking until it may take over.
        takeover.append(as_a_client(lambda: orders.charge_card(pool, key, request, lambda *_: "ref-of-the-second")))
        expect_raises(orders.LeaseLost, renew)
        return "ref-of-the-first"

    lost = expect_raises(orders.LeaseLost, lambda: orders.charge_card(pool, key, request, pausing, "50 milliseconds"))
    expect(lost.__cause__.sqlstate == "P4010", f"another error: {lost.__cause__!r}")
    expect(count(pool, request, "example_payments") == 1, "not one payment")
    expect(orders.charge_card(pool, key, request, pausing) == takeover[0], "the replay has other bytes")


TESTS = [
    sequential_duplicates,
    twenty_callers_at_once,
    same_key_other_payload,
    crash_after_the_business_write,
    business_failure_is_final,
    commit_of_an_aborted_transaction,
    commit_lost_on_the_way,
    answer_to_commit_lost,
    lease_is_held_and_renewed,
    stale_owner_is_fenced,
]


class CommitCutter:
    """A wire that breaks once: at the first COMMIT, before it arrives or before its answer comes back.

    It reads the protocol in the clear, so it asks for a connection without TLS.
    """

    def __init__(self, url, answer_only):
        given = conninfo_to_dict(url)
        self.upstream = (given.get("host", "127.0.0.1"), int(given.get("port", 5432)))
        self.answer_only, self.cuts = answer_only, 0
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self.url = make_conninfo(url, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable")
        threading.Thread(target=self.accept, args=(listener,), daemon=True).start()

    def accept(self, listener):
        while True:
            client, _ = listener.accept()
            server = self.dial()
            cut = threading.Event()
            for wires in ((client, server, self.on_request), (server, client, self.on_answer)):
                threading.Thread(target=self.pump, args=(*wires, cut), daemon=True).start()

    def dial(self):
        host, port = self.upstream
        if not host.startswith("/"):
            return socket.create_connection(self.upstream)
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{host}/.s.PGSQL.{port}")
        return server

    def pump(self, source, sink, inspect, cut):
        try:
            while data := source.recv(65536):
                if inspect(data, cut):
                    break
                sink.sendall(data)
        except OSError:
            pass  # the other direction hung up
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def on_request(self, data, cut):
        if self.cuts or not re.search(rb"\bCOMMIT\b", data, re.IGNORECASE):
            return False
        self.cuts += 1
        cut.set()
        return not self.answer_only

    def on_answer(self, data, cut):
        # The answer is here, so the transaction is committed; the client never hears of it.
        return cut.is_set()
