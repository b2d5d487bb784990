-- Whether a row counts as absent: expired-but-not-purged behaves exactly like purged. A tombstone keeps
-- a succeeded intent known beyond its answer.
CREATE OR REPLACE FUNCTION once.is_gone(p_row once.intent, p_now timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT p_row.expires_at IS NOT NULL AND p_row.expires_at <= p_now
       AND (p_row.tombstone_until IS NULL OR p_row.tombstone_until <= p_now) $$;
