-- A relay says that it is alive, keeps the lanes that it has, and takes free ones up to its share. Returns all that are its,
-- each with its fence and its cursor, and the share: who has more gives the rest back when it has nothing under way
-- (once.drop_lanes). A lane changes hands only when it was given back or its lease is over, and gets a new fence then.
CREATE OR REPLACE FUNCTION once.hold_lanes(p_sink text, p_relay text, p_lease interval DEFAULT '15 seconds')
RETURNS TABLE (lane smallint, claim_id uuid, delivered text, target text, "position" bigint, share int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_now timestamptz;
    v_share int;
BEGIN
    PERFORM once.check_home();
    IF (p_lease BETWEEN interval '1 second' AND interval '1 hour') IS NOT TRUE OR (octet_length(p_relay) BETWEEN 1 AND 255) IS NOT TRUE THEN
        RAISE EXCEPTION 'a relay needs a name, and a lease from 1 second to 1 hour' USING ERRCODE = 'P4040';
    END IF;
    -- One at a time for a sink: shares are counted and lanes taken by what all others have said.
    PERFORM FROM once.sink s WHERE s.sink = p_sink FOR UPDATE;
    v_now := once.clock();
    INSERT INTO once.relay (sink, relay, seen_until) VALUES (p_sink, p_relay, v_now + p_lease)
    ON CONFLICT ON CONSTRAINT relay_pkey DO UPDATE SET seen_until = excluded.seen_until;
    DELETE FROM once.relay r WHERE r.sink = p_sink AND r.seen_until <= v_now;
    UPDATE once.lane l SET leased_until = v_now + p_lease WHERE l.sink = p_sink AND l.owner = p_relay;
    v_share := (SELECT ceil(count(*) / (SELECT count(*) FROM once.relay r WHERE r.sink = p_sink)::numeric)
                FROM once.lane l WHERE l.sink = p_sink);
    UPDATE once.lane l SET owner = p_relay, claim_id = gen_random_uuid(), leased_until = v_now + p_lease, updated_at = v_now
    WHERE l.sink = p_sink AND l.lane IN (
        SELECT f.lane FROM once.lane f
        WHERE f.sink = p_sink AND (f.owner IS NULL OR f.leased_until <= v_now) AND f.owner IS DISTINCT FROM p_relay
        ORDER BY f.lane
        LIMIT greatest(0, v_share - (SELECT count(*) FROM once.lane m WHERE m.sink = p_sink AND m.owner = p_relay)));
    RETURN QUERY SELECT l.lane, l.claim_id, l.delivered::text, l.target::text, l.position, v_share
        FROM once.lane l WHERE l.sink = p_sink AND l.owner = p_relay ORDER BY l.lane;
END $$;
