-- One order, created once: the protocol by hand, in psql.
--
--     psql "$DATABASE_URL" -f orders.sql
--
-- Any language does the same: these calls, in a transaction of its own. Can be run again and again; every run
-- uses new keys. Exits with 3 if something is not as the comments say.
\set ON_ERROR_STOP on
\set QUIET on
\set VERBOSITY terse
\pset footer off
\pset null '(null)'

CREATE FUNCTION pg_temp.expect(p_holds boolean, p_what text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    IF p_holds IS NOT TRUE THEN
        RAISE EXCEPTION 'not so: %', p_what;
    END IF;
    RETURN p_what;
END $$;
SET client_min_messages = warning; -- "already exists, skipping" at the second run
CREATE TABLE IF NOT EXISTS example_orders (id uuid PRIMARY KEY, customer text NOT NULL, amount bigint NOT NULL);
SELECT once.define_scope(p_scope => 'create_order', p_policy => '{"retention": "30d", "waiters_max": 32}') \g /dev/null

-- The key names the intent ("this checkout"), not the attempt: every retry sends the same one.
SELECT 'checkout-' || gen_random_uuid() AS key, 'checkout-' || gen_random_uuid() AS other_key,
       'charge-' || gen_random_uuid() AS charge_key, 'c-' || gen_random_uuid() AS customer \gset
SELECT jsonb_build_object('customer', :'customer', 'amount', 1999) AS request \gset

\echo
\echo '1. Claim, effect, outcome: one transaction, so a crash leaves all of it or nothing.'
BEGIN;
SELECT kind, claim_id, attempt_count
FROM once.claim(p_scope => 'create_order', p_key => :'key', p_fingerprint => once.fingerprint(:'request'::jsonb));
-- A rival's claim would now wait until we are done. Our own second one does not wait for ourselves:
SELECT kind AS again FROM once.claim(
    p_scope => 'create_order', p_key => :'key', p_fingerprint => once.fingerprint(:'request'::jsonb)) \gset
SELECT pg_temp.expect(:'again' = 'processing_active', 'a claim made twice in one transaction is in progress') AS ok;
ROLLBACK;
-- Rolled back, it is as if nobody had ever claimed. Now for real, keeping the claim id in a variable:
BEGIN;
SELECT kind, claim_id FROM once.claim(
    p_scope => 'create_order', p_key => :'key', p_fingerprint => once.fingerprint(:'request'::jsonb)) \gset
SELECT pg_temp.expect(:'kind' = 'new_claim', 'the first claim is new: ours to run') AS ok;
INSERT INTO example_orders (id, customer, amount) VALUES (gen_random_uuid(), :'customer', 1999)
    RETURNING id AS order_id \gset
SELECT once.succeed(p_scope => 'create_order', p_key => :'key', p_claim_id => :'claim_id',
    p_response_body => convert_to(json_build_object('id', :'order_id', 'amount', 1999)::text, 'UTF8'),
    p_response_code => 201, p_result_type => 'order', p_result_id => :'order_id') \g /dev/null
-- A program looks at the answer to COMMIT: after an error it is ROLLBACK, and that is not an error.
COMMIT;

\echo
\echo '2. The client timed out and sends it again: the stored bytes, no second row, nothing written.'
SELECT kind, response_code, convert_from(response_body, 'UTF8') AS response_body, result_id
FROM once.claim(p_scope => 'create_order', p_key => :'key', p_fingerprint => once.fingerprint(:'request'::jsonb));
SELECT kind, result_id FROM once.claim(
    p_scope => 'create_order', p_key => :'key', p_fingerprint => once.fingerprint(:'request'::jsonb)) \gset
SELECT pg_temp.expect(:'kind' = 'replay_success' AND :'result_id' = :'order_id', 'a retry replays') AS ok;
SELECT pg_temp.expect(count(*) = 1, 'there is one order') AS ok FROM example_orders WHERE customer = :'customer';

\echo
\echo '3. The same key with another payload: P4002, and neither the effect nor the stored answer.'
-- (psql prints the error; the script goes on to look at its code.)
\set ON_ERROR_STOP off
SELECT kind FROM once.claim(
    p_scope => 'create_order', p_key => :'key', p_fingerprint => once.fingerprint('{"customer": "other", "amount": 5}'));
\set conflict :SQLSTATE
\set ON_ERROR_STOP on
SELECT pg_temp.expect(:'conflict' = 'P4002', 'another payload is a conflict') AS ok;

\echo
\echo '4. A business rule says no. Roll back first, then record it in a transaction of its own.'
BEGIN;
SELECT kind FROM once.claim(
    p_scope => 'create_order', p_key => :'other_key', p_fingerprint => once.fingerprint(:'request'::jsonb));
INSERT INTO example_orders (id, customer, amount) VALUES (gen_random_uuid(), :'customer', 1999);
-- … and here the program finds that the customer has no credit left. Noted inside this transaction, the failure
-- would be gone with it.
ROLLBACK;
SELECT kind AS recorded_as FROM once.record_failure(
    p_scope => 'create_order', p_key => :'other_key', p_fingerprint => once.fingerprint(:'request'::jsonb),
    p_retryable => false, p_code => 'credit_exceeded', p_message => 'the limit is reached');
SELECT kind, failure_code FROM once.claim(
    p_scope => 'create_order', p_key => :'other_key', p_fingerprint => once.fingerprint(:'request'::jsonb)) \gset
SELECT pg_temp.expect(:'kind' = 'final_failure' AND :'failure_code' = 'credit_exceeded',
    'every retry gets the same failure') AS ok;
SELECT pg_temp.expect(count(*) = 1, 'there is still one order') AS ok FROM example_orders WHERE customer = :'customer';

\echo
\echo '5. Work that cannot live in one transaction: the claim commits first, with a lease.'
SELECT kind, claim_id FROM once.claim(p_scope => 'charge_by_hand', p_key => :'charge_key',
    p_fingerprint => once.fingerprint(:'request'::jsonb), p_mode => 'leased', p_lease => '30 seconds') \gset
SELECT pg_temp.expect(:'kind' = 'new_claim', 'leased to us') AS ok;
SELECT kind, retry_after_ms FROM once.claim(p_scope => 'charge_by_hand', p_key => :'charge_key',
    p_fingerprint => once.fingerprint(:'request'::jsonb), p_mode => 'leased') \gset
SELECT pg_temp.expect(:'kind' = 'processing_active' AND :retry_after_ms > 0, 'a second claimer is told to come again') AS ok;
-- … the call to the provider goes on; we want more time. Late, or after a takeover, this raises P4012.
SELECT once.renew(p_scope => 'charge_by_hand', p_key => :'charge_key', p_claim_id => :'claim_id',
    p_lease => '1 minute') > clock_timestamp() + interval '50 seconds' AS longer \gset
SELECT pg_temp.expect(:'longer', 'renewed') AS ok;
-- The outcome, under the claim's fence: after a takeover this raises P4010, and whatever else is in the
-- transaction goes with it.
SELECT once.succeed(p_scope => 'charge_by_hand', p_key => :'charge_key', p_claim_id => :'claim_id',
    p_response => '{"reference": "ref-1"}') \g /dev/null
\set ON_ERROR_STOP off
SELECT once.succeed(p_scope => 'charge_by_hand', p_key => :'charge_key', p_claim_id => :'claim_id');
\set fenced :SQLSTATE
\set ON_ERROR_STOP on
SELECT pg_temp.expect(:'fenced' = 'P4010', 'a claim completes once') AS ok;
\echo 'all as expected'
