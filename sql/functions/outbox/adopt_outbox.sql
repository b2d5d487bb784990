-- Makes this database the log's home, after a dump was restored or the cluster was upgraded: numbers the log anew in this
-- database's transactions. Delivered is only what the old cursors prove: a row from before the restore that every
-- cursor had seen. All else is sent again, under its old ids. Returns how many that are.
CREATE OR REPLACE FUNCTION once.adopt_outbox(p_actor text, p_reason text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_restored bigint;
    v_left bigint;
BEGIN
    PERFORM once.check_operator(p_actor, p_reason);
    LOCK TABLE once.outbox, once.lane, once.outbox_home IN EXCLUSIVE MODE; -- no emit comes between; they wait
    -- The transaction that restored the home row, as a full xid: rows that were emitted here have later ones. Restored rows
    -- with numbers that look later cannot be told apart, and are sent again.
    SELECT (pg_snapshot_xmax(pg_current_snapshot())::text::bigint
            - ((pg_snapshot_xmax(pg_current_snapshot())::text::bigint - h.xmin::text::bigint) & 4294967295)) INTO v_restored
    FROM once.outbox_home h;
    UPDATE once.outbox o SET xid = CASE
        WHEN o.xid::text::bigint < v_restored AND NOT EXISTS (SELECT FROM once.lane l WHERE NOT pg_visible_in_snapshot(o.xid, l.delivered))
        THEN '3'::xid8 ELSE pg_current_xact_id() END;
    SELECT count(*) INTO v_left FROM once.outbox o WHERE o.xid = pg_current_xact_id();
    -- Everything before this transaction, and not it: pg_current_snapshot() would count its own number as seen.
    UPDATE once.lane l SET delivered = format('%1$s:%1$s:', pg_current_xact_id())::pg_snapshot, target = NULL, position = NULL, owner = NULL, claim_id = NULL, leased_until = NULL;
    DELETE FROM once.relay;
    PERFORM once.settle_home();
    INSERT INTO once.audit (actor, action, tenant, scope, key, reason)
    VALUES (p_actor, 'outbox:adopt', '', 'outbox', v_left || ' messages to be sent again', p_reason);
    RETURN v_left;
END $$;
