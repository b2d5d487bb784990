-- How long from now until then, for callers that must not trust their own clock. NULL: for ever.
CREATE OR REPLACE FUNCTION once.expires_in_ms(p_expires timestamptz, p_now timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_expires > p_now THEN pg_catalog.floor(pg_catalog.date_part('epoch', p_expires - p_now) * 1000)::bigint
                WHEN p_expires <= p_now THEN 0 END $$;
