"""An order that is created once, however often and by however many it is asked for: psycopg 3.

    DATABASE_URL=postgres://… python orders.py KEY CUSTOMER AMOUNT
    DATABASE_URL=postgres://… python orders.py --self-test
"""

import json
import os
import random
import sys
import time
from contextlib import contextmanager

import psycopg
from psycopg import errors
from psycopg.rows import namedtuple_row
from psycopg_pool import ConnectionPool

ATTEMPTS_MAX = 8
BACKOFF_MS_MAX = 500
RESOLVE_ATTEMPTS_MAX = 6
CREDIT_LIMIT = 100_000

# The kinds of claim after which the intent is ours to run.
OWNED = ("new_claim", "retryable_failure", "processing_stale")


class Conflict(Exception):
    """The key was used before with another payload. HTTP: 422."""


class InProgress(Exception):
    """Somebody is at it: ask again, with the same key, after `retry_after_s`. HTTP: 409 with Retry-After."""

    def __init__(self, retry_after_ms):
        super().__init__(f"in progress, again in {retry_after_ms} ms")
        self.retry_after_s = retry_after_ms / 1000


class BusinessError(Exception):
    """A rule said no: what an effect raises. Nothing of the intent is recorded yet."""

    def __init__(self, code, message):
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


class Failed(BusinessError):
    """The same no, recorded, now or by an earlier attempt: every later attempt gets it."""


class NeedsSettling(Exception):
    """`uncertain`: the effect may be there or not. A person settles it (`pgonce intents settle`)."""


class ResultExpired(Exception):
    """It was done, but the answer is kept no longer."""


class LeaseLost(Exception):
    """Somebody took the work over; what this caller did in its transaction was rolled back."""


class InDoubt(Exception):
    """COMMIT was sent and not answered: it may have happened."""


def setup(pool):
    """Safe at every start: both calls change nothing when there is nothing to change."""
    with pool.connection() as conn:
        conn.execute(
            "CREATE TABLE IF NOT EXISTS example_orders"
            " (id uuid PRIMARY KEY, customer text NOT NULL, amount bigint NOT NULL)"
        )
        conn.execute(
            "CREATE TABLE IF NOT EXISTS example_payments"
            " (provider_reference text NOT NULL, customer text NOT NULL, amount bigint NOT NULL)"
        )
        for scope, policy in (
            ("create_order", {"retention": "30d", "waiters_max": 32}),
            # The provider gets our key and deduplicates by it, so asking it again is safe: stale = rerun.
            ("charge_card", {"mode": "leased", "lease": "30s", "stale": "rerun", "retention": "30d"}),
        ):
            conn.execute(
                "SELECT once.define_scope(p_scope => %s, p_policy => %s::jsonb)", (scope, json.dumps(policy))
            )
        commit(conn)


# --- atomic: claim, effect and outcome in one transaction -------------------------------------------------


def create_order(pool, key, request):
    """The answer's bytes: of this execution, or the stored ones of the first.

    After any exception that is not described above, calling again with the same key is safe.
    """
    try:
        return retrying(lambda: create_order_attempt(pool, key, request))
    except Failed:
        raise
    except BusinessError as refusal:
        # The effect is rolled back by now, and a failure noted in that transaction would be gone with it:
        # it is recorded in one of its own.
        return retrying(lambda: record_failure(pool, key, request, refusal))


def create_order_attempt(pool, key, request):
    try:
        # Left by an exception, the block rolls back.
        with pool.connection() as conn:
            found = claim(conn, "create_order", key, request)
            if found.kind not in OWNED:
                return observed(found)
            order = insert_order(conn, request)
            body = json.dumps(order).encode()
            succeed(conn, "create_order", key, found.claim_id, body, "order", order["id"])
            commit(conn)
            return body
    except InDoubt:
        # Outside the block, where the broken connection has been given back.
        done = resolve(pool, "create_order", key, found.claim_id)
        if done:
            return body
        if done is None:
            raise  # a scope that keeps its rows for less than a minute cannot tell
        # Nothing was committed, and nothing will be: as good as a serialization failure.
        raise errors.SerializationFailure("the connection was lost and the transaction rolled back")


def insert_order(conn, request):
    """The effect. It knows nothing of idempotency."""
    order_id = conn.execute(
        "INSERT INTO example_orders (id, customer, amount) VALUES (gen_random_uuid(), %s, %s) RETURNING id",
        (request["customer"], request["amount"]),
    ).fetchone()[0]
    owed = conn.execute(
        "SELECT sum(amount)::bigint FROM example_orders WHERE customer = %s", (request["customer"],)
    ).fetchone()[0]
    if owed > CREDIT_LIMIT:
        raise BusinessError("credit_exceeded", f"the limit is {CREDIT_LIMIT}")
    return {"id": str(order_id), "customer": request["customer"], "amount": request["amount"]}


def record_failure(pool, key, request, refusal):
    with pool.connection() as conn:
        found = conn.cursor(row_factory=namedtuple_row).execute(
            "SELECT * FROM once.record_failure(p_scope => 'create_order', p_key => %s,"
            " p_fingerprint => once.fingerprint(%s::jsonb), p_retryable => false, p_code => %s, p_message => %s)",
            (key, json.dumps(request), refusal.code, refusal.message),
        ).fetchone()
        commit(conn)
    if found.kind in OWNED:
        raise Failed(refusal.code, refusal.message)
    # Between our rollback and this call another attempt settled the intent: its outcome is the outcome.
    return observed(found)


# --- leased: work that cannot live in one transaction -----------------------------------------------------


def charge_card(pool, key, request, provider, lease="30 seconds"):
    """Charges through `provider(key, request, renew)`, which returns the provider's reference.

    The claim commits before the provider is called. The payment's row commits with the outcome, fenced: an
    owner that was paused for longer than its lease cannot write over whoever took over. What the fence does
    not cover is the call itself: the provider may be called twice, so it must take our key.
    """
    with pool.connection() as conn:
        found = claim(conn, "charge_card", key, request, lease)
        commit(conn)
    if found.kind not in OWNED:
        return observed(found)

    def renew():
        """To be called well before the lease ends; raises LeaseLost when it is too late."""
        with fenced(), pool.connection() as conn:
            until = conn.execute(
                "SELECT once.renew(p_scope => 'charge_card', p_key => %s, p_claim_id => %s, p_lease => %s::interval)",
                (key, found.claim_id, lease),
            ).fetchone()[0]
            commit(conn)
            return until

    try:
        reference = provider(key, request, renew)
    except BusinessError as refusal:
        # Only a definite no is recorded. After a timeout the claim is left alone: we do not know, and when
        # the lease ends the scope's policy decides.
        with fenced(), pool.connection() as conn:
            conn.execute(
                "SELECT once.fail(p_scope => 'charge_card', p_key => %s, p_claim_id => %s,"
                " p_retryable => false, p_code => %s, p_message => %s)",
                (key, found.claim_id, refusal.code, refusal.message),
            )
            commit(conn)
        raise Failed(refusal.code, refusal.message) from refusal
    body = json.dumps({"reference": reference}).encode()
    try:
        retrying(lambda: complete_charge(pool, key, request, found.claim_id, reference, body))
    except InDoubt:
        done = resolve(pool, "charge_card", key, found.claim_id)
        if done is None:
            # Our completion may still be on its way. The next call with this key gets a definite answer.
            raise InProgress(1000)
        if not done:
            raise LeaseLost
    return body


def complete_charge(pool, key, request, claim_id, reference, body):
    with fenced(), pool.connection() as conn:
        conn.execute(
            "INSERT INTO example_payments (provider_reference, customer, amount) VALUES (%s, %s, %s)",
            (reference, request["customer"], request["amount"]),
        )
        succeed(conn, "charge_card", key, claim_id, body, "payment", reference)
        commit(conn)


@contextmanager
def fenced():
    """Says LeaseLost where succeed, fail or renew say that the claim is not ours any more."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate in ("P4010", "P4011", "P4012"):
            raise LeaseLost from error
        raise


# --- the calls, thin ----------------------------------------------------------------------------------


def claim(conn, scope, key, request, lease=None):
    try:
        return conn.cursor(row_factory=namedtuple_row).execute(
            "SELECT * FROM once.claim(p_scope => %s, p_key => %s,"
            " p_fingerprint => once.fingerprint(%s::jsonb), p_lease => %s::interval)",
            (scope, key, json.dumps(request), lease),
        ).fetchone()
    except psycopg.Error as error:
        if error.sqlstate == "P4002":
            raise Conflict("the key was used before with another payload") from error
        raise


def succeed(conn, scope, key, claim_id, body, result_type, result_id):
    conn.execute(
        "SELECT once.succeed(p_scope => %s, p_key => %s, p_claim_id => %s, p_response_body => %s,"
        " p_response_code => 201, p_result_type => %s, p_result_id => %s)",
        (scope, key, claim_id, body, result_type, result_id),
    )


def observed(found):
    """The answer of an intent that is not ours to run."""
    match found.kind:
        case "replay_success":
            return found.response_body
        case "final_failure":
            raise Failed(found.failure_code, found.failure_message)
        case "processing_active":
            raise InProgress(found.retry_after_ms)
        case "uncertain":
            raise NeedsSettling
        case "result_expired":
            raise ResultExpired
        case other:
            raise RuntimeError(f"a kind of claim that this program does not know: {other}")


def commit(conn):
    """COMMIT, and only a real one returns.

    Not conn.commit(), and not the end of conn.transaction(): to the COMMIT of an aborted transaction
    PostgreSQL answers ROLLBACK without an error, and psycopg 3.3 does not look at that answer. An effect
    whose error somebody caught on the way would be reported as done.
    """
    try:
        tag = conn.execute("COMMIT").statusmessage
    except psycopg.OperationalError as error:
        # 57P01 too: the server may say that it stops after it has committed.
        if conn.closed or conn.broken:
            raise InDoubt from error
        raise
    if tag != "COMMIT":
        raise RuntimeError(f"the transaction was not committed: the server answered {tag}")


def resolve(pool, scope, key, claim_id):
    """What became of a COMMIT that was not answered, asked of the intent's row: True, False, or None (cannot tell).

    Over a new connection: those that wait in the pool may be as dead as the one that was lost.
    """
    for attempt in range(1, RESOLVE_ATTEMPTS_MAX + 1):
        try:
            with psycopg.connect(pool.conninfo, autocommit=True) as conn:
                return conn.execute(
                    "SELECT once.resolve(p_scope => %s, p_key => %s, p_claim_id => %s)", (scope, key, claim_id)
                ).fetchone()[0]
        except psycopg.OperationalError:
            # 55P03: the lost transaction is still open. Or the server is still away (a restart, a failover).
            if attempt == RESOLVE_ATTEMPTS_MAX:
                raise InDoubt("not resolved yet: ask again with the same key")
            back_off(attempt)


def retrying(transaction):
    """Runs a whole transaction again after a serialization failure or a deadlock, a bounded number of times.

    The whole of it, from the claim on: after 40001 another attempt may have won, and only a new claim sees it.
    """
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            return transaction()
        except (errors.SerializationFailure, errors.DeadlockDetected):
            if attempt == ATTEMPTS_MAX:
                raise
            back_off(attempt)


def back_off(attempt):
    # Full jitter: rivals that collided once must not come back in step.
    time.sleep(random.uniform(0, min(BACKOFF_MS_MAX, 10 * 2**attempt)) / 1000)


def connect(url, size=20):
    # Behind PgBouncer before 1.21 in transaction mode, add kwargs={"prepare_threshold": None}.
    return ConnectionPool(url, min_size=1, max_size=size, open=True)


def main():
    url = os.environ.get("DATABASE_URL")
    if not url:
        sys.exit("DATABASE_URL is not set: start a database with `pgonce up`, which prints it")
    if "--self-test" in sys.argv or "--crash-after-insert" in sys.argv:
        import selftest

        return selftest.main(url, sys.argv)
    if len(sys.argv) != 4 or not sys.argv[3].isdigit():
        sys.exit("usage: orders.py KEY CUSTOMER AMOUNT | orders.py --self-test")
    with connect(url, size=1) as pool:
        setup(pool)
        print(create_order(pool, sys.argv[1], {"customer": sys.argv[2], "amount": int(sys.argv[3])}).decode())
    return 0


if __name__ == "__main__":
    # Imported under its own name, so that the self-test's exceptions are these and not a second copy.
    import orders

    sys.exit(orders.main())
