-- A time as CloudEvents and everybody else writes it, whatever the session's zone and style.
CREATE OR REPLACE FUNCTION once.message_time(p_at timestamptz) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT pg_catalog.to_char(p_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') $$;
