-- The one place where pgonce reads the time: the database's clock, moving inside a transaction (trap 7).
-- Inlined by the planner, so it costs nothing; tests replace it to travel.
CREATE OR REPLACE FUNCTION once.clock() RETURNS timestamptz
LANGUAGE sql VOLATILE AS 'SELECT pg_catalog.clock_timestamp()';
